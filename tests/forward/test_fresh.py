"""What an instance tells of its forward without a run: branches, submodules, and what is allocated."""

import ast
import doctest

import pytest
import torch
import torch.nn as nn
from hypothesis import given, settings
from hypothesis import strategies as st

import fusekit.forward.fresh
from fusekit.forward import returns_fresh


class Sub(nn.Linear):
    pass


class Own(nn.Linear):
    def forward(self, x):
        return x


class Module(nn.Module):
    __hash__ = nn.Module.__hash__

    def __init__(self):
        super().__init__()
        self.q, self.k, self.sub, self.own = nn.Linear(4, 4), nn.Linear(4, 8), Sub(4, 4), Own(4, 4)
        self.act, self.drop, self.same = nn.ReLU(inplace=True), nn.Dropout(0.0), nn.Identity()
        self.norm, self.inner, self.many = None, nn.Module(), nn.ModuleList([nn.Linear(4, 4)])
        self.inner.d = nn.Linear(4, 4)
        self.inner.gone = None
        self.on, self.off, self.kind, self.heads, self.w = True, False, "a", 2, torch.ones(4)
        self.kept = []

    def helper(self, x):
        return x

    dim = helper

    @property
    def computed(self):
        return nn.Identity()


def fresh(text: str, module: nn.Module | None = None) -> bool:
    return returns_fresh(ast.parse(text, mode="eval").body, module or Module())


def test_examples_of_the_docstrings():
    assert doctest.testmod(fusekit.forward.fresh) == (0, 3)


@pytest.mark.parametrize("text", ["1", "'a'", "None", "f'{x}'", "[]", "{}", "()"])
def test_literals_are_fresh(text):
    assert fresh(text)


@pytest.mark.parametrize(
    "text",
    ["x", "self.w", "x.view(-1)", "f(x)", "torch.relu(x)", "self.kept", "self", "x[0]", "x + y", "lambda: x"],
)
def test_what_is_read_or_unknown_is_not_fresh(text):
    assert not fresh(text)


def test_linears_and_views_of_their_results():
    for text in ("self.q(x)", "self.inner.d(x)", "self.sub(x)", "(y := self.q(x))"):
        assert fresh(text)
        assert fresh(f"{text}.view(2, -1).transpose(0, 1)[..., :2].float().to(y.dtype).mT")
        assert fresh(f"{text}.chunk(2, -1)[0]")
    assert not fresh("self.q(x).some(y)")
    assert not fresh("self.q(x).set_(y)")
    assert not fresh("self.q.weight") and not fresh("self.q") and not fresh("self.many[0](x)")


def test_a_linear_that_computes_something_else_is_none():
    assert not fresh("self.own(x)")
    module = Module()
    module.q.forward = lambda x: x
    assert not fresh("self.q(x)", module)
    module.k.register_forward_hook(lambda module, args, output: args[0])
    assert not fresh("self.k(x)", module)
    assert fresh("self.sub(x)", module)
    handle = nn.modules.module.register_module_forward_hook(lambda module, args, output: args[0])
    try:
        assert not fresh("self.sub(x)", module)
    finally:
        handle.remove()


def test_a_call_that_cannot_run():
    for text in (
        "self.norm(x)",
        "self.gone(x)",
        "self.inner.gone(x)",
        "self.inner.never(x)",
        "self.norm.d(x)",
    ):
        assert fresh(text)
    for text in ("self.helper(x)", "self.computed(x)", "self.kept(x)"):
        assert not fresh(text)


def test_a_missing_name_of_a_class_with_a_lookup_of_its_own_may_be_there():
    class Lookup(Module):
        def __getattr__(self, name):
            return super().__getattr__(name) if name in self._modules else nn.Identity()

    assert fresh("self.norm(x)") and not fresh("self.gone(x)", Lookup())


def test_another_submodule_when_its_arguments_are():
    for name in ("act", "drop", "same"):
        assert fresh(f"self.{name}(self.q(x))") and fresh(f"self.{name}(input=self.q(x)).view(-1)")
        assert not fresh(f"self.{name}(x)") and not fresh(f"self.{name}(self.q(x), x)")
        assert not fresh(f"self.{name}(*x)") and not fresh(f"self.{name}(**x)")
        assert not fresh(f"self.{name}()")  # it can only return what it holds
    module = Module()
    module.act.register_forward_hook(lambda module, args, output: module.kept)
    assert not fresh("self.act(self.q(x))", module)


def test_a_conditional_when_the_branch_taken_is():
    for test in (
        "self.on",
        "not self.off",
        "self.norm is None",
        "None is self.norm",
        "self.q is not None",
        "self.q",
    ):
        assert fresh(f"self.q(x) if {test} else x") and not fresh(f"x if {test} else self.q(x)")
    for test in (
        "self.kind == 'a'",
        "self.heads > 1",
        "self.heads <= 2",
        "self.on and self.heads != 3",
        "self.training",
    ):
        assert fresh(f"self.q(x) if {test} else x") and not fresh(f"x if {test} else self.q(x)")
    for test in ("self.off", "self.norm", "self.off and y", "not (y or self.on)", "self.heads < 2"):
        assert fresh(f"x if {test} else self.q(x)") and not fresh(f"self.q(x) if {test} else x")
    assert not fresh("self.q(x) if self.training else x", Module().eval())


@pytest.mark.parametrize(
    "test",
    [
        "y",
        "self.w",
        "self.kept",
        "self.many",
        "self.computed",
        "self.gone",
        "y or self.off",
        "self.w is self.q",
    ],
)
def test_both_branches_where_it_is_not_decided(test):
    assert fresh(f"self.q(x) if {test} else self.k(x)")
    assert not fresh(f"self.q(x) if {test} else x") and not fresh(f"x if {test} else self.q(x)")


def test_operands_of_and_and_or():
    assert fresh("self.q(x) or self.k(x)") and not fresh("x or self.q(x)") and not fresh("self.q(x) and x")
    assert fresh("self.on and self.q(x)") and fresh("self.norm or self.q(x)")
    assert not fresh("self.on and x") and not fresh("self.off or x") and not fresh("self.act and x")


def test_a_sequence_when_every_part_is():
    assert fresh("(self.q(x), [1, self.k(x)])") and fresh("{'a': self.q(x)}") and fresh("[*self.q(x), 1]")
    assert fresh("[self.q(t) for t in x]") and fresh("{t.shape: self.q(t) for t in x}")
    assert not fresh("(self.q(x), x)") and not fresh("{'a': x}") and not fresh("[*x]")
    assert not fresh("[t for t in x]") and not fresh("{**x}")


def test_metadata_is_fresh():
    assert fresh("x.shape") and fresh("x.size(0)") and fresh("(self.q(x), x.dtype)")
    assert not fresh("self.dim(x)")  # a method of the module itself


ATOMS = st.sampled_from(["x", "y", "self.w", "1", "self.q(x)", "self.inner.d(y)", "self.q(self.w)"])
EXPRESSIONS = st.recursive(
    ATOMS,
    lambda inner: st.one_of(
        st.builds("self.{}({})".format, st.sampled_from(["act", "drop", "same", "own", "helper"]), inner),
        st.builds(
            "({}).{}".format,
            inner,
            st.sampled_from(["view(-1)", "float()", "mT", "clone()", "data", "add(x)"]),
        ),
        st.builds(
            "({} if {} else {})".format, inner, st.sampled_from(["self.on", "self.off", "self.norm"]), inner
        ),
        st.builds("({} if {} else {})".format, inner, st.sampled_from(["self.norm is None", "flag"]), inner),
        st.builds("[{}, {}][{}]".format, inner, inner, st.sampled_from([0, 1, slice(1)])),
        st.builds("({}, {})".format, inner, inner),
        st.builds("(self.{} and {})".format, st.sampled_from(["on", "kept"]), inner),
        st.builds("[{} for t in ({}, {})]".format, st.sampled_from(["t", "self.q(x)"]), inner, inner),
    ),
    max_leaves=5,
)


def storages(value, found=None):
    found = {} if found is None else found
    if isinstance(value, torch.Tensor):
        found[value.untyped_storage()._cdata] = value
    elif isinstance(value, (tuple, list)):
        for item in value:
            storages(item, found)
    elif isinstance(value, nn.Module):
        for item in (*value.parameters(), *value.buffers(), *vars(value).values()):
            storages(item, found)
    return found


@settings(deadline=None, max_examples=300, database=None)
@given(EXPRESSIONS, st.booleans())
def test_what_is_fresh_shares_nothing_when_it_runs(text, flag):
    text = text.replace("slice(None, 1, None)", ":1")
    module = Module()
    names = {"self": module, "x": torch.randn(4, 4), "y": torch.randn(4, 4), "flag": flag}
    if not fresh(text, module):
        return
    held = [*map(storages, names.values())]
    try:
        value = eval(text, names)
    except (AttributeError, TypeError, RuntimeError, IndexError):
        return
    assert all(not storages(value).keys() & before.keys() for before in held)
