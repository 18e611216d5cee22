# ruff: noqa: E701, E702  (a backslash leaves no room for a comment)
"""Forwards in which a wrong fusion would change the result in silence: refused, or equal."""

import contextlib
import copy
import functools
import random

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import fusekit as fk


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.q = nn.Linear(8, 8)
        self.k = nn.Linear(8, 8)
        self.norm = nn.RMSNorm(8)
        self.calls = 0
        self.kept = None


class Evil(Pair):
    @property
    def bump(self):
        self.calls += 1
        if self.calls > 1 and self.kept is not None:  # not while it is traced
            self.kept.mul_(2)
        return 1


class PropertyBetween(Evil):
    def forward(self, x):
        self.kept = x
        q = self.q(x)
        q = q * self.bump
        return q, self.k(x)


class Helper:
    def __init__(self):
        self.calls, self.tensor = 0, None

    def touch(self):
        self.calls += 1
        if self.calls > 1 and self.tensor is not None:
            self.tensor.mul_(2)

    @property
    def shape(self):
        self.touch()
        return 1

    @property
    def ready(self):
        self.touch()
        return True

    def size(self):
        self.touch()
        return 1

    def __bool__(self):
        self.touch()
        return True

    def __len__(self):
        self.touch()
        return 1

    def __iter__(self):
        self.touch()
        return iter((1, 2))

    def __getitem__(self, index):
        self.touch()
        return 1

    def __eq__(self, other):
        self.touch()
        return True

    __hash__ = None

    def __neg__(self):
        self.touch()
        return 1

    def __rmul__(self, other):
        self.touch()
        return other

    def __int__(self):
        self.touch()
        return 1

    def __index__(self):
        self.touch()
        return 0

    def __format__(self, spec):
        self.touch()
        return ""

    def __call__(self, y=None):
        self.touch()
        return y


class WithHelper(Pair):
    def __init__(self):
        super().__init__()
        self.helper = Helper()


class ShapeOfHelper(WithHelper):
    def forward(self, x):
        self.helper.tensor = x
        q = self.q(x)
        n = self.helper.shape
        return q, self.k(x)


class AttributeOfHelper(WithHelper):
    def forward(self, x):
        self.helper.tensor = x
        q = self.q(x)
        n = self.helper.ready
        return q, self.k(x)


class SizeOfHelper(WithHelper):
    def forward(self, x):
        helper = self.helper
        helper.tensor = x
        q = self.q(x)
        n = helper.size()
        return q, self.k(x)


class TruthOfHelper(WithHelper):
    def forward(self, x):
        helper = self.helper
        helper.tensor = x
        q = self.q(x)
        n = helper and 1
        return q, self.k(x)


class ConditionOnHelper(WithHelper):
    def forward(self, x):
        helper = self.helper
        helper.tensor = x
        q = self.q(x)
        n = 1 if helper else 2
        return q, self.k(x)


class NotHelper(WithHelper):
    def forward(self, x):
        helper = self.helper
        helper.tensor = x
        q = self.q(x)
        n = not helper
        return q, self.k(x)


class LenOfHelper(WithHelper):
    def forward(self, x):
        helper = self.helper
        helper.tensor = x
        q = self.q(x)
        n = len(helper)
        return q, self.k(x)


class IntOfHelper(WithHelper):
    def forward(self, x):
        helper = self.helper
        helper.tensor = x
        q = self.q(x)
        n = int(helper)
        return q, self.k(x)


class UnpacksHelper(WithHelper):
    def forward(self, x):
        helper = self.helper
        helper.tensor = x
        q = self.q(x)
        a, b = helper
        return q, self.k(x)


class StarsHelper(WithHelper):
    def forward(self, x):
        helper = self.helper
        helper.tensor = x
        q = self.q(x)
        a = (*helper, 1)
        return q, self.k(x)


class ComparesHelper(WithHelper):
    def forward(self, x):
        helper = self.helper
        helper.tensor = x
        q = self.q(x)
        a = helper == 1
        return q, self.k(x)


class ComparesTupleOfHelper(WithHelper):
    def forward(self, x):
        pair = (self.helper,)
        self.helper.tensor = x
        q = self.q(x)
        a = pair == (1,)
        return q, self.k(x)


class NegatesHelper(WithHelper):
    def forward(self, x):
        helper = self.helper
        helper.tensor = x
        q = self.q(x)
        a = -helper
        return q, self.k(x)


class MultipliesByHelper(WithHelper):
    def forward(self, x):
        helper = self.helper
        helper.tensor = x
        q = self.q(x)
        a = 2 * helper
        return q, self.k(x)


class SubscriptsHelper(WithHelper):
    def forward(self, x):
        helper = self.helper
        helper.tensor = x
        q = self.q(x)
        a = helper[0]
        return q, self.k(x)


class IndexesByHelper(WithHelper):
    def forward(self, x):
        helper = self.helper
        helper.tensor = x
        items = (1, 2)
        q = self.q(x)
        a = items[helper]
        return q, self.k(x)


class FormatsHelper(WithHelper):
    def forward(self, x):
        helper = self.helper
        helper.tensor = x
        q = self.q(x)
        a = f"{helper}"
        return q, self.k(x)


class CallsHelper(WithHelper):
    def forward(self, x):
        helper = self.helper
        helper.tensor = x
        q = helper(self.q(x))
        return q, self.k(x)


class DecoratesWithHelper(WithHelper):
    def forward(self, x):
        helper = self.helper
        helper.tensor = x
        q = self.q(x)

        @helper
        def nothing():
            pass

        return q, self.k(x)


class WritesThroughSlice(Pair):
    def forward(self, x):
        half = x[..., :4]
        q = self.q(x)
        half.add_(1)
        return q, self.k(x)


class WritesThroughDetach(Pair):
    def forward(self, x):
        other = x.detach().flatten()
        q = self.q(x)
        other.mul_(2)
        return q, self.k(x)


class WritesThroughResult(Pair):
    def forward(self, x):
        same = F.dropout(x, 0.0, False)
        q = self.q(x)
        torch.relu_(same)
        return q, self.k(x)


class UnpacksGenerator(Pair):
    def forward(self, x):
        self.calls += 1
        pieces = (x.mul_(2) if self.calls > 1 else x for _ in range(2))
        q = self.q(x)
        a, b = pieces
        return q, self.k(x)


class NestedFunction(Pair):
    def forward(self, x):
        def change():
            if self.calls:
                x.mul_(2)
            self.calls += 1

        q = self.q(x)
        change()
        return q, self.k(x)


class NonlocalRebinding(Pair):
    def forward(self, x):
        def change():
            nonlocal x
            x = x * 2

        q = self.q(x)
        change()
        return q, self.k(x)


STATE = {"tensor": None, "calls": 0}


def mutate():
    STATE["calls"] += 1
    if STATE["calls"] > 1:
        STATE["tensor"].mul_(2)


class GlobalFunction(Pair):
    def forward(self, x):
        STATE["tensor"] = x
        q = self.q(x)
        mutate()
        return q, self.k(x)


class Descriptor:
    def __get__(self, module, owner=None):
        if module is None:
            return self
        module.calls += 1
        if module.calls > 2 and module.kept is not None:
            module.kept.mul_(2)
        return module._modules["k"]

    def __set__(self, module, value):
        module._modules["k"] = value


class PartByDescriptor(Pair):
    def forward(self, x):
        self.kept = x
        return self.q(x), self.k(x)


PartByDescriptor.k = Descriptor()


class GetattrOverridden(Pair):
    def __getattr__(self, name):
        if name == "k":
            state = self.__dict__
            state["calls"] += 1
            if state["calls"] > 2 and state["kept"] is not None:
                state["kept"].mul_(2)
        return super().__getattr__(name)

    def forward(self, x):
        self.kept = x
        return self.q(x), self.k(x)


class GetattributeOverridden(Pair):
    def __getattribute__(self, name):
        if name == "k":
            state = object.__getattribute__(self, "__dict__")
            state["calls"] += 1
            if state["calls"] > 2 and state["kept"] is not None:
                state["kept"].mul_(2)
        return super().__getattribute__(name)

    def forward(self, x):
        self.kept = x
        return self.q(x), self.k(x)


class Shadowed(Pair):
    """Locals with the names that a rewrite would like to use."""

    def forward(self, x):
        k = x * 2
        merged_q_k = x * 3
        kernels = x * 4
        out = self.q(x) + self.k(x)
        return out, k, merged_q_k, kernels


class HasTheAttribute(Pair):
    def __init__(self):
        super().__init__()
        self.merged_q_k = 3

    def forward(self, x):
        return self.q(x) * self.merged_q_k, self.k(x)


class SetsTheAttribute(Pair):
    def forward(self, x):
        q, k = self.q(x), self.k(x)
        self.merged_q_k = q + k
        return q, k


class GlobalNamedLikeAPart(Pair):
    def forward(self, x):
        global q
        return self.q(x), self.k(x), q


q = 7


class ReadsLocals(Pair):
    def forward(self, x):
        a, b = self.q(x), self.k(x)
        return sorted(locals()), a, b


class Executes(Pair):
    def forward(self, x):
        a = self.q(x)
        exec("x.mul_(2)")
        return a, self.k(x)


class Walrus(Pair):
    def forward(self, x):
        q = self.q(x)
        y = (x := x * 2)
        return q, self.k(x)


class WalrusBefore(Pair):
    def forward(self, x):
        y = (x := x * 2) + self.q(x)
        return y, self.k(x)


class Deletes(Pair):
    def forward(self, x):
        y = x * 2
        q = self.q(x)
        del x
        x = y
        return q, self.k(x)


class SwapsSubmodules(Pair):
    def forward(self, x):
        self.q, self.k = self.k, self.q
        return self.q(x), self.k(x)


class SwapsAfterwards(Pair):
    def forward(self, x):
        out = self.q(x), self.k(x)
        self.q, self.k = self.k, self.q
        return out


class AliasesParts(Pair):
    def forward(self, x):
        self.q = self.k
        return self.q(x), self.k(x)


class RebindsSelf(Pair):
    def __init__(self):
        super().__init__()
        self.twin = [Pair()]

    def forward(self, x):
        q = self.q(x)
        self = self.twin[0]
        return q, self.k(x)


class DropoutBetween(Pair):
    def forward(self, x):
        q = F.dropout(self.q(x), 0.5)
        return q, F.dropout(self.k(x), 0.5)


class ViewsFlat(Pair):
    def forward(self, x):
        q, k = self.q(x), self.k(x)
        return q.view(-1) * 1, k * 1


class ReshapesAndWrites(Pair):
    """A reshape of a slice is a copy, where that of an output of its own is a view."""

    def forward(self, x):
        q, k = self.q(x), self.k(x)
        q.reshape(-1).mul_(2)
        return q * 1, k * 1


class ReshapesAndWritesUnderATest(Pair):
    def forward(self, x):
        q, k = self.q(x), self.k(x)
        if self.calls:
            q.reshape(-1)[0] = 5
        return q * 1, k * 1


class ReturnsReshaped(Pair):
    def forward(self, x):
        q, k = self.q(x), self.k(x)
        return q, q.reshape(-1), k


class StridesDecide(Pair):
    def forward(self, x):
        q, k = self.q(x), self.k(x)
        return (q if q.is_contiguous() else q * 2), k


class StridesDecideInside(Pair):
    def forward(self, x):
        q, k = self.q(x), self.k(x)
        if not q.is_contiguous():
            q = q * 2
        return q * 1, k * 1


class Resizes(Pair):
    def forward(self, x):
        q, k = self.q(x), self.k(x)
        return torch.as_strided(q, (4, 4), (4, 1)) * 1, k * 1


class BackslashLine(Pair):
    # fmt: off
    def forward(self, x):
        q = k = x
        if self.calls >= 0: \
        q = self.q(x); k = self.k(x)
        return q, k
    # fmt: on


class Raises(Pair):
    def forward(self, x):
        with contextlib.suppress(ValueError):
            q = self.q(x)
            if self.calls == 0:
                raise ValueError
            x = x * 2
        return q, self.k(x)


class ExceptHandler(Pair):
    def forward(self, x):
        try:
            q = self.q(x)
            x[100]
            k = q
        except IndexError as error:
            k = self.k(x)
        return q, k


class Generator(Pair):
    def pieces(self, x):
        yield self.q(x)
        x.mul_(2)
        yield self.k(x)

    def forward(self, x):
        return tuple(self.pieces(x))


class Partial(Pair):
    def forward(self, x):
        make = functools.partial(self.q, x)
        y = make()
        x.mul_(2)
        return y, self.k(x)


class LoopWithWrite(Pair):
    def forward(self, x):
        outs = []
        for part in (self.q, self.k):
            outs.append(part(x))
            x.mul_(2)
        return tuple(outs)


class LoopWithWriteAtItsEnd(Pair):
    def forward(self, x):
        for _ in range(2):
            q = self.q(x)
            k = self.k(x)
            x.mul_(2)
        return q, k


class WritesWeight(Pair):
    def forward(self, x):
        q = self.q(x)
        with torch.no_grad():
            self.k.weight.mul_(2)
        return q, self.k(x)


class WritesWeightByData(Pair):
    def forward(self, x):
        q = self.q(x)
        self.k.weight.data.mul_(2)
        return q, self.k(x)


class WritesBackingList(Pair):
    def forward(self, x):
        box = [x]
        q = self.q(x)
        box[0] += 1
        return q, self.k(x)


class NumpyAlias(Pair):
    def forward(self, x):
        q = self.q(x)
        x.detach().numpy()[...] *= 2
        return q, self.k(x)


class Map(Pair):
    def forward(self, x):
        q = self.q(x)
        list(map(torch.Tensor.mul_, [x], [2]))
        return q, self.k(x)


class Sorts(Pair):
    def forward(self, x):
        q = self.q(x)
        sorted([1, 2], key=lambda n: x.mul_(n) is None)
        return q, self.k(x)


class TrainingDecides(Pair):
    def forward(self, x):
        q = self.q(x)
        if self.training:
            x = x * 2
        return q, self.k(x)


class Shuffles(Pair):
    def forward(self, x):
        parts = [self.q, self.k]
        random.Random(self.calls).shuffle(parts)
        self.calls += 1
        return parts[0](x), parts[1](x)


FORWARDS = [
    value
    for value in list(globals().values())
    if isinstance(value, type) and issubclass(value, Pair) and "forward" in vars(value)
]


# Their linears read different values, or are one, on the path that is traced: nothing looks fusable.
SILENT = (
    NonlocalRebinding,
    Walrus,
    Deletes,
    SwapsSubmodules,
    AliasesParts,
    RebindsSelf,
    Generator,
    TrainingDecides,
)


def fresh(module):
    """`module` as if it had never been called or asked for an attribute."""
    module.__dict__.update(calls=0, kept=None)
    if isinstance(module, WithHelper):
        module.__dict__["helper"] = Helper()
    STATE.update(calls=1, tensor=None)
    torch.manual_seed(0)
    return module


def assert_same(got, want):
    assert type(got) is type(want)
    if isinstance(got, torch.Tensor):
        torch.testing.assert_close(got, want)
    elif isinstance(got, (tuple, list)):
        assert len(got) == len(want)
        for mine, his in zip(got, want, strict=True):
            assert_same(mine, his)
    else:
        assert got == want


def outcome(module, x):
    """What calling `module` twice gives, what it leaves in its input, or how it fails."""
    results = []
    for _ in range(2):
        own = x.clone()
        try:
            with torch.no_grad():
                results.append((module(own), own))
        except Exception as error:
            results.append(type(error))
    return results


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("cls", FORWARDS, ids=lambda cls: cls.__name__)
def test_refused_or_equal(cls, training):
    module = cls().train(training)
    twin = copy.deepcopy(module)
    plan = fk.plan(module)
    assert plan.sites or plan.refusals or cls in SILENT
    fused = plan.apply()
    for shape in ((3, 4), (1, 1), (1, 4), (0, 4), (3,), ()):
        for mode in (training, not training):
            x = torch.randn(*shape, 8)
            got = outcome(fresh(module).train(mode), x)
            assert_same(got, outcome(fresh(twin).train(mode), x))
    if plan.sites:
        fused.revert()
    x = torch.randn(2, 8)
    assert_same(outcome(fresh(module), x), outcome(fresh(twin), x))


@pytest.mark.parametrize("cls", FORWARDS, ids=lambda cls: cls.__name__)
def test_gradients_are_equal_where_it_was_fused(cls):
    module = cls()
    twin = copy.deepcopy(module)
    fk.fuse(module)
    x = torch.randn(3, 4, 8)
    gradients = []
    for one in (module, twin):
        leaf = x.clone().requires_grad_()
        try:
            outputs = fresh(one)(leaf * 1)
        except Exception as error:
            gradients.append(type(error))
            continue
        outputs = [out for out in outputs if isinstance(out, torch.Tensor) and out.requires_grad]
        try:
            sum(out.square().sum() for out in outputs).backward()
        except RuntimeError as error:  # a forward that writes its input may not be trainable at all
            gradients.append(type(error))
            continue
        gradients.append([leaf.grad, *(parameter.grad for parameter in one.parameters())])
    assert_same(*gradients)


# -- inputs and outputs ------------------------------------------------------------------------


class Plain(Pair):
    def forward(self, x):
        return self.q(x), self.k(x)


class Inside(Pair):
    """Nothing of its parts is handed out, so its slices are slices."""

    def forward(self, x):
        q, k = self.q(x), self.k(x)
        return q * 2, k.view(*k.shape[:-1], 2, 4).transpose(-1, -2) + 1


class Logged(torch.Tensor):
    pass


@pytest.mark.parametrize("cls", [Plain, Inside])
@pytest.mark.parametrize(
    "x",
    [
        torch.randn(5, 8),
        torch.randn(1, 1, 8),
        torch.randn(2, 3, 4, 8),
        torch.randn(0, 4, 8),
        torch.randn(8, 4, 3).transpose(0, 2),
        torch.randn(4, 3, 8).transpose(0, 1),
        torch.randn(3, 1, 8).expand(3, 4, 8),
        torch.randn(2, 3, 16)[..., ::2],
        torch.randn(2, 3, 8).as_subclass(Logged),
    ],
    ids=["2-D", "1 token", "4-D", "empty", "transposed", "swapped", "expanded", "strided", "subclass"],
)
def test_every_kind_of_input(cls, x):
    module = cls()
    want = module(x)
    with fk.fuse(module, only="columns"):
        got = module(x)
    for mine, his in zip(got, want, strict=True):
        assert type(mine) is type(his) and mine.shape == his.shape
        if cls is Plain and 0 not in x.shape:
            assert mine.stride() == his.stride() and mine.storage_offset() == 0
        torch.testing.assert_close(mine, his)


def test_wrong_width_and_wrong_type_fail_as_before():
    module = Plain()
    fk.fuse(module)
    with pytest.raises(RuntimeError):
        module(torch.randn(2, 7))
    with pytest.raises(RuntimeError):
        module(torch.ones(2, 8, dtype=torch.long))


def test_outputs_written_by_the_caller_are_independent():
    module, x = Plain(), torch.randn(3, 4, 8)
    _, want = module(x)
    fk.fuse(module)
    q, k = module(x)
    saved = k * k
    q.mul_(0)
    q.view(-1)[0] = 9
    torch.testing.assert_close(k, want)
    (saved.sum() + q.sum()).backward()


def test_input_written_by_the_caller_between_forward_and_backward_raises_as_before():
    module = Plain()
    fk.fuse(module)
    x = torch.randn(3, 8)
    q, k = module(x)
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (q.sum() + k.sum()).backward()


def test_two_instances_of_one_class_that_differ_are_decided_apart():
    class Optional(Pair):
        def __init__(self, attribute=False, bias=True):
            super().__init__()
            if attribute:
                self.merged_q_k = nn.Linear(8, 8)
            if not bias:
                self.k = nn.Linear(8, 8, bias=False)

        def forward(self, x):
            return self.q(x) * 1, self.k(x) * 1

    model = nn.ModuleList([Optional(), Optional(attribute=True), Optional(bias=False), Optional()])
    model[3].k = nn.Identity()
    twin = copy.deepcopy(model)
    assert [site.name for site in fk.fuse(model).sites] == ["0", "1", "2"]
    x = torch.randn(3, 8)
    for own, other in zip(model, twin, strict=True):
        torch.testing.assert_close(own(x), other(x))
    assert type(model[1].merged_q_k) is nn.Linear
    fk.revert(model)
    assert [list(vars(own)) for own in model] == [list(vars(other)) for other in twin]


def test_planning_runs_no_property_of_the_model():
    module = PropertyBetween()
    fk.plan(module)
    assert module.calls == 0


def test_a_class_changed_after_it_was_planned_is_planned_anew():
    class Changing(Pair):
        def forward(self, x):
            return self.q(x), self.k(x)

    def other(self, x):
        q = self.q(x)
        x.mul_(2)
        return q, self.k(x)

    module = Changing()
    plan = fk.plan(module)
    assert plan.sites
    Changing.forward = other
    x = torch.randn(2, 8)
    want = module(x.clone())
    with pytest.raises(fk.FusekitError):
        plan.apply()
    assert not fk.plan(module).sites
    torch.testing.assert_close(module(x.clone()), want)
