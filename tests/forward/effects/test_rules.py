"""Each rule is needed: with it a module is refused, without it one is fused that computes something else.

The harmful way is one that the trace does not take, so that what the trace has seen does not help.
"""

from collections.abc import Callable

import pytest
import torch
from torch import nn

import fusekit as fk
from fusekit.forward.effects import RULES, all_off, on, switched_off
from tests.adversarial.cases import Case, Cases, Pair, check, check_values, one

SHELF: list[torch.Tensor] = []
OUT_OF_SIGHT: dict = {"SHELF": SHELF}
exec("def doubled(x): x.mul_(2)\ndef from_the_shelf(): return SHELF.pop()\n", OUT_OF_SIGHT)
doubled, from_the_shelf = OUT_OF_SIGHT["doubled"], OUT_OF_SIGHT["from_the_shelf"]

needed: dict[str, Case] = {}
WRITTEN = ("input-written", "input-may-be-written")


def late() -> tuple:
    return torch.randn(2, 3, 8), True


def late_and_same() -> tuple:
    x = torch.randn(2, 3, 8)
    return x, x, True


def not_early() -> tuple:
    return torch.randn(2, 3, 8), False


def needs(rule: str, *reasons: str, way: Callable[[], tuple] = late) -> Callable:
    def add(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
        cases = Cases()
        cases.refuses(*(reasons or WRITTEN), inputs=(one, way) if way is not late_and_same else (way,))(build)
        needed[rule] = cases[0]
        return build

    return add


@needs("aliases")
class Aliases(Pair):
    def forward(self, x, late: bool = False):
        y = x
        q = self.q(x)
        if late:
            y.mul_(2)
        return q, self.k(x)


@needs("views")
class Views(Pair):
    def forward(self, x, late: bool = False):
        y = x.view(-1)
        q = self.q(x)
        if late:
            y.mul_(2)
        return q, self.k(x)


@needs("maybe-views")
class MaybeViews(Pair):
    def forward(self, x, late: bool = False):
        y = x.type_as(x)
        q = self.q(x)
        if late:
            y.mul_(2)
        return q, self.k(x)


@needs("same-inputs", way=late_and_same)
class SameInputs(Pair):
    def forward(self, x, y, late: bool = False):
        q = self.q(x)
        if late:
            y.mul_(2)
        return q, self.k(x)


@needs("containers")
class Containers(Pair):
    def forward(self, x, late: bool = False):
        both = [x, 1]
        q = self.q(x)
        if late:
            both[0].mul_(2)
        return q, self.k(x)


@needs("attributes")
class Attributes(Pair):
    def forward(self, x, late: bool = False):
        h = x + 1
        self.kept = h
        y = self.kept
        q = self.q(y)
        if late:
            h.mul_(2)
        return q, self.k(y)


@needs("writes")
class Writes(Pair):
    def forward(self, x, late: bool = False):
        q = self.q(x)
        if late:
            x.mul_(2)
        return q, self.k(x)


@needs("augmented")
class Augmented(Pair):
    def forward(self, x, late: bool = False):
        y = x
        q = self.q(x)
        if late:
            y += 1
        return q, self.k(x)


@needs("items")
class Items(Pair):
    def forward(self, x, late: bool = False):
        q = self.q(x)
        if late:
            x[0] = 1
        return q, self.k(x)


@needs("tensor-attributes")
class TensorAttributes(Pair):
    def forward(self, x, late: bool = False):
        q = self.q(x)
        if late:
            x.data = x.data + 1
        return q, self.k(x)


@needs("out")
class Out(Pair):
    def forward(self, x, late: bool = False):
        q = self.q(x)
        if late:
            torch.mul(x, 2, out=x)
        return q, self.k(x)


@needs("callees")
class Callees(Pair):
    def double(self, x):
        x.mul_(2)

    def forward(self, x, late: bool = False):
        q = self.q(x)
        if late:
            self.double(x)
        return q, self.k(x)


@needs("unknown-calls")
class UnknownCalls(Pair):
    def forward(self, x, late: bool = False):
        q = self.q(x)
        if late:
            doubled(x)
        return q, self.k(x)


@needs("closures")
class Closures(Pair):
    def forward(self, x, late: bool = False):
        def double():
            x.mul_(2)

        q = self.q(x)
        if late:
            double()
        return q, self.k(x)


@needs("generators")
class Generators(Pair):
    def forward(self, x, late: bool = False):
        once = (x.mul_(2) for _ in range(1))
        q = self.q(x)
        if late:
            next(once)
        return q, self.k(x)


@needs("properties")
class Properties(Pair):
    @property
    def double(self):
        self.kept.mul_(2)

    def forward(self, x, late: bool = False):
        self.kept = x
        q = self.q(x)
        if late:
            self.double
        return q, self.k(x)


def shelve(tensor):
    SHELF.append(tensor)


@needs("escapes")
class Escapes(Pair):
    def forward(self, x, late: bool = False):
        h = x + 1
        shelve(h)
        y = from_the_shelf()
        q = self.q(y)
        if late:
            h.mul_(2)
        return q, self.k(y)


@needs("loops")
class Loops(Pair):
    def forward(self, x, late: bool = False):
        h = x + 1
        q = self.q(x)
        for _ in range(2):
            if late:
                h.mul_(2)
            h = x
        return q, self.k(x)


@needs("branches", way=not_early)
class Branches(Pair):
    def forward(self, x, early: bool = True):
        q = self.q(x)
        if early:
            pass
        else:
            x.mul_(2)
        return q, self.k(x)


@needs("handlers")
class Handlers(Pair):
    def forward(self, x, late: bool = False):
        q = self.q(x)
        try:
            if late:
                raise ValueError
        except ValueError:
            x.mul_(2)
        return q, self.k(x)


@needs("weights")
class Weights(Pair):
    def forward(self, x, late: bool = False):
        h = x + 1
        q = self.q(h)
        if late:
            self.k.weight.data.mul_(2)
        return q, self.k(h)


@needs("rebinding", "input-rebound")
class Rebinding(Pair):
    def forward(self, x, late: bool = False):
        h = x + 1
        q = self.q(h)
        if late:
            h = x + 2
        return q, self.k(h)


@needs("values", "different-inputs", way=not_early)
class Values(Pair):
    def forward(self, x, early: bool = True):
        if early:
            y = x
        else:
            y = x + 1
        return self.q(x), self.k(y)


@needs("context", "different-context")
class Context(Pair):
    def forward(self, x, late: bool = False):
        q = self.q(x)
        if late:
            torch.set_grad_enabled(False)
        return q, self.k(x)


@pytest.mark.parametrize("rule", RULES)
def test_with_the_rule_the_module_is_refused_and_that_is_right(rule):
    check(needed[rule])


@pytest.mark.parametrize("rule", RULES)
def test_without_the_rule_it_is_fused_and_computes_something_else(rule):
    case = needed[rule]
    with switched_off(rule):
        assert [site.parts for site in fk.plan(case.module()).sites] == [("q", "k")]
        with pytest.raises(AssertionError, match="fused, input"):
            check_values(case)


def test_rules_hold_again_behind_the_block():
    with switched_off("views", "out"):
        with switched_off("views"):
            assert all_off() == {"views", "out"}
        assert not on("views") and on("writes")
    assert all_off() == frozenset()


def test_an_unknown_rule_is_named():
    with pytest.raises(ValueError, match="'view' is no rule of the analysis"):
        with switched_off("view"):
            pass
