"""What a check against float64 found: plain data."""

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from fusekit.shown import Shown

if TYPE_CHECKING:
    import pandas

CHECKS = ("outputs", "gradients", "state dict", "top-1", "routing", "generation", "site")


@dataclass(frozen=True)
class Check:
    """One comparison of fused with unfused.

    `what` is `outputs`, `gradients`, `state dict`, `top-1`, `routing`, `generation` or `site`. Errors are
    absolute, against the float64 run: the largest and the root of the mean square. `same_bits`:
    fused equals unfused bit for bit, which is reported and not required.
    """

    what: str
    name: str
    fusion: str
    ok: bool
    detail: str
    fused_max: float | None = None
    unfused_max: float | None = None
    fused_rms: float | None = None
    unfused_rms: float | None = None
    same_bits: bool | None = None


@dataclass(frozen=True)
class LayerError:
    """The error against float64 of one layer's output, down the depth of the model."""

    name: str
    unfused_max: float
    fused_max: float
    unfused_rms: float
    fused_rms: float


@dataclass(frozen=True)
class NotRun:
    """Checks that were left out for one reason.

    `what` names them (`outputs, gradients`), or is `all checks`. `excused` when nothing is missing
    for it: the caller left them out on purpose, or they do not apply to the model (text of one
    that writes none).
    """

    what: str
    reason: str
    excused: bool


@dataclass(frozen=True, repr=False, eq=False)
class VerifyReport(Shown):
    """Every check of a plan, the error down the depth, and what was not run.

    `.ok` is True when every check passed, and every one that applies to the model was run, unless the
    caller left it out.
    """

    model_name: str
    dtype: str
    device: str
    sites: int
    checks: tuple[Check, ...]
    layers: tuple[LayerError, ...]
    not_run: tuple[NotRun, ...]
    inputs: str

    @property
    def ok(self) -> bool:
        return all(check.ok for check in self.checks) and all(left.excused for left in self.not_run)

    def to_frame(self) -> "pandas.DataFrame":
        """One row a check; the columns are the fields of `Check`."""
        import pandas as pd

        columns = list(Check.__dataclass_fields__)
        return pd.DataFrame([asdict(check) for check in self.checks], columns=columns)
