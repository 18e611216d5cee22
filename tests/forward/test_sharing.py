"""Which names an expression may share storage with."""

import ast
import doctest

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fusekit.forward.sharing
from fusekit.forward import METADATA_ATTRS, aliasing_reads
from fusekit.forward.names import METADATA_CALLS


def reads(text: str) -> set[str]:
    return aliasing_reads(ast.parse(text, mode="eval").body)


def test_examples_of_the_docstrings():
    assert doctest.testmod(fusekit.forward.sharing) == (0, 2)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("x", {"x"}),
        ("x.view(n)[i].T", {"x", "n", "i"}),
        ("self.q(x)", {"self", "x"}),
        ("f(x, k=y, *z)", {"x", "y", "z"}),
        ("torch.cat([x, y])", {"x", "y"}),
        ("F.relu(x)", {"x"}),
        ("lib.relu(x)", {"lib", "x"}),
        ("fs[0](x)", {"fs", "x"}),
        ("x + y", {"x", "y"}),
        ("(x, [y], {'k': z})", {"x", "y", "z"}),
        ("(y := x)", {"x"}),
        ("x and y or z", {"x", "y", "z"}),
        ("x if y else z", {"x", "z"}),
        ("[t.view(-1) for t in x]", {"x"}),
        ("[u + w for t in x for u in t]", {"x", "w"}),
        ("[w for t in x]", {"w"}),
        ("list(w for t in x)", {"w", "x"}),
        ("[x for x in x]", {"x"}),
        ("{k: v for k, v in x}", {"x"}),
        ("lambda t, u=y: t + x", {"x", "y"}),
        ("x > y", {"x", "y"}),
        ("1", set()),
        ("f'{x}'", set()),
        ("x is y", set()),
        ("x in y", set()),
        ("not x", set()),
    ],
)
def test_aliasing_reads(text, names):
    assert reads(text) == names


@pytest.mark.parametrize("attribute", sorted(METADATA_ATTRS))
def test_metadata_is_no_read(attribute):
    assert reads(f"x.{attribute}") == reads(f"x.y.{attribute}[0]") == set()
    assert reads(f"x.y[{'z'}].{attribute}") == set()


@pytest.mark.parametrize("method", sorted(METADATA_CALLS))
def test_metadata_calls_read_their_arguments_alone(method):
    assert reads(f"x.{method}()") == set() and reads(f"x.view(n).{method}(y, k=z)") == {"y", "z"}
    assert reads(f"z.view(x.{method}())") == {"z"}


EXPRESSIONS = st.recursive(
    st.sampled_from(["x", "y", "z", "2.0", "x.shape[0]"]),
    lambda inner: st.one_of(
        st.builds(
            "({}).{}".format, inner, st.sampled_from(["view(-1)", "mT", "float()", "size(0)", "detach()"])
        ),
        st.builds("(lambda t, u={}: [t, u])({})".format, inner, inner),
        st.builds("[t for t in ({}, {})]".format, inner, inner),
        st.builds("torch.broadcast_tensors({}, {})[0]".format, inner, inner),
        st.builds("({} if y is not None else {})".format, inner, inner),
        st.builds("({} and {})".format, st.sampled_from(["2", "[]", "x"]), inner),
        st.builds("{{'k': {}}}['k']".format, inner),
        st.builds("(u := {})".format, inner),
        st.builds("({} * {})".format, inner, inner),
        st.builds("identity({})".format, inner),
    ),
    max_leaves=5,
)


def tensors(value) -> list[torch.Tensor]:
    if isinstance(value, (tuple, list)):
        return [tensor for item in value for tensor in tensors(item)]
    return [value] if isinstance(value, torch.Tensor) else []


@settings(deadline=None, max_examples=300, database=None)
@given(EXPRESSIONS)
def test_what_a_value_shares_storage_with_was_read(text):
    names = {name: torch.ones(1, 1) for name in "xyz"}
    try:
        value = eval(text, {"torch": torch, "identity": lambda t: t, **names})
    except (AttributeError, TypeError, RuntimeError, IndexError, SyntaxError):
        return
    shared = {tensor.untyped_storage()._cdata for tensor in tensors(value)}
    seen = {name for name, tensor in names.items() if tensor.untyped_storage()._cdata in shared}
    assert seen <= reads(text)
