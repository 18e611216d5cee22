"""Field reports of kinds 1 to 5: writes, and where a trace stops (all kinds: test_field_reports.py)."""

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import fusekit as fk
from tests.adversarial.cases import Case, Cases, Pair, check_values, check_verdict

cases = Cases()

# -- 1: the input is written between the projections -----------------------------------------------


@cases.refuses("input-written")
class Kind01Written(Pair):
    def forward(self, x):
        q = self.q(x)
        x.mul_(0.5)  # k must see the halved x
        return q, self.k(x)


@cases.fuses("q k")
class Kind01WrittenBefore(Pair):
    def forward(self, x):
        x.mul_(0.5)
        q = self.q(x)
        return q, self.k(x)


@cases.fuses("q k")
class Kind01WrittenBehind(Pair):
    def forward(self, x):
        q = self.q(x)
        k = self.k(x)
        x.mul_(0.5)
        return q, k, x


@cases.fuses("q k")
class Kind01ResultWritten(Pair):
    def forward(self, x):
        q = self.q(x)
        q.mul_(0.5)
        return q, self.k(x)


@cases.fuses("q k")
class Kind01SumWritten(Pair):
    def forward(self, x):
        total = x + 1
        q = self.q(x)
        total.mul_(0.5)
        total[..., 0] = 3
        return q, self.k(x), total


@cases.refuses("input-written", "input-may-be-written")
class Kind01WrittenOnOneWay(Pair):
    def forward(self, x):
        q = self.q(x)
        if self.flag:
            x.mul_(0.5)
        return q, self.k(x)


# -- 2: the write goes through another name --------------------------------------------------------


@cases.refuses("input-written")
class Kind02HalfWritten(Pair):
    def forward(self, x):
        half = x[:, :4]
        q = self.q(x)
        half.add_(1.0)  # x changes, x is not named
        return q, self.k(x)


@cases.fuses("q k")
class Kind02CopyOfHalfWritten(Pair):
    def forward(self, x):
        half = x[:, :4].clone()
        q = self.q(x)
        half.add_(1.0)
        return q, self.k(x), half


def written_through(view):
    """A module in which `view(x)` is written between its projections."""

    class Through(Pair):
        def forward(self, x):
            other = view(x)
            q = self.q(x)
            other.add_(1.0)
            return q, self.k(x)

    return Through


VIEWS = {
    "slice": lambda x: x[..., 1:],
    "ellipsis": lambda x: x[...],
    "none": lambda x: x[None],
    "view": lambda x: x.view(-1),
    "view_as": lambda x: x.view_as(x),
    "transpose": lambda x: x.transpose(0, 1),
    "mT": lambda x: x.mT,
    "permute": lambda x: x.permute(2, 1, 0),
    "narrow": lambda x: x.narrow(0, 0, 1),
    "select": lambda x: x.select(0, 0),
    "unbind": lambda x: x.unbind(0)[0],
    "split": lambda x: x.split(4, -1)[1],
    "chunk": lambda x: torch.chunk(x, 2, -1)[0],
    "tensor_split": lambda x: x.tensor_split(2)[0],
    "detach": lambda x: x.detach(),
    "data": lambda x: x.data,
    "unsqueeze": lambda x: x.unsqueeze(0),
    "squeeze": lambda x: x.squeeze(),
    "flatten": lambda x: x.flatten(),
    "unflatten": lambda x: x.unflatten(-1, (2, 4)),
    "ravel": lambda x: x.ravel(),
    "reshape": lambda x: x.reshape(-1, 8),
    "contiguous": lambda x: x.contiguous(),
    "to": lambda x: x.to(torch.float32),
    "float": lambda x: x.float(),
    "type_as": lambda x: x.type_as(x),
    "diagonal": lambda x: x.diagonal(),
    "as_strided": lambda x: x.as_strided((2,), (1,)),
    "unfold": lambda x: x.unfold(0, 1, 1),
    "movedim": lambda x: x.movedim(0, 1),
    "real": lambda x: x.real,
    "broadcast_tensors": lambda x: torch.broadcast_tensors(x)[0],
    "atleast_2d": lambda x: torch.atleast_2d(x),
    "dropout in eval": lambda x: F.dropout(x, training=False),
    "identity": nn.Identity(),
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_02_a_write_through_any_view_is_seen(view):
    case = Case(written_through(view), reasons=frozenset({"input-written", "input-may-be-written"}))
    check_values(case)
    check_verdict(case)


COPIES = {
    "clone": lambda x: x.clone(),
    "sum": lambda x: x + 0,
    "relu": lambda x: F.relu(x),
    "index": lambda x: x[[0, 1]],
    "repeat": lambda x: x.repeat(1, 1, 1),
    "cat": lambda x: torch.cat([x, x]),
    "view of a copy": lambda x: (x * 1).view(-1)[2:],
    "zeros_like": lambda x: torch.zeros_like(x),
}


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
def test_02_a_write_into_a_copy_lets_it_fuse(copied):
    case = Case(written_through(copied), fused=frozenset({frozenset({"q", "k"})}))
    check_values(case)
    check_verdict(case)


# -- 3: writes that are no methods with an underscore ----------------------------------------------


@cases.refuses("input-written", "input-may-be-written")
class Kind03SetsItem(Pair):
    def forward(self, x):
        q = self.q(x)
        x[0] = 1
        return q, self.k(x)


@cases.refuses("input-written", "input-may-be-written", "input-rebound")
class Kind03AddsInPlace(Pair):
    def forward(self, x):
        q = self.q(x)
        x += 1
        return q, self.k(x)


@cases.refuses("input-written", "input-may-be-written")
class Kind03FlagByPosition(Pair):
    def forward(self, x):
        q = self.q(x)
        F.relu(x, True)
        return q, self.k(x)


@cases.refuses("input-written", "input-may-be-written")
class Kind03FlagInAVariable(Pair):
    def forward(self, x):
        inplace = self.flag
        q = self.q(x)
        F.relu(x, inplace=inplace)
        return q, self.k(x)


@cases.refuses("input-written", "input-may-be-written")
class Kind03Out(Pair):
    def forward(self, x):
        q = self.q(x)
        torch.add(x, 1, out=x)
        return q, self.k(x)


@cases.refuses("input-written", "input-may-be-written")
class Kind03Copied(Pair):
    def forward(self, x):
        q = self.q(x)
        x.copy_(q)
        return q, self.k(x)


@cases.refuses("input-written", "input-may-be-written")
class Kind03DataAssigned(Pair):
    def forward(self, x):
        y = x + 1
        q = self.q(x)
        x.data = y.detach()
        return q, self.k(x)


@cases.refuses("input-written", "input-may-be-written")
class Kind03Random(Pair):
    def forward(self, x):
        q = self.q(x)
        x.uniform_()
        return q, self.k(x)


@cases.refuses("input-written", "input-may-be-written")
class Kind03IndexPut(Pair):
    def forward(self, x):
        q = self.q(x)
        x.index_fill_(0, torch.tensor([0]), 2.0)
        return q, self.k(x)


@cases.refuses("input-written", "input-may-be-written")
class Kind03InitFunction(Pair):
    def forward(self, x):
        q = self.q(x)
        nn.init.zeros_(x)
        return q, self.k(x)


@cases.refuses("input-written", "input-may-be-written")
class Kind03InPlaceOperatorByName(Pair):
    def forward(self, x):
        q = self.q(x)
        x.__imul__(2)
        return q, self.k(x)


@cases.fuses("q k")
class Kind03SetsItemOfAnother(Pair):
    def forward(self, x):
        kept = torch.zeros_like(x)
        q = self.q(x)
        kept[0] = 1
        kept += 2
        torch.add(kept, x, out=kept)
        return q, self.k(x), kept


@cases.fuses("q k")
class Kind03FlagThatIsFalse(Pair):
    def forward(self, x):
        q = self.q(x)
        positive = F.relu(x, inplace=False)
        return q, self.k(x), positive


# -- 4: a submodule or an operator of one's own writes its input -----------------------------------


@torch.library.custom_op("fusekit_field_reports::halve", mutates_args=("x",))
def halve(x: torch.Tensor) -> None:
    x.mul_(0.5)


@torch.library.custom_op("fusekit_field_reports::halved_", mutates_args=())
def halved_(x: torch.Tensor) -> torch.Tensor:
    return x * 0.5


@halved_.register_fake
def _(x):
    return torch.empty_like(x)


class WithActivation(Pair):
    def __init__(self, act):
        super().__init__()
        self.act = act

    def forward(self, x):
        q = self.q(x)
        self.act(x)  # no underscore anywhere
        return q, self.k(x)


@cases.refuses("input-written")
def Kind04ActivationInPlace():
    return WithActivation(nn.ReLU(inplace=True))


@cases.fuses("q k")
def Kind04ActivationThatLeavesItsInput():
    return WithActivation(nn.ReLU())


@cases.refuses("input-written")
def Kind04SequentialThatEndsInPlace():
    return WithActivation(nn.Sequential(nn.Identity(), nn.Hardtanh(inplace=True)))


class Doubles(nn.Module):
    def forward(self, x):
        x *= 2
        return x


@cases.refuses("input-written", "input-may-be-written")
def Kind04SubmoduleThatWrites():
    return WithActivation(Doubles())


class Weighs(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8))

    def forward(self, x):
        scaled = x * self.weight
        scaled += 1
        return scaled


@cases.fuses("q k")
def Kind04SubmoduleThatWritesItsOwn():
    return WithActivation(Weighs())


@cases.refuses("input-written", "input-may-be-written", backward=False)
class Kind04OperatorThatWrites(Pair):
    def forward(self, x):
        q = self.q(x)
        halve(x)
        return q, self.k(x)


@cases.refuses("input-written", "input-may-be-written", backward=False)
class Kind04OperatorThatWritesByItsNamespace(Pair):
    def forward(self, x):
        q = self.q(x)
        torch.ops.fusekit_field_reports.halve(x)
        return q, self.k(x)


@cases.fuses("q k", backward=False)
class Kind04OperatorThatOnlyLooksAsIfItWrote(Pair):
    def forward(self, x):
        q = self.q(x)
        half = torch.ops.fusekit_field_reports.halved_(x)
        return q, self.k(x), half


# -- 5: the trace stops ----------------------------------------------------------------------------


@cases.refuses("called-twice", "input-written", "input-may-be-written", "trace-stopped")
class Kind05StopsBeforeAWrite(Pair):
    def forward(self, x):
        q, k = self.q(x), self.k(x)
        if x.sum() > 0:
            x.add_(1)  # a trace dies here
        return q, k, self.v(x), self.k(x)  # a second call of k that is never seen


@cases.refuses("input-written", "input-may-be-written", "trace-stopped", "different-branches")
class Kind05StopsBetween(Pair):
    def forward(self, x):
        q = self.q(x)
        if x.sum() > 0:
            x.add_(1)
        return q, self.k(x)


@cases.refuses("trace-stopped")
class Kind05StopsBehindThem(Pair):
    def forward(self, x):
        q, k, v = self.q(x), self.k(x), self.v(x)
        if q.sum() > 0:
            q = q * 2
        return q, k, v


def test_05_where_the_trace_stops_is_told():
    trace = fk.trace(Kind05StopsBetween())
    assert not trace.complete and trace.stopped.line == Kind05StopsBetween.forward.__code__.co_firstlineno + 2


@pytest.mark.parametrize("case", cases, ids=str)
def test_values(case):
    check_values(case)


@pytest.mark.parametrize("case", cases, ids=str)
def test_verdict(case):
    check_verdict(case)
