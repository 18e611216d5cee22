"""Loops, branches, try and with blocks around and between the projections.

PYTEST_DONT_REWRITE: a forward with an assert would not be what the file says.
"""

import contextlib

import torch

from tests.adversarial.cases import Cases, Pair, one, same, two

cases = Cases()
WRITTEN = ("input-written", "input-may-be-written")
REBOUND = ("input-rebound", "input-may-be-written", "different-branches", "different-inputs")
CONTEXT = ("different-context", "different-branches", "input-may-be-written")


def one_row():
    return (torch.randn(1, 3, 8),)


# -- loops ---------------------------------------------------------------------------------------


@cases.refuses(*WRITTEN, "called-twice")
class WritesInTheSecondRound(Pair):
    def forward(self, x):
        for i in range(2):
            q = self.q(x)
            if i == 1:
                x.mul_(2)
            k = self.k(x)
        return q, k


@cases.refuses(*WRITTEN)
class LoopsOnceThereIsSomething(Pair):
    def forward(self, x):
        q = self.q(x)
        for _ in range(self.calls):
            x.mul_(2)
        k = self.k(x)
        self.calls += 1
        return q, k


@cases.refuses(*WRITTEN)
class NameCarriedRound(Pair):
    def forward(self, x):
        h = x + 1
        q = self.q(x)
        for _ in range(2):
            h.mul_(2)
            h = x
        return q, self.k(x)


@cases.refuses(*WRITTEN)
class NameCarriedRoundBefore(Pair):
    def forward(self, x):
        g = h = x + 1
        for _ in range(2):
            h = g
            g = x
        q = self.q(x)
        h.mul_(2)
        return q, self.k(x)


@cases.refuses(*WRITTEN)
class While(Pair):
    def forward(self, x):
        n = 2
        q = self.q(x)
        while n:
            x.mul_(2)
            n -= 1
        return q, self.k(x)


@cases.refuses(*WRITTEN)
class WhileTestWrites(Pair):
    def forward(self, x):
        q = self.q(x)
        while x.add_(1) is None:
            pass
        return q, self.k(x)


@cases.refuses(*WRITTEN)
class ForElse(Pair):
    def forward(self, x):
        q = self.q(x)
        for _ in range(2):
            pass
        else:
            x.mul_(2)
        return q, self.k(x)


@cases.refuses(*WRITTEN)
class BreaksBeforeTheWrite(Pair):
    def forward(self, x):
        q = self.q(x)
        for i in range(3):
            if i >= self.calls:
                break
            x.mul_(2)
        k = self.k(x)
        self.calls += 1
        return q, k


@cases.refuses(*WRITTEN)
class ContinuesBeforeTheWrite(Pair):
    def forward(self, x):
        q = self.q(x)
        for i in range(3):
            if i != self.calls:
                continue
            x.mul_(2)
        k = self.k(x)
        self.calls += 1
        return q, k


@cases.refuses("different-branches", "called-twice", "different-inputs", "input-rebound")
class OneInALoop(Pair):
    def forward(self, x):
        k = self.k(x)
        for _ in range(2):
            q = self.q(x)
            x = x * 2
        return q, k


@cases.refuses(*WRITTEN, "called-twice", "different-inputs", shows=False)
class RoundTheLoop(Pair):
    """The second one of a round and the first one of the next."""

    def forward(self, x):
        h = self.k(x)
        for _ in range(2):
            q = self.q(x) + h
            x.mul_(2)
            h = self.k(x)
        return q, h


@cases.may_fuse("q k", but=("called-twice", "different-inputs"))
class BothInTheBody(Pair):
    def forward(self, x):
        for _ in range(2):
            q, k = self.q(x), self.k(x)
        return q, k


@cases.may_fuse("q k", but=("called-twice", "different-inputs"))
class BothInTheBodyOfAnother(Pair):
    def forward(self, x):
        for _ in range(2):
            q, k = self.q(x), self.k(x)
            x = q + k
        return x


@cases.fuses("q k")
class HarmlessLoops(Pair):
    def forward(self, x):
        q = self.q(x)
        n = 3
        while n > 0:
            n -= 1
            if n == 1:
                continue
            q = q + n
        for i in range(4):
            if i == 2:
                break
            q = q * 2
        else:
            q = q + 1
        return q, self.k(x)


@cases.fuses("q k")
class LoopWritesTheOutput(Pair):
    def forward(self, x):
        q = self.q(x)
        for i in range(2):
            q[..., i] = 0
        return q * 1, self.k(x)


@cases.fuses("q k")
class LoopBeforeAndAfter(Pair):
    def forward(self, x):
        for _ in range(2):
            x.mul_(2)
        q, k = self.q(x), self.k(x)
        for _ in range(2):
            x.mul_(2)
        return q, k


# -- branches ------------------------------------------------------------------------------------------


@cases.refuses(*WRITTEN, inputs=(one, two))
class WritesWhereAnInputIsGiven(Pair):
    def forward(self, x, y=None):
        q = self.q(x)
        if y is not None:
            x.mul_(2)
        return q, self.k(x)


@cases.refuses(*WRITTEN, inputs=(one, one_row))
class WritesInBothArms(Pair):
    def forward(self, x):
        q = self.q(x)
        if x.shape[0] > 1:
            x.mul_(2)
        else:
            x.add_(1)
        return q, self.k(x)


@cases.refuses(*WRITTEN, inputs=(one, one_row))
class WritesSecondNameOfOneArm(Pair):
    def forward(self, x):
        if x.shape[0] > 1:
            h = x + 1
        else:
            h = x
        q = self.q(x)
        h.mul_(2)
        return q, self.k(x)


@cases.refuses(*WRITTEN)
class WritesInTraining(Pair):
    def forward(self, x):
        q = self.q(x)
        if self.training:
            x.mul_(2)
        return q, self.k(x)


@cases.refuses(*WRITTEN, inputs=(one, two))
class WritesInAConditional(Pair):
    def forward(self, x, y=None):
        q = self.q(x)
        n = x.mul_(2) if y is not None else None
        return q, self.k(x)


@cases.refuses(*WRITTEN, inputs=(one, two))
class WritesBehindAnd(Pair):
    def forward(self, x, y=None):
        q = self.q(x)
        n = y is not None and x.mul_(2) is None
        return q, self.k(x)


@cases.refuses(*WRITTEN, inputs=(one, two))
class WritesInAnAssert(Pair):
    def forward(self, x, y=None):
        q = self.q(x)
        assert y is None or x.mul_(2) is not None
        return q, self.k(x)


@cases.refuses(*WRITTEN)
class WritesInACase(Pair):
    def forward(self, x):
        q = self.q(x)
        match self.calls:
            case 1:
                x.mul_(2)
        k = self.k(x)
        self.calls += 1
        return q, k


@cases.refuses(*WRITTEN)
class WritesInAGuard(Pair):
    def forward(self, x):
        q = self.q(x)
        match self.calls:
            case n if n > 0 and x.mul_(2) is None:
                pass
        k = self.k(x)
        self.calls += 1
        return q, k


@cases.fuses("q k", inputs=(one, one_row))
class HarmlessArms(Pair):
    def forward(self, x):
        q = self.q(x)
        if x.shape[0] > 1:
            q = q * 2
        elif self.flag:
            q = q + 1
        return q, self.k(x)


@cases.fuses("q k", inputs=(one, one_row))
class RaisesBetween(Pair):
    def forward(self, x):
        q = self.q(x)
        if x.shape[0] == 1:
            raise ValueError("one row")
        return q, self.k(x)


@cases.fuses("q k", inputs=(one, one_row))
class AssertsBetween(Pair):
    def forward(self, x):
        q = self.q(x)
        assert x.shape[0] > 1, "one row"
        return q, self.k(x)


@cases.may_fuse("q k", but=("different-branches",), inputs=(one, one_row))
class ReturnsBetween(Pair):
    def forward(self, x):
        q = self.q(x)
        if x.shape[0] == 1:
            return q
        return q, self.k(x)


@cases.fuses("q k", inputs=(one, one_row))
class OnceInEachArm(Pair):
    def forward(self, x):
        if x.shape[0] > 1:
            q, k = self.q(x), self.k(x)
        else:
            k = self.k(x) * 2
            q = self.q(x)
        return q, k


@cases.may_fuse("q k", but=("different-branches",), inputs=(one, one_row))
class OneInOneArm(Pair):
    def forward(self, x):
        q = self.q(x)
        k = q
        if x.shape[0] > 1:
            k = self.k(x)
        return q, k


@cases.fuses("q k v")
class WhereItExists(Pair):
    def forward(self, x):
        q, k = self.q(x), self.k(x)
        v = self.v(x) if self.v is not None else k
        return q, k, v


@cases.fuses("q k")
class WhereItDoesNotExist(Pair):
    def forward(self, x):
        q, k = self.q(x), self.k(x)
        v = self.absent(x) if self.absent is not None else k
        return q, k, v


@cases.fuses("q k", inputs=(one, two, same))
class ArmBefore(Pair):
    def forward(self, x, y=None):
        if y is not None:
            x.mul_(2)
            x = y
        return self.q(x), self.k(x)


# -- try -------------------------------------------------------------------------------------------------


@cases.refuses(*WRITTEN, "different-branches")
class WritesInAHandler(Pair):
    def forward(self, x):
        q = self.q(x)
        try:
            n = [1][self.calls]
        except IndexError:
            x.mul_(2)
        k = self.k(x)
        self.calls += 1
        return q, k


@cases.refuses(*WRITTEN, "different-branches")
class WritesInElse(Pair):
    def forward(self, x):
        q = self.q(x)
        try:
            n = 1 // self.calls
        except ZeroDivisionError:
            n = 0
        else:
            x.mul_(2)
        k = self.k(x)
        self.calls += 1
        return q, k


@cases.refuses(*WRITTEN, "different-branches")
class WritesInFinally(Pair):
    def forward(self, x):
        q = self.q(x)
        try:
            n = 1
        finally:
            x.mul_(2)
        return q, self.k(x)


@cases.refuses(*WRITTEN, "different-branches")
class WritesThenFails(Pair):
    def forward(self, x):
        q = self.q(x)
        with contextlib.suppress(ValueError):
            x.mul_(2)
            raise ValueError
        return q, self.k(x)


@cases.refuses("different-branches", *WRITTEN)
class OneInAHandler(Pair):
    def forward(self, x):
        try:
            q = self.q(x)
            x.mul_(2)
            n = [1][1]
        except IndexError:
            n = self.k(x)
        return q, n


@cases.fuses("q k")
class TryBetween(Pair):
    def forward(self, x):
        q = self.q(x)
        try:
            n = 1 // self.calls
        except ZeroDivisionError:
            n = 0
        return q + n, self.k(x)


@cases.fuses("q k")
class TryAroundBoth(Pair):
    def forward(self, x):
        try:
            q, k = self.q(x), self.k(x)
        finally:
            self.calls += 1
        return q, k


# -- grad mode and autocast -------------------------------------------------------------------------------


@cases.refuses(*CONTEXT)
class NoGradAroundTheFirst(Pair):
    def forward(self, x):
        with torch.no_grad():
            q = self.q(x)
        return q, self.k(x)


@cases.refuses(*CONTEXT)
class NoGradAroundTheSecond(Pair):
    def forward(self, x):
        q = self.q(x)
        with torch.no_grad():
            k = self.k(x)
        return q, k


@cases.refuses(*CONTEXT)
class TwoBlocksOfTwoModes(Pair):
    def forward(self, x):
        with torch.enable_grad():
            q = self.q(x)
        with torch.no_grad():
            k = self.k(x)
        return q, k


@cases.refuses(*CONTEXT)
class ModeDecidedByTraining(Pair):
    def forward(self, x):
        q = self.q(x)
        with torch.set_grad_enabled(not self.training):
            k = self.k(x)
        return q, k


@cases.refuses(*CONTEXT)
class SetsTheModeBetween(Pair):
    def forward(self, x):
        q = self.q(x)
        torch.set_grad_enabled(False)
        return q, self.k(x)


@cases.refuses(*CONTEXT)
class SetsTheModeInAMethod(Pair):
    def off(self):
        torch.set_grad_enabled(False)

    def forward(self, x):
        q = self.q(x)
        self.off()
        return q, self.k(x)


@cases.refuses(*CONTEXT)
class EntersTheModeByHand(Pair):
    def forward(self, x):
        mode = torch.no_grad()
        q = self.q(x)
        mode.__enter__()
        k = self.k(x)
        mode.__exit__(None, None, None)
        return q, k


@cases.refuses(*CONTEXT)
class EntersTheModeByAStack(Pair):
    def forward(self, x):
        with contextlib.ExitStack() as stack:
            q = self.q(x)
            stack.enter_context(torch.no_grad())
            k = self.k(x)
        return q, k


@cases.refuses(*CONTEXT)
class InferenceModeAroundOne(Pair):
    def forward(self, x):
        q = self.q(x)
        with torch.inference_mode(self.training):
            k = self.k(x)
        return q, k


@cases.refuses(*CONTEXT)
class AutocastAroundOne(Pair):
    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            q = self.q(x)
        return q, self.k(x)


@cases.refuses(*CONTEXT)
class AutocastOffAroundOne(Pair):
    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            q = self.q(x)
            with torch.autocast("cpu", enabled=False):
                k = self.k(x)
        return q, k


@contextlib.contextmanager
def doubling(x):
    yield 2
    x.mul_(2)


@cases.refuses(*CONTEXT, *WRITTEN)
class WritesOnTheWayOut(Pair):
    def forward(self, x):
        with doubling(x) as n:
            q = self.q(x)
        return q * n, self.k(x)


@cases.refuses(*CONTEXT, *WRITTEN)
class WritesOnTheWayOutBetween(Pair):
    def forward(self, x):
        q = self.q(x)
        with doubling(x) as n:
            q = q * n
        return q, self.k(x)


@cases.fuses("q k")
class NoGradAroundBoth(Pair):
    def forward(self, x):
        with torch.no_grad():
            q = self.q(x)
            k = self.k(x)
        return q, k


@cases.fuses("q k")
class NoGradBetween(Pair):
    def forward(self, x):
        q = self.q(x)
        with torch.no_grad():
            peak = q.abs().max()
        return q, self.k(x), peak


@cases.fuses("q k")
class EnableGradAroundBoth(Pair):
    def forward(self, x):
        with torch.enable_grad():
            return self.q(x), self.k(x)


@cases.fuses("q k")
class AutocastBetween(Pair):
    def forward(self, x):
        q = self.q(x)
        with torch.autocast("cpu", enabled=False):
            q = q.float() * 2
        return q, self.k(x)


@cases.may_fuse("q k", but=("different-branches", "input-may-be-written"))
class DoublesOnTheWayOutOfBoth(Pair):
    def forward(self, x):
        with doubling(x):
            q = self.q(x)
            k = self.k(x)
        return q, k


test_case, test_values, test_verdict = cases.tests()
