"""Alias sets and writes of every module class of real models: the two witnesses agree."""

from fusekit.tracing import aliasing
from tests.tracing.witnesses import contradictions


def test_the_text_of_every_module_allows_what_a_run_saw(model):
    modules = {type(module): module for module in model.modules()}
    found = {cls.__name__: contradictions(module) for cls, module in modules.items()}
    assert {name: what for name, what in found.items() if what} == {}


def test_most_forwards_of_a_model_are_followed_to_their_end(model):
    modules = {type(module): module for module in model.modules() if not list(module.children())}
    assert [cls.__name__ for cls, module in modules.items() if aliasing(module).failed] == []
