"""Apply and revert: all of it or nothing, and exactly what was there."""

import copy
import inspect
import sys

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import fusekit as fk
from fusekit.model import apply as apply_room
from fusekit.model import binding, storage


class Norm(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width))
        self.eps = 1e-4

    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


class Attention(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.q = nn.Linear(width, width)
        self.k = nn.Linear(width, width)
        self.v = nn.Linear(width, width, bias=False)

    def forward(self, x):
        q, k, v = self.q(x), self.k(x), self.v(x)
        return F.scaled_dot_product_attention(q, k, v)


class Block(nn.Module):
    """An attention and a gated product in one forward, over a norm."""

    def __init__(self, width=8):
        super().__init__()
        self.norm = Norm(width)
        self.attention = Attention(width)
        self.gate = nn.Linear(width, 12)
        self.up = nn.Linear(width, 12)
        self.act = nn.SiLU()
        self.down = nn.Linear(12, width)
        self.p = nn.Linear(width, width)
        self.r = nn.Linear(width, width)

    def forward(self, x):
        y = x + self.attention(self.norm(x))
        y = self.down(self.act(self.gate(y)) * self.up(y))
        return self.p(y) * self.r(y)


class Model(nn.Module):
    def __init__(self, layers=2, width=8):
        super().__init__()
        self.layers = nn.ModuleList(Block(width) for _ in range(layers))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def picture(model):
    """Everything that a revert has to give back, by identity and order."""
    found = []
    for name, module in model.named_modules():
        state = vars(module)
        found.append((name, id(module), type(module), list(state)))
        for kind in ("_parameters", "_buffers", "_modules"):
            found.append([(key, id(value)) for key, value in state[kind].items()])
        found.append({key: id(value) for key, value in state.items()})
        for key, value in state.items():
            if key.endswith("_hooks"):
                found.append((key, [(number, id(hook)) for number, hook in value.items()]))
    return found


def values(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_as_before(model, before, weights):
    assert picture(model) == before
    for name, value in model.state_dict().items():
        assert torch.equal(value, weights[name]), name
    addresses = [parameter.untyped_storage().data_ptr() for parameter in model.parameters()]
    assert len(set(addresses)) == len(addresses)
    for parameter in model.parameters():
        assert parameter.untyped_storage().nbytes() == parameter.numel() * parameter.element_size()


def test_revert_gives_back_what_was_there():
    model = Model()
    model.layers[0].register_forward_hook(lambda *_: None)
    model.layers[1].attention.register_forward_pre_hook(lambda *_: None)
    model.layers[0].note = {"a": [1]}
    before, weights = picture(model), values(model)
    x = torch.randn(3, 8)
    want = model(x)
    fused = fk.fuse(model)
    assert picture(model) != before
    torch.testing.assert_close(model(x), want)
    fused.revert()
    assert_as_before(model, before, weights)
    assert torch.equal(model(x), want)
    assert fused.reverted


def test_present_values_stay():
    model = Model()
    before = picture(model)
    with fk.fuse(model):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(2)
        weights = values(model)
    assert_as_before(model, before, weights)


def test_gradients_that_were_there_stay():
    model = Model()
    model(torch.randn(3, 8)).sum().backward()
    grads = [parameter.grad for parameter in model.parameters()]
    with fk.fuse(model):
        assert all(p.grad is grad for p, grad in zip(model.parameters(), grads, strict=True))
    assert all(p.grad is grad for p, grad in zip(model.parameters(), grads, strict=True))


def test_class_looks_as_before():
    model = Model()
    fk.fuse(model)
    block = model.layers[0]
    assert isinstance(block, Block) and type(block) is not Block
    for name in ("__name__", "__qualname__", "__module__", "__doc__"):
        assert getattr(type(block), name) == getattr(Block, name)
    assert inspect.signature(type(block).forward) == inspect.signature(Block.forward)
    assert repr(block) == repr(Block())


def test_equal_layers_share_a_class_and_a_code_object():
    model = Model(4)
    fk.fuse(model)
    assert len({type(layer) for layer in model.layers}) == 1
    assert len({type(layer.norm).forward.__code__ for layer in model.layers}) == 1
    other = Model(1)
    fk.fuse(other)
    assert type(other.layers[0]) is type(model.layers[0])


def test_another_model_of_the_class_is_left_alone():
    one, other = Model(), Model()
    before = picture(other)
    fk.fuse(one)
    assert picture(other) == before
    assert "forward" in vars(Block) and "merged" not in inspect.getsource(Block.forward)


def test_empty_plan_applies_and_reverts_as_nothing():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    before = picture(model)
    plan = fk.plan(model)
    assert not plan.sites
    fused = plan.apply()
    fused.revert()
    fused.revert()
    with plan.apply():
        pass
    assert picture(model) == before


def test_partly_applied_then_the_rest_reverted_in_any_order():
    for order in ((0, 1, 2), (2, 0, 1), (1, 2, 0)):
        model = Model(1)
        before, weights = picture(model), values(model)
        x = torch.randn(3, 8)
        want = model(x)
        first = fk.plan(model, only="glu").apply()
        plan = fk.plan(model)
        assert [(site.fusion, site.applied) for site in plan.applied] == [("glu", True)]
        second = fk.plan(model, only="columns").apply()
        torch.testing.assert_close(model(x), want)
        third = fk.plan(model).apply()
        assert sorted(site.fusion for site in third.sites) == ["qkv", "rms_norm"]
        assert not fk.plan(model).sites
        for index in order:
            (first, second, third)[index].revert()
            torch.testing.assert_close(model(x), want)
        assert_as_before(model, before, weights)


def test_revert_of_the_whole_model_takes_off_every_plan():
    model = Model()
    before, weights = picture(model), values(model)
    first = fk.fuse(model, only="glu")
    fk.fuse(model)
    fk.revert(model)
    assert_as_before(model, before, weights)
    with pytest.raises(fk.FusekitError, match="nothing is fused"):
        fk.revert(model)
    with pytest.raises(fk.FusekitError):
        first.revert()
    assert_as_before(model, before, weights)


def test_one_fusion_of_one_layer_is_reverted_and_the_others_stay():
    model = Model()
    before, weights = picture(model), values(model)
    x = torch.randn(3, 8)
    want = model(x)
    fused = fk.fuse(model)
    (layer,) = {site.name for site in fused.sites if site.fusion == "glu" and site.name.endswith("1")}
    left = {(site.name, site.fusion) for site in fused.sites} - {(layer, "glu")}
    fk.revert(model, only="glu", layers=layer)
    assert {(site.name, site.fusion) for site in fk.plan(model).applied} == left
    assert [(site.name, site.fusion) for site in fk.plan(model).sites] == [(layer, "glu")]
    torch.testing.assert_close(model(x), want)
    with pytest.raises(fk.FusekitError, match="nothing that was chosen"):
        fk.revert(model, only="glu", layers=layer)
    fk.revert(model, exclude="qkv")
    assert {site.fusion for site in fk.plan(model).applied} == {"qkv"}
    fused.revert()
    assert_as_before(model, before, weights)


def test_applying_twice_and_reverting_twice_are_errors_that_destroy_nothing():
    model = Model()
    x = torch.randn(3, 8)
    want = model(x)
    plan = fk.plan(model)
    fused = plan.apply()
    with pytest.raises(fk.FusekitError, match="applied already"):
        plan.apply()
    torch.testing.assert_close(model(x), want)
    fused.revert()
    with pytest.raises(fk.FusekitError, match="reverted already"):
        fused.revert()
    assert torch.equal(model(x), want)
    with plan.apply():  # the plan itself can be applied again
        torch.testing.assert_close(model(x), want)


def test_forward_put_on_an_instance_afterwards_is_not_destroyed():
    model = Model()
    fused = fk.fuse(model)
    block = model.layers[1]
    own = lambda x: x + 1
    block.forward = own
    x = torch.randn(3, 8)
    fused_outputs = model(x)
    for revert in (fused.revert, lambda: fk.revert(model)):
        with pytest.raises(fk.FusekitError, match=r"layers\.1: .*forward"):
            revert()
        assert block.forward is own
        assert torch.equal(model(x), fused_outputs)
    del block.forward
    fused.revert()
    assert type(block) is Block


def test_class_swapped_by_another_tool_afterwards_is_not_destroyed():
    model = Model()
    x = torch.randn(3, 8)
    want = model(x)
    fused = fk.fuse(model)
    block = model.layers[1]
    ours = type(block)
    block.__class__ = sharded = type("ShardedBlock", (ours,), {})
    torch.testing.assert_close(model(x), want)
    for revert in (fused.revert, lambda: fk.revert(model)):
        with pytest.raises(fk.FusekitError, match=r"layers\.1: its class is now .*ShardedBlock"):
            revert()
        assert type(block) is sharded
        torch.testing.assert_close(model(x), want)
    block.__class__ = ours
    fused.revert()
    assert type(block) is Block and torch.equal(model(x), want)


def test_module_changed_since_the_plan_was_made_is_an_error():
    model = Model()
    before = picture(model)
    plan = fk.plan(model)
    model.layers[1].forward = lambda x: x
    with pytest.raises(fk.FusekitError, match=r"layers\.1: .*plan again"):
        plan.apply()
    del model.layers[1].forward
    assert picture(model) == before
    model.layers[1].gate = nn.Identity()
    before = picture(model)
    with pytest.raises(fk.FusekitError, match=r"layers\.1.*plan again"):
        plan.apply()
    assert picture(model) == before


@pytest.mark.parametrize("change", ["hook", "tie", "dtype"])
def test_state_changed_since_the_plan_was_made_is_honoured(change):
    model = Model(1)
    plan = fk.plan(model)
    block = model.layers[0]
    if change == "hook":
        block.gate.register_forward_hook(lambda module, args, output: output * 2)
    elif change == "tie":
        block.up.weight = block.gate.weight
    else:
        model.double()
    twin = copy.deepcopy(model)
    before = picture(model)
    x = torch.randn(3, 8, dtype=block.up.weight.dtype)
    try:
        with plan.apply():
            torch.testing.assert_close(model(x), twin(x))
    except fk.FusekitError as error:
        assert "layers.0" in str(error)
    assert picture(model) == before
    assert torch.equal(model(x), twin(x))
    if change == "tie":
        assert block.up.weight is block.gate.weight


def test_shared_module_is_fused_once():
    model = Model()
    model.layers[1].attention = model.layers[0].attention
    x = torch.randn(3, 8)
    want = model(x)
    plan = fk.plan(model, only="qkv")
    assert [site.name for site in plan.sites] == ["layers.0.attention"]
    with plan.apply():
        torch.testing.assert_close(model(x), want)


def test_hooks_on_the_rewritten_module_keep_firing():
    model = Model(1)
    seen = []
    model.layers[0].register_forward_hook(lambda *_: seen.append("before"))
    with fk.fuse(model):
        model.layers[0].register_forward_pre_hook(lambda *_: seen.append("after"))
        model(torch.randn(3, 8))
    model(torch.randn(3, 8))
    assert seen == ["after", "before"] * 2


# -- on meta ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["to_empty", "assign", "assign parts"])
def test_fused_on_meta_with_weights_loaded_afterwards(how):
    twin = Model()
    weights = values(twin)
    with torch.device("meta"):
        model = Model()
    fused = fk.fuse(model)
    assert len(fused.sites) == 8
    if how == "to_empty":
        model.to_empty(device="cpu")
        model.load_state_dict(weights)
    elif how == "assign":
        model.load_state_dict(weights, assign=True)
    else:
        for name, value in weights.items():
            path, _, own = name.rpartition(".")
            setattr(model.get_submodule(path), own, nn.Parameter(value))
    x = torch.randn(3, 8)
    torch.testing.assert_close(model(x), twin(x))
    torch.testing.assert_close(model(x), twin(x))
    found = [value for module in model.modules() for value in vars(module).values()]
    merged = [value for value in found if type(value) is storage.MergedLinear]
    assert len(merged) == 6
    if how != "assign parts":
        assert all(value.is_tied() for value in merged)
    with torch.no_grad():
        for one in (model, twin):
            one.layers[0].gate.weight.mul_(2)
    torch.testing.assert_close(model(x), twin(x))
    fused.revert()
    assert torch.equal(model(x), twin(x))


# -- interrupted -------------------------------------------------------------------------------------

ROOMS = {inspect.getsourcefile(room) for room in (apply_room, binding, storage)}


def interrupted_at(action, number, error):
    """Run `action`, raising `error` before its `number`th line in the rooms; how many lines it ran."""
    count = 0

    def trace(frame, event, arg):
        nonlocal count
        if frame.f_code.co_filename not in ROOMS:
            return None
        if event == "line":
            count += 1
            if count == number:
                raise error
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        action()
    finally:
        sys.settrace(before)
    return count


def stopped_everywhere(make_action, error):
    """Stop a new action before its 1st, 2nd, ... line; yields after each, and how many there were."""
    number = 0
    while True:
        number += 1
        action = make_action()
        try:
            interrupted_at(action, number, error)
        except type(error) as raised:
            assert raised is error
            yield number, action
        else:
            assert number > 50
            return


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("a")], ids=["interrupt", "error"])
def test_apply_stopped_at_any_line_leaves_the_model_as_it_was(error):
    model = Model(1)
    plan = fk.plan(model)
    before, weights = picture(model), values(model)
    for _ in stopped_everywhere(lambda: plan.apply, error):
        assert_as_before(model, before, weights)
    assert len(fk.plan(model).applied) == 4


def test_revert_stopped_at_any_line_can_be_done_again():
    model = Model(1)
    plan = fk.plan(model)
    before, weights = picture(model), values(model)
    x = torch.randn(3, 8)
    want = model(x)
    for _, revert in stopped_everywhere(lambda: plan.apply().revert, KeyboardInterrupt()):
        if not revert.__self__.reverted:
            revert()
        assert_as_before(model, before, weights)
        assert torch.equal(model(x), want)


def test_storage_that_cannot_be_allocated_leaves_the_model_as_it_was(monkeypatch):
    model = Model()
    plan = fk.plan(model)
    before, weights = picture(model), values(model)
    original, calls = torch.empty, []

    def failing(*args, **kwargs):
        calls.append(1)
        if len(calls) == 3:
            raise torch.OutOfMemoryError("no memory")
        return original(*args, **kwargs)

    monkeypatch.setattr(torch, "empty", failing)
    with pytest.raises(torch.OutOfMemoryError):
        plan.apply()
    monkeypatch.undo()
    assert_as_before(model, before, weights)


# -- memory -----------------------------------------------------------------------------------------


def test_peak_memory_of_apply_and_revert_is_one_site_more_than_the_model():
    model = Model(layers=4, width=64)
    plan = fk.plan(model)
    site = max(
        sum(
            p.numel() * p.element_size()
            for part in site.parts
            for p in site.module.get_submodule(part).parameters()
        )
        for site in plan.sites
    )
    total = sum(p.numel() * p.element_size() for p in model.parameters())
    weights = values(model)
    # What is already there is freed as its values move: count it as allocated before.
    peak = Peak(model)
    with peak:
        fused = plan.apply()
    assert peak.most <= total + site * 1.05 + 64, (peak.most - total, site)
    assert peak.most > total
    assert peak.now() <= total + 1024
    peak = Peak(model)
    with peak:
        fused.revert()
    assert peak.most <= total + site * 1.05 + 1024
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())


class Peak(TorchDispatchMode):
    """The most bytes that the storages of a model's parameters and of new tensors held together."""

    def __init__(self, model):
        super().__init__()
        self.alive = {}
        for parameter in model.parameters():
            self._add(parameter)
        self.most = self.now()

    def _add(self, tensor):
        storage = tensor.untyped_storage()
        self.alive[storage._cdata] = storage._weak_ref(), storage.nbytes()

    def now(self):
        total = 0
        for key, (weak, size) in list(self.alive.items()):
            if torch.UntypedStorage._expired(weak):
                torch.UntypedStorage._free_weak_ref(weak)
                del self.alive[key]
            else:
                total += size
        return total

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self.now()
                if storage._cdata not in self.alive:
                    self._add(tensor)
                    self.most = max(self.most, self.now())
        return out


def test_what_was_reverted_through_the_model_is_reverted():
    model = Model()
    fused = fk.plan(model).apply()
    fk.revert(model)
    assert fused.reverted
    with pytest.raises(fk.FusekitError, match="reverted already"):
        fused.revert()


def test_strict_refuses_what_is_not_whole_and_changes_nothing():
    model = Model(3)
    for layer in model.layers[:2]:
        layer.attention.q.register_forward_hook(lambda *_: None)
    before, weights = picture(model), values(model)
    with pytest.raises(fk.FusekitError) as error:
        fk.fuse(model, strict=True)
    lines = str(error.value).splitlines()
    assert lines[0] == "strict: 2 places that look fusable in Model were refused, so nothing was fused:"
    assert lines[1].startswith("  2 x [hooked] layers.0.attention: cannot fuse ")
    assert "(test_apply.py:" in lines[1]
    assert (
        len(lines) == 3 and "exclude=" in lines[2] and "layers=" in lines[2] and "without strict" in lines[2]
    )
    assert_as_before(model, before, weights)
    assert len(fk.fuse(model).sites) == len(fk.plan(Model(3)).sites) - 2


def test_strict_fuses_what_is_whole_and_passes_the_options_on():
    model = Model(2)
    model.layers[0].attention.q.register_forward_hook(lambda *_: None)
    with fk.fuse(model, strict=True, layers="layers.1") as fused:
        assert {site.name.split(".")[1] for site in fused.sites} == {"1"}
    with fk.fuse(model, strict=True, only="rms_norm") as fused:
        assert [site.name for site in fused.sites] == ["layers.0.norm", "layers.1.norm"]
    with pytest.raises(fk.FusekitError, match=r"1 place that looks fusable in Model was refused"):
        fk.fuse(model, strict=True, exclude="rms_norm")


def test_a_model_where_nothing_is_found_gives_a_fused_of_no_site():
    fused = fk.fuse(nn.Sequential(nn.Linear(4, 4)), strict=True)
    assert fused.sites == () and not fused.reverted
    fused.revert()
