"""What a fusion finds in a forward: a match, or an objection."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fusekit.forward import Edit

FUSIONS = ("qkv", "kv", "mla", "columns", "glu", "rms_norm", "gated_rms_norm")  # of fusekit itself


@dataclass(frozen=True)
class Match:
    """One place of a class's forward where a fusion applies, the same for all like instances.

    `parts` are the linears whose weights become rows of one storage, kept on the instance as
    `storage`, and `order` the same in the order of their calls, without those that are called only
    where a setting says so; `copied` says that a slice of the
    product will not do for an output. `called` are the submodules that run between the parts: the proof
    has read them, and leans on no hook running with them, and on their `settings` (path, attribute)
    staying as they are: else the parts run where they stand. `activations` must be exactly a known
    activation, without hooks.

    A user's own fusion calls `functions` (name in the rewritten text, function) in the place of the
    submodules `replaced`, whose hooks would no longer be called: they must carry none.
    """

    fusion: str
    parts: tuple[str, ...]
    edits: tuple[Edit, ...]
    line: int
    storage: str | None = None
    order: tuple[str, ...] | None = None
    copied: bool = False
    called: frozenset[str] = field(default=frozenset())
    settings: tuple[tuple[str, str], ...] = ()
    activations: frozenset[str] = field(default=frozenset())
    functions: tuple[tuple[str, Callable[..., Any]], ...] = ()
    replaced: frozenset[str] = field(default=frozenset())

    @property
    def _calls_left_out(self) -> frozenset[str]:
        """The submodules that the rewritten forward no longer calls; a linear that is cut in two it does."""
        return self.replaced | (frozenset(self.parts) if self.storage else frozenset())

    def overlaps(self, other: "Match") -> bool:
        """Whether both take a part, or a place in the text, that only one can have."""
        if not self._calls_left_out.isdisjoint(other._calls_left_out):
            return True
        return any(mine.overlaps(theirs) for mine in self.edits for theirs in other.edits)


@dataclass(frozen=True)
class Objection:
    """Why a fusion that almost applied to a forward does not: a reason code, a sentence, a line."""

    fusion: str
    reason: str
    message: str
    line: int | None
    parts: tuple[str, ...] = ()


class Refused(Exception):
    """Raised inside the prover to end a proof with an objection."""

    def __init__(self, reason: str, message: str, line: int | None):
        super().__init__(message)
        self.reason, self.message, self.line = reason, message, line

    def objection(self, fusion: str, parts: tuple[str, ...]) -> Objection:
        return Objection(fusion, self.reason, self.message, self.line, parts)
