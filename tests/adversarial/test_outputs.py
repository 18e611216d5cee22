"""What the forward does with the outputs of its projections: a slice of a product is no tensor of its own."""

import torch
import torch.nn as nn
import torch.nn.functional as F

from tests.adversarial.cases import Cases, Pair

cases = Cases()


def rows():
    return (torch.randn(3, 8),)


SEEN = ("layout", "input-written", "input-may-be-written")


# -- its storage, its strides -----------------------------------------------------------------------


@cases.may_fuse("q k", but=SEEN)
class FillsTheStorage(Pair):
    def forward(self, x):
        q, k = self.q(x), self.k(x)
        q.untyped_storage().fill_(0)
        return q * 1, k * 1


@cases.may_fuse("q k", but=SEEN)
class SizeOfTheStorage(Pair):
    def forward(self, x):
        q, k = self.q(x), self.k(x)
        return q * q.untyped_storage().nbytes(), k * 1


@cases.may_fuse("q k", but=SEEN)
class OffsetInTheStorage(Pair):
    def forward(self, x):
        q, k = self.q(x), self.k(x)
        return q + q.storage_offset(), k + k.storage_offset()


@cases.may_fuse("q k", but=SEEN)
class StrideOfTheOutput(Pair):
    def forward(self, x):
        q, k = self.q(x), self.k(x)
        return q * q.stride(0), k * k.stride()[1]


@cases.refuses("layout", "input-may-be-written", shows=False)
class WhetherItIsAView(Pair):
    """With a bias, grad and three dimensions a linear gives a view; a copy of a slice is none."""

    def forward(self, x):
        q, k = self.q(x), self.k(x)
        return q * (1 if q._base is None else 2), k * (1 if k._is_view() else 2)


@cases.may_fuse("q k", but=SEEN)
class WhetherTheyShare(Pair):
    def forward(self, x):
        q, k = self.q(x), self.k(x)
        shared = q.untyped_storage().data_ptr() == k.untyped_storage().data_ptr()
        return (q * 2 if shared else q * 1), k * 1


@cases.may_fuse("q k", but=SEEN)
class StridesInAHelper(Pair):
    def contiguous(self, t):
        return 1 if t.is_contiguous() else 2

    def forward(self, x):
        q, k = self.q(x), self.k(x)
        return q * self.contiguous(q), k * 1


@cases.may_fuse("q k", but=SEEN)
class StridesInALoop(Pair):
    def forward(self, x):
        q, k = self.q(x), self.k(x)
        n = 1
        for t in [q, k]:
            n += t.stride(0)
        return q * n, k * n


@cases.may_fuse("q k", but=(*SEEN, "trace-stopped"))
class StridesByNumpy(Pair):
    def forward(self, x):
        q, k = self.q(x), self.k(x)
        return q * q.detach().numpy().strides[0], k * 1


@cases.may_fuse("q k", but=SEEN)
class AsStrided(Pair):
    def forward(self, x):
        q, k = self.q(x), self.k(x)
        return q.as_strided((4,), (1,)) * 1, k.as_strided((4,), (1,), 0) * 1


# -- views that a slice cannot give ----------------------------------------------------------------------


@cases.fuses("q k")
class FlatViewInAMethod(Pair):
    def flat(self, t):
        return t.view(-1)

    def forward(self, x):
        q, k = self.q(x), self.k(x)
        return self.flat(q) * 1, self.flat(k) * 1


@cases.fuses("q k")
class FlatViewInAList(Pair):
    def forward(self, x):
        outs = [self.q(x), self.k(x)]
        return [t.view(-1) * 1 for t in outs]


@cases.fuses("q k")
class FlatViewOfASecondName(Pair):
    def forward(self, x):
        q, k = self.q(x), self.k(x)
        h = q if self.flag else k
        return h.view(-1) * 1, k * 1


@cases.fuses("q k")
class FlattenedAndWritten(Pair):
    def forward(self, x):
        q, k = self.q(x), self.k(x)
        q.flatten().zero_()
        return q * 1, k * 1


@cases.fuses("q k")
class ContiguousAndWritten(Pair):
    def forward(self, x):
        q, k = self.q(x), self.k(x)
        q.contiguous().zero_()
        return q * 1, k * 1


@cases.fuses("q k")
class RavelledAndWrittenInAMethod(Pair):
    def clear(self, t):
        t.ravel()[:4].zero_()

    def forward(self, x):
        q, k = self.q(x), self.k(x)
        self.clear(q)
        return q * 1, k * 1


def clear(t):
    torch.flatten(t).zero_()


@cases.fuses("q k")
class FlattenedAndWrittenInAFunction(Pair):
    def forward(self, x):
        q, k = self.q(x), self.k(x)
        clear(q)
        return q * 1, k * 1


@cases.fuses("q k")
class FlattenedAndWrittenInANestedFunction(Pair):
    def forward(self, x):
        q, k = self.q(x), self.k(x)

        def change():
            k.reshape(-1).zero_()

        change()
        return q * 1, k * 1


class Clears(nn.Module):
    def forward(self, t):
        t.reshape(-1).zero_()
        return t


@cases.fuses("q k")
class FlattenedAndWrittenInASubmodule(Pair):
    def __init__(self):
        super().__init__()
        self.clears = Clears()

    def forward(self, x):
        q, k = self.q(x), self.k(x)
        self.clears(q)
        return q * 1, k * 1


@cases.fuses("q k")
class FlattenedAndWrittenInADict(Pair):
    def forward(self, x):
        outs = {"q": self.q(x), "k": self.k(x)}
        outs["q"].reshape(-1).zero_()
        return outs["q"] * 1, outs["k"] * 1


@cases.fuses("q k")
class ReshapedAndKept(Pair):
    def forward(self, x):
        q, k = self.q(x), self.k(x)
        self.kept = q.reshape(-1)
        q.mul_(2)
        return q * 1, k * 1


@cases.fuses("q k")
class HandsOutTheOutputAndItsFlatView(Pair):
    def forward(self, x):
        q, k = self.q(x), self.k(x)
        self.kept = q
        return q.reshape(-1), k * 1


@cases.fuses("q k")
class ViewAsComplex(Pair):
    def forward(self, x):
        q, k = self.q(x), self.k(x)
        h = torch.view_as_complex(q.view(*q.shape[:-1], 4, 2))
        return torch.view_as_real(h * 2).flatten(-2), k * 1


@cases.may_fuse("q k", but=SEEN)
class ViewOfAnotherType(Pair):
    def forward(self, x):
        q, k = self.q(x), self.k(x)
        return q.detach().view(torch.int32) * 1, k * 1


# -- writes that a slice does not allow ----------------------------------------------------------------


@cases.may_fuse("q k", but=SEEN)
class ResizesTheOutput(Pair):
    def forward(self, x):
        with torch.no_grad():
            q, k = self.q(x), self.k(x)
            q.resize_(4)
        return q * 1, k * 1


@cases.may_fuse("q k", but=SEEN)
class UnsqueezesTheOutput(Pair):
    def forward(self, x):
        q, k = self.q(x), self.k(x)
        q.unsqueeze_(0)
        return q * 1, k * 1


@cases.may_fuse("q k", but=SEEN)
class TransposesTheOutput(Pair):
    def forward(self, x):
        q, k = self.q(x), self.k(x)
        q.transpose_(0, 1)
        return q * 1, k * 1


@cases.may_fuse("q k", but=(*SEEN, "trace-stopped"))
class DetachesTheOutput(Pair):
    def forward(self, x):
        q, k = self.q(x), self.k(x)
        q.detach_()
        return q * 1, k * 1


@cases.may_fuse("q k", but=SEEN)
class SetsTheOutput(Pair):
    def forward(self, x):
        with torch.no_grad():
            q, k = self.q(x), self.k(x)
            q.set_(x.detach())
            q.mul_(2)
        return q * 1, k * 1


@cases.may_fuse("q k", but=SEEN)
class StoresDataOfTheOutput(Pair):
    def forward(self, x):
        q, k = self.q(x), self.k(x)
        q.data = x.detach()
        return q * 1, k * 1


@cases.may_fuse("q k", but=SEEN)
class OutIntoTheOutput(Pair):
    def forward(self, x):
        with torch.no_grad():
            q, k = self.q(x), self.k(x)
            torch.mul(k, 2, out=q)
        return q * 1, k * 1


@cases.may_fuse("q k", but=SEEN, inputs=(rows,))
class MadeWithoutGradWrittenWith(Pair):
    """A view that was made without grad may not be written in place with it: of rows a linear gives none."""

    def forward(self, x):
        with torch.no_grad():
            q, k = self.q(x), self.k(x)
        q.add_(x)
        k.mul_(self.o.bias)
        return q * 1, k * 1


@cases.may_fuse("q k", but=SEEN)
class MadeInInferenceMode(Pair):
    def forward(self, x):
        with torch.inference_mode():
            q, k = self.q(x), self.k(x)
            q.mul_(2)
        return q, k


@cases.fuses("q k")
class PiecesWrittenInPlace(Pair):
    def forward(self, x):
        q, k = self.q(x), self.k(x)
        left, right = q.split(4, -1)
        with torch.no_grad():
            left.mul_(2)
        return q * 1, k * 1, right * 1


@cases.fuses("q k")
class AddsOneToTheOther(Pair):
    def forward(self, x):
        q, k = self.q(x), self.k(x)
        q += k
        k *= q
        return q, k


@cases.fuses("q k")
class AllAtOnce(Pair):
    def forward(self, x):
        q, k = self.q(x), self.k(x)
        with torch.no_grad():
            torch._foreach_mul_([q, k], 2)
        return q * 1, k * 1


@cases.fuses("q k")
class InplaceAfterItWasSaved(Pair):
    """Its backward fails, before and after."""

    def forward(self, x):
        q, k = self.q(x), self.k(x)
        weights = torch.sigmoid(q)
        square = q * q
        q.mul_(2)
        return square, weights, k


@cases.fuses("q k")
class InplaceOfOneSavedOther(Pair):
    """The other one was saved for backward, and is not written."""

    def forward(self, x):
        q, k = self.q(x), self.k(x)
        square = k * k
        q.mul_(2)
        return square, q * 1


@cases.may_fuse("q k", but=SEEN)
class VersionOfTheOther(Pair):
    def forward(self, x):
        q, k = self.q(x), self.k(x)
        q.mul_(2)
        return q * 1, k * (1 + k._version)


# -- gradients of an output -----------------------------------------------------------------------------


@cases.fuses("q k")
class HookOnTheOutput(Pair):
    def forward(self, x):
        q, k = self.q(x), self.k(x)
        if q.requires_grad:
            q.register_hook(lambda grad: grad * 2)
        return q * 1, k * 1


@cases.may_fuse("q k", but=("module-escapes",))
class GradWithinTheForward(Pair):
    def forward(self, x):
        q, k = self.q(x), self.k(x)
        if not q.requires_grad:
            return q, k
        (grad,) = torch.autograd.grad(q.square().sum(), x, retain_graph=True)
        return q + grad, k * 1


@cases.fuses("q k")
class OneDetached(Pair):
    def forward(self, x):
        q, k = self.q(x).detach(), self.k(x)
        return q, k * 1


@cases.fuses("q k")
class WhetherItNeedsGrad(Pair):
    def __init__(self):
        super().__init__()
        self.q.requires_grad_(False)

    def forward(self, x):
        h = x.detach()
        q, k = self.q(h), self.k(h)
        return q * (2 if q.requires_grad else 3), k * 1


@cases.fuses("q k")
class WritesTheOneThatNeedsNoGrad(Pair):
    def __init__(self):
        super().__init__()
        self.q.requires_grad_(False)

    def forward(self, x):
        h = x.detach()
        q, k = self.q(h), self.k(h)
        q.add_(k.detach())
        return q * 1, F.relu(k)


test_case, test_values, test_verdict = cases.tests()
