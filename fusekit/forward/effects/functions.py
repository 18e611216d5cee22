"""Functions that are read from their own text, with what they are given."""

import ast
import dataclasses
import types
from dataclasses import replace
from typing import Any

from fusekit.forward.effects import known as objects
from fusekit.forward.effects.containers import Containers
from fusekit.forward.effects.frames import Arguments, Frame, defaults_of, locals_of, own_nodes
from fusekit.forward.effects.notes import Effect, Unreadable, text_of
from fusekit.forward.effects.rules import on
from fusekit.forward.effects.values import (
    KNOWN,
    OUTSIDE,
    REST,
    Region,
    State,
    Value,
    anything,
    container,
    join,
    joined,
    meet,
    plain,
)
from fusekit.forward.operators import operator_signature

DEPTH = 10  # calls within calls that are followed
AGAIN = 3  # how often one function may stand in them
CALL_WORK = 4_000  # expressions and statements that are followed for one call of the forward


class Functions(Containers):
    """The part of the interpreter that follows calls into functions."""

    def function(
        self,
        function: types.FunctionType,
        arguments: Arguments,
        node: ast.AST,
        state: State,
        frame: Frame,
        own: Any = None,
    ) -> Value:
        """A call of a function, read from its own text."""

        code = function.__code__
        if not on("callees"):
            return anything({self.region(node, frame)})
        if function.__module__ == "torch.functional" and operator_signature(function.__name__):
            return self.operator(function.__name__, arguments, node, state, frame)
        found: tuple[Any, str | None] | None = objects.tree_of(function)
        if found is None and (known := objects.lambda_of(function)) is not None:
            found = (known, None)
        too_deep = len(self._stack) >= DEPTH or self._stack.count(code) >= AGAIN
        if found is None or too_deep or isinstance(found[0], ast.AsyncFunctionDef):
            why = "is called, and its text cannot be had" if found is None else "goes too deep to be followed"
            values = [*arguments.all(), anything({OUTSIDE})]
            return self.unknown(node, state, values, f"({code.co_qualname}) {why}", frame)
        tree, class_name = found
        home = None
        if arguments.positional and KNOWN in arguments.positional[0].kinds and class_name:
            receiver = own if own is not None else arguments.positional[0].objects[0]
            classes = receiver.__mro__ if isinstance(receiver, type) else type(receiver).__mro__
            home = next((c for c in classes if function in c.__dict__.values()), None)
            own = receiver
        key = (id(self._anchor), id(node), frame.number, id(code))
        self._kept += [node, code]
        inner = Frame(
            self._frames.setdefault(key, len(self._frames) + 1),
            tree,
            function.__globals__,
            objects.cells_of(function),
            class_name=class_name,
            home=home,
            own=own,
            local=locals_of(tree),
            tries=list(frame.tries),
        )
        defaults = {
            name: self.value_of(value, name, fixed=True)
            for name, value in defaults_of(function, tree).items()
        }
        return self.run(inner, arguments, defaults, node, state, code, code.co_qualname)

    def run_closure(self, region: Region, arguments: Arguments, node: ast.AST, state: State) -> Value:
        """A call of a nested function or lambda."""

        tree, outer = self.closures[region]
        if self._stack.count(tree) >= AGAIN - 1 or len(self._stack) >= DEPTH:
            reached = self.reach([anything({region}), *arguments.all()], state)
            self.effect(
                node, Effect("may write", reached, f"{text_of(node)} calls a function again and again")
            )
            return anything(reached)
        key = (id(self._anchor), id(node), outer.number, id(tree))
        inner = Frame(
            self._frames.setdefault(key, len(self._frames) + 1),
            tree,
            outer.globals,
            outer=outer,
            local=locals_of(tree),
        )
        held = state.heap.get(region, {})
        defaults = {key[1]: value for key, value in held.items() if isinstance(key, tuple)}
        name = getattr(tree, "name", "a lambda")
        return self.run(inner, arguments, defaults, node, state, tree, name)

    def run(
        self,
        inner: Frame,
        arguments: Arguments,
        defaults: dict[str, Value],
        node: ast.AST,
        state: State,
        identity: Any,
        name: str,
    ) -> Value:
        tree = inner.tree
        for parameter, value in self._parameters(tree, arguments, defaults, state, node, inner).items():
            state.names[inner.number, parameter] = replace(value, token=("given", inner.number, parameter))
        anchor, self._anchor = self._anchor, self._anchor or node
        if anchor is None:
            self._call_limit = self._work + CALL_WORK
        self._stack.append(identity)
        self._inside.append(name)
        in_with, self._with = self._with, 0
        body = tree.body if isinstance(tree.body, list) else None
        is_generator = body is not None and any(
            isinstance(part, (ast.Yield, ast.YieldFrom)) for part in own_nodes(tree)
        )
        inner.yielded = [] if is_generator else None
        entry, unreadable = state.copy(), None
        try:
            with self.listening() as effects:
                if body is None:
                    result = self.evaluate(tree.body, state, inner)
                    end: State | None = state
                else:
                    end = self.block(body, state, inner)
                    result = joined(inner.returned)
                    if end is not None:
                        result = join(result, plain(None, True))
                    end = meet(end, inner.exit, (inner.number, "end"))
            if is_generator:
                result = self.listed(node, inner.yielded or [], end or state, inner)
                made = next(iter(result.regions))
                self.delay(made, effects)
                for value in arguments.all():
                    (end or state).put(made, REST, value)
                if inner.outer is not None:
                    self.behind[made] = (tree, inner.outer)
        except Unreadable as error:
            if anchor is not None:
                raise
            unreadable = str(error)
        finally:
            self._stack.pop()
            self._inside.pop()
            self._anchor, self._with = anchor, in_with
        if unreadable is not None:
            state.names, state.heap, state.escaped = entry.names, entry.heap, entry.escaped
            values = [*arguments.all(), anything({OUTSIDE})]
            return self.unknown(node, state, values, f"({name}) {unreadable}", inner)
        after = end if end is not None else entry  # it always raises
        if after is not state:
            state.names, state.heap, state.escaped = after.names, after.heap, after.escaped
        if not inner.has_closures:
            for key in [key for key in state.names if key[0] == inner.number]:
                del state.names[key]
        return result.without_token()

    def _parameters(
        self,
        tree: Any,
        arguments: Arguments,
        defaults: dict[str, Value],
        state: State,
        node: ast.AST,
        inner: Frame,
    ) -> dict[str, Value]:
        """What each parameter holds."""
        signature: ast.arguments = tree.args
        names = [parameter.arg for parameter in (*signature.posonlyargs, *signature.args)]
        found: dict[str, Value] = {}
        keywords = dict(arguments.keywords)
        for name, value in zip(names, arguments.positional, strict=False):
            found[name] = value
        extra = arguments.positional[len(names) :]
        for name in (*names, *(parameter.arg for parameter in signature.kwonlyargs)):
            if name in found:
                continue
            if name in keywords:
                found[name] = keywords.pop(name)
                if name in arguments.maybe and name in defaults:
                    found[name] = joined([found[name], defaults[name]])
                continue
            may_be = [arguments.named] if arguments.named is not None else []
            if arguments.rest is not None and name in names:
                may_be.append(arguments.rest)
            if name in defaults:
                may_be.append(defaults[name])
            found[name] = may_be[0] if len(may_be) == 1 else joined(value for value in may_be)
            if not may_be:
                found[name] = anything({OUTSIDE})  # the call raises
        if signature.vararg is not None:
            region = Region("new", (inner.number, signature.vararg.arg, "*"), signature.vararg.arg)
            state.heap[region] = {index: value.without_token() for index, value in enumerate(extra)}
            if arguments.rest is not None:
                state.put(region, REST, arguments.rest)
            found[signature.vararg.arg] = container({region})
        if signature.kwarg is not None:
            region = Region("new", (inner.number, signature.kwarg.arg, "**"), signature.kwarg.arg)
            state.heap[region] = {name: value.without_token() for name, value in keywords.items()}
            if arguments.named is not None:
                state.put(region, REST, arguments.named)
            found[signature.kwarg.arg] = container({region})
        return found

    # -- frames ---------------------------------------------------------------------------------------------

    def inner_frame(self, node: Any, frame: Frame) -> Frame:
        """The scope of a comprehension."""
        key = ("comprehension", id(node), frame.number, id(self._anchor))
        self._kept.append(node)
        names = frozenset(
            name.id
            for generator in node.generators
            for name in ast.walk(generator.target)
            if isinstance(name, ast.Name)
        )
        return dataclasses.replace(
            frame,
            number=self._frames.setdefault(key, len(self._frames) + 1),
            local=names,
            outer=frame,
            loops=[],
        )

    def comprehension_home(self, frame: Frame) -> Frame:
        """Where `:=` stores: outside of comprehensions."""
        while frame.outer is not None and frame.outer.tree is frame.tree:
            frame = frame.outer
        return frame
