"""Following every way through a forward: what each name may hold, and what each expression may write.

It is an abstract interpretation of the text. Both arms of an `if` are followed and their states brought
together, a loop is followed until its state no longer changes, a handler from wherever its `try` may have
stopped. Calls are followed into what they call (`calls`).
"""

import ast
import builtins
import sys
from collections.abc import Callable, Hashable, Iterator
from dataclasses import replace
from typing import Any

from fusekit.forward.effects.calls import Calls
from fusekit.forward.effects.frames import Arguments, Frame, Loop
from fusekit.forward.effects.known import is_harmless_manager, truth
from fusekit.forward.effects.notes import TooMuch
from fusekit.forward.effects.rules import on
from fusekit.forward.effects.values import (
    ANY,
    BOTTOM,
    CONTAINER,
    FUNCTION,
    KNOWN,
    OUTSIDE,
    PLAIN,
    PLAIN_VALUE,
    REST,
    TENSOR,
    UNSET,
    State,
    Value,
    anything,
    container,
    join,
    joined,
    meet,
    plain,
    tensor,
)
from fusekit.forward.reads import MISSING

ROUNDS = 30  # of a loop, until its state must have settled


class Interpreter(Calls):
    """Statements and expressions; one for one forward."""

    def block(self, statements: list[ast.stmt], state: State | None, frame: Frame) -> State | None:
        """The state behind the statements, None where no way leads there."""
        for statement in statements:
            if state is None:
                return None
            self._may_raise(state, frame, statement)
            state = self.statement(statement, state, frame)
            if state is not None:
                self._may_raise(state, frame, statement)
        return state

    def _may_raise(self, state: State, frame: Frame, place: ast.stmt) -> None:
        for seen in frame.tries:
            seen[0] = meet(seen[0], state.copy(), (id(seen), "try"))

    def statement(self, node: ast.stmt, state: State, frame: Frame) -> State | None:
        self.count()
        found: Callable[..., State | None] | None = getattr(self, f"do_{type(node).__name__}", None)
        if found is None:
            self.unknown(node, state, [anything({OUTSIDE})], f"a {type(node).__name__} statement", frame)
            return state
        return found(node, state, frame)

    # -- simple statements ----------------------------------------------------------------------

    def do_Pass(self, node: ast.Pass, state: State, frame: Frame) -> State:
        return state

    def do_Expr(self, node: ast.Expr, state: State, frame: Frame) -> State:
        self.evaluate(node.value, state, frame)
        return state

    def do_Assign(self, node: ast.Assign, state: State, frame: Frame) -> State:
        value = self.evaluate(node.value, state, frame)
        for target in node.targets:
            self.store(target, value, state, frame, node)
        return state

    def do_AnnAssign(self, node: ast.AnnAssign, state: State, frame: Frame) -> State:
        if node.value is not None:
            self.store(node.target, self.evaluate(node.value, state, frame), state, frame, node)
        return state

    def do_AugAssign(self, node: ast.AugAssign, state: State, frame: Frame) -> State:
        target = node.target
        if isinstance(target, ast.Name):
            old = self.load_name(target.id, state, frame, target)
        elif isinstance(target, ast.Attribute):
            owner = self.evaluate(target.value, state, frame)
            old = self.attribute(owner, target.attr, state, frame, target)
        else:
            assert isinstance(target, ast.Subscript)
            owner = self.evaluate(target.value, state, frame)
            index = self.evaluate(target.slice, state, frame)
            old = self.item(owner, index, state, frame, target)
        other = self.evaluate(node.value, state, frame)
        new = BOTTOM
        if TENSOR in old.kinds and on("augmented"):
            self.write(node, old.regions, "writes in place")
            new = join(new, tensor(old.regions))
        elif TENSOR in old.kinds:
            new = join(new, tensor({self.region(node, frame)}))
        if CONTAINER in old.kinds:
            for region in old.regions:
                self._loosen(region, state)
                state.put(
                    region,
                    REST,
                    joined([self.element(other, state, frame, node), *self.pairs_of(other, state)]),
                )
            new = join(new, container(old.regions))
        if old.kinds & {ANY, KNOWN, FUNCTION}:
            new = join(new, self.unknown(node, state, [old, other], "is changed in place", frame))
        if PLAIN in old.kinds:
            new = join(new, self.arithmetic(node, [old, other], state, frame))
        self.store(target, new.without_token(), state, frame, node)
        return state

    def do_Delete(self, node: ast.Delete, state: State, frame: Frame) -> State:
        for target in node.targets:
            for part in _parts(target):
                if isinstance(part, ast.Name):
                    state.names.pop((self.scope(part.id, frame).number, part.id), None)
                elif isinstance(part, (ast.Attribute, ast.Subscript)):
                    owner = self.evaluate(part.value, state, frame)
                    if isinstance(part, ast.Subscript):
                        self.evaluate(part.slice, state, frame)
                    for region in owner.regions if isinstance(part, ast.Subscript) else ():
                        self._loosen(region, state)
                    if isinstance(part, ast.Attribute):
                        self.stored_attribute(owner, part.attr, anything({OUTSIDE}), state, frame, node)
                    elif ANY in owner.kinds:
                        self.unknown(node, state, [owner], "deletes an item", frame)
        return state

    def do_Return(self, node: ast.Return, state: State, frame: Frame) -> None:
        value = self.evaluate(node.value, state, frame) if node.value is not None else plain(None, True)
        frame.returned.append(value)
        frame.exit = meet(frame.exit, state, (frame.number, "return"))

    def do_Raise(self, node: ast.Raise, state: State, frame: Frame) -> None:
        for part in (node.exc, node.cause):
            if part is not None:
                self.evaluate(part, state, frame)
        self._may_raise(state, frame, node)

    def do_Assert(self, node: ast.Assert, state: State, frame: Frame) -> State | None:
        _, state_true, state_false = self.test(node.test, state, frame)
        if state_false is not None and node.msg is not None:
            self.evaluate(node.msg, state_false, frame)
        return state_true

    def do_Global(self, node: ast.Global | ast.Nonlocal, state: State, frame: Frame) -> State:
        return state

    do_Nonlocal = do_Global

    def do_Import(self, node: ast.Import | ast.ImportFrom, state: State, frame: Frame) -> State:
        for alias in node.names:
            name = alias.asname or alias.name.partition(".")[0]
            if isinstance(node, ast.ImportFrom):
                home = sys.modules.get(node.module or "") if not node.level else None
                found = vars(home).get(alias.name, MISSING) if home is not None else MISSING
            else:
                found = sys.modules.get(alias.name if alias.asname else name, MISSING)
            value = anything({OUTSIDE}) if found is MISSING else self.value_of(found, alias.name)
            if name != "*":
                self.bind(name, value, state, frame, node)
        return state

    do_ImportFrom = do_Import

    def do_FunctionDef(self, node: ast.FunctionDef, state: State, frame: Frame) -> State:
        signature = node.args
        every = [
            *signature.posonlyargs,
            *signature.args,
            *signature.kwonlyargs,
            signature.vararg,
            signature.kwarg,
        ]
        for annotation in (*(one.annotation for one in every if one is not None), node.returns):
            if annotation is not None:
                self.evaluate(annotation, state, frame)
        value = self.closure(node, state, frame)
        for decorator in node.decorator_list:
            called = self.evaluate(decorator, state, frame)
            value = self.unknown(decorator, state, [called, value], "decorates a function", frame)
        self.bind(node.name, value, state, frame, node)
        return state

    do_AsyncFunctionDef = do_FunctionDef

    def do_ClassDef(self, node: ast.ClassDef, state: State, frame: Frame) -> State:
        captured = [
            self.load_name(name.id, state, frame, name)
            for name in ast.walk(node)
            if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Load)
        ]
        self.bind(
            node.name, self.unknown(node, state, captured, "a class is made", frame), state, frame, node
        )
        return state

    # -- blocks ---------------------------------------------------------------------------------

    def do_If(self, node: ast.If, state: State, frame: Frame) -> State | None:
        _, yes, no = self.test(node.test, state, frame)
        if not on("branches"):
            return (
                self.block(node.body, yes, frame) if yes is not None else self.block(node.orelse, no, frame)
            )
        return meet(
            self.block(node.body, yes, frame), self.block(node.orelse, no, frame), (id(node), frame.number)
        )

    def test(self, node: ast.expr, state: State, frame: Frame) -> tuple[Value, State | None, State | None]:
        """(its value, the state where it holds, the state where it does not)."""
        value = self.evaluate(node, state, frame)
        self.asked(value, node, state, frame)
        holds = truth(value)
        if holds is not None:
            self.decides(value, node)
            return (value, state, None) if holds else (value, None, state)
        return value, state, state.copy()

    def asked(self, value: Value, node: ast.AST, state: State, frame: Frame) -> None:
        """A value is asked for its truth."""
        if ANY in value.kinds:
            self.unknown(
                node, state, [replace(value, kinds=frozenset({ANY}))], "is asked for its truth", frame
            )
        for one in value.objects if KNOWN in value.kinds else ():
            self.asked_object(one, node, state, frame)

    def do_While(self, node: ast.While, state: State, frame: Frame) -> State | None:
        def begin(at: State) -> tuple[State | None, State | None]:
            _, yes, no = self.test(node.test, at, frame)
            return yes, no

        return self.loop(node, state, frame, begin, node.body, node.orelse)

    def do_For(self, node: ast.For, state: State, frame: Frame) -> State | None:
        source = self.evaluate(node.iter, state, frame)

        def begin(at: State) -> tuple[State | None, State | None]:
            done = at.copy()
            element = self.element(source, at, frame, node.iter)
            if not element.kinds:
                return None, done  # over nothing
            self.store(node.target, element, at, frame, node)
            return at, done

        return self.loop(node, state, frame, begin, node.body, node.orelse)

    do_AsyncFor = do_For

    def loop(
        self,
        node: ast.AST,
        state: State,
        frame: Frame,
        begin: Callable[[State], tuple[State | None, State | None]],
        body: list[ast.stmt],
        orelse: list[ast.stmt],
    ) -> State | None:
        head = state
        with self.silence():
            for _ in range(ROUNDS if on("loops") else 0):
                found = self._round(head.copy(), frame, begin, body)[1]
                new = meet(head, found, (id(node), frame.number, "loop"))
                if new is None or new == head:
                    break
                head = new
            else:
                if on("loops"):
                    raise TooMuch(f"the loop at line {getattr(node, 'lineno', 0)} does not settle")
        done, _, breaks = self._round(head.copy(), frame, begin, body)
        if done is not None:
            done = self.block(orelse, done, frame)
        return meet(done, breaks, (id(node), frame.number, "end"))

    def _round(
        self,
        state: State,
        frame: Frame,
        begin: Callable[[State], tuple[State | None, State | None]],
        body: list[ast.stmt],
    ) -> tuple[State | None, State | None, State | None]:
        """(the state when the loop is done, at the end of a round, at a `break`)."""
        loop = Loop()
        inside, done = begin(state)
        frame.loops.append(loop)
        try:
            end = self.block(body, inside, frame)
        finally:
            frame.loops.pop()
        return done, meet(end, loop.continues, (id(body), frame.number, "continue")), loop.breaks

    def do_Break(self, node: ast.Break, state: State, frame: Frame) -> None:
        loop = frame.loops[-1]
        loop.breaks = meet(loop.breaks, state, (id(node), frame.number))

    def do_Continue(self, node: ast.Continue, state: State, frame: Frame) -> None:
        loop = frame.loops[-1]
        loop.continues = meet(loop.continues, state, (id(node), frame.number))

    def do_With(self, node: ast.With, state: State, frame: Frame) -> State | None:
        harmless = True
        for item in node.items:
            with self.in_with():
                manager = self.evaluate(item.context_expr, state, frame)
            value = anything({*manager.regions, self.region(item.context_expr, frame)})
            if frame.yielded is not None:
                self.context(item.context_expr, "is entered by a generator, which may be left inside of it")
            if not is_harmless_manager(manager):
                harmless = False
                value = self.unknown(item.context_expr, state, [manager], "is entered", frame)
                self.context(item.context_expr, "is a context manager that is not known")
            if item.optional_vars is not None:
                self.store(item.optional_vars, value, state, frame, node)
        seen: list[State | None] = [state.copy()]
        frame.tries.append(seen)
        try:
            end = self.block(node.body, state, frame)
        finally:
            frame.tries.pop()
        end = meet(end, seen[0], (id(node), frame.number))  # it may have swallowed an exception
        if end is not None and not harmless:
            for item in node.items:
                self.unknown(item.context_expr, end, [anything({OUTSIDE})], "is left", frame)
        return end

    do_AsyncWith = do_With

    def do_Try(self, node: ast.Try, state: State, frame: Frame) -> State | None:
        seen: list[State | None] = [state.copy()]
        exits: list[State | None] = [None]
        outer_exit, frame.exit = frame.exit, None
        loop = frame.loops[-1] if frame.loops and node.finalbody else None
        if loop is not None:
            outer_jumps = loop.breaks, loop.continues
            loop.breaks = loop.continues = None
        if node.finalbody:
            frame.tries.append(exits)
        frame.tries.append(seen)
        try:
            end = self.block(node.body, state, frame)
        finally:
            frame.tries.pop()
        caught = seen[0] if on("handlers") else None
        end = self.block(node.orelse, end, frame)
        for handler in node.handlers:
            start = caught.copy() if caught is not None else None
            if start is not None:
                if handler.type is not None:
                    self.evaluate(handler.type, start, frame)
                if handler.name:
                    self.bind(handler.name, anything({OUTSIDE}), start, frame, handler)
            end = meet(end, self.block(handler.body, start, frame), (id(handler), frame.number))
        if node.finalbody:
            frame.tries.pop()
            returned, frame.exit = frame.exit, None
            unwinding = meet(exits[0], returned, (id(node), frame.number, "finally"))
            if unwinding is not None:
                after = self.block(node.finalbody, unwinding.copy(), frame)
                returned = after if returned is not None else None
            end = self.block(node.finalbody, end, frame) if end is not None else None
            if loop is not None:
                jumps = [self.block(node.finalbody, at, frame) for at in (loop.breaks, loop.continues)]
                loop.breaks = meet(outer_jumps[0], jumps[0], (id(node), frame.number, "break"))
                loop.continues = meet(outer_jumps[1], jumps[1], (id(node), frame.number, "continue"))
            frame.exit = meet(frame.exit, returned, (id(node), frame.number, "left"))
        frame.exit = meet(outer_exit, frame.exit, (id(node), frame.number, "exit"))
        return end

    do_TryStar = do_Try

    def do_Match(self, node: ast.Match, state: State, frame: Frame) -> State | None:
        subject = self.evaluate(node.subject, state, frame)
        if ANY in subject.kinds:
            self.unknown(node.subject, state, [subject], "is matched", frame)
        inner = joined([subject, *self.all_items(subject, state)])
        inner = replace(inner, kinds=inner.kinds | (subject.kinds & {ANY}))
        end: State | None = None
        rest: State | None = state
        for case in node.cases:
            assert rest is not None
            at = rest.copy()
            for pattern in ast.walk(case.pattern):
                if isinstance(pattern, (ast.MatchAs, ast.MatchStar)) and pattern.name:
                    whole = isinstance(pattern, ast.MatchStar)
                    value = self.listed(pattern, [inner], at, frame) if whole else inner
                    self.bind(pattern.name, value, at, frame, pattern)
                elif isinstance(pattern, ast.MatchMapping) and pattern.rest:
                    self.bind(pattern.rest, self.listed(pattern, [inner], at, frame), at, frame, pattern)
                elif isinstance(pattern, ast.MatchValue):
                    self.evaluate(pattern.value, at, frame)
            rest = meet(rest, at.copy(), (id(case), frame.number, "tried"))  # names stay when it fails
            yes: State | None = at
            if case.guard is not None:
                _, yes, no = self.test(case.guard, at, frame)
                rest = meet(rest, no, (id(case), frame.number))
            end = meet(end, self.block(case.body, yes, frame), (id(case), frame.number, "end"))
        return meet(end, rest, (id(node), frame.number))

    # -- names ----------------------------------------------------------------------------------

    def scope(self, name: str, frame: Frame) -> Frame:
        """The frame whose local `name` is meant; `frame` itself for a global."""
        at: Frame | None = frame
        while at is not None:
            if name in at.local:
                return at
            at = at.outer
        return frame

    def load_name(self, name: str, state: State, frame: Frame, node: ast.AST) -> Value:
        scope = self.scope(name, frame)
        found = state.names.get((scope.number, name))
        if found is not None:
            return found
        if name in scope.local:
            return anything({OUTSIDE}) if name in self.volatile else BOTTOM
        root = frame
        while root.outer is not None:
            root = root.outer
        for names in (root.cells, root.globals):
            if name in names:
                value = self.value_of(names[name], name, home=root.globals)
                stored = self.globals.get((id(root.globals), name))
                if stored is not None:
                    value = join(value, stored)
                if (
                    name in self.volatile
                    or name in self.restored
                    or (names[name] is None and on("attributes"))
                ):
                    value = join(value, anything({OUTSIDE}))  # until other code stores something there
                return value
        if hasattr(builtins, name):
            return self.value_of(getattr(builtins, name), name)
        return anything({OUTSIDE})

    def bind(self, name: str, value: Value, state: State, frame: Frame, node: ast.AST) -> None:
        scope = self.scope(name, frame)
        if name not in scope.local:  # a global: others may read and store it
            self.escape(value, state)
            key = (id(scope.globals), name)
            self.globals[key] = join(self.globals.get(key, BOTTOM), value.without_token())
            self.left[name] = anything({OUTSIDE})
            if frame.is_forward:
                self.stored_name(node, name, value)
            return
        key = (scope.number, name)
        if value.token is None:
            token: Hashable = ("stored", id(node), key)
            state.retoken(token, frozenset({key}))
            value = replace(value, token=token)
        if scope is not frame and key in state.names:
            value = join(state.names[key], value)
            value = replace(value, token=("stored", id(node), key))
        state.names[key] = value
        if scope.is_forward and scope is frame:
            self.stored_name(node, name, value)

    def store(self, target: ast.expr, value: Value, state: State, frame: Frame, node: ast.AST) -> None:
        if isinstance(target, ast.Name):
            self.bind(target.id, value, state, frame, node)
        elif isinstance(target, (ast.Tuple, ast.List)):
            self.unpack(target.elts, value, state, frame, node)
        elif isinstance(target, ast.Starred):
            item = self.element(value, state, frame, node)
            self.store(target.value, self.listed(target, [item], state, frame), state, frame, node)
        elif isinstance(target, ast.Attribute):
            owner = self.evaluate(target.value, state, frame)
            self.stored_attribute(owner, target.attr, value, state, frame, target)
        elif isinstance(target, ast.Subscript):
            owner = self.evaluate(target.value, state, frame)
            index = self.evaluate(target.slice, state, frame)
            self.stored_item(owner, index, value, state, frame, target)

    def unpack(
        self, targets: list[ast.expr], value: Value, state: State, frame: Frame, node: ast.AST
    ) -> None:
        fields = self.exact_items(value, state)
        if fields is not None and not any(isinstance(target, ast.Starred) for target in targets):
            if len(fields) == len(targets):
                for target, item in zip(targets, fields, strict=True):
                    self.store(target, item, state, frame, node)
                return
        item = self.element(value, state, frame, node).without_token()
        for target in targets:
            if isinstance(target, ast.Starred):
                self.store(target.value, self.listed(target, [item], state, frame), state, frame, node)
            else:
                self.store(target, item, state, frame, node)

    # -- expressions ----------------------------------------------------------------------------

    def evaluate(self, node: ast.expr, state: State, frame: Frame) -> Value:
        self.count()
        found: Callable[..., Value] | None = getattr(self, f"of_{type(node).__name__}", None)
        if found is None:
            return self.unknown(node, state, [], f"a {type(node).__name__}", frame)
        value = found(node, state, frame)
        if OUTSIDE in value.regions and state.escaped and on("escapes"):
            value = replace(value, regions=value.regions | state.escaped)
        if frame.is_forward:
            value = self.hinted(node, value)
            self.noted(node, value)
        return value

    def of_Constant(self, node: ast.Constant, state: State, frame: Frame) -> Value:
        return plain(node.value, True)

    def of_JoinedStr(self, node: ast.JoinedStr, state: State, frame: Frame) -> Value:
        for part in node.values:
            if isinstance(part, ast.FormattedValue):
                value = self.evaluate(part.value, state, frame)
                if part.format_spec is not None:
                    self.evaluate(part.format_spec, state, frame)
                if self.is_strange(value, state):
                    self.unknown(part, state, [value], "is written out as text", frame)
        return PLAIN_VALUE

    def of_Name(self, node: ast.Name, state: State, frame: Frame) -> Value:
        return self.load_name(node.id, state, frame, node)

    def of_NamedExpr(self, node: ast.NamedExpr, state: State, frame: Frame) -> Value:
        value = self.evaluate(node.value, state, frame)
        self.bind(node.target.id, value, state, self.comprehension_home(frame), node)
        return value

    def of_Attribute(self, node: ast.Attribute, state: State, frame: Frame) -> Value:
        owner = self.evaluate(node.value, state, frame)
        return self.attribute(owner, node.attr, state, frame, node)

    def of_Subscript(self, node: ast.Subscript, state: State, frame: Frame) -> Value:
        owner = self.evaluate(node.value, state, frame)
        index = self.evaluate(node.slice, state, frame)
        return self.item(owner, index, state, frame, node)

    def of_Slice(self, node: ast.Slice, state: State, frame: Frame) -> Value:
        for part in (node.lower, node.upper, node.step):
            if part is not None:
                self.evaluate(part, state, frame)
        return PLAIN_VALUE

    def of_Starred(self, node: ast.Starred, state: State, frame: Frame) -> Value:
        return self.element(self.evaluate(node.value, state, frame), state, frame, node)

    def of_Tuple(self, node: ast.Tuple | ast.List | ast.Set, state: State, frame: Frame) -> Value:
        region = self.region(node, frame)
        values = [(self.evaluate(item, state, frame), isinstance(item, ast.Starred)) for item in node.elts]
        if all(value.is_plain for value, _ in values) and isinstance(node, ast.Tuple):
            return PLAIN_VALUE
        state.heap.setdefault(region, {})
        exact = not any(star for _, star in values) and not isinstance(node, ast.Set)
        for index, (value, _) in enumerate(values):
            state.put(region, index if exact else REST, value)
        return container({region})

    of_List = of_Tuple
    of_Set = of_Tuple

    def of_Dict(self, node: ast.Dict, state: State, frame: Frame) -> Value:
        region = self.region(node, frame)
        state.heap.setdefault(region, {})
        for key, item in zip(node.keys, node.values, strict=True):
            if key is None:
                for value in self.all_items(self.evaluate(item, state, frame), state):
                    state.put(region, REST, value)
                continue
            found = self.evaluate(key, state, frame)
            state.put(region, _key(found), self.evaluate(item, state, frame))
            if not found.is_plain:
                state.put(region, REST, found)
        return container({region})

    def of_BinOp(self, node: ast.BinOp, state: State, frame: Frame) -> Value:
        left = self.evaluate(node.left, state, frame)
        right = self.evaluate(node.right, state, frame)
        return self.arithmetic(node, [left, right], state, frame)

    def of_UnaryOp(self, node: ast.UnaryOp, state: State, frame: Frame) -> Value:
        value = self.evaluate(node.operand, state, frame)
        if isinstance(node.op, ast.Not):
            self.asked(value, node, state, frame)
            holds = truth(value)
            if holds is None:
                return PLAIN_VALUE
            return replace(plain(not holds, True), settings=value.settings)
        if value.is_plain:
            if isinstance(node.op, ast.USub) and type(value.constant) in (int, float):
                return plain(-value.constant, value.fixed)
            return PLAIN_VALUE
        if isinstance(node.op, ast.UAdd) and TENSOR in value.kinds:
            return join(value.without_token(), self.arithmetic(node, [value], state, frame))  # itself
        return self.arithmetic(node, [value], state, frame)

    def arithmetic(self, node: ast.AST, values: list[Value], state: State, frame: Frame) -> Value:
        """What an operator gives, and whether one of its operands' own code runs for it."""
        strange = [value for value in values if self.is_strange(value, state)]
        containers = [value for value in values if CONTAINER in value.kinds]
        hinted = frame.is_forward and self.is_hinted(node)
        if strange and not hinted:
            found = self.unknown(node, state, values, "is an operator on what may not be a tensor", frame)
        else:
            found = BOTTOM
        if any(TENSOR in value.kinds for value in values) or hinted:
            found = join(found, tensor({self.region(node, frame)}))
        if containers:
            found = join(found, self.listed(node, self.all_of(containers, state), state, frame))
        if not found.kinds or all(PLAIN in value.kinds for value in values):
            found = join(found, PLAIN_VALUE)
        return found

    def of_Compare(self, node: ast.Compare, state: State, frame: Frame) -> Value:
        values = [self.evaluate(node.left, state, frame)]
        values += [self.evaluate(other, state, frame) for other in node.comparators]
        if len(values) == 2:
            folded = _compared(values[0], node.ops[0], values[1])
            if folded is not None:
                return replace(plain(folded, True), settings=values[0].settings | values[1].settings)
        if all(isinstance(op, (ast.Is, ast.IsNot)) for op in node.ops):
            return PLAIN_VALUE
        if all(isinstance(op, (ast.In, ast.NotIn)) for op in node.ops):
            for value in values:
                self.consume(value, node, state)
            if any(self.is_strange(value, state) for value in values):
                self.unknown(node, state, values, "asks what may run code whether it holds something", frame)
            return PLAIN_VALUE
        if any(TENSOR in value.kinds for value in values) and not any(ANY in v.kinds for v in values):
            return join(tensor({self.region(node, frame)}), PLAIN_VALUE)
        return self.arithmetic(node, values, state, frame)

    def of_BoolOp(self, node: ast.BoolOp, state: State, frame: Frame) -> Value:
        found = BOTTOM
        for index, part in enumerate(node.values):
            before = state.copy()
            value = self.evaluate(part, state, frame)
            if index:
                _replace(state, meet(before, state, (id(part), frame.number)))
            if index < len(node.values) - 1:
                self.asked(value, part, state, frame)
                holds = truth(value)
                if holds is not None:
                    self.decides(value, part)
                if holds is not None and holds == isinstance(node.op, ast.Or):
                    return join(found, value) if found.kinds else value
                if holds is not None:
                    continue
            found = join(found, value) if found.kinds else value
        return found

    def of_IfExp(self, node: ast.IfExp, state: State, frame: Frame) -> Value:
        _, yes, no = self.test(node.test, state, frame)
        found = BOTTOM
        one = self.evaluate(node.body, yes, frame) if yes is not None else None
        other = self.evaluate(node.orelse, no, frame) if no is not None else None
        _replace(state, meet(yes, no, (id(node), frame.number)))
        for value in (one, other):
            if value is not None:
                found = join(found, value) if found.kinds else value
        return found

    def of_Lambda(self, node: ast.Lambda, state: State, frame: Frame) -> Value:
        return self.closure(node, state, frame)

    def of_Call(self, node: ast.Call, state: State, frame: Frame) -> Value:
        if self.is_super(node, frame):
            return self.super_object(frame)
        function, receiver = node.func, None
        if isinstance(function, ast.Attribute):
            if isinstance(function.value, ast.Call) and self.is_super(function.value, frame):
                receiver = self.super_object(frame)
            else:
                receiver = self.evaluate(function.value, state, frame)
            called = None
        else:
            called = self.evaluate(function, state, frame)
        arguments = self.arguments(node, state, frame)
        if receiver is not None:
            assert isinstance(function, ast.Attribute)
            found = self.method(receiver, function.attr, arguments, node, state, frame)
        else:
            assert called is not None
            found = self.call(called, arguments, node, state, frame)
        return found.without_token()

    def arguments(self, node: ast.Call, state: State, frame: Frame) -> Arguments:
        found = Arguments()
        for argument in node.args:
            if isinstance(argument, ast.Starred):
                value = self.evaluate(argument.value, state, frame)
                items = self.exact_items(value, state)
                if items is not None and found.rest is None:
                    found.positional += items
                else:
                    item = self.element(value, state, frame, argument)
                    found.rest = item if found.rest is None else join(found.rest, item)
            else:
                value = self.evaluate(argument, state, frame)
                if found.rest is None:
                    found.positional.append(value)
                else:
                    found.rest = join(found.rest, value)
        for keyword in node.keywords:
            value = self.evaluate(keyword.value, state, frame)
            if keyword.arg is not None:
                found.keywords[keyword.arg] = value
                continue
            if ANY in value.kinds:
                self.unknown(keyword, state, [value], "is unpacked", frame)
            for key, item in self.keyed_items(value, state):
                if isinstance(key, str) and key != REST:
                    found.keywords[key] = item
                    found.maybe.add(key)
                else:
                    found.named = item if found.named is None else join(found.named, item)
            if value.regions - frozenset(r for r in value.regions if r.kind == "new"):
                item = anything({OUTSIDE, *value.regions})
                found.named = item if found.named is None else join(found.named, item)
        return found

    def of_ListComp(
        self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp, state: State, frame: Frame
    ) -> Value:
        return self._comprehension(node, [node.elt], state, frame)

    of_SetComp = of_ListComp
    of_GeneratorExp = of_ListComp

    def of_DictComp(self, node: ast.DictComp, state: State, frame: Frame) -> Value:
        return self._comprehension(node, [node.key, node.value], state, frame)

    def _comprehension(self, node: Any, parts: list[ast.expr], state: State, frame: Frame) -> Value:
        inner = self.inner_frame(node, frame)
        first = self.evaluate(node.generators[0].iter, state, frame)
        results: list[Value] = []

        def rounds(index: int, at: State) -> State:
            if index == len(node.generators):
                results.append(self.evaluate(parts[-1], at, inner))
                for part in parts[:-1]:
                    self.evaluate(part, at, inner)
                return at
            generator = node.generators[index]
            source = first if index == 0 else self.evaluate(generator.iter, at, inner)
            for _ in range(2):  # the second time with what the first has left
                once = at.copy()
                element = self.element(source, once, inner, generator.iter)
                if not element.kinds:
                    return at
                self.store(generator.target, element, once, inner, generator.target)
                for test in generator.ifs:
                    self.asked(self.evaluate(test, once, inner), test, once, inner)
                at = meet(at, rounds(index + 1, once), (id(generator), inner.number)) or at
            return at

        with self.listening() as effects:
            _replace(state, rounds(0, state.copy()))
        region = self.region(node, frame)
        state.heap.setdefault(region, {})
        for value in results:
            state.put(region, REST, value)
        if isinstance(node, ast.GeneratorExp):
            self.delay(region, effects)
            self.behind[region] = (node, frame)
            for source in first.regions:
                state.put(region, REST, anything({source}))
        return container({region})

    def of_Yield(self, node: ast.Yield | ast.YieldFrom | ast.Await, state: State, frame: Frame) -> Value:
        value = self.evaluate(node.value, state, frame) if node.value is not None else plain(None, True)
        if isinstance(node, ast.YieldFrom):
            value = self.element(value, state, frame, node)
        if frame.yielded is not None:
            frame.yielded.append(value.without_token())
        if frame.is_forward or isinstance(node, ast.Await):
            self.escape(value, state)
            return self.unknown(node, state, [anything({OUTSIDE})], "lets other code run", frame)
        return anything({OUTSIDE})

    of_YieldFrom = of_Yield
    of_Await = of_Yield

    # -- nested functions -------------------------------------------------------------------------

    def closure(self, node: Any, state: State, frame: Frame) -> Value:
        region = self.region(node, frame)
        positional = [*node.args.posonlyargs, *node.args.args]
        pairs = list(zip(reversed(positional), reversed(node.args.defaults), strict=False))
        pairs += [
            p for p in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True) if p[1] is not None
        ]
        for parameter, default in pairs:
            state.put(region, ("default", parameter.arg), self.evaluate(default, state, frame))
        self.closures[region] = (node, frame)
        at: Frame | None = frame
        while at is not None:
            at.has_closures, at = True, at.outer
        return Value(frozenset({region}), frozenset({FUNCTION}))


def _parts(target: ast.expr) -> Iterator[ast.expr]:
    if isinstance(target, (ast.Tuple, ast.List)):
        for item in target.elts:
            yield from _parts(item)
    else:
        yield target


def _replace(state: State, new: State | None) -> None:
    if new is not None:
        state.names, state.heap, state.escaped = new.names, new.heap, new.escaped


def _key(value: Value) -> Hashable:
    if value.is_plain and value.fixed and not value.settings and type(value.constant) in (int, str):
        return value.constant
    return REST


def _compared(left: Value, op: ast.cmpop, right: Value) -> bool | None:
    """What a comparison of constants gives that will not change."""
    sides = (left, right)
    if isinstance(op, (ast.Is, ast.IsNot)):
        none = [side.is_plain and side.fixed and side.constant is None for side in sides]
        if all(none):
            return isinstance(op, ast.Is)
        other = sides[none.index(True) ^ 1] if any(none) else None
        if (
            other is not None
            and other.kinds
            and PLAIN not in other.kinds
            and other.kinds <= {TENSOR, CONTAINER}
        ):
            return None  # may be optional all the same
        if other is not None and other.is_plain and other.fixed and other.constant is not UNSET:
            return isinstance(op, ast.IsNot)
        return None
    if not all(s.is_plain and s.fixed and isinstance(s.constant, (int, float, str, bool)) for s in sides):
        return None
    one, two = left.constant, right.constant
    if isinstance(op, (ast.Eq, ast.NotEq)):
        return (one == two) == isinstance(op, ast.Eq)
    if isinstance(one, str) or isinstance(two, str):
        return None
    table = {ast.Lt: one < two, ast.LtE: one <= two, ast.Gt: one > two, ast.GtE: one >= two}
    return table.get(type(op))
