"""Forwards drawn by hypothesis as source text, and what can be told apart from outside when they run.

Every forward takes `x` and `y` (tensors [2, 7, 8]), `z` (one more, or None) and `flag`, and holds at
least two of the projections `self.q`, `self.k`, `self.v`, `self.g` of one name. Before and between them
stand views, writes, containers, branches, loops and calls of helpers: calm programs write only what is
fresh, hostile ones write what was projected through another name of it, wild ones anything.
"""

import ast
import contextlib
import itertools
import linecache
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn
from hypothesis import strategies as st

import fusekit as fk
from fusekit.forward.effects import switched_off

CHOICES = 256  # more than most programs take
SHAPE = (2, 7, 8)  # that of made-up inputs too

HEAD = """
import contextlib
import torch
import torch.nn as nn
import torch.nn.functional as F


def same(t):
    return t


def first(*ts):
    return ts[0]


def halves(t):
    return t.view(*t.shape[:-1], 2, 4).flatten(-2)


def halved(t):
    return t / 2


def grow(t, by=2):
    t.mul_(by)
    return t


def grow_all(ts):
    for t in ts:
        t.add_(1)


def grow_view(t):
    part = t[:, 1:]
    part[...] = 0.25


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.q = nn.Linear(8, 8)
        self.k = nn.Linear(8, 8, bias=False)
        self.v = nn.Linear(8, 8)
        self.g = nn.Linear(8, 8)
        self.norm = nn.RMSNorm(8)
        self.act = nn.SiLU()
        self.relu = nn.ReLU(inplace=True)
        self.identity = nn.Identity()
        self.register_buffer("table", torch.randn(2, 7, 8))
        self.begin(True)

    def begin(self, mode):
        self.mode, self.count = mode, 0
        self.absent = None if mode else torch.tanh
        self.kept, self.log, self.cache = None, [], {}

    def same(self, t):
        return t

    def view(self, t):
        return t.reshape(-1, 8).view(t.shape)

    def shifted(self, t):
        return t + self.count

    def grow(self, t):
        t *= 2

    def grow_kept(self):
        if self.kept is not None:
            self.kept.mul_(2)

    def keep(self, t):
        self.kept = t
        return t.shape

    def value(self, t):
        return self.v(t)
"""

# What shares storage with {t}, whole and in part; what shares nothing with it.
VIEWS = (
    "{t}",
    "{t}[...]",
    "{t}[:]",
    "{t}.view({t}.shape)",
    "{t}.view_as({t})",
    "{t}.reshape(-1, 8).view({t}.shape)",
    "{t}.transpose(0, 1).transpose(0, 1)",
    "{t}.detach()",
    "{t}.data",
    "{t}.unsqueeze(0).squeeze(0)",
    "{t}.expand_as({t})",
    "{t}.contiguous()",
    "{t}.to({t}.dtype)",
    "{t}.type_as({t})",
    "torch.atleast_2d({t})",
    "F.dropout({t}, 0.5, False)",
    "self.identity({t})",
    "self.same({t})",
    "self.view({t})",
    "same({t})",
    "first({t}, {u})",
    "halves({t})",
    "{t} if flag else {u}",
    "{t} if {t} is {u} else {t}.clone()",
    "z if z is not None else {t}",
    "[{t}, {u}][0]",
    "{{'h': {t}, 'o': {u}}}['h']",
    "next(iter([{t}]))",
    "(lambda t: t)({t})",
    "[t for t in ({u}, {t})][-1]",
)
PARTS = (
    "{t}[0]",
    "{t}[:1]",
    "{t}[:, :1]",
    "{t}[..., :4]",
    "{t}.select(1, 0)",
    "{t}.narrow(1, 0, 1)",
    "{t}.unbind(0)[0]",
    "{t}.chunk(2, -1)[1]",
    "torch.split({t}, 4, -1)[0]",
    "{t}.transpose(0, 1)",
    "{t}.permute(2, 0, 1)",
    "{t}.mT",
    "{t}.view(-1)",
    "{t}.flatten()",
    "{t}.unfold(-1, 2, 2)",
    "{t}.diagonal(0, 0, 1)",
    "{t}.as_strided((3,), (1,))",
)
FRESH = (
    "{t} * 2",
    "{t} + {u}",
    "{t} + self.table",
    "{t}.clone()",
    "{t}.detach().clone()",
    "{t} - {t}.mean(-1, keepdim=True)",
    "{t}.softmax(-1)",
    "{t} @ torch.ones(8, 8, dtype={t}.dtype)",
    "torch.tanh({t})",
    "torch.zeros_like({t})",
    "torch.rand_like({t})",
    "torch.where({t} > 0, {t}, {u})",
    "torch.stack([{t}, {u}])[1]",
    "torch.cat([{t}, {u}], -1)[..., :8]",
    "F.silu({t})",
    "F.dropout({t}, 0.5)",
    "self.norm({t})",
    "self.act({t})",
    "self.shifted({t})",
    "self.value({t})",
    "self.absent({t}) if self.absent is not None else {t} * 1",
    "halved({t})",
    "grow({t} + 1)",
    "sum([{t}, {u}])",
    "{p}({t})",
    "self.act({p}({t})) * {o}({t})",
)
# Writes of {t}, an expression; of {t}, what can stand left of an equals sign.
WRITES = (
    "{t}.mul_(0.5)",
    "{t}.add_(1)",
    "{t}.zero_()",
    "{t}.copy_({t} * 2)",
    "{t}.clamp_(max=0.25)",
    "{t}.masked_fill_({t} > 0, 1)",
    "{t}.mul_(2).add_(1)",
    "{t}[..., 0] = 1",
    "{t}[0] += 1",
    "{t}[...] = {t} * 2",
    "{t}.view({t}.shape)[0].mul_(3)",
    "{t}.detach().add_(1)",
    "{t}.transpose(0, -1)[0].zero_()",
    "{t}.unbind(0)[0].mul_(2)",
    "torch.add({t}, 1, out={t})",
    "torch.mul({t}, 2, out={t}.detach())",
    "torch.relu_({t})",
    "torch._foreach_add_([{t}], 1)",
    "F.relu({t}, inplace=True)",
    "self.relu({t})",
    "self.grow({t})",
    "grow({t})",
    "grow({t}.detach(), by=3)",
    "grow_all([{t}])",
    "grow_all({{'h': {t}}}.values())",
    "list(map(grow, ({t},)))",
    "[t.add_(1) for t in [{t}]]",
    "(lambda t: t.mul_(2))({t})",
)
STORED_WRITES = ("{t} += 1", "{t} *= {t}", "{t} -= 0.5", "{t} = {t}.mul_(2)", "{t} = grow({t})")
# Lines that change nothing the projections read.
CALM = (
    "self.count += 1",
    "n = {t}.shape[0] * 2",
    "n = {t}.size(-1) + n",
    "shape = (*{t}.shape[:-1], 2, 4)",
    "assert {t}.dim() > 1",
    "log = [{t}, {u}]",
    "log.append({t})",
    "box['h'] = {t}",
    "box = dict(h={t}, o={u})",
    "self.kept = {t}",
    "self.log.append({t})",
    "self.cache['h'] = {t}",
    "self.keep({t})",
    "pass",
)
# Lines that the projections may see, without any write of a tensor of theirs by name.
RARE = (
    "self.grow_kept()",
    "self.log[-1].mul_(2)",
    "self.cache['h'] += 1",
    "grow_all(log)",
    "grow_all(self.log)",
    "self.table.mul_(0.5)",
    "self.k.weight.data.mul_(0.5)",
    "self.q.bias.detach().add_(1)",
    "self.q, self.v = self.v, self.q",
    "torch.set_grad_enabled(flag)",
    "{x}, {y} = {y}, {x}",
    "{x} = {y}",
    "{x} = {x} + 1",
)
TESTS = (
    "flag",
    "not flag",
    "z is not None",
    "z is None",
    "self.mode",
    "not self.mode",
    "x is y",
    "self.count > 0",
    "x.shape[0] > 1",
    "flag and self.mode",
)
SETTINGS = (
    "self.mode",
    "not self.mode",
    "self.absent is None",
    "self.absent is not None",
    "self.mode is True",
)
PROJECTIONS = ("self.q", "self.k", "self.v", "self.g")


class _Drawn:
    """One forward in the making: its lines, and what is known of its names.

    `whole` are names of tensors of the shape of `x`, `own` those of them that share storage with
    nothing that lives before the forward; `parts` are names of other tensors.
    """

    def __init__(self, choices: bytes) -> None:
        self.choices = iter(choices)
        self.whole, self.parts, self.own = ["x", "y"], [], []
        self.mood = self.pick("calm", "hostile", "wild", "hostile", "calm", "hostile", "hostile")
        self.made = 0

    def pick(self, *options: Any) -> Any:
        """One of `options`; the first where no choices are left."""
        return options[next(self.choices, 0) % len(options)] if len(options) > 1 else options[0]

    def chance(self, percent: int) -> bool:
        return next(self.choices, 0) * 100 // 256 >= 100 - percent  # shrinks to False

    def fill(self, text: str, tensor: str | None = None) -> str:
        """`text` with its holes filled, {t} by `tensor` where that is given."""
        holes = {}
        if "{t}" in text:
            holes["t"] = tensor or self.pick(*self.whole)
        if "{u}" in text:
            holes["u"] = self.pick(*self.whole)
        if "{p}" in text:
            holes["p"] = self.pick(*PROJECTIONS)
        if "{o}" in text:
            holes["o"] = self.pick(*(one for one in PROJECTIONS if one != holes["p"]))
        if "{x}" in text:
            holes["x"], holes["y"] = self.pick("x", "y"), self.pick(*self.whole)
        return text.format(**holes)

    def name(self) -> str:
        """A new name, or now and then one that is there."""
        known = [name for name in self.whole if name not in ("x", "y", self.source)]
        if known and self.chance(20):
            return self.pick(*known)
        self.made += 1
        return f"t{self.made}"

    def bind(self, name: str, where: list[str], own: bool = False) -> None:
        for names in (self.whole, self.parts, self.own):
            if name in names:
                names.remove(name)
        where.append(name)
        if own:
            self.own.append(name)

    def store(self, kind: str, tensor: str | None = None) -> tuple[str, list[str]]:
        """A name that a view, a part or a fresh value was stored under, and the line."""
        options = {"view": VIEWS, "part": PARTS, "fresh": FRESH}[kind]
        value, name = self.fill(self.pick(*options), tensor), self.name()
        form = self.pick(
            "{n} = {v}", "{n} = {v}", "{n}: object = {v}", "n = len(({n} := {v}))", "{n} = o = {v}"
        )
        self.bind(name, self.parts if kind == "part" else self.whole, kind == "fresh")
        return name, [form.format(n=name, v=value)]

    # -- lines of one kind each ---------------------------------------------------------------

    def write(self, tensor: str) -> list[str]:
        """Lines that write the tensor that the expression `tensor` stands for."""
        is_place = tensor.isidentifier() or tensor.endswith("]") or tensor.startswith("self.")
        if is_place and self.chance(20):
            return [self.fill(self.pick(*STORED_WRITES), tensor)]
        return [self.fill(self.pick(*WRITES), tensor)]

    def alias(self, tensor: str) -> tuple[str, list[str]]:
        """An expression for storage of the name `tensor`, and lines that make it one."""
        kind = self.pick("view", "part", "list", "dict", "self", "unpack", "closure", "log", "input")
        if kind in ("view", "part"):
            return self.store(kind, tensor)
        self.made += 1
        name, other = f"t{self.made}", self.pick(*self.whole)
        view = self.fill(self.pick(*VIEWS, *PARTS), tensor)
        if kind == "list":
            form = self.pick("[{v}, {o}]", "({v}, {o})", "[*({v}, {o})]", "list(({v}, {o}))", "[{v}] + [{o}]")
            return f"{name}[0]", [f"{name} = " + form.format(v=view, o=other)]
        if kind == "dict":
            form = self.pick("{{'h': {v}}}", "dict(h={v})", "dict([('h', {v})])", "{{**{{'h': {v}}}}}")
            held = self.pick("{n}['h']", "{n}.get('h')", "[*{n}.values()][0]").format(n=name)
            return held, [f"{name} = " + form.format(v=view)]
        if kind == "self":
            return "self.kept", [
                self.pick("self.kept = {v}", "self.keep({v})", "o = self.kept = {v}").format(v=view)
            ]
        if kind == "log":
            form = self.pick(
                ("self.log[-1]", "self.log.append({v})"),
                ("self.log[0]", "self.log[:0] = [{v}]"),
                ("self.cache['h']", "self.cache['h'] = {v}"),
                ("self.cache['h']", "self.cache.update(h={v})"),
                ("log[-1]", "log.append({v})"),
                ("box['h']", "box['h'] = {v}"),
            )
            return form[0], [form[1].format(v=view)]
        if kind == "unpack":
            form = self.pick(
                "{n}, o = {v}, {o}",
                "{n}, *o = [{v}, {o}]",
                "o, {n} = {o}, {v}",
                "({n}, o), n = ({v}, {o}), 1",
            )
            self.bind(name, self.parts)
            return name, [form.format(n=name, o=other, v=view)]
        if kind == "closure":
            form = self.pick(
                ("def {n}():", "    return {v}"), ("{n} = lambda: {v}",), ("def {n}(t={v}):", "    return t")
            )
            return f"{name}()", [line.format(n=name, v=view) for line in form]
        # The caller may pass one tensor twice.
        return ("y" if tensor == "x" else "x"), []

    def calm(self) -> list[str]:
        """Lines that write at most what the forward itself has made."""
        kind = self.pick(
            "fresh", "fresh", "view", "part", "line", "line", "write", "write", "loop", "def", "del"
        )
        if kind in ("fresh", "view", "part"):
            return self.store(kind)[1]
        if kind == "write":
            made = []
            if not self.own or self.chance(40):
                made = self.store("fresh")[1]
            return made + self.write(self.pick(*self.own))
        if kind == "loop":
            self.made += 1
            total, over = f"t{self.made}", self.pick(*self.whole)
            head = self.pick("for i in range(2):", "for i, t in enumerate([{t}, {u}]):", "for t in {t}:")
            step = self.pick("{n} = {n} + {o}", "{n} += {o}", "{n}.add_({o})", "{n} = {n} + i").format(
                n=total, o=over
            )
            lines = ["i = 1", f"{total} = {over} * 1", self.fill(head), f"    {step}"]
            self.bind(total, self.whole, True)
            return lines
        if kind == "def":
            self.made += 1
            name, result = f"f{self.made}", self.name()
            value = self.fill(self.pick(*FRESH), "t")
            lines = [f"def {name}(t):", f"    return {value}", self.fill(f"{result} = {name}({{t}})")]
            self.bind(result, self.whole, True)
            return lines
        gone = [name for name in (*self.parts, *self.own) if name not in self.results and name != self.source]
        if kind == "del" and gone:
            name = self.pick(*gone)
            self.bind(name, [])
            return [f"del {name}"]
        return [self.fill(self.pick(*CALM))]

    def wild(self) -> list[str]:
        """Lines that may write or store anything."""
        kind = self.pick("calm", "write", "alias", "rare", "calm", "return")
        if kind == "write":
            return self.write(self.pick(*self.whole, *self.parts))
        if kind == "alias":
            held, lines = self.alias(self.pick(*self.whole))
            return lines + (self.write(held) if self.chance(50) else [])
        if kind == "rare":
            return [self.fill(self.pick(*RARE))]
        if kind == "return":
            return [f"if {self.pick(*TESTS)}:", self.fill("    return {t}, {u}")]
        return self.calm()

    # -- blocks -------------------------------------------------------------------------------

    def inside(self, make: Callable[[], list[str]]) -> list[str]:
        """What `make` gives, indented; names that it binds are not known afterwards."""
        whole, parts, own = [*self.whole], [*self.parts], [*self.own]
        lines = make()
        self.whole = [name for name in whole if name in self.whole]
        self.parts = [name for name in parts if name in self.parts]
        self.own = [name for name in own if name in self.own]
        return ["    " + line for line in lines or ["pass"]]

    def around(self, make: Callable[[], list[str]]) -> list[str]:
        """What `make` gives within a block."""
        kind = self.pick("if", "if", "else", "for", "while", "finally", "except", "no_grad", "with", "def")
        inner = self.inside(make)
        if kind == "if":
            lines = [f"if {self.pick(*TESTS)}:", *inner]
            return lines + (["else:", *self.inside(self.calm)] if self.chance(40) else [])
        if kind == "else":
            return [f"if {self.pick(*TESTS)}:", *self.inside(self.calm), "else:", *inner]
        if kind == "for":
            head = self.pick(
                "for i in range(2):", "for i in [1]:", "for i in range(1, 3):", "for i in (0, 1):"
            )
            return [head, *inner, *self.pick((), (), ("    if flag:", "        break"))]
        if kind == "while":
            return ["m = 0", "while m < 2:", "    m += 1", *inner]
        if kind == "finally":
            return ["try:", *inner, "finally:", *self.inside(self.calm)]
        if kind == "except":
            return ["try:", *inner, "except RuntimeError:", "    self.count += 5"]
        if kind == "no_grad":
            return [self.pick("with torch.no_grad():", "with torch.enable_grad():"), *inner]
        if kind == "with":
            return ["with contextlib.nullcontext():", *inner]
        self.made += 1
        name = f"f{self.made}"
        inner = [line.replace(": object =", " =") for line in inner]  # what is nonlocal takes no annotation
        stored = {
            node.id for node in ast.walk(ast.parse("def f():\n" + "\n".join(inner))) if _is_stored(node)
        }
        outer = sorted(stored & {*self.whole, *self.parts, "n", "o", "i", "m", "log", "box"})
        said = [f"    nonlocal {', '.join(outer)}"] if outer else []
        return [f"def {name}():", *said, *inner, f"{name}()"]

    def between(self) -> list[str]:
        make = self.wild if self.mood == "wild" else self.calm
        return self.around(make) if self.chance(25) else make()

    # -- the whole ----------------------------------------------------------------------------

    def begin(self) -> list[str]:
        """Lines that make the name whose projections are taken."""
        kind = self.pick("x", "y", "fresh", "view", "x", "table")
        self.source, self.results = "x", []
        if kind in ("x", "y"):
            self.source = kind
            return []
        if kind == "table":
            self.source = "h"
            self.bind("h", self.whole)
            return ["h = self.table"]
        name, lines = self.store(kind)
        self.source = name
        return lines

    def projection(self, left: list[str]) -> list[str]:
        """A line that evaluates the next projection, at times the next two."""
        one, source = left.pop(), self.source
        call, result = f"{one}({source})", one[-1]
        form = self.pick(
            "plain", "plain", "cut", "both", "act", "two", "log", "helper", "scaled", "arm", "other"
        )
        if form in ("both", "two") and left:
            other = left.pop()
            lines = [f"{result}, {other[-1]} = {call}, {other}({source})"]
            if form == "two":
                lines = [f"{result} = self.act({call}) * {other}({source})"]
            else:
                self.bind(other[-1], self.whole, True)
                self.results.append(other[-1])
        elif form == "cut":
            lines = [
                f"{result} = {call}.view(2, -1, 2, 4).transpose(1, 2)",
                f"{result} = {result}.mT.reshape(2, -1, 8)",
            ]
        elif form == "log":
            lines = [f"log += [{call}]", f"{result} = log[-1]"]
        elif form == "helper":
            lines = [f"{result} = self.same({call})"]
        elif form == "act":
            lines = [f"{result} = F.silu({call})"]
        elif form == "scaled":
            lines = [f"{result} = {call} * 0.5"]
        elif form == "arm":
            lines = self.arms(result, call, left)
        elif form == "other":
            text = self.pick(
                "{r} = {p}(input={t})",
                "p = {p}; {r} = p({t})",
                "{r} = [p({t}) for p in ({p},)][0]",
                "{r} = {p}({t}) if flag else {p}({t}) * 2",
                "{r} = (o := {p}({t})) + 1",
                "{r} = (lambda: {p}({t}))()",
                "with torch.no_grad():\n    {r} = {p}({t})",
                "for i in range(2):\n    {r} = {p}({t})",
                "try:\n    {r} = {p}({t})\nfinally:\n    self.count += 1",
            )
            lines = text.format(r=result, p=one, t=source).split("\n")
        else:
            lines = [f"{result} = {call}"]
        self.bind(result, self.whole, True)
        self.results.append(result)
        return lines

    def arms(self, result: str, call: str, left: list[str]) -> list[str]:
        """A projection where a test says so, and in the other arm a fresh value, or another one."""
        test, before, after = self.pick(*TESTS, *SETTINGS), [], []
        if self.chance(30):
            before = self.inside(self.between)
        if self.chance(30):
            after = self.inside(self.between)
        other = self.fill(self.pick(*FRESH[:8]))
        if left and self.chance(50):
            other = f"{left.pop()}({self.source})"
        arms = [*before, f"    {result} = {call}"], [*after, f"    {result} = {other}"]
        one, two = arms if self.chance(50) else arms[::-1]
        return [f"if {test}:", *one, "else:", *two]

    def region(self) -> list[str]:
        """The projections with lines between them."""
        left = [*self.pick(*itertools.permutations(PROJECTIONS))][: self.pick(2, 3, 4)]
        written = self.pick(*range(1, len(left))) if self.mood == "hostile" else 0
        held, before, after = "", [], []
        if written:
            held, before = self.alias(self.source)
            if self.chance(30):
                before, after = [], before
        lines, taken = before, len(left)
        while left:
            lines = lines + self.projection(left)
            if not left:
                break
            for _ in range(self.pick(0, 1, 2)):
                lines += self.between()
            if written and taken - len(left) >= written:
                written = 0
                lines += after
                lines += self.around(lambda: self.write(held)) if self.chance(35) else self.write(held)
        return lines

    def text(self) -> str:
        lines = ["n, m, i, o, log, box = 0, 0, 0, None, [], {}"]
        lines += self.begin()
        for _ in range(self.pick(0, 0, 1, 2)):
            lines += self.between()
        if self.chance(12):
            lines += ["q = k = v = g = x", *self.around(self.region)]
            self.results = ["q", "k", "v", "g"]
        else:
            lines += self.region()
        for _ in range(self.pick(0, 0, 1)):
            lines += self.between()
        returned = [name for name in dict.fromkeys((*self.results, *self.whole[-2:], *self.parts[-1:]))]
        form = self.pick(
            "return {r}", "return [{r}]", "return dict(out=({r}), log=log)", "return sum(({r})), ({r})"
        )
        if self.parts and form.startswith("return sum"):
            form = "return {r}"
        lines.append(form.format(r=", ".join(returned) + ","))
        body = "".join(f"        {line}\n" for line in lines)
        return f"class Forward(Base):\n    def forward(self, x, y, z=None, flag=False):\n{body}"


def _is_stored(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)


def programs() -> st.SearchStrategy[str]:
    """The text of a class `Forward(Base)` with a drawn forward.

    One draw of bytes holds every choice: of many draws hypothesis would repeat some in five variants of
    each program, and most programs would be all but equal to another.
    """
    return st.binary(min_size=CHOICES, max_size=CHOICES).map(lambda choices: _Drawn(choices).text())


# -- running ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Way:
    """One way to call a forward: twice in a row, what the first call left on `self` kept.

    `y` is one of "own", "x" and "view" (of x); `z` one of "own", None, "x" and "y".
    """

    flag: bool = False
    mode: bool = True
    y: str = "own"
    z: str | None = None
    grad: bool = False


def ways(text: str) -> list[Way]:
    """Every way that a forward can tell apart: flags and None that it asks for, one tensor given twice."""
    flags = (False, True) if "flag" in text.split("\n", 2)[2] else (False,)
    modes = (True, False) if "self.mode" in text or "self.absent" in text else (True,)
    others = (None, "own") if "z " in text.split("\n", 2)[2] else (None,)
    found = [
        Way(flag, mode, z=z, grad=(flag + mode + (z is None)) % 2 == 0)
        for flag, mode, z in itertools.product(flags, modes, others)
    ]
    found.append(Way(grad=not found[0].grad))
    found += [Way(flag, y="x", grad=flag) for flag in flags]
    found.append(Way(y="view", grad=True))
    if len(others) > 1:
        found += [Way(flags[-1], z="x"), Way(z="y")]
    return found


def namespace_of(text: str, name: str, around: dict[str, Any]) -> dict[str, Any]:
    """The names after running `text`, which linecache then knows as `name`, among those of `around`."""
    linecache.cache[name] = (len(text), None, text.splitlines(True), name)
    names = types.ModuleType("drawn_forwards").__dict__ | around
    exec(compile(text, name, "exec"), names)
    return names


HELPERS = namespace_of(HEAD, "<fusekit programs: head>", {})
_numbers = itertools.count()


@contextlib.contextmanager
def class_of(text: str) -> Iterator[type[nn.Module]]:
    """The class that `text` defines, its source known within the block."""
    name = f"<fusekit programs: {next(_numbers)}>"
    try:
        yield namespace_of(text, name, HELPERS)["Forward"]
    finally:
        linecache.cache.pop(name, None)


@contextlib.contextmanager
def module_of(text: str) -> Iterator[nn.Module]:
    """An instance of the class that `text` defines, with weights drawn from a fixed seed, in float64."""
    with class_of(text) as cls:
        torch.manual_seed(0)
        module = cls()
        nn.init.uniform_(module.norm.weight, 0.5, 1.5)
        yield module.double()


class Runner:
    """Runs one module on one way after the other, each from the same start."""

    def __init__(self, module: nn.Module):
        self.module = module
        self.children = dict(module._modules)
        self.tensors = [*module.parameters(), *module.buffers()]
        self.values = [tensor.detach().clone() for tensor in self.tensors]

    def _begin(self, way: Way) -> list[torch.Tensor]:
        module = self.module
        module._modules.update(self.children)
        module.begin(way.mode)
        with torch.no_grad():
            torch._foreach_copy_(self.tensors, self.values)
        torch.manual_seed(1)
        return [torch.randn(SHAPE, dtype=torch.float64, requires_grad=way.grad) for _ in range(3)]

    def run(self, way: Way) -> "Seen":
        """What came out of two calls: values, inputs afterwards, state, gradients, the kind of an error."""
        leaves = self._begin(way)
        x, y, z = (leaf * 1 for leaf in leaves)
        y = {"own": y, "x": x, "view": x.view(x.shape)}[way.y]
        z = {"own": z, None: None, "x": x, "y": y}[way.z]
        outputs: list[Any] = []
        error = None
        with torch.set_grad_enabled(way.grad):
            for _ in range(2):
                try:
                    outputs.append(self.module(x, y, z, way.flag))
                except Exception as caught:
                    error = type(caught)
                    break
        values = [*_flat(outputs)]
        state = [*_flat([x, y, z, *self.tensors])]
        state += _flat(
            {name: self.module.__dict__.get(name) for name in ("mode", "count", "kept", "log", "cache")}
        )
        state += [
            name for name, child in self.module._modules.items() if child is not self.children.get(name)
        ]
        values_now = [v.detach().clone() if isinstance(v, torch.Tensor) else v for v in values + state]
        return Seen(values_now, error, self._gradients(values, leaves) if way.grad else None)

    def _gradients(self, values: list[Any], leaves: list[torch.Tensor]) -> list[torch.Tensor | None] | None:
        wanted = [*leaves, *self.module.parameters()]
        try:
            losses = [v.square().sum() for v in values if isinstance(v, torch.Tensor) and v.requires_grad]
            if not losses:
                return None
            return [*torch.autograd.grad(sum(losses[1:], losses[0]), wanted, allow_unused=True)]
        except RuntimeError:  # something that the backward needs was written
            return None


@dataclass(frozen=True)
class Seen:
    values: list[Any]
    error: type | None
    gradients: list[torch.Tensor | None] | None

    def difference(self, other: "Seen") -> str:
        """In what `other`, the same run of a rewritten module, differs; "" where it does not."""
        if self.error is not other.error:
            return f"raises {other.error}, not {self.error}"
        if not _equal(self.values, other.values):
            return "other values"
        # A rewritten forward may have gradients where the other's were spoilt by a write.
        if self.gradients is not None and other.gradients is None:
            return "no gradients"
        if self.gradients is not None and not _equal(self.gradients, other.gradients):
            return "other gradients"
        return ""


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        yield from value
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        yield len(value)
        for item in value:
            yield from _flat(item)
    elif isinstance(value, torch.Tensor) or value is None or isinstance(value, (int, float)):
        yield value
    else:
        yield type(value)


def _equal(one: list[Any], other: list[Any]) -> bool:
    if len(one) != len(other):
        return False
    for a, b in zip(one, other, strict=True):
        if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
            if type(a) is not type(b) or a != b:
                return False
        elif a.shape != b.shape or a.dtype != b.dtype:
            return False
        elif not torch.equal(a, b) and not torch.allclose(a, b, rtol=1e-6, atol=1e-9, equal_nan=True):
            return False
    return True


@dataclass(frozen=True)
class Outcome:
    """What became of one program.

    `difference` is in what the fused forward differs from the other, "" where it does not.
    """

    difference: str
    fuses: bool
    runs: bool  # on one way at least
    unsound: bool  # a build without alias analysis gets it wrong
    mergeable: bool  # two projections of it may be merged, as running them shows


def outcome(text: str) -> Outcome:
    """Run the program of `text` as it is and fused, on every way."""
    with module_of(text) as module, module_of(text) as twin:
        plan = fk.plan(module)
        runner, difference = Runner(twin), ""
        expected = {way: runner.run(way) for way in ways(text)}
        if plan.sites:
            with plan.apply():
                difference = first_difference(expected, Runner(module))
        runs = any(seen.error is None for seen in expected.values())
        mergeable = has_right_merge(text, runner, expected)
    unsound = is_wrong_without_aliases(text, expected)
    return Outcome(difference, bool(plan.sites), runs, unsound, mergeable)


def first_difference(expected: dict[Way, Seen], runner: Runner) -> str:
    """Where the module of `runner` first differs from what is expected, and how; "" where it never does."""
    for way, seen in expected.items():
        found = seen.difference(runner.run(way))
        if found:
            return f"{found} on {way}"
    return ""


# -- a build with the alias analysis switched off ---------------------------------------------


def is_wrong_without_aliases(text: str, expected: dict[Way, Seen]) -> bool:
    """Whether fusing changes what the program does when the alias analysis is switched off."""
    with module_of(text) as module, switched_off("aliases"):
        plan = fk.plan(module)
        if not plan.sites:
            return False
        with plan.apply():
            return bool(first_difference(expected, Runner(module)))


# -- merges made by hand, to see what a perfect analysis would find -----------------------------


def has_right_merge(text: str, runner: Runner, expected: dict[Way, Seen]) -> bool:
    """Whether some merge of two projections of one name changes nothing.

    The module of `runner` is given the forwards of such merges.
    """
    for merged in naive_merges(text):
        with class_of(merged) as runner.module.__class__:
            if not first_difference(expected, runner):
                return True
    return False


def naive_merges(text: str) -> Iterator[str]:
    """The program with one projection evaluated where an earlier one of the same name is.

    Of every two in one run of statements between which that name is neither stored nor written as such.
    """
    tree = ast.parse(text)
    for block in [b for node in ast.walk(tree) for b in _blocks(node)]:
        found = [(i, call) for i, statement in enumerate(block) for call in _projections(statement)]
        for (i, one), (j, other) in itertools.combinations(found, 2):
            name = one.args[0].id
            if other.args[0].id != name or one.func.attr == other.func.attr:
                continue
            if any(_touches(statement, name) for statement in block[i:j]):
                continue
            lines = text.split("\n")
            line = lines[other.lineno - 1]
            lines[other.lineno - 1] = line[: other.col_offset] + "moved" + line[other.end_col_offset :]
            first = block[i].lineno - 1
            indent = " " * block[i].col_offset
            lines.insert(first, f"{indent}moved = {ast.unparse(other)}")
            yield "\n".join(lines)


def _blocks(node: ast.AST) -> Iterator[list[ast.stmt]]:
    for field in ("body", "orelse", "finalbody"):
        block = getattr(node, field, None)
        if isinstance(block, list) and block and not isinstance(node, (ast.Module, ast.ClassDef)):
            yield block


def _projections(statement: ast.stmt) -> Iterator[ast.Call]:
    """Those that the statement itself evaluates, not a block within it."""
    if isinstance(statement, (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Expr)):
        for node in ast.walk(statement):
            if isinstance(node, (ast.Lambda, ast.ListComp, ast.IfExp)):
                return
        for node in ast.walk(statement):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in PROJECTIONS:
                if len(node.args) == 1 and isinstance(node.args[0], ast.Name):
                    yield node


def _touches(statement: ast.stmt, name: str) -> bool:
    """Whether a statement stores `name`, or writes it under this very name."""
    for node in ast.walk(statement):
        if isinstance(node, ast.Name) and node.id == name and _is_stored(node):
            return True
        if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load) and _root(node) == name:
            return True
        if isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else ast.unparse(node.func)
            is_writer = called.endswith("_") or called in ("grow", "grow_all", "map", "relu")
            if is_writer and isinstance(node.func, ast.Attribute) and _root(node.func.value) == name:
                return True
            given = [*node.args, *(keyword.value for keyword in node.keywords)]
            writes = is_writer or any(keyword.arg in ("out", "inplace") for keyword in node.keywords)
            if writes and any(
                isinstance(n, ast.Name) and n.id == name for arg in given for n in ast.walk(arg)
            ):
                return True
    return False


def _root(node: ast.AST) -> str:
    while True:
        if isinstance(node, (ast.Attribute, ast.Subscript)):
            node = node.value
        elif isinstance(node, ast.Call):
            node = node.func
        else:
            return node.id if isinstance(node, ast.Name) else ""
