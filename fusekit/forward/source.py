"""The forward that really runs for a module: its function, its text, or why there is none."""

import __future__

import ast
import functools
import inspect
import linecache
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import torch.nn as nn

from fusekit.errors import FusekitError
from fusekit.forward.once import once
from fusekit.forward.span import lines_of
from fusekit.shown import Shown

FUTURE_FLAGS = functools.reduce(
    lambda flags, name: flags | getattr(__future__, name).compiler_flag, __future__.all_feature_names, 0
)
ORIGINAL = "_fusekit_original"  # on a fused module's class: the class that it stands in for


class NoSource(FusekitError):
    """There is no forward whose text is the code that runs; `reason` is a refusal's code."""

    def __init__(self, reason: str, message: str, path: str | None = None, line: int | None = None):
        super().__init__(message)
        self.reason, self.path, self.line = reason, path, line


@dataclass(frozen=True, repr=False, eq=False)
class ForwardSource(Shown):
    """Text, file, line and AST of the forward that really runs for an instance.

    `text` holds the lines of the `def` with its decorators, indented as in the file at `path`;
    `line` is the first of them, from 1. The positions in `tree` are those of the file.
    `wrappers` names the functions that decorators put around it, outermost first.
    """

    name: str
    text: str
    path: str
    line: int
    tree: ast.FunctionDef
    wrappers: tuple[str, ...]
    chain: tuple[FunctionType, ...] = field(default=())  # wrappers, outermost first, then the forward
    file_text: str = ""
    class_name: str | None = None  # of the class whose body holds the def: private names use it

    @property
    def function(self) -> FunctionType:
        """The function whose text this is, without what decorators put around it."""
        return self.chain[-1]

    @property
    def self_name(self) -> str:
        """What the forward calls its own module: its first parameter, `self` by custom."""
        arguments = self.tree.args.posonlyargs + self.tree.args.args
        return arguments[0].arg if arguments else ""


def source(module: nn.Module) -> ForwardSource:
    """The source of the forward that really runs when `module` is called.

    Decorators are looked through: the result is the function in the file, `wrappers` what runs
    around it. The text is returned only if compiling its file gives the very code that runs.

    Raises `FusekitError` (with a `reason`) when the forward has no source, when the file was
    edited since it was imported, or when a decorator hides the function that it calls.
    """
    if not isinstance(module, nn.Module):
        raise FusekitError(
            f"source() takes a module, not {type(module).__name__}: pass an nn.Module instance"
        )
    return source_of(forward_chain(module))


class FusedForward:
    """The `forward` of the fused class `made`: `fused`, or that of `cls` where it is another one by now.

    So somebody who replaces the forward of a class reaches its fused instances as well.
    """

    def __init__(self, cls: Any, made: Any, fused: FunctionType):
        self.cls, self.made, self.fused, self.before = cls, made, fused, cls.forward

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if self.cls.forward is self.before:
            return self.fused.__get__(instance, owner)
        if instance is None:
            return self.cls.forward
        return super(self.made, instance).forward  # type: ignore[misc]  # Dynamo can follow this form


def original_class(module: nn.Module) -> type:
    """The class of `module`, or the one it had before fusekit fused it (and others subclassed that)."""
    return getattr(type(module), ORIGINAL, type(module))


def forward_chain(module: nn.Module, original: bool = False) -> tuple[FunctionType, ...]:
    """The functions that a call of `module.forward` goes through: wrappers, then the forward itself.

    With `original`, those of the class that a fused module had before.
    """
    own = module.__dict__.get("forward")
    if own is not None:
        bound = isinstance(own, types.MethodType) and own.__self__ is module
        function = own.__func__ if isinstance(own, types.MethodType) else own
        if not bound or not isinstance(function, FunctionType):
            # A plain function there is called without the module: nothing in it is `self`.
            raise NoSource(
                "instance-forward",
                f"{type(module).__name__} carries a forward of its own on the instance "
                f"({type(own).__name__}), put there by another tool; take that off first",
            )
        return _unwrap(function, type(module))
    return class_chain(original_class(module) if original else type(module))


def class_chain(cls: type) -> tuple[FunctionType, ...]:
    """`forward_chain` of the instances of `cls` that carry no forward of their own."""
    return once(cls, "forward", lambda: _class_chain(cls))


def _class_chain(cls: type) -> tuple[FunctionType, ...]:
    forward = inspect.getattr_static(cls, "forward", None)
    if isinstance(forward, FusedForward):
        forward = forward.__get__(None, cls)
    if not isinstance(forward, FunctionType):
        raise NoSource(
            "decorated",
            f"the forward of {cls.__name__} is a {type(forward).__name__}, not a function: "
            "its decorator hides the function that runs",
        )
    return _unwrap(forward, cls)


def _unwrap(function: FunctionType, cls: type) -> tuple[FunctionType, ...]:
    # `functools.wraps` copies `__name__` and `__qualname__` and sets `__wrapped__`, and all may lie;
    # a code object keeps the name of the place where it was written.
    names = {function.__name__, "forward"}
    homes = {f"{base.__qualname__}.{name}" for base in cls.__mro__ for name in names}
    found = _chains_to(function, lambda code: code.co_qualname in homes)
    # Else one that a class borrowed from another.
    found = found or _chains_to(function, lambda code: code.co_name in names and _is_method(code))
    if len(found) == 1:
        return found[0]
    if len(found) > 1:
        raise NoSource(
            "decorated",
            f"the forward of {cls.__name__} is wrapped by {function.__code__.co_qualname}, which holds "
            f"{len(found)} functions that could be the forward",
            function.__code__.co_filename,
            function.__code__.co_firstlineno,
        )
    if hasattr(function, "__wrapped__"):
        raise NoSource(
            "decorated",
            f"the forward of {cls.__name__} is wrapped by {function.__code__.co_qualname}, and the function "
            "that it calls was not found in its closure",
            function.__code__.co_filename,
            function.__code__.co_firstlineno,
        )
    return (function,)


def _is_method(code: CodeType) -> bool:
    """Whether the code was written right in the body of a class."""
    place, _, _ = code.co_qualname.rpartition(".")
    return bool(place) and not place.endswith("<locals>")


def _chains_to(
    function: FunctionType, is_home: Callable[[CodeType], bool], above: tuple[FunctionType, ...] = ()
) -> list[tuple[FunctionType, ...]]:
    """Every way through closures from `function` to one whose code `is_home`."""
    if is_home(function.__code__):
        return [(*above, function)]
    found: dict[int, tuple[FunctionType, ...]] = {}
    for cell in function.__closure__ or ():
        inner = cell_contents(cell)
        if isinstance(inner, FunctionType) and inner is not function and inner not in above:
            for chain in _chains_to(inner, is_home, (*above, function)):
                found[id(chain[-1])] = chain
    return list(found.values())


def cell_contents(cell: types.CellType) -> Any:
    """What a closure cell holds, None while it is empty."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def source_of(chain: tuple[FunctionType, ...]) -> ForwardSource:
    """The source of the last function of `chain`, checked against the code that runs."""
    return _source_of_chain(chain, tuple(_Code(function.__code__) for function in chain))


@functools.lru_cache(maxsize=4096)
def _source_of_chain(chain: tuple[FunctionType, ...], codes: tuple["_Code", ...]) -> ForwardSource:
    found = _source_of(codes[-1])
    names = tuple(wrapper.__code__.co_qualname for wrapper in chain[:-1])
    return ForwardSource(
        found.name,
        found.text,
        found.path,
        found.line,
        found.tree,
        names,
        chain,
        found.file_text,
        found.class_name,
    )


@dataclass(frozen=True)
class _Found:
    name: str
    text: str
    path: str
    line: int
    tree: ast.FunctionDef
    file_text: str
    class_name: str | None


class _Code:
    """A code object by identity: two of different files may be equal."""

    def __init__(self, code: CodeType):
        self.code = code

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Code) and other.code is self.code

    def __hash__(self) -> int:
        return id(self.code)


@functools.lru_cache(maxsize=4096)
def _source_of(key: _Code) -> _Found:
    code = key.code
    path, line = code.co_filename, code.co_firstlineno
    text = file_text(path)
    if text is None:
        raise NoSource(
            "no-source",
            f"{code.co_qualname} has no source text (its file is {path!r}): define the class in a file or "
            "in a notebook cell",
            path,
            line,
        )
    if path not in GENERATED:
        check_code(code, path, text)
    place = _place(text, path, line, code.co_name)
    if place is None:
        raise NoSource(
            "no-source", f"{code.co_qualname} is not a def at {path}:{line} (a lambda?)", path, line
        )
    tree, class_name = place
    assert tree.end_lineno is not None
    lines = lines_of(text)[line - 1 : tree.end_lineno]
    return _Found(code.co_qualname, "".join(lines), path, line, tree, text, class_name)


# Texts that `compile` made, by their name in linecache: their code is ours, no need to check it.
# Kept here too, since `linecache.clearcache` would lose them.
GENERATED: dict[str, str] = {}


def file_text(path: str) -> str | None:
    if path in GENERATED:
        return GENERATED[path]
    linecache.checkcache(path)
    text = "".join(linecache.getlines(path))
    # As Python's own tokenizer reads line ends; a text registered by hand may hold any.
    return text.replace("\r\n", "\n").replace("\r", "\n") or None


def check_code(code: CodeType, path: str, text: str) -> None:
    """Raise unless `code` is what compiling `text` gives for it."""
    stale = NoSource(
        "source-is-stale",
        f"{code.co_qualname} runs code that is no longer what {path} says: the file was edited after it was "
        "imported, or the code was changed; restart, or reload the module",
        path,
        code.co_firstlineno,
    )
    place = code.co_firstlineno, code.co_qualname
    for compiled in (_codes, _codes_by_statement):
        try:
            if code in compiled(text, path, code.co_flags & FUTURE_FLAGS).get(place, ()):
                return
        except (SyntaxError, ValueError):
            pass  # a file that never was plain Python, or half an edit; a cell with an `await` of its own
    raise stale


@functools.lru_cache(maxsize=256)
def _codes(text: str, path: str, flags: int) -> dict[tuple[int, str], list[CodeType]]:
    # A notebook cell is compiled under the `from __future__` imports of the cells before it.
    return _codes_in([compile(text, path, "exec", flags=flags, dont_inherit=True)])


@functools.lru_cache(maxsize=64)
def _codes_by_statement(text: str, path: str, flags: int) -> dict[tuple[int, str], list[CodeType]]:
    """As IPython compiles a cell: each statement by itself, where `await` is allowed.

    The code is another for a method of a module that the cell imports.
    """
    flags |= ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    statements = ast.parse(text, path).body
    return _codes_in(
        [
            compile(ast.Module([statement], []), path, "exec", flags=flags, dont_inherit=True)
            for statement in statements
        ]
    )


def _codes_in(todo: list[CodeType]) -> dict[tuple[int, str], list[CodeType]]:
    """Every code object inside of these, by its line and name."""
    found: dict[tuple[int, str], list[CodeType]] = {}
    while todo:
        code = todo.pop()
        found.setdefault((code.co_firstlineno, code.co_qualname), []).append(code)
        todo.extend(const for const in code.co_consts if isinstance(const, CodeType))
    return found


@functools.lru_cache(maxsize=64)
def parse(text: str, path: str) -> ast.Module:
    return ast.parse(text, path)


def _place(text: str, path: str, line: int, name: str) -> tuple[ast.FunctionDef, str | None] | None:
    """The `def` of `name` that starts (decorators included) at `line`, and its class's name."""

    def search(node: ast.AST, class_name: str | None) -> tuple[ast.FunctionDef, str | None] | None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
                first = min([child.lineno, *(d.lineno for d in child.decorator_list)])
                if first == line and child.name == name and isinstance(child, ast.FunctionDef):
                    return child, class_name
                found = search(child, None)
            elif isinstance(child, ast.ClassDef):
                found = search(child, child.name)
            elif isinstance(child, ast.stmt):
                found = search(child, class_name)
            else:
                continue
            if found:
                return found
        return None

    return search(parse(text, path), None)


def short_path(path: str) -> str:
    """The last part of a file's path, for messages; a notebook cell by its number, In[3]."""
    return cell_name(path) or Path(path).name


def cell_name(path: str) -> str | None:
    """`In[3]` for the file that stands for a cell of this notebook, None for any other."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if hasattr(ipython, "get_ipython") else None  # type: ignore[union-attr]
    try:
        found = shell.compile.format_code_name(path) if shell is not None else None
    except Exception:  # a shell that compiles in its own way
        return None
    return found[1] if found else None
