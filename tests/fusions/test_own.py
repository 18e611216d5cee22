"""A user's own fusion: some thirty lines, proven like those that ship."""

import copy
import operator

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import fusekit as fk
from fusekit.fusions import own_fusions


def added(x, y, first, second):
    """first(x) + second(y) as one product over both inputs."""
    weight = torch.cat([first.weight, second.weight], dim=1)
    biases = [linear.bias for linear in (first, second) if linear.bias is not None]
    return F.linear(torch.cat([x, y], dim=-1), weight, sum(biases) if biases else None)


def is_linear(forward, node):
    return node.op == "call_module" and isinstance(forward.submodule(node), nn.Linear)


def sums_of_linears(forward, function=added):
    for node in forward.graph.nodes:
        if node.op == "call_function" and node.target.__name__ == "add":
            if all(isinstance(arg, torch.fx.Node) and is_linear(forward, arg) for arg in node.args):
                first, second = node.args
                yield forward.rewrite(
                    [first, second, node],
                    function,
                    first.args[0],
                    second.args[0],
                    forward.attribute(first.target),
                    forward.attribute(second.target),
                )


@pytest.fixture(autouse=True)
def registered():
    before = dict(own_fusions)
    yield
    for name, own in list(own_fusions.items()):
        if before.get(name) is not own:
            own.remove()


@pytest.fixture
def linear_add():
    return fk.fusion("linear_add")(sums_of_linears)


class Two(nn.Module):
    def __init__(self, bias=True):
        super().__init__()
        self.a = nn.Linear(8, 6, bias=bias)
        self.b = nn.Linear(8, 6)
        self.norm = nn.LayerNorm(8)


class Inline(Two):
    def forward(self, x, y):
        return torch.relu(self.a(x) + self.b(y))


class ByNames(Two):
    def forward(self, x, y):
        # what x gives
        first = self.a(x)  # of width 6
        second = self.b(y)
        total = first + second
        return total.relu()


class OneName(Two):
    def forward(self, x, y):
        x = self.a(x)
        x = x + self.b(y)
        return x.relu()


class OfALine(Two):
    def forward(self, x, y):
        a = self.a(x); b = self.b(y); return a + b  # fmt: skip  # noqa: E702


class Between(Two):
    """y is made between both, which changes nothing for the call in the place of the sum."""

    def forward(self, x, y):
        a = self.a(x)
        y = y * 2
        return a + self.b(y)


class Prints(Two):
    def forward(self, x, y):
        a = self.a(x)
        print(end="")
        return a + self.b(y)


class InALoop(Two):
    def forward(self, x, y):
        total = 0
        for scale in (1.0, 2.0):
            a = self.a(x)
            total = total + scale * (a + self.b(y))
        return total


def inputs():
    return torch.randn(2, 5, 8), torch.randn(2, 5, 8)


def equal(model, twin):
    given = inputs()
    torch.testing.assert_close(model(*given), twin(*given))
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        one.grad = other.grad = None
    for module in (model, twin):
        module(*given).square().sum().backward()
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("cls", [Inline, ByNames, OneName, OfALine, Between, Prints, InALoop])
def test_it_is_planned_applied_and_reverted(linear_add, cls, bias):
    model = cls(bias)
    twin = copy.deepcopy(model)
    plan = fk.plan(model)
    assert [(site.fusion, site.parts) for site in plan.sites] == [("linear_add", ("a", "b"))], plan
    assert not plan.refusals
    with plan.apply():
        equal(model, twin)
    assert type(model) is cls
    assert plan.verify({"x": inputs()[0], "y": inputs()[1]}).ok


def test_the_diff_shows_the_call_and_takes_out_what_it_replaces(linear_add):
    diff = str(fk.plan(ByNames()).sites[0].diff)
    removed = [line[1:].strip() for line in diff.splitlines() if line[0] == "-" and line[:3] != "---"]
    put = [line[1:].strip() for line in diff.splitlines() if line[0] == "+" and line[:3] != "+++"]
    assert removed == ["first = self.a(x)  # of width 6", "second = self.b(y)", "total = first + second"]
    assert put == ["total = added(x, y, self.a, self.b)"]


def test_many_instances_share_one_class_and_are_decided_apart(linear_add):
    model = nn.ModuleList([Inline() for _ in range(3)])
    model[1].a.register_forward_hook(lambda *_: None)
    plan = fk.plan(model)
    assert [site.name for site in plan.sites] == ["0", "2"]
    (refusal,) = plan.refusals
    assert (refusal.name, refusal.reason, refusal.path) == ("1", "hooked", __file__)
    plan.apply()
    assert type(model[0]) is type(model[2])


class Kept(Two):
    def forward(self, x, y):
        first = self.a(x)
        return first + self.b(y), first


class KeptUnseen(Two):
    def forward(self, x, y, deep=False):
        first = self.a(x)
        total = first + self.b(y)
        if deep:
            return total * first.mean()
        return total


class Written(Two):
    def forward(self, x, y):
        first = self.a(x)
        y.mul_(2)
        return first + self.b(y)


class Rebound(Two):
    def forward(self, x, y):
        first = self.a(x)
        x = x * 2
        return first + self.b(y) + x.mean()


class ReboundInAnArm(Two):
    double = False

    def forward(self, x, y):
        first = self.a(x)
        if self.double:
            x = x * 2
        return first + self.b(y) + x.mean()


class InAnArm(Two):
    twice = True

    def forward(self, x, y):
        first = self.a(x)
        if self.twice:
            first = first + self.b(y)
        return first


class Branches(Two):
    def forward(self, x, y, flag=True):
        first = self.a(x)
        if flag:
            first = first + self.b(y)
        return first


class Sometimes(Two):
    def forward(self, x, y, flag=True):
        return flag and self.a(x) + self.b(y)


class Modes(Two):
    def forward(self, x, y):
        with torch.no_grad():
            first = self.a(x)
        return first + self.b(y)


class AddedToLater(Two):
    times = 0

    def forward(self, x, y):
        first = self.a(x)
        total = first + self.b(y)
        for _ in range(self.times):
            first += total
            total = total * 2
        return total


class Tried(Two):
    def forward(self, x, y):
        first = x
        try:
            first = self.a(x)
            first = first + self.b(y)
        except RuntimeError:
            pass
        return first


class Caught(Two):
    def forward(self, x, y):
        def later():
            return first

        first = self.a(x)
        total = first + self.b(y)
        return total, later


told = operator.methodcaller("size")  # written in C: it has no text


class Foreign(Two):
    def forward(self, x, y):
        first = self.a(x)
        told(y)
        return first + self.b(y)


@pytest.mark.parametrize(
    ("cls", "reason", "says"),
    [
        (Kept, "module-escapes", "a is also used by"),
        (KeptUnseen, "module-escapes", "first = self.a(x) stores, is also read in line"),
        (Written, "input-written", "y.mul_(2)"),
        (Rebound, "input-rebound", "x is stored again"),
        (ReboundInAnArm, "input-rebound", "x is stored again"),
        (InAnArm, "different-branches", "different branches"),
        (Branches, "different-branches", ""),
        (Sometimes, "different-branches", "only sometimes"),
        (Modes, "different-context", "different grad modes"),
        (AddedToLater, "module-escapes", "is also read in line"),
        (Tried, "module-escapes", "is also read in line"),
        (Caught, "module-escapes", "first"),
        (Foreign, "input-may-be-written", "told(y)"),
    ],
)
def test_what_the_forward_could_tell_is_refused(linear_add, cls, reason, says):
    plan = fk.plan(cls())
    assert not plan.sites
    (refusal,) = plan.refusals
    assert (refusal.fusion, refusal.reason) == ("linear_add", reason)
    assert says in refusal.message
    assert refusal.line


def without_bias(x, y, first, second):
    return F.linear(x, first.weight) + F.linear(y, second.weight)


def of_another_width(x, y, first, second):
    return first(x)[..., :3] + second(y)[..., :3]


def failing(x, y, first, second):
    if not x.is_meta:
        raise ValueError("no kernel for this dtype")
    return first(x) + second(y)


@pytest.mark.parametrize(
    ("function", "reason", "says"),
    [
        (without_bias, "not-this-function", "gives other numbers"),
        (of_another_width, "layout", "another shape"),
        (failing, "not-this-function", "no kernel for this dtype"),
    ],
)
def test_a_replacement_that_computes_something_else_is_refused(function, reason, says):
    fk.fusion("wrong")(lambda forward: sums_of_linears(forward, function))
    (refusal,) = fk.plan(Inline()).refusals
    assert refusal.reason == reason
    assert says in refusal.message


def test_without_a_tolerance_the_numbers_are_not_tried():
    fk.fusion("wrong", tolerance=None)(lambda forward: sums_of_linears(forward, without_bias))
    model = Inline()
    plan = fk.plan(model)
    assert plan.sites
    assert not plan.verify({"x": inputs()[0], "y": inputs()[1]}).ok


def test_what_runs_between_is_asked_of_each_instance(linear_add):
    class Three(Two):
        def __init__(self):
            super().__init__()
            self.c = nn.Linear(8, 8)

        def forward(self, x, y):
            first = self.a(x)
            y = self.c(y)
            return first + self.b(y)

    model = nn.ModuleList([Three(), Three()])
    model[0].c.register_forward_pre_hook(lambda module, given: given[0].mul_(2))
    plan = fk.plan(model, only="linear_add")
    assert [site.name for site in plan.sites] == ["1"]
    assert [(refusal.name, refusal.reason) for refusal in plan.refusals] == [("0", "input-may-be-written")]


def test_it_needs_no_weights(linear_add):
    with torch.device("meta"):
        model = Inline()
    assert len(fk.plan(model).sites) == 1


def test_what_draws_at_random_or_writes_cannot_be_replaced():
    class Random(nn.Module):
        def forward(self, x):
            y = F.dropout(x, 0.5)
            return x.add_(1) - y

    @fk.fusion("anything")
    def anything(forward):
        for node in forward.graph.nodes:
            if node.op in ("call_function", "call_method"):
                yield forward.rewrite([node], torch.relu, node.args[0])

    reasons = {refusal.reason for refusal in fk.plan(Random()).refusals}
    assert reasons == {"not-this-function", "input-written"}


@pytest.mark.parametrize("layer", [nn.Dropout(0.5), nn.BatchNorm1d(5)])
@pytest.mark.parametrize("training", [False, True])
def test_what_does_something_else_in_training_cannot_be_replaced(layer, training):
    class Holds(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer

        def forward(self, x):
            return self.layer(x) * 2

    @fk.fusion("gone")
    def gone(forward):
        for node in forward.graph.nodes:
            if node.op == "call_module":
                yield forward.rewrite([node], torch.clone, node.args[0])

    (refusal,) = fk.plan(Holds().train(training), torch.randn(2, 5, 8), only="gone").refusals
    assert refusal.reason in ("not-this-function", "input-written")


def test_a_lambda_is_called_by_the_name_of_the_fusion():
    class Tanh(nn.Module):
        def forward(self, x):
            return torch.tanh(x)

    @fk.fusion("tanh_twice")
    def tanh_twice(forward):
        for node in forward.graph.nodes:
            if node.op == "call_function":
                yield forward.rewrite([node], lambda x: x.tanh(), node.args[0])

    assert "+        return" not in str(fk.plan(Tanh()).sites[0].diff).replace("return tanh_twice(x)", "")


def test_a_near_miss_of_ones_own_is_a_refusal():
    @fk.fusion("wide")
    def wide(forward):
        for node in forward.graph.nodes:
            if is_linear(forward, node):
                yield forward.refuse(node, "it is not wide enough")

    refusals = fk.plan(Inline(), only="wide").refusals
    assert {(refusal.parts, refusal.reason) for refusal in refusals} == {
        (("a",), "not-this-function"),
        (("b",), "not-this-function"),
    }
    assert all("it is not wide enough" in refusal.message and refusal.line for refusal in refusals)


def test_of_two_fusions_for_one_place_the_own_one_is_taken_unless_it_is_excluded():
    class Gated(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate, self.up = nn.Linear(8, 6), nn.Linear(8, 6)

        def forward(self, x):
            return F.silu(self.gate(x)) * self.up(x)

    def gated(x, gate, up):
        return F.silu(gate(x)) * up(x)

    @fk.fusion("swiglu")
    def swiglu(forward):
        *_, product, _ = forward.graph.nodes
        act, up = product.args
        gate = act.args[0]
        linears = [forward.attribute(node.target) for node in (gate, up)]
        yield forward.rewrite([gate, act, up, product], gated, up.args[0], *linears)

    model = Gated()
    plan = fk.plan(model)
    assert [site.fusion for site in plan.sites] == ["swiglu"]
    assert [(refusal.fusion, refusal.reason) for refusal in plan.refusals] == [("glu", "overlapping")]
    assert [site.fusion for site in fk.plan(model, exclude="swiglu").sites] == ["glu"]
    with fk.plan(model, only="glu").apply():
        again = fk.plan(model)
        assert not again.sites
        assert [(refusal.fusion, refusal.reason) for refusal in again.refusals] == [("swiglu", "overlapping")]
    swiglu.remove()
    assert [site.fusion for site in fk.plan(model).sites] == ["glu"]


def test_registering_a_name_again_replaces_it(linear_add):
    model = Inline()
    before = fk.plan(model)

    @fk.fusion("linear_add")
    def linear_add(forward):
        return ()

    assert not fk.plan(model).sites
    with pytest.raises(fk.FusekitError, match="plan again"):
        before.apply()
    assert type(model) is Inline


def test_what_a_removed_fusion_applied_stays_until_it_is_reverted(linear_add):
    model = Inline()
    twin = copy.deepcopy(model)
    fused = fk.fuse(model)
    linear_add.remove()
    assert [site.fusion for site in fk.plan(model).applied] == ["linear_add"]
    equal(model, twin)
    fk.revert(model, only="linear_add")
    assert type(model) is Inline and fused.reverted


def test_the_name_of_the_function_is_made_one_that_the_forward_does_not_use(linear_add):
    class Uses(Two):
        def forward(self, x, y):
            added = 2
            return (self.a(x) + self.b(y)) * added

    model = Uses()
    twin = copy.deepcopy(model)
    fk.fuse(model)
    equal(model, twin)


def test_an_argument_may_be_an_expression_of_its_own(linear_add):
    class Nested(Two):
        def forward(self, x, y):
            return self.a(x * 2) + self.b(y[..., :8])

    model = Nested()
    twin = copy.deepcopy(model)
    assert "added(x * 2, y[..., :8], self.a, self.b)" in str(fk.plan(model).sites[0].diff)
    fk.fuse(model)
    equal(model, twin)


@pytest.mark.parametrize("name", ["glu", "two words", "", 3])
def test_a_name_that_is_none_is_refused(name):
    with pytest.raises(fk.FusekitError):
        fk.fusion(name)


def test_mistakes_in_a_fusion_name_it():
    model = Inline()

    @fk.fusion("broken")
    def broken(forward):
        raise KeyError("q_proj")

    with pytest.raises(fk.FusekitError, match=r"broken.*Inline.*KeyError.*remove"):
        fk.plan(model)

    @fk.fusion("broken")
    def yields_a_node(forward):
        yield from forward.graph.nodes

    with pytest.raises(fk.FusekitError, match=r"broken.*yields a Node"):
        fk.plan(model)

    @fk.fusion("broken")
    def asks_for_nothing(forward):
        yield forward.rewrite([], added)

    with pytest.raises(fk.FusekitError, match="at least one"):
        fk.plan(model)

    @fk.fusion("broken")
    def asks_for_a_missing_attribute(forward):
        forward.attribute("c.weight")

    with pytest.raises(fk.FusekitError, match=r"c\.weight.*Inline"):
        fk.plan(model)


def test_where_the_trace_stops_it_is_a_refusal(linear_add):
    class Stops(Two):
        def forward(self, x, y):
            total = self.a(x) + self.b(y)
            if total.sum() > 0:
                return total
            return -total

    (refusal,) = [one for one in fk.plan(Stops()).refusals if one.fusion == "linear_add"]
    assert refusal.reason == "trace-stopped"
