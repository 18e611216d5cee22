"""Forwards whose harm comes late, in an arm that no trace takes, out of something made before.

PYTEST_DONT_REWRITE
"""

import contextlib

import torch
from torch import nn

from tests.adversarial.cases import Cases, Pair, one

cases = Cases()
RIGHT = ("input-written", "input-may-be-written", "different-context", "module-escapes")
KEPT = None
OUT_OF_SIGHT = {}
exec("def keep(m, h): m.kept = h", OUT_OF_SIGHT)
keep = OUT_OF_SIGHT["keep"]


class Holder:
    pass


HOLDER = Holder()


def late():
    return torch.randn(2, 3, 8), True


def same_late():
    x = torch.randn(2, 3, 8)
    return x, x, True


def put(t):
    global KEPT
    KEPT = t


def change():
    KEPT.mul_(2)


class Buffered(Pair):
    def __init__(self):
        super().__init__()
        self.register_buffer("buf", torch.zeros(2, 3, 8))


@cases.refuses(*RIGHT, inputs=(one, late))
class OwnData(Buffered):
    def forward(self, x, late: bool = False):
        h = x + 1
        self.buf.data = h
        q = self.q(h)
        if late:
            self.buf.mul_(2)
        return q, self.k(h)


@cases.refuses(*RIGHT, inputs=(one, late))
class OwnSet(Buffered):
    def forward(self, x, late: bool = False):
        h = x + 1
        self.buf.set_(h)
        q = self.q(h)
        if late:
            self.buf.mul_(2)
        return q, self.k(h)


@cases.refuses(*RIGHT, inputs=(same_late,))
class TwiceData(Pair):
    def forward(self, x, y, late: bool = False):
        h = x + 1
        x.data = h
        q = self.q(h)
        if late:
            y.mul_(2)
        return q, self.k(h)


@cases.refuses(*RIGHT, inputs=(one, late))
class ClassAttr(Pair):
    shelf = None

    def forward(self, x, late: bool = False):
        h = x + 1
        ClassAttr.shelf = h
        q = self.q(h)
        if late:
            self.shelf.mul_(2)
        return q, self.k(h)


@cases.refuses(*RIGHT, inputs=(one, late))
class TypeAttr(Pair):
    shelf = None

    def forward(self, x, late: bool = False):
        h = x + 1
        type(self).shelf = h
        q = self.q(h)
        if late:
            self.shelf.mul_(2)
        return q, self.k(h)


@cases.refuses(*RIGHT, inputs=(one, late))
class Global(Pair):
    def forward(self, x, late: bool = False):
        global KEPT
        h = x + 1
        KEPT = h
        q = self.q(h)
        if late:
            KEPT.mul_(2)
        return q, self.k(h)


@cases.refuses(*RIGHT, inputs=(one, late))
class GlobalByFunctions(Pair):
    def forward(self, x, late: bool = False):
        h = x + 1
        put(h)
        q = self.q(h)
        if late:
            change()
        return q, self.k(h)


@cases.refuses(*RIGHT, inputs=(one, late))
class BuffersDict(Buffered):
    def forward(self, x, late: bool = False):
        h = x + 1
        self._buffers["buf"] = h
        q = self.q(h)
        if late:
            self.buf.mul_(2)
        return q, self.k(h)


@cases.refuses(*RIGHT, inputs=(one, late))
class SetAttrObj(Pair):
    def forward(self, x, late: bool = False):
        h = x + 1
        object.__setattr__(self, "kept", h)
        q = self.q(h)
        if late:
            self.kept.mul_(2)
        return q, self.k(h)


@cases.refuses(*RIGHT, inputs=(one, late))
class RegBuf(Buffered):
    def forward(self, x, late: bool = False):
        h = x + 1
        self.register_buffer("buf", h)
        q = self.q(h)
        if late:
            self.buf.mul_(2)
        return q, self.k(h)


@cases.refuses(*RIGHT, inputs=(one, late))
class TensorAttr(Pair):
    def forward(self, x, late: bool = False):
        h = x + 1
        x.mine = h
        q = self.q(h)
        if late:
            x.mine.mul_(2)
        return q, self.k(h)


@cases.refuses(*RIGHT, inputs=(one, late))
class HiddenAttr(Pair):
    def forward(self, x, late: bool = False):
        h = x + 1
        keep(self, h)
        y = self.kept
        q = self.q(y)
        if late:
            h.mul_(2)
        return q, self.k(y)


@cases.refuses(*RIGHT, inputs=(one, late))
class HiddenHolder(Pair):
    def forward(self, x, late: bool = False):
        h = x + 1
        keep(HOLDER, h)
        y = HOLDER.kept
        q = self.q(y)
        if late:
            h.mul_(2)
        return q, self.k(y)


@cases.refuses(*RIGHT, inputs=(one, late))
class GenLate(Pair):
    def forward(self, x, late: bool = False):
        box = [x + 1]
        g = (b.mul_(2) for b in box)
        box[0] = x
        q = self.q(x)
        if late:
            next(g)
        return q, self.k(x)


@cases.refuses(*RIGHT, inputs=(one, late))
class GenName(Pair):
    def forward(self, x, late: bool = False):
        h = x + 1
        g = (h.mul_(2) for _ in range(1))
        h = x
        q = self.q(x)
        if late:
            next(g)
        return q, self.k(x)


@cases.refuses(*RIGHT, inputs=(one, late))
class GenFunc(Pair):
    def forward(self, x, late: bool = False):
        h = x + 1

        def g():
            yield h.mul_(2)

        it = g()
        h = x
        q = self.q(x)
        if late:
            next(it)
        return q, self.k(x)


@cases.refuses(*RIGHT, inputs=(one, late))
class MapName(Pair):
    def forward(self, x, late: bool = False):
        h = x + 1
        it = map(lambda _: h.mul_(2), [1])
        h = x
        q = self.q(x)
        if late:
            next(it)
        return q, self.k(x)


@cases.refuses(*RIGHT, inputs=(one, late))
class GenAttr(Pair):
    def forward(self, x, late: bool = False):
        self.kept = x + 1
        it = (self.kept.mul_(2) for _ in range(1))
        self.kept = x
        q = self.q(x)
        if late:
            next(it)
        return q, self.k(x)


@cases.refuses(*RIGHT, inputs=(one, late))
class SortedGen(Pair):
    def forward(self, x, late: bool = False):
        h = [x + 1]
        it = iter(map(torch.Tensor.mul_, h, [2.0]))
        h[0] = x
        q = self.q(x)
        if late:
            next(it)
        return q, self.k(x)


@cases.refuses(*RIGHT, inputs=(one, late))
class IterList(Pair):
    def forward(self, x, late: bool = False):
        h = [x + 1]
        it = iter(h)
        h[0] = x
        q = self.q(x)
        if late:
            next(it).mul_(2)
        return q, self.k(x)


@cases.refuses(*RIGHT, inputs=(one, late))
class Enum(Pair):
    def forward(self, x, late: bool = False):
        h = [x + 1]
        it = enumerate(h)
        h[0] = x
        q = self.q(x)
        if late:
            next(it)[1].mul_(2)
        return q, self.k(x)


@cases.refuses(*RIGHT, inputs=(one, late))
class DictView(Pair):
    def forward(self, x, late: bool = False):
        h = {"a": x + 1}
        it = h.values()
        h["a"] = x
        q = self.q(x)
        if late:
            list(it)[0].mul_(2)  # noqa: RUF015
        return q, self.k(x)


@cases.refuses(*RIGHT, inputs=(one, late))
class DictItems(Pair):
    def forward(self, x, late: bool = False):
        h = {"a": x + 1}
        it = h.items()
        h["a"] = x
        q = self.q(x)
        if late:
            for _, t in it:
                t.mul_(2)
        return q, self.k(x)


@cases.refuses(*RIGHT, inputs=(one, late))
class NestedDel(Pair):
    def forward(self, x, late: bool = False):
        h = [x + 1, x]
        del h[0]
        q = self.q(x)
        if late:
            h[0].mul_(2)
        return q, self.k(x)


@cases.refuses(*RIGHT, inputs=(one, late))
class SliceShift(Pair):
    def forward(self, x, late: bool = False):
        h = [x + 1, x]
        h[:1] = []
        q = self.q(x)
        if late:
            h[0].mul_(2)
        return q, self.k(x)


@cases.refuses(*RIGHT, inputs=(one, late))
class DelSlice(Pair):
    def forward(self, x, late: bool = False):
        h = [x + 1, x]
        del h[:1]
        q = self.q(x)
        if late:
            h[0].mul_(2)
        return q, self.k(x)


@cases.refuses(*RIGHT, inputs=(one, late))
class WeightNew(Pair):
    def forward(self, x, late: bool = False):
        h = x + 1
        w = torch.zeros(8, 8)
        self.k.weight.data = w
        q = self.q(h)
        if late:
            w.add_(1)
        return q, self.k(h)


@cases.refuses(*RIGHT, inputs=(one, late))
class WeightGiven(Pair):
    def forward(self, x, late: bool = False):
        h = x + 1
        w = h.new_zeros(8, 8)
        self.k.weight = nn.Parameter(w)
        q = self.q(h)
        if late:
            w.add_(1)
        return q, self.k(h)


@cases.refuses(*RIGHT, inputs=(one, late))
class GenContext(Pair):
    def quiet(self):
        with torch.no_grad():
            yield 1

    def forward(self, x, late: bool = False):
        g = self.quiet()
        q = self.q(x)
        if late:
            next(g)
        return q, self.k(x)


@cases.refuses(*RIGHT, inputs=(one, late))
class NullWrite(Pair):
    def forward(self, x, late: bool = False):
        q = self.q(x)
        if late:
            with contextlib.nullcontext(x) as h:
                h.mul_(2)
        return q, self.k(x)


@cases.refuses(*RIGHT, inputs=(one, late))
class NullNew(Pair):
    def forward(self, x, late: bool = False):
        h = x + 1
        q = self.q(h)
        if late:
            with contextlib.nullcontext(h) as w:
                w.mul_(2)
        return q, self.k(h)


test_case, test_values, test_verdict = cases.tests()
