"""From the edited text to a function that stands in for the original one."""

import ast
import copy
import functools
import hashlib
import linecache
import types
from collections.abc import Iterable, Mapping
from types import CodeType, FunctionType
from typing import Any

from fusekit.errors import FusekitError
from fusekit.forward.edits import Edit, apply_edits
from fusekit.forward.source import FUTURE_FLAGS, GENERATED, ForwardSource, NoSource, _place, cell_contents
from fusekit.forward.span import lines_of


def edited_text(source: ForwardSource, edits: Iterable[Edit]) -> str:
    """The text of the forward after `edits`, lines as in the file."""
    after = apply_edits(source.file_text, edits)
    _, end = _edited_def(source, after)
    return "".join(lines_of(after)[source.line - 1 : end])


def compile_edited(
    source: ForwardSource, edits: Iterable[Edit], names: Mapping[str, Any]
) -> tuple[FunctionType, ...]:
    """The forward of `source` with `edits` made, its decorators' wrappers around it again.

    As in `ForwardSource.chain`, the outermost wrapper comes first and the forward itself last.

    Globals and closure cells are the original's own, so what they hold later is seen too;
    `names` are bound in a closure of the new function alone. The edited file is registered with
    `linecache` under a name of its own, so that `inspect`, debuggers and tracebacks show it.
    """
    after = apply_edits(source.file_text, edits)
    tree, _ = _edited_def(source, after)
    return rewrap(source.chain, compile_def(tree, register(after, source), source, names))


def register(after: str, source: ForwardSource) -> str:
    """The name under which `linecache` knows `after`, a rewritten text of the file of `source`."""
    digest = hashlib.sha256(after.encode()).hexdigest()[:12]
    filename = f"<fusekit {source.name} {digest}>"
    linecache.cache[filename] = (len(after), None, lines_of(after), filename)
    GENERATED[filename] = after
    return filename


def _edited_def(source: ForwardSource, after: str) -> tuple[ast.FunctionDef, int]:
    # Edits lie inside the body, so the def still starts on its line.
    try:
        place = _place(after, f"<edited {source.path}>", source.line, source.tree.name)
    except SyntaxError as error:
        raise FusekitError(f"the edits of {source.name} are no Python: {error}") from error
    if place is None or place[0].end_lineno is None:
        raise FusekitError(f"the edits of {source.name} lost its def")
    return place[0], place[0].end_lineno


def compile_def(
    tree: ast.FunctionDef, filename: str, source: ForwardSource, names: Mapping[str, Any]
) -> FunctionType:
    """`tree`, a version of the def of `source`, as a function in the original's place.

    It is compiled inside a class of the same name (private names, `__class__`) inside a function
    whose parameters are the original's free variables; only its code object is taken.
    """
    original = source.chain[-1]
    code = _code_in_context(tree, filename, source, tuple(names))
    cells = dict(zip(original.__code__.co_freevars, original.__closure__ or (), strict=True))
    closure = []
    for name in code.co_freevars:
        if name in names:
            closure.append(types.CellType(names[name]))
        elif name in cells:
            closure.append(cells[name])
        else:
            raise NoSource(
                "decorated", f"{source.name}: the rewritten forward would need a cell for {name!r}"
            )
    return _function(original, code, tuple(closure), original.__globals__)


def _code_in_context(
    tree: ast.FunctionDef, filename: str, source: ForwardSource, extra: tuple[str, ...]
) -> CodeType:
    original = source.function.__code__
    free = [name for name in original.co_freevars if name != "__class__" and name not in extra]
    home: ast.stmt = tree
    if source.class_name is not None:
        home = ast.ClassDef(source.class_name, [], [], [tree], [])
    own = source.class_name or tree.name
    # The class is a global (or a cell) for its methods, never a local of our scope.
    body: list[ast.stmt] = [home] if own in free else [ast.Global([own]), home]
    parameters = [ast.arg(name) for name in (*free, *extra)]
    scope = ast.FunctionDef("__scope__", ast.arguments([], parameters, None, [], [], None, []), body, [])
    for made in (scope, home):
        if made is not tree and "type_params" in made._fields:  # Python 3.12 and later
            made.type_params = []  # type: ignore[attr-defined, union-attr]
    outer = ast.fix_missing_locations(ast.Module([scope], []))
    flags = original.co_flags & FUTURE_FLAGS
    todo = [compile(outer, filename, "exec", flags=flags, dont_inherit=True)]
    first = min([tree.lineno, *(d.lineno for d in tree.decorator_list)])
    while todo:
        code = todo.pop()
        if code.co_name == tree.name and code.co_firstlineno == first:
            return code.replace(co_qualname=original.co_qualname)
        todo.extend(const for const in code.co_consts if isinstance(const, CodeType))
    raise FusekitError(f"{source.name}: its def was lost in compiling")


def rewrap(chain: tuple[FunctionType, ...], inner: FunctionType) -> tuple[FunctionType, ...]:
    """`inner` inside copies of the wrappers of `chain`, each with the one cell that holds it replaced."""
    made = [inner]
    for wrapper, wrapped in zip(reversed(chain[:-1]), reversed(chain[1:]), strict=True):
        made.insert(0, _clone_wrapper(wrapper, wrapped, made[0]))
    return tuple(made)


def _clone_wrapper(wrapper: FunctionType, wrapped: FunctionType, inner: FunctionType) -> FunctionType:
    closure, itself = [], []
    for name, cell in zip(wrapper.__code__.co_freevars, wrapper.__closure__ or (), strict=True):
        held = cell_contents(cell)
        if held is wrapped:
            cell = types.CellType(inner)
        elif held is wrapper:  # a wrapper may ask whether it is the class's forward itself
            cell = types.CellType(None)
            itself.append(cell)
        elif _holds(held, wrapped):
            raise _held_twice(wrapper, name)
        closure.append(cell)
    for defaults in (wrapper.__defaults__, wrapper.__kwdefaults__):
        if _holds(defaults, wrapped):
            raise _held_twice(wrapper, "its defaults")
    clone = _function(wrapper, wrapper.__code__, tuple(closure), wrapper.__globals__)
    for cell in itself:
        cell.cell_contents = clone
    for name, value in wrapper.__dict__.items():  # `__wrapped__`, and what else decorators call it
        if value is wrapped:
            clone.__dict__[name] = inner
    return clone


def _held_twice(wrapper: FunctionType, where: str) -> NoSource:
    return NoSource(
        "decorated",
        f"{wrapper.__code__.co_qualname} holds the forward a second time, in {where}",
        wrapper.__code__.co_filename,
        wrapper.__code__.co_firstlineno,
    )


def _holds(value: Any, function: FunctionType) -> bool:
    if isinstance(value, functools.partial):
        return value.func is function or _holds(value.func, function)
    if isinstance(value, types.MethodType):
        return value.__func__ is function
    if isinstance(value, (list, tuple, set, frozenset)):
        return any(item is function for item in value)
    if isinstance(value, dict):
        return any(item is function for item in value.values())
    return False


def _function(
    like: FunctionType, code: CodeType, closure: tuple[types.CellType, ...], namespace: dict[str, Any]
) -> FunctionType:
    made = FunctionType(code, namespace, like.__name__, like.__defaults__, closure)
    made.__kwdefaults__ = copy.copy(like.__kwdefaults__)
    made.__annotations__ = dict(like.__annotations__)
    made.__dict__.update(like.__dict__)
    made.__doc__, made.__module__, made.__qualname__ = like.__doc__, like.__module__, like.__qualname__
    return made
