"""Small functions between the parts: read where they can only view and count, refused where not."""

import functools

import pytest
import torch
import torch.nn as nn

import fusekit as fk


def heads(t, width, shape=None):
    return t.view(*shape, width)


def split_heads(t, width):
    """Splits."""
    return t.unflatten(-1, (-1, width)).transpose(1, 2)


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k = nn.Linear(8, 8), nn.Linear(8, 8)
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

    def yields_nothing(self, t):
        t.view(-1)

    def left_out(self, t, width=2):
        return t.view(-1, width)

    def reads_more(self, t):
        return t.view(self.kept)

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


@pytest.mark.parametrize("cls", [Pair, Transposed, Free, InAnArm])
def test_views_and_counts_are_passed(cls):
    module, x = cls(), torch.randn(2, 3, 8)
    want = module(x)
    plan = fk.plan(module)
    assert [site.parts for site in plan.sites] == [("q", "k")], [no.message for no in plan.refusals]
    with plan.apply():
        torch.testing.assert_close(module(x), want)


REFUSED = [
    "self.writes(q)",
    "self.adds(q)",
    "self.keeps(q)",
    "self.stores(q)",
    "self.branches(q)",
    "self.loops(q)",
    "self.sets_item(q)",
    "self.calls(q)",
    "self.left_out(q)",
    "self.cached(q)",
    "self.mutes(q)",
    "self.reshape(q)",
    "self.transposed(*(q,))",
    "self.transposed(**{'t': q})",
    "self.shaped(q, x.shape[1], self.kept or 2)",
    "self.own(q)",
    "late(q)",
    "heads(q, 8, x.shape[:-1])",
]


@pytest.mark.parametrize("text", REFUSED)
def test_anything_else_is_refused(text, tmp_path):
    path = tmp_path / "helped.py"
    path.write_text(
        "from tests.fusions.test_helpers import Pair, heads\n\n\nclass Helped(Pair):\n"
        f"    def forward(self, x):\n        late = self.writes\n        q = self.q(x)\n        q = {text}\n"
        "        return q, self.k(x)\n"
    )
    names = {"__name__": "helped"}
    exec(compile(path.read_text(), str(path), "exec"), names)
    module = names["Helped"]()
    module.own = lambda t: t
    plan = fk.plan(module)
    assert not plan.sites
    (no,) = plan.refusals
    assert no.reason in ("input-may-be-written", "input-written", "different-context"), no.message
    assert no.line == (9 if no.reason == "different-context" else 8)


def test_method_that_an_instance_replaces_is_refused():
    module = Transposed()
    module.transposed = lambda t: t.mul_(2)
    (no,) = fk.plan(module).refusals
    assert no.reason == "input-may-be-written"
