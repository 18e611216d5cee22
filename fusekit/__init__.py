"""fusekit: what in a layer can be fused, whether it is safe, what it looks like after, what it buys.

    import fusekit as fk

    plan = fk.plan(model)        # sites and refusals; nothing is changed
    fused = plan.apply()         # in place
    fused.revert()               # exactly what was there
    plan.verify()                # against float64

In a notebook, `%load_ext fusekit` brings `%fusekit plan model` and its like.
"""

from typing import TYPE_CHECKING, Any

from fusekit.errors import FusekitError
from fusekit.forward import source
from fusekit.fusions import REASONS, fusion
from fusekit.model import Fused, Plan, Site, fuse, plan, revert
from fusekit.model.changes import PlanChanges, compare
from fusekit.model.saved import SavedPlan, load_plan
from fusekit.tracing import aliasing, trace

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

__version__ = "0.1.0"

__all__ = [
    "REASONS",
    "Fused",
    "FusekitError",
    "Plan",
    "PlanChanges",
    "SavedPlan",
    "Site",
    "aliasing",
    "compare",
    "fuse",
    "fusion",
    "load_ipython_extension",
    "load_plan",
    "plan",
    "revert",
    "source",
    "trace",
    "unload_ipython_extension",
]


def load_ipython_extension(shell: "InteractiveShell") -> Any:
    """What `%load_ext fusekit` calls."""
    from fusekit.notebook.magic import load

    load(shell)


def unload_ipython_extension(shell: "InteractiveShell") -> Any:
    """What `%unload_ext fusekit` calls."""
    from fusekit.notebook.magic import unload

    unload(shell)
