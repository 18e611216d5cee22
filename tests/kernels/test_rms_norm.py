"""`rms_norm` against the norms it stands for: equal in every bit, with weights that are never ones."""

import itertools
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4UnweightedRMSNorm
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.gemma3n.modeling_gemma3n import Gemma3nRMSNorm
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRMSNorm
from transformers.models.gradium_phonon_tts.modeling_gradium_phonon_tts import GradiumPhononTTSTimestepNorm
from transformers.models.helium.modeling_helium import HeliumRMSNorm
from transformers.models.imagegpt.modeling_imagegpt import ImageGPTLayerNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.llama4.modeling_llama4 import Llama4TextL2Norm, Llama4TextRMSNorm
from transformers.models.mistral.modeling_mistral import MistralRMSNorm
from transformers.models.moshi.modeling_moshi import MoshiRMSNorm
from transformers.models.muse_spark.modeling_muse_spark import MuseSparkTextCenteredRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNorm
from transformers.models.t5.modeling_t5 import T5LayerNorm

from fusekit.kernels import rms_norm

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
EPS = 1e-3  # large enough that a wrong eps is another number
SIZE = 48

LLAMA: dict = {}
OLMO2 = dict(normalized=None, output="input")
WEIGHT_IN_FLOAT32 = dict(normalized=None, weight_dtype="compute", output="input")
GEMMA = dict(offset=1.0, **WEIGHT_IN_FLOAT32)
T5 = dict(normalized="weight", scaled="input")
IMAGEGPT = dict(compute_dtype=None, normalized=None, inverse="sqrt")

WEIGHTED = [
    (LlamaRMSNorm, LLAMA),
    (MistralRMSNorm, LLAMA),
    (Qwen3RMSNorm, LLAMA),
    (Llama4TextRMSNorm, LLAMA),
    (Olmo2RMSNorm, OLMO2),
    (GptOssRMSNorm, OLMO2),
    (HeliumRMSNorm, WEIGHT_IN_FLOAT32),
    (MoshiRMSNorm, WEIGHT_IN_FLOAT32),
    (GemmaRMSNorm, GEMMA),
    (Gemma2RMSNorm, GEMMA),
    (Gemma3RMSNorm, GEMMA),
    (Qwen3NextRMSNorm, GEMMA),
    (Gemma3nRMSNorm, dict(WEIGHT_IN_FLOAT32, inverse="pow")),
    (T5LayerNorm, T5),
    (ImageGPTLayerNorm, IMAGEGPT),
    (MuseSparkTextCenteredRMSNorm, dict(GEMMA, weight_dtype="sum")),
    (GradiumPhononTTSTimestepNorm, dict(compute_dtype=None, normalized=None, scaled="weighted")),
]


def random_input(dtype, seed=0, shape=(3, 7, SIZE)):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def random_module(cls, dtype):
    module = cls((SIZE,), eps=EPS) if cls is ImageGPTLayerNorm else cls(SIZE, eps=EPS)
    module.weight = nn.Parameter(random_input(dtype, seed=1, shape=(SIZE,)))
    return module


def assert_same_bits(got, expected):
    assert got.dtype == expected.dtype
    assert torch.equal(got, expected)


@pytest.mark.parametrize("weight_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cls, form", WEIGHTED, ids=lambda value: getattr(value, "__name__", ""))
def test_has_the_bits_of_the_transformers_norm(cls, form, dtype, weight_dtype):
    module, x = random_module(cls, weight_dtype), random_input(dtype)
    assert_same_bits(rms_norm(x, module.weight, EPS, **form), module(x))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "module, form",
    [
        (Llama4TextL2Norm(eps=EPS), LLAMA),
        (Gemma3nRMSNorm(SIZE, eps=EPS, with_scale=False), dict(inverse="pow")),
        (DeepseekV4UnweightedRMSNorm(eps=EPS), dict(scaled="rounded")),
    ],
    ids=["L2Norm", "Gemma3n", "DeepseekV4"],
)
def test_has_the_bits_of_a_norm_without_weight(module, form, dtype):
    x = random_input(dtype)
    assert_same_bits(rms_norm(x, None, EPS, **form), module(x))


@pytest.mark.filterwarnings("ignore:Mismatch dtype")
@pytest.mark.parametrize("eps", [None, EPS])
@pytest.mark.parametrize("dtype, weight_dtype", list(itertools.product(DTYPES, DTYPES)), ids=str)
def test_has_the_bits_of_torchs_own_norm_and_its_default_eps(dtype, weight_dtype, eps):
    # The input is small, so that the default eps shows.
    x, weight = random_input(dtype) * 1e-3, random_input(weight_dtype, seed=1, shape=(SIZE,))
    got = rms_norm(x, weight, eps, compute_dtype="opmath", normalized=None, output="input")
    assert_same_bits(got, F.rms_norm(x, (SIZE,), weight, eps))


def test_reciprocal_multiplies_by_one_over_the_root():
    x, weight = random_input(torch.float32, shape=(64, SIZE)), random_input(torch.float32, 1, (SIZE,))
    mean_square = x.pow(2).mean(-1, keepdim=True) + EPS
    expected = weight * (x * (1 / torch.sqrt(mean_square)))
    assert_same_bits(rms_norm(x, weight, EPS, inverse="reciprocal"), expected)
    for other in ("rsqrt", "sqrt"):
        assert not torch.equal(rms_norm(x, weight, EPS, inverse=other), expected)


def test_float64_computes_a_float32_input_more_exactly():
    x = random_input(torch.float32)
    exact = rms_norm(x.double(), None, EPS, compute_dtype="float64")
    got = rms_norm(x, None, EPS, compute_dtype="float64", normalized=None)
    assert_same_bits(got, exact)
    assert not torch.equal(rms_norm(x, None, EPS).double(), exact)


def test_offset_is_added_in_the_dtype_the_weight_is_taken_in():
    x = random_input(torch.bfloat16)
    small = torch.full((SIZE,), 1e-3, dtype=torch.bfloat16)  # 1 + small is 1 in bfloat16
    in_its_own = rms_norm(x, small, EPS, offset=1.0, normalized=None)
    in_float32 = rms_norm(x, small, EPS, offset=1.0, normalized=None, weight_dtype="compute")
    assert torch.equal(in_its_own, rms_norm(x, None, EPS, normalized=None))
    assert not torch.equal(in_its_own, in_float32)


@pytest.mark.parametrize(
    "form, dtype",
    [
        (LLAMA, torch.float32),
        (OLMO2, torch.bfloat16),
        (dict(normalized=None, output="weight"), torch.float16),
    ],
    ids=["as promoted", "input", "weight"],
)
def test_output_is_the_dtype_asked_for(form, dtype):
    weight = random_input(torch.float16 if dtype == torch.float16 else torch.float32, 1, (SIZE,))
    assert rms_norm(random_input(torch.bfloat16), weight, **form).dtype == dtype


@pytest.mark.parametrize("cls, form", [(LlamaRMSNorm, LLAMA), (GemmaRMSNorm, GEMMA), (T5LayerNorm, T5)])
def test_gradients_are_those_of_the_module(cls, form):
    module, x = random_module(cls, torch.float32), random_input(torch.float32)
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    upstream = random_input(torch.float32, seed=2)
    got = torch.autograd.grad(rms_norm(ours, module.weight, EPS, **form), (ours, module.weight), upstream)
    expected = torch.autograd.grad(module(theirs), (theirs, module.weight), upstream)
    for mine, other in zip(got, expected, strict=True):
        assert_same_bits(mine, other)


@pytest.mark.parametrize("cls, form", WEIGHTED, ids=lambda value: getattr(value, "__name__", ""))
def test_autocast_changes_no_bit_against_the_module(cls, form):
    module, x = random_module(cls, torch.float32), random_input(torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_same_bits(rms_norm(x, module.weight, EPS, **form), module(x))


def test_meta_tensors_give_shape_and_dtype():
    x = torch.empty(2, 5, SIZE, dtype=torch.bfloat16, device="meta")
    got = rms_norm(x, torch.empty(SIZE, device="meta"), None)
    assert (got.device.type, got.shape, got.dtype) == ("meta", x.shape, torch.float32)


@pytest.mark.parametrize("form", [LLAMA, GEMMA, T5, IMAGEGPT], ids=["llama", "gemma", "t5", "imagegpt"])
def test_compiles_to_one_graph_whatever_the_length(form):
    class Norm(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.eps = nn.Parameter(random_input(torch.float32, 1, (SIZE,))), EPS

        def forward(self, x):
            return rms_norm(x, self.weight, self.eps, **form)

    module = Norm()
    compiled = torch.compile(module, backend="eager", fullgraph=True, dynamic=True)
    for length in (4, 9):
        x = random_input(torch.bfloat16, shape=(2, length, SIZE))
        assert_same_bits(compiled(x), module(x))


def test_input_and_weight_are_not_written():
    x, weight = random_input(torch.float32), random_input(torch.float32, 1, (SIZE,))
    kept = x.clone(), weight.clone()
    rms_norm(x, weight, EPS, **GEMMA)
    assert torch.equal(x, kept[0]) and torch.equal(weight, kept[1])


@pytest.mark.parametrize(
    "name, value, said",
    [
        ("compute_dtype", torch.float32, 'one of "float32", "float64", "opmath", None'),
        ("normalized", "compute", 'one of "input", "weight", None'),
        ("weight_dtype", "float32", 'one of None, "compute", "sum"'),
        ("output", "x", 'one of None, "input", "weight"'),
        ("inverse", "sqr", 'one of "rsqrt", "sqrt", "reciprocal", "pow"'),
        ("scaled", None, 'one of "compute", "input", "rounded", "weighted"'),
        ("offset", True, "a finite number"),
        ("offset", float("nan"), "a finite number"),
        ("eps", -1e-6, "a number of at least 0"),
        ("eps", "1e-6", "a number of at least 0"),
    ],
)
def test_unknown_value_is_named_with_the_valid_ones(name, value, said):
    with pytest.raises(ValueError) as error:
        rms_norm(torch.ones(2, 4), torch.ones(4), **{name: value})
    assert f"{name} is {value!r}" in str(error.value) and said in str(error.value)


@pytest.mark.parametrize("shape", [(5,), (), (2, 4), (1, 1)], ids=str)
def test_weight_of_another_shape_says_both(shape):
    with pytest.raises(ValueError) as error:
        rms_norm(torch.ones(2, 4), torch.ones(shape))
    assert f"weight has shape {list(shape)} and x has shape [2, 4]" in str(error.value)
    assert "must have shape [4]" in str(error.value)


@pytest.mark.parametrize("x", [torch.ones(2, 4, dtype=torch.int64), torch.tensor(1.0)], ids=["int", "scalar"])
def test_input_that_has_no_norm_raises(x):
    with pytest.raises(ValueError, match="rms_norm: x has"):
        rms_norm(x)


@pytest.mark.parametrize(
    "argument",
    [{"offset": 1.0}, {"normalized": "weight"}, {"weight_dtype": "compute"}, {"output": "weight"}]
    + [{"scaled": "weighted"}],
)
def test_argument_about_the_weight_needs_one(argument):
    ((name, value),) = argument.items()
    with pytest.raises(ValueError, match=f"{name}={value!r} needs a weight"):
        rms_norm(torch.ones(2, 4), None, **argument)


def test_weighted_scales_a_product_that_nothing_rounds():
    with pytest.raises(ValueError, match='scaled="weighted" needs normalized=None'):
        rms_norm(torch.ones(2, 4), torch.ones(4), scaled="weighted")


def test_importing_kernels_imports_nothing_beyond_torch():
    code = (
        "import sys, torch; before = set(sys.modules); import fusekit.kernels;"
        "print(*{name.split('.')[0] for name in set(sys.modules) - before})"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    heavy = {"transformers", "ipywidgets", "IPython", "pandas", "graphviz", "matplotlib", "numpy"}
    assert "fusekit" in printed.split() and not heavy & set(printed.split())


@pytest.mark.parametrize(("width", "length"), [(6, 1), (1, 6), (1, 1), (0, 1)])
def test_weight_and_x_of_one_column_broadcast_as_their_product_does(width, length):
    x, weight = torch.randn(2, 3, width), torch.randn(length)
    want = weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5))
    assert torch.equal(rms_norm(x, weight, 1e-5), want)
