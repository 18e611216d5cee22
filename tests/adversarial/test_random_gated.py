"""Gated products with statements put between at random: names, writes, scalings, loops: refused, or equal."""

import importlib.util
import random

import pytest
import torch

import fusekit as fk

HEAD = """
import torch
import torch.nn as nn
import torch.nn.functional as F


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(8, 12)
        self.up = nn.Linear(8, 12)
        self.other = nn.Linear(8, 12)
        self.both = nn.Linear(8, 24)
        self.down = nn.Linear(12, 8)
        self.act = nn.SiLU()
        self.inplace = nn.ReLU(inplace=True)
        self.by = 0.7
        self.scale = nn.Parameter(torch.rand(12) + 0.5)
        self.yes = True

"""

FACTORS = [("self.gate(x)", "self.up(x)")] * 2 + [("p", "q"), ("q", "p"), ("y[..., :12]", "y[..., 12:]")]
SCALED = ["{v}", "{v}", "{v}", "{v} * self.by", "self.scale * {v}", "{v}.to(x.dtype)"]
ACTIVATED = ["self.act({v})", "self.act({v})", "F.silu({v})", "torch.sigmoid({v})", "({v}).tanh()"]
ACTIVATED += ["self.inplace({v})"]
PRODUCTS = ["{a} * {b}", "torch.mul({a}, {b})", "({a} * {b}).to(x.dtype)", "{a}.mul({b}) + 0"]
BETWEEN = ["{s} = {t}", "{s} = {t} + 1", "{s} += 1", "{s}.mul_(0.5)", "x = x * 2", "x.add_(1)", "y.add_(1)"]
BETWEEN += ["{s} = self.other(x)", "y = y + 1", "k = {s} * {t}", "self.inplace({s})", "p = q", "p.mul_(2)"]
BLOCKS = ["for _ in range(2):", "if self.yes:", "if x.dim() > 5:", "with torch.enable_grad():"]


def program(chooser):
    """Lines of a forward that holds one product like act(gate) * up, and perhaps more."""
    gate, up, out = chooser.sample("abc", 3) if chooser.random() < 0.7 else ("a", "b", "a")
    left, right = (chooser.choice(SCALED).format(v=value) for value in chooser.choice(FACTORS))
    activate = chooser.choice(ACTIVATED)
    inline = chooser.random() < 0.3
    first = [f"{gate} = {left if inline else activate.format(v=left)}"]
    second = [f"{up} = {right}"]
    pair = [activate.format(v=gate) if inline else gate, up]
    chooser.shuffle(pair)
    product = f"{out} = " + chooser.choice(PRODUCTS).format(a=pair[0], b=pair[1])
    lines = [*(first + second if chooser.random() < 0.6 else second + first), product]
    for _ in range(chooser.choice([0, 0, 1, 2])):
        names = {"s": chooser.choice([gate, up, out]), "t": chooser.choice([gate, up, out])}
        lines.insert(chooser.randint(0, len(lines)), chooser.choice(BETWEEN).format(**names))
    if chooser.random() < 0.3:
        lines = [chooser.choice(BLOCKS), *(f"    {line}" for line in lines)]
    before = ["x = x * 1", "w = x + 0", "y = self.both(w)", "p, q = y.chunk(2, dim=-1)"]
    before += [f"{name} = w[..., :1] * torch.ones(12)" for name in "abc"]
    returned = out if chooser.random() < 0.7 else f"{out} + {chooser.choice([gate, up])}"
    return [*before, *lines, f"return self.down({returned})"]


def module_of(path, seeds):
    text = HEAD
    for seed in seeds:
        text += f"class Forward{seed}(Base):\n    def forward(self, x):\n"
        text += "".join(f"        {line}\n" for line in program(random.Random(seed))) + "\n\n"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(module, x):
    """The output and every gradient, or None where the forward or the backward fails."""
    leaf = x.clone().requires_grad_()
    try:
        out = module(leaf)
        wanted = [leaf, *module.parameters()]
        grads = torch.autograd.grad(out.square().sum(), wanted, allow_unused=True, materialize_grads=True)
    except RuntimeError:
        return None
    return [out.detach(), *grads]


BATCHES, SIZE = 4, 60


@pytest.mark.parametrize("batch", range(BATCHES))
def test_a_gated_product_is_refused_or_equal(batch, tmp_path):
    seeds = range(batch * SIZE, (batch + 1) * SIZE)
    classes = module_of(tmp_path / f"random_gated_{batch}.py", seeds)
    merged = cut = refused = 0
    for seed in seeds:
        torch.manual_seed(seed)
        module, x = getattr(classes, f"Forward{seed}")().double(), torch.randn(2, 3, 8).double()
        want = run(module, x)
        plan = fk.plan(module)
        merged += any(site.parts == ("gate", "up") for site in plan.sites if site.fusion == "glu")
        cut += any(site.parts == ("both",) for site in plan.sites)
        refused += any(refusal.fusion == "glu" for refusal in plan.refusals)
        with plan.apply():
            got = run(module, x)
        if want is None:
            continue  # a fused forward may go through where the other was forbidden to
        assert got is not None, f"Forward{seed}"
        for mine, his in zip(got, want, strict=True):
            torch.testing.assert_close(mine, his, rtol=1e-9, atol=1e-9, msg=f"Forward{seed}")
    assert min(merged, cut, refused) > 5, (merged, cut, refused)  # else nothing was tested
