"""What only the instance can say: are its parts plain, alone, of one dtype, on one device?"""

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn

from fusekit.fusions import Analysis, Match, Objection, Refusal
from fusekit.fusions.merge import is_conv1d
from fusekit.kernels import activation_name
from fusekit.model.storage import is_sharded, is_untouched

QUANTIZERS = (
    "bitsandbytes",
    "torchao",
    "torch.ao",
    "auto_gptq",
    "gptqmodel",
    "awq",
    "quanto",
    "optimum",
    "hqq",
    "aqlm",
)


@dataclass
class Uses:
    """How often each module and parameter of a model is used, and which storages they lie in."""

    modules: Counter[int]
    parameters: Counter[int]
    storages: dict[int, set[int]]  # storage -> parameters in it
    model: nn.Module

    @classmethod
    def of(cls, model: nn.Module) -> "Uses":
        modules: Counter[int] = Counter()
        parameters: Counter[int] = Counter()
        storages: dict[int, set[int]] = {}
        for module in model.modules():
            modules.update(id(child) for child in module._modules.values() if child is not None)
            for tensor in (*module._parameters.values(), *module._buffers.values()):
                if tensor is not None:
                    parameters[id(tensor)] += 1
                    storage = _storage_of(tensor)
                    if storage is not None:
                        storages.setdefault(storage, set()).add(id(tensor))
        return cls(modules, parameters, storages, model)

    def of_module(self, module: nn.Module) -> list[str]:
        """The paths under which the model has `module`."""
        return [name for name, found in self.model.named_modules(remove_duplicate=False) if found is module]

    def of_parameter(self, parameter: Any) -> list[tuple[str, nn.Module]]:
        """(path, module that holds it) of each place where the model has `parameter`."""
        return [
            (f"{path}.{name}" if path else name, module)
            for path, module in self.model.named_modules()
            for name, own in module._parameters.items()
            if own is parameter
        ]


def _storage_of(tensor: torch.Tensor) -> int | None:
    try:
        return tensor.untyped_storage()._cdata
    except Exception:  # a subclass without one storage
        return None


def refusal_of(name: str, module: nn.Module, analysis: Analysis, match: Match, uses: Uses) -> Refusal | None:
    """Why `match` does not hold for this instance, None when it does."""
    path = analysis.source.path if analysis.source else None
    at = name or type(module).__name__

    def refusal(reason: str, message: str, line: int | None = None) -> Refusal:
        text = f"{at}: cannot fuse {match.fusion}: {message}"
        return Refusal(name, match.fusion, reason, text, path if line else None, line, match.parts)

    if "forward" in module.__dict__:
        return refusal("instance-forward", "another tool put a forward on this instance; take it off first")
    merged = match.parts if match.storage else ()  # a linear that is cut in two is called as ever
    for part in merged:
        found = _part_objection(part, module.get_submodule(part), uses)
        if found:
            return refusal(*found, match.line)
    for called in sorted(match.replaced):
        found = _call_objection(called, module.get_submodule(called))
        if found:
            return refusal(*found, match.line)
    found = _group_objection(merged, [module.get_submodule(part) for part in merged], uses)
    if found:
        return refusal(*found, match.line)
    for called in sorted(match.called):
        for path, inner in module.get_submodule(called).named_modules(prefix=called):
            if not is_untouched(inner):
                why = f"{path} runs between the parts and carries hooks, which may do anything: remove them"
                return refusal("input-may-be-written", why, match.line)
    for activation in sorted(match.activations):
        if activation_name(module.get_submodule(activation)) is None:
            why = f"{activation} is not exactly a known activation, or carries hooks"
            return refusal("not-this-function", why, match.line)
    return None


Found = tuple[str, str] | None


def refusal_from(name: str, module: nn.Module, analysis: Analysis, objection: Objection) -> Refusal:
    """An objection of the class as a refusal of this instance, its state named where that is the cause."""
    path = analysis.source.path if analysis.source else None
    at = name or type(module).__name__
    reason, message = _state_behind(module, objection) or (objection.reason, objection.message)
    text = f"{at}: cannot fuse {objection.fusion}: {message}"
    return Refusal(name, objection.fusion, reason, text, path, objection.line, objection.parts)


def _state_behind(module: nn.Module, objection: Objection) -> Found:
    """What in the state of the instance is the cause of an objection to its forward."""
    if "parametrizations" in module._modules:
        return "parametrized", "its weight is computed by a parametrization; remove it first"
    if objection.reason in ("trace-stopped", "not-this-function"):
        inside = dict(module.named_modules())
        parts = {path: inside[path] for path in objection.parts or ("",) if path in inside}
        sharded = [path for path, part in parts.items() if is_sharded(part)]
        if sharded:
            why = _sharded(sharded[0]) if sharded[0] else "its weights are shared out over several processes"
            return "sharded", f"{why} ({objection.message})"
    children = dict(module.named_modules())
    for path in objection.parts:
        part = children.get(path)
        if part is not None and "parametrizations" in part._modules:
            why = f"the weight of {path} is computed by a parametrization; remove it first"
            return "parametrized", why
        if not isinstance(part, nn.Linear):
            continue
        weight = part._parameters.get("weight")
        if objection.reason == "module-escapes" and type(part).__call__ is not nn.Module.__call__:
            return (
                "subclass",
                f"{path} is a {type(part).__name__}, whose __call__ may compute more than nn.Linear",
            )
        if (
            objection.reason == "trace-stopped"
            and weight is not None
            and weight.numel() == 0 < part.in_features * part.out_features
        ):
            why = "(sharded or offloaded): fuse while its weights are there"
            return "offloaded", f"the weight of {path} is empty, and may come in only with a call {why}"
    return None


def _part_objection(path: str, part: nn.Module, uses: Uses) -> Found:
    if is_sharded(part):
        return "sharded", _sharded(path)
    found = _call_objection(path, part)
    if found:
        return found
    if is_conv1d(part):
        why = (
            f"{path} is a Conv1D, whose weight is [in, out]: beside another one in one tensor it would not "
            "be contiguous, and could not be saved as it is"
        )
        return "layout", why
    if type(part) is not nn.Linear:
        return "subclass", f"{path} is a {type(part).__name__}, which may compute more than nn.Linear"
    if uses.modules[id(part)] > 1:
        return "tied", f"{path} is one module in several places: {_listed(uses.of_module(part))}"
    for name, parameter in part._parameters.items():
        found = _parameter_objection(f"{path}.{name}", parameter, uses)
        if found:
            return found
    return None


def _sharded(path: str) -> str:
    return (
        f"the weights of {path} are shared out over several processes (DTensor, FSDP), so they cannot be "
        "rows of one tensor here; fusing before sharding is safe, and the parts then run apart"
    )


def _call_objection(path: str, part: nn.Module) -> Found:
    """Why the call of a submodule cannot be left out: it does more than its class's forward says."""
    home = type(part).__module__
    if hasattr(part, "base_layer"):
        return "adapter", f"{path} is wrapped by an adapter ({type(part).__name__}); merge the adapter first"
    if home.startswith(QUANTIZERS):
        return "quantized", f"{path} is a {type(part).__name__} of {home}: fuse before quantizing"
    if "parametrizations" in part._modules:
        return "parametrized", f"the weight of {path} is computed by a parametrization; remove it first"
    if isinstance(part, nn.Linear) and type(part) is not nn.Linear:
        return "subclass", f"{path} is a {type(part).__name__}, which may compute more than nn.Linear"
    if hasattr(part, "_hf_hook"):
        return "offloaded", f"{path} is offloaded or dispatched by accelerate; remove its hooks first"
    if "forward" in part.__dict__:
        return "instance-forward", f"another tool put a forward on {path}"
    if not is_untouched(part) or type(part).__call__ is not nn.Module.__call__:
        return "hooked", f"{path} carries hooks, which would no longer be called; remove them first"
    return None


def _parameter_objection(path: str, parameter: Any, uses: Uses) -> Found:
    if parameter is None:
        return None
    plain = type(parameter) is nn.Parameter and parameter.layout is torch.strided
    if not plain or not parameter.dtype.is_floating_point:
        kind = f"{type(parameter).__name__} of {parameter.dtype}, {parameter.layout}"
        return "quantized", f"{path} is a {kind}, not a plain floating parameter"
    if parameter.is_inference():
        why = f"{path} was made under torch.inference_mode(); build or load the model outside of it"
        return "inference-tensor", why
    if not parameter.is_contiguous():
        return "layout", f"{path} is not contiguous: fusing and reverting would lay it out anew"
    if uses.parameters[id(parameter)] > 1:
        places = uses.of_parameter(parameter)
        with_embedding = any(isinstance(module, nn.Embedding) for _, module in places)
        how = "shared with an embedding" if with_embedding else "tied: one parameter in several places"
        return "tied", f"{path} is {how}: {_listed([place for place, _ in places])}"
    if parameter.device.type == "cpu" and parameter.is_shared():
        return "tied", f"{path} lies in memory shared with other processes"
    return None


def _listed(places: list[str]) -> str:
    more = f" and {len(places) - 4} more" if len(places) > 4 else ""
    return ", ".join(places[:4]) + more


def _dtypes(path: str, part: nn.Module) -> str:
    """`q float32`, and `q.bias float64` behind it where the bias differs."""
    weight, bias = (
        str(p.dtype).removeprefix("torch.") if p is not None else None for p in (part.weight, part.bias)
    )
    return f"{path} {weight}" + (f", {path}.bias {bias}" if bias not in (None, weight) else "")


def _group_objection(paths: tuple[str, ...], parts: list[nn.Module], uses: Uses) -> Found:
    weights = [part.weight for part in parts if isinstance(part, nn.Linear)]
    if not weights:
        return None
    parameters = [
        parameter for part in parts for parameter in part._parameters.values() if parameter is not None
    ]
    dtypes = {str(parameter.dtype).removeprefix("torch.") for parameter in parameters}
    if len(dtypes) > 1:
        each = ", ".join(_dtypes(path, part) for path, part in zip(paths, parts, strict=True))
        return "dtype-mismatch", f"the parts have different dtypes ({each})"
    if len({parameter.device for parameter in parameters}) > 1:
        each = ", ".join(f"{path} on {w.device}" for path, w in zip(paths, weights, strict=True))
        return "device-mismatch", f"the parts lie on different devices ({each}); move them to one"
    shapes = [tuple(weight.shape) for weight in weights]
    if any(len(shape) != 2 for shape in shapes) or len({shape[1] for shape in shapes}) > 1:
        each = ", ".join(f"{path} {list(shape)}" for path, shape in zip(paths, shapes, strict=True))
        return (
            "layout",
            f"the weights are no matrices of one width ({each}); another tool may have reshaped them",
        )
    # Parameters that are views into a larger tensor (a flat buffer) belong to whoever made that.
    own = {id(parameter) for parameter in parameters}
    for storage in {_storage_of(parameter) for parameter in parameters} - {None}:
        inside = [parameter for parameter in parameters if _storage_of(parameter) == storage]
        size = sum(parameter.numel() * parameter.element_size() for parameter in inside)
        whole = inside[0].untyped_storage().nbytes()
        if uses.storages.get(storage, set()) - own or whole > size:  # type: ignore[arg-type]
            return (
                "tied",
                f"the weights of {', '.join(paths)} are views into a larger tensor that others may use",
            )
    return None
