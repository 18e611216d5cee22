"""Linears that a forward calls in an unusual way: fused, or refused, never silent."""

import inspect

import pytest
import torch
import torch.nn as nn

import fusekit as fk


class Three(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.pair = (self.q, self.k)

    def _qkv(self, x):
        return self.q(x), self.k(x), self.v(x)

    def _further(self, x):
        return self._qkv(x)

    @property
    def parts(self):
        return self.q, self.k


class Dict(nn.Module):
    def __init__(self):
        super().__init__()
        self.heads = nn.ModuleDict({"a": nn.Linear(8, 8), "b": nn.Linear(8, 8)})


class List(nn.Module):
    def __init__(self):
        super().__init__()
        self.heads = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])


class ByMethod(Three):
    def forward(self, x):
        q, k, v = self._qkv(x)  # here
        return q + k + v


class ByMethodOfMethod(Three):
    def forward(self, x):
        return self._further(x)  # here


class BySuper(ByMethod):
    def forward(self, x):
        return super().forward(x) + 1  # here


class ByKey(Dict):
    def forward(self, x):
        return self.heads["a"](x), self.heads["b"](x)  # here


class ByIndex(List):
    def forward(self, x):
        return self.heads[0](x), self.heads[1](x)  # here


class ByLoop(List):
    def forward(self, x):
        found = []
        for head in self.heads:
            found.append(head(x))  # here
        return found


class ByComprehension(List):
    def forward(self, x):
        return [head(x) for head in self.heads]  # here


class ByItems(Dict):
    def forward(self, x):
        return {name: head(x) for name, head in self.heads.items()}  # here


class ByAlias(Three):
    def forward(self, x):
        f, g = self.q, self.k
        return f(x), g(x)  # here


class ByAliasOfOne(Three):
    def forward(self, x):
        f = self.q
        return f(x), self.k(x)  # here


class ByAliasOfSelf(Three):
    def forward(self, x):
        me = self
        return me.q(x), me.k(x)  # here


class ByAliasOfList(List):
    def forward(self, x):
        heads = self.heads
        return heads[0](x), heads[1](x)  # here


class ByTuple(Three):
    def forward(self, x):
        return [part(x) for part in self.pair]  # here


class ByProperty(Three):
    def forward(self, x):
        return [part(x) for part in self.parts]  # here


class ByComputedName(Three):
    def forward(self, x):
        return tuple(getattr(self, name)(x) for name in ("q", "k"))  # here


class ByChildren(Three):
    def forward(self, x):
        return [part(x) for part in self.children()]  # here


def outside(module, x):
    return module.q(x), module.k(x)


class ByFunction(Three):
    def forward(self, x):
        return outside(self, x)  # here


SILENT = [
    ByMethod,
    ByMethodOfMethod,
    BySuper,
    ByKey,
    ByIndex,
    ByLoop,
    ByComprehension,
    ByItems,
    ByAlias,
    ByAliasOfOne,
    ByAliasOfSelf,
    ByAliasOfList,
    ByTuple,
    ByProperty,
    ByComputedName,
    ByChildren,
    ByFunction,
]


@pytest.mark.parametrize("cls", SILENT)
def test_linears_called_in_another_way_are_refused_with_the_line(cls):
    module = cls()
    plan = fk.plan(module)
    assert plan.sites == ()
    (refusal,) = plan.refusals
    assert (refusal.fusion, refusal.reason) == ("columns", "module-escapes")
    assert len(refusal.parts) >= 2 and " is called " in refusal.message
    lines, first = inspect.getsourcelines(cls.forward)
    assert refusal.line == first + next(i for i, line in enumerate(lines) if "# here" in line)


def test_method_is_named():
    (refusal,) = fk.plan(ByMethod()).refusals
    assert "inside of self._qkv(x), a method of the module, which is not followed yet" in refusal.message


class ByName(Dict):
    def forward(self, x):
        return self.heads.a(x), self.heads.b(x)


def test_items_of_a_dict_by_their_names_fuse():
    module, x = ByName(), torch.randn(3, 8)
    want = module(x)
    plan = fk.plan(module)
    assert [site.parts for site in plan.sites] == [("heads.a", "heads.b")]
    with plan.apply():
        torch.testing.assert_close(module(x), want)


class Chain(List):
    def forward(self, x):
        for head in self.heads:
            x = head(x)
        return x


class OneAfterTheOther(Three):
    def forward(self, x):
        return self.k(self.q(x))


@pytest.mark.parametrize("cls", [Chain, OneAfterTheOther])
def test_linears_of_different_inputs_are_no_site_and_no_refusal(cls):
    plan = fk.plan(cls())
    assert plan.sites == () and plan.refusals == ()


def test_forward_without_source_that_has_linears_in_a_list_says_so():
    namespace = {"nn": nn, "List": List}
    exec("class NoText(List):\n    def forward(self, x): return [h(x) for h in self.heads]", namespace)
    (refusal,) = fk.plan(namespace["NoText"]()).refusals
    assert (refusal.reason, refusal.parts) == ("no-source", ("heads.0", "heads.1"))
