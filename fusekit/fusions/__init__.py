"""What a fusion is, what it finds in a forward, and the one prover behind all of them."""

from fusekit.fusions.analysis import FUSIONS, Analysis, analyse
from fusekit.fusions.match import Match, Objection, Refused
from fusekit.fusions.prover import Proof, movable
from fusekit.fusions.refusal import REASONS, Refusal

__all__ = [
    "FUSIONS",
    "REASONS",
    "Analysis",
    "Match",
    "Objection",
    "Proof",
    "Refusal",
    "Refused",
    "analyse",
    "movable",
]
