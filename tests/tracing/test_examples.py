"""The examples in the docstrings of `fusekit.tracing` give what they say."""

import ast
import doctest
import sys
from pathlib import Path

import pytest

import fusekit
import fusekit.tracing

HELPERS = [name for name in fusekit.tracing.__all__ if name[0].islower() and name != "aliasing"]


@pytest.mark.parametrize("name", HELPERS)
def test_example(name):
    helper = getattr(fusekit.tracing, name)
    module = sys.modules[helper.__module__]
    (test,) = doctest.DocTestFinder(recurse=False).find(helper, name, module)
    assert test.examples
    assert doctest.DocTestRunner().run(test).failed == 0


def test_each_helper_is_used_by_the_library_or_says_that_it_is_for_teaching():
    used = set()
    for path in Path(fusekit.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                used.add(node.id)
    for name in HELPERS:
        assert name in used or "Teaching-only: " in getattr(fusekit.tracing, name).__doc__, name
