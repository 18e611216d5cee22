"""Methods, functions, submodules and built-ins called between the projections.

PYTEST_DONT_REWRITE: forwards are what the file says.
"""

import copy
import logging
import math
import operator
import warnings

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from tests.adversarial.cases import Cases, Pair

cases = Cases()
WRITTEN = ("input-written", "input-may-be-written")
LOG = logging.getLogger(__name__)


# -- methods of the module -----------------------------------------------------------------------


@cases.refuses(*WRITTEN)
class MethodWritesItsArgument(Pair):
    def change(self, t):
        t.mul_(2)
        return t

    def forward(self, x):
        q = self.q(x)
        self.change(x)
        return q, self.k(x)


@cases.refuses(*WRITTEN)
class MethodWritesWhatIsKept(Pair):
    def change(self):
        self.kept.mul_(2)

    def forward(self, x):
        self.kept = x
        q = self.q(x)
        self.change()
        return q, self.k(x)


@cases.refuses(*WRITTEN)
class MethodKeepsAndAnotherWrites(Pair):
    def keep(self, t):
        self.kept = t.view(-1)

    def change(self):
        if self.kept is not None:
            self.kept.mul_(2)

    def forward(self, x):
        self.keep(x)
        q = self.q(x)
        self.change()
        return q, self.k(x)


@cases.refuses(*WRITTEN)
class MethodReturnsItsArgument(Pair):
    def as_is(self, t):
        return t

    def forward(self, x):
        h = self.as_is(x)
        q = self.q(x)
        h.mul_(2)
        return q, self.k(x)


@cases.refuses(*WRITTEN)
class MethodReturnsAView(Pair):
    def heads(self, t):
        return t.view(*t.shape[:-1], 2, 4).transpose(1, 2)

    def forward(self, x):
        h = self.heads(x)
        q = self.q(x)
        h.mul_(2)
        return q, self.k(x)


@cases.refuses(*WRITTEN)
class MethodWritesOneOfTwo(Pair):
    def change(self, a, b, *, by=1):
        b.mul_(by)

    def forward(self, x):
        q = self.q(x)
        self.change(q * 1, by=2, b=x)
        return q, self.k(x)


@cases.refuses(*WRITTEN)
class RecursiveMethod(Pair):
    def change(self, t, n):
        if n == 0:
            return t.mul_(2)
        return self.change(t, n - 1)

    def forward(self, x):
        q = self.q(x)
        self.change(x, 3)
        return q, self.k(x)


class Parent(Pair):
    def touch(self, t):
        return t.mul_(2)

    def look(self, t):
        return t.shape[0]


@cases.refuses(*WRITTEN)
class SuperMethodWrites(Parent):
    def touch(self, t):
        return t

    def forward(self, x):
        q = self.q(x)
        super().touch(x)
        return q, self.k(x)


@cases.refuses(*WRITTEN)
class InheritedMethodWrites(Parent):
    def forward(self, x):
        q = self.q(x)
        self.touch(x)
        return q, self.k(x)


@cases.refuses(*WRITTEN)
class StaticMethodWrites(Pair):
    @staticmethod
    def change(t):
        t.mul_(2)

    def forward(self, x):
        q = self.q(x)
        self.change(x)
        return q, self.k(x)


@cases.refuses(*WRITTEN)
class MethodOfTheClass(Parent):
    def forward(self, x):
        q = self.q(x)
        Parent.touch(self, x)
        return q, self.k(x)


@cases.refuses(*WRITTEN)
class PropertyReturnsTheInput(Pair):
    @property
    def last(self):
        return self.kept

    def forward(self, x):
        self.kept = x
        q = self.q(x)
        self.last.mul_(2)
        return q, self.k(x)


@cases.refuses(*WRITTEN)
class FunctionOnTheInstance(Pair):
    def __init__(self):
        super().__init__()
        self.change = torch.Tensor.neg_

    def forward(self, x):
        q = self.q(x)
        self.change(x)
        return q, self.k(x)


class Watched(Pair):
    def __setattr__(self, name, value):
        if name == "note" and self.kept is not None:
            self.kept.mul_(2)
        super().__setattr__(name, value)


@cases.refuses(*WRITTEN)
class SettingAnAttributeWrites(Watched):
    def forward(self, x):
        self.kept = x
        q = self.q(x)
        self.note = 1
        return q, self.k(x)


@cases.fuses("q k")
class HarmlessMethod(Pair):
    def heads(self, t):
        return t.view(*t.shape[:-1], 2, 4).transpose(1, 2)

    def forward(self, x):
        q = self.heads(self.q(x))
        return q, self.heads(self.k(x))


@cases.fuses("q k")
class HarmlessMethodOnTheInput(Pair):
    def tokens(self, t):
        return t.shape[0] * t.shape[1]

    def forward(self, x):
        q = self.q(x)
        n = self.tokens(x)
        return q * n, self.k(x)


@cases.fuses("q k")
class MethodWritesTheOutput(Pair):
    def scaled(self, t):
        return t.mul_(self.scale)

    def forward(self, x):
        q = self.scaled(self.q(x))
        return q * 1, self.k(x)


@cases.fuses("q k")
class HarmlessSuperMethod(Parent):
    def look(self, t):
        return 1

    def forward(self, x):
        q = self.q(x)
        n = super().look(x)
        return q * n, self.k(x)


@cases.fuses("q k")
class HarmlessStaticMethodAndProperty(Pair):
    @staticmethod
    def more(t):
        return t + 1

    @property
    def half(self):
        return self.scale / 2

    def forward(self, x):
        q = self.more(self.q(x)) * self.half
        return q, self.k(x)


@cases.may_fuse("q k", but=WRITTEN)
class HarmlessRecursion(Pair):
    def more(self, t, n):
        return t if n == 0 else self.more(t + 1, n - 1)

    def forward(self, x):
        q = self.more(self.q(x), 2)
        return q, self.k(x)


# -- functions of the file -----------------------------------------------------------------------------


def double(t):
    t.mul_(2)


def double_by_another(t):
    double(t)
    return 1


def first_half(t):
    return t[..., :4]


def doubled(t):
    return t * 2


KEPT = []


def keep(t):
    KEPT[:] = [t]
    return t * 1


def double_the_kept():
    KEPT[0].mul_(2)


@cases.refuses(*WRITTEN)
class FunctionWrites(Pair):
    def forward(self, x):
        q = self.q(x)
        double(x)
        return q, self.k(x)


@cases.refuses(*WRITTEN)
class FunctionOfAFunctionWrites(Pair):
    def forward(self, x):
        q = self.q(x)
        n = double_by_another(x)
        return q * n, self.k(x)


@cases.refuses(*WRITTEN)
class FunctionMakesAView(Pair):
    def forward(self, x):
        h = first_half(x)
        q = self.q(x)
        double(h)
        return q, self.k(x)


@cases.refuses(*WRITTEN)
class FunctionKeepsItInAGlobal(Pair):
    def forward(self, x):
        n = keep(x)
        q = self.q(x)
        double_the_kept()
        return q, self.k(x)


@cases.fuses("q k")
class FunctionIsHarmless(Pair):
    def forward(self, x):
        q = doubled(self.q(x))
        return q, doubled(self.k(x))


@cases.fuses("q k")
class FunctionWritesTheOutput(Pair):
    def forward(self, x):
        q = self.q(x)
        double(q)
        return q * 1, self.k(x)


@cases.fuses("q k")
class FunctionWritesFresh(Pair):
    def forward(self, x):
        h = doubled(x)
        q = self.q(x)
        double(h)
        return q, self.k(x), h


# -- submodules ----------------------------------------------------------------------------------------


class Writes(nn.Module):
    def forward(self, t):
        return t.mul_(2)


class Scales(nn.Module):
    def __init__(self):
        super().__init__()
        self.by = nn.Parameter(torch.ones(8))

    def forward(self, t):
        scaled = t * self.by
        if t.shape[0] > 1:
            scaled = scaled + 1
        return scaled


class Keeps(nn.Module):
    def __init__(self):
        super().__init__()
        self.kept = None

    def forward(self, t):
        self.kept = t
        return t * 1

    def change(self):
        self.kept.mul_(2)


class WithInner(Pair):
    inner_class = nn.Identity

    def __init__(self):
        super().__init__()
        self.inner = self.inner_class()


@cases.refuses(*WRITTEN)
class SubmoduleWrites(WithInner):
    inner_class = Writes

    def forward(self, x):
        q = self.q(x)
        return q + self.inner(x), self.k(x)


@cases.refuses(*WRITTEN)
class SubmoduleKeepsAndWrites(WithInner):
    inner_class = Keeps

    def forward(self, x):
        h = self.inner(x)
        q = self.q(x)
        self.inner.change()
        return q, self.k(x), h


@cases.refuses(*WRITTEN)
class SubmoduleHasAHookThatWrites(WithInner):
    def __init__(self):
        super().__init__()
        self.inner.register_forward_pre_hook(lambda module, args: double(args[0]))

    def forward(self, x):
        q = self.q(x)
        return q + self.inner(x), self.k(x)


@cases.refuses(*WRITTEN)
class SubmoduleHasAForwardHookThatWrites(WithInner):
    inner_class = Scales

    def __init__(self):
        super().__init__()
        self.inner.register_forward_hook(lambda module, args, result: double(args[0]))

    def forward(self, x):
        q = self.q(x)
        return q + self.inner(x), self.k(x)


@cases.refuses(*WRITTEN, "trace-stopped")
class SubmoduleHasAForwardOfItsOwn(WithInner):
    def __init__(self):
        super().__init__()
        self.inner.forward = lambda t: t.mul_(2)

    def forward(self, x):
        q = self.q(x)
        return q + self.inner(x), self.k(x)


@cases.refuses(*WRITTEN)
class SubmoduleByAList(Pair):
    def __init__(self):
        super().__init__()
        self.items = nn.ModuleList([Scales(), Writes()])

    def forward(self, x):
        q = self.q(x)
        for item in self.items:
            q = q + item(x)
        return q, self.k(x)


@cases.refuses(*WRITTEN)
class SubmoduleOutOfSight(Pair):
    """Kept in a plain list, so that it is none of the module's own."""

    def __init__(self):
        super().__init__()
        self.others = [Writes()]

    def forward(self, x):
        q = self.q(x)
        self.others[0](x)
        return q, self.k(x)


@cases.refuses(*WRITTEN)
class NormThatWrites(Pair):
    def __init__(self):
        super().__init__()

        class RMSNorm(nn.Module):
            def forward(self, t):
                t.add_(1)
                return t * torch.rsqrt(t.pow(2).mean(-1, keepdim=True) + 1e-6)

        self.norm = RMSNorm()

    def forward(self, x):
        q = self.q(x)
        return q + self.norm(x), self.k(x)


@cases.fuses("q k")
class SubmoduleIsHarmless(WithInner):
    inner_class = Scales

    def forward(self, x):
        q = self.inner(self.q(x))
        return q, self.inner(self.k(x))


@cases.fuses("q k")
class SubmoduleReadsTheInput(WithInner):
    inner_class = Scales

    def forward(self, x):
        q = self.q(x)
        return q + self.inner(x), self.k(x)


@cases.fuses("q k")
class SubmoduleWritesTheOutput(WithInner):
    inner_class = Writes

    def forward(self, x):
        q = self.inner(self.q(x))
        return q * 1, self.k(x)


@cases.fuses("q k")
class SubmoduleKeepsTheInput(WithInner):
    inner_class = Keeps

    def forward(self, x):
        q = self.q(x)
        return q + self.inner(x), self.k(x)


@cases.fuses("q k")
class SubmodulesOfTorch(Pair):
    def __init__(self):
        super().__init__()
        self.steps_between = nn.Sequential(nn.SiLU(), nn.Dropout(0.1), nn.LayerNorm(8))

    def forward(self, x):
        q = self.steps_between(self.q(x))
        return q, self.k(x)


@cases.fuses("q k")
class AnotherLinearBetween(Pair):
    def forward(self, x):
        q = self.o(self.q(x))
        return q, self.k(x)


# -- built-ins and libraries -----------------------------------------------------------------------------


@cases.refuses(*WRITTEN)
class GetattrConstant(Pair):
    def forward(self, x):
        q = self.q(x)
        getattr(x, "mul_")(2)
        return q, self.k(x)


@cases.refuses(*WRITTEN)
class GetattrComputed(Pair):
    def forward(self, x):
        name = "mul" + "_"
        q = self.q(x)
        getattr(x, name)(2)
        return q, self.k(x)


@cases.refuses(*WRITTEN)
class MethodCaller(Pair):
    def forward(self, x):
        q = self.q(x)
        operator.methodcaller("mul_", 2)(x)
        return q, self.k(x)


@cases.refuses(*WRITTEN, "module-escapes")
class Evaluates(Pair):
    def forward(self, x):
        q = self.q(x)
        eval("x.mul_(2)")
        return q, self.k(x)


@cases.refuses(*WRITTEN, "module-escapes")
class ExecutesOnAnotherName(Pair):
    def forward(self, x):
        names = {"t": x}
        q = self.q(x)
        exec("t.mul_(2)", names)
        return q, self.k(x)


@cases.refuses(*WRITTEN)
class ByTheDictOfSelf(Pair):
    def forward(self, x):
        self.kept = x
        q = self.q(x)
        self.__dict__["kept"].mul_(2)
        return q, self.k(x)


@cases.refuses(*WRITTEN, "module-escapes")
class ByVarsOfSelf(Pair):
    def forward(self, x):
        self.kept = x
        q = self.q(x)
        vars(self)["kept"].mul_(2)
        return q, self.k(x)


@cases.refuses(*WRITTEN, "module-escapes")
class ByLocals(Pair):
    def forward(self, x):
        q = self.q(x)
        locals()["x"].mul_(2)
        return q, self.k(x)


@cases.refuses(*WRITTEN)
class SetattrConstant(Pair):
    def forward(self, x):
        setattr(self, "kept", x)
        q = self.q(x)
        self.kept.mul_(2)
        return q, self.k(x)


@cases.refuses(*WRITTEN)
class SetattrComputed(Pair):
    def forward(self, x):
        name = "ke" + "pt"
        setattr(self, name, x)
        q = self.q(x)
        self.kept.mul_(2)
        return q, self.k(x)


@cases.refuses(*WRITTEN)
class ShallowCopy(Pair):
    def forward(self, x):
        h = copy.copy(x.detach())
        q = self.q(x)
        h.mul_(2)
        return q, self.k(x)


@cases.refuses(*WRITTEN)
class ShallowCopyOfAList(Pair):
    def forward(self, x):
        box = copy.copy([x])
        q = self.q(x)
        box[0].mul_(2)
        return q, self.k(x)


@cases.refuses(*WRITTEN)
class CheckpointOfAWrite(Pair):
    def forward(self, x):
        q = self.q(x)
        checkpoint(double, x, use_reentrant=False)
        return q, self.k(x)


@cases.refuses(*WRITTEN)
class AsTensor(Pair):
    def forward(self, x):
        h = torch.as_tensor(x)
        q = self.q(x)
        h.mul_(2)
        return q, self.k(x)


@cases.refuses(*WRITTEN)
class AsParameter(Pair):
    def forward(self, x):
        h = nn.Parameter(x.detach(), requires_grad=False)
        q = self.q(x)
        h.mul_(2)
        return q, self.k(x)


@cases.refuses(*WRITTEN)
class ByItsStorage(Pair):
    def forward(self, x):
        q = self.q(x)
        x.untyped_storage().fill_(0)
        return q, self.k(x)


@cases.refuses(*WRITTEN, "trace-stopped")
class ByDlpack(Pair):
    def forward(self, x):
        h = torch.from_dlpack(x.detach())
        q = self.q(x)
        h.mul_(2)
        return q, self.k(x)


@cases.refuses(*WRITTEN)
class OfAnotherType(Pair):
    def forward(self, x):
        h = x.detach().view(torch.int32)
        q = self.q(x)
        h.zero_()
        return q, self.k(x)


class DoubleInPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx, t):
        ctx.mark_dirty(t)
        return t.mul_(2)

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


@cases.refuses(*WRITTEN)
class AutogradFunctionWrites(Pair):
    def forward(self, x):
        q = self.q(x)
        DoubleInPlace.apply(x)
        return q, self.k(x)


@torch.library.custom_op("fusekit_adversarial::double_in_place", mutates_args=("t",))
def double_in_place(t: torch.Tensor) -> None:
    t.mul_(2)


@cases.refuses(*WRITTEN)
class CustomOperatorWrites(Pair):
    def forward(self, x):
        q = self.q(x)
        with torch.no_grad():
            double_in_place(x)
        return q, self.k(x)


@cases.refuses(*WRITTEN)
class CustomOperatorByName(Pair):
    def forward(self, x):
        q = self.q(x)
        with torch.no_grad():
            torch.ops.fusekit_adversarial.double_in_place(x)
        return q, self.k(x)


@cases.fuses("q k")
class PrintsAndAsks(Pair):
    def forward(self, x):
        q = self.q(x)
        print(x.shape, len(x.shape), isinstance(x, torch.Tensor))
        n = max(int(self.scale), len(range(3)), abs(-2))
        return q * n, self.k(x)


@cases.fuses("q k")
class WarnsAndLogs(Pair):
    def forward(self, x):
        q = self.q(x)
        if x.shape[0] > 99:
            warnings.warn("many rows", stacklevel=2)
        LOG.debug("rows: %s", x.shape[0])
        return q, self.k(x)


@cases.fuses("q k")
class Computes(Pair):
    def forward(self, x):
        q = self.q(x) * math.sqrt(x.shape[-1])
        weights = F.softmax(q @ q.transpose(-1, -2), dim=-1)
        q = torch.einsum("bij,bjk->bik", weights, torch.where(q > 0, q, 0.0))
        return q, self.k(x)


@cases.fuses("q k")
class GetattrOfANumber(Pair):
    def forward(self, x):
        q = self.q(x) * getattr(self, "scale", 1.0)
        return q, self.k(x)


@cases.may_fuse("q k", but=WRITTEN)
class SetattrOfANumber(Pair):
    def forward(self, x):
        q = self.q(x)
        setattr(self, "scale", 3.0)
        return q * self.scale, self.k(x)


@cases.may_fuse("q k", but=WRITTEN)
class CheckpointHarmless(Pair):
    def forward(self, x):
        q = checkpoint(doubled, self.q(x), use_reentrant=False)
        return q, self.k(x)


@cases.may_fuse("q k", but=WRITTEN)
class DeepCopyIsFresh(Pair):
    def forward(self, x):
        box = copy.deepcopy([x.detach()])
        q = self.q(x)
        box[0].mul_(2)
        return q, self.k(x)


@cases.may_fuse("q k", but=WRITTEN)
class SeedsBetween(Pair):
    def forward(self, x):
        q = self.q(x)
        torch.manual_seed(1)
        return q + torch.randn(8), self.k(x)


test_case, test_values, test_verdict = cases.tests()
