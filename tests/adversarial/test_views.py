"""Writes through views of the input, in every way to make one and to write one, and what is fresh."""

import operator

import torch
import torch.nn as nn
import torch.nn.functional as F

from tests.adversarial.cases import (
    Cases,
    Pair,
    same,
    two,
    view_of_other,
)

cases = Cases()
WRITTEN = ("input-written", "input-may-be-written")


# -- ways to make a view -------------------------------------------------------------------------


@cases.refuses(*WRITTEN)
class View(Pair):
    def forward(self, x):
        h = x.view(-1)
        q = self.q(x)
        h.mul_(2)
        return q, self.k(x)


@cases.refuses(*WRITTEN)
class Transposed(Pair):
    def forward(self, x):
        h = x.transpose(0, 1)
        q = self.q(x)
        h.mul_(2)
        return q, self.k(x)


@cases.refuses(*WRITTEN)
class TransposedByProperty(Pair):
    def forward(self, x):
        h = x.mT
        q = self.q(x)
        h.mul_(2)
        return q, self.k(x)


@cases.refuses(*WRITTEN)
class DataOfIt(Pair):
    def forward(self, x):
        h = x.data
        q = self.q(x)
        h.mul_(2)
        return q, self.k(x)


@cases.refuses(*WRITTEN)
class Expanded(Pair):
    def forward(self, x):
        h = x.expand(x.shape)
        q = self.q(x)
        h.mul_(2)
        return q, self.k(x)


@cases.refuses(*WRITTEN)
class Unbound(Pair):
    def forward(self, x):
        first, second = x.unbind(0)
        q = self.q(x)
        second.data.mul_(2)
        return q, self.k(x)


@cases.refuses(*WRITTEN)
class OneOfASplit(Pair):
    def forward(self, x):
        h = torch.split(x, 4, dim=-1)[1]
        q = self.q(x)
        h.data.mul_(2)
        return q, self.k(x)


@cases.refuses(*WRITTEN)
class OneOfChunks(Pair):
    def forward(self, x):
        left, right = x.detach().chunk(2, -1)
        q = self.q(x)
        right.copy_(left)
        return q, self.k(x)


@cases.refuses(*WRITTEN)
class ReshapedAsIs(Pair):
    def forward(self, x):
        h = x.reshape(-1, 8)
        q = self.q(x)
        h.mul_(2)
        return q, self.k(x)


@cases.refuses(*WRITTEN)
class ContiguousAlready(Pair):
    def forward(self, x):
        h = x.contiguous()
        q = self.q(x)
        h.mul_(2)
        return q, self.k(x)


@cases.refuses(*WRITTEN)
class OfItsTypeAlready(Pair):
    def forward(self, x):
        h = x.to(torch.float32)
        q = self.q(x)
        h.mul_(2)
        return q, self.k(x)


@cases.refuses(*WRITTEN)
class FloatAlready(Pair):
    def forward(self, x):
        h = x.float()
        q = self.q(x)
        h.mul_(2)
        return q, self.k(x)


@cases.refuses(*WRITTEN, inputs=(two, same))
class TypeOfAnother(Pair):
    def forward(self, x, y):
        h = x.type_as(y)
        q = self.q(x)
        h.mul_(2)
        return q, self.k(x)


@cases.refuses(*WRITTEN)
class FlattenedByFunction(Pair):
    def forward(self, x):
        h = torch.flatten(x, 1)
        q = self.q(x)
        h.mul_(2)
        return q, self.k(x)


@cases.refuses(*WRITTEN)
class NoDropoutIsTheSame(Pair):
    def forward(self, x):
        h = F.dropout(x, 0.5, False)
        q = self.q(x)
        h.mul_(2)
        return q, self.k(x)


@cases.refuses(*WRITTEN)
class IdentityModule(Pair):
    def __init__(self):
        super().__init__()
        self.same = nn.Identity()

    def forward(self, x):
        h = self.same(x)
        q = self.q(x)
        h.mul_(2)
        return q, self.k(x)


@cases.refuses(*WRITTEN)
class BroadcastAsIs(Pair):
    def forward(self, x):
        h, _ = torch.broadcast_tensors(x, x)
        q = self.q(x)
        h.data.mul_(2)
        return q, self.k(x)


@cases.refuses(*WRITTEN)
class ResultOfAWrite(Pair):
    def forward(self, x):
        h = x.mul_(1)
        q = self.q(x)
        h.mul_(2)
        return q, self.k(x)


@cases.refuses(*WRITTEN)
class ResultOfOut(Pair):
    def forward(self, x):
        h = torch.add(x, 1, out=x.detach())
        q = self.q(x)
        h.mul_(2)
        return q, self.k(x)


@cases.refuses(*WRITTEN, inputs=(two, same, view_of_other))
class InputsThatMayBeOne(Pair):
    def forward(self, x, y):
        q = self.q(x)
        y.mul_(2)
        return q, self.k(x)


@cases.refuses(*WRITTEN, inputs=(two, same, view_of_other))
class ViewOfAnotherInput(Pair):
    def forward(self, x, y):
        half = y[..., :4]
        q = self.q(x)
        half.zero_()
        return q, self.k(x)


@cases.refuses(*WRITTEN)
class InputIsTheView(Pair):
    def forward(self, x):
        h = x.view(-1, 8)
        q = self.q(h)
        x.mul_(2)
        return q, self.k(h)


# -- ways to write -----------------------------------------------------------------------------------


@cases.refuses(*WRITTEN)
class SetsAnEntry(Pair):
    def forward(self, x):
        q = self.q(x)
        x[..., 0] = 1
        return q, self.k(x)


@cases.refuses(*WRITTEN)
class Copies(Pair):
    def forward(self, x):
        q = self.q(x)
        x.copy_(q)
        return q * 1, self.k(x)


@cases.refuses(*WRITTEN, backward=False)
class Out(Pair):
    def forward(self, x):
        q = self.q(x)
        torch.add(q, 1, out=x)
        return q, self.k(x)


@cases.refuses(*WRITTEN)
class InplaceByKeyword(Pair):
    def forward(self, x):
        q = self.q(x)
        F.relu(x, inplace=True)
        return q, self.k(x)


@cases.refuses(*WRITTEN)
class InplaceByPosition(Pair):
    def forward(self, x):
        q = self.q(x)
        F.relu(x, True)
        return q, self.k(x)


@cases.refuses(*WRITTEN)
class InplaceByComputedFlag(Pair):
    def forward(self, x):
        inplace = self.flag
        q = self.q(x)
        F.leaky_relu(x, 0.1, inplace)
        return q, self.k(x)


@cases.refuses(*WRITTEN)
class InplaceModule(Pair):
    def __init__(self):
        super().__init__()
        self.act = nn.ReLU(inplace=True)

    def forward(self, x):
        q = self.q(x)
        r = self.act(x)
        return q + r, self.k(x)


@cases.refuses(*WRITTEN)
class InplaceDropout(Pair):
    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.5, inplace=True)

    def forward(self, x):
        q = self.q(x)
        self.drop(x)
        return q, self.k(x)


@cases.refuses(*WRITTEN)
class InplaceInASequential(Pair):
    def __init__(self):
        super().__init__()
        self.act = nn.Sequential(nn.Identity(), nn.SiLU(inplace=True))

    def forward(self, x):
        q = self.q(x)
        return q + self.act(x), self.k(x)


@cases.refuses(*WRITTEN)
class DropoutInplaceByFunction(Pair):
    def forward(self, x):
        q = self.q(x)
        r = F.dropout(x, 0.5, True, True)
        return q + r, self.k(x)


@cases.refuses(*WRITTEN)
class Underscore(Pair):
    def forward(self, x):
        q = self.q(x)
        torch.relu_(x)
        return q, self.k(x)


@cases.refuses(*WRITTEN)
class OperatorIadd(Pair):
    def forward(self, x):
        q = self.q(x)
        operator.iadd(x, 1)
        return q, self.k(x)


@cases.refuses(*WRITTEN)
class OperatorSetitem(Pair):
    def forward(self, x):
        q = self.q(x)
        operator.setitem(x, 0, 1.0)
        return q, self.k(x)


@cases.refuses(*WRITTEN)
class MaskedFill(Pair):
    def forward(self, x):
        q = self.q(x)
        x.masked_fill_(x > 0, 0)
        return q, self.k(x)


@cases.refuses(*WRITTEN)
class IndexPut(Pair):
    def forward(self, x):
        q = self.q(x)
        x.index_put_((torch.tensor([0]),), torch.zeros(()))
        return q, self.k(x)


@cases.refuses(*WRITTEN)
class ForeachAdd(Pair):
    def forward(self, x):
        q = self.q(x)
        torch._foreach_add_([x], 1)
        return q, self.k(x)


@cases.refuses(*WRITTEN, inputs=(two,), backward=False)
class SetsItsStorage(Pair):
    def forward(self, x, y):
        q = self.q(x)
        x.set_(y)
        return q, self.k(x)


@cases.refuses(*WRITTEN, inputs=(two,))
class StoresItsData(Pair):
    def forward(self, x, y):
        q = self.q(x)
        x.data = y
        return q, self.k(x)


@cases.refuses(*WRITTEN, "different-context")
class DetachesInPlace(Pair):
    def forward(self, x):
        q = self.q(x)
        x.detach_()
        return q, self.k(x)


@cases.refuses(*WRITTEN, "module-escapes", "different-context")
class RequiresGrad(Pair):
    def forward(self, x):
        x = x.detach()
        q = self.q(x)
        x.requires_grad_()
        k = self.k(x)
        k.sum().backward()
        return q, x.grad


@cases.refuses(*WRITTEN)
class ResizesInPlace(Pair):
    def forward(self, x):
        h = x.detach().clone()
        q = self.q(h)
        h.resize_(1, 8)
        return q, self.k(h)


@cases.refuses(*WRITTEN)
class UnsqueezesInPlace(Pair):
    def forward(self, x):
        h = x + 1
        q = self.q(h)
        h.unsqueeze_(0)
        return q, self.k(h)


@cases.refuses(*WRITTEN)
class WritesByAten(Pair):
    def forward(self, x):
        q = self.q(x)
        torch.ops.aten.mul_.Scalar(x, 2)
        return q, self.k(x)


@cases.refuses(*WRITTEN)
class WritesByUnboundMethod(Pair):
    def forward(self, x):
        q = self.q(x)
        torch.Tensor.mul_(x, 2)
        return q, self.k(x)


@cases.refuses(*WRITTEN)
class WritesByBoundMethod(Pair):
    def forward(self, x):
        double = x.mul_
        q = self.q(x)
        double(2)
        return q, self.k(x)


@cases.refuses(*WRITTEN)
class WritesWithin(Pair):
    def forward(self, x):
        q = self.q(x) + x.mul_(2)
        return q, self.k(x)


@cases.refuses(*WRITTEN)
class InitFills(Pair):
    def forward(self, x):
        q = self.q(x)
        nn.init.zeros_(x)
        return q, self.k(x)


@cases.refuses(*WRITTEN)
class BatchNormUpdatesItsBuffer(Pair):
    """What the linears read is the running mean, which a training batch norm writes."""

    def __init__(self):
        super().__init__()
        self.batch = nn.BatchNorm1d(8)

    def forward(self, x):
        h = self.batch.running_mean
        q = self.q(h)
        y = self.batch(x.flatten(0, 1))
        return q, self.k(h), y


# -- what shares nothing with the input, and what writes nothing ----------------------------------------


@cases.fuses("q k")
class WritesASum(Pair):
    def forward(self, x):
        h = x + 1
        q = self.q(x)
        h.mul_(2)
        return q, self.k(x), h


@cases.fuses("q k")
class WritesAClone(Pair):
    def forward(self, x):
        h = x.clone()
        q = self.q(x)
        h[0] = 0
        return q, self.k(x), h


@cases.fuses("q k")
class WritesAViewOfFresh(Pair):
    def forward(self, x):
        h = (x * self.scale).view(-1)[:4]
        q = self.q(x)
        h.zero_()
        return q, self.k(x), h


@cases.fuses("q k")
class WritesANewTensor(Pair):
    def forward(self, x):
        q = self.q(x)
        sums = torch.zeros(3)
        sums.add_(1)
        return q, self.k(x), sums


@cases.fuses("q k")
class WritesChunksOfItsOutput(Pair):
    def forward(self, x):
        left, right = torch.chunk(self.q(x), 2, -1)
        left = left.contiguous() * 2
        left.add_(right)
        return left, self.k(x)


@cases.fuses("q k")
class ScalesItsOutputInPlace(Pair):
    def forward(self, x):
        q = self.q(x)
        q.mul_(self.scale)
        return q * 1, self.k(x)


@cases.fuses("q k")
class ScalesAViewOfItsOutput(Pair):
    def forward(self, x):
        q = self.q(x)
        q = q.view(*x.shape[:-1], 2, 4)
        q.mul_(2)
        return q * 1, self.k(x)


@cases.fuses("q k")
class ActivatesItsOutputInPlace(Pair):
    def forward(self, x):
        q = F.relu(self.q(x), inplace=True)
        return q, self.k(x)


@cases.fuses("q k")
class SetsAnEntryOfItsOutput(Pair):
    def forward(self, x):
        q = self.q(x)
        q[..., 0] = 0
        return q * 1, self.k(x)


@cases.fuses("q k")
class WritesTheInputBehindANorm(Pair):
    def forward(self, x):
        h = self.norm(x)
        q = self.q(h)
        with torch.no_grad():
            x.mul_(2)
        return q, self.k(h)


@cases.fuses("q k", inputs=(two, same, view_of_other))
class WritesAnotherInputBehindANorm(Pair):
    def forward(self, x, y):
        h = self.norm(x)
        q = self.q(h)
        with torch.no_grad():
            y.mul_(2)
        return q, self.k(h)


@cases.fuses("q k")
class WritesTheInputBehindASum(Pair):
    def forward(self, x):
        h = x + x
        q = self.q(h)
        x.mul_(2)
        return q, self.k(h)


@cases.fuses("q k")
class WritesTheInputBehindACopy(Pair):
    def forward(self, x):
        h = x.to(torch.float32, copy=True)
        q = self.q(h)
        x.mul_(2)
        return q, self.k(h)


@cases.fuses("q k", inputs=(two, same))
class WritesAStack(Pair):
    def forward(self, x, y):
        both = torch.stack([x, y])
        q = self.q(x)
        both.mul_(2)
        return q, self.k(x), both


@cases.fuses("q k")
class NotInplaceByKeyword(Pair):
    def forward(self, x):
        q = self.q(x)
        r = F.relu(x, inplace=False)
        return q + r, self.k(x)


@cases.fuses("q k")
class ModuleNotInplace(Pair):
    def __init__(self):
        super().__init__()
        self.act = nn.ReLU()

    def forward(self, x):
        q = self.q(x)
        return q + self.act(x), self.k(x)


@cases.fuses("q k")
class ViewsOfTheInputUnwritten(Pair):
    def forward(self, x):
        q = self.q(x)
        half = x[..., :4].transpose(0, 1)
        return q, self.k(x), half * 2


@cases.fuses("q k")
class ReadsMetadata(Pair):
    def forward(self, x):
        q = self.q(x)
        n, dtype, shape = x.shape[0] * x.size(1), x.dtype, [*x.shape[:-1], 2, 4]
        return q.view(shape) * n, self.k(x).to(dtype)


@cases.fuses("q k")
class DropsOutItsOutput(Pair):
    def forward(self, x):
        q = F.dropout(self.q(x), 0.5, self.training)
        return q, F.dropout(self.k(x), 0.5, self.training)


@cases.fuses("q k")
class DrawsBetween(Pair):
    def forward(self, x):
        q = self.q(x)
        noise = torch.randn(8)
        return q + noise, self.k(x) + torch.rand_like(x)


@cases.fuses("q k")
class OutIntoFresh(Pair):
    def forward(self, x):
        total = torch.empty(0)
        with torch.no_grad():
            q = self.q(x)
            torch.add(x, 1, out=total)
            k = self.k(x)
        return q, k, total


test_case, test_values, test_verdict = cases.tests()
