"""The names of a forward: of a chain, of a call, those that a region stores."""

import ast
import doctest

import pytest
import torch

import fusekit.forward.names
from fusekit.forward import METADATA_ATTRS, arg_names, base_name, call_name, rebound_names
from fusekit.forward.names import DTYPE_CASTS, METADATA_CALLS, captured_names


def expression(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body


def test_examples_of_the_docstrings():
    assert doctest.testmod(fusekit.forward.names) == (0, 6)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("a", "a"),
        ("a.b[c]", "a"),
        ("a[b.c][d].e", "a"),
        ("a().b", None),
        ("(a + b).c", None),
        ("'text'.b", None),
    ],
)
def test_base_name(text, name):
    assert base_name(expression(text)) == name


@pytest.mark.parametrize(
    ("text", "name"), [("f(x)", "f"), ("a.b.f(x)", "f"), ("a[0](x)", None), ("f(x)(y)", None)]
)
def test_call_name(text, name):
    assert call_name(expression(text)) == name


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("f(a)", {"a"}),
        ("g.f(a.b[c], d=e)", {"a", "c", "e"}),
        ("f(*a, **b)", {"a", "b"}),
        ("f(g(a), [b, c])", {"g", "a", "b", "c"}),
        ("f()", set()),
    ],
)
def test_arg_names(text, names):
    assert arg_names(expression(text)) == names


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("a = b", {"a"}),
        ("a = b = c", {"a", "b"}),
        ("a, (b, *c) = d", {"a", "b", "c"}),
        ("a: int = b", {"a"}),
        ("a += b", {"a"}),
        ("del a, b[0]", {"a"}),
        ("a[b] = c; d.e = f", set()),
        ("for a, b in c: d = e", {"a", "b", "d"}),
        ("async def f():\n async for a in b: pass", {"f"}),
        ("with a as b, c as (d, e): pass", {"b", "d", "e"}),
        ("f(a := b)", {"a"}),
        ("[a for a in b]", set()),
        ("[(a := c) for b in d if (e := b)]", {"a", "e"}),
        ("f(lambda a: (b := a))", set()),
        ("f(lambda a=(b := c): a)", {"b"}),
        ("import a.b, c as d\nfrom e import f", {"a", "d", "f"}),
        ("def f(a=(b := 1)):\n c = d", {"f", "b"}),
        ("def f():\n nonlocal a\n a = b", {"f", "a"}),
        ("def f():\n global a\n del a", {"f", "a"}),
        ("def f():\n nonlocal a\n return a", {"f"}),
        ("class A((b := c)):\n d = e", {"A", "b"}),
        ("try: pass\nexcept E as a: b = c", {"a", "b"}),
        ("match a:\n case [b, *c] | {'k': b, **c} if (d := b): pass\n case E(f=g) as h: pass", set("bcdgh")),
    ],
)
def test_rebound_names(text, names):
    assert rebound_names(ast.parse(text).body) == names


def test_captured_names_of_a_pattern():
    pattern = ast.parse("match a:\n case {'k': [b, *c], **d} as e: pass\n case _: pass").body[0]
    assert [captured_names(case.pattern) for case in pattern.cases] == [{"b", "c", "d", "e"}, set()]


def test_metadata_and_casts_are_those_of_a_tensor():
    x = torch.ones(2, 3)
    for name in METADATA_ATTRS:
        assert not isinstance(getattr(x, name), torch.Tensor) and not callable(getattr(x, name))
    for name in METADATA_CALLS:
        assert not isinstance(getattr(x, name)(), torch.Tensor)
    assert {"shape", "dtype"} <= METADATA_ATTRS and "size" in METADATA_CALLS
    arguments = {"to": [torch.float64], "type": [torch.float64], "type_as": [x.double()]}
    for name in DTYPE_CASTS:
        if name == "chalf":  # warns that it is experimental
            continue
        cast = getattr(x, name)(*arguments.get(name, ()))
        assert cast.dtype is not x.dtype or name == "float"
        again = {"to": [cast.dtype], "type": [cast.dtype], "type_as": [cast]}
        assert getattr(cast, name)(*again.get(name, ())) is cast
