"""Stand-ins: nothing of the real module can be reached through one."""

import collections
import functools
import types
import weakref

import torch
import torch.nn as nn

from fusekit.tracing.skeleton import Skeleton


class Settings:
    def __init__(self):
        self.sizes, self.nested = [1], {"a": {"b": [1]}}


class Slots:
    __slots__ = ("items",)

    def __init__(self):
        self.items = [1]


class Named(collections.namedtuple("Named", "a b")):
    pass


class Real(nn.Module):
    of_class: list = [1]

    def __init__(self):
        super().__init__()
        self.q = nn.Linear(2, 2)
        self.tied = nn.Linear(2, 2)
        self.tied.weight = self.q.weight
        self.again = self.q
        self.layers = nn.ModuleList([nn.Linear(2, 2), nn.ReLU()])
        self.register_buffer("b", torch.ones(2))
        self._hidden = [self.q, torch.ones(2)]
        self.settings, self.slots, self.named = Settings(), Slots(), Named([1], torch.ones(1))
        self.queue = collections.deque([1], maxlen=3)
        self.counts = collections.Counter(a=1)
        self.default = collections.defaultdict(list, a=[1])
        self.ordered = collections.OrderedDict(a=[1])
        self.bound, self.append = self.method, self._hidden.append
        self.partial = functools.partial(self.method, self.settings)
        self.closure = lambda: (self, self.settings)
        self.ref, self.proxy = weakref.ref(self), weakref.proxy(self.settings)
        self.flags = {1, 2}

    def method(self, *args):
        return self

    def forward(self, x):
        return x


def reachable(root, stop=()):
    """ids of the modules, tensors and changeable objects that can be reached from an object."""
    found, todo = {}, [root]
    while todo:
        value = todo.pop()
        if id(value) in found or isinstance(value, (type, types.ModuleType, str, int, float, type(None))):
            continue
        found[id(value)] = value
        if type(value) is weakref.ReferenceType:
            todo.append(value())
        elif type(value) is weakref.ProxyType:
            todo.append(value.__init__.__self__)
        elif isinstance(value, types.MethodType):
            todo.append(value.__self__)
        elif isinstance(value, types.BuiltinFunctionType):
            todo.append(value.__self__)
        elif isinstance(value, types.FunctionType):
            todo += [cell.cell_contents for cell in value.__closure__ or ()]
        elif isinstance(value, functools.partial):
            todo += [value.func, *value.args, *value.keywords.values()]
        elif isinstance(value, torch.Tensor):
            pass
        else:
            if isinstance(value, dict):
                todo += list(value.values())
            elif isinstance(value, (list, tuple, set, collections.deque)):
                todo += list(value)
            todo += [getattr(value, name) for name in getattr(type(value), "__slots__", ())]
            todo += list(getattr(value, "__dict__", {}).values())
    return found


def test_nothing_of_the_real_module_is_reachable_from_its_stand_in():
    real = Real()
    made = Skeleton(real, lambda *call: None).module
    # What `nn.Module` shares between all modules, and what answers calls, is no part of the module.
    made.__dict__.pop("_compiled_call_impl")
    changeable = (nn.Module, torch.Tensor, list, dict, collections.deque, Settings, Slots, set)
    ours = {key: value for key, value in reachable(real).items() if isinstance(value, changeable)}
    for child in made.modules():
        child.__dict__.pop("_compiled_call_impl", None)
        child.__dict__["_modules"] = dict(child._modules.items())
    theirs = reachable(made)
    assert [value for key, value in ours.items() if key in theirs] == []
    assert len(ours) > 40 and all(t.is_meta for t in theirs.values() if isinstance(t, torch.Tensor))


def test_stand_in_is_of_the_same_classes_shapes_and_settings():
    real = Real().half().eval()
    made = Skeleton(real, lambda *call: None).module
    assert [type(m) for m in made.modules()] == [type(m) for m in real.modules()]
    assert [n for n, _ in made.named_parameters()] == [n for n, _ in real.named_parameters()]
    for mine, its in zip(made.parameters(), real.parameters(), strict=True):
        assert (mine.shape, mine.dtype, mine.stride()) == (its.shape, its.dtype, its.stride())
        assert isinstance(mine, nn.Parameter)
    assert not made.training and made.settings.nested == real.settings.nested and made.queue.maxlen == 3
    assert made.counts == real.counts and type(made.counts) is collections.Counter
    assert made.default["new"] == [] and type(made.named) is Named and made.named.a == [1]


def test_shared_things_are_shared_by_the_stand_ins_too():
    made = Skeleton(Real(), lambda *call: None).module
    assert made.tied.weight is made.q.weight and made.again is made.q and made._hidden[0] is made.q
    assert made.bound() is made and made.closure()[0] is made and made.closure()[1] is made.settings
    assert made.ref() is made and made.partial.args[0] is made.settings
    made.append(3)
    assert made._hidden[-1] == 3


def test_call_of_a_stand_in_is_answered_with_its_path():
    calls = []
    made = Skeleton(Real(), lambda module, path, args, kwargs: calls.append((path, args, kwargs))).module
    made.layers[0](1, a=2)
    made.again(3)
    made._hidden[0](4)
    assert calls == [("layers.0", (1,), {"a": 2}), ("q", (3,), {}), ("q", (4,), {})]


def test_paths_of_parameters_are_those_of_the_first_place():
    skeleton = Skeleton(Real(), lambda *call: None)
    made = skeleton.module
    assert skeleton.paths[id(made.q.weight)] == "q.weight" and skeleton.paths[id(made.b)] == "b"
