"""Objects that exist when a forward is read: what reading an attribute of one runs, and what calls do."""

import ast
import contextlib
import functools
import inspect
import linecache
import logging
import os
import textwrap
import types
import warnings
from collections import OrderedDict, deque
from typing import Any

import torch
import torch.nn as nn

from fusekit.forward.effects.values import UNSET, Value
from fusekit.forward.reads import DYNAMIC, MISSING, SIMPLE, module_attribute
from fusekit.forward.source import NoSource, check_code, file_text, original_class, parse, source_of

TORCH = os.path.dirname(torch.__file__) + os.sep
INERT = (type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType, types.MethodDescriptorType)
BUILTIN_CONTAINERS = (list, tuple, dict, set, frozenset, OrderedDict, deque)
NONE = type(None)

# Attributes of a tensor that are numbers, names and the like.
PLAIN_ATTRIBUTES = frozenset(
    {
        "shape",
        "dtype",
        "device",
        "ndim",
        "layout",
        "requires_grad",
        "is_cuda",
        "is_leaf",
        "itemsize",
        "nbytes",
    }
    | {"names", "is_sparse", "is_quantized", "is_meta", "is_mps", "is_cpu", "is_xpu", "_version", "output_nr"}
    | {"is_nested", "is_mkldnn", "is_sparse_csr", "__class__"}
)
# Methods of a tensor that give numbers, names and the like, and write nothing.
PLAIN_METHODS = frozenset(
    {"size", "dim", "numel", "is_floating_point", "get_device", "element_size", "item", "tolist", "stride"}
    | {"data_ptr", "is_contiguous", "storage_offset", "nelement", "ndimension", "is_complex", "is_inference"}
    | {"is_pinned", "is_shared", "is_signed", "is_same_size", "equal", "allclose", "__len__", "__bool__"}
    | {"has_names", "sparse_dim", "dense_dim", "is_set_to", "__repr__", "__str__", "__format__", "dim_order"}
    | {"type_as_str", "is_nonzero", "is_coalesced", "is_conj", "is_neg"}
)
# Context managers of PyTorch that leave the tensors alone.
MANAGERS = (
    torch.no_grad,
    torch.enable_grad,
    torch.set_grad_enabled,
    torch.inference_mode,
    torch.autocast,
    torch.device,
    contextlib.nullcontext,
    contextlib.suppress,
    warnings.catch_warnings,
    torch.profiler.record_function,
)
MODES = frozenset(
    {
        "set_grad_enabled",
        "_set_grad_enabled",
        "set_autocast_enabled",
        "set_autocast_dtype",
        "set_default_dtype",
    }
    | {"set_default_device", "set_default_tensor_type", "set_autocast_cpu_enabled", "set_autocast_gpu_dtype"}
    | {"set_autocast_cache_enabled", "autocast_increment_nesting", "autocast_decrement_nesting"}
    | {"set_anomaly_enabled", "_set_default_dtype", "set_num_threads", "use_deterministic_algorithms"}
    | {"set_float32_matmul_precision", "set_flush_denormal", "__enter__", "__exit__", "enter_context"}
)
# Builtins that run nothing but what their arguments' types are known to run, and return a plain value.
PURE = frozenset(
    {
        "len",
        "isinstance",
        "issubclass",
        "callable",
        "id",
        "type",
        "repr",
        "str",
        "int",
        "float",
        "bool",
        "hash",
    }
    | {"ord", "chr", "print", "range", "slice", "format", "bin", "complex", "bytes", "any", "all", "hasattr"}
)
# Of those, what runs no code of its arguments whatever they are.
BLIND = frozenset({"isinstance", "issubclass", "callable", "id", "type"})

NEVER = frozenset({"is_scripting", "is_tracing"})  # functions of torch.jit that are False when Python runs


def is_torch_file(path: str) -> bool:
    return path.startswith(TORCH)


def truth(value: Value) -> bool | None:
    """Whether a value holds, None where that may change."""
    if value.is_plain and value.fixed and value.constant is not UNSET:
        try:
            return bool(value.constant)
        except Exception:
            return None
    return None


def is_harmless_manager(value: Value) -> bool:
    """Whether a value is a context manager that touches no tensor."""
    return value.kinds == {"context"}


@functools.lru_cache(maxsize=2048)
def _tree_in_torch(code: types.CodeType) -> ast.FunctionDef | None:
    lines = linecache.getlines(code.co_filename)[code.co_firstlineno - 1 :]
    try:
        found = ast.parse(textwrap.dedent("".join(inspect.getblock(lines)))).body[0]
    except (SyntaxError, IndentationError, IndexError, ValueError):
        return None
    if not isinstance(found, ast.FunctionDef) or found.name != code.co_name:
        return None
    return ast.increment_lineno(found, code.co_firstlineno - 1)


def tree_of(function: types.FunctionType) -> tuple[ast.FunctionDef, str | None] | None:
    """The def of a function and the name of the class around it, None where its text cannot be had.

    The text must be that of the code that runs; PyTorch's own files are taken to be.
    """
    code = function.__code__
    if is_torch_file(code.co_filename):
        tree = _tree_in_torch(code)
        home = code.co_qualname.rpartition(".")[0].rpartition(".")[2]
        return (tree, home or None) if tree is not None else None
    try:
        found = source_of((function,))
    except NoSource:
        return None
    return found.tree, found.class_name


def lambda_of(function: types.FunctionType) -> ast.Lambda | None:
    """The lambda that a function is, where its text is that of the code that runs."""
    code = function.__code__
    if code.co_name != "<lambda>":
        return None
    path = code.co_filename
    try:
        text = file_text(path)
        if text is None:
            return None
        check_code(code, path, text)
        tree = parse(text, path)
    except (NoSource, SyntaxError, ValueError):
        return None
    places = {(line, column) for line, _, column, _ in code.co_positions() if line and column is not None}
    found = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Lambda)
        and node.lineno == code.co_firstlineno
        and places
        and all(_inside(node.body, place) for place in places if place != (node.lineno, 0))
    ]
    return min(found, key=lambda node: node.col_offset * -1) if found else None


def _inside(node: ast.expr, place: tuple[int, int]) -> bool:
    assert node.end_lineno is not None and node.end_col_offset is not None
    return (node.lineno, node.col_offset) <= place < (node.end_lineno, node.end_col_offset)


def cells_of(function: types.FunctionType) -> dict[str, Any]:
    found = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            found[name] = cell.cell_contents
        except ValueError:
            pass
    return found


def looks_up_by_code(cls: type) -> bool:
    """Whether instances of a class find attributes by code of its own."""
    lookup = inspect.getattr_static(cls, "__getattribute__")
    known = getattr(lookup, "__module__", None) == "transformers.configuration_utils"  # renames, no more
    return lookup is not object.__getattribute__ and not known


def static_attribute(owner: Any, name: str) -> Any:
    """`owner.name` without running code: MISSING if there is none, DYNAMIC where code would run."""
    if name == "__class__":
        return original_class(owner) if isinstance(owner, nn.Module) else type(owner)
    if isinstance(owner, nn.Module):
        found = module_attribute(owner, name)
        if found is MISSING and name == "training":
            return owner.training
        return found
    if isinstance(owner, types.ModuleType):
        found = vars(owner).get(name, MISSING)
        if found is MISSING and hasattr(owner, "__getattr__"):
            try:
                return getattr(owner, name) if owner.__name__.startswith("torch") else DYNAMIC
            except AttributeError:
                return MISSING
        return found
    if isinstance(owner, type):
        found = inspect.getattr_static(owner, name, MISSING)
        if isinstance(found, staticmethod):
            return found.__func__
        if isinstance(found, classmethod):
            return types.MethodType(found.__func__, owner)
        if isinstance(found, (types.FunctionType, *SIMPLE, owner)):  # the last: a member of an enum
            return found
        return DYNAMIC if found is not MISSING and hasattr(type(found), "__get__") else found
    cls = type(owner)
    if looks_up_by_code(cls):
        return DYNAMIC
    found = inspect.getattr_static(cls, name, MISSING)
    if isinstance(found, types.FunctionType):
        inside = getattr(owner, "__dict__", {})
        return inside[name] if name in inside else types.MethodType(found, owner)
    if isinstance(found, staticmethod):
        return found.__func__
    if isinstance(found, classmethod):
        return types.MethodType(found.__func__, cls)
    if isinstance(found, (types.MethodDescriptorType, types.BuiltinFunctionType, types.MemberDescriptorType)):
        try:
            return getattr(owner, name)
        except AttributeError:
            return MISSING
    if found is not MISSING and hasattr(type(found), "__set__"):
        return DYNAMIC
    inside = getattr(owner, "__dict__", {})
    if name in inside:
        return inside[name]
    if found is not MISSING:
        return DYNAMIC if hasattr(type(found), "__get__") else found
    mapped = getattr(cls, "attribute_map", None)
    if isinstance(mapped, dict) and name in mapped and name != mapped[name]:
        return static_attribute(owner, mapped[name])  # of a configuration
    return DYNAMIC if hasattr(cls, "__getattr__") else MISSING


def property_of(owner: Any, name: str) -> types.FunctionType | None:
    """The function that a property of this name runs, where it is one."""
    cls = original_class(owner) if isinstance(owner, nn.Module) else type(owner)
    found = inspect.getattr_static(cls, name, None)
    if isinstance(found, property) and isinstance(found.fget, types.FunctionType):
        return found.fget
    return None


def is_logger_method(function: Any) -> bool:
    return isinstance(getattr(function, "__self__", None), logging.Logger)


def is_harmless(function: Any) -> bool:
    """Whether a function touches no tensor, whatever it is given."""
    home = getattr(function, "__module__", None) or ""
    name = getattr(function, "__name__", "")
    if is_logger_method(function) or function is warnings.warn:
        return True
    if home == "math" or (home == "time" and isinstance(function, types.BuiltinFunctionType)):
        return True
    if home in ("torch.compiler", "torch._jit_internal", "torch.jit", "torch._dynamo.decorators"):
        return name.startswith("is_") or name in ("graph_break", "mark_static")
    if name.startswith(("is_", "_is_", "_get_", "_log_api_usage")) and not isinstance(function, type):
        return isinstance(function, types.BuiltinFunctionType) and (home.startswith("torch") or not home)
    return any(function is one for one in (torch.is_grad_enabled, torch.manual_seed, torch.seed))


def is_never(function: Any) -> bool:
    """Whether a function says whether something is so that never is while plain tensors are computed with."""
    name = getattr(function, "__name__", "")
    home = getattr(function, "__module__", None) or ""
    if "has_torch_function" in name:
        return True
    return name in NEVER and home.startswith("torch")


def is_operator_module(function: Any) -> bool:
    return getattr(function, "__module__", None) in ("_operator", "operator")
