"""The examples in the docstrings of `fusekit.tracing` give what they say."""

import doctest
import sys

import pytest

import fusekit.tracing

HELPERS = [name for name in fusekit.tracing.__all__ if name[0].islower() and name != "aliasing"]


@pytest.mark.parametrize("name", HELPERS)
def test_example(name):
    helper = getattr(fusekit.tracing, name)
    module = sys.modules[helper.__module__]
    (test,) = doctest.DocTestFinder(recurse=False).find(helper, name, module)
    assert test.examples
    assert doctest.DocTestRunner().run(test).failed == 0
