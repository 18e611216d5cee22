"""Field reports of kinds 6 to 65 loading, copies, patches (all: test_field_reports.py)."""

import copy
import io
import pickle
import types

import pytest
import torch
import torch.nn as nn

import fusekit as fk
from tests.adversarial.reports import PARTS, Attention, assert_equal, pair, parts, refused

# -- 6: weights loaded afterwards ------------------------------------------------------------------


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("assign", [True, False])
def test_06_weights_loaded_afterwards_are_those_that_run(strict, assign):
    module, twin = pair()
    other = Attention().state_dict()
    for one in (module, twin):
        found = one.load_state_dict(copy.deepcopy(other), strict=strict, assign=assign)
        assert found.missing_keys == found.unexpected_keys == []
    assert_equal(module, twin)


def test_06_weights_loaded_by_the_caller_tensor_by_tensor():
    module, twin = pair()
    other = Attention().state_dict()
    for one in (module, twin):
        with torch.no_grad():
            for name, parameter in one.named_parameters():
                parameter.copy_(other[name])
    assert_equal(module, twin)


# -- 14: copies ------------------------------------------------------------------------------------


def by_torch(module):
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, copy.copy, lambda one: pickle.loads(pickle.dumps(one)), by_torch]
)
def test_14_a_copy_computes_with_its_own_weights(copied):
    module, _ = pair()
    other = copied(module)
    assert_equal(other, module)
    if copied is not copy.copy:  # which shares them
        before = copy.deepcopy(module)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.mul_(3)
        twin = Attention()
        twin.load_state_dict(other.state_dict())
        assert_equal(other, twin)
        assert_equal(module, before)


# -- 16: a part that is used elsewhere, too --------------------------------------------------------


class Outside(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = Attention()

    def forward(self, x):
        q, k = self.attention(x)
        return q, k, self.attention.q_proj(k @ self.attention.k_proj.weight)


def test_16_a_fused_part_may_be_called_from_elsewhere():
    model = Outside()
    twin = copy.deepcopy(model)
    assert [(site.name, site.parts) for site in fk.fuse(model).sites] == [("attention", PARTS[0])]
    assert_equal(model, twin)


def test_16_a_module_in_two_places_is_refused():
    model = nn.ModuleList([Attention(), Attention()])
    model[1].q_proj = model[0].q_proj
    plan = fk.plan(model)
    assert plan.sites == () and [no.reason for no in plan.refusals] == ["tied", "tied"]


# -- 34: another self, and a wrapper that hides attributes -----------------------------------------


class Wrapper(nn.Module):
    """Forwards calls, and no attribute."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, *args, **options):
        return self.inner(*args, **options)


def test_34_parts_and_modules_wrapped_afterwards_run():
    module, twin = pair()
    for one in (module, twin):
        one.k_proj = Wrapper(one.k_proj)
    assert_equal(module, twin)
    module, twin = pair()
    assert_equal(Wrapper(module), Wrapper(twin))


class Forwards:
    """Stands in for a module, and looks up in it what it lacks."""

    def __init__(self, module):
        self.module = module

    def __getattr__(self, name):
        return getattr(self.module, name)


def test_34_a_forward_is_called_with_another_self():
    module, twin = pair()
    x = torch.randn(2, 8)
    swapped = types.SimpleNamespace(q_proj=module.k_proj, k_proj=module.q_proj)
    torch.testing.assert_close(Attention.forward(swapped, x), twin(x)[::-1])
    torch.testing.assert_close(type(module).forward(Forwards(module), x), twin(x))


def test_34_a_wrapped_part_is_not_fused():
    module = Attention()
    module.k_proj = Wrapper(module.k_proj)
    assert fk.plan(module).sites == ()
    x = torch.randn(2, 8)
    want = module(x)
    fk.fuse(module)
    torch.testing.assert_close(module(x), want)


# -- 35 to 37: saving, and taking back -------------------------------------------------------------


def test_35_a_state_dict_goes_both_ways():
    module, twin = pair()
    assert list(module.state_dict()) == list(twin.state_dict())
    assert list(dict(module.named_parameters())) == list(dict(twin.named_parameters()))
    fresh = Attention()
    fresh.load_state_dict(module.state_dict())
    assert_equal(module, fresh)


def test_36_what_was_learned_while_fused_stays():
    module, twin = pair()
    for one in (module, twin):
        with torch.no_grad():
            one.q_proj.weight.add_(1)
            one.k_proj.bias.mul_(2)
    fk.revert(module)
    assert_equal(module, twin)
    assert "merged" not in fk.source(module).text
    for _ in range(2):  # and again
        fused = fk.fuse(module)
        assert parts(fused) == PARTS
        assert_equal(module, twin)
        fused.revert()
        assert_equal(module, twin)
    assert type(module) is Attention and vars(module).keys() == vars(twin).keys()


def test_36_fusing_twice_changes_nothing():
    module, twin = pair()
    kind = type(module)
    assert fk.fuse(module).sites == () and type(module) is kind
    assert_equal(module, twin)


# -- 38 to 40: other instances, other patches ------------------------------------------------------


def test_38_no_other_instance_changes():
    before, model, twin = Attention.forward, Attention(), Attention()
    fk.fuse(model)
    assert Attention.forward is before and type(twin) is Attention and type(Attention()) is Attention
    assert isinstance(model, Attention) and type(model).__name__ == "Attention"


class PutsItsOwn(Attention):
    def __init__(self):
        super().__init__()
        self.forward = self.fast

    def fast(self, x):
        return self.q_proj(x) * 3, self.k_proj(x)


def test_39_a_forward_on_the_instance_stays_and_is_what_runs():
    module, x = PutsItsOwn(), torch.randn(2, 8)
    mine, want = module.forward, module(x)
    plan = fk.plan(module)
    assert plan.sites or [no.reason for no in plan.refusals] == ["instance-forward"]
    with plan.apply():
        torch.testing.assert_close(module(x), want)
    assert module.__dict__["forward"] is mine
    del module.forward
    assert parts(fk.plan(module)) == PARTS


def tripled(self, x):
    return self.q_proj(x) * 3, self.k_proj(x)


def test_40_a_forward_put_on_the_instance_afterwards_is_what_runs():
    module, twin = pair()
    for one in (module, twin):
        one.forward = types.MethodType(tripled, one)
    assert_equal(module, twin)


@pytest.mark.parametrize("compiled", [False, True])
def test_40_a_forward_put_on_the_class_afterwards_is_what_runs_until_it_is_taken_off(compiled):
    class Patched(Attention):
        def forward(self, x):
            return self.q_proj(x), self.k_proj(x)

    before, module = Patched.forward, Patched()
    twin = copy.deepcopy(module)
    assert parts(fk.fuse(module)) == PARTS
    if compiled:
        torch._dynamo.reset()
        module.compile(backend="eager", fullgraph=True)
    for forward in (before, tripled, before):
        Patched.forward = forward
        assert_equal(module, twin)
        assert ("merged" in fk.source(module).text) is (forward is before)
    Patched.forward = tripled
    fk.revert(module)
    assert_equal(module, twin)


def test_40_a_norm_whose_class_is_patched_afterwards_runs_the_patch():
    class Patched(FastNorm):
        def forward(self, x):
            return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))

    model, x = nn.ModuleList([Patched(8), Patched(8)]), torch.randn(2, 8)
    assert len(fk.fuse(model).sites) == 2
    Patched.forward = lambda self, x: x * 7
    for norm in model:
        torch.testing.assert_close(norm(x), x * 7)


def test_40_a_forward_that_another_tool_wraps_afterwards_is_called_through():
    module, twin = pair()
    for one in (module, twin):
        inner = one.forward
        one.forward = lambda x, inner=inner: tuple(2 * result for result in inner(x))
    assert_equal(module, twin)


# -- 43: what stops other tracers ------------------------------------------------------------------


class Splat(Attention):
    def forward(self, x):
        q, k = self.q_proj(x), self.k_proj(x)
        return q.view(*x.shape[:-1], -1, 2), k.view(*x.shape[:-1], -1, 2)


class Length(Attention):
    def forward(self, x):
        return self.q_proj(x) * len(x), self.k_proj(x)


class Keywords(Attention):
    def forward(self, x, **options):
        x = x * 2 if "double" in options else x
        return self.q_proj(x) * 1, self.k_proj(x) * 1


class StoresInADict(Attention):
    def forward(self, x, cache=None):
        cache = {} if cache is None else cache
        q, k = self.q_proj(x), self.k_proj(x)
        cache["k"] = k
        return q * 1, cache["k"]


@pytest.mark.parametrize("cls", [Splat, Length, Keywords, StoresInADict])
def test_43_what_stops_other_tracers_fuses(cls):
    module = cls()
    twin = copy.deepcopy(module)
    assert parts(fk.fuse(module)) == PARTS
    assert_equal(module, twin)


def test_43_keywords_that_no_trace_saw_take_their_way():
    module = Keywords()
    twin = copy.deepcopy(module)
    fk.fuse(module)
    x = torch.randn(2, 8)
    torch.testing.assert_close(module(x, double=True), twin(x, double=True))


# -- 49 to 51: optimizers, averages, tied and offloaded weights ------------------------------------


def test_49_an_optimizer_made_before_moves_what_runs():
    module = Attention()
    twin = copy.deepcopy(module)
    optimizers = [torch.optim.AdamW(one.parameters(), 0.1) for one in (module, twin)]
    fk.fuse(module)
    for _ in range(3):
        x = torch.randn(2, 8)
        for one, optimizer in zip((module, twin), optimizers, strict=True):
            optimizer.zero_grad()
            sum(result.square().sum() for result in one(x)).backward()
            optimizer.step()
        torch.testing.assert_close(module(x), twin(x))


def test_49_an_average_of_the_weights_follows_and_is_put_back():
    module, twin = pair()
    averages = [torch.optim.swa_utils.AveragedModel(one) for one in (module, twin)]
    for one, average in zip((module, twin), averages, strict=True):
        with torch.no_grad():
            for parameter in one.parameters():
                parameter.add_(1)
        average.update_parameters(one)
        average.update_parameters(one)
    x = torch.randn(2, 8)
    torch.testing.assert_close(averages[0](x), averages[1](x))
    torch.testing.assert_close(module(x), twin(x))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.attention = nn.Embedding(8, 8), Attention()
        self.attention.q_proj.weight = self.embed.weight

    def forward(self, ids):
        return self.attention(self.embed(ids))


def test_50_a_tied_weight_stays_tied():
    model = Tied()
    plan = fk.plan(model)
    assert plan.sites == () and [no.reason for no in plan.refusals] == ["tied"]
    plan.apply()
    assert model.attention.q_proj.weight is model.embed.weight
    model.attention.q_proj.weight = nn.Parameter(torch.randn(8, 8))
    assert [site.parts for site in fk.plan(model).sites] == PARTS


def test_50_a_weight_tied_afterwards_stays_tied():
    model = Tied()
    model.attention.q_proj.weight = nn.Parameter(torch.randn(8, 8))
    twin = copy.deepcopy(model)
    fk.fuse(model)
    ids = torch.tensor([1, 2])
    for one in (model, twin):
        one.attention.q_proj.weight = one.embed.weight
        with torch.no_grad():
            one.embed.weight.mul_(2)
    torch.testing.assert_close(model(ids), twin(ids))


def offload(part):
    """What ZeRO, FSDP and offloading do: the weight is there only while its module runs."""
    part.full = part.weight.data
    part.weight.data = torch.empty(0)

    def bring(module, _):
        module.weight.data = module.full

    def take(module, *_):
        module.weight.data = torch.empty(0)

    part.register_forward_pre_hook(bring)
    part.register_forward_hook(take)


def test_51_weights_that_come_in_with_the_call_are_refused():
    module = Attention()
    offload(module.q_proj)
    offload(module.k_proj)
    refused(module, "hooked", "offloaded", "layout", "quantized")


def test_51_weights_that_a_parent_brings_in_are_refused_while_they_are_away():
    module = Attention()
    for part in (module.q_proj, module.k_proj):
        part.weight.data = torch.empty(0)
    plan = fk.plan(module)
    assert plan.sites == () and len(plan.refusals) == 1


def test_51_weights_offloaded_afterwards_come_in_with_the_call():
    module, twin = pair()
    for one in (module, twin):
        offload(one.q_proj)
        offload(one.k_proj)
    x = torch.randn(2, 8)
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(module(x), twin(x))


def test_51_a_fused_model_on_meta_is_filled_afterwards():
    with torch.device("meta"):
        module = Attention()
    assert parts(fk.fuse(module)) == PARTS
    twin = Attention()
    module.to_empty(device="cpu")
    module.load_state_dict(twin.state_dict())
    assert_equal(module, twin)


# -- 61: training ----------------------------------------------------------------------------------


def test_61_checkpointing_in_training_gives_the_same_gradients():
    module, twin = pair()
    x, found = torch.randn(2, 8), []
    for one in (module.train(), twin.train()):
        leaf = x.clone().requires_grad_()
        q, k = torch.utils.checkpoint.checkpoint(one, leaf, use_reentrant=False)
        (q.square().sum() + k.square().sum()).backward()
        found.append([leaf.grad, *(p.grad for p in one.parameters())])
    torch.testing.assert_close(*found)


class Drops(Attention):
    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        q = self.q_proj(self.drop(x))
        return q, self.k_proj(self.drop(x))


def test_61_what_is_one_value_only_in_eval_is_never_wrong_in_training():
    module = Drops()
    twin = copy.deepcopy(module)
    fk.fuse(module.eval())
    x, results = torch.randn(64, 8), []
    for one in (module.train(), twin.train()):
        torch.manual_seed(0)
        results.append(one(x))
    torch.testing.assert_close(*results)


# -- 62, 63, 65: names, bytes, attributes ----------------------------------------------------------


def test_62_tools_that_look_for_names_find_the_parts_that_run():
    model = nn.ModuleDict({"self_attn": Attention(), "cross_attn": Attention()})
    twin = copy.deepcopy(model)
    names = [name for name, _ in model.named_modules()]
    fk.fuse(model)
    assert [name for name, _ in model.named_modules()] == names
    for one in (model, twin):
        for name, module in list(one.named_modules()):
            if name.endswith(("q_proj", "k_proj")):
                module.weight.data = (module.weight.data * 4).round() / 4  # as a quantiser writes
                module.register_forward_hook(lambda part, given, result: result + 1)
    x = torch.randn(2, 8)
    for key in model:
        torch.testing.assert_close(model[key](x), twin[key](x))


def test_63_no_weight_is_held_twice():
    module = Attention()
    weights = sum(p.numel() for p in module.parameters())
    fk.fuse(module)
    assert sum(p.numel() for p in module.parameters()) == weights
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in module.parameters()}
    assert len(storages) == 2 and sum(storages.values()) == 4 * weights
    assert not any(isinstance(one, nn.Parameter) for one in vars(module).values())


class FastNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight, self.eps, self.row_mode = nn.Parameter(torch.rand(width)), 1e-6, None

    def forward(self, x):
        h = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * h

    def extra_repr(self):
        return f"row_mode={self.row_mode}"


def test_65_what_is_fused_shows_itself_as_before():
    model = nn.ModuleList([FastNorm(8), Attention()])
    twin, shown = copy.deepcopy(model), repr(model)
    fused = fk.fuse(model)
    assert len(fused.sites) == 2 and repr(model) == shown
    assert {name for name in dir(twin[0])} <= set(dir(model[0]))


def test_65_a_forward_bound_to_a_module_of_another_class_is_left_as_it_is():
    module, x = nn.RMSNorm(8, eps=1e-6), torch.randn(2, 8)
    module.forward = types.MethodType(FastNorm.forward, module)
    want = module(x)
    plan = fk.plan(module)
    assert plan.sites == ()
    plan.apply()
    assert module.forward.__func__ is FastNorm.forward
    torch.testing.assert_close(module(x), want)
