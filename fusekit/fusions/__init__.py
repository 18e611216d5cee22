"""What a fusion is, what it finds in a forward, and the one prover behind all of them."""

from fusekit.fusions.analysis import Analysis, analyse
from fusekit.fusions.match import FUSIONS, Match, Objection, Refused
from fusekit.fusions.own import Forward, OwnFusion, fusion, own_fusions
from fusekit.fusions.prover import Proof, movable
from fusekit.fusions.refusal import REASONS, Refusal

__all__ = [
    "FUSIONS",
    "REASONS",
    "Analysis",
    "Forward",
    "Match",
    "Objection",
    "OwnFusion",
    "Proof",
    "Refusal",
    "Refused",
    "analyse",
    "fusion",
    "movable",
    "own_fusions",
]
