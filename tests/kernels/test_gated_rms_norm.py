"""`gated_rms_norm` against the gated norms of Transformers: equal in every bit, with random weights."""

import dataclasses
import inspect
import itertools

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers.models.bailing_hybrid.modeling_bailing_hybrid import BailingHybridRMSNormGated
from transformers.models.bamba.modeling_bamba import BambaRMSNormGated
from transformers.models.glm5_next.modeling_glm5_next import Glm5NextTextRMSNormGated
from transformers.models.granitemoehybrid.modeling_granitemoehybrid import GraniteMoeHybridRMSNormGated
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearRMSNormGated
from transformers.models.lara_mini.modeling_lara_mini import LaraMiniRMSNormGated
from transformers.models.mamba2.modeling_mamba2 import MambaRMSNormGated
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHRMSNormGated
from transformers.models.olmo_hybrid.modeling_olmo_hybrid import OlmoHybridRMSNormGated
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNormGated
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeRMSNormGated
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated
from transformers.models.zamba2.modeling_zamba2 import Zamba2RMSNormGated

from fusekit.kernels import GatedNormForm, NormForm, gated_norm_forms, gated_rms_norm, rms_norm

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
EPS = 1e-3
SIZE = 48

MAMBA2 = dict(gate_first=True, group_size=16)
QWEN3_NEXT = dict(output="input")
LARA = dict(normalized=None, weight_dtype="compute", output="input")
KIMI = dict(act="sigmoid", **LARA)
REAL = [
    (MambaRMSNormGated, MAMBA2),
    (BambaRMSNormGated, MAMBA2),
    (GraniteMoeHybridRMSNormGated, MAMBA2),
    (NemotronHRMSNormGated, MAMBA2),
    (Zamba2RMSNormGated, MAMBA2),
    (Qwen3NextRMSNormGated, QWEN3_NEXT),
    (Qwen3_5RMSNormGated, QWEN3_NEXT),
    (Qwen3_5MoeRMSNormGated, QWEN3_NEXT),
    (OlmoHybridRMSNormGated, QWEN3_NEXT),
    (LaraMiniRMSNormGated, LARA),
    (KimiLinearRMSNormGated, KIMI),
    (BailingHybridRMSNormGated, KIMI),
    (Glm5NextTextRMSNormGated, KIMI),
]


def random(dtype, seed, shape=(3, 7, SIZE)):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def rows(dtype):
    scales = torch.logspace(-4, 1, 7, dtype=torch.float64)[:, None]
    return (random(torch.float64, 0) * scales).to(dtype)


@pytest.mark.parametrize("cls, form", REAL, ids=lambda value: getattr(value, "__name__", ""))
def test_has_the_bits_of_the_transformers_norm(cls, form):
    module = cls(SIZE, eps=EPS, **({"group_size": 16} if form is MAMBA2 else {}))
    for dtype, weight_dtype, gate_dtype in itertools.product(DTYPES, repeat=3):
        module.weight = nn.Parameter(random(weight_dtype, 1, (SIZE,)))
        x, gate = rows(dtype), random(gate_dtype, 2)
        got, want = gated_rms_norm(x, gate, module.weight, EPS, **form), module(x, gate)
        assert got.dtype == want.dtype and torch.equal(got, want)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(list(gated_norm_forms(gate_first=True)) + list(gated_norm_forms(gate_first=False))))
def test_a_form_is_its_keywords_and_its_source(form):
    assert GatedNormForm(**_split(form.keywords())) == form
    assert eval(f"dict({form.source()})", {"__builtins__": {"dict": dict}}) == form.keywords()


def _split(keywords):
    own = {field.name for field in dataclasses.fields(GatedNormForm)}
    norm = NormForm(**{name: value for name, value in keywords.items() if name not in own})
    return {**{name: value for name, value in keywords.items() if name in own}, "norm": norm}


def test_keywords_are_those_of_the_signature_in_its_order():
    parameters = inspect.signature(gated_rms_norm).parameters.values()
    keywords = {p.name: p.default for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}
    own = {f.name: f.default for f in dataclasses.fields(GatedNormForm) if f.name != "norm"}
    norm = {f.name: f.default for f in dataclasses.fields(NormForm)}
    assert list(keywords.items()) == [("act", "silu"), ("group_size", None), *own.items(), *norm.items()]


GATE_FIRST = [form for form in gated_norm_forms(gate_first=True) if form.norm.compute_dtype != "float64"]


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(GATE_FIRST), st.sampled_from(DTYPES))
def test_a_gate_in_front_norms_the_product(form, dtype):
    x, gate, weight = rows(torch.float32), random(torch.float32, 2), random(dtype, 1, (SIZE,))
    got = gated_rms_norm(x, gate, weight, EPS, **form.keywords())
    want = rms_norm(x * F.silu(gate), weight, EPS, **form.norm.keywords())
    assert got.dtype == want.dtype and torch.equal(got, want)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([form for form in gated_norm_forms(gate_first=False) if form.norm.output is None]))
def test_a_gate_behind_multiplies_the_norm(form):
    x, gate, weight = rows(torch.float32), random(torch.float32, 2), random(torch.float32, 1, (SIZE,))
    got = gated_rms_norm(x, gate, weight, EPS, **form.keywords())
    norm = rms_norm(x, weight, EPS, **form.norm.keywords())
    assert torch.equal(got, (norm.float() if form.normed else norm) * F.silu(gate))


def test_groups_are_normed_by_themselves():
    x, gate, weight = rows(torch.float32), random(torch.float32, 2), random(torch.float32, 1, (SIZE,))
    got = gated_rms_norm(x, gate, weight, EPS, group_size=12)
    parts = zip(x.split(12, -1), gate.split(12, -1), weight.split(12), strict=True)
    want = torch.cat([gated_rms_norm(*part, EPS) for part in parts], -1)
    torch.testing.assert_close(got, want)
    assert not torch.allclose(got, gated_rms_norm(x, gate, weight, EPS))


@pytest.mark.parametrize("act", ["sigmoid", "tanh", torch.sigmoid, nn.Sigmoid()])
def test_act_is_a_name_or_a_callable(act):
    x, gate = rows(torch.float32), random(torch.float32, 2)
    function = torch.tanh if act == "tanh" else torch.sigmoid
    assert torch.equal(gated_rms_norm(x, gate, None, EPS, act=act), rms_norm(x, None, EPS) * function(gate))


@pytest.mark.parametrize("cls, form", [REAL[0], REAL[5], REAL[10]])
def test_gradients_are_those_of_the_module(cls, form):
    module = cls(SIZE, eps=EPS, **({"group_size": 16} if form is MAMBA2 else {}))
    module.weight = nn.Parameter(random(torch.float32, 1, (SIZE,)))
    x, gate = rows(torch.float32).requires_grad_(), random(torch.float32, 2).requires_grad_()
    wanted = (x, gate, module.weight)
    got = torch.autograd.grad(gated_rms_norm(x, gate, module.weight, EPS, **form).sum(), wanted)
    for mine, theirs in zip(got, torch.autograd.grad(module(x, gate).sum(), wanted), strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("form", [MAMBA2, QWEN3_NEXT, KIMI], ids=["mamba2", "qwen3_next", "kimi"])
def test_compiles_to_one_graph_whatever_the_length(form):
    weight = random(torch.float32, 1, (SIZE,))

    def norm(x, gate):
        return gated_rms_norm(x, gate, weight, EPS, **form)

    compiled = torch.compile(norm, backend="eager", fullgraph=True, dynamic=True)
    for length in (4, 9):
        x, gate = random(torch.bfloat16, 0, (2, length, SIZE)), random(torch.bfloat16, 2, (2, length, SIZE))
        assert torch.equal(compiled(x, gate), norm(x, gate))


def test_nothing_is_written():
    x, gate, weight = rows(torch.float32), random(torch.float32, 2), random(torch.float32, 1, (SIZE,))
    kept = x.clone(), gate.clone(), weight.clone()
    for form in (MAMBA2, QWEN3_NEXT, KIMI):
        gated_rms_norm(x, gate, weight, EPS, **form)
    assert all(map(torch.equal, (x, gate, weight), kept))


@pytest.mark.parametrize(
    "arguments, said",
    [
        ({"gate": None}, "gate is a NoneType; it must be a tensor"),
        ({"act": "silo"}, "act is 'silo'; it must be a callable or one of gelu"),
        ({"act": 3}, "act is 3"),
        ({"group_size": 5}, r"group_size is 5 and x has shape \[3, 7, 48\]"),
        ({"group_size": 0}, "group_size is 0"),
        ({"gate_dtype": "float64"}, "gate_dtype is 'float64'; it must be one of \"float32\", None"),
        ({"activated": "gate"}, "activated is 'gate'"),
        ({"gated": None}, "gated is None"),
        ({"normed": "weight"}, "normed is 'weight'"),
        ({"output": "x"}, "output is 'x'"),
        ({"eps": -1.0}, "gated_rms_norm: eps is -1.0"),
        ({"weight": torch.ones(5)}, r"gated_rms_norm: weight has shape \[5\]"),
        ({"x": torch.ones(2, 4, dtype=torch.int64)}, "gated_rms_norm: x has dtype torch.int64"),
        ({"weight": None, "offset": 1.0}, "offset=1.0 needs a weight"),
    ],
)
def test_bad_argument_is_named(arguments, said):
    given = {"x": rows(torch.float32), "gate": random(torch.float32, 2), "weight": None}
    with pytest.raises(ValueError, match=said):
        gated_rms_norm(**{**given, **arguments})
