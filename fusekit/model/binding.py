"""The fused forward is bound by class: a subclass made once for a class and a set of rewrites.

Nothing but merged storage is stored on an instance; giving the class back reverts.
"""

import copy
import copyreg
import weakref
from typing import Any

import torch
import torch.nn as nn

from fusekit import kernels
from fusekit.errors import FusekitError
from fusekit.forward import Edit, ForwardSource, compile_edited, original_class
from fusekit.forward.source import ORIGINAL, FusedForward
from fusekit.fusions import Match
from fusekit.model.storage import MergedLinear, alone

MATCHES = "_fusekit_matches"

_classes: "weakref.WeakValueDictionary[Any, type]" = weakref.WeakValueDictionary()


def applied_matches(module: nn.Module) -> tuple[Match, ...]:
    """The rewrites that the class of `module` carries, none for a module that is not fused."""
    return getattr(type(module), MATCHES, ())


def is_fused(module: nn.Module) -> bool:
    """Whether fusekit gave `module` its class."""
    return MATCHES in type(module).__dict__


def fused_class(cls: type, source: ForwardSource, kernels_name: str, matches: tuple[Match, ...]) -> type:
    """The subclass of `cls` whose forward is `source` with every edit of `matches` made.

    Equal arguments give the same class while it is in use, so that equal layers share one code object.
    """
    key = (cls, source.chain, frozenset(matches))
    found = _classes.get(key)
    if found is None:
        edits = tuple(sorted(edit for match in matches for edit in match.edits))
        functions = {name: function for match in matches for name, function in match.functions}
        found = _make_class(cls, source, {**functions, kernels_name: kernels}, edits, matches)
        _classes[key] = found
    return found


def _make_class(
    cls: type,
    source: ForwardSource,
    names: dict[str, Any],
    edits: tuple[Edit, ...],
    matches: tuple[Match, ...],
) -> type:
    forward = compile_edited(source, edits, names)[0]
    members: dict[str, Any] = {
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        ORIGINAL: cls,
        MATCHES: matches,
        "__reduce_ex__": _reduce_as_original,
    }
    if any(match.storage for match in matches):
        members |= {
            "_apply": _apply_and_settle,
            "_load_from_state_dict": _load_and_settle,
            "state_dict": _state_dict_apart,
            "_replicate_for_data_parallel": _replicate_as_original,
        }
    own_copy = getattr(cls, "__deepcopy__", None)
    by_reduce = any(
        name in base.__dict__
        for base in cls.__mro__
        if base not in (nn.Module, object)
        for name in ("__reduce__", "__reduce_ex__", "__getstate__")
    )
    if own_copy or not by_reduce:  # else a copy is made as a pickle is: of the module as it was
        members["__deepcopy__"] = _deepcopy_fused
    made: type = type(cls)(cls.__name__, (cls,), members)
    # Some bases wrap `forward` in __init_subclass__; the one compiled here is wrapped already.
    made.forward = FusedForward(cls, made, forward)  # type: ignore[attr-defined]
    return made


def storages(module: nn.Module) -> list[MergedLinear]:
    """The merged storages of a fused module."""
    names = [match.storage for match in applied_matches(module) if match.storage]
    return [module.__dict__[name] for name in names if name in module.__dict__]


# -- methods of every fused class -------------------------------------------------------------


def _next_in_line(module: nn.Module) -> Any:
    """`super()` of the fused class, from the functions below that several classes share."""
    return super(_fused_base(module), module)


def _fused_base(module: nn.Module) -> type:
    """The fused class of `module`: its own, or, where another tool subclassed that, the one below."""
    return next(base for base in type(module).__mro__ if MATCHES in base.__dict__)


def _apply_and_settle(self: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
    """`nn.Module._apply` (`.to()`, `.half()`, `.to_empty()`, ...) moves each parameter by itself."""
    result = _next_in_line(self)._apply(*args, **kwargs)
    for storage in storages(self):
        storage.settle()
    return result


def _load_and_settle(self: nn.Module, state_dict: Any, prefix: str, local_metadata: Any, *rest: Any) -> None:
    """`load_state_dict(assign=True)` puts other parameters in the parts, after this is called."""
    if local_metadata.get("assign_to_params_buffers"):
        for storage in storages(self):
            storage.pending = True
    _next_in_line(self)._load_from_state_dict(state_dict, prefix, local_metadata, *rest)


def _state_dict_apart(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The state dict, its tensors in the same memory as ever, each as a storage of its own.

    Savers take tensors of one storage for one tensor, and would keep the first.
    """
    result = _next_in_line(self).state_dict(*args, **kwargs)
    prefix = kwargs.get("prefix", args[1] if len(args) > 1 else "")
    for storage in storages(self):
        for path in storage.paths:
            for name in ("weight", "bias"):
                tensor = result.get(f"{prefix}{path}.{name}")
                if type(tensor) is torch.Tensor and storage.holds(tensor):
                    result[f"{prefix}{path}.{name}"] = alone(tensor)
    return result


def _reduce_as_original(self: nn.Module, protocol: int) -> Any:
    """A pickle of a fused module is one of the module as it was, with its present values."""
    cls = original_class(self)
    merged = {match.storage for match in applied_matches(self)}
    function, arguments, *rest = _next_in_line(self).__reduce_ex__(protocol)
    arguments = tuple(cls if argument is type(self) else argument for argument in arguments)
    if function is copyreg.__newobj__:  # type: ignore[attr-defined]  # pickle takes it for the object's own class alone
        function = cls.__new__
    if rest and isinstance(rest[0], dict):
        rest[0] = {name: value for name, value in rest[0].items() if name not in merged}
    return (function, arguments, *rest)


def _deepcopy_fused(self: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """A deep copy of a fused module is fused, with a storage of its own."""
    own_copy = getattr(super(_fused_base(self), self), "__deepcopy__", None)
    if own_copy is not None:
        made = own_copy(memo)
    else:
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        made.__setstate__(copy.deepcopy(self.__getstate__(), memo))
    if made is not self:
        for storage in storages(made):
            storage.adopt(made)
            storage.tie()
    return made


def _replicate_as_original(self: nn.Module) -> nn.Module:
    """`DataParallel` copies a module's attributes; the storage would be that of the first device."""
    replica = _next_in_line(self)._replicate_for_data_parallel()
    unbound = {match.storage for match in applied_matches(self)}
    replica.__dict__ = {name: value for name, value in replica.__dict__.items() if name not in unbound}
    replica.__class__ = _fused_base(self).__dict__[ORIGINAL]
    return replica


# -- binding ----------------------------------------------------------------------------------


def bind(module: nn.Module, cls: type, matches: tuple[Match, ...]) -> None:
    """Give `module` the class `cls`, and each merged match of `matches` its storage first.

    Whatever stops it half-way leaves the module as it was.
    """
    new = [match for match in matches if match.storage and match.storage not in module.__dict__]
    try:
        for match in new:
            assert match.storage is not None
            storage = MergedLinear(module, match.parts, match.order, match.copied, match.settings)
            module.__dict__[match.storage] = storage
            if not storage.tie():
                raise FusekitError(f"the weights of {', '.join(match.parts)} do not fit into one storage")
        module.__class__ = cls
    except BaseException:
        for match in new:
            _drop_storage(module, match)
        raise


def unbind(module: nn.Module, cls: type, dropped: tuple[Match, ...]) -> None:
    """Give `module` the class `cls` back and take the storage of `dropped` matches away.

    Interrupted, it can be done again: until the last step the module is a fused one.
    """
    for match in dropped:
        _drop_storage(module, match)
    module.__class__ = cls


def _drop_storage(module: nn.Module, match: Match) -> None:
    storage = module.__dict__.get(match.storage or "")
    if isinstance(storage, MergedLinear):
        storage.untie()
        del module.__dict__[match.storage]  # type: ignore[arg-type]
