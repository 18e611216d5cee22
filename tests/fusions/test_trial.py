"""A rewrite is tried out: what an output of its own can give and a slice cannot is no surprise later."""

import copy

import pytest
import torch
import torch.nn as nn

import fusekit as fk


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k = nn.Linear(8, 6), nn.Linear(8, 6)


class ViewsByRank(Pair):
    """At three dimensions the view splits nothing; at four it joins two."""

    def forward(self, x):
        q = self.q(x)
        k = self.k(x)
        return q.view(x.shape[0], x.shape[1], -1) * k.view(x.shape[0], x.shape[1], -1)


class ViewsInABranch(Pair):
    def forward(self, x, flat=False):
        q, k = self.q(x), self.k(x)
        if flat:
            return q.view(x.shape[0], -1) * k.view(x.shape[0], -1)
        return q * k


class SplitsTheLast(Pair):
    def forward(self, x):
        q, k = self.q(x), self.k(x)
        return q.view(*x.shape[:-1], 2, 3) * k.view(*x.shape[:-1], 2, 3)


def same(model, *inputs, **options):
    twin = copy.deepcopy(model)
    with fk.plan(model).apply() as fused:
        torch.testing.assert_close(model(*inputs, **options), twin(*inputs, **options))
    return fused.sites[0].match


@pytest.mark.parametrize("shape", [(2, 5, 8), (2, 3, 4, 8), (5, 4, 8)])
def test_a_view_that_another_rank_joins_is_right_at_every_rank(shape):
    assert same(ViewsByRank(), torch.randn(shape)).copied


@pytest.mark.parametrize("flat", [False, True])
def test_a_view_in_a_branch_that_the_trace_did_not_take_is_right_when_it_is(flat):
    assert same(ViewsInABranch(), torch.randn(2, 5, 8), flat=flat).copied


@pytest.mark.parametrize("shape", [(5, 8), (2, 5, 8), (2, 3, 4, 8), (8,)])
def test_a_view_that_only_splits_the_last_dimension_needs_no_copy(shape):
    assert not same(SplitsTheLast(), torch.randn(shape)).copied


class HandsOut(Pair):
    flag = False

    def forward(self, x):
        q, k = self.q(x), self.k(x)
        if self.flag:
            t = q.transpose(0, 1)
            return t, k
        return q * 2, k * 2


class HandsOutNothing(HandsOut):
    def forward(self, x):
        q, k = self.q(x), self.k(x)
        if self.flag:
            return q * k, q + 1
        return q * 2, k * 2


def test_an_output_handed_out_by_a_return_that_the_trace_did_not_take_is_one_of_its_own():
    model, x = HandsOut(), torch.randn(2, 5, 8)
    model.flag = True
    want = model(x)
    model.flag = False
    assert same(model, x).copied
    with fk.fuse(model):
        model.flag = True
        got = model(x)
    assert [out.stride() for out in got] == [out.stride() for out in want]
    assert got[0].untyped_storage()._cdata != got[1].untyped_storage()._cdata
    assert not same(HandsOutNothing(), x).copied


class ReluInTraining(Pair):
    def forward(self, x, scale=None):
        q, k = self.q(x), self.k(x)
        if self.training:
            q = torch.relu(q)
        if scale is None:
            k = k * 2.0
        return q.view(x.shape[0], -1) * k.view(x.shape[0], -1)


class Chosen(Pair):
    flag = False

    def forward(self, x):
        q, k = self.q(x), self.k(x)
        z = q if self.flag else q + k
        return z.view(x.shape[0], -1)


class ChosenInPlace(Pair):
    flag = False

    def forward(self, x):
        q, k = self.q(x), self.k(x)
        return (q * 2 if not self.flag else k).view(x.shape[0], -1)


class ChosenAndReturned(Pair):
    flag = False

    def forward(self, x):
        q, k = self.q(x), self.k(x)
        return q if self.flag else q + k


class FoldsInAMethod(Pair):
    flag = False

    def fold(self, t):
        return t.view(t.shape[0], -1)

    def forward(self, x):
        q, k = self.q(x), self.k(x)
        if self.flag:
            return self.fold(q) * self.fold(k)
        return (q * k).sum(-1)


class Complex(Pair):
    flag = False

    def forward(self, x):
        q, k = self.q(x), self.k(x)
        if self.flag:
            q = torch.view_as_complex(q.unflatten(-1, (3, 2))).abs()
            k = k[..., :3]
        return q * k


@pytest.mark.parametrize(
    "cls", [ReluInTraining, Chosen, ChosenInPlace, ChosenAndReturned, FoldsInAMethod, Complex]
)
def test_what_a_view_meets_on_a_way_not_traced_is_as_without_fusing(cls):
    model = cls().train()
    twin = copy.deepcopy(model)
    x = torch.randn(2, 5, 8)
    fk.fuse(model)
    assert fk.plan(model).applied
    for module in (model, twin):
        module.flag = True
        module.eval()
    options = {"scale": 3} if cls is ReluInTraining else {}
    found, wanted = model(x, **options), twin(x, **options)
    torch.testing.assert_close(found, wanted)
    assert found.stride() == wanted.stride()
