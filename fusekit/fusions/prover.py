"""The one prover: may these evaluations happen together, before the first of them?

Between the first statement and the last wanted evaluation anything may happen, on any way, but this: a
write into what the wanted evaluations read, a new value under the name that the rewritten text reads, a
write into the weights of a part or another part in its place, and another grad mode or autocast state.
What each expression may write, and what may share storage, `fusekit.forward.effects` works out; an
evaluation that moves across the rest sees the same input and gives the same value.

An `if` between them is followed in both arms, also in the one that the trace did not take: what decides it
may change later.
"""

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn as nn
from torch import fx

from fusekit.forward import Span
from fusekit.forward.effects import Effect, Region, on, touches
from fusekit.forward.names import FUNCTIONS, rebound_names
from fusekit.forward.reads import SEES_NAMES, attribute_chain
from fusekit.forward.rewriting import blocks_of
from fusekit.fusions.match import Refused
from fusekit.fusions.view import UNEVALUATED, Block, ForwardView, evaluation, line_of, stored_by


@dataclass(frozen=True)
class Proof:
    """Where the wanted evaluations may happen together, and what the proof leans on.

    `called` are the submodules that run between them: the proof holds as long as no hook does, and as
    long as `settings` of theirs (path, attribute) are what they are.
    """

    statement: ast.stmt  # before it
    called: frozenset[str]
    settings: tuple[tuple[str, str], ...] = ()
    in_arms: frozenset[ast.expr] = frozenset()  # those that happen only where a setting says so


def movable(view: ForwardView, nodes: Sequence[fx.Node], inputs: frozenset[str], arms: bool = False) -> Proof:
    """Prove that the evaluations of `nodes` may all happen right before the first one's statement.

    `inputs` are the names that the text put there will read. With `arms`, some of the evaluations may
    stand in arms of an `if` that a setting of the module decides, and be made for nothing where it says
    otherwise; at least one must happen on every way. Raises `Refused` with the reason and the line that
    decides.
    """
    wanted: dict[ast.expr, fx.Node] = {}
    for node in nodes:
        expression = view.expression(node)
        if expression is None or expression in wanted:
            span = node.meta.get("span")
            raise Refused(
                "module-escapes",
                f"{node.target} is not called by an expression of its own in the forward",
                span.line if span else view.source.line,
            )
        wanted[expression] = node
    _same_context(nodes)
    proof, walk = _proven(view, wanted, inputs, arms)
    _nothing_unseen(view, nodes, walk)
    return proof


def movable_unseen(view: ForwardView, wanted: dict[ast.expr, fx.Node], inputs: frozenset[str]) -> Proof:
    """`movable` for expressions that the trace did not come by, each like the one that made its node."""
    return _proven(view, wanted, inputs, False)[0]


def _proven(
    view: ForwardView, wanted: dict[ast.expr, fx.Node], inputs: frozenset[str], arms: bool
) -> tuple[Proof, "_Walk"]:
    statements = _region(view, list(wanted), arms)
    _looks_at_itself(view)
    if view.effects.failed is not None:
        raise Refused("input-may-be-written", view.effects.failed, statements[0].lineno)
    guarded = _Guarded.of(view, wanted, inputs)
    for name in sorted(inputs):
        if not view.is_local(name) or (name in view.effects.volatile and not guarded.is_one_value):
            why = f"{name} may be stored by other code: it is global, or a nested function stores it"
            raise Refused("input-rebound", why, statements[0].lineno)
    walk = _Walk(view, guarded, set(wanted), arms)
    if not walk.block(statements, ()):
        raise Refused(
            "different-branches", "the parts are not evaluated in one run of statements", statements[0].lineno
        )
    if not walk.sure:
        raise _in_different("different-branches", "branches", view, list(wanted))
    _weights_stay(view, guarded)
    called, settings = frozenset(walk.called), tuple(sorted(walk.settings))
    return Proof(statements[0], called, settings, frozenset(walk.in_arms)), walk


# -- what must stay as it is ------------------------------------------------------------------------


@dataclass
class _Guarded:
    """What the wanted evaluations read: nothing of it may be written between them."""

    view: ForwardView
    wanted: dict[ast.expr, fx.Node]
    inputs: frozenset[str]
    read: frozenset[Region]  # storage of what they compute with
    weights: frozenset[Region]  # of the modules that they call
    places: frozenset[tuple[int, str]]  # (object, attribute) on the way to those
    is_one_value: bool  # the inputs are one value wherever they are read, whatever name it has

    @classmethod
    def of(cls, view: ForwardView, wanted: dict[ast.expr, fx.Node], inputs: frozenset[str]) -> "_Guarded":
        read: set[Region] = set()
        weights: set[Region] = set()
        places: set[tuple[int, str]] = set()
        tokens = set()
        for expression, node in wanted.items():
            for operand in _operands(expression):
                value = view.effects.value(operand)
                if value is None:
                    raise Refused(
                        "input-may-be-written",
                        f"{view.text(operand)} is not known to be evaluated",
                        expression.lineno,
                    )
                read |= value.regions
                if isinstance(operand, ast.Name) and operand.id in inputs:
                    tokens.add(value.token)
            if any(user in wanted.values() for user in node.users):
                value = view.effects.value(expression)
                read |= value.regions if value is not None else set()
            if node.op == "call_module":
                places |= _places(view, str(node.target))
                weights |= _weights(view.submodule(str(node.target)))
        one = len(tokens) == 1 and None not in tokens
        return cls(
            view,
            wanted,
            inputs,
            frozenset(read),
            frozenset(weights),
            frozenset(places),
            one or not on("values"),
        )

    def check(self, node: ast.AST, effect: Effect) -> None:
        """Raise where an effect of `node` touches what must stay."""
        if not on("aliases") and not self.inputs & {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}:
            return
        line = getattr(node, "lineno", None)
        if effect.kind == "context":
            why = f"{effect.why} between the parts, which may change the grad mode or autocast"
            raise Refused("different-context", why, line)
        if effect.kind == "store":
            if self.is_replaced_by(effect) and on("weights"):
                raise Refused("input-written", f"a part is replaced between the parts: {effect.why}", line)
            return
        if touches(effect.regions, self.read) is None:
            if not on("weights") or not any(
                region.kind == "outside" or region in self.weights for region in effect.regions
            ):
                return
            if effect.kind == "write" and effect.regions & self.weights:
                why = f"a part's weight is written between the parts: {effect.why}"
                raise Refused("input-written", why, line)
            why = f"between the parts {effect.why}: it is not known to leave their weights alone"
            raise Refused("input-may-be-written", why, line)
        if effect.kind == "may write":
            why = f"between the parts {effect.why}: it is not known to leave their input alone"
            raise Refused("input-may-be-written", why, line)
        raise Refused("input-written", self._story(node, effect), line)

    def is_replaced_by(self, effect: Effect) -> bool:
        """Whether a store puts something else in the place of a part or a weight of one."""
        owner, attribute = effect.stored or (0, "")
        if attribute == "*":
            return any(owner == one for one, _ in self.places)
        return bool({(owner, attribute), (owner, "[]"), (owner, "*")} & self.places)

    def _story(self, node: ast.AST, effect: Effect) -> str:
        """The three lines that decide: a read, the write, another read; and how the one reaches the other."""
        lines = sorted({expression.lineno for expression in self.wanted})
        names = " and ".join(sorted(self.inputs)) or "what they read"
        text = f"{names} is written between the parts: {effect.why}"
        how = _sharing(self.view, node, self.read, self.inputs)
        if how:
            text += f"; {how}"
        if len(lines) > 1:
            written = getattr(node, "lineno", 0)
            text += f" (read in line {lines[0]}, written in line {written}, read in line {lines[-1]})"
        return text


def _sharing(view: ForwardView, node: ast.AST, regions: frozenset[Region], inputs: frozenset[str]) -> str:
    """In a clause, how a name in a statement that writes comes to share storage with the input."""
    aside = {*inputs, view.source.self_name}
    names = [n.id for n in ast.walk(node) if isinstance(n, ast.Name) and n.id not in aside]
    for parameter in view.effects.given:
        if parameter.name in names and touches(parameter.value.regions, regions):
            return f"the caller may pass one tensor for {parameter.name} and for what the parts read"
    for stored in view.effects.stored:
        if stored.name not in names or stored.node is node or not stored.value.regions & regions:
            continue
        value = getattr(stored.node, "value", getattr(stored.node, "iter", None))
        if not isinstance(value, ast.expr):
            return f"{stored.name} may share its storage since line {getattr(stored.node, 'lineno', 0)}"
        rule = next((view.effects.views[n] for n in ast.walk(value) if n in view.effects.views), None)
        how = f"{stored.name} may share its storage, by `{view.short(value)}` in line {value.lineno}"
        return f"{how}: {rule}" if rule else how
    return ""


def _operands(expression: ast.expr) -> Iterator[ast.expr]:
    """What an expression computes with."""
    if isinstance(expression, ast.Call):
        if isinstance(expression.func, ast.Attribute):
            yield expression.func.value
        for argument in expression.args:
            yield argument.value if isinstance(argument, ast.Starred) else argument
        for keyword in expression.keywords:
            yield keyword.value
    elif isinstance(expression, ast.BinOp):
        yield from (expression.left, expression.right)
    elif isinstance(expression, ast.UnaryOp):
        yield expression.operand
    elif isinstance(expression, ast.Compare):
        yield from (expression.left, *expression.comparators)
    elif isinstance(expression, (ast.Subscript, ast.Attribute)):
        yield expression.value


def _places(view: ForwardView, path: str) -> set[tuple[int, str]]:
    """Where a store would put another module or weight in the place of a part's."""
    found: set[tuple[int, str]] = set()
    owner: nn.Module | None = view.module
    for name in path.split("."):
        if owner is None:
            break
        found |= {(id(owner), one) for one in (name, "forward", "__class__", "_modules", "__dict__")}
        found.add((id(owner._modules), "[]"))
        owner = owner._modules.get(name)
    if owner is not None:
        for inner in owner.modules():
            found.add((id(inner), "*"))  # whatever is stored on a part
            found |= {(id(one), "[]") for one in inner.__dict__.values() if isinstance(one, dict)}
    return found


def _weights(module: nn.Module | None) -> set[Region]:
    found = set()
    for tensor in (*module.parameters(), *module.buffers()) if module is not None else ():
        try:
            found.add(Region("own", ("storage", tensor.untyped_storage()._cdata)))
        except Exception:  # a subclass without one storage: the plan refuses it
            continue
    return found


def _weights_stay(view: ForwardView, guarded: _Guarded) -> None:
    """Refuse where the forward itself lays a part's weight elsewhere: what lies there may be written."""
    for node, effects in view.effects.found.items() if on("weights") else ():
        for effect in effects:
            laid = effect.lays and bool(effect.regions & guarded.weights)
            if laid or (effect.kind == "store" and guarded.is_replaced_by(effect)):
                why = f"the forward stores a weight of a part itself: {effect.why}"
                raise Refused("input-may-be-written", why, getattr(node, "lineno", None))


def _looks_at_itself(view: ForwardView) -> None:
    """Refuse where the forward could tell a rewrite by more than its values."""
    if type(view.module).__getattribute__ is not object.__getattribute__:
        why = "the module finds its attributes by a __getattribute__ of its own"
        raise Refused("module-escapes", why, view.source.tree.lineno)
    called = {node.attr for node in view.called if isinstance(node, ast.Attribute)}
    if called & {"backward", "grad"}:
        why = "the forward takes gradients itself: the parts would share one graph"
        raise Refused("module-escapes", why, view.source.tree.lineno)
    seen = sorted(SEES_NAMES & view.names)
    if seen:
        raise Refused(
            "module-escapes",
            f"the forward uses {seen[0]}(), and would see the names that a rewrite adds",
            view.source.tree.lineno,
        )


# -- the way from the first to the last ----------------------------------------------------------------


@dataclass
class _Walk:
    """The statements of a region in the order of their evaluation, until nothing is left to find."""

    view: ForwardView
    guarded: _Guarded
    left: set[ast.expr]
    arms: bool
    sure: bool = False  # one of the wanted was evaluated, whichever way was taken
    begun: bool = False  # one of the wanted was evaluated
    in_arms: set[ast.expr] = field(default_factory=set)
    called: set[str] = field(default_factory=set)
    settings: set[tuple[str, str]] = field(default_factory=set)
    passed: set[ast.AST] = field(default_factory=set)

    def block(self, statements: Block, tests: tuple[ast.expr, ...]) -> bool:
        """Whether everything wanted was found; `tests` are those of the arms that this stands in."""
        for statement in statements:
            inside = [node for node in ast.walk(statement) if node in self.left]
            if isinstance(statement, ast.If):
                if self._branches(statement, tests):
                    return True
                continue
            if not inside:
                self._whole(statement)
                continue
            if tests and isinstance(statement, ast.Return) and len(inside) < len(self.left):
                raise self._ending(statement)
            if self._expressions(statement, tests):
                return True
            self._one(statement)
            for inner in blocks_of(statement):
                for one in inner:
                    self._whole(one)
        return False

    def _whole(self, statement: ast.stmt) -> None:
        """A statement between the parts, with all that stands in it."""
        leaves = self._leaves(statement)
        if leaves is not None:
            raise self._ending(leaves)
        for node in ast.walk(statement):
            self._one(node)
        stored = rebound_names([statement])
        for node in ast.walk(statement):
            self._stores(node, stored & stored_by(node))

    def _ending(self, statement: ast.stmt) -> Refused:
        return Refused(
            "different-branches",
            f"{self.view.text(statement)} may end the forward between the parts",
            statement.lineno,
        )

    def _leaves(self, statement: ast.stmt) -> ast.stmt | None:
        """A statement in it that leads past the parts behind it; to raise is one before any was evaluated."""
        raising = () if self.sure else (ast.Raise, ast.Assert)
        todo: list[tuple[ast.AST, bool]] = [(statement, False)]
        while todo:
            node, in_loop = todo.pop()
            if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
                continue
            jumps = isinstance(node, (ast.Break, ast.Continue)) and not in_loop
            if jumps or isinstance(node, (ast.Return, *raising)):
                assert isinstance(node, ast.stmt)
                return node
            todo += [(child, in_loop or _is_loop(node)) for child in ast.iter_child_nodes(node)]
        return None

    def _branches(self, statement: ast.If, tests: tuple[ast.expr, ...]) -> bool:
        if not _is_setting(statement.test, self.view.source.self_name):
            inside = (node for inner in blocks_of(statement) for one in inner for node in ast.walk(one))
            for expression in (node for node in inside if node in self.left):
                raise self._sometimes(expression, statement.test)  # type: ignore[arg-type]
        if self._expressions(statement.test, tests):
            return True
        for arm in (statement.body, statement.orelse):
            if self.sure and self._only_raises(arm):
                continue  # nothing wanted happens after it
            if self.block(arm, (*tests, statement.test)):
                return True
        return False

    def _sometimes(self, expression: ast.expr, test: ast.expr) -> Refused:
        text = " ".join(self.view.text(test).split())
        return Refused(
            "different-branches",
            f"{self.view.text(expression)} is evaluated only where {text} says so, which each call decides "
            "anew",
            expression.lineno,
        )

    def _only_raises(self, arm: Block) -> bool:
        if not arm or not isinstance(arm[-1], ast.Raise):
            return False
        return not any(node in self.left for statement in arm for node in ast.walk(statement))

    def _expressions(self, node: ast.AST, tests: tuple[ast.expr, ...]) -> bool:
        view = self.view
        for expression, conditional in evaluation(node):
            if expression in self.left and conditional:
                if not self.arms or _settings_around(view, node, expression) is None:
                    why = f"{view.text(expression)} is evaluated only sometimes"
                    raise Refused("different-branches", why, expression.lineno)
        for expression, conditional in evaluation(node):
            if expression not in self.guarded.wanted:
                self._one(expression)
                self._stores(expression, stored_by(expression))
                if isinstance(expression, COMPREHENSIONS):
                    self._stores(expression, rebound_names([ast.Expr(expression)]))
                    for inner in ast.walk(expression):
                        self._one(inner)
                continue
            if tests or conditional:
                self.in_arms.add(expression)
            else:
                self.sure = True
            self.begun = True
            self.left.discard(expression)
            if not self.left:
                return True
        return False

    def _one(self, node: ast.AST) -> None:
        """One node between the parts: what it does, and what it calls."""
        self.passed.add(node)
        for effect in self.view.effects.at(node):
            self.guarded.check(node, effect)
        for module in self.view.effects.called.get(node, ()):
            path = self.view.paths.get(id(module))
            if path is not None:
                self.called.add(path)
        for owner, name in self.view.effects.settings.get(node, ()):
            path = "" if owner == id(self.view.module) else self.view.paths.get(owner)
            if path is not None:
                self.settings.add((path, name))

    def _stores(self, node: ast.AST, names: set[str]) -> None:
        """Names that are stored between the parts."""
        if not on("rebinding"):
            return
        view = self.view
        mine = self.guarded.inputs | {view.source.self_name}
        for name in sorted(names & mine):
            if self.begun and self.guarded.is_one_value and name != view.source.self_name:
                continue  # a new value that the parts behind do not read, or the same again
            statement = _statement_of(view, node)
            raise Refused(
                "input-rebound",
                f"{name} is stored again between the parts: {view.short(statement)}",
                getattr(node, "lineno", None),
            )


# What `evaluation` gives as one.
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.Lambda)


def _is_loop(node: ast.AST) -> bool:
    return isinstance(node, (ast.For, ast.AsyncFor, ast.While))


def _statement_of(view: ForwardView, node: ast.AST) -> ast.expr | ast.stmt:
    for statement in ast.walk(view.source.tree):
        if isinstance(statement, (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Expr, ast.For, ast.With)):
            if any(inner is node for inner in ast.walk(statement)):
                return statement
    return node  # type: ignore[return-value]


def _settings_around(view: ForwardView, root: ast.AST, expression: ast.expr) -> ast.expr | None:
    """The test of the one conditional expression around `expression`, where it is a setting."""
    around = [
        node
        for node in ast.walk(root)
        if isinstance(node, (ast.IfExp, ast.BoolOp, ast.Compare))
        and any(inner is expression for inner in ast.walk(node))
    ]
    if len(around) != 1 or not isinstance(around[0], ast.IfExp):
        return None
    test = around[0].test
    return test if _is_setting(test, view.source.self_name) else None


def _is_setting(test: ast.expr, own: str) -> bool:
    """Whether a test asks for attributes of the module alone, and not for its mode."""
    if isinstance(test, ast.BoolOp):
        return all(_is_setting(value, own) for value in test.values)
    if isinstance(test, ast.UnaryOp):
        return _is_setting(test.operand, own)
    if isinstance(test, ast.Compare):
        return all(_is_setting(value, own) for value in (test.left, *test.comparators))
    if isinstance(test, (ast.Tuple, ast.List)):
        return all(_is_setting(value, own) for value in test.elts)
    chain = attribute_chain(test, own)
    return isinstance(test, ast.Constant) or (bool(chain) and chain[-1] != "training")


def _same_context(nodes: Sequence[fx.Node]) -> None:
    for node in nodes[1:]:
        if node.meta["context"] != nodes[0].meta["context"]:
            raise Refused(
                "different-context",
                f"{nodes[0].target} and {node.target} run under different grad modes or autocast states",
                node.meta["span"].line,
            )


def _region(view: ForwardView, expressions: list[ast.expr], arms: bool) -> list[ast.stmt]:
    """The statements from the first of `expressions` to the last, of the innermost block around all."""
    chains = []
    for expression in expressions:
        chain = view.chain(expression)
        if not chain:
            raise Refused(
                "different-branches",
                f"{view.text(expression)} stands in a comprehension, lambda or nested function",
                expression.lineno,
            )
        chains.append(chain)
    depth = 0
    while all(depth < len(chain) and chain[depth][0] is chains[0][depth][0] for chain in chains):
        depth += 1
    block = chains[0][depth - 1][0]
    for chain in chains:
        for around, index in chain[depth - 1 : -1]:
            if isinstance(around[index], (ast.With, ast.AsyncWith)):
                raise _in_different("different-context", "with blocks", view, expressions)
            if not arms or not isinstance(around[index], ast.If):
                raise _in_different("different-branches", "branches", view, expressions)
    indices = [chain[depth - 1][1] for chain in chains]
    return block[min(indices) : max(indices) + 1]


def _in_different(reason: str, where: str, view: ForwardView, expressions: list[ast.expr]) -> Refused:
    first = view.place(expressions[0])
    others = [other for other in expressions if (place := view.place(other)) and place[0] is not first[0]]  # type: ignore[index]
    one, other = expressions[0], (others or expressions)[-1]
    return Refused(
        reason, f"{view.text(one)} and {view.text(other)} stand in different {where}", other.lineno
    )


# -- the second witness ----------------------------------------------------------------------------------


def _nothing_unseen(view: ForwardView, nodes: Sequence[fx.Node], walk: _Walk) -> None:
    """What the trace saw between the parts came from expressions that were followed, and wrote nothing."""
    if not on("aliases"):
        return
    order = {node: index for index, node in enumerate(view.trace.graph.nodes)}
    places = sorted(order[node] for node in nodes)
    # `x += 1` is a statement: no expression is it.
    statements = {Span.of(node) for node in walk.passed if isinstance(node, ast.AugAssign)}
    read = {s for node in nodes for s in _storages(node.all_input_nodes)}
    for node, index in order.items():
        if not places[0] < index < places[-1] or node.op in UNEVALUATED:
            continue
        made_by = view.expression_at(node)
        followed = made_by in walk.passed or made_by in walk.guarded.wanted
        if not followed and node.meta.get("span") not in statements:
            raise Refused(
                "input-may-be-written",
                f"{node.name} runs between the parts, out of no expression there",
                line_of(node) or view.source.line,
            )
        written = [one for one in node.all_input_nodes if one.name in node.meta.get("written", ())]
        if read & _storages(written):
            raise Refused(
                "input-written", f"{node.name} was seen to write what the parts read", line_of(node)
            )


def _storages(nodes: Sequence[fx.Node]) -> set[int]:
    found = set()
    for node in nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor):
            found.add(value.untyped_storage()._cdata)
    return found
