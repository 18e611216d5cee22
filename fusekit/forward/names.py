"""The names of a forward: of a chain, of a call, those that a region stores.

With `writes`, `sharing` and `flow` it is the name-level view of a forward: names and spellings are all
that is looked at, and attributes of one instance. It is what a reader of the source sees. What decides a
fusion is the prover, which asks PyTorch's schemas and a run. What a callee does is not looked into,
but for its name and flags.
"""

import ast
from collections.abc import Iterable, Iterator

# Attributes of a tensor that hold none of its storage; reading them runs no code.
METADATA_ATTRS = frozenset({"shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_cuda"})
# Methods of a tensor that return numbers and sizes.
METADATA_CALLS = frozenset({"size", "dim", "numel", "is_floating_point", "get_device", "element_size"})
# Methods of a tensor that change its dtype, and return the tensor itself where it has that dtype.
DTYPE_CASTS = frozenset(
    {"to", "type", "type_as", "float", "half", "bfloat16", "double", "int", "long", "short", "char", "byte"}
    | {"bool", "chalf", "cfloat", "cdouble"}
)

# What a call of one of these on a tensor returns lies in that tensor's storage, or is new.
VIEWS = frozenset(
    {"view", "view_as", "reshape", "reshape_as", "transpose", "permute", "flatten", "unflatten", "squeeze"}
    | {"unsqueeze", "expand", "expand_as", "contiguous", "chunk", "split", "tensor_split", "unbind"}
    | {"narrow", "select", "t", "movedim", "moveaxis", "swapaxes", "swapdims", "detach", "unfold"}
    | {"diagonal", "clone", "cpu", "cuda"}
)
VIEW_ATTRS = frozenset({"T", "mT", "H", "mH", "data", "real", "imag"})
# Names that by custom are modules: what is called through them is a function, not a method.
MODULE_NAMES = frozenset({"torch", "nn", "F", "np", "numpy", "math"})
# Names that may be a module or a variable: what is called through them may be either.
MAYBE_MODULES = frozenset({"functional", "init", "operator", "ops"})
# Methods that put an argument into a container, or a tensor on another one's storage.
KEEPS = frozenset(
    {"append", "appendleft", "extend", "extendleft", "insert", "update", "setdefault", "set_", "setattr"}
    | {"__setitem__", "__setattr__", "__ior__", "__iadd__", "register_buffer", "register_parameter"}
)
# Methods of Python's containers that change them.
CHANGES = KEEPS | {"pop", "popleft", "popitem", "remove", "clear", "sort", "reverse", "discard"}
INPLACE_DUNDERS = frozenset(
    {"__setitem__", "__delitem__", "__setattr__", "__delattr__", "__iadd__", "__isub__", "__imul__"}
    | {"__imatmul__", "__itruediv__", "__ifloordiv__", "__imod__", "__ipow__", "__iand__", "__ior__"}
    | {"__ixor__", "__ilshift__", "__irshift__"}
)

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def base_name(expr: ast.AST) -> str | None:
    """The root name of an attribute or subscript chain, None where the chain starts with no name.

    Teaching-only: the library follows spans of a trace instead.

    >>> base_name(ast.parse("a.b[c].d", mode="eval").body)
    'a'
    >>> base_name(ast.parse("f(a).b", mode="eval").body) is None
    True
    """
    while isinstance(expr, (ast.Attribute, ast.Subscript)):
        expr = expr.value
    return expr.id if isinstance(expr, ast.Name) else None


def call_name(call: ast.Call) -> str | None:
    """The called function's own name, without its qualifier; None where it has none.

    Teaching-only: the library asks the traced node what was called.

    >>> call_name(ast.parse("torch.nn.functional.silu(x)", mode="eval").body)
    'silu'
    """
    if isinstance(call.func, ast.Attribute):
        return call.func.attr
    return call.func.id if isinstance(call.func, ast.Name) else None


def arg_names(call: ast.Call) -> set[str]:
    """Every name that a call reads through its arguments, starred and keyword ones too.

    The function called, or the object whose method it is, is no argument.
    Teaching-only: the library asks the traced node for its arguments.

    >>> sorted(arg_names(ast.parse("f.g(a + b, *c, d=e[i], **k)", mode="eval").body))
    ['a', 'b', 'c', 'e', 'i', 'k']
    """
    parts = [*call.args, *(keyword.value for keyword in call.keywords)]
    return {
        node.id
        for part in parts
        for node in ast.walk(part)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
    }


def rebound_names(statements: Iterable[ast.AST]) -> set[str]:
    """The names that the statements store or delete outright, in any way Python has.

    What a comprehension, lambda or nested function stores for itself does not count; what it stores
    outside, by `:=`, `nonlocal` or `global`, does.
    Teaching-only for regions: the prover refuses every statement that it does not know. Whether
    `self` is stored again is asked here.

    >>> region = ast.parse("a, *b = c\\nfor i in d: e[i] = f\\nimport g.h as k\\ndel m")
    >>> sorted(rebound_names(region.body))
    ['a', 'b', 'i', 'k', 'm']
    """
    return {name for statement in statements for name in _stored(statement)}


def _stored(node: ast.AST) -> Iterator[str]:
    children = ast.iter_child_nodes(node)
    if isinstance(node, ast.Name):
        if not isinstance(node.ctx, ast.Load):
            yield node.id
    elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        yield node.name
        yield from rebound_names(node.body) & _declared(node.body)
        # Decorators, defaults and bases are evaluated here; annotations may be.
        children = iter([child for child in children if not isinstance(child, ast.stmt)])
    elif isinstance(node, ast.Lambda):
        children = iter([*node.args.defaults, *(d for d in node.args.kw_defaults if d is not None)])
    elif isinstance(node, COMPREHENSIONS):
        yield from _stored_by_walrus(node)
        return
    elif isinstance(node, ast.ExceptHandler) and node.name:
        yield node.name
    elif isinstance(node, ast.alias):
        yield node.asname or node.name.partition(".")[0]
    elif isinstance(node, ast.pattern):
        yield from _captured(node)
    for child in children:
        yield from _stored(child)


def _stored_by_walrus(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.NamedExpr):
        yield node.target.id
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.Lambda):
            yield from _stored_by_walrus(child)


def _declared(body: list[ast.stmt]) -> set[str]:
    """Names that a function declares to be of an outer scope, or one nested in it does."""
    return {
        name
        for statement in body
        for node in ast.walk(statement)
        if isinstance(node, (ast.Global, ast.Nonlocal))
        for name in node.names
    }


def _captured(pattern: ast.pattern) -> Iterator[str]:
    """The name that one pattern stores itself."""
    name = getattr(pattern, "rest" if isinstance(pattern, ast.MatchMapping) else "name", None)
    if isinstance(name, str):
        yield name


def captured_names(pattern: ast.pattern) -> set[str]:
    """The names stored by a pattern of a `match` statement."""
    return {name for node in ast.walk(pattern) if isinstance(node, ast.pattern) for name in _captured(node)}


def captures(function: ast.AST) -> list[ast.Name]:
    """The names in the body of a function or class, read or stored there, but for its parameters."""
    body = function.body if isinstance(function.body, list) else [function.body]  # type: ignore[attr-defined]
    own = set(parameters_of(function))
    nodes = (node for part in body for node in ast.walk(part))
    return [node for node in nodes if isinstance(node, ast.Name) and node.id not in own]


def parameters_of(function: ast.AST) -> list[str]:
    if not isinstance(function, FUNCTIONS):
        return []
    arguments = function.args
    every = [
        *arguments.posonlyargs,
        *arguments.args,
        *arguments.kwonlyargs,
        arguments.vararg,
        arguments.kwarg,
    ]
    return [argument.arg for argument in every if argument is not None]


def has_underscore(name: str | None) -> bool:
    """Whether a name ends in the one underscore of what works in place: `mul_`, no `__getitem__`."""
    return name is not None and name.endswith("_") and not name.endswith("__") and name != "_"
