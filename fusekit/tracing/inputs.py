"""Made-up inputs: what parameters of a forward mean by their names, and tensors of likely shapes.

Names and meanings are those of Transformers (its documentation of each model's forward); a size
stands on the module, in its configuration, or in one that its configuration holds.
"""

import contextlib
import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn
from torch.utils._python_dispatch import TorchDispatchMode

from fusekit.tracing.skeleton import Skeleton

Inputs = tuple[tuple[Any, ...], dict[str, Any]]  # what a forward is called with: args, kwargs

BATCH, LENGTH = 2, 7  # unlike each other and unlike most widths, so that shapes tell them apart


def reference_weight(module: nn.Module) -> torch.Tensor | None:
    """A weight whose last size is the module's hidden size: it sizes a made-up input.

    That of the first linear in the tree, else the first parameter of one or two dimensions, else None.

    >>> reference_weight(nn.Sequential(nn.LayerNorm(4), nn.Linear(6, 5))).shape
    torch.Size([5, 6])
    """
    for child in module.modules():
        weight = getattr(child, "weight", None) if isinstance(child, nn.Linear) else None
        if type(child).__name__ == "Conv1D" and isinstance(child.__dict__.get("nx"), int):
            weight = child.weight.T  # Transformers' linear with its weight laid out the other way
        if isinstance(weight, torch.Tensor):
            return weight
    for parameter in module.parameters():
        if parameter.dim() in (1, 2):
            return parameter
    return None


def inputs_of_modules(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Inputs]:
    """What each module of `model` is first called with, when `model` is called with these inputs.

    Found by running a meta skeleton, so values are lost: only shapes and dtypes count, and tests of
    values go the usual way (`_Usual`). Where the model cannot be run so to its end, modules that it
    did not reach are missing.
    """
    found: dict[str, Inputs] = {}

    def call(module: nn.Module, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if path not in found:
            found[path] = _as_they_are((args, kwargs))
        return module.forward(*args, **kwargs)

    skeleton = Skeleton(model, call)
    given: Inputs = skeleton.value((args, kwargs))
    with torch.no_grad(), torch.device("meta"), _Usual(), contextlib.suppress(Exception):
        skeleton.module(*given[0], **given[1])
    return found


def _as_they_are(inputs: Inputs) -> Inputs:
    """A copy: a cache among them is filled by the call, and would tell of a later one."""
    try:
        return copy.deepcopy(inputs)
    except Exception:  # an object that cannot be copied
        return inputs


class _Usual(TorchDispatchMode):
    """While active, a test of what has no value goes the way that it most often goes.

    `all(...)` is true (no token is padding, no two sequences share a row), any other test false.
    Experts multiplied in groups, which PyTorch's meta device knows in bfloat16 only, have their shape
    in any dtype.
    """

    def __init__(self) -> None:
        super().__init__()
        self._all: list[torch.Tensor] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        first = args[0] if args else None
        if isinstance(first, torch.Tensor) and first.is_meta:
            if func is torch.ops.aten._local_scalar_dense.default and first.dtype is torch.bool:
                return any(first is one for one in self._all)
            if func is torch.ops.aten._grouped_mm.default and first.dim() == 2 and args[1].dim() == 3:
                return first.new_empty(first.shape[0], args[1].shape[-1])
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket is torch.ops.aten.all:
            self._all.append(result)
        return result


@dataclass(frozen=True)
class Wanted:
    """What a parameter gets: a tensor of `shape`, or `count` of these.

    `dtype` None is the module's own. Whole numbers lie in [0, `below`), or count up where that is None.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype | None = None
    below: int | None = None
    count: int = 0

    @property
    def number(self) -> int:
        return self.count or 1


@dataclass(frozen=True)
class Guess:
    """One way to make up inputs: which optional parameters get a value, and how a rotary table lies."""

    optional: frozenset[str] = frozenset()
    batched: bool = True  # a rotary table is [batch, length, width], else [length, width]
    half: bool = False  # it holds each pair's angle once
    added: bool = False  # there is none: positions are added to the states


def guesses(function: Callable[..., Any]) -> Iterator[Guess]:
    """Ways to make up inputs for `function`, the most plain first."""
    parameters = inspect.signature(function).parameters
    names = set(parameters)
    yield Guess()
    usual = frozenset(names & OFTEN_NEEDED)
    if usual:
        yield Guess(usual)
    if names & ENCODED:
        yield Guess(usual | (names & ENCODED))
    if "position_embeddings" in names:
        yield Guess(usual, batched=False)
        yield Guess(usual, half=True)
        if "tuple" not in str(parameters["position_embeddings"].annotation).lower():
            yield Guess(usual, added=True)


def made_up_inputs(
    module: nn.Module, function: Callable[..., Any], guess: Guess
) -> tuple[dict[str, Any], list[str]]:
    """Values for the parameters of `function` that need one, and a sentence about each.

    A required parameter (the first, if none is) gets a float tensor [batch, length, hidden], unless
    its name is one to which Transformers always gives another meaning.
    """
    sizes = Sizes(module, BATCH, LENGTH, guess)
    values: dict[str, Any] = {}
    said: list[str] = []
    parameters = declared(function)
    needed = {parameter.name for parameter in parameters if parameter.default is parameter.empty}
    # A forward that declares every input optional still works on one: its first.
    needed = needed or {parameter.name for parameter in parameters[:1]}
    for parameter in parameters:
        if parameter.name not in needed | guess.optional:
            said.append(f"{parameter.name} is left out: {parameter.default!r}")
            continue
        wanted = sizes.states() if parameter.name not in LEFT_OUT else None
        if isinstance(module, nn.Embedding):
            wanted = sizes.ids()
        elif parameter.name in CONVENTIONS:
            wanted = CONVENTIONS[parameter.name](sizes)
        value = _empty(wanted, sizes.dtype)
        values[parameter.name] = value
        said.append(f"{parameter.name} is {_describe(value)}")
    return values, said


def declared(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """The parameters of a forward without `self`, `*args` and `**kwargs`."""
    return [
        parameter
        for parameter in list(inspect.signature(function).parameters.values())[1:]
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]


class Sizes:
    """The sizes that made-up inputs of one module have."""

    def __init__(self, module: nn.Module, batch: int, length: int, guess: Guess):
        self.module, self.batch, self.guess = module, batch, guess
        limits = self._all("max_position_embeddings", "max_target_positions", "n_positions")
        self.length = min([length, *limits])
        weight = reference_weight(module)
        self.hidden = weight.shape[-1] if weight is not None else 16
        self.dtype = weight.dtype if weight is not None and weight.is_floating_point() else torch.float32

    def setting(self, *names: str) -> int | None:
        """The first of `names` that is a positive number: on the module, in its configuration, on a child."""
        return next(iter(self._all(*names)), None)

    def _all(self, *names: str) -> Iterator[int]:
        for name in names:
            for holder in self._holders():
                value = holder.get(name)
                if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                    yield value

    def _holders(self) -> Iterator[Mapping[str, Any]]:
        """What settings are read from: plain attributes, so that no code of the model runs."""
        yield self.module.__dict__
        yield from _configurations(self.module.__dict__.get("config"))
        for child in self.module.modules():
            yield child.__dict__

    def states(self) -> Wanted:
        return Wanted((self.batch, self.length, self.hidden))

    def ids(self) -> Wanted:
        return Wanted((self.batch, self.length), torch.long, self.vocabulary())

    def vocabulary(self) -> int:
        """A number of tokens that no part of the model exceeds; without one, the first embedding's rows."""
        rows = (child.num_embeddings for child in self.module.modules() if isinstance(child, nn.Embedding))
        return min(self._all("vocab_size"), default=None) or next(rows, 2)

    def rotary_width(self) -> int:
        """How many features of a head a rotary table turns."""
        own = self.setting("qk_rope_head_dim", "rotary_ndims", "rotary_dim", "rotary_emb_dim")
        if own is not None:
            return own
        head = self.setting("head_dim", "head_size", "attention_head_size")
        if head is None:
            heads = self.setting("num_attention_heads", "num_heads", "n_head")
            head = self.hidden // heads if heads else self.hidden
        return int(head * self._turned())

    def _turned(self) -> float:
        """The part of a head that is turned, where a configuration says so."""
        for holder in self._holders():
            for name in ("rope_parameters", "rope_scaling"):
                held = holder.get(name)
                if isinstance(held, dict) and isinstance(held.get("partial_rotary_factor"), float):
                    return held["partial_rotary_factor"]
            for name in ("partial_rotary_factor", "rotary_pct"):
                if isinstance(holder.get(name), float):
                    return holder[name]
        return 1.0

    def image(self) -> Wanted:
        sides = next((holder["image_size"] for holder in self._holders() if holder.get("image_size")), 224)
        height, width = sides if isinstance(sides, (tuple, list)) else (sides, sides)
        return Wanted(
            (self.batch, self.setting("num_channels", "in_channels", "in_chans") or 3, height, width)
        )

    def features(self) -> Wanted:
        """A spectrogram: an encoder with a stride of two reads exactly twice its number of positions."""
        frames = 2 * (self.setting("max_source_positions") or self.length)
        return Wanted((self.batch, self.setting("num_mel_bins", "feature_size") or 80, frames))


def _configurations(value: Any) -> Iterator[Mapping[str, Any]]:
    """The attributes of a configuration, and of those that it holds."""
    held = getattr(value, "__dict__", None)
    if isinstance(held, dict):
        yield held
        for inner in held.values():
            if type(inner).__name__.endswith("Config"):
                yield from _configurations(inner)


Meaning = Callable[[Sizes], Wanted]


def _rotary(sizes: Sizes) -> Wanted:
    if sizes.guess.added:
        return sizes.states()
    width = sizes.rotary_width() // (2 if sizes.guess.half else 1)
    shape = (sizes.batch, sizes.length, width) if sizes.guess.batched else (sizes.length, width)
    return Wanted(shape, count=2)


def _encoded(sizes: Sizes) -> Wanted:
    width = sizes.setting("cross_attention_hidden_size", "encoder_hidden_size") or sizes.hidden
    return Wanted((sizes.batch, sizes.length + 2, width))


def _audio(sizes: Sizes) -> Wanted:
    bins, frames = sizes.setting("num_mel_bins"), sizes.setting("max_length")
    return Wanted((sizes.batch, frames, bins) if bins and frames else (sizes.batch, 4000))


CONVENTIONS: dict[str, Meaning] = {
    "hidden_states": lambda sizes: sizes.states(),
    "inputs_embeds": lambda sizes: sizes.states(),
    "input_ids": lambda sizes: sizes.ids(),
    "decoder_input_ids": lambda sizes: sizes.ids(),
    "token_type_ids": lambda sizes: Wanted((sizes.batch, sizes.length), torch.long, 1),
    "position_ids": lambda sizes: Wanted((sizes.batch, sizes.length), torch.long),
    "cache_position": lambda sizes: Wanted((sizes.length,), torch.long),
    "pixel_values": lambda sizes: sizes.image(),
    "input_features": lambda sizes: sizes.features(),
    "input_values": _audio,
    "position_embeddings": _rotary,
    "encoder_hidden_states": _encoded,
    "key_value_states": _encoded,
}
# Required by some forwards, and None all the same.
LEFT_OUT = frozenset(
    {
        "attention_mask", "causal_mask", "encoder_attention_mask", "decoder_attention_mask",
        "past_key_values", "past_key_value", "layer_past", "cache", "head_mask",
    }
)  # fmt: skip
# Declared optional by forwards that read them all the same.
OFTEN_NEEDED = frozenset(
    {"position_embeddings", "input_ids", "decoder_input_ids", "pixel_values", "input_features"}
)
ENCODED = frozenset({"encoder_hidden_states", "key_value_states"})  # what another sequence was turned into


def _empty(wanted: Wanted | None, dtype: torch.dtype) -> Any:
    if wanted is None:
        return None
    made = [
        torch.empty(wanted.shape, dtype=wanted.dtype or dtype, device="meta") for _ in range(wanted.number)
    ]
    return tuple(made) if wanted.count else made[0]


def _describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        return f"a made-up {dtype} tensor {list(value.shape)}"
    if isinstance(value, tuple):
        return f"{len(value)} of these: {_describe(value[0])}"
    return repr(value)
