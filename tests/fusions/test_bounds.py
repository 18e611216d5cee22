"""A forward that is long, deep, generated or without end: a plan all the same, and work that is bounded."""

import importlib.util
import textwrap

import pytest
import torch
import torch.nn as nn

import fusekit as fk
from fusekit.fusions import analysis
from fusekit.tracing import recorder

MODULE = """
import functools
import torch
import torch.nn as nn

def helper(x):
    return x + 1

def generated(cls):
    text = "def forward(self, x):\\n    return self.q(x), self.k(x)\\n"
    names = {}
    exec(text, names)
    cls.forward = names["forward"]
    return cls

def written(function):
    names = {}
    exec("def forward(self, x):\\n    return self.q(x), self.k(x)\\n", names)
    return functools.wraps(function)(names["forward"])

DECORATOR
class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.q = nn.Linear(8, 8)
        self.k = nn.Linear(8, 8)

    METHOD_DECORATOR
    def forward(self, x):
BODY
"""


@pytest.fixture
def load(tmp_path):
    """An instance of a class with the linears q and k, its forward made of these lines, in a file."""

    def make(lines, decorator="", of_method=""):
        body = textwrap.indent("\n".join(lines), "        ")
        text = MODULE.replace("METHOD_DECORATOR", of_method).replace("DECORATOR", decorator)
        path = tmp_path / "generated.py"
        path.write_text(text.replace("BODY", body))
        spec = importlib.util.spec_from_file_location("generated", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module.M()

    return make


@pytest.fixture
def work(monkeypatch):
    """Counts operations recorded and analyses begun."""
    done = {"recorded": 0, "analysed": 0}

    def counting(name, function):
        def call(*args, **kwargs):
            done[name] += 1
            return function(*args, **kwargs)

        return call

    monkeypatch.setattr(recorder.Recorder, "_describe", counting("recorded", recorder.Recorder._describe))
    monkeypatch.setattr(analysis, "ForwardView", counting("analysed", analysis.ForwardView))
    return done


def only_refusal(module):
    plan = fk.plan(module)
    assert plan.sites == ()
    (refusal,) = plan.refusals
    return refusal


LONG = {
    "between the parts": ["q = self.q(x)", *(f"y{i} = x.sum() + {i}" for i in range(5000)), "k = self.k(x)"],
    "one name": ["y = x", *["y = y * 2 + x"] * 5000, "q, k = self.q(x), self.k(x)"],
    "never run": ["q, k = self.q(x), self.k(x)", "return q, k", *["x = x + 1 if x else x"] * 5000],
    "tests": ["y = x", *["if self.training:\n    y = y + 1"] * 2500, "q, k = self.q(x), self.k(x)"],
}


@pytest.mark.parametrize("lines", LONG.values(), ids=LONG)
def test_forward_of_5000_lines_is_refused_without_being_run(load, work, lines):
    module = load([*lines, "return q, k"])
    refusal = only_refusal(module)
    assert refusal.reason == "too-long" and set(refusal.parts) == {"q", "k"}
    assert "M.forward is of" in refusal.message and "submodules" in refusal.message
    assert work == {"recorded": 0, "analysed": 0}
    assert not fk.fuse(module).sites
    module(torch.randn(2, 8))


def test_long_comments_do_not_count_against_a_forward_of_ordinary_size(load):
    module = load(
        [*["# a remark that explains what follows, at length"] * 300, "return self.q(x), self.k(x)"]
    )
    with fk.fuse(module) as fused:
        assert len(fused.sites) == 1


@pytest.mark.parametrize("end", ["range(10**9)", "iter(int, 1)"])
def test_loop_without_an_end_is_followed_no_further(load, work, end):
    module = load(["y = x", f"for _ in {end}:", "    y = y + 1", "return self.q(x), self.k(x), y"])
    refusal = only_refusal(module)
    assert refusal.reason == "too-long"
    assert work["recorded"] <= recorder.MOST_CALLS + 1
    stopped = fk.trace(module).stopped
    assert stopped is not None and "more than 10000 operations" in stopped.message


def test_operations_of_a_loop_are_counted(load, work):
    rounds = analysis.MOST_NODES + 1
    module = load(["y = x", f"for _ in range({rounds}):", "    y = y + 1", "return self.q(x), self.k(x), y"])
    refusal = only_refusal(module)
    assert refusal.reason == "too-long" and f"{analysis.MOST_NODES} are looked through" in refusal.message
    assert work["recorded"] < 2 * rounds


def test_many_places_are_tried_until_the_bound(load, work, monkeypatch):
    module = load(["y = x", *["y = self.q(y) * self.k(y)"] * 40, "return y"])
    monkeypatch.setattr(analysis, "MOST_RUN", 1000)
    plan = fk.plan(module)
    found = [refusal.reason for refusal in plan.refusals]
    assert found.count("too-long") >= 30
    assert work["recorded"] < 2 * 1000 + 500


def test_helper_called_3000_times(load, work):
    module = load(["y = x", *["y = helper(y)"] * 3000, "return self.q(x), self.k(x), y"])
    assert only_refusal(module).reason == "too-long"
    assert work["recorded"] <= recorder.MOST_CALLS


def test_helper_called_300_times_between_the_parts_is_looked_through_a_bounded_number_of_times(load, work):
    lines = ["q = self.q(x)", "y = x", *["y = helper(y)"] * 300, "return q, self.k(x), y"]
    module = load(lines)
    plan = fk.plan(module)
    assert len(plan.sites) + len(plan.refusals) == 1
    assert work["recorded"] < 5 * 300
    if plan.sites:
        x, want = torch.randn(2, 8), module(torch.ones(2, 8))
        with plan.apply():
            torch.testing.assert_close(module(torch.ones(2, 8)), want)


DEEP = {
    "parentheses": ["y = " + "(" * 90 + "x" + " + 1)" * 90],
    "conditionals": [
        *("    " * depth + "if self.training:" for depth in range(18)),
        "    " * 18 + "x = x + 1",
        "y = x",
    ],
    "sum": ["y = " + " + ".join(["x"] * 900)],
    "chain": ["y = x" + ".relu()" * 900],
    "arms": [
        "if x is None:",
        "    y = x",
        *(line for i in range(900) for line in (f"elif x.dim() == {i + 9}:", f"    y = x + {i}")),
        "else:",
        "    y = x - 1",
    ],
}


@pytest.mark.parametrize("lines", DEEP.values(), ids=DEEP)
def test_deep_forward_has_a_plan(load, lines):
    module = load([*lines, "q, k = self.q(x), self.k(x)", "return q, k, y"])
    plan = fk.plan(module)
    assert len(plan.sites) + len(plan.refusals) == 1
    assert {refusal.reason for refusal in plan.refusals} <= {"too-long", "trace-stopped"}
    x = torch.randn(2, 8)
    want = module(x)
    with plan.apply():
        torch.testing.assert_close(module(x), want)
    assert str(plan)


def test_shallow_ones_of_the_same_kind_are_fused(load):
    for lines in (["y = " + " + ".join(["x"] * 60)], ["y = x" + ".relu()" * 60]):
        assert len(fk.plan(load([*lines, "return self.q(x), self.k(x), y"])).sites) == 1


def test_forward_that_calls_itself_without_an_end(load):
    refusal = only_refusal(load(["return self.forward(x) + self.q(x) + self.k(x)"]))
    assert refusal.reason == "trace-stopped"


@pytest.mark.parametrize("way", ["of the class", "of the method"])
def test_forward_generated_by_a_decorator(load, way):
    given = {"decorator": "@generated"} if way == "of the class" else {"of_method": "@written"}
    module = load(["return self.q(x) + self.k(x)"], **given)
    refusal = only_refusal(module)
    assert refusal.reason in ("no-source", "decorated", "source-is-stale")
    assert set(refusal.parts) == {"q", "k"}
    x = torch.randn(2, 8)
    torch.testing.assert_close(module(x)[1], module.k(x))


class Bare(nn.Module):
    def __init__(self):
        super().__init__()
        self.q = nn.Linear(8, 8)
        self.k = nn.Linear(8, 8)


def test_long_forward_without_source(work):
    names = {}
    exec("def forward(self, x):\n" + "    x = x + 1\n" * 5000 + "    return self.q(x), self.k(x)\n", names)
    cls = type("Made", (Bare,), {"forward": names["forward"]})
    assert only_refusal(cls()).reason == "no-source"
    assert work == {"recorded": 0, "analysed": 0}
