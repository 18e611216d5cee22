"""Field reports of kinds 7 to 10, 17, 18, 30 to 33, 52 to 54 and 64: parts (all: test_field_reports.py)."""

import copy

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import fusekit as fk
from tests.adversarial.reports import PARTS, Attention, assert_equal, pair, parts, refused

# -- 7: nothing is fused, and said -----------------------------------------------------------------


class NamedLikeBert(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.query(x), self.key(x)


class WritesBetween(NamedLikeBert):
    def forward(self, x):
        query = self.query(x)
        x.mul_(2)
        return query, self.key(x)


def test_07_names_do_not_matter():
    assert parts(fk.fuse(nn.Sequential(NamedLikeBert()))) == [("query", "key")]


def test_07_where_nothing_is_fused_each_place_says_why():
    model = nn.ModuleList([WritesBetween(), WritesBetween()])
    fused = fk.fuse(model)
    assert fused.sites == ()
    assert [no.name for no in fk.plan(model).refusals] == ["0", "1"]
    with pytest.raises(fk.FusekitError, match="input-written"):
        fk.fuse(model, strict=True)


# -- 8: instances of one class that differ ---------------------------------------------------------


class ByItsSettings(Attention):
    def __init__(self, writes=False):
        super().__init__()
        self.writes = writes

    def forward(self, x):
        q = self.q_proj(x)
        if self.writes:
            x.mul_(2)
        return q, self.k_proj(x)


@pytest.mark.parametrize("order", [(False, True), (True, False)])
def test_08_what_holds_of_one_instance_is_not_believed_of_another(order):
    model = nn.ModuleList(ByItsSettings(writes) for writes in order)
    twin = copy.deepcopy(model)
    fk.fuse(model)
    for _ in range(2):
        for own, other in zip(model, twin, strict=True):
            x = torch.randn(2, 8)
            torch.testing.assert_close(own(x.clone()), other(x.clone()))
            own.writes = other.writes = not own.writes  # and as it is set later


# -- 9: hooks and parametrizations -----------------------------------------------------------------


def changes_the_value(module):
    return [module.k_proj.register_forward_hook(lambda part, given, result: result * 10)]


def probes_the_input(module):
    return [module.q_proj.register_forward_pre_hook(lambda part, given: None)]


def changes_a_keyword(module):
    return [module.q_proj.register_forward_pre_hook(lambda part, *given: given, with_kwargs=True)]


def runs_always(module):
    return [module.q_proj.register_forward_hook(lambda *_: None, always_call=True)]


def looks_at_gradients(module):
    return [module.k_proj.register_full_backward_pre_hook(lambda part, gradient: None)]


@pytest.mark.parametrize(
    "hooked", [changes_the_value, probes_the_input, changes_a_keyword, runs_always, looks_at_gradients]
)
def test_09_a_hooked_part_is_refused_and_fused_without_its_hook(hooked):
    module = Attention()
    handles = hooked(module)
    (no,) = fk.plan(module).refusals
    assert no.reason == "hooked" and fk.plan(module).sites == ()
    for handle in handles:
        handle.remove()
    assert parts(fk.plan(module)) == PARTS


@pytest.mark.parametrize("hooked", [changes_the_value, probes_the_input, runs_always, looks_at_gradients])
def test_09_a_hook_put_on_afterwards_is_called(hooked):
    module, twin = pair()
    for one in (module, twin):
        hooked(one)
    assert_equal(module, twin)


@pytest.mark.parametrize(
    "norm, reason",
    [
        (nn.utils.weight_norm, "hooked"),
        (nn.utils.spectral_norm, "hooked"),
        (nn.utils.parametrizations.weight_norm, "parametrized"),
        (nn.utils.parametrizations.spectral_norm, "parametrized"),
        (nn.utils.parametrizations.orthogonal, "parametrized"),
    ],
)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_09_a_weight_that_is_computed_is_refused_before_and_honoured_afterwards(norm, reason):
    module = Attention()
    norm(module.q_proj)
    plan = fk.plan(module.eval())
    assert plan.sites == () and [no.reason for no in plan.refusals] == [reason]
    module, twin = pair()
    for one in (module, twin):
        torch.manual_seed(0)
        norm(one.eval().q_proj)
    x = torch.randn(2, 8)
    torch.testing.assert_close(module(x), twin(x))


def test_09_hooks_of_the_state_dict_go_on():
    module = Attention()
    for name in ("q_proj", "k_proj"):
        part = getattr(module, name)
        part.register_state_dict_post_hook(
            lambda part, state, prefix, _: state.update({prefix + "n": part.bias})
        )
    twin = copy.deepcopy(module)
    fk.fuse(module)
    assert list(module.state_dict()) == list(twin.state_dict())
    x = torch.randn(2, 8)
    torch.testing.assert_close(module(x), twin(x))


# -- 10, 32, 33: adapters and subclasses -----------------------------------------------------------


class Lora(nn.Module):
    """As those of PEFT: no Linear, and it has what a Linear has."""

    def __init__(self, base):
        super().__init__()
        self.base_layer = base
        self.lora_A = nn.Linear(base.in_features, 2, bias=False)
        self.lora_B = nn.Linear(2, base.out_features, bias=False)
        self.in_features, self.out_features = base.in_features, base.out_features

    @property
    def weight(self):
        return self.base_layer.weight

    @property
    def bias(self):
        return self.base_layer.bias

    def forward(self, x):
        return self.base_layer(x) + self.lora_B(self.lora_A(x))

    def merged(self):
        with torch.no_grad():
            self.base_layer.weight += self.lora_B.weight @ self.lora_A.weight
        return self.base_layer


def test_10_an_adapter_is_refused_and_fused_once_it_is_merged():
    module = Attention()
    module.q_proj = Lora(module.q_proj)
    refused(module, "adapter")
    module.q_proj = module.q_proj.merged()
    twin = copy.deepcopy(module)
    assert parts(fk.fuse(module)) == PARTS
    assert_equal(module, twin)


class Injected(nn.Linear):
    """An adapter that is a Linear."""

    def __init__(self, *args):
        super().__init__(*args)
        self.lora_A, self.lora_B = nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)

    def forward(self, x):
        return super().forward(x) + self.lora_B(self.lora_A(x))


class MaskedBias(nn.Linear):
    def __init__(self, *args):
        super().__init__(*args)
        self.register_buffer("mask", (torch.arange(self.out_features) % 2).float())

    def forward(self, x):
        return F.linear(x, self.weight, self.bias * self.mask)


class Plain(nn.Linear):
    """A subclass that computes no more than the plain module."""

    def extra_repr(self):
        return "plain"


class Called(nn.Linear):
    def __call__(self, x):
        return super().__call__(x) * 2


class ComputedWeight(nn.Linear):
    def __init__(self, *args):
        super().__init__(*args)
        nn.init.normal_(self._parameters["weight"])

    def __getattr__(self, name):
        value = super().__getattr__(name)
        return value * 2 if name == "weight" else value


@pytest.mark.parametrize("cls", [Injected, MaskedBias, Called, ComputedWeight])
def test_32_a_subclass_that_computes_more_is_refused(cls):
    module = Attention()
    module.q_proj = cls(8, 8)
    no = refused(module, "subclass", "adapter")
    assert "q_proj" in no.message


@pytest.mark.parametrize("cls", [Injected, MaskedBias, Called, ComputedWeight, Plain])
def test_32_a_subclass_put_in_afterwards_is_honoured(cls):
    module, twin = pair()
    module.q_proj = cls(8, 8)
    twin.q_proj = copy.deepcopy(module.q_proj)
    x = torch.randn(2, 8)
    torch.testing.assert_close(module(x), twin(x))


def test_33_an_adapter_put_in_afterwards_acts_and_learns():
    module, twin = pair()
    for one in (module, twin):
        torch.manual_seed(0)
        one.requires_grad_(False)
        one.q_proj, one.k_proj = Lora(one.q_proj), Lora(one.k_proj)
    assert_equal(module, twin)
    optimizers = [
        torch.optim.SGD((p for p in one.parameters() if p.requires_grad), 0.1) for one in (module, twin)
    ]
    x = torch.randn(2, 8)
    for one, optimizer in zip((module, twin), optimizers, strict=True):
        sum(result.square().sum() for result in one(x)).backward()
        optimizer.step()
        one.zero_grad()
    assert_equal(module, twin)
    for one in (module, twin):  # and taken off again
        one.q_proj, one.k_proj = one.q_proj.base_layer, one.k_proj.merged()
    assert_equal(module, twin)


# -- 17, 52, 53: dtypes, packed weights, subclasses of tensors -------------------------------------


class Packed(nn.Linear):
    """Stands in for a layer of four bits."""

    def __init__(self, *args):
        super().__init__(*args, bias=False)
        self.scale = self.weight.detach().abs().amax(1, keepdim=True) / 7
        self.weight = nn.Parameter((self.weight / self.scale).round().detach(), requires_grad=False)

    def forward(self, x):
        return F.linear(x, self.weight * self.scale)


class Packs(torch.Tensor):
    """Stands in for a quantised tensor: it cannot be joined."""

    @classmethod
    def __torch_function__(cls, function, kinds, args=(), options=None):
        if function is torch.cat:
            raise NotImplementedError("Packs: aten.cat")
        return super().__torch_function__(function, kinds, args, options or {})


def packed(module):
    module.q_proj = Packed(8, 8)


def packed_tensor(module):
    module.q_proj.weight = nn.Parameter(module.q_proj.weight.detach().as_subclass(Packs), requires_grad=False)


def packed_bias(module):
    module.k_proj.bias = nn.Parameter(module.k_proj.bias.detach().as_subclass(Packs), requires_grad=False)


def one_in_bfloat16(module):
    module.k_proj.bfloat16()


def one_bias_in_float64(module):
    module.k_proj.bias.data = module.k_proj.bias.data.double()


@pytest.mark.parametrize(
    "change, reason",
    [
        (packed, "subclass"),
        (packed_tensor, "quantized"),
        (packed_bias, "quantized"),
        (one_in_bfloat16, "dtype-mismatch"),
        (one_bias_in_float64, "dtype-mismatch"),
    ],
)
def test_17_one_layer_of_another_precision_is_refused_and_its_like_fused(change, reason):
    model = nn.ModuleList([Attention(), Attention(), Attention()])
    change(model[1])
    before = [(id(p), p.data_ptr()) for p in model[1].parameters()]
    plan = fk.plan(model)
    assert [(site.name, site.parts) for site in plan.sites] == [("0", PARTS[0]), ("2", PARTS[0])]
    (no,) = plan.refusals
    assert (no.name, no.reason) == ("1", reason) and "_proj" in no.message
    plan.apply()
    assert [(id(p), p.data_ptr()) for p in model[1].parameters()] == before


def test_52_a_weight_that_is_packed_afterwards_is_honoured():
    module, twin = pair()
    for one in (module, twin):
        packed_tensor(one)
    x = torch.randn(2, 8)
    torch.testing.assert_close(module(x), twin(x))
    module, twin = pair()
    for one in (module, twin):
        torch.manual_seed(0)
        packed(one)
    torch.testing.assert_close(module(x), twin(x))


# -- 18, 54, 64: bias on some, unequal widths, nothing uninitialised -------------------------------


class Uneven(nn.Module):
    def __init__(self, biases=(True, False, True)):
        super().__init__()
        widths = (64, 32, 16)
        self.q, self.k, self.v = (nn.Linear(8, w, bias=b) for w, b in zip(widths, biases, strict=True))

    def forward(self, x):
        return self.q(x), self.k(x), self.v(x)


@pytest.mark.parametrize(
    "biases", [(True, False, False), (False, True, False), (False, False, True), (0, 0, 0)]
)
def test_18_54_biases_on_some_and_uneven_widths(biases):
    module = Uneven(biases)
    twin = copy.deepcopy(module)
    assert parts(fk.fuse(module)) == [("q", "k", "v")]
    assert_equal(module, twin)
    assert [one.shape[-1] for one in module(torch.randn(2, 7, 8))] == [64, 32, 16]


def test_18_a_bias_that_two_parts_share_is_refused():
    module = Uneven((True, False, True))
    module.k = nn.Linear(8, 64)
    module.k.bias = module.q.bias
    assert {no.reason for no in fk.plan(module).refusals} == {"tied"}


@pytest.fixture
def nothing_uninitialised():
    """Memory that nobody has written is NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("nothing_uninitialised")
def test_64_no_row_of_the_merged_weight_or_bias_is_left_unwritten():
    assert torch.empty(2).isnan().all()
    module = Uneven()
    twin = copy.deepcopy(module)
    fk.fuse(module)
    assert_equal(module, twin)
    for one in (module, twin):
        one.double()
    assert_equal(module, twin)


class Weightless(nn.Module):
    def forward(self, x):
        h = x.float()
        return (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


@pytest.mark.usefixtures("nothing_uninitialised")
def test_64_a_norm_without_weight_is_given_none():
    module, x = Weightless(), torch.randn(2, 8)
    want = module(x)
    fused = fk.fuse(module)
    assert [site.fusion for site in fused.sites] == ["rms_norm"]
    torch.testing.assert_close(module(x), want, rtol=0, atol=0)


# -- 30, 31: results written in place, other ranks -------------------------------------------------


class ScalesInPlace(Attention):
    def forward(self, x):
        q = self.q_proj(x)
        k = self.k_proj(x)
        q *= 0.5
        k.relu_()
        return q, k


class ScalesViewsInPlace(Attention):
    def forward(self, x):
        q = self.q_proj(x).unflatten(-1, (2, 4))
        k = self.k_proj(x)
        q[..., 0, :].mul_(2)
        k.add_(q[..., 1, :])
        return q.flatten(-2) * 1, k


@pytest.mark.parametrize("cls", [ScalesInPlace, ScalesViewsInPlace])
@pytest.mark.parametrize("shape", [(8,), (3, 8), (2, 3, 8), (1, 1, 8), (0, 8)])
def test_30_31_results_are_written_in_place_at_any_rank(cls, shape):
    module = cls()
    twin = copy.deepcopy(module)
    assert parts(fk.fuse(module)) == PARTS
    assert_equal(module, twin, torch.randn(shape))
