"""Nested functions, lambdas, generators and callbacks: called between the projections, later, or never."""

import functools

import torch
import torch.nn as nn

from tests.adversarial.cases import Cases, Pair

cases = Cases()
WRITTEN = ("input-written", "input-may-be-written")


@cases.refuses(*WRITTEN)
class NestedWritesItsArgument(Pair):
    def forward(self, x):
        def change(t):
            t.mul_(2)

        q = self.q(x)
        change(x)
        return q, self.k(x)


@cases.refuses(*WRITTEN)
class NestedWritesASecondName(Pair):
    def forward(self, x):
        h = x

        def change():
            h.mul_(2)

        q = self.q(x)
        change()
        return q, self.k(x)


@cases.refuses(*WRITTEN)
class NestedWritesItsDefault(Pair):
    def forward(self, x):
        def change(t=x):
            t.mul_(2)

        q = self.q(x)
        change()
        return q, self.k(x)


@cases.refuses(*WRITTEN)
class NestedWritesWhatIsStoredLater(Pair):
    def forward(self, x):
        h = x + 1

        def change():
            h.mul_(2)

        h = x
        q = self.q(x)
        change()
        return q, self.k(x)


@cases.may_fuse("q k", but=WRITTEN)
class NestedWritesWhatIsFreshByThen(Pair):
    def forward(self, x):
        h = x

        def change():
            h.mul_(2)

        h = x + 1
        q = self.q(x)
        change()
        return q, self.k(x), h


@cases.refuses(*WRITTEN)
class NestedRecursion(Pair):
    def forward(self, x):
        def change(n):
            if n:
                change(n - 1)
            else:
                x.mul_(2)

        q = self.q(x)
        change(2)
        return q, self.k(x)


@cases.refuses(*WRITTEN)
class NestedReturnsTheInput(Pair):
    def forward(self, x):
        def get():
            return x

        q = self.q(x)
        get().mul_(2)
        return q, self.k(x)


@cases.refuses(*WRITTEN)
class NestedInNested(Pair):
    def forward(self, x):
        def outer():
            def inner():
                x.mul_(2)

            return inner

        q = self.q(x)
        outer()()
        return q, self.k(x)


@cases.refuses(*WRITTEN)
class NestedClass(Pair):
    def forward(self, x):
        class Change:
            def go(self):
                x.mul_(2)

        change = Change()
        q = self.q(x)
        change.go()
        return q, self.k(x)


@cases.refuses(*WRITTEN)
class ClassBodyWrites(Pair):
    def forward(self, x):
        q = self.q(x)

        class Change:
            x.mul_(2)

        return q, self.k(x)


@cases.refuses(*WRITTEN)
class DefaultIsEvaluated(Pair):
    def forward(self, x):
        q = self.q(x)

        def never(t=x.mul_(2)):
            return t

        return q, self.k(x)


@cases.refuses(*WRITTEN)
class LambdaWrites(Pair):
    def forward(self, x):
        change = lambda: x.mul_(2)
        q = self.q(x)
        change()
        return q, self.k(x)


@cases.refuses(*WRITTEN)
class LambdaWritesItsArgument(Pair):
    def forward(self, x):
        q = self.q(x)
        (lambda t: t.mul_(2))(x)
        return q, self.k(x)


@cases.refuses(*WRITTEN)
class LambdaInADict(Pair):
    def forward(self, x):
        ways = {"double": lambda t: t.mul_(2)}
        q = self.q(x)
        ways["double"](x)
        return q, self.k(x)


@cases.refuses(*WRITTEN)
class GeneratorIsStepped(Pair):
    def forward(self, x):
        pieces = (x.mul_(2) for _ in range(1))
        q = self.q(x)
        next(pieces)
        return q, self.k(x)


@cases.refuses(*WRITTEN)
class GeneratorFunctionIsStepped(Pair):
    def forward(self, x):
        def pieces():
            x.mul_(2)
            yield 1

        q = self.q(x)
        for n in pieces():
            q = q * n
        return q, self.k(x)


@cases.refuses(*WRITTEN)
class GeneratorRunsOn(Pair):
    def forward(self, x):
        def pieces():
            yield 1
            x.mul_(2)

        q = self.q(x)
        n = list(pieces())
        return q, self.k(x), n


@cases.refuses(*WRITTEN)
class PartialOfAWrite(Pair):
    def forward(self, x):
        double = functools.partial(torch.Tensor.mul_, x, 2)
        q = self.q(x)
        double()
        return q, self.k(x)


@cases.refuses(*WRITTEN)
class ReduceWrites(Pair):
    def forward(self, x):
        q = self.q(x)
        functools.reduce(lambda a, t: t.mul_(2), [x], 0)
        return q, self.k(x)


@cases.refuses(*WRITTEN)
class CallbackToAMethod(Pair):
    def run(self, function):
        function()

    def forward(self, x):
        q = self.q(x)
        self.run(lambda: x.mul_(2))
        return q, self.k(x)


@cases.refuses(*WRITTEN)
class CallbackKept(Pair):
    def forward(self, x):
        self.kept = lambda: x.mul_(2)
        q = self.q(x)
        self.kept()
        return q, self.k(x)


class Runs(nn.Module):
    def forward(self, function, t):
        return function(t)


@cases.refuses(*WRITTEN)
class CallbackToASubmodule(Pair):
    def __init__(self):
        super().__init__()
        self.runs = Runs()

    def forward(self, x):
        def change(t):
            x.mul_(2)
            return t

        q = self.runs(change, self.q(x))
        return q, self.k(x)


class Changes:
    def __init__(self, tensor):
        self.tensor = tensor

    def __call__(self, t):
        with torch.no_grad():
            self.tensor.mul_(2)
        return t


def harmless_callback():
    return torch.randn(2, 3, 8), torch.relu


def writing_callback():
    x = torch.randn(2, 3, 8)
    return x, Changes(x)


@cases.refuses("input-may-be-written", "trace-stopped", inputs=(harmless_callback, writing_callback))
class CallbackOfTheCaller(Pair):
    def forward(self, x, function):
        q = function(self.q(x))
        return q, self.k(x)


class Pieces(Pair):
    def forward(self, x):
        yield self.q(x)
        yield self.k(x)


@cases.refuses()
class CallerWritesBetweenYields(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Pieces()

    def forward(self, x):
        outs = []
        for piece in self.inner(x):
            outs.append(piece)
            x.mul_(2)
        return outs


@cases.refuses()
class ProjectionsInOneCallback(Pair):
    """The second one runs when the input was written."""

    def forward(self, x):
        def project(part):
            out = part(x)
            x.mul_(2)
            return out

        return project(self.q), project(self.k)


@cases.refuses(*WRITTEN, "different-branches", "module-escapes", "called-twice")
class ProjectionInANestedFunction(Pair):
    def forward(self, x):
        def late():
            return self.k(x)

        q = self.q(x)
        x.mul_(2)
        return q, late()


# -- called after, never, or doing no harm -----------------------------------------------------------------


@cases.fuses("q k")
class NeverCalled(Pair):
    def forward(self, x):
        def change():
            x.mul_(2)

        return self.q(x), self.k(x)


@cases.fuses("q k")
class DefinedBetweenNeverCalled(Pair):
    def forward(self, x):
        q = self.q(x)

        def change():
            x.mul_(2)

        return q, self.k(x)


@cases.fuses("q k")
class LambdaNeverCalled(Pair):
    def forward(self, x):
        q = self.q(x)
        change = lambda: x.mul_(2)
        return q, self.k(x)


@cases.fuses("q k")
class CalledAfterwards(Pair):
    def forward(self, x):
        def change():
            x.mul_(2)

        q, k = self.q(x), self.k(x)
        change()
        return q, k


@cases.fuses("q k")
class RebindsAfterwards(Pair):
    def forward(self, x):
        def change():
            nonlocal x
            x = x * 2

        q, k = self.q(x), self.k(x)
        change()
        return q, k, x


@cases.fuses("q k")
class GeneratorSteppedAfterwards(Pair):
    def forward(self, x):
        pieces = (x.mul_(2) for _ in range(1))
        q, k = self.q(x), self.k(x)
        next(pieces)
        return q, k


@cases.fuses("q k")
class NestedHarmless(Pair):
    def forward(self, x):
        def more(t, by=2):
            return t * by + 1

        q = more(self.q(x))
        return q, more(self.k(x))


@cases.fuses("q k")
class NestedReadsTheInput(Pair):
    def forward(self, x):
        def tokens():
            return x.shape[0]

        q = self.q(x)
        n = tokens()
        return q * n, self.k(x)


@cases.fuses("q k")
class NestedWritesItsOwn(Pair):
    def forward(self, x):
        def doubled(t):
            t = t + 1
            t.mul_(2)
            return t

        q = doubled(self.q(x))
        return q, self.k(x)


@cases.fuses("q k")
class NestedWritesTheOutput(Pair):
    def forward(self, x):
        def double(t):
            t.mul_(2)

        q = self.q(x)
        double(q)
        return q * 1, self.k(x)


@cases.fuses("q k")
class NonlocalOfAnother(Pair):
    def forward(self, x):
        count = 0

        def more():
            nonlocal count
            count += 1

        q = self.q(x)
        more()
        return q * count, self.k(x)


@cases.fuses("q k")
class GeneratorOfNumbers(Pair):
    def forward(self, x):
        q = self.q(x)
        n = sum(i for i in range(3))
        return q * n, self.k(x)


@cases.fuses("q k")
class KeyOfASort(Pair):
    def forward(self, x):
        q = self.q(x)
        order = sorted([3, 1, 2], key=lambda n: -n)
        return q, self.k(x), order


@cases.may_fuse("q k", but=WRITTEN)
class PartialHarmless(Pair):
    def forward(self, x):
        double = functools.partial(torch.mul, other=2)
        q = double(self.q(x))
        return q, self.k(x)


test_case, test_values, test_verdict = cases.tests()
