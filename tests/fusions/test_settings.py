"""A setting of a submodule that runs between the parts is changed after fusing: they run where they stand."""

import copy

import pytest
import torch
import torch.nn as nn

import fusekit as fk


class Between(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.act = nn.ReLU()

    def forward(self, x):
        q = self.q(x)
        q = q + self.act(x)
        return q, self.k(x), self.v(x)


class Dropping(Between):
    def __init__(self):
        super().__init__()
        self.act = nn.Dropout(0.5)


def run(module, x):
    x = x.clone()
    with torch.no_grad():
        return [*module(x), x]


@pytest.mark.parametrize("kind", [Between, Dropping])
def test_what_becomes_in_place_after_fusing_is_honoured(kind):
    unfused = kind().eval()
    fused = copy.deepcopy(unfused)
    fk.fuse(fused)
    assert [site.parts for site in fk.plan(fused).applied] == [("q", "k", "v")]
    x = torch.randn(2, 8)
    for inplace in (False, True, False):
        unfused.act.inplace = fused.act.inplace = inplace
        for wanted, found in zip(run(unfused, x), run(fused, x), strict=True):
            torch.testing.assert_close(found, wanted)


def test_where_no_setting_decides_the_text_is_as_short_as_can_be():
    class Plain(Between):
        def forward(self, x):
            return self.q(x) * 2, self.k(x), self.v(x)

    assert " if " not in str(fk.plan(Plain()).sites[0].diff)


def test_compiled_code_sees_it_too():
    unfused = Between().eval()
    fused = copy.deepcopy(unfused)
    fk.fuse(fused)
    compiled = torch.compile(fused, fullgraph=True, backend="eager")
    x = torch.randn(2, 8)
    with torch.no_grad():
        for inplace in (False, True):
            unfused.act.inplace = fused.act.inplace = inplace
            for wanted, found in zip(unfused(x.clone()), compiled(x.clone()), strict=True):
                torch.testing.assert_close(found, wanted)
