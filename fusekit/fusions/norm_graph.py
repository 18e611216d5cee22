"""The RMSNorm, gated or not, that a forward's graph is, and where its parts stand; else what it is."""

import ast
import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fusekit.fusions.match import Refused
from fusekit.fusions.view import ForwardView, line_of
from fusekit.kernels import activation_name
from fusekit.tracing.schema import operator_name

ROOTS = frozenset({"rsqrt", "sqrt", "pow", "reciprocal"})
MEANS = frozenset({"mean", "sum", "norm", "var", "var_mean", "std"})
LENGTHS = frozenset({"norm", "linalg_norm", "linalg_vector_norm", "vector_norm", "normalize"})
LIBRARY = frozenset({"layer_norm", "group_norm", "batch_norm", "instance_norm"})
PARTS = frozenset({"slice", "narrow", "split", "chunk", "cat", "unbind", "index_select", "tensor_split"})
CLAMPS = frozenset({"clamp", "clamp_min", "clip", "maximum", "max"})
RESHAPES = frozenset({"view", "reshape", "flatten", "unflatten"})


@dataclass(frozen=True)
class Norm:
    """What the graph of an RMSNorm says: where its parts stand, and the kind of inverse root.

    `eps_node` is the node that adds eps, or torch's own rms_norm, which takes it (`inverse` is None
    then); None where no eps is added. `act` activates the gate, before the norm where `gate_first`.
    `groups` is the view that cuts the features into groups of `group_size`.
    """

    input: fx.Node
    weight: fx.Node | None
    eps: float | None
    eps_node: fx.Node | None
    inverse: str | None
    offset: float = 0.0
    gate: fx.Node | None = None
    act: fx.Node | None = None
    gate_first: bool = False
    groups: fx.Node | None = None
    group_size: int = 0


def no_norm(why: str, node: fx.Node | None) -> Refused:
    """The refusal of what looks like an RMSNorm and is none, because of `node`."""
    return Refused("not-this-function", f"it looks like an RMSNorm, but {why}", line_of(node))


def read_norm(view: ForwardView) -> Norm:
    """The RMSNorm that the graph is, or `Refused` naming the step that is not one."""
    reader = _Reader(view)
    _check_kind(view, reader.result)
    norm = reader.norm()
    nodes = view.trace.graph.nodes
    left = [node for node in nodes if node not in reader.seen and node.op != "placeholder"]
    left = [node for node in left if node.users or node.meta.get("written")]
    if left:
        raise no_norm(f"{left[0].name} has no place in an RMSNorm", left[0])
    return norm


def looks_like_norm(view: ForwardView) -> bool:
    """Whether a forward as a whole could be meant for a norm: what it returns has the shape of an input."""
    nodes = list(view.trace.graph.nodes)
    names = {operator_name(node) or getattr(node.target, "__name__", "") for node in nodes}
    if any(node.op == "call_module" for node in nodes):
        return False
    if not names & (LIBRARY | LENGTHS | {"rms_norm"}) and not (names & ROOTS and names & MEANS):
        return False
    output = nodes[-1].args[0] if nodes[-1].op == "output" else None
    first = output[0] if isinstance(output, (tuple, list)) and output else output
    shape = _shape(first)
    inputs = [_shape(node) for node in nodes if node.op == "placeholder"]
    return shape is not None and any(
        given is not None and (shape == given or shape == (*given[:-1], 1)) for given in inputs
    )


def inner_norms(view: ForwardView) -> list[fx.Node]:
    """The roots of means of squares over the last dimension: norms written inside of a larger forward."""
    found = []
    for node in view.trace.graph.nodes:
        name = operator_name(node)
        if name not in ("rsqrt", "sqrt") and not (name == "pow" and node.args[1:] in ((-0.5,), (0.5,))):
            continue
        inner = peeled(node.args[0])
        added = _operands(inner, "add") if inner is not None else None
        for side in added or (inner,):
            mean = peeled(side)
            if mean is None or operator_name(mean) != "mean" or not _last_dimension(mean):
                continue
            square = peeled(mean.args[0])
            if square is not None and _is_square(square):
                found.append(node)
                break
    return found


def _check_kind(view: ForwardView, result: Any) -> None:
    """Raise for what is a norm of another kind, naming it."""
    if not isinstance(result, fx.Node):
        why = "it looks like an RMSNorm, but it returns more than the normalised tensor"
        returns = [node.lineno for node in ast.walk(view.source.tree) if isinstance(node, ast.Return)]
        raise Refused("not-this-function", why, max(returns, default=view.source.tree.lineno))
    for node in view.trace.graph.nodes:
        if node.meta.get("written"):
            span = node.meta.get("span")
            why = f"it looks like an RMSNorm, but {node.name} writes in place"
            raise Refused("input-written", why, span.line if span else None)
    for node in view.trace.graph.nodes:
        name = operator_name(node) or getattr(node.target, "__name__", "")
        if name in LIBRARY:
            raise no_norm(f"it calls {name}, which is another norm", node)
        if name in ("var", "var_mean", "std", "std_mean") or (
            name in ("sub", "rsub") and any(_is_mean(argument) for argument in node.args)
        ):
            raise no_norm("it subtracts the mean, as a LayerNorm does", node)
        if name in LENGTHS:
            raise no_norm(
                "it divides by the length of the vector, the root of a sum of squares and not of their mean",
                node,
            )
        if name in PARTS and node.users:
            raise no_norm("it takes apart or joins features: only a part of them is normalised", node)


def _is_mean(node: Any) -> bool:
    inner = peeled(node)
    return inner is not None and operator_name(inner) == "mean"


class _Reader:
    """One graph, read from its result backwards as a product of an input, a root, a weight and a gate."""

    def __init__(self, view: ForwardView):
        self.view = view
        output = next(node for node in view.trace.graph.nodes if node.op == "output")
        self.result = output.args[0]
        self.seen: set[fx.Node] = {output}
        self.reshaped: list[fx.Node] = []
        self.roots: list[tuple[str, fx.Node, Any]] = []  # (kind, the node, what is under the root)
        self.weights: list[tuple[fx.Node, float, fx.Node]] = []  # (weight, offset, the factor)
        self.gates: list[tuple[fx.Node, fx.Node]] = []  # (act, gate)
        self.others: list[fx.Node] = []

    def norm(self) -> Norm:
        top = self.uncast(self.result)
        if operator_name(top) == "rms_norm":
            return self._of_torch(top)
        self.factors(top)
        if not self.roots:
            raise no_norm("its last step is no multiplication by an inverse root", top)
        if len(self.roots) > 1:
            raise no_norm("it multiplies by more than one root", self.roots[1][1])
        inverse, root, under = self.roots[0]
        eps, eps_node, mean = self._eps(under, root)
        square = self._mean(mean)
        if not self.others:
            raise no_norm("it returns only the factor: its input is not scaled by it", top)
        scaled, weights, gates = self.others, self.weights, self.gates
        self.others, self.weights, self.gates = [], [], []
        self.factors(self._squared(square))
        if self.weights:
            raise no_norm("its input is scaled before it is normalised", self.weights[0][2])
        if len(self.roots) > 1 or len(scaled) != 1 or self.others != scaled:
            raise no_norm("what is squared is not what is scaled", square)
        source = scaled[0]
        if source.op != "placeholder":
            raise no_norm(f"its input is changed before it is normalised, by {source.name}", source)
        if len(weights) > 1:
            raise no_norm("it multiplies by two weights", weights[1][2])
        weight, offset, _ = weights[0] if weights else (None, 0.0, None)
        if len(gates) > 1 or (self.gates and self.gates != gates):
            raise no_norm("its gate is not multiplied in once", square)
        act, gate = gates[0] if gates else (None, None)
        if gate is source:
            raise no_norm("its input is its own gate", act)
        first = bool(self.gates)
        groups, size = self._groups(source, square)
        return Norm(source, weight, eps, eps_node, inverse, offset, gate, act, first, groups, size)

    # -- a product ----------------------------------------------------------------------------

    def factors(self, node: fx.Node) -> None:
        """Take `node` apart as a product: roots, weights and gates to their lists, the rest to `others`."""
        node = self.uncast(node)
        self.seen.add(node)
        if operator_name(node) in RESHAPES and isinstance(node.args[0], fx.Node):
            self.reshaped.append(node)
            return self.factors(node.args[0])
        weight = _weight(node)
        if weight is not None:
            self.weights.append((weight[0], weight[1], node))
            self.seen |= weight[2]
            return None
        if self._root(node) or self._gate(node):
            return None
        product, quotient = _operands(node, "mul"), _operands(node, "div")
        for factor in product or ():
            if not isinstance(factor, fx.Node):
                raise no_norm(f"it is multiplied by the number {factor}", node)
            self.factors(factor)
        if quotient:
            self._divided(node, *quotient)
        if not product and not quotient:
            if operator_name(node) in ("add", "sub"):
                raise no_norm("something is added to it", node)
            self.others.append(node)
        return None

    def _root(self, node: fx.Node) -> bool:
        """Whether `node` is an inverse root, as a factor."""
        name = operator_name(node)
        one_over = _operands(node, "div")
        if name == "rsqrt" or (name == "pow" and node.args[1:] == (-0.5,)):
            self.roots.append((name, node, node.args[0]))
            return True
        is_reciprocal = name == "reciprocal" or (one_over is not None and _is_one(one_over[0]))
        inner = one_over[1] if one_over else node.args[0] if node.args else None
        if is_reciprocal and isinstance(inner, fx.Node):
            inner = self.uncast(inner)
            if operator_name(inner) == "sqrt":
                self.seen.add(inner)
                self.roots.append(("reciprocal", node, inner.args[0]))
                return True
            self._no_root(inner)
        return False

    def _divided(self, node: fx.Node, above: Any, below: Any) -> None:
        if not isinstance(above, fx.Node):
            raise no_norm(f"the number {above} is divided by something", node)
        if not isinstance(below, fx.Node):
            raise no_norm(f"it is divided by the number {below}", node)
        below = self.uncast(below)
        if operator_name(below) != "sqrt":
            self._no_root(below)
        self.seen.add(below)
        self.roots.append(("sqrt", below, below.args[0]))
        self.factors(above)

    def _no_root(self, node: fx.Node) -> None:
        added = _operands(node, "add") or ()
        if any(isinstance(side, fx.Node) and _is_root(peeled(side)) for side in added):
            raise no_norm("eps is added to the root, not under it", node)
        if operator_name(node) in CLAMPS:
            raise no_norm("the root is bounded from below, where an RMSNorm adds eps under it", node)
        raise no_norm(f"it divides by {node.name}, which is no square root", node)

    def _gate(self, node: fx.Node) -> bool:
        """Whether `node` is an activation of another input."""
        inputs = node.all_input_nodes
        if len(inputs) != 1 or activation_of(node) is None:
            return False
        gate = self.uncast(inputs[0])
        if gate.op != "placeholder":
            return False
        self.seen.add(gate)
        self.gates.append((node, gate))
        return True

    # -- under the root -----------------------------------------------------------------------

    def _eps(self, under: Any, root: fx.Node) -> tuple[float, fx.Node | None, fx.Node]:
        """(eps, the node that adds it, the mean) of what is under the root."""
        if not isinstance(under, fx.Node):
            raise no_norm("its root is one of a number", root)
        node = self.uncast(under)
        added = _operands(node, "add")
        if added is None:
            if operator_name(node) in CLAMPS:
                raise no_norm("the mean is bounded from below, where an RMSNorm adds eps", node)
            return 0.0, None, node
        numbers = [item for item in added if isinstance(item, (int, float)) and not isinstance(item, bool)]
        inner = [item for item in added if isinstance(item, fx.Node)]
        if len(numbers) != 1 or len(inner) != 1:
            raise no_norm("what is added under the root is no number", node)
        self.seen.add(node)
        return numbers[0], node, inner[0]

    def _mean(self, node: fx.Node) -> fx.Node:
        node = self.uncast(node)
        self.seen.add(node)
        name = operator_name(node)
        quotient = _operands(node, "div")
        if name == "sum" or (
            quotient and isinstance(quotient[0], fx.Node) and operator_name(quotient[0]) == "sum"
        ):
            raise no_norm("it sums the squares, and takes no mean of them", node)
        if name != "mean":
            raise no_norm(f"under the root stands {node.name}, which is no mean", node)
        if not _last_dimension(node):
            raise no_norm("the mean is not over the last dimension alone, kept", node)
        square = node.args[0] if node.args else None
        if not isinstance(square, fx.Node):
            raise no_norm("the mean is of no tensor", node)
        return square

    def _squared(self, node: fx.Node) -> fx.Node:
        node = self.uncast(node)
        self.seen.add(node)
        if not _is_square(node):
            raise no_norm(f"the mean is of {node.name}, which is no square", node)
        inner = node.args[0]
        assert isinstance(inner, fx.Node)
        return inner

    def _groups(self, source: fx.Node, square: fx.Node) -> tuple[fx.Node | None, int]:
        """(the view into groups, how many features are in one), (None, 0) where none are made."""
        if not self.reshaped:
            return None, 0
        whole = _shape(source)
        into = [node for node in self.reshaped if _shape(node) != whole]
        sizes = {shape[-1] for shape in map(_shape, into) if shape}
        if whole is not None and len(sizes) == 1:
            size = sizes.pop()
            grouped = (*whole[:-1], whole[-1] // size, size)
            shapes = {_shape(node) for node in (*into, square)}
            if shapes == {grouped} and _shape(self.result) == whole:
                return into[-1], size
        raise no_norm("it gives its input another shape", self.reshaped[0])

    # -- torch's own --------------------------------------------------------------------------

    def _of_torch(self, node: fx.Node) -> Norm:
        """`F.rms_norm(x, (d,), weight, eps)`: the operator itself, called in a forward."""
        self.seen.add(node)
        names = ("input", "normalized_shape", "weight", "eps")
        given: dict[str, Any] = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
        source = given.get("input")
        if not isinstance(source, fx.Node) or self.uncast(source) is not source:
            raise no_norm("its input is cast before F.rms_norm", node)
        if source.op != "placeholder":
            raise no_norm("its input is changed before it is normalised", source)
        shape = given.get("normalized_shape")
        if not isinstance(shape, (tuple, list)) or len(shape) != 1:
            raise no_norm("it normalises over more than the last dimension", node)
        weight = given.get("weight")
        if isinstance(weight, fx.Node):
            found = _weight(weight)
            if found is None or found[0] is not weight or weight.meta["val"].shape[0] == 1:
                raise no_norm("its weight is no plain parameter", node)
            self.seen.add(weight)
        self.seen.add(source)
        return Norm(source, weight, given.get("eps"), node, None)

    def uncast(self, node: Any) -> fx.Node:
        """The value under casts of dtype, which are seen."""
        while _is_cast(node):
            self.seen.add(node)
            node = node.args[0]
        return node


# -- single nodes -----------------------------------------------------------------------------


def _is_cast(node: Any) -> bool:
    """Whether a node changes the dtype of its value and nothing else."""
    if not isinstance(node, fx.Node) or node.op != "call_method" or not isinstance(node.args[0], fx.Node):
        return False
    if node.target in ("float", "double", "half", "bfloat16"):
        return len(node.args) == 1 and not node.kwargs
    given = [*node.args[1:], *node.kwargs.values()]
    if node.target not in ("to", "type_as") or len(given) != 1 or not set(node.kwargs) <= {"dtype"}:
        return False
    # To the dtype and the device of another tensor: a parameter's device may be another one.
    return isinstance(given[0], torch.dtype) or (isinstance(given[0], fx.Node) and given[0].op != "get_attr")


def peeled(node: Any) -> fx.Node | None:
    """The node under casts of dtype, None for what is none."""
    while _is_cast(node):
        node = node.args[0]
    return node if isinstance(node, fx.Node) else None


def _operands(node: Any, name: str) -> tuple[Any, Any] | None:
    targets = {
        "mul": (operator.mul, torch.mul, torch.multiply),
        "div": (operator.truediv, torch.div, torch.divide, torch.true_divide),
        "add": (operator.add, torch.add),
    }
    if not isinstance(node, fx.Node) or len(node.args) != 2 or node.kwargs:
        return None
    is_it = node.op == "call_function" and node.target in targets[name]
    return (node.args[0], node.args[1]) if is_it or (node.op, node.target) == ("call_method", name) else None


def _weight(node: fx.Node) -> tuple[fx.Node, float, set[fx.Node]] | None:
    """(parameter, constant added to it, nodes on the way) when `node` is a weight."""
    used: set[fx.Node] = set()

    def uncast(value: Any) -> Any:
        while _is_cast(value):
            used.add(value)
            value = value.args[0]
        return value

    node = uncast(node)
    offset = 0.0
    added = _operands(node, "add")
    if added:
        numbers = [item for item in added if isinstance(item, (int, float))]
        inner = [item for item in added if isinstance(item, fx.Node)]
        if len(numbers) != 1 or len(inner) != 1:
            return None
        used.add(node)
        offset, node = float(numbers[0]), uncast(inner[0])
    if node.op != "get_attr" or node.meta["val"].dim() != 1:
        return None
    return node, offset, used | {node}


def activation_of(node: fx.Node) -> str | None:
    """The name of the activation that a node is, None for any other."""
    if node.op == "call_method":
        return str(node.target) if node.target in ("sigmoid", "tanh", "relu") else None
    if node.op != "call_function" or node.kwargs.get("inplace"):
        return None
    approximate = node.kwargs.get("approximate", "none")
    name = activation_name(node.target)
    return "gelu_pytorch_tanh" if name == "gelu" and approximate == "tanh" else name


def _is_square(node: fx.Node) -> bool:
    name = operator_name(node)
    factors = _operands(node, "mul")
    return (
        name == "square"
        or (name == "pow" and node.args[1:] in ((2,), (2.0,)) and not node.kwargs)
        or (factors is not None and factors[0] is factors[1])
    )


def _is_root(node: fx.Node | None) -> bool:
    return node is not None and (operator_name(node) in ("sqrt", *LENGTHS) or node.args[1:] == (0.5,))


def _last_dimension(mean: fx.Node) -> bool:
    """Whether a mean is over the last dimension, by its own index, and keeps it."""
    kwargs = dict(mean.kwargs)
    dims = kwargs.pop("dim", kwargs.pop("axis", mean.args[1] if len(mean.args) > 1 else None))
    keep = kwargs.pop("keepdim", kwargs.pop("keepdims", mean.args[2] if len(mean.args) > 2 else False))
    return dims in (-1, (-1,), [-1]) and keep is True and not kwargs and len(mean.args) <= 3


def _is_one(value: Any) -> bool:
    return isinstance(value, (int, float)) and value == 1


def _shape(value: Any) -> tuple[int, ...] | None:
    found = value.meta.get("val") if isinstance(value, fx.Node) else None
    return tuple(found.shape) if isinstance(found, torch.Tensor) else None


def placeholders(norm: Norm) -> Iterator[str]:
    """The names of the inputs that the norm reads: x, and the gate where there is one."""
    yield str(norm.input.target)
    if norm.gate is not None:
        yield str(norm.gate.target)
