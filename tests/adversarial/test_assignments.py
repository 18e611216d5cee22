"""Names: what a store, a second name or a rebinding between two projections allows."""

import contextlib

import torch

from tests.adversarial.cases import (
    Cases,
    Pair,
    one,
    same,
    two,
)

cases = Cases()
WRITTEN = ("input-written", "input-may-be-written")
REBOUND = ("input-rebound", "input-may-be-written", "different-branches", "different-inputs")


# -- second names of the input -------------------------------------------------------------------


@cases.fuses("q k")
class SecondName(Pair):
    def forward(self, x):
        h = x
        return self.q(x), self.k(h)


@cases.fuses("q k")
class ChainedNames(Pair):
    def forward(self, x):
        a = b = x
        return self.q(a), self.k(b)


@cases.may_fuse("q k", but=("different-inputs",))
class NamesOfATuple(Pair):
    def forward(self, x):
        a, b = x, x
        return self.q(a), self.k(b)


@cases.may_fuse("q k", but=("different-inputs",))
class NameByWalrus(Pair):
    def forward(self, x):
        q = self.q(h := x)
        return q, self.k(h)


@cases.fuses("q k")
class SecondNameStoredAgainAfterwards(Pair):
    def forward(self, x):
        h = x
        q, k = self.q(x), self.k(h)
        h = h * 2
        return q, k, h


@cases.fuses("q k")
class SecondNameKeepsTheOldValue(Pair):
    def forward(self, x):
        h = x
        x = x * 2
        return self.q(h), self.k(h), x


@cases.fuses("q k")
class SecondNameOfFresh(Pair):
    def forward(self, x):
        h = self.norm(x)
        g = h
        return self.q(h), self.k(g)


@cases.fuses("q k")
class SecondNameOfBoth(Pair):
    def forward(self, x):
        h = x
        g = h
        return self.q(h), self.k(g)


@cases.refuses()
class SecondNameRebound(Pair):
    def forward(self, x):
        h = x
        q = self.q(h)
        h = h * 2
        return q, self.k(h)


@cases.refuses(*REBOUND)
class SecondNameSometimes(Pair):
    def forward(self, x):
        h = x
        if self.calls > 0:
            h = x * 2
        self.calls += 1
        return self.q(x), self.k(h)


@cases.refuses(*WRITTEN)
class WritesSecondName(Pair):
    def forward(self, x):
        h = x
        q = self.q(x)
        h.mul_(2)
        return q, self.k(x)


@cases.refuses(*WRITTEN)
class WritesNameOfChain(Pair):
    def forward(self, x):
        a = b = x
        q = self.q(x)
        b -= 1
        return q, self.k(x)


@cases.refuses(*WRITTEN)
class WritesNameByWalrus(Pair):
    def forward(self, x):
        q = self.q(x)
        (h := x).mul_(2)
        return q, self.k(x)


@cases.refuses(*WRITTEN)
class WritesStarredName(Pair):
    def forward(self, x):
        first, *rest = 1, x
        q = self.q(x)
        rest[0].mul_(2)
        return q, self.k(x)


@cases.refuses(*WRITTEN)
class WritesNameOfEitherArm(Pair):
    def forward(self, x):
        h = x + 1 if self.calls % 2 == 0 else x
        self.calls += 1
        q = self.q(x)
        h.mul_(2)
        return q, self.k(x)


@cases.refuses(*WRITTEN)
class WritesNameByOr(Pair):
    def forward(self, x):
        h = self.absent or x
        q = self.q(x)
        h.mul_(2)
        return q, self.k(x)


# -- augmented assignment ----------------------------------------------------------------------


@cases.fuses("q k")
class AddsToTheOutput(Pair):
    def forward(self, x):
        q = self.q(x)
        q += 1
        return q, self.k(x)


@cases.fuses("q k")
class AddsToANumber(Pair):
    def forward(self, x):
        n = x.shape[0]
        q = self.q(x)
        n += 1
        return q * n, self.k(x)


@cases.fuses("q k")
class AddsToFresh(Pair):
    def forward(self, x):
        y = x + 1
        q = self.q(x)
        y += q
        return q, self.k(x), y


@cases.fuses("q k")
class AddsToTheInputAfterwards(Pair):
    def forward(self, x):
        q, k = self.q(x), self.k(x)
        x += 1
        return q, k


@cases.fuses("q k")
class AddsToTheInputBefore(Pair):
    def forward(self, x):
        x += 1
        return self.q(x), self.k(x)


@cases.refuses(*WRITTEN)
class AddsToTheInput(Pair):
    def forward(self, x):
        q = self.q(x)
        x += 1
        return q, self.k(x)


@cases.refuses(*WRITTEN)
class AddsToAnEntry(Pair):
    def forward(self, x):
        q = self.q(x)
        x[0] += 1
        return q, self.k(x)


@cases.refuses(*WRITTEN)
class AddsToData(Pair):
    def forward(self, x):
        q = self.q(x)
        x.data += 1
        return q, self.k(x)


@cases.refuses(*WRITTEN)
class AddsToWhatSelfKeeps(Pair):
    def forward(self, x):
        self.kept = x
        q = self.q(x)
        self.kept += 1
        return q, self.k(x)


class Box:
    def __init__(self, item=None):
        self.item = item


@cases.refuses(*WRITTEN)
class AddsToWhatABoxKeeps(Pair):
    def forward(self, x):
        box = Box()
        box.item = x
        q = self.q(x)
        box.item += 1
        return q, self.k(x)


@cases.refuses(*WRITTEN, inputs=(two, same))
class AddsToAnotherInput(Pair):
    def forward(self, x, y):
        q = self.q(x)
        y += 1
        return q, self.k(x)


@cases.fuses("q k", inputs=(two, same))
class RebindsAnotherInput(Pair):
    def forward(self, x, y):
        q = self.q(x)
        y = y + 1
        return q, self.k(x), y


# -- attributes --------------------------------------------------------------------------------


@cases.fuses("q k")
class KeepsTheInput(Pair):
    def forward(self, x):
        q = self.q(x)
        self.kept = x
        return q, self.k(x)


@cases.fuses("q k")
class KeepsTheOutput(Pair):
    def forward(self, x):
        q = self.q(x)
        self.kept = q
        return self.k(x) + self.kept


@cases.fuses("q k")
class WritesWhatItKeepsAfterwards(Pair):
    def forward(self, x):
        q = self.q(x)
        self.kept = x
        k = self.k(x)
        self.kept.mul_(2)
        return q, k


@cases.fuses("q k")
class CountsOnSelf(Pair):
    def forward(self, x):
        q = self.q(x)
        self.calls += 1
        return q, self.k(x) * self.calls


@cases.fuses("q k")
class StoresANewBuffer(Pair):
    def forward(self, x):
        q = self.q(x)
        self.steps = self.steps + 1
        return q, self.k(x) * self.steps


@cases.may_fuse("q k", but=WRITTEN)
class AddsToABuffer(Pair):  # the caller may hand in a view of that very buffer
    def forward(self, x):
        q = self.q(x)
        self.steps += 1
        return q, self.k(x) * self.steps


@cases.fuses("q k")
class AddsToABufferBesideFresh(Pair):
    def forward(self, x):
        h = x * 2
        q = self.q(h)
        self.steps += 1
        return q, self.k(h) * self.steps


@cases.refuses(*WRITTEN)
class ReadsABufferThatIsWritten(Pair):
    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.randn(3, 8))

    def forward(self, x):
        h = self.table[:2]
        q = self.q(h)
        self.table.mul_(2)
        return q + x[0, 0], self.k(h)


@cases.refuses(*WRITTEN)
class WritesWhatItKept(Pair):
    """Only in the first call."""

    def forward(self, x):
        if self.kept is None:
            self.kept = x
        h = self.kept
        q = self.q(h)
        x.mul_(2)
        return q, self.k(h)


# -- stores of other names, and of this one --------------------------------------------------------


@cases.fuses("q k")
class Annotated(Pair):
    def forward(self, x):
        q: torch.Tensor = self.q(x)
        n: int = 2
        k: torch.Tensor = self.k(x)
        return q, k, n


@cases.fuses("q k")
class StarredOutputs(Pair):
    def forward(self, x):
        first, *rest = self.q(x), 1, 2
        return first, self.k(x), rest


@cases.fuses("q k")
class NestedTuple(Pair):
    def forward(self, x):
        (q, n), k = (self.q(x), 3), self.k(x)
        return q, k, n


@cases.fuses("q k")
class WalrusOfAnother(Pair):
    def forward(self, x):
        q = self.q(x)
        n = (m := 3) + 1
        return q * m, self.k(x), n


@cases.fuses("q k")
class DeletesAnother(Pair):
    def forward(self, x):
        y = x * 2
        q = self.q(x)
        del y
        return q, self.k(x)


@cases.fuses("q k")
class SwapsOthers(Pair):
    def forward(self, x):
        a, b = 1, 2
        q = self.q(x)
        a, b = b, a
        return q * a, self.k(x) * b


@cases.fuses("q k")
class ForTargetOfAnother(Pair):
    def forward(self, x):
        q = self.q(x)
        for i in range(2):
            q = q + i
        return q, self.k(x)


@cases.fuses("q k")
class ComprehensionWithTheSameName(Pair):
    def forward(self, x):
        q = self.q(x)
        n = [x + 1 for x in range(3)]
        return q, self.k(x), n


@cases.fuses("q k")
class LambdaWithTheSameName(Pair):
    def forward(self, x):
        q = self.q(x)
        more = lambda x: x + 1
        return more(q), self.k(x)


@cases.fuses("q k")
class NestedFunctionWithTheSameName(Pair):
    def forward(self, x):
        def more(x):
            x = x * 2
            return x

        q = more(self.q(x))
        return q, self.k(x)


@cases.fuses("q k")
class MatchStoresAnother(Pair):
    def forward(self, x):
        q = self.q(x)
        match self.scale:
            case 1.0:
                n = 1
            case other:
                n = other
        return q, self.k(x) * n


@cases.fuses("q k")
class WithAsAnother(Pair):
    def forward(self, x):
        q = self.q(x)
        with torch.no_grad() as nothing:
            n = q.sum()
        return q, self.k(x) + n


@cases.refuses()
class Rebinds(Pair):
    def forward(self, x):
        q = self.q(x)
        x = x * 2
        return q, self.k(x)


@cases.may_fuse("q k", but=("input-rebound",))
class RebindsToItself(Pair):
    def forward(self, x):
        q = self.q(x)
        x = x
        return q, self.k(x)


@cases.may_fuse("q k")
class RebindsToWhatMayBeItself(Pair):
    def forward(self, x):
        q = self.q(x)
        x = x.to(x.dtype)
        return q, self.k(x)


@cases.refuses(*REBOUND, inputs=(one, two))
class RebindsWhereAnInputIsGiven(Pair):
    def forward(self, x, y=None):
        q = self.q(x)
        if y is not None:
            x = x * 2
        return q, self.k(x)


@cases.refuses(inputs=(two, same))
class SwapsInputs(Pair):
    def forward(self, x, y):
        q = self.q(x)
        x, y = y, x
        return q, self.k(x)


@cases.refuses()
class ForTarget(Pair):
    def forward(self, x):
        q = self.q(x)
        for x in (x, x * 2):
            pass
        return q, self.k(x)


@cases.refuses(*REBOUND)
class ForTargetOnceThereAreSome(Pair):
    def __init__(self):
        super().__init__()
        self.others = []

    def forward(self, x):
        q = self.q(x)
        for x in self.others:
            pass
        k = self.k(x)
        self.others = [x * 2]
        return q, k


@cases.refuses()
class WithAs(Pair):
    def forward(self, x):
        q = self.q(x)
        with contextlib.nullcontext(x * 2) as x:
            k = self.k(x)
        return q, k


@cases.refuses(inputs=(two,))
class StarredRebinding(Pair):
    def forward(self, x, y):
        q = self.q(x)
        x, *rest = y, 1
        return q, self.k(x)


@cases.refuses()
class WalrusInATest(Pair):
    def forward(self, x):
        q = self.q(x)
        if (x := x * 2) is None:
            return q
        return q, self.k(x)


@cases.refuses()
class WalrusInAComprehension(Pair):
    def forward(self, x):
        q = self.q(x)
        n = [(x := x * 2) is None for _ in range(2)]
        return q, self.k(x), n


@cases.refuses(*REBOUND)
class MatchRebindsLater(Pair):
    def forward(self, x):
        q = self.q(x)
        match self.calls:
            case 0:
                pass
            case _:
                x = x * 2
        k = self.k(x)
        self.calls += 1
        return q, k


@cases.refuses(inputs=(two,))
class MatchCaptures(Pair):
    def forward(self, x, y):
        q = self.q(x)
        match (1, y):
            case (1, x):
                pass
        return q, self.k(x)


@cases.refuses()
class ImportRebinds(Pair):
    def forward(self, x):
        q = self.q(x)
        if self.calls:
            import math as x
        k = self.k(x)
        self.calls += 1
        return q, k


SHARED = None


def double_the_shared():
    global SHARED
    SHARED = SHARED * 2


@cases.refuses()
class ReadsAGlobalThatIsStoredAgain(Pair):
    def forward(self, x):
        global SHARED
        SHARED = x
        q = self.q(SHARED)
        double_the_shared()
        return q, self.k(SHARED)


@cases.may_fuse("q k", but=("different-inputs", "module-escapes", "input-rebound"))
class ReadsAGlobal(Pair):
    def forward(self, x):
        global SHARED
        SHARED = x
        return self.q(SHARED), self.k(SHARED)


# -- one value, or not -------------------------------------------------------------------------------


@cases.refuses()
class ReadsAnExpression(Pair):
    def forward(self, x):
        return self.q(x), self.k(x + 1)


@cases.may_fuse("q k")
class ReadsOneExpressionTwice(Pair):
    def forward(self, x):
        return self.q(x + 1), self.k(x + 1)


@cases.fuses("k v")
class OneOfThreeReadsAnother(Pair):
    def forward(self, x):
        h = x * 2
        return self.q(h), self.k(x), self.v(x)


@cases.fuses("q k", but=WRITTEN)
class OneOfThreeComesBehindAWrite(Pair):
    def forward(self, x):
        q, k = self.q(x), self.k(x)
        x.mul_(2)
        return q, k, self.v(x)


@cases.may_fuse("q k", but=("called-twice",))
class CalledTwice(Pair):
    def forward(self, x):
        return self.q(x), self.k(x), self.q(x) * 2, self.k(x) * 2


@cases.fuses("q k", but=("called-twice",))
class OneOfThreeIsCalledTwice(Pair):
    def forward(self, x):
        return self.q(x), self.k(x), self.v(x), self.v(x)


@cases.fuses("q k", "v o")
class TwoValues(Pair):
    def forward(self, x):
        y = self.q(x) + self.k(x)
        return self.v(y), self.o(y)


test_case, test_values, test_verdict = cases.tests()
