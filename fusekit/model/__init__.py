"""The model: its plan, applying and reverting it, merged storage, and the check against float64."""

from fusekit.model.apply import Fused, fuse, revert
from fusekit.model.plan import Plan, Site, plan
from fusekit.model.report import Check, LayerError, NotRun, VerifyReport
from fusekit.model.storage import MergedLinear

__all__ = [
    "Check",
    "Fused",
    "LayerError",
    "MergedLinear",
    "NotRun",
    "Plan",
    "Site",
    "VerifyReport",
    "fuse",
    "plan",
    "revert",
]
