"""Small functions between the parts: read, and refused where they may write what the parts read."""

import copy
import functools
import operator

import pytest
import torch
import torch.nn as nn

import fusekit as fk


def heads(t, width, shape=None):
    return t.view(*shape, width)


def split_heads(t, width):
    """Splits."""
    return t.unflatten(-1, (-1, width)).transpose(1, 2)


opaque = operator.methodcaller("contiguous")  # written in C: it has no text


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.spare = (nn.Linear(8, 8) for _ in range(3))
        self.width, self.kept = 4, []

    def shaped(self, t, length, batch):
        return t.view(batch, length, -1, self.width).transpose(1, 2).contiguous()

    def transposed(self, t):
        shape = t.size()[:-1] + (-1, self.width)
        t = t.view(shape)
        batch, length, *rest = t.shape
        return t.permute(0, 2, 1, 3) * 2

    def writes(self, t):
        return t.mul_(2)

    def adds(self, t):
        t += 1
        return t

    def keeps(self, t):
        self.kept.append(t)
        return t

    def stores(self, t):
        self.width = 4
        return t

    def branches(self, t):
        if self.width == 3:
            t.mul_(2)
        return t

    def loops(self, t):
        for _ in range(2):
            t = t * 2
        return t

    def sets_item(self, t):
        t[0] = 1
        return t

    def calls(self, t):
        return self.writes(t)

    def writes_through_a_view(self, t):
        t.view(-1).zero_()
        return t

    def hands_on(self, t):
        for kept in [t]:
            kept.neg_()
        return t.relu()

    def writes_sometimes(self, t):
        return t.mul_(2) if self.width == 3 else t

    def writes_a_default(self, t, times=2):
        for _ in range(times):
            t += 1
        return t * 1

    def replaces(self, t):
        if self.width == 3:
            self.k = self.spare
        return t

    def writes_weights(self, t):
        with torch.no_grad():
            self.k.weight.neg_()
        return t

    def asks(self, t):
        return opaque(t)

    def left_out(self, t, width=2):
        return t.view(-1, width)

    def mutes(self, t):
        torch.set_grad_enabled(False)
        return t

    @functools.cache
    def cached(self, t):
        return t

    @property
    def reshape(self):
        return lambda t: t

    def forward(self, x):
        batch, length, _ = x.size()
        q = self.shaped(self.q(x) * self.width, length, batch)
        return q, self.shaped(self.k(x), length, batch)


class Transposed(Pair):
    def forward(self, x):
        return self.transposed(self.q(x)), self.transposed(self.k(x))


class TransposedByName(Pair):
    def forward(self, x):
        return self.transposed(self.q(x)), self.transposed(t=self.k(x))


class Free(Pair):
    def forward(self, x):
        return split_heads(self.q(x), 4), split_heads(self.k(x), width=self.width)


class InAnArm(Pair):
    def forward(self, x):
        q = self.q(x)
        if self.width == 3:
            q = self.transposed(q)
        return q.flatten(1), self.k(x)


@pytest.mark.parametrize("cls", [Pair, Transposed, TransposedByName, Free, InAnArm])
def test_views_and_counts_are_passed(cls):
    module, x = cls(), torch.randn(2, 3, 8)
    want = module(x)
    plan = fk.plan(module)
    assert [site.parts for site in plan.sites] == [("q", "k")], [no.message for no in plan.refusals]
    with plan.apply():
        torch.testing.assert_close(module(x), want)


OF_THE_RESULT = [
    "self.writes(q)",
    "self.adds(q)",
    "self.keeps(q)",
    "self.stores(q)",
    "self.branches(q)",
    "self.loops(q)",
    "self.sets_item(q)",
    "self.calls(q)",
    "self.writes_through_a_view(q)",
    "self.hands_on(q)",
    "self.writes_a_default(q, times=3)",
    "self.left_out(q)",
    "self.reshape(q)",
    "self.transposed(*(q,)).flatten(1)",
    "self.transposed(**{'t': q}).flatten(1)",
    "self.shaped(q, x.shape[1], self.kept or 2)",
    "late(q)",
    "heads(q, 4, x.shape[:-1] + (2,))",
]

OF_THE_INPUT = [
    ("self.writes(x)", "input-written"),
    ("self.adds(x)", "input-written"),
    ("self.branches(x)", "input-written"),
    ("self.sets_item(x)", "input-written"),
    ("self.calls(x)", "input-written"),
    ("self.writes_through_a_view(x)", "input-written"),
    ("self.writes_through_a_view(x.view(x.shape))", "input-written"),
    ("self.hands_on(x)", "input-written"),
    ("self.writes_sometimes(x)", "input-written"),
    ("self.writes_a_default(x)", "input-written"),
    ("self.writes(*(x,))", "input-written"),
    ("self.writes(**{'t': x})", "input-written"),
    ("self.writes(heads(x, 8, x.shape[:-1]))", "input-written"),
    ("self.writes(self.stores(x))", "input-written"),
    ("self.keeps(x) + self.kept[0].neg_()", "input-written"),
    ("late(x)", "input-written"),
    ("self.reshape(x).neg_()", "input-written"),
    ("self.replaces(q)", "input-written"),
    ("self.writes_weights(q)", "input-written"),
    ("self.asks(x)", "input-may-be-written"),
    ("self.cached(q)", "input-may-be-written"),
    ("self.own(q)", "input-may-be-written"),
    ("self.mutes(q)", "different-context"),
]


def helped(text, tmp_path):
    """A module with `text` between q and k, in line 8."""
    path = tmp_path / "helped.py"
    path.write_text(
        "from tests.fusions.test_helpers import Pair, heads\n\n\nclass Helped(Pair):\n"
        f"    def forward(self, x):\n        late = self.writes\n        q = self.q(x)\n        q = {text}\n"
        "        return q, self.k(x)\n"
    )
    names = {"__name__": "helped"}
    exec(compile(path.read_text(), str(path), "exec"), names)
    module = names["Helped"]()
    module.own = opaque
    return module


@pytest.mark.parametrize("text", OF_THE_RESULT)
def test_what_a_function_does_to_a_result_leaves_the_input_alone(text, tmp_path):
    module = helped(text, tmp_path)
    twin, x = copy.deepcopy(module), torch.randn(2, 3, 8)
    plan = fk.plan(module)
    assert [site.parts for site in plan.sites] == [("q", "k")], [no.message for no in plan.refusals]
    assert not plan.refusals
    with plan.apply():
        torch.testing.assert_close(module(x), twin(x))
        torch.testing.assert_close(module.kept, twin.kept)
        for one in (module, twin):
            sum(out.square().sum() for out in one(x)).backward()
    for one, other in zip(module.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


@pytest.mark.parametrize(("text", "reason"), OF_THE_INPUT)
def test_function_that_may_touch_what_the_parts_read_is_refused(text, reason, tmp_path):
    plan = fk.plan(helped(text, tmp_path))
    assert not plan.sites
    (no,) = plan.refusals
    assert no.reason == reason, no.message
    assert no.line == (9 if reason == "different-context" else 8), no.message


def test_method_that_an_instance_replaces_is_the_one_that_counts():
    module = Transposed()
    module.transposed = opaque
    (no,) = fk.plan(module).refusals
    assert no.reason == "input-may-be-written"
    module.transposed = Pair().writes
    x = torch.randn(2, 3, 8)
    want, plan = module(x), fk.plan(module)
    assert [site.parts for site in plan.sites] == [("q", "k")], [no.message for no in plan.refusals]
    with plan.apply():
        torch.testing.assert_close(module(x), want)
