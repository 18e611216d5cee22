"""Following the shares of linears' outputs through a graph, as tensor parallelism would lay them out.

Every value is either whole on each rank, or a `Split`: along one of its dimensions each rank holds a
share. What an operator does to a split is told from shapes and from PyTorch's own tags; an operator
that is not known to keep the shares apart needs the whole.
"""

import functools
import inspect
import itertools
import math
import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any, NoReturn

import torch
import torch.nn as nn
from torch import fx

from fusekit.forward import forward_chain
from fusekit.fusions.merge import is_linear_like
from fusekit.fusions.roles import ATTENTION_OPERATORS
from fusekit.tracing import Trace, is_leaf_call, output_value
from fusekit.tracing.questions import is_any_linear
from fusekit.tracing.recorder import parts_of
from fusekit.tracing.schema import CASTS, operator_name
from fusekit.tracing.trace import run_trace

Piece = tuple[Fraction, Fraction]


@dataclass(frozen=True)
class Split:
    """A value of which each rank holds a share along the dimension `dim`.

    `linears` must be column-parallel for that; one in angle brackets is an attention, whose result must
    not be gathered. `layout` are the linears whose features lie along `dim`
    as they made them: a slice along it is a `piece` of those, from and to a fraction of their width.
    `met` says that it comes from an attention in which shares of heads have met. `groups` is how many
    times over the dimension is shared out: that of [batch * heads, ...] once for each of the batch.
    """

    dim: int
    linears: frozenset[str] = frozenset()
    layout: frozenset[str] = frozenset()
    piece: Piece | None = None
    met: bool = False
    groups: int = 1


State = Any  # a Split, None for a whole value, or a dict of these by index or key


class NeedsWhole(Exception):
    """The results of these linears are needed whole."""

    def __init__(self, linears: Iterable[str]):
        super().__init__()
        self.linears = frozenset(linears)


class BufferFound(Exception):
    """A buffer turned out to be filled with shares: follow the graph once more with that known."""


@dataclass
class Facts:
    """What one walk through a graph found.

    `linears` are those called, `rows` those that read shares, `columns` those that make some,
    `arrived` the columns whose shares reached an attention or a row.
    """

    linears: dict[str, None] = field(default_factory=dict)
    rows: set[str] = field(default_factory=set)
    columns: set[str] = field(default_factory=set)
    arrived: set[str] = field(default_factory=set)
    ways: dict[str, set[str]] = field(default_factory=dict)  # in which each linear is called
    pieces: dict[str, set[Piece]] = field(default_factory=dict)  # that each one's result is cut into
    uncut: set[str] = field(default_factory=set)  # linears whose result is used as it is, too


def follow(module: nn.Module, graph: fx.Graph) -> tuple[Facts, set[str]]:
    """What the shares do in `graph`, the trace of `module`, and the linears needed whole."""
    whole: set[str] = set()
    filled: dict[fx.Node, Split] = {}
    traces: dict[fx.Node, Trace] = {}
    while True:
        facts = Facts()
        try:
            _Walk(module, graph, whole, facts, filled, traces).run()
            _check_pieces(facts)
            return facts, whole
        except BufferFound:  # a buffer more, or one for more linears, each time
            continue
        except NeedsWhole as found:  # one linear more each time
            assert not found.linears <= whole
            whole |= found.linears
            filled.clear()


def _check_pieces(facts: Facts) -> None:
    """What is cut is shared out piece by piece: the same pieces everywhere, and never used uncut."""
    for path, pieces in facts.pieces.items():
        cuts = sorted(pieces)
        overlap = any(left[1] > right[0] for left, right in itertools.pairwise(cuts))
        if overlap or path in facts.uncut:
            raise NeedsWhole({path})


def is_parallel(node: fx.Node, module: nn.Module) -> bool:
    """Whether `node` calls a linear, or what stands in the place of one."""
    if node.op != "call_module":
        return False
    if is_any_linear(node, module):
        return True
    try:
        return is_linear_like(module.get_submodule(str(node.target)))
    except AttributeError:
        return False


# -- one walk ---------------------------------------------------------------------------------


@dataclass
class _Walk:
    """One pass over one graph: that of the module asked about, or of a submodule that shares enter."""

    module: nn.Module
    graph: fx.Graph
    whole: set[str]
    facts: Facts
    filled: dict[fx.Node, Split]  # buffers made empty and filled with shares
    traces: dict[fx.Node, Trace]
    prefix: str = ""  # of the paths of a submodule's linears
    given: Mapping[str, State] = field(default_factory=dict)  # what enters a submodule, by parameter
    states: dict[fx.Node, State] = field(default_factory=dict)

    def run(self) -> State:
        """Follow every node; the state of what is returned."""
        for node in self.graph.nodes:
            if node.op == "placeholder":
                self.states[node] = self.given.get(str(node.target))
            elif node.op == "output":
                break
            elif node.op != "get_attr":
                self.states[node] = self.value(node)
        result = output_value(self.graph)
        if not self.prefix:
            self.leave(result)
        return self.state(result)

    def leave(self, value: Any) -> None:
        """What the forward returns is whole, but for values split by heads and what is made of them."""
        if not isinstance(value, fx.Node):
            for _, item in parts_of(value):
                self.leave(item)
            return
        found = self.states.get(value)
        for split in splits_in(found):
            if split.met:
                self.arrive(split)
            elif not isinstance(found, Split) or split.dim == rank(value) - 1:
                self.gather([split])

    def state(self, value: Any) -> State:
        """The state of an argument: a node, or a container of some."""
        if isinstance(value, fx.Node):
            return self.states.get(value)
        items = {index: self.state(item) for index, item in parts_of(value)}
        return items if any(splits_in(item) for item in items.values()) else None

    def value(self, node: fx.Node) -> State:
        if is_parallel(node, self.module):
            return self.linear(node)
        if is_buffer(node):
            return self.filled.get(node)
        if node.target in (operator.getitem, getattr) and isinstance(self.state(node.args[0]), dict):
            return self.state(node.args[0]).get(node.args[1])
        splits = [split for one in node.all_input_nodes for split in splits_in(self.states.get(one))]
        if not splits:
            return None
        if node.op == "call_module":
            return self.submodule(node, splits)
        if is_attention(node):
            return self.attention(node, splits)
        rule = None if is_leaf_call(node) else rule_of(node)
        if rule is None:
            self.gather(splits)
        try:
            return rule(self, node, splits)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError):
            self.gather(splits)  # arguments in a form that is not known here

    # -- what is found on the way -------------------------------------------------------------

    def gather(self, splits: Iterable[Split]) -> NoReturn:
        """These are needed whole: the linears must not share out, an attention's result is gathered."""
        raise NeedsWhole(frozenset().union(*(split.linears for split in splits)))

    def meeting(self, node: fx.Node, splits: list[Split]) -> frozenset[str] | None:
        """Shares of heads meet in `node`. What its result is made of from here on, None if it is gathered."""
        for split in splits:
            self.arrive(split)
        name = f"<{self.prefix}{node.name}>"
        return None if name in self.whole else frozenset({name})

    def use(self, split: Split) -> None:
        if split.piece is None:
            self.facts.uncut |= split.layout

    def arrive(self, split: Split) -> None:
        self.use(split)
        self.facts.arrived |= split.linears

    def merge(self, splits: list[Split], dim: int) -> Split:
        """One value made of several splits, all along `dim` of it, position by position."""
        first, *others = splits
        if not others:
            return replace(first, dim=dim)
        if any(split.groups != first.groups for split in others):
            self.gather(splits)
        layout, piece = first.layout.union(*(split.layout for split in others)), first.piece
        if any(split.piece != piece or not split.layout for split in splits):
            layout, piece = frozenset(), None
            for split in splits:
                self.use(split)
        linears = first.linears.union(*(split.linears for split in others))
        return Split(dim, linears, layout, piece, any(split.met for split in splits), first.groups)

    def cut(self, split: Split, start: int, stop: int, size: int) -> Split | None:
        """A slice of a split along its own dimension."""
        if (start, stop) == (0, size):
            return split
        if split.piece or not split.layout or split.groups > 1 or stop - start < 2:
            return self.gather([split])
        piece = Fraction(start, size), Fraction(stop, size)
        for path in split.layout:
            self.facts.pieces.setdefault(path, set()).add(piece)
        return replace(split, piece=piece)

    # -- calls --------------------------------------------------------------------------------

    def linear(self, node: fx.Node) -> State:
        path = self.prefix + str(node.target)
        if not self.prefix:
            self.facts.linears.setdefault(path)
        source = node.all_input_nodes[0] if node.all_input_nodes else None
        split = self.states.get(source) if source is not None else None
        if split is not None and (path in self.whole or not isinstance(split, Split)):
            self.gather(splits_in(split))
        if split is not None and split.dim == rank(source) - 1 and split.groups > 1:
            self.gather([split])
        way = "whole" if split is None else "row" if split.dim == rank(source) - 1 else "each head"
        ways = self.facts.ways.setdefault(path, set())
        ways.add(way)
        if len(ways) > 1:
            raise NeedsWhole({path})
        if split is None:
            if self.prefix or path in self.whole or not rank(node) or shape(node)[-1] < 2:
                return None
            self.facts.columns.add(path)
            return Split(rank(node) - 1, frozenset({path}), frozenset({path}))
        if way == "row":
            self.arrive(split)
            self.facts.linears.setdefault(path)
            self.facts.rows.add(path)
            return None
        self.use(split)
        return replace(split, layout=frozenset(), piece=None)

    def attention(self, node: fx.Node, splits: list[Split]) -> State:
        """Heads do not mix: what is split by heads stays so. Anything else is needed whole."""
        for one in node.all_input_nodes:
            found = self.states.get(one)
            if found is None:
                continue
            if (
                not isinstance(found, Split)
                or found.dim != rank(one) - 3
                or found.dim < 0
                or found.groups > 1
            ):
                self.gather(splits_in(found))
        made = self.meeting(node, splits)
        if made is None:
            return None
        value = node.meta.get("val")
        if not is_leaf_call(node):
            return Split(rank(node) - 3, made, met=True)
        # Transformers' attention functions return [batch, length, heads, width] and the weights
        # [batch, heads, length, length].
        if isinstance(value, torch.Tensor):
            return Split(value.dim() - 2, made, met=True)
        items = [item for _, item in parts_of(value)]
        return {
            index: Split(item.dim() - (2 if index == 0 else 3), made, met=True)
            for index, item in enumerate(items)
            if isinstance(item, torch.Tensor)
        }

    def submodule(self, node: fx.Node, splits: list[Split]) -> State:
        """Shares enter a submodule: follow them through a trace of its own."""
        try:
            module = self.module.get_submodule(str(node.target))
            if node not in self.traces:
                values = fx.node.map_arg((node.args, node.kwargs), lambda one: one.meta.get("val"))
                self.traces[node] = run_trace(module, *values)
            signature = inspect.signature(forward_chain(module, original=True)[-1])
            args = [self.state(value) for value in node.args]
            kwargs = {name: self.state(value) for name, value in node.kwargs.items()}
            bound = signature.bind(module, *args, **kwargs)
        except Exception:
            return self.gather(splits)
        inner = self.traces[node]
        if not inner.complete:
            return self.gather(splits)
        given = {
            name: value if isinstance(value, Split) else {index: item for index, item in parts_of(value)}
            for name, value in bound.arguments.items()
            if splits_in(value)
        }
        prefix = f"{self.prefix}{node.target}."
        return _Walk(
            module, inner.graph, self.whole, self.facts, self.filled, self.traces, prefix, given
        ).run()

    # -- operators ----------------------------------------------------------------------------

    def elementwise(self, node: fx.Node, splits: list[Split]) -> State:
        """One position of the result comes from that position of each operand."""
        operands = node.all_input_nodes
        if operator_name(node) in CASTS:
            operands = operands[:1]  # the other one gives its dtype
            if self.states.get(operands[0]) is None:
                return None
        found = []
        for one in operands:
            split = self.states.get(one)
            if split is None:
                continue
            if not isinstance(split, Split):
                return self.gather(splits)
            dim = split.dim + rank(node) - rank(one)
            if dim < 0 or shape(node)[dim] != shape(one)[split.dim]:
                return self.gather(splits)
            found.append((dim, split))
        if len({dim for dim, _ in found}) != 1:
            return self.gather(splits)
        dim = found[0][0]
        if node.meta.get("written") and not self.write(node.args[0], dim, splits):
            return self.gather(splits)
        return self.merge([split for _, split in found], dim)

    def write(self, target: Any, dim: int, splits: list[Split]) -> bool:
        """Whether `target` may be filled with shares of `splits` along its `dim`."""
        linears = frozenset().union(*(split.linears for split in splits))
        if not isinstance(target, fx.Node) or any(split.groups > 1 for split in splits):
            return False
        while is_slice(target) or writes_first(target):
            if is_slice(target):
                places = indexed(shape(target.args[0]), target.args[1])
                if dim not in places:
                    return False
                dim = places.index(dim)
            target = target.args[0]
        if is_buffer(target):
            known = self.filled.get(target)
            if known is not None and known.dim != dim:
                self.gather([known, *splits])
            if known is None or not linears <= known.linears:
                before = known.linears if known else frozenset()
                self.filled[target] = Split(dim, linears | before, met=any(split.met for split in splits))
                raise BufferFound
            for split in splits:
                self.use(split)
            return True
        # Something of its own, that nothing looks into: its later readers read the result.
        held = self.states.get(target)
        fresh = rule_of(target) is _Walk.elementwise and len(target.users) == 1
        return isinstance(held, Split) and held.dim == dim and (fresh or linears <= held.linears)

    def setitem(self, node: fx.Node, splits: list[Split]) -> State:
        target, index, value = node.args
        if not isinstance(target, fx.Node) or not isinstance(value, fx.Node):
            return self.gather(splits)
        split = self.states.get(value)
        places = indexed(shape(target), index)
        if split is None:
            return self.states.get(target)  # a whole value: each rank takes its share
        rank_there = max((to for to in places if to is not None), default=-1) + 1
        dim = split.dim + rank_there - rank(value)
        if dim not in places or shape(target)[places.index(dim)] != shape(value)[split.dim]:
            self.gather(splits)
        if not self.write(target, places.index(dim), [split]):
            self.gather(splits)
        return self.states.get(target)

    def view(self, node: fx.Node, splits: list[Split]) -> State:
        """Anything that only reads the same numbers, in order, as another shape."""
        (split,) = splits
        found = reshaped(shape(node.args[0]), shape(node), split.dim, split.groups)
        return self.gather(splits) if found is None else replace(split, dim=found[0], groups=found[1])

    def expand(self, node: fx.Node, splits: list[Split]) -> State:
        (split,) = splits
        dim = split.dim + rank(node) - rank(node.args[0])
        if shape(node)[dim] != shape(node.args[0])[split.dim]:
            return self.gather(splits)
        return replace(split, dim=dim)

    def permute(self, node: fx.Node, splits: list[Split]) -> State:
        (split,) = splits
        count = rank(node.args[0])
        order = list(range(count))
        name, rest = operator_name(node), arguments_after_first(node)
        if name == "permute":
            given = rest[0] if rest and isinstance(rest[0], (tuple, list)) else rest
            order = [int(dim) % count for dim in given]
        else:
            left, right = (-2, -1) if name in ("t", "mT") else rest[:2]
            left, right = left % count, right % count
            order[left], order[right] = order[right], order[left]
        return replace(split, dim=order.index(split.dim))

    def indexing(self, node: fx.Node, splits: list[Split]) -> State:
        (split,) = splits
        return self.picked(split, shape(node.args[0]), node.args[1])

    def narrow(self, node: fx.Node, splits: list[Split]) -> State:
        (split,) = splits
        before = shape(node.args[0])
        named = dict(zip(("dim", "start", "length"), arguments_after_first(node), strict=False)) | node.kwargs
        dim, start, length = named["dim"] % len(before), named["start"], named["length"]
        start = start % before[dim] if start else 0
        index = (*[slice(None)] * dim, slice(start, start + length))
        return self.picked(split, before, index)

    def picked(self, split: Split, before: tuple[int, ...], index: Any) -> State:
        """The part of a split that an index names."""
        items = full_index(index, len(before))
        places = indexed(before, index)
        if items is None or len(places) != len(before):
            return self.gather([split])
        dim = places[split.dim]
        if dim is not None:
            return replace(split, dim=dim)
        own = [item for item in items if item is not None][split.dim]
        if not isinstance(own, slice):
            return self.gather([split])
        start, stop, step = own.indices(before[split.dim])
        found = self.cut(split, start, stop, before[split.dim]) if step == 1 else self.gather([split])
        return None if found is None else replace(found, dim=kept_of(items).index(split.dim))

    def chunks(self, node: fx.Node, splits: list[Split]) -> State:
        """`split`, `chunk`, `tensor_split`: pieces one behind another."""
        (split,) = splits
        before = shape(node.args[0])
        dim = argument(node, "dim", 2, 0) % len(before)
        found: dict[int, State] = {}
        start = 0
        for index, item in parts_of(node.meta.get("val")):
            size = item.shape[dim]
            found[index] = self.cut(split, start, start + size, before[dim]) if dim == split.dim else split
            start += size
        return found

    def unbind(self, node: fx.Node, splits: list[Split]) -> State:
        (split,) = splits
        dim = argument(node, "dim", 1, 0) % rank(node.args[0])
        if dim == split.dim:
            return self.gather(splits)
        made = replace(split, dim=split.dim - (dim < split.dim))
        value = node.meta.get("val")
        return made if isinstance(value, torch.Tensor) else {index: made for index, _ in parts_of(value)}

    def glu(self, node: fx.Node, splits: list[Split]) -> State:
        (split,) = splits
        size = shape(node.args[0])
        if argument(node, "dim", 1, -1) % len(size) != split.dim:
            return split
        half = size[split.dim] // 2
        halves = self.cut(split, 0, half, 2 * half), self.cut(split, half, 2 * half, 2 * half)
        return None if None in halves else self.merge(list(halves), split.dim)  # type: ignore[arg-type]

    def cat(self, node: fx.Node, splits: list[Split]) -> State:
        stacked = operator_name(node) == "stack"
        dim = argument(node, "dim", 1, 0) % rank(node)
        found = {split.dim + (stacked and split.dim >= dim) for split in splits}
        if len(found) != 1 or (not stacked and dim in found):
            return self.gather(splits)
        return self.merge(splits, found.pop())

    def over_dims(self, node: fx.Node, splits: list[Split]) -> State:
        """Something over some dimensions (softmax, a mean): the others do not mix."""
        if operator_name(node) in ("max", "min") and isinstance(argument(node, "other", 1, None), fx.Node):
            return self.elementwise(node, splits)
        split = splits[0]
        position, default = OVER_DIMS[operator_name(node) or ""]
        dims = argument(node, "dim", position, argument(node, "axis", position, default))
        dims = dims if isinstance(dims, (tuple, list)) else [dims]
        count = rank(node.args[0])
        if splits != [self.state(node.args[0])]:
            self.gather(splits)
        if not dims or any(isinstance(dim, bool) or not isinstance(dim, int) for dim in dims):
            return self.gather(splits)
        over = {dim % count for dim in dims}
        if split.dim in over:
            return self.gather(splits)
        self.use(split)

        def left(value: Any) -> State:
            gone = [dim for dim in over if dim < split.dim] if value.dim() != count else []
            return replace(split, dim=split.dim - len(gone))

        value = node.meta.get("val")
        if isinstance(value, torch.Tensor):
            return left(value)
        return {index: left(item) for index, item in parts_of(value)}

    def last_dims(self, node: fx.Node, splits: list[Split]) -> State:
        """A norm over the last dimensions, whose sizes it is given."""
        (split,) = splits
        sizes = argument(node, "normalized_shape", 1, ())
        if not isinstance(sizes, (tuple, list)):
            return self.gather(splits)
        return split if split.dim < rank(node) - len(sizes) else self.gather(splits)

    def pad(self, node: fx.Node, splits: list[Split]) -> State:
        (split,) = splits
        sizes = argument(node, "pad", 1, ())
        padded = [rank(node) - 1 - index // 2 for index, size in enumerate(sizes) if size]
        return self.gather(splits) if split.dim in padded else split

    def matmul(self, node: fx.Node, splits: list[Split]) -> State:
        """[..., n, k] by [..., k, m]: a share of k on either side would leave partial sums."""
        left, right = node.all_input_nodes if len(node.all_input_nodes) == 2 else (None, None)
        if left is None or right is None or min(rank(left), rank(right)) < 2:
            return self.gather(splits)
        found, batched = set(), 0
        for one, summed in ((left, -1), (right, -2)):
            split = self.states.get(one)
            if split is None:
                continue
            dim = split.dim - rank(one) if isinstance(split, Split) else summed
            if dim == summed:
                return self.gather(splits)
            found.add((dim, split.groups))
            batched += dim < -2
        if len(found) != 1:
            return self.gather(splits)
        dim, groups = found.pop()
        dim += rank(node)
        if batched == 2:  # an attention written out: queries meet keys, weights meet values
            made = self.meeting(node, splits)
            return None if made is None else Split(dim, made, met=True, groups=groups)
        for split in splits:
            self.use(split)
        return replace(self.merge(splits, dim), layout=frozenset(), piece=None)

    def repeat_each(self, node: fx.Node, splits: list[Split]) -> State:
        """`repeat_interleave` by a number: copies lie beside what they are copies of."""
        (split,) = splits
        dim, times = argument(node, "dim", 2, None), argument(node, "repeats", 1, None)
        if not isinstance(dim, int) or not isinstance(times, int):
            return self.gather(splits)
        return split


# -- which operator follows which rule --------------------------------------------------------

Rule = Callable[[_Walk, fx.Node, list[Split]], State]

# Elementwise, though composite or for other reasons without PyTorch's tag `pointwise`.
ELEMENTWISE = frozenset(
    {"alias", "alpha_dropout", "clone", "contiguous", "copy_", "data", "detach", "dropout", "floor_divide"}
    | {"hardswish", "hardswish_", "log_sigmoid", "logsigmoid", "masked_fill_", "softsign", "tanhshrink"}
    | {"to", "type_as", "dropout_", "empty_like", "full_like", "ones_like", "zeros_like"}
)
# Name -> (position of the argument `dim`, its default; None is all of them).
OVER_DIMS: dict[str, tuple[int, int | None]] = {
    **dict.fromkeys(("all", "amax", "amin", "any", "argmax", "argmin", "cumprod", "cumsum"), (1, None)),
    **dict.fromkeys(("log_softmax", "logsumexp", "max", "mean", "min", "prod", "softmax"), (1, None)),
    **dict.fromkeys(("std", "sum", "var"), (1, None)),
    **dict.fromkeys(("norm", "vector_norm", "linalg_vector_norm"), (2, None)),
    "normalize": (2, 1),
    "argsort": (1, -1),
    "sort": (1, -1),
    "topk": (2, -1),
}
RULES: dict[str, Rule] = {
    **dict.fromkeys(OVER_DIMS, _Walk.over_dims),
    **dict.fromkeys(("view", "reshape", "flatten", "unflatten", "view_as", "reshape_as"), _Walk.view),
    **dict.fromkeys(("squeeze", "unsqueeze", "_unsafe_view"), _Walk.view),
    **dict.fromkeys(("expand", "expand_as", "broadcast_to", "repeat"), _Walk.expand),
    **dict.fromkeys(("transpose", "permute", "swapaxes", "swapdims", "t", "mT"), _Walk.permute),
    **dict.fromkeys(("split", "chunk", "tensor_split", "split_with_sizes"), _Walk.chunks),
    **dict.fromkeys(("cat", "concat", "concatenate", "stack"), _Walk.cat),
    **dict.fromkeys(("matmul", "bmm"), _Walk.matmul),
    **dict.fromkeys(("layer_norm", "rms_norm"), _Walk.last_dims),
    **dict.fromkeys(("unbind", "select"), _Walk.unbind),
    "glu": _Walk.glu,
    "narrow": _Walk.narrow,
    "pad": _Walk.pad,
    "repeat_interleave": _Walk.repeat_each,
}
SHAPED_LIKE = frozenset({"expand_as", "reshape_as", "view_as"})  # another tensor, that gives its shape
# Rules for several values; the others look at the first argument alone.
OF_SEVERAL = frozenset({_Walk.elementwise, _Walk.cat, _Walk.matmul, _Walk.over_dims, _Walk.setitem})
BUFFERS = frozenset({"empty", "full", "ones", "zeros", "new_empty", "new_full", "new_ones", "new_zeros"})


def rule_of(node: fx.Node) -> Rule | None:
    """What an operator does to shares; None where that is not known."""
    name = operator_name(node)
    if name is None or node.op not in ("call_function", "call_method"):
        return None
    if node.target is operator.getitem:
        return _one_split(_Walk.indexing)
    if node.target is operator.setitem:
        return _Walk.setitem
    if name in RULES:
        rule = RULES[name]
        return rule if rule in OF_SEVERAL else _one_split(rule)
    return _Walk.elementwise if name in ELEMENTWISE or is_pointwise(name) else None


@functools.cache
def _one_split(rule: Rule) -> Rule:
    def of_the_first(walk: _Walk, node: fx.Node, splits: list[Split]) -> State:
        held = walk.state(node.args[0]) if node.args else None
        if operator_name(node) in SHAPED_LIKE:
            if held is None:
                return None
            splits = splits_in(held)
        return rule(walk, node, splits) if splits == [held] else walk.gather(splits)

    return of_the_first


@functools.cache
def is_pointwise(name: str) -> bool:
    """Whether PyTorch tags `aten::name` as an operator on single elements."""
    packet = getattr(torch.ops.aten, name, None)
    overloads = packet.overloads() if packet is not None else ()
    return any(torch.Tag.pointwise in getattr(packet, overload).tags for overload in overloads)


def is_attention(node: fx.Node) -> bool:
    if is_leaf_call(node):
        return node.target.attention  # type: ignore[union-attr]
    return getattr(node.target, "__name__", "") in ATTENTION_OPERATORS


def is_buffer(node: fx.Node) -> bool:
    """Whether `node` only makes room: every rank makes as much as it needs."""
    return operator_name(node) in BUFFERS


def writes_first(node: Any) -> bool:
    """Whether `node` writes its first argument and is that tensor afterwards."""
    first = node.args[0] if node.args else None
    return isinstance(first, fx.Node) and node.meta.get("written") == [first.name] and shape(first) != ()


def is_slice(node: Any) -> bool:
    return isinstance(node, fx.Node) and node.target is operator.getitem and bool(shape(node.args[0]))


# -- shapes and arguments ---------------------------------------------------------------------


def splits_in(state: State) -> list[Split]:
    """The splits in the state of a value."""
    if isinstance(state, Split):
        return [state]
    items = state.values() if isinstance(state, dict) else state if isinstance(state, (tuple, list)) else ()
    return [split for item in items for split in splits_in(item)]


def shape(node: Any) -> tuple[int, ...]:
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return tuple(value.shape) if isinstance(value, torch.Tensor) else ()


def rank(node: Any) -> int:
    return len(shape(node))


def argument(node: fx.Node, name: str, position: int, default: Any) -> Any:
    if name in node.kwargs:
        return node.kwargs[name]
    return node.args[position] if len(node.args) > position else default


def arguments_after_first(node: fx.Node) -> list[Any]:
    named = [node.kwargs[name] for name in ("dim0", "axis0", "dim1", "axis1", "dims") if name in node.kwargs]
    return [*node.args[1:], *named]


def reshaped(
    before: tuple[int, ...], after: tuple[int, ...], dim: int, groups: int = 1
) -> tuple[int, int] | None:
    """Along which dimension, and how many times over, a split value is split when read in another shape.

    None where that is not so of any one dimension.
    """
    if math.prod(before) != math.prod(after) or not math.prod(before):
        return None
    ahead, own = math.prod(before[:dim]) * groups, before[dim] // groups
    for index, size in enumerate(after):
        passed = math.prod(after[:index])
        if passed <= ahead < passed * size:
            times = ahead // passed
            each = size // times
            fits = ahead % passed == 0 and size % times == 0 and each > 1
            return (index, times) if fits and (own % each == 0 or each % own == 0) else None
    return None


def full_index(index: Any, count: int) -> list[Any] | None:
    """An index with one item for each dimension, and None for each new one; None if it is of another kind."""
    items = list(index) if isinstance(index, tuple) else [index]
    if not all(
        item is None
        or item is Ellipsis
        or (isinstance(item, int) and not isinstance(item, bool))
        or (isinstance(item, slice) and all(isinstance(v, (int, type(None))) for v in slice_parts(item)))
        for item in items
    ):
        return None
    missing = count - sum(item is not None and item is not Ellipsis for item in items)
    if Ellipsis in items:
        at = items.index(Ellipsis)
        return [*items[:at], *[slice(None)] * missing, *items[at + 1 :]]
    return [*items, *[slice(None)] * missing]


def slice_parts(item: slice) -> tuple[Any, Any, Any]:
    return item.start, item.stop, item.step


def kept_of(items: list[Any]) -> list[int | None]:
    """For each dimension of an indexed value: the dimension it is of, None for a new one."""
    found: list[int | None] = []
    place = 0
    for item in items:
        if item is None:
            found.append(None)
            continue
        if isinstance(item, slice):
            found.append(place)
        place += 1
    return found


def indexed(before: tuple[int, ...], index: Any) -> list[int | None]:
    """For each dimension of a value: where it is after indexing, None where it is gone or cut."""
    items = full_index(index, len(before))
    if items is None:
        return []
    kept = kept_of(items)
    own = [item for item in items if item is not None]
    return [
        kept.index(place)
        if isinstance(item, slice) and item.indices(before[place]) == (0, before[place], 1)
        else None
        for place, item in enumerate(own)
    ]
