"""A plan that finds nothing says what stood in the way, or what was looked for in vain."""

import torch
from torch import nn

import fusekit as fk
from fusekit import display
from fusekit.display.nothing import nothing_text
from fusekit.fusions import REASONS, Refusal


def refusal(name, reason, message="why", path="/a/m.py", line=7):
    return Refusal(name, "qkv", reason, f"{name}: cannot fuse qkv: {message}", path, line)


def test_the_most_frequent_reasons_come_first_with_number_meaning_and_an_example():
    some = [refusal("a", "hooked"), *[refusal(f"l.{i}", "tied", f"w{i} is shared") for i in range(3)]]
    lines = nothing_text("Model", some, fk.Plan.fusions)
    assert lines[0] == "  nothing to fuse in Model: 4 places look fusable and were refused, for"
    assert lines[1] == f"    3 × [tied] {REASONS['tied']}"
    assert lines[2] == "        such as l.0: qkv: w0 is shared (m.py:7)"
    assert lines[3] == f"    1 × [hooked] {REASONS['hooked']}"


def test_reasons_past_the_fifth_are_counted():
    lines = nothing_text("Model", [refusal("a", reason) for reason in list(REASONS)[:7]], ("qkv",))
    assert lines[-1] == "    ... and 2 reasons more; .to_frame() has all"
    assert sum("×" in line for line in lines) == 5


def test_without_refusals_it_says_what_was_looked_for_and_what_the_model_is_made_of(read):
    model = nn.Sequential(nn.Conv1d(2, 2, 1), nn.Conv1d(2, 2, 1), nn.LayerNorm(3))
    for shown in (display.text(fk.plan(model)), read(display.html(fk.plan(model))).text):
        assert "othing to fuse in Sequential" in shown
        assert "qkv, kv, mla, columns" in shown and "act(gate(x)) * up(x)" in shown and "RMSNorm" in shown
        assert "made of 2 Conv1d, 1 LayerNorm; it has no nn.Linear, and only those are merged" in shown
    text = display.text(fk.plan(model, only="rms_norm"))
    assert "RMSNorm" in text and "glu" not in text and "no nn.Linear" not in text


def test_a_model_with_linears_is_not_said_to_have_none():
    assert "no nn.Linear" not in display.text(fk.plan(nn.Sequential(nn.Linear(2, 2))))


def test_a_real_refusal_is_named():
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            return self.q(x), self.k(x)

    model = nn.Sequential(Pair(), Pair())
    for pair in model:
        pair.k.register_forward_hook(lambda *_: None)
    fused = fk.fuse(model)
    assert fused.sites == () and torch.is_tensor(model[0](torch.ones(1, 4))[0])
    text = display.text(fused)
    assert text.splitlines()[0] == "Sequential: 0 sites applied"
    assert f"2 × [hooked] {REASONS['hooked']}" in text and "such as 0: columns: k carries hooks" in text
