"""Field reports of kinds 11 to 23: the forward that runs and what it calls (all: test_field_reports.py)."""

import importlib.util

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import fusekit as fk
from tests.adversarial.cases import Cases, Pair, check_values, check_verdict, one, two

cases = Cases()

# -- 11: decorated forwards ------------------------------------------------------------------------


def bare(function):
    def wrapped(self, *args, **options):
        return function(self, *args, **options)

    return wrapped


def halving(function):
    def wrapped(self, x):
        return function(self, x * 0.5)

    return wrapped


class Decorator:
    """No function: what it calls may be any other thing the next time."""

    def __init__(self, function):
        self.function = function

    def __get__(self, instance, owner):
        return lambda x: self.function(instance, x)


@cases.fuses("q k")
class Kind11WithoutWraps(Pair):
    @bare
    def forward(self, x):
        return self.q(x), self.k(x)


@cases.fuses("q k")
class Kind11NoGradStays(Pair):
    @torch.no_grad()
    def forward(self, x):
        return self.q(x), self.k(x)


@cases.fuses("q k", backward=False)  # the sum of two gradients is rounded once where it was rounded twice
class Kind11AutocastStays(Pair):
    @torch.autocast("cpu", torch.bfloat16)
    def forward(self, x):
        return self.q(x), self.k(x)


@cases.fuses("q k")
class Kind11WhatADecoratorDoesStays(Pair):
    @halving
    @bare
    @torch.no_grad()
    def forward(self, x):
        return self.q(x), self.k(x)


@cases.refuses("decorated", "no-source")
class Kind11ObjectAsADecorator(Pair):
    @Decorator
    def forward(self, x):
        return self.q(x), self.k(x)


# -- 12: closures, super(), private names ----------------------------------------------------------


def in_a_function(scale):
    class Base(Pair):
        def forward(self, x):
            return x * scale

    class Kind12AllOfThem(Base):
        def __init__(self):
            super().__init__()
            self.__weight = 0.25

        def __halved(self, x):
            return x * 0.5

        def forward(self, x):
            x = super().forward(x) * self.__weight
            return self.q(x) * scale, self.k(x) * self.__weight, __class__.__name__

    return Kind12AllOfThem


cases.fuses("q k")(in_a_function(0.5))


def stored_in_a_cell():
    class Kind12CellOfTheInputIsStored(Pair):
        def forward(self, x):
            def later():
                nonlocal x
                x = x + 1

            q = self.q(x)
            later()
            return q, self.k(x)

    return Kind12CellOfTheInputIsStored


cases.refuses()(stored_in_a_cell())


# -- 13: source that is not there, is another, or is cut wrongly -----------------------------------


@cases.fuses("q k")
class Kind13TextAtTheLeftEdge(Pair):
    def forward(self, x):
        text = """
zero
    one
"""
        return self.q(x), self.k(x), text


def written(path, body):
    path.write_text(
        "from tests.adversarial.cases import Pair\n\n\nclass Made(Pair):\n"
        f"    def forward(self, x):\n        q = self.q(x)\n        {body}\n        return q, self.k(x)\n"
    )


def test_13_a_file_edited_since_its_import_is_refused_and_undone_is_fused(tmp_path):
    path = tmp_path / "made.py"
    written(path, "x.mul_(2)")
    spec = importlib.util.spec_from_file_location("made", path)
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    module, x = made.Made(), torch.randn(2, 8)
    want = module(x.clone())
    written(path, "q = q * 1")  # a text that could be fused, of code that could not
    (no,) = fk.plan(module).refusals
    assert no.reason == "source-is-stale" and str(path) in no.message
    torch.testing.assert_close(module(x.clone()), want)
    written(path, "x.mul_(2)")
    (no,) = fk.plan(module).refusals
    assert no.reason == "input-written" and no.line == 7


def test_13_code_from_exec_is_refused():
    scope = {"Pair": Pair}
    exec("class Made(Pair):\n    def forward(self, x):\n        return self.q(x), self.k(x)\n", scope)
    module = scope["Made"]()
    (no,) = fk.plan(module).refusals
    assert no.reason == "no-source"
    x = torch.randn(2, 8)
    want = module(x)
    fk.fuse(module)
    torch.testing.assert_close(module(x), want, rtol=0, atol=0)


# -- 15: projections of different tensors ----------------------------------------------------------


@cases.fuses("q k", inputs=(two,))
class Kind15PositionsOnQueryAndKey(Pair):
    def forward(self, x, positions):
        shifted = x + positions
        return self.q(shifted), self.k(shifted), self.v(x)


@cases.refuses(inputs=(two,))
class Kind15EachItsOwn(Pair):
    def forward(self, x, positions):
        return self.q(x + positions), self.k(x)


@cases.refuses(inputs=(two,))
class Kind15NameStoredBetween(Pair):
    def forward(self, x, positions):
        q = self.q(x)
        x = x + positions
        return q, self.k(x)


@cases.fuses("k v", but=("different-inputs",), inputs=(one, two))
class Kind15CrossAttention(Pair):
    def forward(self, x, context=None):
        source = x if context is None else context
        return F.scaled_dot_product_attention(self.q(x), self.k(source), self.v(source))


# -- 16: a linear that is called twice -------------------------------------------------------------


@cases.refuses("called-twice")
class Kind16Twice(Pair):
    def forward(self, x):
        return self.q(x) + self.q(x), self.k(x)


@cases.fuses("q k", inputs=(two,))
class Kind16AgainWithAnother(Pair):
    def forward(self, x, y):
        return self.q(x), self.k(x), self.q(y)


@cases.refuses("tied", "called-twice")
class Kind16OneModuleByTwoNames(Pair):
    def __init__(self):
        super().__init__()
        self.k = self.q

    def forward(self, x):
        return self.q(x), self.k(x)


# -- 21: another spelling of the call --------------------------------------------------------------


@cases.refuses("module-escapes", "subclass")
class Kind21Method(Pair):
    def forward(self, x):
        return self.q.forward(x), self.k.forward(x)


@cases.refuses("module-escapes")
class Kind21Getattr(Pair):
    def forward(self, x):
        return getattr(self, "q")(x), getattr(self, "k")(x)


@cases.refuses("module-escapes")
class Kind21ByKeyword(Pair):
    def forward(self, x):
        return self.q(input=x), self.k(input=x)


@cases.refuses("module-escapes")
class Kind21WeightsByHand(Pair):
    def forward(self, x):
        return F.linear(x, self.q.weight, self.q.bias), F.linear(x, self.k.weight, self.k.bias)


@cases.fuses("core.q core.k")
class Kind21DeeperPath(nn.Module):
    def __init__(self):
        super().__init__()
        self.core = Pair()

    def forward(self, x):
        return self.core.q(x), self.core.k(x)


# -- 22: guards, arms, stores ----------------------------------------------------------------------


class Guarded(Pair):
    def forward(self, x, cache=None):
        cache = {} if cache is None else cache
        q = self.q(x)
        k = self.k(x)
        v = self.v(x) if self.v is not None else k
        cache["kv"] = (k, v)
        return q * 1, k, v


@cases.fuses("q k v", inputs=(one, lambda: (*one(), {})))
def Kind22Guard():
    return Guarded()


@cases.fuses("q k", inputs=(one, lambda: (*one(), {})))
def Kind22GuardOfWhatIsNotThere():
    module = Guarded()
    module.v = None
    return module


@cases.refuses("different-branches", "input-written", "input-may-be-written", inputs=(one, two))
class Kind22WrittenInTheArmNotTaken(Pair):
    def forward(self, x, shared=None):
        q = self.q(x)
        if shared is not None:
            x.add_(shared)
            k = x * 2
        else:
            k = self.k(x)
        return q, k


@cases.refuses("input-written", "input-may-be-written")
class Kind22StoredAndWrittenFromThere(Pair):
    def forward(self, x):
        cache = {"x": x}
        q = self.q(x)
        cache["x"] += 1
        return q, self.k(x)


# -- 23: branches that the trace did not see -------------------------------------------------------


@cases.fuses("q k", inputs=(one, two))
class Kind23DropoutAndOptionalInput(Pair):
    def forward(self, x, past=None):
        if self.training:
            x = F.dropout(x, 0.5, True)
        if past is not None:
            x = x + past
        return self.q(x), self.k(x)


@cases.refuses(inputs=(one, two))
class Kind23TrainingChangesOneInput(Pair):
    def forward(self, x, past=None):
        q = self.q(x)
        if self.training:
            x = F.dropout(x, 0.5, True)
        return q, self.k(x)


@pytest.mark.parametrize("case", cases, ids=str)
def test_values(case):
    check_values(case)


@pytest.mark.parametrize("case", cases, ids=str)
def test_verdict(case):
    check_verdict(case)
