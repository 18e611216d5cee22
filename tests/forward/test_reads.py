"""What a forward reads: two instances with one key must be alike in all that their forward sees."""

import functools

import pytest
import torch
import torch.nn as nn

from fusekit.forward import source
from fusekit.forward.reads import (
    DYNAMIC,
    MISSING,
    Uncachable,
    describe,
    key,
    module_attribute,
    reads,
    resolve,
)

NONE: frozenset = frozenset()


def key_of(module, by_type=NONE):
    return key(module, source(module), by_type)


def pair(load, text, **changes):
    """Two instances of class A of `text`, the second with attributes changed."""
    module = load(text)
    one, two = module.A(), module.A()
    for name, value in changes.items():
        setattr(two, name, value)
    return module, one, two


HEAD = """
class A(nn.Module):
    def __init__(self):
        super().__init__()
        self.q = nn.Linear(2, 2)
        self.flag = True
        self.options = {"fast": True}
        self.sizes = [1, 2]
        self.register_buffer("b", torch.zeros(2))
"""


def body(*lines):
    return HEAD + "    def forward(self, x):\n" + "".join(f"        {line}\n" for line in lines)


def test_reads_are_the_longest_chains(load):
    a = load(body("y = self.q(x) + self.options['fast']", "return y + self.q.weight.sum()")).A()
    found, complete = reads(source(a))
    assert [read.chain for read in found] == [("q",), ("options",), ("q", "weight", "sum")] and complete


@pytest.mark.parametrize(
    "line",
    [
        "getattr(self, x)",
        "setattr(self, x, 1)",
        "vars(self)[x]",
        "self.__dict__[x]",
        "locals()[x]",
        "eval('self.x')",
    ],
)
def test_computed_names_have_no_key(load, line):
    a = load(body(f"return {line}")).A()
    with pytest.raises(Uncachable):
        key_of(a)


@pytest.mark.parametrize(
    ("line", "changes"),
    [
        ("self.flag", {"flag": False}),
        ("self.flag", {"flag": 1}),
        ("self.sizes[0]", {"sizes": [2, 1]}),
        ("self.options['fast']", {"options": {"fast": False}}),
        ("self.q(x)", {"q": nn.Linear(2, 3)}),
        ("self.q(x)", {"q": nn.Linear(2, 2, bias=False)}),
        ("self.q(x)", {"q": nn.Linear(2, 2).bfloat16()}),
        ("self.q(x)", {"q": nn.Linear(2, 2).eval()}),
        ("x + self.b", {"b": torch.zeros(3)}),
        # `self` handed on: all of it may be read
        ("helper(self, x)", {"flag": False}),
        ("helper(self, x)", {"other": 3}),
        ("[s.flag for s in (self,)]", {"flag": False}),
        ("super().forward(x)", {"flag": False}),
        ("(lambda: self.flag)()", {"flag": False}),
    ],
)
def test_different_values_have_different_keys(load, line, changes):
    text = "def helper(module, x):\n    return module.flag\n" + body(f"return {line}")
    module, one, two = pair(load, text, **changes)
    assert key_of(one) == key_of(module.A())
    assert key_of(one) != key_of(two)


def test_self_under_another_name_counts_whole(load):
    _, one, two = pair(load, body("me = self", "return me.flag"), flag=False)
    assert key_of(one) != key_of(two)


def test_what_is_not_read_does_not_count(load):
    _, one, two = pair(load, body("return self.q(x)"), flag=False, other=3)
    assert key_of(one) == key_of(two)


def test_value_counted_by_type_may_differ_also_where_self_is_handed_on(load):
    text = "def helper(*a): pass\n" + body("return helper(self, self.flag)")
    _, one, two = pair(load, text, flag=False)
    by_type = frozenset({("flag",)})
    assert key_of(one, by_type) == key_of(two, by_type) and key_of(one) != key_of(two)


def test_methods_of_self_are_read_too(load):
    text = body("return self.helper(x)") + "    def helper(self, x):\n        return self.flag\n"
    _, one, two = pair(load, text, flag=False)
    assert key_of(one) != key_of(two)


def test_methods_of_a_parameter_are_the_same_each_time_they_are_read(load):
    a = load(body("return x * self.q.weight.float() + self.b.norm()")).A()
    before = key_of(a)
    assert key_of(a) == before
    a.q.half()
    assert key_of(a) != before


@pytest.mark.parametrize("first", ["self, *args", "*args"])
def test_decorated_methods_of_self_are_read_too(load, first):
    deco = f"""
def deco(f):
    def wrapped({first}):
        return f({first})
    return wrapped
"""
    text = (
        deco
        + body("return self.helper(x)")
        + "    @deco\n    def helper(self, x):\n        return self.flag\n"
    )
    _, one, two = pair(load, text, flag=False)
    try:
        assert key_of(one) != key_of(two)
    except Uncachable:
        pass


def test_list_changed_in_place_changes_the_key(load):
    a = load(body("return self.sizes[0]")).A()
    before = key_of(a)
    a.sizes[0] = 9
    assert key_of(a) != before


def test_flag_among_the_globals_and_cells_counts(load):
    module = load(
        """
        FAST = True
        def build(k):
            class A(nn.Module):
                def forward(self, x):
                    return [x for _ in range(1) if FAST] + [k]
            def change(new):
                nonlocal k
                k = new
            return A(), change
        """
    )
    a, change = module.build(1)
    before = key_of(a)
    module.FAST = False
    patched = key_of(a)
    change(2)
    assert len({before, patched, key_of(a)}) == 3


def test_setting_of_a_shared_configuration_counts(load):
    module = load(
        """
        class Config:
            eager = True
        def helper(config, x):
            return x if config.eager else -x
        class A(nn.Module):
            def __init__(self, config):
                super().__init__()
                self.config = config
            def forward(self, x):
                return helper(self.config, x)
        """
    )
    a = module.A(module.Config())
    before = key_of(a)
    a.config.eager = False
    assert key_of(a) != before


def test_property_has_no_key(load):
    a = load(body("return self.p") + "    @property\n    def p(self):\n        return self.flag\n").A()
    with pytest.raises(Uncachable):
        key_of(a)
    assert module_attribute(a, "p") is DYNAMIC


def test_attribute_is_found_as_nn_module_finds_it():
    a = nn.BatchNorm1d(2)
    assert module_attribute(a, "weight") is a.weight and module_attribute(a, "running_mean") is a.running_mean
    assert module_attribute(a, "eps") == a.eps and module_attribute(a, "nope") is MISSING
    assert resolve(nn.Sequential(a), ("0", "weight")) is a.weight
    assert resolve(a, ("weight", "shape")) == torch.Size([2])
    assert module_attribute(a, "forward").__self__ is a


def test_computed_attributes_are_not_run():
    class Lazy(nn.Module):
        def __getattr__(self, name):
            raise AssertionError("run")

    a = Lazy.__new__(Lazy)
    a.__dict__.update(nn.Module().__dict__)
    assert module_attribute(a, "nope") is DYNAMIC


def test_eighty_equal_layers_have_one_key():
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaAttention

    config = LlamaConfig(hidden_size=8, num_attention_heads=2, num_key_value_heads=1, intermediate_size=8)
    layers = [LlamaAttention(config, index) for index in range(3)]
    keys = {key(layer, source(layer), frozenset({("layer_idx",)})) for layer in layers}
    assert len(keys) == 1 and len({key_of(layer) for layer in layers}) == 3


def test_partials_of_other_functions_have_other_keys():
    owner = nn.Linear(2, 2)
    kinds = [
        functools.partial(torch.nn.functional.gelu, approximate="tanh"),
        functools.partial(torch.nn.functional.gelu, approximate="none"),
        functools.partial(torch.relu_),
    ]
    assert len({describe(kind, owner) for kind in kinds}) == 3
    again = functools.partial(torch.nn.functional.gelu, approximate="tanh")
    assert describe(again, owner) == describe(kinds[0], owner)


def test_an_object_that_holds_more_than_its_attributes_equals_itself_alone():
    class Slots:
        __slots__ = ("__dict__", "size")

    class Plain:
        pass

    one, other = Slots(), Slots()
    one.size, other.size = 1, 2
    assert describe(one, nn.Linear(2, 2)) != describe(other, nn.Linear(2, 2))
    same, equal = Plain(), Plain()
    same.size = equal.size = 3
    assert describe(same, nn.Linear(2, 2)) == describe(equal, nn.Linear(2, 2))
    equal.size = 4
    assert describe(same, nn.Linear(2, 2)) != describe(equal, nn.Linear(2, 2))
