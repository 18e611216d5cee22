"""`NormForm`: source text that means what the form means, and a list in which no two are one function."""

import dataclasses
import inspect

import pytest
import torch
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.t5.modeling_t5 import T5LayerNorm

from fusekit.kernels import NORM_PROBES, NormForm, norm_forms, rms_norm

INVERSES = ("rsqrt", "sqrt", "reciprocal", "pow")


def probe(form, weighted=True):
    """All bits that `form` gives over the probing dtypes."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 32, generator=generator, dtype=torch.float64)
    weight = torch.randn(32, generator=generator, dtype=torch.float64)
    results = []
    for dtype, weight_dtype in NORM_PROBES:
        w = weight.to(weight_dtype) if weighted else None
        got = rms_norm(x.to(dtype), w, 1e-6, **form.keywords())
        results.append((got.dtype, got.double().numpy().tobytes()))
    return tuple(results)


def test_fields_are_the_keywords_of_rms_norm_in_its_order():
    parameters = inspect.signature(rms_norm).parameters.values()
    keywords = {p.name: p.default for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}
    fields = {field.name: field.default for field in dataclasses.fields(NormForm)}
    assert list(fields.items()) == list(keywords.items())


def test_source_says_only_what_departs_from_the_default():
    assert NormForm().source() == ""
    gemma = NormForm(1, normalized=None, weight_dtype="compute", output="input")
    assert gemma.source() == 'offset=1.0, normalized=None, weight_dtype="compute", output="input"'
    assert NormForm(inverse="sqrt", compute_dtype=None).source() == 'compute_dtype=None, inverse="sqrt"'


def test_source_evaluates_to_the_form_without_any_name_in_scope():
    for form in norm_forms():
        assert NormForm(**eval(f"dict({form.source()})", {"__builtins__": {"dict": dict}})) == form


def test_form_refuses_what_rms_norm_refuses():
    with pytest.raises(ValueError, match="inverse is 'cbrt'"):
        NormForm(inverse="cbrt")


def test_forms_start_with_llamas_and_grow_more_special():
    departures = [len(form.keywords()) for form in norm_forms()]
    assert departures[0] == 0 and departures == sorted(departures)
    assert len(set(norm_forms())) == len(departures)


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("inverse", INVERSES)
def test_no_two_forms_of_one_inverse_are_one_function(inverse, weighted):
    forms = list(norm_forms(weight=weighted, inverse=inverse))
    assert {form.inverse for form in forms} == {inverse}
    assert len({probe(form, weighted) for form in forms}) == len(forms)


def test_forms_without_weight_never_speak_of_it():
    x = torch.randn(2, 4)
    for form in norm_forms(weight=False):
        assert rms_norm(x, None, **form.keywords()).shape == x.shape


def test_forms_of_an_unknown_inverse_raise():
    with pytest.raises(ValueError, match="inverse is 'cbrt'"):
        next(norm_forms(inverse="cbrt"))


@pytest.mark.parametrize(
    "cls, expected",
    [
        (GemmaRMSNorm, 'offset=1.0, normalized=None, weight_dtype="compute", output="input"'),
        (T5LayerNorm, 'normalized="weight", scaled="input"'),
    ],
)
def test_a_search_over_the_probes_finds_the_one_form_of_a_norm(cls, expected):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(64, 32, generator=generator, dtype=torch.float64)
    weight = torch.randn(32, generator=generator, dtype=torch.float64)

    def same(form):
        for dtype, weight_dtype in NORM_PROBES:
            module = cls(32, eps=1e-6)
            module.weight = torch.nn.Parameter(weight.to(weight_dtype))
            got = rms_norm(x.to(dtype), module.weight, 1e-6, **form.keywords())
            want = module(x.to(dtype))
            if got.dtype != want.dtype or not torch.equal(got, want):
                return False
        return True

    assert [form.source() for form in norm_forms(inverse="rsqrt") if same(form)] == [expected]
