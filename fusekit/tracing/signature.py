"""What a module class says of its inputs: the signature of its forward, nothing traced, nothing run."""

import inspect
from collections.abc import Mapping
from types import MappingProxyType

from fusekit.errors import FusekitError

EXTRA = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def forward_parameters(cls: type) -> Mapping[str, inspect.Parameter]:
    """The parameters of the forward of `cls` by name, `self` among them, in order.

    Those that `inspect.signature` gives: of the innermost function under decorators that say what
    they wrap. Empty where it cannot be inspected (no forward, one without a signature). Raises
    `FusekitError` when `cls` is no class.

    Teaching-only: the library asks the one forward that really runs.

    >>> import torch
    >>> list(forward_parameters(torch.nn.Bilinear))
    ['self', 'input1', 'input2']
    """
    found = _signature(cls)
    return MappingProxyType({}) if found is None else found.parameters


def forward_input_count(cls: type) -> int:
    """How many inputs the forward of `cls` declares: without `self`, `*args` and `**kwargs`.

    1 where it cannot be inspected. It asks the signature alone and never depends on a trace. Raises
    `FusekitError` when `cls` is no class.

    Teaching-only: the library makes up an input for each parameter that needs one.

    >>> import torch
    >>> forward_input_count(torch.nn.Bilinear), forward_input_count(torch.nn.Identity)
    (2, 1)
    """
    found = _signature(cls)
    if found is None:
        return 1
    parameters = list(found.parameters.values())
    own = inspect.getattr_static(cls, "forward")
    is_bound = hasattr(type(own), "__get__") and not isinstance(own, (staticmethod, classmethod))
    if is_bound and parameters and parameters[0].kind not in EXTRA:
        del parameters[0]  # self, whatever it is called
    return sum(parameter.kind not in EXTRA for parameter in parameters)


def _signature(cls: type) -> inspect.Signature | None:
    if not isinstance(cls, type):
        raise FusekitError(f"{type(cls).__name__} is asked about through its class: pass type(module)")
    try:
        return inspect.signature(cls.forward)  # type: ignore[attr-defined]
    except (AttributeError, TypeError, ValueError):
        return None
