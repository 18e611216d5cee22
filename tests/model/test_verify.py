"""verify(): it passes what is right, fails what is wrong, and says what it did not run."""

import copy
import re

import pytest
import torch
import torch.nn as nn
from transformers import (
    BertConfig,
    BertModel,
    LlamaConfig,
    LlamaForCausalLM,
)

import fusekit as fk
from fusekit import kernels
from fusekit.model import gradients, storage
from fusekit.model.compare import same_bits, text_check
from fusekit.model.lifted import Lifted
from fusekit.model.runs import generated, next_logits


def small_llama(**changes) -> LlamaForCausalLM:
    settings = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 60,
        "eos_token_id": None,
        "bos_token_id": None,
    }
    model = LlamaForCausalLM(LlamaConfig(**settings | changes)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3 + 0.1)
    return model


class Block(nn.Module):
    """Attention as in nanoGPT: biases, a softmax, no rotary embedding."""

    def __init__(self, width=32, heads=4):
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.proj = nn.Linear(width, width)

    def forward(self, x):
        B, T, C = x.shape
        y = self.norm(x)
        q = self.query(y).view(B, T, self.heads, -1).transpose(1, 2)
        k = self.key(y).view(B, T, self.heads, -1).transpose(1, 2)
        v = self.value(y).view(B, T, self.heads, -1).transpose(1, 2)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.proj(y.transpose(1, 2).reshape(B, T, C))


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 3), nn.Linear(4, 5)

    def forward(self, x):
        return self.a(x), self.b(x)


def small_bert():
    settings = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
    model = BertModel(BertConfig(vocab_size=60, **settings), add_pooling_layer=False).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.02)
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[1, 8:] = 0
    return model, {"input_ids": torch.randint(60, (2, 12)), "attention_mask": mask}


def small_gpt():
    model = nn.Sequential(nn.Embedding(50, 32), Block(), Block(), nn.Linear(32, 50))
    return model, {"input": torch.randint(50, (2, 12))}


NO_TEXT = ("top-1", "generation")


def checks(report, what):
    return [check for check in report.checks if check.what == what]


def test_a_right_fusion_passes_every_check():
    model = small_llama()
    report = fk.plan(model).verify()
    assert report.ok, report
    assert {check.what for check in report.checks} == {
        "outputs",
        "gradients",
        "state dict",
        "top-1",
        "generation",
        "site",
    }
    assert len(checks(report, "site")) == report.sites == 9
    assert {check.name for check in checks(report, "gradients")} == dict(model.named_parameters()).keys()
    assert [layer.name for layer in report.layers] == ["model.layers.0", "model.layers.1"]
    assert report.not_run == ()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_dtypes_pass_in_their_own_dtype(dtype):
    report = fk.plan(small_llama().to(dtype)).verify()
    assert report.ok, report
    assert report.dtype == str(dtype).removeprefix("torch.")
    assert checks(report, "outputs")[0].unfused_max > 1e-4  # rounding in the model's own dtype shows


def test_the_model_is_left_as_it_was():
    model = small_llama()
    model.model.layers[0].mlp.gate_proj.weight.requires_grad_(False)
    model.train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    random = torch.get_rng_state()
    classes = [type(module) for module in model.modules()]
    fk.plan(model).verify(generate=2)
    assert classes == [type(module) for module in model.modules()]
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not model.model.layers[0].mlp.gate_proj.weight.requires_grad
    assert model.training
    assert torch.equal(random, torch.get_rng_state())


def test_a_plan_made_in_training_mode_is_verified_in_eval_mode():
    class Drops(Pair):
        def forward(self, x):
            if self.training:
                x = nn.functional.dropout(x, 0.5, True)
            return self.a(x), self.b(x)

    model = Drops().train()
    report = fk.plan(model).verify({"x": torch.randn(2, 4)}, skip=NO_TEXT)
    assert report.ok and model.training, report


def test_an_applied_plan_can_be_verified_and_stays_applied():
    model = small_llama()
    with fk.plan(model).apply():
        report = fk.plan(model).verify(generate=2)
        assert report.ok and report.sites == 9
        assert len(fk.plan(model).applied) == 9


def test_a_wrong_norm_fails_outputs_gradients_and_its_sites(monkeypatch):
    model = small_llama()
    plan = fk.plan(model)
    right = kernels.rms_norm
    monkeypatch.setattr(kernels, "rms_norm", lambda x, w, eps, **form: right(x, w, eps * 1000 + 1e-3, **form))
    report = plan.verify(generate=2)
    assert not report.ok
    assert not checks(report, "outputs")[0].ok
    assert not all(check.ok for check in checks(report, "gradients"))
    wrong = [check for check in checks(report, "site") if not check.ok]
    assert wrong and {check.fusion for check in wrong} == {"rms_norm"}


def test_a_gradient_that_goes_to_the_wrong_rows_fails(monkeypatch):
    right = gradients.Rows.backward

    def swapped(ctx, grad):
        whole, sizes, used, first, second, *rest = right(ctx, grad)
        return whole, sizes, used, first, second * 1.01, *rest

    monkeypatch.setattr(gradients.Rows, "backward", staticmethod(swapped))
    report = fk.plan(small_llama(), only=["qkv"]).verify(generate=2)
    wrong = {check.name for check in checks(report, "gradients") if not check.ok}
    assert wrong == {f"model.layers.{i}.self_attn.k_proj.weight" for i in (0, 1)}
    assert checks(report, "outputs")[0].ok and not report.ok


@pytest.mark.parametrize("make", [small_bert, small_gpt])
@pytest.mark.parametrize("factor", [-3, 1.05])
def test_a_key_bias_without_gradient_hides_no_wrong_gradient(make, factor, monkeypatch):
    model, inputs = make()
    right = gradients.Rows.backward

    def wrong(ctx, grad):
        whole, sizes, used, first, *rest = right(ctx, grad)
        return whole, sizes, used, first if first is None else first * factor, *rest

    monkeypatch.setattr(gradients.Rows, "backward", staticmethod(wrong))
    report = fk.plan(model).verify(inputs=inputs, skip=NO_TEXT)
    bad = [check.name for check in checks(report, "gradients") if not check.ok]
    assert len(bad) == 4 and all("query" in name for name in bad)  # weight and bias, two layers
    assert all(check.ok for check in report.checks if check.what != "gradients")


@pytest.mark.parametrize("make", [small_bert, small_gpt])
def test_a_key_bias_without_gradient_fails_no_right_gradient(make):
    for seed in range(6):
        torch.manual_seed(seed)
        model, inputs = make()
        report = fk.plan(model).verify(inputs=inputs, skip=NO_TEXT)
        assert report.ok, report
        (bias, *_) = [c for c in checks(report, "gradients") if c.name.endswith("key.bias")]
        assert bias.unfused_max > 0  # nothing but rounding: its exact gradient is zero


def test_every_gradient_of_smollm2_is_right(smollm2):
    report = fk.plan(smollm2[0]).verify(tokens=8, generate=4)
    assert report.ok, report
    assert len(checks(report, "gradients")) == 272


def test_a_row_says_the_error_and_of_how_much():
    detail = checks(fk.plan(small_llama()).verify(generate=2), "gradients")[0].detail
    assert re.fullmatch(r"largest error \S+ of \S+, \S+ unfused; allowed \S+", detail)


def test_a_changed_weight_fails_the_state_dict(monkeypatch):
    tie = storage.MergedLinear.tie

    def careless(self):
        done = tie(self)
        with torch.no_grad():
            self.weight[0, 0] += 1e-3
        return done

    monkeypatch.setattr(storage.MergedLinear, "tie", careless)
    report = fk.plan(small_llama(), only=["qkv"]).verify(generate=2)
    (check,) = checks(report, "state dict")
    assert not check.ok and "q_proj.weight" in check.detail


def test_what_cannot_run_is_listed_and_is_not_ok():
    plan = fk.plan(Pair())
    report = plan.verify()
    assert not report.ok and report.checks == ()
    (left,) = report.not_run
    assert left.what == "all checks"
    assert left.reason == 'no inputs are known for a Pair: pass verify(inputs={"x": ...})'
    given = plan.verify({"x": torch.randn(2, 4)})
    assert given.ok, given
    assert {left.what for left in given.not_run} == {"top-1", "generation"}  # they do not apply to it
    assert [check.name for check in checks(given, "outputs")] == ["output 0", "output 1"]


def test_a_model_without_weights_is_not_ok():
    with torch.device("meta"):
        model = small_llama()
    report = fk.plan(model).verify()
    assert not report.ok
    assert "meta device" in report.not_run[0].reason


def test_a_plan_that_fuses_nothing_proves_nothing():
    report = fk.plan(nn.Sequential(nn.Linear(2, 2))).verify()
    assert not report.ok and "nothing to compare" in report.not_run[0].reason


@pytest.mark.parametrize("options", [{"tokens": 0}, {"generate": 0}])
def test_a_number_of_tokens_is_positive(options):
    with pytest.raises(fk.FusekitError, match="it must be 1 or more"):
        fk.plan(small_llama()).verify(**options)


def test_an_unknown_check_is_named():
    with pytest.raises(fk.FusekitError, match=r"skip='gradient'.*gradients"):
        fk.plan(small_llama()).verify(skip=("gradient",))


# -- what cannot run ---------------------------------------------------------------------------


class OnlyFloat32(Pair):
    def forward(self, x):
        if x.dtype == torch.float64:
            raise TypeError("no float64 here")
        return self.a(x), self.b(x)


def test_a_model_that_does_not_run_in_float64_is_compared_all_the_same():
    report = fk.plan(OnlyFloat32()).verify({"x": torch.randn(2, 4)}, skip=NO_TEXT)
    assert [left.what for left in report.not_run if not left.excused] == ["outputs, gradients", "site"]
    assert all("float64" in left.reason for left in report.not_run if not left.excused) and not report.ok
    assert [check.what for check in report.checks if check.ok] == ["state dict"]


def test_inputs_that_the_model_cannot_take_are_listed():
    report = fk.plan(Pair()).verify({"x": torch.randn(2, 7)})
    (left,) = report.not_run
    assert left.what == "outputs, gradients, top-1, generation, site"
    assert "RuntimeError: mat1 and mat2 shapes" in left.reason
    assert [check.what for check in report.checks] == ["state dict"] and not report.ok


class Fails(Pair):
    """Fails where `where(x)` says so."""

    def __init__(self, where, error=ValueError):
        super().__init__()
        self.sub = Pair()
        self.fail = Failing(where, error)

    def forward(self, x):
        return *self.sub(x), self.fail(self.sub.a(x))


class Failing(nn.Module):
    def __init__(self, where, error):
        super().__init__()
        self.where, self.error = where, error

    def forward(self, x):
        if self.where(x):
            raise self.error("on purpose\nand more")
        return x


def test_a_float64_run_that_fails_leaves_the_sites():
    model = Fails(lambda x: x.dtype == torch.float64)
    report = fk.plan(model).verify({"x": torch.randn(2, 4)}, skip=NO_TEXT)
    assert [check.what for check in report.checks if check.ok] == ["state dict", "site"]
    (left,) = [left for left in report.not_run if not left.excused]
    assert left.what == "outputs, gradients" and left.reason.endswith("ValueError: on purpose")


def test_a_backward_that_fails_leaves_the_rest():
    class NoBackward(torch.autograd.Function):
        forward = staticmethod(lambda ctx, x: x.clone())
        backward = staticmethod(lambda ctx, grad: 1 / 0)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.pair = Pair()

        def forward(self, x):
            a, b = self.pair(x)
            return NoBackward.apply(a), b

    report = fk.plan(Model()).verify({"x": torch.randn(2, 4)}, skip=NO_TEXT)
    (left,) = [left for left in report.not_run if not left.excused]
    assert left.what == "gradients" and "ZeroDivisionError" in left.reason
    assert len(checks(report, "outputs")) == 2 and all(check.ok for check in report.checks)


def test_a_site_whose_module_fails_in_float64_is_listed():
    class Strict(Pair):
        def __init__(self):
            super().__init__()
            self.fail = Failing(lambda x: x.dtype == torch.float64, ValueError)

        def forward(self, x):
            a, b = self.a(x), self.b(x)
            return self.fail(a), b

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = Strict(), Pair()

        def forward(self, x):
            return *self.one(x), *self.two(x)

    plan = fk.plan(Model())
    assert {site.name for site in plan.sites} == {"one", "two"}
    report = plan.verify({"x": torch.randn(2, 4)}, skip=NO_TEXT)
    assert [check.name for check in checks(report, "site")] == ["two"]
    (left,) = [left for left in report.not_run if left.what == "site"]
    assert left.reason == "one: the module fails in float64: ValueError: on purpose"


def test_a_site_that_is_not_called_is_listed():
    class Idle(nn.Module):
        def __init__(self):
            super().__init__()
            self.pair, self.last = Pair(), nn.Linear(4, 4)

        def forward(self, x):
            return self.last(x)

    report = fk.plan(Idle()).verify({"x": torch.randn(2, 4)}, skip=NO_TEXT)
    assert not report.ok
    assert "pair: it was not called in this run" in [left.reason for left in report.not_run]


def test_generation_that_fails_is_listed(monkeypatch):
    model = small_llama()

    def generate(self, **kwargs):
        raise NotImplementedError("no text today")

    monkeypatch.setattr(LlamaForCausalLM, "generate", generate, raising=False)
    report = fk.plan(model).verify()
    (left,) = report.not_run
    assert left.what == "generation" and left.reason.endswith("NotImplementedError: no text today")
    assert checks(report, "outputs")[0].ok and not report.ok


def test_a_fused_model_that_fails_has_failed_a_check(monkeypatch):
    plan = fk.plan(small_llama())

    def broken(x, w, eps, **form):
        raise TypeError("a kernel that does not run")

    monkeypatch.setattr(kernels, "rms_norm", broken)
    report = plan.verify(generate=2)
    (check,) = checks(report, "outputs")
    assert not check.ok and check.detail == "the fused model fails: TypeError: a kernel that does not run"
    assert not checks(report, "generation")[0].ok and not report.ok
    assert {c.fusion for c in checks(report, "site") if not c.ok} == {"rms_norm"}


def test_a_fused_backward_that_fails_has_failed_a_check(monkeypatch):
    monkeypatch.setattr(gradients.Rows, "backward", staticmethod(lambda ctx, grad: 1 / 0))
    report = fk.plan(Pair()).verify({"x": torch.randn(2, 4)}, skip=NO_TEXT)
    (check,) = checks(report, "gradients")
    assert not check.ok and "ZeroDivisionError" in check.detail
    assert all(check.ok for check in checks(report, "outputs"))


def test_an_interrupt_is_not_caught():
    with pytest.raises(KeyboardInterrupt):
        fk.plan(Fails(lambda x: True, KeyboardInterrupt)).verify({"x": torch.randn(2, 4)})


@pytest.mark.parametrize("fails", [False, True])
def test_a_fork_without_a_float64_run_is_judged_by_the_tokens(fails):
    before, after = torch.tensor([[1, 2, 3]]), torch.tensor([[1, 2, 4 if fails else 3]])
    check = text_check(before, after, 2, 1.0, lambda row, tokens: None)
    assert check.ok is not fails and ("no float64 run" in check.detail) is fails


def test_a_fork_that_float64_tells_apart_fails():
    before, after = torch.tensor([[1, 2, 3]]), torch.tensor([[1, 2, 0]])
    logits = torch.tensor([0.0, 0.0, 0.0, 0.5])
    assert text_check(before, after, 2, 0.6, lambda row, tokens: logits).ok
    assert not text_check(before, after, 2, 0.4, lambda row, tokens: logits).ok


def test_logits_after_a_padded_prompt_are_those_of_generate():
    model = small_llama()
    mask = torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1]])
    inputs = {"input_ids": torch.randint(60, (2, 4)), "attention_mask": mask}
    ids = generated(model, inputs, 4).ids
    for row in (0, 1):
        found = [int(next_logits(model, inputs, row, ids[row, :end]).argmax()) for end in range(4, 8)]
        assert found == ids[row, 4:].tolist()


# -- inputs ------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [torch.randn(2, 4), (torch.randn(2, 4),), {0: torch.randn(2, 4)}])
def test_inputs_are_keyword_arguments(wrong):
    with pytest.raises(fk.FusekitError, match=r"dict of the forward's keyword arguments.*\{'x': \.\.\.\}"):
        fk.plan(Pair()).verify(wrong)


def test_names_that_the_forward_does_not_take_are_named():
    plan = fk.plan(Pair())
    with pytest.raises(fk.FusekitError, match=r"Pair.forward takes no 'y'; it takes x"):
        plan.verify({"y": torch.randn(2, 4)})
    with pytest.raises(fk.FusekitError, match=r"missing a required argument: 'x'"):
        plan.verify({})
    with plan.apply(), pytest.raises(fk.FusekitError, match=r"Pair.forward takes no 'y'; it takes x"):
        plan.verify({"y": torch.randn(2, 4)})


def test_a_plan_made_with_inputs_is_verified_as_it_is():
    class Flat(Pair):
        def forward(self, x, shift=None):
            if shift is not None:
                x = x + shift
            return self.a(x), self.b(x)

    x, shift = torch.randn(2, 4), torch.randn(4)
    plan = fk.plan(Flat(), {"x": x, "shift": shift})
    report = plan.verify({"x": x, "shift": shift}, skip=NO_TEXT)
    assert report.ok and report.sites == 1, report


def test_a_module_replaced_since_the_plan_is_named():
    model = nn.Sequential(Pair())
    plan = fk.plan(model)
    model[0] = Pair()
    with pytest.raises(fk.FusekitError, match=r"^0: another module is in its place.*plan again"):
        plan.verify({"input": torch.randn(2, 4)})


def test_a_cache_among_the_inputs_grows_in_no_run():
    model = small_llama()
    ids = torch.randint(60, (2, 6))
    with torch.no_grad():
        cache = model(ids).past_key_values
    length = cache.get_seq_length()
    report = fk.plan(model).verify({"input_ids": ids, "past_key_values": cache}, skip=("generation",))
    assert cache.get_seq_length() == length
    assert report.ok, report


# -- bits --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64, torch.complex128]
)
def test_a_negative_zero_is_no_zero(dtype):
    zero = torch.zeros(3, dtype=dtype)
    assert same_bits(zero, zero.clone()) and not same_bits(zero, -zero)


def test_bits_of_every_kind():
    nan = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert same_bits(nan, nan.clone()) and not same_bits(nan, nan.flip(0))
    small = torch.tensor([0.0, 1.5]).to(torch.float8_e4m3fn)
    assert same_bits(small, small.clone()) and not same_bits(small, (-small.float()).to(small.dtype))
    for left in (torch.tensor([True, False]), torch.tensor(3), torch.empty(0), torch.randn(3, 4).t()):
        assert same_bits(left, left.clone())
    assert not same_bits(torch.tensor([True]), torch.tensor([False]))
    assert not same_bits(torch.tensor(3), torch.tensor(4))
    assert not same_bits(torch.zeros(2), torch.zeros(2, dtype=torch.int32))
    assert same_bits(torch.tensor([1 + 2j]).conj(), torch.tensor([1 - 2j]))


# -- the reference -----------------------------------------------------------------------------


def test_the_float64_run_lifts_casts_and_new_tensors():
    class Casts(nn.Module):
        def forward(self, x):
            y = x.to(torch.float32) * torch.ones(3, dtype=torch.float16)
            return y.softmax(-1, dtype=torch.float32) + torch.arange(3).float() / 3

    x = torch.randn(3, dtype=torch.float64)
    exact = x.softmax(-1) + torch.arange(3, dtype=torch.float64) / 3
    with Lifted():
        lifted = Casts()(x)
    assert lifted.dtype == torch.float64 and torch.equal(lifted, exact)
    assert not torch.equal(Casts()(x).double(), exact)


@pytest.mark.parametrize(
    ("left", "right"),
    [((12, 8), (3, 8, 4)), ((8, 12), (12, 4)), ((3, 4, 8), (8, 12)), ((3, 4, 8), (3, 8, 4))],
)
def test_groups_are_multiplied_in_float64_as_in_float32(left, right):
    results = []
    inputs = torch.randn(left), torch.randn(right)
    offs = torch.tensor([4, 4, 12], dtype=torch.int32) if min(len(left), len(right)) == 2 else None
    for dtype in (torch.float32, torch.float64):
        one, two = (value.detach().to(dtype, copy=True).requires_grad_() for value in inputs)
        with Lifted() if dtype == torch.float64 else torch.enable_grad():
            out = torch.nn.functional.grouped_mm(one, two, offs=offs)
            out.square().sum().backward()
        results.append((out, one.grad, two.grad))
    assert all(value.dtype == torch.float64 for value in results[1])
    for narrow, wide in zip(*results, strict=True):
        torch.testing.assert_close(narrow.double(), wide, rtol=1e-5, atol=1e-5)


def test_a_plain_double_copy_would_be_no_float64_reference():
    model = small_llama()
    exact = copy.deepcopy(model).double()
    ids = torch.randint(60, (1, 5))
    with torch.no_grad():
        plain = exact(ids).logits.double()
        with Lifted():
            reference = exact(ids).logits
    assert reference.dtype == torch.float64
    assert 1e-9 < (plain - reference).abs().max() < 1e-2  # norms and rotary tables round to float32
