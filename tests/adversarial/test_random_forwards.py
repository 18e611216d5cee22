"""Forwards put together at random from calls, views, writes, stores and blocks: refused, or equal."""

import copy
import importlib.util
import itertools
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
        self.a = nn.Linear(8, 8)
        self.b = nn.Linear(8, 8, bias=False)
        self.c = nn.Linear(8, 8)
        self.norm = nn.RMSNorm(8)
        self.act = nn.SiLU()
        self.inner = nn.Module()
        self.inner.d = nn.Linear(8, 8)
        self.scale = 2.0
        self.kept = []
        self.flag, self.mode, self.absent = True, 1, None

    def plus(self, t):
        return t.add_(1)

    def halves(self, t):
        shape = t.shape[:-1] + (2, 4)
        return t.view(shape).transpose(-1, -2).reshape(t.shape)

"""

EXPRESSIONS = [
    "self.a({t})",
    "self.b({t})",
    "self.c({t})",
    "self.inner.d({t})",
    "self.norm({t})",
    "self.act({t})",
    "self.act(self.a({t})) * self.b({t})",
    "self.c({t}) * self.act(self.a({t}))",
    "{t} * self.scale",
    "{t} + {u}",
    "{t}[..., :4].repeat_interleave(2, -1)",
    "{t}.reshape(-1, 8).view({t}.shape)",
    "{t}.view(-1).view({t}.shape)",
    "{t}.transpose(0, -2).contiguous().view({t}.shape)",
    "{t}.detach()",
    "{t}",
    "{t}.mul_(0.5)",
    "self.plus({t})",
    "self.halves({t})",
    "F.relu({t}, inplace=True)",
    "torch.tanh({t})",
    "{t} if {t}.shape[0] > 1 else {u}",
    "torch.stack([{t}, {u}])[0]",
]
STATEMENTS = [
    "{t} += 1",
    "{t}[..., 0] = 1",
    "{t}[0].mul_(2)",
    "{t}.reshape(-1).add_(1)",
    "{t}.view(-1)[:3].zero_()",
    "torch.add({t}, 1, out={u})",
    "self.kept.append({t})",
    "self.scale = self.scale + 1",
    "n = {t}.shape[0] * 2",
    "n = {t}.size(-1)",
    "del n",
    "pass",
    "{t}, {u} = {u}, {t}",
]


# Tests of settings, which change after the rewrite, and of other things.
TESTS = ["self.flag", "not self.flag", "self.mode == 1", "self.mode > 1 and self.flag", "self.absent is None"]
OTHERS = ["self.training", "self.scale > 1", "x.shape[0] > 1", "x is y"]
IN_ARMS = [
    "raise RuntimeError('arm')",
    "return x, y, z",
    "y = self.absent(x)",
    "self.flag = not self.flag",
    "pass",
]


def program(chooser):
    names = ["x", "y", "z"]

    def fill(text):
        return text.format(t=chooser.choice(names), u=chooser.choice(names))

    def block(depth, length):
        lines = []
        for _ in range(length):
            kind = chooser.random()
            if kind < 0.72:
                lines.append(
                    f"{chooser.choice(names)} = {fill(chooser.choice(EXPRESSIONS[:14] * 2 + EXPRESSIONS))}"
                )
            elif kind < 0.8:
                one, two = chooser.sample(["a", "b", "c", "inner.d"], 2)
                name = chooser.choice(names)
                lines.append(f"y, z = self.{one}({name}), self.{two}({name})")
            elif kind < 0.86 or depth > 2:
                lines.append(fill(chooser.choice(STATEMENTS)))
            elif kind < 0.95:
                lines += arms(depth)
            else:
                head = chooser.choice(
                    ["if self.scale > 1:", "for _ in range(2):", "with torch.no_grad():", "if self.training:"]
                )
                lines.append(head)
                lines += ["    " + line for line in block(depth + 1, chooser.randint(1, 3))]
        return lines

    def arms(depth):
        lines = []
        for head in ("if", *(["elif"] if chooser.random() < 0.3 else []), "else"):
            if head == "else" and chooser.random() < 0.4:
                continue
            test = "" if head == "else" else f" {chooser.choice(TESTS * 4 + OTHERS)}"
            lines.append(f"{head}{test}:")
            inner = block(depth + 1, chooser.randint(1, 2))
            if chooser.random() < 0.15:
                inner.append(chooser.choice(IN_ARMS))
            lines += ["    " + line for line in inner]
        return lines

    returned = chooser.choice(["x, y, z", "x * 1, y * 1, z * 1", "(x + y) * z,"])
    lines = ["n = 0", "y = z = x", *block(0, chooser.randint(3, 8)), f"return {returned}"]
    return lines


CALM = ["self.norm({t})", "self.halves({t})", "{t} * self.scale", "{t}.view({t}.shape)", "self.inner.d({t})"]


def calm_program(chooser):
    """Linears of x in arms of an `if` and beside it, calm code between them, and at times one that is not."""
    linears = chooser.sample(["a", "b", "c"], 3)
    lines = ["y = z = w = x"]

    def between(depth):
        kind = chooser.random()
        if kind < 0.08:
            return chooser.choice([*STATEMENTS, *IN_ARMS, "x = y", "y = x"]).format(t="x", u="y")
        name = chooser.choice("yzw")
        if kind < 0.2 and depth == 0:
            return f"{name} = self.absent({name}) if self.absent is not None else {name}"
        return f"{name} = {chooser.choice(CALM).format(t=chooser.choice('yzw'))}"

    def branch(depth):
        inner = [between(depth + 1) for _ in range(chooser.randint(0, 2))] or ["pass"]
        if linears and chooser.random() < 0.6:
            inner.append(f"{chooser.choice('yzw')} = self.{linears.pop()}(x)")
        if depth < 2 and chooser.random() < 0.3:
            inner += branches(depth + 1)
        return ["    " + line for line in inner]

    def branches(depth):
        found = [f"if {chooser.choice(TESTS * 5 + OTHERS)}:", *branch(depth)]
        return found + (["else:", *branch(depth)] if chooser.random() < 0.7 else [])

    for _ in range(chooser.randint(1, 2)):
        lines += branches(0)
        lines += [between(0) for _ in range(chooser.randint(0, 2))]
    while linears:
        name, linear = chooser.choice("yzw"), linears.pop()
        place = chooser.choice([1, len(lines)])
        lines[place:place] = [f"{name} = self.{linear}(x)"]
    return [*lines, "return x * 1, y * 1, z * 1, w * 1"]


def module_of(path, seeds):
    text = HEAD
    for seed in seeds:
        lines = (calm_program if seed % 2 else program)(random.Random(seed))
        text += f"class Forward{seed}(Base):\n    def forward(self, x):\n"
        text += "".join(f"        {line}\n" for line in lines) + "\n\n"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(module, x, grad):
    """Outputs, the input afterwards and gradients, or the kind of the error."""
    torch.manual_seed(0)
    leaf = x.clone().requires_grad_(grad)
    own = leaf * 1
    try:
        with torch.set_grad_enabled(grad):
            outputs = module(own)
            found = [*outputs, own]
            if grad:
                total = sum(out.square().sum() for out in outputs)
                wanted = [leaf, *module.parameters()]
                grads = torch.autograd.grad(total, wanted, allow_unused=True, materialize_grads=True)
                found += grads
    except (RuntimeError, UnboundLocalError, TypeError):
        return RuntimeError
    return [tensor.detach().clone() for tensor in found]


BATCHES, SIZE = 4, 30
WAYS = [
    (True, 1, True),
    (True, 1, False),
    (False, 1, True),
    (True, 2, False),
    (False, 2, True),
]  # flag, mode, grad


@pytest.mark.parametrize("batch", range(BATCHES))
def test_refused_or_equal(batch, tmp_path):
    seeds = range(batch * SIZE, (batch + 1) * SIZE)
    classes = module_of(tmp_path / f"random_forwards_{batch}.py", seeds)
    fused = in_arms = 0
    for seed in seeds:
        torch.manual_seed(seed)
        module = getattr(classes, f"Forward{seed}")()
        twin = copy.deepcopy(module)
        sites = fk.fuse(module).sites
        fused += len(sites)
        in_arms += sum(" is None else " in str(site.diff) for site in sites)
        for (flag, mode, grad), training in itertools.product(WAYS, (True, False)):
            for one in (module, twin):
                one.train(training)
                one.scale, one.flag, one.mode = 2.0, flag, mode
                one.absent = None if flag else one.c
                one.kept.clear()
            x = torch.randn(2, 3, 8)
            want, got = run(twin, x, grad), run(module, x, grad)
            if want is RuntimeError and got is not RuntimeError:
                continue  # a fused forward may go through where the other was forbidden to
            assert type(got) is type(want), f"Forward{seed}: {got}, {want}"
            if want is not RuntimeError:
                for mine, his in zip(got, want, strict=True):
                    torch.testing.assert_close(
                        mine, his, rtol=1e-4, atol=1e-4, equal_nan=True, msg=f"Forward{seed}"
                    )
    assert fused > 5 and in_arms > 0  # else nothing was tested
