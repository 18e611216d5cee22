"""What is not fused, and why: refusals and their reasons."""

from dataclasses import dataclass

from fusekit.shown import Shown

REASONS: dict[str, str] = {
    "adapter": "a part is wrapped by an adapter, which computes more than the linear",
    "called-twice": "a part is called more than once, and the calls cannot be told apart",
    "decorated": "a decorator hides the function that runs",
    "device-mismatch": "the parts lie on different devices",
    "different-branches": "the parts are not always evaluated together",
    "different-context": "the parts run under different grad modes or autocast states",
    "different-inputs": "the parts do not read the same value",
    "dtype-mismatch": "the parts have different dtypes",
    "hooked": "a part carries hooks, which would no longer be called",
    "inference-tensor": "a part's weight was made in inference mode, and its data cannot be replaced",
    "input-may-be-written": "something runs between the parts that is not known to leave the input alone",
    "input-rebound": "the name of the input is stored again between the parts",
    "input-written": "the input is written between the parts",
    "instance-forward": "another tool put a forward on the instance",
    "layout": "a part lies in memory, or its output is used, in a way that merging would change",
    "module-escapes": "a part is used other than by a plain call",
    "no-source": "there is no source text for the code that runs",
    "not-this-function": "it looks like the fused function, and is not exactly that",
    "offloaded": "the weights of a part are kept elsewhere and come in with its call",
    "overlapping": "another fusion takes a part of it, or its place in the forward",
    "parametrized": "a weight is computed by a parametrization",
    "quantized": "a part's weight is quantized or not a plain floating tensor",
    "sharded": "the weights of a part are shared out over several processes",
    "source-is-stale": "the file was edited since the code was imported",
    "subclass": "a part is a subclass of the plain module, which may compute more",
    "tied": "a part's module or weight is also used elsewhere",
    "too-long": "the forward is longer, or nested deeper, than is looked through",
    "trace-stopped": "the forward could not be followed to its end",
}


@dataclass(frozen=True, repr=False)
class Refusal(Shown):
    """One place where a fusion almost applied, and what decided against it.

    `name` is the path of the module in the model, `reason` one of `REASONS`, `message` a
    sentence, `path` and `line` the place in the source that decided (None where it is the
    module's state and not its source).
    """

    name: str
    fusion: str
    reason: str
    message: str
    path: str | None = None
    line: int | None = None
    parts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.reason not in REASONS:
            raise ValueError(f"{self.reason!r} is no reason of a refusal: use one of {sorted(REASONS)}")
