"""What a region of a forward writes, by names, flags and underscores."""

import ast
import doctest

import pytest

import fusekit.forward.writes
from fusekit.forward import inplace_target, mutated_names, writes_through_args, written_names


def statements(text: str) -> list[ast.stmt]:
    return ast.parse(text).body


def call(text: str) -> ast.Call:
    return ast.parse(text, mode="eval").body


def test_examples_of_the_docstrings():
    assert doctest.testmod(fusekit.forward.writes) == (0, 8)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("x[i] = y", "x"),
        ("x.attr = y", "x"),
        ("x.a[i].b = y", "x"),
        ("del x[i]", "x"),
        ("x += y", "x"),
        ("x[i] += y", "x"),
        ("x.mul_()", "x"),
        ("x.a[0].mul_(y)", "x"),
        ("x.view(-1).t().mul_(y)", "x"),
        ("x.__setitem__(0, y)", "x"),
        ("x.__iadd__(y)", "x"),
        ("x.append(y)", "x"),
        ("setattr(x, 'data', y)", "x"),
        ("x.__getitem__(0)", None),
        ("x.mul(y)", None),
        ("x[i]", None),
        ("x = y", None),
        ("f(x).mul_(y)", None),
        ("torch.relu_(x)", None),
        ("_(x)", None),
    ],
)
def test_inplace_target(text, name):
    statement = statements(text)[0]
    nodes = [statement]
    if isinstance(statement, (ast.Assign, ast.Delete)):
        nodes = statement.targets
    elif isinstance(statement, ast.Expr):
        nodes = [statement.value]
    assert [inplace_target(node) for node in nodes] == [name]


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("x[0], (y.h, z) = a", {"x", "y"}),
        ("for x[0] in y: z.h = 1", {"x", "z"}),
        ("with a as x.b: pass", {"x"}),
        ("if (y := x.mul_(2)) is z: w += 1", {"x", "w"}),
        ("x[i].mul_(y)", {"x"}),
        ("def f(): x[0] = 1", {"x"}),
        ("torch.flatten(x).mul_(y)", {"x"}),
        ("f(x)[0] = y", {"x"}),
        ("x.some(y).mul_(z)", {"x", "y"}),
        ("(x if a else y).mul_(2)", {"x", "y"}),
        ("operator.__iadd__(x, 1)", {"operator", "x"}),
        ("torch.relu_(x)", set()),
        ("x = y.mul(2) + f(z)", set()),
    ],
)
def test_mutated_names(text, names):
    assert mutated_names(statements(text)) == names


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("torch.add(x, 1, out=y)", True),
        ("f(x, inplace=True)", True),
        ("f(x, inplace=flag)", True),
        ("f(x, inplace=False)", False),
        ("f(x, inplace=0)", True),
        ("f(x, **{'out': y})", True),
        ("f(x, **{'inplace': False})", False),
        ("f(x, **k)", False),
        ("F.relu(x, True)", True),
        ("F.relu(x, False)", False),
        ("F.relu(x)", False),
        ("F.dropout(x, 0.5, True)", False),
        ("F.dropout(x, 0.5, True, flag)", True),
        ("F.relu(*x)", True),
        ("relu(x, True)", True),
        ("relu_(x)", True),
        ("torch.relu_(x)", True),
        ("torch.nn.functional.relu_(x)", True),
        ("nn.init.zeros_(x)", True),
        ("init.zeros_(x)", True),
        ("Tensor.mul_(x, 2)", True),
        ("self.act_(x)", True),
        ("self.weight.mul_(x)", False),
        ("x.mul_(y)", False),
        ("x[0].mul_(y)", False),
        ("f(x).mul_(y)", False),
        ("x.__iadd__(y)", False),
        ("operator.__getitem__(x, 0)", False),
        ("__import__(x)", False),
        ("_(x)", False),
        ("f(x)", False),
    ],
)
def test_writes_through_args(text, answer):
    assert writes_through_args(call(text)) is answer


def test_variables_tell_a_method_from_a_function():
    odd = call("lib.relu_(x)")
    assert not writes_through_args(odd)
    assert writes_through_args(odd, variables={"self", "x"})
    assert not writes_through_args(odd, variables={"self", "x", "lib"})
    assert not writes_through_args(call("F.mul_(x)"), variables={"F"})


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("a = b\nc[0] = d", {"a", "c"}),
        ("a = torch.add(b, c, out=d)", {"a", "b", "c", "d"}),
        ("F.relu(a[0], inplace=True)", {"a"}),
        ("self.act_(x)", {"self", "x"}),
        ("torch.relu_(a); b.mul_(c); del d; e += f", {"a", "b", "d", "e"}),
        ("y = f(a, b=c.d)", {"y"}),
    ],
)
def test_written_names(text, names):
    assert written_names(statements(text)) == names
    assert written_names(iter(statements(text))) == names


def test_written_names_knows_the_variables():
    assert written_names(statements("lib.relu_(x)"), {"x"}) == {"lib", "x"}
    assert written_names(statements("lib.relu_(x)")) == {"lib"}
