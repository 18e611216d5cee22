"""What a forward may write, and which of its values may share storage: for every way through it."""

from fusekit.forward.effects.analysis import Effect, Effects, effects_of, touches
from fusekit.forward.effects.rules import RULES, all_off, on, switched_off
from fusekit.forward.effects.values import Region, Value

__all__ = [
    "RULES",
    "Effect",
    "Effects",
    "Region",
    "Value",
    "all_off",
    "effects_of",
    "on",
    "switched_off",
    "touches",
]
