"""What a class says of its forward's inputs, with nothing traced and nothing run."""

import functools
import inspect

import pytest
import torch.nn as nn

from fusekit import FusekitError
from fusekit.tracing import forward_input_count, forward_parameters


class Several(nn.Module):
    def forward(me, x, /, mask=None, *rest, scale=1.0, **options):
        raise RuntimeError("this is not run")


class Nothing(nn.Module):
    def forward(self):
        return None


class Open(nn.Module):
    def forward(*everything, **options):
        return everything


class Static(nn.Module):
    @staticmethod
    def forward(x, y):
        return x


class OfTheClass(nn.Module):
    @classmethod
    def forward(cls, x, y):
        return x


def decorated(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs)

    return wrapper


class Decorated(nn.Module):
    @decorated
    def forward(self, x, y):
        return x


class Unsigned:
    """A callable that will not tell its signature."""

    __signature__ = "none"

    def __call__(self, *args):
        return args


class Hidden(nn.Module):
    forward = Unsigned()


class Called:
    def __call__(self, x, y, z):
        return x


class HoldsObject(nn.Module):
    forward = Called()  # no function: it is not given self


@pytest.mark.parametrize(
    ("cls", "names", "count"),
    [
        (Several, ["me", "x", "mask", "rest", "scale", "options"], 3),
        (Nothing, ["self"], 0),
        (Open, ["everything", "options"], 0),
        (Static, ["x", "y"], 2),
        (OfTheClass, ["x", "y"], 2),
        (Decorated, ["self", "x", "y"], 2),
        (HoldsObject, ["x", "y", "z"], 3),
        (Hidden, [], 1),
        (int, [], 1),
    ],
)
def test_parameters_by_name_and_how_many_inputs_they_are(cls, names, count):
    assert list(forward_parameters(cls)) == names
    assert forward_input_count(cls) == count


def test_parameters_are_those_of_inspect():
    found = forward_parameters(Several)
    assert found["mask"].default is None and found["scale"].kind is inspect.Parameter.KEYWORD_ONLY


def test_an_instance_is_an_error_that_names_the_way_out():
    for ask in (forward_parameters, forward_input_count):
        with pytest.raises(FusekitError, match=r"Nothing is asked about.*pass type\(module\)"):
            ask(Nothing())
