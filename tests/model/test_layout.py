"""What may break the layout of merged weights: each time the output is the unfused module's, never stale."""

import copy
import gc
import pickle
import subprocess
import sys
import textwrap
import types
import weakref

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.utils import parameters_to_vector, parametrizations, prune, stateless, vector_to_parameters

import fusekit as fk
from fusekit.model.storage import MergedLinear


class Attention(nn.Module):
    """Grouped query attention without frills; only `k` has no bias."""

    def __init__(self):
        super().__init__()
        self.q = nn.Linear(8, 8)
        self.k = nn.Linear(8, 4, bias=False)
        self.v = nn.Linear(8, 4)
        self.o = nn.Linear(8, 8)

    def forward(self, x):
        q = self.q(x).unflatten(-1, (2, 4)).transpose(-2, -3)
        k = self.k(x).unflatten(-1, (1, 4)).transpose(-2, -3)
        v = self.v(x).unflatten(-1, (1, 4)).transpose(-2, -3)
        y = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        return self.o(y.transpose(-2, -3).flatten(-2))


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(8, 12)
        self.up = nn.Linear(8, 12)
        self.act = nn.SiLU()
        self.down = nn.Linear(12, 8)

    def forward(self, x):
        return self.down(self.act(self.gate(x)) * self.up(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = Attention()
        self.mlp = Gated()

    def forward(self, x):
        x = x + self.attention(x)
        return x + self.mlp(x)


@pytest.fixture
def pair():
    """(a fused model, its unfused twin)."""
    model = Model()
    twin = copy.deepcopy(model)
    fused = fk.fuse(model)
    assert sorted(site.fusion for site in fused.sites) == ["glu", "qkv"]
    return model, twin


def storages(model):
    return [
        value for module in model.modules() for value in vars(module).values() if type(value) is MergedLinear
    ]


def is_fast(model):
    """Whether each storage of `model` multiplies once."""
    found = storages(model)
    assert len(found) == 2
    return all(storage.is_tied() for storage in found)


def assert_equal(model, twin, x=None, fast=None):
    x = torch.randn(2, 5, 8) if x is None else x
    x = x.to(next(iter(twin.parameters())).dtype)
    torch.testing.assert_close(model(x), twin(x))
    for (name, own), (_, other) in zip(model.state_dict().items(), twin.state_dict().items(), strict=True):
        assert torch.equal(own, other), name
    if fast is not None:
        assert is_fast(model) is fast


def test_fused_model_multiplies_once(pair):
    model, twin = pair
    assert_equal(model, twin, fast=True)
    calls = []
    original = F.linear
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, "linear", lambda *args: calls.append(1) or original(*args))
        model(torch.randn(2, 5, 8))
    assert len(calls) == 4  # qkv, o, gate and up, down


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.to(torch.bfloat16),
        lambda m: m.half().float(),
        lambda m: m.double(),
        lambda m: m.to("cpu"),
        lambda m: m.requires_grad_(False),
        lambda m: m.eval(),
        lambda m: m.share_memory(),
        lambda m: vector_to_parameters(parameters_to_vector(m.parameters()) * 2, m.parameters()),
        lambda m: m.apply(lambda part: type(part) is nn.Linear and nn.init.constant_(part.weight, 0.1)),
        lambda m: m.load_state_dict({name: value * 3 for name, value in m.state_dict().items()}),
        lambda m: m.load_state_dict(
            {name: value.clone() * 3 for name, value in m.state_dict().items()}, assign=True
        ),
        lambda m: m.load_state_dict(
            {name: value.double() for name, value in m.state_dict().items()}, assign=True
        ),
    ],
    ids="bfloat16 half double cpu requires_grad eval share vector init load assign assign-double".split(),
)
def test_change_of_the_whole_model_is_seen_and_the_fast_path_taken_again(pair, change):
    model, twin = pair
    change(model)
    change(twin)
    assert_equal(model, twin)
    # vector_to_parameters leaves views of a vector that belongs to somebody else
    is_vector = any(parameter.untyped_storage().nbytes() > 1000 for parameter in twin.parameters())
    assert is_fast(model) is not is_vector


def test_meta_and_back(pair):
    model, twin = pair
    weights = {name: value.clone() for name, value in twin.state_dict().items()}
    model.to("meta")
    assert model(torch.randn(2, 5, 8, device="meta")).shape == (2, 5, 8)
    model.to_empty(device="cpu")
    model.load_state_dict(weights)
    assert_equal(model, twin, fast=True)


def test_data_of_a_part_replaced(pair):
    model, twin = pair
    for one in (model, twin):
        one.attention.k.weight.data = torch.ones(4, 8)
    assert_equal(model, twin, fast=False)
    model.to(torch.float32)
    assert_equal(model, twin, fast=True)


def test_data_of_a_part_cut_to_fewer_rows_at_the_same_address(pair):
    model, twin = pair
    for one in (model.mlp, twin.mlp):
        for part in (one.gate, one.up):
            part.weight.data = part.weight.data[:6]
            part.bias.data = part.bias.data[:6]
        one.down.weight.data = one.down.weight.data[:, :6].contiguous()
    assert_equal(model, twin)


def test_one_part_converted_alone(pair):
    model, twin = pair
    for one in (model, twin):
        one.attention.k.double()
    for one in (model, twin):
        with pytest.raises(RuntimeError):
            one(torch.randn(2, 5, 8))


def test_one_part_loaded_alone(pair):
    model, twin = pair
    for assign in (False, True):
        state = {name: torch.randn_like(value) for name, value in twin.mlp.up.state_dict().items()}
        for one in (model, twin):
            one.mlp.up.load_state_dict(copy.deepcopy(state), assign=assign)
        assert_equal(model, twin)


def test_weight_parameter_replaced(pair):
    model, twin = pair
    weight = torch.randn(4, 8)
    for one in (model, twin):
        one.attention.v.weight = nn.Parameter(weight.clone())
        one.mlp.gate.bias = None
    assert_equal(model, twin, fast=False)


def test_weight_becomes_a_plain_attribute(pair):
    model, twin = pair
    for one in (model, twin):
        weight = one.mlp.up.weight.detach() * 2
        del one.mlp.up.weight
        one.mlp.up.weight = weight
    assert_equal(model, twin)


class Adapter(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base_layer = base
        self.delta = nn.Linear(base.in_features, base.out_features)

    def forward(self, x):
        return self.base_layer(x) + F.dropout(self.delta(x), 0.5)


def test_adapters_put_in_afterwards_are_used_in_the_order_of_the_forward(pair):
    model, twin = pair
    for one in (model, twin):
        torch.manual_seed(3)
        one.attention.v = Adapter(one.attention.v)
        one.attention.q = Adapter(one.attention.q)
    x = torch.randn(2, 5, 8)
    results = []
    for one in (model, twin):
        torch.manual_seed(4)  # both draw the same random numbers
        results.append(one(x))
    torch.testing.assert_close(*results)
    fk.revert(model)
    assert type(model.attention.q) is Adapter
    torch.manual_seed(4)
    torch.testing.assert_close(model(x), results[1])


def test_order_of_calls_is_the_forwards_and_not_that_of_the_rows():
    class Crossed(Attention):
        def forward(self, x):
            v = self.v(x).unflatten(-1, (1, 4)).transpose(-2, -3)
            q = self.q(x).unflatten(-1, (2, 4)).transpose(-2, -3)
            k = self.k(x).unflatten(-1, (1, 4)).transpose(-2, -3)
            return F.scaled_dot_product_attention(q, k, v, enable_gqa=True) * 1

    module = Crossed()
    (site,) = fk.plan(module).sites
    assert site.parts == ("q", "k", "v") and site.match.order == ("v", "q", "k")
    called = []
    fk.fuse(module)
    for name in "qkv":
        getattr(module, name).register_forward_hook(lambda *_, name=name: called.append(name))
    module(torch.randn(2, 5, 8))
    assert called == ["v", "q", "k"]


class Subclass(nn.Linear):
    def forward(self, x):
        return super().forward(x) * 2


def test_subclass_put_in_afterwards(pair):
    model, twin = pair
    part = Subclass(8, 12)
    model.mlp.up, twin.mlp.up = part, part
    assert_equal(model, twin, fast=False)


def test_container_of_a_part_replaced():
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Attention()

        def forward(self, x):
            return self.inner.q(x) * 1, self.inner.k(x) * 1

    model = Outer()
    fk.fuse(model)
    model.inner = Attention()
    x = torch.randn(2, 8)
    torch.testing.assert_close(model(x), (model.inner.q(x), model.inner.k(x)))


@pytest.mark.parametrize("kind", ["forward", "pre", "backward", "backward_pre"])
def test_hook_put_on_a_part_afterwards_is_called(pair, kind):
    model, twin = pair
    calls = {id(model): 0, id(twin): 0}
    handles = []
    for one in (model, twin):

        def hook(*_, one=one):
            calls[id(one)] += 1

        register = {
            "forward": "register_forward_hook",
            "pre": "register_forward_pre_hook",
            "backward": "register_full_backward_hook",
            "backward_pre": "register_full_backward_pre_hook",
        }[kind]
        handles.append(getattr(one.attention.k, register)(hook))
    x = torch.randn(2, 5, 8)
    for one in (model, twin):
        one(x).sum().backward()
    assert calls[id(model)] == calls[id(twin)] == 1
    assert_equal(model, twin, fast=False)
    for handle in handles:
        handle.remove()
    assert_equal(model, twin, fast=True)


def test_hook_that_changes_an_output(pair):
    model, twin = pair
    for one in (model, twin):
        one.mlp.up.register_forward_hook(lambda module, args, output: output * 2)
    assert_equal(model, twin)


def test_global_hooks_see_every_part(pair):
    model, twin = pair
    seen = []
    handle = nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(type(module)))
    try:
        model(torch.randn(2, 5, 8))
    finally:
        handle.remove()
    assert seen.count(nn.Linear) == 7
    assert_equal(model, twin, fast=True)


def test_hooks_while_converting_leave_no_shared_storage_behind(pair):
    model, twin = pair
    handle = model.attention.q.register_forward_hook(lambda *_: None)
    model.half().float()
    twin.half().float()
    assert_equal(model, twin)
    handle.remove()
    assert_equal(model, twin)
    fk.revert(model)
    assert_equal(model, twin)
    addresses = [parameter.untyped_storage().data_ptr() for parameter in model.parameters()]
    assert len(set(addresses)) == len(addresses)


@pytest.mark.parametrize(
    "change",
    [
        parametrizations.weight_norm,
        parametrizations.spectral_norm,
        lambda part: prune.l1_unstructured(part, "weight", 10),
        lambda part: nn.utils.weight_norm(part),
    ],
    ids=["weight_norm", "spectral_norm", "prune", "old weight_norm"],
)
@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_weight_computed_by_another_tool_afterwards(pair, change):
    model, twin = pair
    for one in (model, twin):
        torch.manual_seed(5)
        change(one.mlp.gate)
        one.eval()
    x = torch.randn(2, 5, 8)
    torch.testing.assert_close(model(x), twin(x))
    for one in (model, twin):
        with torch.no_grad():
            for parameter in one.mlp.gate.parameters():
                parameter.mul_(2)
    torch.testing.assert_close(model(x), twin(x))


def test_linear_forward_replaced_for_the_whole_process(pair, monkeypatch):
    model, twin = pair
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: F.linear(x, self.weight * 2, self.bias))
    assert_equal(model, twin, fast=False)


# -- copies ----------------------------------------------------------------------------------------


def test_deep_copy_is_fused_and_computes_with_its_own_weights(pair):
    model, twin = pair
    made = copy.deepcopy(model)
    with torch.no_grad():
        model.attention.q.weight.zero_()
    assert_equal(made, twin, fast=True)
    fk.revert(made)
    assert_equal(made, twin)
    assert [type(module) for module in made.modules()] == [type(module) for module in twin.modules()]


@pytest.mark.parametrize("path", ["attention", "attention.q", "mlp"])
def test_deep_copy_of_a_submodule_alone(pair, path):
    model, twin = pair
    made, other = copy.deepcopy(model.get_submodule(path)), twin.get_submodule(path)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    x = torch.randn(2, 5, 8)
    torch.testing.assert_close(made(x), other(x))
    if path == "attention.q":
        assert made.weight.untyped_storage().nbytes() == 8 * 8 * 4


def test_deep_copy_of_a_class_that_copies_itself():
    class Own(Gated):
        def __deepcopy__(self, memo):
            made = type(self).__new__(type(self))
            made.__dict__.update(copy.deepcopy(self.__dict__, memo))
            made.copied = True
            return made

    module = Own()
    fk.fuse(module)
    made = copy.deepcopy(module)
    assert made.copied
    x = torch.randn(2, 8)
    torch.testing.assert_close(made(x), module(x))
    with torch.no_grad():
        module.up.weight.zero_()
    assert not torch.equal(made(x), module(x))


def test_shallow_copy_is_the_plain_class_with_the_same_parts(pair):
    model, twin = pair
    made = copy.copy(model.attention)
    assert type(made) is Attention and made.q is model.attention.q
    x = torch.randn(2, 5, 8)
    torch.testing.assert_close(made(x), twin.attention(x))


def test_replica_for_data_parallel_uses_its_own_parts(pair):
    model, _ = pair
    replica = model.attention._replicate_for_data_parallel()
    other = Attention()
    replica._modules = dict(other._modules)
    x = torch.randn(2, 5, 8)
    torch.testing.assert_close(replica(x), other(x))


def test_pickle_is_of_the_module_as_it_was(pair, tmp_path):
    model, twin = pair
    made = pickle.loads(pickle.dumps(model))
    assert type(made.attention) is Attention
    assert [list(vars(m)) for m in made.modules()] == [list(vars(m)) for m in twin.modules()]
    assert_equal(made, twin)
    torch.save(model, tmp_path / "model.pt")
    assert_equal(torch.load(tmp_path / "model.pt", weights_only=False), twin)
    torch.save(model.state_dict(), tmp_path / "state.pt")
    twin.load_state_dict(torch.load(tmp_path / "state.pt"))
    assert_equal(model, twin, fast=True)


def test_saved_model_opens_where_fusekit_is_not_installed(tmp_path):
    (tmp_path / "plain_module.py").write_text(
        textwrap.dedent(
            """
            import torch.nn as nn

            class Pair(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.q = nn.Linear(4, 4)
                    self.k = nn.Linear(4, 4)

                def forward(self, x):
                    return self.q(x) + self.k(x)
            """
        )
    )
    sys.path.insert(0, str(tmp_path))
    try:
        import plain_module
    finally:
        sys.path.remove(str(tmp_path))
    module, x = plain_module.Pair(), torch.randn(2, 4)
    want = module(x)
    assert fk.fuse(module).sites
    torch.save((module, x, want), tmp_path / "saved.pt")
    script = (
        "import sys; sys.modules['fusekit'] = None; import torch; "
        "m, x, want = torch.load('saved.pt', weights_only=False); "
        "torch.testing.assert_close(m(x), want); assert type(m).forward.__code__.co_filename.endswith('.py')"
    )
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path, check=True, timeout=120)
    del sys.modules["plain_module"]


# -- other parameters for one call -------------------------------------------------------------------


def test_functional_call_with_other_parameters(pair):
    model, twin = pair
    x = torch.randn(2, 5, 8)
    other = {name: torch.randn_like(value) for name, value in twin.named_parameters()}
    want = torch.func.functional_call(twin, other, (x,))
    torch.testing.assert_close(torch.func.functional_call(model, other, (x,)), want)
    with pytest.warns(FutureWarning):
        torch.testing.assert_close(stateless.functional_call(model, other, (x,)), want)
    assert_equal(model, twin, fast=True)


def test_functorch_and_forward_mode_give_the_same_derivatives(pair):
    model, twin = (one.mlp for one in pair)  # attention kernels have no forward mode of their own
    x, t = torch.randn(2, 5, 8), torch.randn(2, 5, 8)

    def derivatives(one):
        loss = lambda x: one(x).square().sum()
        parameters = dict(one.named_parameters())
        of_parameters = torch.func.grad(lambda p: torch.func.functional_call(one, p, (x,)).sum())(parameters)
        return (
            torch.func.grad(loss)(x),
            torch.func.jvp(one, (x,), (t,)),
            torch.func.vmap(one)(x),
            list(of_parameters.values()),
        )

    torch.testing.assert_close(derivatives(model), derivatives(twin))
    import torch.autograd.forward_ad as forward_ad

    with forward_ad.dual_level():
        tangents = [forward_ad.unpack_dual(one(forward_ad.make_dual(x, t))).tangent for one in (model, twin)]
    torch.testing.assert_close(*tangents)


def test_symbolic_trace_keeps_the_parts_as_leaves():
    class Two(Attention):
        def forward(self, x):
            return self.q(x) * 2, self.v(x) * 2

    module = Two()
    twin = copy.deepcopy(module)
    fk.fuse(module)
    gm = torch.fx.symbolic_trace(module)
    x = torch.randn(2, 8)
    for one in (module, twin):
        with torch.no_grad():
            one.v.weight.fill_(2)
    torch.testing.assert_close(gm(x), twin(x))


def test_laid_out_in_inference_mode_it_can_still_be_trained(pair):
    model, twin = pair
    state = {name: value.clone() for name, value in twin.state_dict().items()}
    model.load_state_dict(state, assign=True)
    with torch.inference_mode():
        model(torch.randn(2, 5, 8))
    model(torch.randn(2, 5, 8)).sum().backward()
    assert_equal(model, twin, fast=True)


def test_merged_weight_is_freed_with_its_model_without_waiting_for_the_collector():
    module = Gated()
    fk.fuse(module)
    whole = weakref.ref(storages(module)[0].weight)
    gc.collect()
    gc.disable()
    try:
        del module
        assert whole() is None
    finally:
        gc.enable()


def test_the_instance_holds_nothing_but_the_storage(pair):
    model, twin = pair
    for own, other in zip(model.modules(), twin.modules(), strict=True):
        added = set(vars(own)) - set(vars(other))
        assert {type(vars(own)[name]) for name in added} <= {MergedLinear}
        assert not isinstance(own, types.ModuleType)


def test_part_that_is_gone_breaks_only_what_it_broke_before(pair):
    model, twin = pair
    for one in (model, twin):
        del one.attention.v
        one.half().float()
        with pytest.raises(AttributeError):
            one(torch.randn(2, 5, 8))
    x = torch.randn(2, 8)
    torch.testing.assert_close(model.mlp(x), twin.mlp(x))
    fk.revert(model)
    assert list(model.state_dict()) == list(twin.state_dict())
    model.attention.v = twin.attention.v = nn.Linear(8, 4)
    assert_equal(model, twin, fast=None)


def test_plan_of_a_fused_module_whose_class_another_tool_subclassed(pair):
    model, twin = pair
    model.attention.__class__ = type("Sharded", (type(model.attention),), {})
    plan = fk.plan(model)
    assert "glu" in [site.fusion for site in plan.applied]
    assert not [site for site in plan.sites if site.name == "attention"]
    assert_equal(model, twin)


@pytest.mark.parametrize("flag", ["swap_module_params", "overwrite_module_params"])
def test_conversion_by_the_other_ways_of_torch(pair, flag):
    model, twin = pair
    switch = getattr(torch.__future__, f"set_{flag}_on_conversion")
    switch(True)
    try:
        for one in (model, twin):
            one.double()
        assert_equal(model, twin, fast=True)
        state = {name: torch.randn_like(value) for name, value in twin.state_dict().items()}
        for one in (model, twin):
            one.load_state_dict(copy.deepcopy(state))
        assert_equal(model, twin)
    finally:
        switch(False)


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_jit_trace(pair, grad):
    model, twin = pair
    x = torch.randn(2, 5, 8)
    with torch.set_grad_enabled(grad):
        traced = torch.jit.trace(model, x)
    other = torch.randn(2, 5, 8)
    torch.testing.assert_close(traced(other), twin(other))


def test_adapter_merged_into_the_weight_and_taken_off_again(pair):
    model, twin = pair
    delta = torch.randn(8, 8)
    for one in (model, twin):
        base = one.attention.q
        one.attention.q = Adapter(base)
        base.weight.data += delta
        one.attention.q = base
    assert_equal(model, twin, fast=True)


def test_average_of_weights(pair):
    model, twin = pair
    averaged = [torch.optim.swa_utils.AveragedModel(one) for one in (model, twin)]
    for _ in range(2):
        with torch.no_grad():
            for one in (model, twin):
                for parameter in one.parameters():
                    parameter.mul_(1.5)
        for own, one in zip(averaged, (model, twin), strict=True):
            own.update_parameters(one)
    assert_equal(averaged[0].module, averaged[1].module, fast=True)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_quantised_afterwards_by_torch(pair):
    model, twin = pair
    quantised = [torch.ao.quantization.quantize_dynamic(one, {nn.Linear}) for one in (model, twin)]
    x = torch.randn(2, 5, 8)
    torch.testing.assert_close(quantised[0](x), quantised[1](x))


@pytest.mark.parametrize("tracing_mode", ["real", "fake", "symbolic"])
@pytest.mark.parametrize("grad", [True, False])
def test_make_fx(pair, tracing_mode, grad):
    from torch.fx.experimental.proxy_tensor import make_fx

    model, twin = pair
    x = torch.randn(2, 5, 8)

    def call(parameters, x):
        return torch.func.functional_call(model, parameters, (x,))

    parameters = {name: value.detach() for name, value in twin.named_parameters()}
    with torch.set_grad_enabled(grad):
        gm = make_fx(call, tracing_mode=tracing_mode)(parameters, x)
        other = torch.randn(2, 5, 8)
        torch.testing.assert_close(gm(parameters, other), twin(other))
        if tracing_mode == "real":  # with the parameters as constants
            gm = make_fx(model)(x)
            torch.testing.assert_close(gm(other), twin(other))


def test_bias_taken_away_afterwards(pair):
    model, twin = pair
    for one in (model, twin):
        one.mlp.up.bias = None
    for _ in range(2):  # the second time nothing is left of the old one
        assert_equal(model, twin, fast=False)
    one, other = model.state_dict(), twin.state_dict()
    assert list(one) == list(other)
    fk.revert(model)
    x = torch.randn(2, 5, 8)
    torch.testing.assert_close(model(x), twin(x))
