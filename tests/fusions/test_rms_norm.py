"""RMSNorm in its spellings, and what only looks like one."""

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import fusekit as fk


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16))
        self.eps = 1e-3  # large, so that its place shows


class Llama(Norm):
    def forward(self, x):
        dtype = x.dtype
        x = x.to(torch.float32)
        variance = x.pow(2).mean(-1, keepdim=True)
        x = x * torch.rsqrt(variance + self.eps)
        return self.weight * x.to(dtype)


class Olmo2(Norm):
    def forward(self, x):
        dtype = x.dtype
        x = x.to(torch.float32)
        variance = x.pow(2).mean(-1, keepdim=True)
        x = x * torch.rsqrt(variance + self.eps)
        return (self.weight * x).to(dtype)


class Gemma(Norm):
    def forward(self, x):
        output = x.float()
        output = output * torch.rsqrt(output.pow(2).mean(-1, keepdim=True) + self.eps)
        output = output * (1.0 + self.weight.float())
        return output.type_as(x)


class T5(Norm):
    def forward(self, hidden_states):
        variance = hidden_states.to(torch.float32).pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.eps)
        return self.weight * hidden_states


class DividesByRoot(Norm):
    def forward(self, x):
        return self.weight * (x / torch.sqrt((x * x).mean(dim=-1, keepdim=True) + self.eps))


class Power(Norm):
    def forward(self, x):
        return x * (x.square().mean(-1, keepdim=True) + self.eps).pow(-0.5) * self.weight


class Reciprocal(Norm):
    def forward(self, x):
        return x * (1.0 / torch.sqrt(self.eps + torch.mean(x**2, -1, True))) * self.weight


class Weightless(nn.Module):
    eps = 1e-3

    def forward(self, x):
        """Has no weight."""
        h = x.float()
        return (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-3)).to(x.dtype)


class OneLine(Norm):
    def forward(self, x): return x * torch.rsqrt((x * x).mean(-1, True) + self.eps) * self.weight  # fmt: skip


class GemmaByMethod(Norm):
    def _norm(self, x):
        """Normalises."""
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)

    def forward(self, x):
        output = self._norm(x.float())
        output = output * (1.0 + self.weight.float())
        return output.type_as(x)


class SumOfWeight(Norm):
    def forward(self, x):
        h = x.float()
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps)
        return (h * (1.0 + self.weight).float()).type_as(x)


class T5ByDtype(Norm):
    def forward(self, x):
        variance = x.to(torch.float32).pow(2).mean(-1, keepdim=True)
        x = x * torch.rsqrt(variance + self.eps)
        if self.weight.dtype in [torch.float16, torch.bfloat16]:
            x = x.to(self.weight.dtype)
        return self.weight * x


class ImageGPT(Norm):
    def forward(self, x):
        x = x / torch.sqrt(torch.mean(torch.square(x), axis=-1, keepdim=True) + self.eps)
        return x * self.weight


class ChecksSize(Norm):
    width = 16

    def forward(self, x):
        """Refuses another width."""
        if x.size(-1) != self.width:
            raise AssertionError(f"not {self.width} wide")
        dtype = x.dtype
        variance = x.to(torch.float32).pow(2).mean(dim=-1, keepdim=True)
        x = (x * torch.rsqrt(variance + self.eps)).to(dtype) * self.weight
        return x


class WeightFirst(Norm):
    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


class OptionalScale(Norm):
    with_scale = True

    def forward(self, x):
        h = x.float()
        h = h * torch.pow(h.pow(2).mean(-1, keepdim=True) + self.eps, -0.5)
        if self.with_scale:
            h = h * self.weight.float()
        return h.type_as(x)


class OptionalScaleInOneLine(Norm):
    with_scale = True

    def forward(self, x):
        h = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return h * self.weight if self.with_scale else h


class NestedMethods(Norm):
    bias = None
    exact = True

    def _scale(self, mean, eps):
        return torch.rsqrt(mean + eps)

    def _normed(self, x, dim=-1):
        dtype = x.dtype
        if self.exact:
            x = x.float()
        return (x * self._scale(x.pow(2).mean(dim, keepdim=True), self.eps)).to(dtype)

    def _affine(self, x):
        if self.bias is not None:
            x = x + self.bias
        return self.weight * x

    def forward(self, x):
        x = self._normed(x)
        return self._affine(x)


class Unused(Norm):
    def forward(self, x, residual=None, *args, **kwargs):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


class EpsIsAnInput(Norm):
    def forward(self, x, eps=1e-3):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps))


class Config:
    def __init__(self):
        self.eps = 1e-3


class EpsOfConfig(Norm):
    def __init__(self):
        super().__init__()
        self.config = Config()

    def forward(self, x):
        eps = self.config.eps
        return self.weight * (x * torch.rsqrt(torch.add(x.pow(2).mean(-1, keepdim=True), eps)))


class NoEps(Norm):
    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True)))


class Functional(Norm):
    def forward(self, x):
        return F.rms_norm(x, (16,), self.weight, self.eps)


class FunctionalOfAnyWidth(nn.Module):
    def forward(self, x):
        return nn.functional.rms_norm(x, x.shape[-1:])


class OtherOffset(Norm):
    def forward(self, x):
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return x * (self.weight + 0.5)


class Buffered(Norm):
    def __init__(self):
        super().__init__()
        weight = self.weight.detach()
        del self.weight
        self.register_buffer("weight", weight)

    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


def as_float(t):
    return t.float()


def width(t):
    *_, features = t.shape
    return features


class ByFunctions(Norm):
    def forward(self, x):
        features = width(x)
        dtype, x = x.dtype, as_float(x)
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * x.to(dtype)


SPELLINGS = [
    ByFunctions,
    Llama,
    Olmo2,
    Gemma,
    T5,
    DividesByRoot,
    Power,
    Reciprocal,
    Weightless,
    OneLine,
    GemmaByMethod,
    SumOfWeight,
    T5ByDtype,
    ImageGPT,
    ChecksSize,
    WeightFirst,
    OptionalScale,
    OptionalScaleInOneLine,
    NestedMethods,
    Unused,
    EpsIsAnInput,
    EpsOfConfig,
    NoEps,
    Functional,
    FunctionalOfAnyWidth,
    OtherOffset,
    Buffered,
]


@pytest.mark.parametrize("cls", SPELLINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_spelling_fuses_with_the_same_bits(cls, dtype):
    module = cls()
    x = (torch.randn(4, 5, 16) * torch.logspace(-3, 2, 5)[:, None]).to(dtype)
    functional = cls in (Functional, FunctionalOfAnyWidth)  # PyTorch's own warns of two dtypes
    for weight_dtype in {dtype} if functional else {dtype, torch.float32}:
        module.to(weight_dtype)
        want = module(x)
        plan = fk.plan(module)
        assert [site.fusion for site in plan.sites] == ["rms_norm"], [r.message for r in plan.refusals]
        with plan.apply():
            assert "kernels.rms_norm(" in fk.source(module).text
            got = module(x)
        assert got.dtype == want.dtype and torch.equal(got, want)


@pytest.mark.parametrize("cls", SPELLINGS)
def test_gradients_equal(cls):
    module = cls().double()
    x = torch.randn(3, 16, dtype=torch.float64, requires_grad=True)
    wanted = [x, *module.parameters()]
    want = torch.autograd.grad(module(x).square().sum(), wanted)
    with fk.fuse(module):
        got = torch.autograd.grad(module(x).square().sum(), wanted)
    torch.testing.assert_close(got, want)


def test_eps_is_read_from_the_instance():
    model = nn.Sequential(Llama(), Llama())
    model[1].eps = 0.5
    x = torch.randn(2, 16)
    want = model(x)
    with fk.fuse(model):
        assert torch.equal(model(x), want)
        model[0].eps = 2.0
        changed = model(x)
    assert torch.equal(model(x), changed) and not torch.equal(changed, want)


# -- what only looks like one ----------------------------------------------------------------------


class MeanSubtracted(Norm):
    def forward(self, x):
        x = x - x.mean(-1, keepdim=True)
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


class Sum(Norm):
    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + self.eps))


class EpsOutside(Norm):
    def forward(self, x):
        return self.weight * (x / (torch.sqrt(x.pow(2).mean(-1, keepdim=True)) + self.eps))


class OtherAxis(Norm):
    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-2, keepdim=True) + self.eps))


class TwoAxes(Norm):
    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean((-2, -1), keepdim=True) + self.eps))


class ReturnsMore(Norm):
    def forward(self, x):
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * (x * scale), scale


class WritesItsInput(Norm):
    def forward(self, x):
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * x.mul_(scale)


def told(t):
    print(end="")
    return t.float()


class CallsAFunctionThatDoesMore(Norm):
    def forward(self, x):
        x = told(x)
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


class TwoInputs(Norm):
    def forward(self, x, y):
        return self.weight * (x * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps))


class Counts(Norm):
    calls = 0

    def forward(self, x):
        self.calls += 1
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


class Prints(Norm):
    def forward(self, x):
        print("normalising")
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


class Branches(Norm):
    def forward(self, x):
        if x.dtype == torch.float64:
            x = x.float()
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


class ThirdPower(Norm):
    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(3).mean(-1, keepdim=True) + self.eps))


class EpsByProperty(nn.Module):
    reads = 0

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16))

    @property
    def eps(self):
        self.reads += 1
        return 1e-3 * self.reads

    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


class ReadsProperty(Norm):
    reads = 0

    @property
    def tick(self):
        self.reads += 1

    def forward(self, x):
        self.tick
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


class DropsOut(Norm):
    def forward(self, x):
        x = F.dropout(x, 0.5, self.training)
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


class Biased(Norm):
    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)) + self.weight


class FactorFirst(Norm):
    def forward(self, x):  # of a transposed x this makes a contiguous result, x * factor a transposed one
        return torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * x * self.weight


class Partial(Norm):
    def forward(self, x):
        head = x[..., :8]
        scale = torch.rsqrt(head.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * (x * scale)


class PartScaled(Norm):
    def forward(self, x):
        head, tail = x.split(8, -1)
        head = head * torch.rsqrt(head.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * torch.cat([head, tail], -1)


class SumDivided(Norm):
    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) / 16 + self.eps))


class ChannelsFirst(Norm):
    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + self.eps)


class OnlyFactor(nn.Module):
    eps = 1e-3

    def forward(self, x):
        return torch.rsqrt(x.float().square().mean(-1, keepdim=True) + self.eps).to(x.dtype)


class InputScaled(Norm):
    def forward(self, x):
        x = x * self.weight
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


class Doubled(Norm):
    def forward(self, x):
        return 2 * self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


class Grouped(Norm):
    def forward(self, x):
        h = x.view(*x.shape[:-1], 2, 8)
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * h.view(*x.shape)


class Clamped(Norm):
    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True).clamp(min=self.eps)))


class BoundedRoot(Norm):
    def forward(self, x):
        return self.weight * (x / x.pow(2).mean(-1, keepdim=True).sqrt().clamp_min(self.eps))


class Length(Norm):
    def forward(self, x):
        return self.weight * (x / (torch.linalg.vector_norm(x, dim=-1, keepdim=True) + self.eps))


class Normalize(Norm):
    def forward(self, x):
        return F.normalize(x, dim=-1) * self.weight


class LayerNormOfTwoVectors(Norm):
    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.randn(16))

    def forward(self, x):
        variance = x.var(-1, keepdim=True, unbiased=False)
        return (x - x.mean(-1, keepdim=True)) / torch.sqrt(variance + self.eps) * self.weight + self.bias


class BiasBehind(LayerNormOfTwoVectors):
    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)) + self.bias


class CallsLayerNorm(Norm):
    def forward(self, x):
        return F.layer_norm(x, (16,), self.weight, None, self.eps)


class WithSubmodule(Norm):
    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout()

    def forward(self, x):
        return self.drop(self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)))


class EpsTensor(Norm):
    def __init__(self):
        super().__init__()
        self.register_buffer("small", torch.tensor(1e-3))

    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.small))


class OtherDtype(LayerNormOfTwoVectors):
    def forward(self, x):
        h = x.float()
        h = self.weight.float() * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps))
        return h.to(self.bias.dtype)


class DtypeByAttribute(Norm):
    kind = torch.float32

    def forward(self, x):
        h = x.to(self.kind)
        return self.weight * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)


class LikeAnother(Norm):
    def forward(self, x, like):
        return (self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))).to(like.dtype)


class OptionalResidual(Norm):
    def forward(self, x, residual=None):
        if residual is not None:
            x = x + residual
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


class MovesAway(Norm):
    def forward(self, x):
        x = x.to("cpu")
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


class MovesToWeight(Norm):
    def forward(self, x):
        x = x.to(self.weight)
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


class OneWidth(nn.Module):
    def forward(self, x):
        return F.rms_norm(x, (16,))


class WeightNotThere(nn.Module):
    weight = None

    def forward(self, x):
        return F.rms_norm(x, x.shape[-1:], self.weight)


class MixedTest(T5ByDtype):
    lower = True

    def forward(self, x):
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        if self.weight.dtype == torch.float16 and x.dtype == torch.float32:
            x = x.to(self.weight.dtype)
        return self.weight * x


class PrintsForHalf(Norm):
    def forward(self, x):
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        if self.weight.dtype == torch.float16:
            print("half")
        return self.weight * x


class MethodPrints(GemmaByMethod):
    def _norm(self, x):
        print("normalising")
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


class MethodStores(GemmaByMethod):
    def _norm(self, x):
        self.last = 1
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


class MethodDecorated(GemmaByMethod):
    @torch.no_grad()
    def _norm(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


class MethodOnInstance(GemmaByMethod):
    def __init__(self):
        super().__init__()
        self._norm = super()._norm


class MethodWithoutEnd(Norm):
    def _a(self, x):
        return self._b(x)

    def _b(self, x):
        return self._c(x)

    def _c(self, x):
        return self._d(x)

    def _d(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)

    def forward(self, x):
        return self._a(x) * self.weight


class WithoutGrad(Norm):
    def forward(self, x):
        with torch.no_grad():
            scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * x * scale


KINDS = {
    MeanSubtracted: "subtracts the mean, as a LayerNorm does",
    Sum: "sums the squares, and takes no mean of them",
    SumDivided: "sums the squares, and takes no mean of them",
    EpsOutside: "eps is added to the root, not under it",
    OtherAxis: "the mean is not over the last dimension alone, kept",
    TwoAxes: "the mean is not over the last dimension alone, kept",
    ChannelsFirst: "the mean is not over the last dimension alone, kept",
    ReturnsMore: "it returns more than the normalised tensor",
    WritesItsInput: "mul_ writes in place",
    CallsAFunctionThatDoesMore: "it also does this: x = told(x)",
    TwoInputs: "what is squared is not what is scaled",
    Counts: "it also does this: self.calls += 1",
    Prints: 'it also does this: print("normalising")',
    Branches: "it branches on `x.dtype == torch.float64` (which was False while tracing)",
    ThirdPower: "which is no square",
    EpsByProperty: "it also does this",
    ReadsProperty: "it also does this: self.tick",
    DropsOut: "its input is changed before it is normalised",
    Biased: "something is added to it",
    FactorFirst: "for an input that is not contiguous it lays its result out otherwise",
    Partial: "only a part of them is normalised",
    PartScaled: "only a part of them is normalised",
    OnlyFactor: "it returns only the factor",
    InputScaled: "its input is scaled before it is normalised",
    Doubled: "it is multiplied by the number 2",
    Grouped: "it normalises groups of features by themselves",
    Clamped: "the mean is bounded from below, where an RMSNorm adds eps",
    BoundedRoot: "the root is bounded from below",
    Length: "it divides by the length of the vector",
    Normalize: "it divides by the length of the vector",
    LayerNormOfTwoVectors: "it subtracts the mean",
    BiasBehind: "something is added to it",
    CallsLayerNorm: "it calls layer_norm, which is another norm",
    WithSubmodule: "inside of a larger forward",
    EpsTensor: "what is added under the root is no number",
    OtherDtype: "it reads self.bias.dtype, which may be set to another value later",
    DtypeByAttribute: "it reads self.kind, which may be set to another value later",
    LikeAnother: "it takes more than one input, and reads like",
    OptionalResidual: "it branches on `residual is not None`",
    MovesAway: "its input is changed before it is normalised",
    MovesToWeight: "its input is changed before it is normalised",
    OneWidth: "it takes rows of one width alone, and no weight says which",
    WeightNotThere: "it reads self.weight, which may be set later",
    MixedTest: "it branches on `self.weight.dtype == torch.float16 and x.dtype == torch.float32`",
    PrintsForHalf: 'it also does this: print("half")',
    MethodPrints: 'it also does this: print("normalising")',
    MethodStores: "it also does this: self.last = 1",
    MethodDecorated: "it calls self._norm(), which is decorated",
    MethodOnInstance: "it calls self._norm(), which is no method of its class",
    MethodWithoutEnd: "it calls self._d(), a method too deep to be followed",
    WithoutGrad: "it also does this: with torch.no_grad():",
}


@pytest.mark.parametrize("cls", KINDS)
def test_near_norm_is_refused_and_says_which_kind(cls):
    module = cls()
    plan = fk.plan(module)
    assert plan.sites == ()
    (refusal,) = plan.refusals
    assert refusal.fusion == "rms_norm"
    assert refusal.reason in ("not-this-function", "input-written")
    assert KINDS[cls] in refusal.message


def test_refusal_names_the_line_that_decides():
    first = ReturnsMore.forward.__code__.co_firstlineno
    assert fk.plan(ReturnsMore()).refusals[0].line == first + 2
    first = EpsOutside.forward.__code__.co_firstlineno
    assert fk.plan(EpsOutside()).refusals[0].line == first + 1
    first = PrintsForHalf.forward.__code__.co_firstlineno
    assert fk.plan(PrintsForHalf()).refusals[0].line == first + 3
    first = MethodPrints._norm.__code__.co_firstlineno
    assert fk.plan(MethodPrints()).refusals[0].line == first + 1


class Shapes(Norm):
    def forward(self, x):
        x = x.reshape(7, 3, 16)
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


class FrozenBatchNorm(Norm):
    def __init__(self):
        super().__init__()
        self.register_buffer("variance", torch.rand(5))

    def forward(self, x):
        return x * torch.rsqrt(self.variance + self.eps)


def test_norm_that_cannot_be_followed_is_named():
    (refusal,) = fk.plan(Shapes()).refusals
    assert (refusal.fusion, refusal.reason) == ("rms_norm", "trace-stopped")
    assert refusal.line == Shapes.forward.__code__.co_firstlineno + 1
    assert fk.plan(FrozenBatchNorm()).refusals == ()  # no mean of anything


class NormInsideOfMore(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x):
        h = self.a(x)
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-3)
        return self.b(h)


class LinearThenNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(16, 16)

    def forward(self, x):
        h = self.a(x)
        return h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-3)


@pytest.mark.parametrize("cls", [NormInsideOfMore, LinearThenNorm])
def test_norm_written_into_a_larger_forward_is_named(cls):
    (refusal,) = fk.plan(cls()).refusals
    assert (refusal.fusion, refusal.reason) == ("rms_norm", "not-this-function")
    assert "inside of a larger forward" in refusal.message
    assert refusal.line == cls.forward.__code__.co_firstlineno + 2


@pytest.mark.parametrize("cls", [nn.LayerNorm, nn.RMSNorm])
def test_norms_of_pytorch_need_no_entry(cls):
    class Own(cls):
        pass

    for module in (cls(16), Own(16)):
        plan = fk.plan(module)
        assert (plan.sites, plan.refusals) == ((), ())


def test_computing_eps_for_one_norm_changes_nothing_for_another():
    # One class, two instances: the plan of the second must not be the first's.
    one, other = Llama(), Llama()
    other.weight = nn.Parameter(torch.randn(3, 16))
    assert [site.fusion for site in fk.plan(one).sites] == ["rms_norm"]
    assert fk.plan(other).sites == ()


@pytest.mark.parametrize(("weights", "width"), [(1, 16), (1, 1), (64, 1), (64, 64)])
def test_weight_of_one_element_and_input_of_one_column_broadcast(weights, width):
    module = Llama()
    module.weight = nn.Parameter(torch.full((weights,), 1.5))
    x = torch.randn(3, 5, width)
    want = module(x)
    plan = fk.plan(module)
    assert [site.fusion for site in plan.sites] == ["rms_norm"], [r.message for r in plan.refusals]
    with plan.apply():
        assert torch.equal(module(x), want)

    if weights == 64:
        with plan.apply(), pytest.raises(ValueError, match=r"weight has shape \[64\] and x has shape"):
            module(torch.randn(3, 5))


def test_weight_of_one_element_is_probed_over_several_columns():
    # Over one column every x becomes about 1 or -1, and roundings that differ would look alike.
    module = Olmo2()
    module.weight = nn.Parameter(torch.tensor([0.7]))
    x = (torch.randn(4, 32) * torch.logspace(-3, 2, 4)[:, None]).to(torch.bfloat16)
    want = module(x)
    with fk.fuse(module):
        assert "output=" in fk.source(module).text
        assert torch.equal(module(x), want)


class ScalarWeight(Norm):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


def test_weight_that_is_a_number_is_refused_and_says_so():
    (refusal,) = fk.plan(ScalarWeight()).refusals
    assert (refusal.fusion, refusal.reason) == ("rms_norm", "not-this-function")


# -- instances that differ, and change after fusing ------------------------------------------------


def text_of(module):
    return fk.source(module).text


def same_bits(module, fused, *inputs):
    """Whether the module gives the same unfused, on every one of the inputs."""
    with fused:
        got = [module(*x) for x in inputs]
    want = [module(*x) for x in inputs]
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(got, want, strict=True))


ROWS = torch.randn(6, 16, dtype=torch.float64) * torch.logspace(-3, 1, 6, dtype=torch.float64)[:, None]
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@pytest.mark.parametrize("cls", [T5ByDtype, GemmaByMethod, OptionalScale, ImageGPT, SumOfWeight, WeightFirst])
def test_a_dtype_set_after_fusing_gives_the_bits_of_the_unfused(cls):
    module = cls()
    plan = fk.plan(module)
    for dtype in DTYPES:
        module.to(dtype)
        assert same_bits(module, plan.apply(), *((ROWS.to(other),) for other in DTYPES))


def test_t5_takes_one_line_for_every_dtype():
    module = T5ByDtype()
    with fk.fuse(module):
        text = text_of(module)
    assert 'kernels.rms_norm(x, self.weight, self.eps, normalized="weight", scaled="input")' in text
    assert "if " not in text


def test_check_of_the_size_stays():
    module = ChecksSize()
    with fk.fuse(module):
        assert "rsqrt" not in text_of(module)
        with pytest.raises(AssertionError, match="not 16 wide"):
            module(torch.randn(2, 1))


def test_state_that_a_branch_asks_is_asked_again():
    module = OptionalScale()
    with fk.fuse(module):
        assert "if self.with_scale:\n            return kernels.rms_norm(" in text_of(module)
        module.with_scale = False
        off = module(ROWS)
        module.with_scale = True
        on = module(ROWS)
    assert torch.equal(module(ROWS), on)
    module.with_scale = False
    assert torch.equal(module(ROWS), off) and not torch.equal(off, on)


def test_instances_of_one_class_that_branch_apart_are_fused_apart():
    model = nn.Sequential(OptionalScale(), OptionalScale())
    model[1].with_scale = False
    want = model(ROWS)
    plan = fk.plan(model)
    assert [site.fusion for site in plan.sites] == ["rms_norm", "rms_norm"]
    assert "if not self.with_scale:" in str(plan.sites[1].diff)
    with plan.apply():
        assert torch.equal(model(ROWS), want)


def test_tests_of_methods_guard_the_fused_line():
    module = NestedMethods()
    with fk.fuse(module) as fused:
        assert "if self.exact and self.bias is None:" in text_of(module)
        module.bias = torch.ones(16)
        assert same_bits(module, fused, (ROWS,))
    assert torch.equal(module(ROWS), module._normed(ROWS) * module.weight + module.weight)


def test_eps_that_is_an_input_is_passed_on_where_it_is_a_number():
    module = EpsIsAnInput()
    with fk.fuse(module) as fused:
        assert "if isinstance(eps, float):" in text_of(module)
        assert same_bits(module, fused, (ROWS,), (ROWS, 0.5), (ROWS, torch.tensor(0.25)), (ROWS, 1))


def test_weight_replaced_after_fusing_is_read():
    module = GemmaByMethod()
    with fk.fuse(module) as fused:
        module.weight = nn.Parameter(torch.randn(16))
        assert same_bits(module, fused, (ROWS,), (ROWS.bfloat16(),))


def test_eps_of_a_method_is_read_from_the_instance():
    model = nn.Sequential(GemmaByMethod(), NestedMethods(), EpsOfConfig())
    model[0].eps, model[1].eps, model[2].config.eps = 0.5, 0.25, 2.0
    want = model(ROWS)
    with fk.fuse(model):
        assert torch.equal(model(ROWS), want)
        model[1].eps = 1e-6
        changed = model(ROWS)
    assert torch.equal(model(ROWS), changed) and not torch.equal(changed, want)


def test_like_instances_share_one_analysis():
    # `self.weight.float` is another object each time it is read.
    one, two = GemmaByMethod(), GemmaByMethod()
    assert fk.plan(one).sites[0].analysis is fk.plan(two).sites[0].analysis
    two.half()
    assert fk.plan(one).sites[0].analysis is not fk.plan(two).sites[0].analysis


class Overrides(GemmaByMethod):
    def _norm(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 2 * self.eps)


def test_method_of_a_subclass_is_the_one_that_is_read():
    (refusal,) = fk.plan(Overrides()).refusals
    assert "it reads self.eps, which may be set to another value later" in refusal.message


def test_decorators_of_the_forward_stay():
    class Decorated(Norm):
        @torch.no_grad()
        def forward(self, x):
            return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))

    module = Decorated()
    want = module(ROWS)
    with fk.fuse(module):
        got = module(ROWS)
        assert "kernels.rms_norm(" in text_of(module)
    assert torch.equal(got, want) and not got.requires_grad


def test_compiled_forward_stays_compiled():
    class Compiled(Norm):
        forward = torch.compile(Llama.forward, backend="eager")

    module = Compiled()
    want = module(ROWS)
    with fk.fuse(module) as fused:
        assert [site.fusion for site in fused.sites] == ["rms_norm"]
        assert torch.equal(module(ROWS), want)


def test_a_proven_norm_may_run_between_merged_linears():
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k, self.v = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)
            self.q_norm, self.k_norm = GemmaByMethod(), OptionalScale()

        def forward(self, x):
            q = self.q_norm(self.q(x))
            k = self.k_norm(self.k(x))
            v = self.v(x)
            return F.scaled_dot_product_attention(q, k, v)

    module = Attention()
    plan = fk.plan(module)
    assert [(site.name, site.fusion) for site in plan.sites] == [
        ("", "qkv"),
        ("q_norm", "rms_norm"),
        ("k_norm", "rms_norm"),
    ]
    x = torch.randn(2, 5, 16)
    want = module(x)
    with plan.apply():
        torch.testing.assert_close(module(x), want)


# -- in general ------------------------------------------------------------------------------------

CASTS = ["{}", "{}.float()", "{}.to(torch.float32)", "{}.to(x.dtype)", "{}.double()", "{}.type_as(x)"]
SQUARES = ["{}.pow(2)", "({} ** 2)", "{}.square()", "torch.square({})"]
SCALED = [
    "{h} * torch.rsqrt({m} + self.eps)",
    "torch.rsqrt(self.eps + {m}) * {h}",
    "{h} / torch.sqrt({m} + self.eps)",
    "{h} * ({m} + self.eps) ** -0.5",
    "{h} * (1.0 / ({m} + self.eps).sqrt())",
]
WEIGHTED = [
    "self.weight * {}",
    "{} * self.weight",
    "{} * (1 + self.weight)",
    "{}",
    "self.weight.float() * {}",
]


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(CASTS),
    st.sampled_from(SQUARES),
    st.sampled_from(SCALED),
    st.sampled_from(CASTS),
    st.sampled_from(WEIGHTED),
    st.sampled_from(CASTS),
    st.booleans(),
    st.sampled_from(["", "assert x.ndim", "if x.shape[-1] != 16: raise ValueError(x.shape)"]),
)
def test_any_order_of_casts_is_fused_in_its_own_bits_or_refused(
    tmp_path_factory, first, square, scaled, middle, weighted, last, by_method, check
):
    h, mean = first.format("x"), square.format("h") + ".mean(-1, keepdim=True)"
    normed = scaled.format(h="h", m=mean)
    body = f"return {last.format('(' + weighted.format(middle.format('y')) + ')')}"
    if by_method:
        methods = f"    def n(self, h):\n        return {normed}\n"
        lines = [f"y = self.n({h})", body]
    else:
        methods, lines = "", [f"h = {h}", f"y = {normed}", f"y = {middle.format('y')}", body]
    lines = [check] * bool(check) + lines
    text = "import torch\nfrom torch import nn\n\n\nclass Made(nn.Module):\n" + methods
    text += "    def forward(self, x):\n" + "".join(f"        {line}\n" for line in lines)
    path = tmp_path_factory.mktemp("made") / "made.py"
    path.write_text(text)
    names = {}
    exec(compile(text, str(path), "exec"), names)
    module = names["Made"]()
    module.weight, module.eps = nn.Parameter(torch.randn(16)), 1e-3
    plan = fk.plan(module)
    assert [found.fusion for found in (*plan.sites, *plan.refusals)] == ["rms_norm"]
    if plan.sites:
        for dtype in DTYPES:
            module.to(dtype)
            assert same_bits(module, plan.apply(), *((ROWS.to(other),) for other in DTYPES))
        swapped = ROWS.reshape(2, 3, 16).transpose(0, 1)
        want = module(swapped)
        with plan.apply():
            assert module(swapped).stride() == want.stride()
    else:
        said = ("no order of rounding gives its bits", "lays its result out otherwise")
        assert any(words in plan.refusals[0].message for words in said)


def test_an_arm_that_this_instance_cannot_run_does_not_matter():
    module = OptionalScale()
    module.with_scale = False
    del module.weight
    want = module(ROWS)
    with fk.fuse(module) as fused:
        assert [site.fusion for site in fused.sites] == ["rms_norm"]
        assert torch.equal(module(ROWS), want)
