"""The parts themselves: their weights written or replaced between the calls, and modules swapped."""

import torch
import torch.nn as nn

from tests.adversarial.cases import Cases, Pair

cases = Cases()
CHANGED = ("input-written", "input-may-be-written", "module-escapes", "tied")


# -- written -------------------------------------------------------------------------------------


@cases.refuses(*CHANGED)
class WritesTheBias(Pair):
    def forward(self, x):
        q = self.q(x)
        self.k.bias.data.add_(1)
        return q, self.k(x)


@cases.refuses(*CHANGED)
class WritesRows(Pair):
    def forward(self, x):
        rows = self.k.weight.data[:2]
        q = self.q(x)
        rows.zero_()
        return q, self.k(x)


@cases.refuses(*CHANGED)
class WritesByASecondName(Pair):
    def forward(self, x):
        weight = self.k.weight
        q = self.q(x)
        with torch.no_grad():
            weight.mul_(2)
        return q, self.k(x)


@cases.refuses(*CHANGED)
class WritesByTheModule(Pair):
    def forward(self, x):
        part = self.k
        q = self.q(x)
        part.weight.data.mul_(2)
        return q, self.k(x)


@cases.refuses(*CHANGED)
class WritesAllParameters(Pair):
    def forward(self, x):
        q = self.q(x)
        for parameter in self.parameters():
            parameter.data.mul_(2)
        return q, self.k(x)


@cases.refuses(*CHANGED)
class WritesAllAtOnce(Pair):
    def forward(self, x):
        q = self.q(x)
        with torch.no_grad():
            torch._foreach_mul_(list(self.parameters()), 2)
        return q, self.k(x)


@cases.refuses(*CHANGED)
class WritesByTheStateDict(Pair):
    def forward(self, x):
        q = self.q(x)
        self.state_dict()["k.weight"].mul_(2)
        return q, self.k(x)


@cases.refuses(*CHANGED)
class LoadsAStateDict(Pair):
    def forward(self, x):
        q = self.q(x)
        self.k.load_state_dict({"weight": torch.eye(8), "bias": torch.zeros(8)})
        return q, self.k(x)


@cases.refuses(*CHANGED)
class WritesByPath(Pair):
    def forward(self, x):
        q = self.q(x)
        self.get_parameter("k.weight").data.mul_(2)
        return q, self.k(x)


@cases.refuses(*CHANGED)
class WritesByTheDictOfModules(Pair):
    def forward(self, x):
        q = self.q(x)
        self._modules["k"].weight.data.mul_(2)
        return q, self.k(x)


@cases.refuses(*CHANGED)
class WritesByComputedName(Pair):
    def forward(self, x):
        name = "kv"[0]
        q = self.q(x)
        getattr(self, name).weight.data.mul_(2)
        return q, self.k(x)


@cases.refuses(*CHANGED)
class AppliesToAll(Pair):
    def change(self, module):
        if isinstance(module, nn.Linear):
            module.weight.data.mul_(2)

    def forward(self, x):
        q = self.q(x)
        self.apply(self.change)
        return q, self.k(x)


@cases.refuses(*CHANGED)
class InitialisesAnew(Pair):
    def forward(self, x):
        q = self.q(x)
        nn.init.ones_(self.k.weight)
        return q, self.k(x)


@cases.refuses(*CHANGED)
class ResetsThePart(Pair):
    def forward(self, x):
        q = self.q(x)
        self.k.reset_parameters()
        return q, self.k(x)


class WritesAnother(nn.Module):
    def __init__(self, other):
        super().__init__()
        self.others = [other]

    def forward(self, t):
        self.others[0].weight.data.mul_(2)
        return t * 1


@cases.refuses(*CHANGED)
class SubmoduleWritesThePart(Pair):
    def __init__(self):
        super().__init__()
        self.step = WritesAnother(self.k)

    def forward(self, x):
        q = self.step(self.q(x))
        return q, self.k(x)


@cases.refuses(*CHANGED)
class WritesATiedWeight(Pair):
    def __init__(self):
        super().__init__()
        self.o.weight = self.k.weight

    def forward(self, x):
        q = self.q(x)
        self.o.weight.data.mul_(2)
        return q, self.k(x)


@cases.refuses(*CHANGED)
class WritesABufferThatSharesTheWeight(Pair):
    def __init__(self):
        super().__init__()
        self.register_buffer("row", self.k.weight.data[0])

    def forward(self, x):
        q = self.q(x)
        self.row.mul_(2)
        return q, self.k(x)


@cases.refuses(*CHANGED)
class NoLongerNeedsGrad(Pair):
    def forward(self, x):
        q = self.q(x)
        self.k.weight.requires_grad_(not self.k.weight.requires_grad)
        return q, self.k(x)


# -- replaced --------------------------------------------------------------------------------------------


@cases.refuses(*CHANGED)
class StoresData(Pair):
    def forward(self, x):
        q = self.q(x)
        self.k.weight.data = torch.eye(8)
        return q, self.k(x)


@cases.refuses(*CHANGED)
class StoresAParameter(Pair):
    def forward(self, x):
        q = self.q(x)
        self.k.weight = nn.Parameter(self.k.weight.detach() * 2)
        return q, self.k(x)


@cases.refuses(*CHANGED)
class RemovesTheBias(Pair):
    def forward(self, x):
        q = self.q(x)
        self.k.bias = None
        return q, self.k(x)


@cases.refuses(*CHANGED, "different-inputs", shows=False)
class StoresAModule(Pair):
    def forward(self, x):
        q = self.q(x)
        self.k = self.o
        return q, self.k(x)


@cases.refuses(*CHANGED, "different-branches", shows=False)
class StoresAModuleLater(Pair):
    def forward(self, x):
        q = self.q(x)
        if self.calls == 1:
            self.k = self.o
        k = self.k(x)
        self.calls += 1
        return q, k


@cases.refuses(*CHANGED, shows=False)
class SetsAModuleByName(Pair):
    def forward(self, x):
        q = self.q(x)
        setattr(self, "k", self.o)
        return q, self.k(x)


class Doubled(nn.Linear):
    def forward(self, t):
        return super().forward(t) * 2


@cases.refuses(*CHANGED, "subclass", shows=False)
class ChangesItsClass(Pair):
    def forward(self, x):
        q = self.q(x)
        self.k.__class__ = Doubled
        k = self.k(x)
        self.k.__class__ = nn.Linear
        return q, k


@cases.refuses(*CHANGED, "hooked", shows=False)
class HooksThePart(Pair):
    def forward(self, x):
        q = self.q(x)
        hook = self.k.register_forward_hook(lambda module, args, result: result * 2)
        k = self.k(x)
        hook.remove()
        return q, k


@cases.refuses(*CHANGED, backward=False)
class Doubles(Pair):
    def forward(self, x):
        q = self.q(x)
        self.k.double()
        return q, self.k(x)


@cases.refuses(*CHANGED, shows=False)
class ForwardOfThePart(Pair):
    def forward(self, x):
        q = self.q(x)
        self.k.forward = lambda t: t * 2
        k = self.k(x)
        del self.k.forward
        return q, k


# -- left alone ------------------------------------------------------------------------------------------


@cases.fuses("q k")
class WritesAfterwards(Pair):
    def forward(self, x):
        q, k = self.q(x), self.k(x)
        with torch.no_grad():
            k = k * 1
        return q.detach(), k, self.doubled()

    def doubled(self):
        self.steps.mul_(2)
        return self.steps * 1


@cases.fuses("q k")
class ReadsItsType(Pair):
    def forward(self, x):
        q = self.q(x)
        n = self.k.out_features + self.k.weight.shape[0]
        return q.to(self.k.weight.dtype) * n, self.k(x)


@cases.may_fuse("q k", but=CHANGED)
class ReadsItsWeight(Pair):
    def forward(self, x):
        q = self.q(x)
        peak = self.k.weight.abs().max()
        return q * peak, self.k(x)


@cases.may_fuse("q k", but=CHANGED)
class WritesTheWeightOfAnother(Pair):
    def forward(self, x):
        q = self.q(x)
        self.o.weight.data.mul_(2)
        return q, self.k(x)


@cases.may_fuse("q k", but=CHANGED)
class WritesAWeightAfterwards(Pair):
    def forward(self, x):
        q, k = self.q(x), self.k(x)
        self.k.weight.data.mul_(1.5)
        return q.detach(), k.detach()


@cases.may_fuse("q k", but=CHANGED)
class WritesAWeightBefore(Pair):
    def forward(self, x):
        self.k.weight.data.mul_(1.5)
        return self.q(x), self.k(x)


@cases.may_fuse("q k", but=CHANGED)
class StoresDataBefore(Pair):
    def forward(self, x):
        self.k.weight.data = self.k.weight.data * 1.5
        return self.q(x), self.k(x)


@cases.may_fuse("q k", but=CHANGED)
class StoresAParameterBefore(Pair):
    def forward(self, x):
        self.k.weight = nn.Parameter(self.k.weight.detach() * 1.5)
        return self.q(x), self.k(x)


@cases.may_fuse("q k", but=(*CHANGED, "different-inputs"))
class StoresAModuleAfterwards(Pair):
    def forward(self, x):
        q, k = self.q(x), self.k(x)
        self.k = self.o
        return q, k


@cases.may_fuse("q k", but=CHANGED)
class SetsItsMode(Pair):
    def forward(self, x):
        q = self.q(x)
        self.eval()
        return q, self.k(x)


test_case, test_values, test_verdict = cases.tests()
