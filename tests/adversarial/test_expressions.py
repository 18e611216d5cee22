"""Where in an expression or a target a write may hide, and the order in which Python evaluates it.

PYTEST_DONT_REWRITE: a forward with an assert would not be what the file says.
"""

import contextlib

import torch
import torch.nn as nn

from tests.adversarial.cases import Cases, Pair, two

cases = Cases()
WRITTEN = ("input-written", "input-may-be-written")
CHANGED = (*WRITTEN, "module-escapes", "different-inputs", "different-context", "different-branches")


# -- targets that are entries or attributes -----------------------------------------------------------


@cases.refuses(*WRITTEN)
class EntryAsAForTarget(Pair):
    def forward(self, x):
        q = self.q(x)
        for x[..., 0] in (1.0, 2.0):
            pass
        return q, self.k(x)


@cases.refuses(*CHANGED)
class EntryAsAWithTarget(Pair):
    def forward(self, x):
        q = self.q(x)
        with contextlib.nullcontext(1.0) as x[..., 0]:
            k = self.k(x)
        return q, k


@cases.refuses(*WRITTEN)
class EntryInATupleOfTargets(Pair):
    def forward(self, x):
        q = self.q(x)
        x[..., 0], n = 1.0, 2
        return q * n, self.k(x)


@cases.refuses(*WRITTEN)
class EntryInAChainOfTargets(Pair):
    def forward(self, x):
        q = self.q(x)
        n = x[..., 0] = 2.0
        return q * n, self.k(x)


@cases.refuses(*WRITTEN)
class EntryOfAnnotatedTarget(Pair):
    def forward(self, x):
        q = self.q(x)
        x[..., 0]: float = 1.0
        return q, self.k(x)


@cases.refuses(*WRITTEN)
class EntryOfAViewAsATarget(Pair):
    def forward(self, x):
        rows = x.unbind(0)
        q = self.q(x)
        rows[0].detach()[0] = 1.0
        return q, self.k(x)


@cases.refuses(*CHANGED, shows=False)
class PartAsAForTarget(Pair):
    def forward(self, x):
        q = self.q(x)
        for self.k in (self.k, self.o):
            pass
        return q, self.k(x)


@cases.refuses(*CHANGED, shows=False)
class PartInATupleOfTargets(Pair):
    def forward(self, x):
        q = self.q(x)
        self.k, n = self.o, 2
        return q * n, self.k(x)


@cases.refuses(*CHANGED, "trace-stopped", shows=False)
class PartDeleted(Pair):
    def forward(self, x):
        q = self.q(x)
        del self.k
        return q, self.k(x)


@cases.refuses(*CHANGED)
class AddsToTheWeight(Pair):
    def forward(self, x):
        q = self.q(x)
        with torch.no_grad():
            self.k.weight += 1
        return q, self.k(x)


# -- writes inside of other things ------------------------------------------------------------------------


@cases.refuses(*WRITTEN)
class InAFormattedText(Pair):
    def forward(self, x):
        q = self.q(x)
        text = f"{x.mul_(2).shape}"
        return q, self.k(x)


@cases.refuses(*WRITTEN)
class InAWidthOfAFormat(Pair):
    def forward(self, x):
        q = self.q(x)
        text = f"{1:{x.mul_(2).dim()}}"
        return q, self.k(x), text


@cases.refuses(*WRITTEN)
class InAnIndex(Pair):
    def forward(self, x):
        q = self.q(x)
        n = [1, 2][x.mul_(2) is None]
        return q * n, self.k(x)


@cases.refuses(*WRITTEN)
class InASlice(Pair):
    def forward(self, x):
        q = self.q(x)
        ns = [1, 2, 3, 4][: x.mul_(2).dim()]
        return q, self.k(x), ns


@cases.refuses(*WRITTEN)
class InAnIndexOfATarget(Pair):
    def forward(self, x):
        ns = [1, 2, 3, 4]
        q = self.q(x)
        ns[x.mul_(2).dim()] = 5
        return q, self.k(x), ns


@cases.refuses(*WRITTEN)
class InADeletion(Pair):
    def forward(self, x):
        ns = [1, 2, 3, 4]
        q = self.q(x)
        del ns[x.mul_(2).dim()]
        return q, self.k(x), ns


@cases.refuses(*WRITTEN)
class InAComparison(Pair):
    def forward(self, x):
        q = self.q(x)
        n = 1 < x.mul_(2).dim() < 5
        return q * n, self.k(x)


@cases.refuses(*WRITTEN)
class InAnAnnotation(Pair):
    def forward(self, x):
        q = self.q(x)

        def more(t: x.mul_(2)):
            return t

        return q, self.k(x)


@cases.refuses(*WRITTEN)
class InADefaultOfALambda(Pair):
    def forward(self, x):
        q = self.q(x)
        more = lambda t=x.mul_(2): t
        return q, self.k(x)


@cases.refuses(*WRITTEN)
class InADecorator(Pair):
    def doubling(self, x):
        x.mul_(2)
        return lambda function: function

    def forward(self, x):
        q = self.q(x)

        @self.doubling(x)
        def more():
            return 1

        return q, self.k(x)


@cases.refuses(*WRITTEN)
class InABaseOfAClass(Pair):
    def forward(self, x):
        q = self.q(x)

        class More(type(x.mul_(2).dim())):
            pass

        return q, self.k(x)


@cases.refuses(*WRITTEN)
class InAConditionOfAComprehension(Pair):
    def forward(self, x):
        q = self.q(x)
        ns = [n for n in range(2) if x.mul_(2) is not None]
        return q, self.k(x), ns


@cases.refuses(*WRITTEN)
class InTheIterableOfAComprehension(Pair):
    def forward(self, x):
        q = self.q(x)
        ns = {n for n in range(x.mul_(2).dim())}
        return q, self.k(x)


@cases.refuses(*WRITTEN)
class InTheIterableOfAGeneratorNeverRun(Pair):
    """The first iterable of a generator is evaluated where it is made."""

    def forward(self, x):
        q = self.q(x)
        never = (n for n in range(x.mul_(2).dim()))
        return q, self.k(x)


@cases.refuses(*WRITTEN)
class InAKeywordArgument(Pair):
    def forward(self, x):
        q = torch.mul(self.q(x), other=x.mul_(2))
        return q, self.k(x)


@cases.refuses(*WRITTEN)
class InTheContextOfAWith(Pair):
    def forward(self, x):
        q = self.q(x)
        with contextlib.nullcontext(x.mul_(2)):
            pass
        return q, self.k(x)


@cases.refuses(*WRITTEN)
class InTheSubjectOfAMatch(Pair):
    def forward(self, x):
        q = self.q(x)
        match x.mul_(2).dim():
            case 9:
                pass
        return q, self.k(x)


@cases.refuses(*WRITTEN)
class InTheTypeOfAHandler(Pair):
    def forward(self, x):
        q = self.q(x)
        try:
            n = [1][self.calls]
        except x.mul_(2) is not None and IndexError:
            n = 2
        k = self.k(x)
        self.calls += 1
        return q * n, k


# -- the order of evaluation ---------------------------------------------------------------------------------


@cases.refuses(*WRITTEN)
class TargetOfAnAugmentedComesFirst(Pair):
    def forward(self, x):
        q = self.q(x) * 1
        q[x.mul_(2).dim() - 3] += self.k(x)[0]
        return q


@cases.refuses(*WRITTEN)
class FunctionComesBeforeItsArguments(Pair):
    def forward(self, x):
        q = self.q(x)
        k = x.mul_(2).add(self.k(x))
        return q, k


@cases.refuses(*WRITTEN)
class LeftComesBeforeRight(Pair):
    def forward(self, x):
        return (self.q(x) + x.mul_(2)) * self.k(x)


@cases.refuses(*WRITTEN)
class KeyComesBeforeItsValue(Pair):
    def forward(self, x):
        return {self.q(x).dim(): 1, x.mul_(2).dim(): self.k(x)}


@cases.refuses(*WRITTEN)
class StarredComesInItsPlace(Pair):
    def forward(self, x):
        return [self.q(x), *[x.mul_(2)], self.k(x)]


@cases.refuses(*WRITTEN, "different-branches")
class ConditionComesBeforeTheBody(Pair):
    def forward(self, x):
        q = self.q(x)
        return q + (self.k(x) if x.mul_(2) is not None else 0)


@cases.may_fuse("q k", but=WRITTEN)
class ValueComesBeforeItsTarget(Pair):
    def forward(self, x):
        q = self.q(x) * 1
        q[x.mul_(2).dim() - 3] = self.k(x)[0]
        return q


@cases.fuses("q k")
class WriteComesBehindBoth(Pair):
    def forward(self, x):
        return [self.q(x), self.k(x), x.mul_(2) * 1]


@cases.fuses("q k")
class WriteComesBeforeBoth(Pair):
    def forward(self, x):
        n = x.mul_(2).dim()
        return [n, self.q(x), self.k(x)]


@cases.may_fuse("q k", but=WRITTEN)
class WriteComesBeforeBothInTheirStatement(Pair):
    def forward(self, x):
        return [x.mul_(2) * 1, self.q(x), self.k(x)]


@cases.may_fuse("q k", but=WRITTEN)
class GeneratorNeverRun(Pair):
    def forward(self, x):
        q = self.q(x)
        never = (x.mul_(n) for n in range(2))
        return q, self.k(x)


@cases.fuses("q k")
class AnnotationOfALocalIsNotEvaluated(Pair):
    def forward(self, x):
        q = self.q(x)
        n: x.mul_(2) = 1
        return q * n, self.k(x)


@cases.may_fuse("q k", but=WRITTEN)
class ShortCircuited(Pair):
    def forward(self, x):
        q = self.q(x)
        n = False and x.mul_(2)
        return q, self.k(x)


class CallWrites(nn.Module):
    def __call__(self, t):
        t.mul_(2)
        return super().__call__(t)

    def forward(self, t):
        return t * 1


@cases.refuses(*WRITTEN)
class CallOfASubmoduleWrites(Pair):
    def __init__(self):
        super().__init__()
        self.inner = CallWrites()

    def forward(self, x):
        q = self.q(x)
        return q + self.inner(x), self.k(x)


@cases.refuses(*WRITTEN)
class CallOfTheModuleItself(Pair):
    def forward(self, x, deep=True):
        if not deep:
            x.mul_(2)
            return x * 1
        q = self.q(x)
        h = self(x, False)
        return q + h, self.k(x)


@cases.refuses(*WRITTEN, inputs=(two,))
class SetsTheDataByAnAttribute(Pair):
    def forward(self, x, y):
        q = self.q(x)
        setattr(x, "data", y)
        return q, self.k(x)


@cases.fuses("q k")
class AutocastAroundBoth(Pair):
    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            q = self.q(x)
            k = self.k(x)
        return q, k


test_case, test_values, test_verdict = cases.tests()
