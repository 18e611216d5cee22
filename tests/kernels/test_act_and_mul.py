"""`act_and_mul` and the names of activations, against Transformers' own modules."""

import copy
import functools
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import activations as theirs
from transformers.activations import ACT2CLS, ACT2FN

from fusekit.kernels import ACTIVATIONS, act_and_mul, activation_name

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
PARAMETRIC = {"prelu", "xielu"}
NAMES = sorted(set(ACT2CLS) - PARAMETRIC)


def random_pair(dtype=torch.float32, scale=6.0):
    generator = torch.Generator().manual_seed(0)
    packed = scale * torch.randn(3, 11, 2 * 16, generator=generator, dtype=torch.float64)
    return packed.to(dtype).chunk(2, dim=-1)


def test_names_are_those_of_transformers_without_parameters():
    assert set(ACTIVATIONS) == set(NAMES)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_name_has_the_bits_of_the_transformers_module(name, dtype):
    gate, up = random_pair(dtype, scale=12.0 if name == "gelu_10" else 4.0)
    got, expected = act_and_mul(gate, up, name), ACT2FN[name](gate) * up
    assert got.dtype == expected.dtype
    assert torch.equal(got, expected)


@pytest.mark.parametrize("name", NAMES)
def test_name_of_the_transformers_module_computes_the_same(name):
    module = ACT2FN[name]
    found = activation_name(module)
    assert found == {"swish": "silu"}.get(name, name)
    gate, up = random_pair()
    assert torch.equal(act_and_mul(gate, up, found), module(gate) * up)


def test_default_is_silu():
    gate, up = random_pair()
    assert torch.equal(act_and_mul(gate, up), F.silu(gate) * up)


def test_slices_of_one_packed_tensor_and_separate_tensors_agree():
    gate, up = random_pair(torch.bfloat16)
    assert not gate.is_contiguous()
    assert torch.equal(act_and_mul(gate, up), act_and_mul(gate.contiguous(), up.contiguous()))


@pytest.mark.parametrize("name", NAMES)
def test_no_named_activation_writes_the_gate(name):
    gate, up = random_pair()
    kept = gate.clone()
    act_and_mul(gate, up, name)
    assert torch.equal(gate, kept)


def test_module_is_called_with_its_hooks():
    seen = []
    module = nn.SiLU()
    module.register_forward_hook(lambda module, args, output: seen.append(output) or output + 1)
    gate, up = random_pair()
    assert torch.equal(act_and_mul(gate, up, module), (F.silu(gate) + 1) * up)
    assert len(seen) == 1


def test_module_keeps_its_parameters_and_their_gradient():
    module = nn.PReLU(init=0.4)
    gate, up = random_pair()
    act_and_mul(gate, up, module).sum().backward()
    expected = torch.where(gate < 0, gate * up, 0).sum()
    torch.testing.assert_close(module.weight.grad, expected.reshape(1))


@pytest.mark.parametrize("act", ["silu", "gelu_new", nn.Mish()], ids=str)
def test_compiles_to_one_graph(act):
    gate, up = random_pair()
    compiled = torch.compile(lambda g, u: act_and_mul(g, u, act), backend="eager", fullgraph=True)
    assert torch.equal(compiled(gate, up), act_and_mul(gate, up, act))


@pytest.mark.parametrize("name", NAMES)
def test_meta_tensors_give_shape_and_dtype(name):
    x = torch.empty(2, 4, dtype=torch.bfloat16, device="meta")
    got = act_and_mul(x, x, name)
    assert (got.device.type, got.shape, got.dtype) == ("meta", x.shape, x.dtype)


def test_other_shapes_broadcast_as_in_the_product():
    gate, up = torch.randn(2, 4), torch.randn(3, 1, 4)
    assert torch.equal(act_and_mul(gate, up), torch.nn.functional.silu(gate) * up)
    with pytest.raises(RuntimeError, match="must match"):
        act_and_mul(gate, torch.randn(3))


@pytest.mark.parametrize("name", sorted(PARAMETRIC))
def test_name_of_an_activation_with_parameters_asks_for_the_module(name):
    with pytest.raises(ValueError, match=f"'{name}' has parameters.*pass the module"):
        act_and_mul(torch.ones(4), torch.ones(4), name)


def test_misspelt_name_is_answered_with_near_ones():
    with pytest.raises(ValueError, match="no activation is called 'sillu'; did you mean 'silu'"):
        act_and_mul(torch.ones(4), torch.ones(4), "sillu")


def test_name_like_no_other_is_answered_with_all():
    with pytest.raises(ValueError, match=r"known are gelu, .*, tanh"):
        act_and_mul(torch.ones(4), torch.ones(4), "xyzzy")


def test_act_that_is_neither_name_nor_callable_raises():
    with pytest.raises(ValueError, match="act is 3; it must be"):
        act_and_mul(torch.ones(4), torch.ones(4), 3)


class Quiet(nn.SiLU):
    """Another class: it may compute anything."""


def with_hook(register):
    module = nn.SiLU()
    getattr(module, register)(lambda *args: None)
    return module


def with_own_forward():
    module = nn.SiLU()
    module.forward = lambda x: x
    return module


def compiled_in_place():
    module = nn.SiLU()
    module.compile(backend="eager")
    return module


def imposter():
    cls = type("SiLUActivation", (nn.Module,), {"forward": lambda self, x: x})
    cls.__module__ = "transformers.activations"
    return cls()


def holding(act):
    module = theirs.GELUActivation()
    module.act = act
    return module


@pytest.mark.parametrize(
    "act, name",
    [
        (nn.SiLU(), "silu"),
        (nn.GELU(), "gelu"),
        (nn.GELU(approximate="tanh"), "gelu_pytorch_tanh"),
        (nn.ReLU6(), "relu6"),
        (nn.Identity(), "linear"),
        (F.silu, "silu"),
        (F.gelu, "gelu"),
        (torch.tanh, "tanh"),
        (functools.partial(F.gelu, approximate="tanh"), "gelu_pytorch_tanh"),
        (copy.deepcopy(theirs.GELUActivation(use_gelu_python=True)), "gelu_python"),
        ("gelu_new", "gelu_new"),
        ("xielu", None),
        (Quiet(), None),
        (nn.ReLU(inplace=True), None),
        (nn.SiLU(inplace=True), None),
        (nn.ReLU6(inplace=True), None),
        (nn.LeakyReLU(0.2), None),
        (nn.Hardtanh(0.0, 6.0), None),
        (nn.PReLU(), None),
        (theirs.XIELUActivation(), None),
        (theirs.ClippedGELUActivation(-10, 9), None),
        (with_hook("register_forward_hook"), None),
        (with_hook("register_forward_pre_hook"), None),
        (with_hook("register_full_backward_hook"), None),
        (with_own_forward(), None),
        (compiled_in_place(), None),
        (imposter(), None),
        (holding(torch.tanh), "tanh"),
        (holding(lambda x: x), None),
        (holding(theirs.GELUActivation(use_gelu_python=True)._gelu_python), None),
        (nn.Sequential(nn.SiLU()), None),
        (functools.partial(F.gelu, approximate="none"), "gelu"),
        (functools.partial(F.silu, inplace=True), None),
        (lambda x: x, None),
        ([], None),
    ],
)
def test_only_exactly_a_known_activation_has_a_name(act, name):
    assert activation_name(act) == name


def test_forward_swapped_on_the_class_takes_the_name_away(monkeypatch):
    monkeypatch.setattr(nn.Tanh, "forward", lambda self, x: x)
    monkeypatch.setattr(nn.Hardtanh, "forward", lambda self, x: x)
    monkeypatch.setattr(theirs.MishActivation, "forward", lambda self, x: x)
    assert [activation_name(act) for act in (nn.Tanh(), nn.ReLU6(), theirs.MishActivation())] == [None] * 3


def test_without_transformers_its_classes_have_no_name_and_torchs_do(monkeypatch):
    module = theirs.NewGELUActivation()
    monkeypatch.delitem(sys.modules, "transformers.activations")
    assert activation_name(module) is None
    assert activation_name(nn.Tanh()) == "tanh"
    assert "transformers.activations" not in sys.modules
