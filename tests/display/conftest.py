"""One object of each result type, and a reader that is stricter than a browser."""

from dataclasses import replace
from html.parser import HTMLParser

import pytest
import torch
from torch import nn

from fusekit.forward import SourceDiff, source
from fusekit.fusions import Refusal
from fusekit.model import Check, Fused, LayerError, NotRun, Plan, Site, VerifyReport
from fusekit.model.changes import compare
from fusekit.model.saved import SavedPlan, SavedRefusal, SavedSite
from fusekit.tracing import AliasReport, AliasSet, Assumption, Evidence, Stopped, Write, trace

VOID = {"br", "hr", "img", "col", "meta", "input", "wbr", "link"}
HOSTILE = "<img src=x onerror=alert(1)>"


class Reader(HTMLParser):
    """Reads html and holds that every tag is closed in its turn; keeps what was seen."""

    def __init__(self):
        super().__init__(convert_charrefs=True)
        self.open, self.seen, self.words, self.attributes = [], [], [], []

    def handle_starttag(self, tag, attrs):
        self.seen.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.seen.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-3:]}"
        self.open.pop()

    def handle_data(self, data):
        if "style" not in self.open:
            self.words.append(data)

    @property
    def text(self):
        return "".join(self.words)


def read_html(html):
    reader = Reader()
    reader.feed(html)
    reader.close()
    assert reader.open == []
    return reader


@pytest.fixture(scope="session")
def read():
    """Parses html, or fails; gives what is in it."""
    return read_html


@pytest.fixture(scope="session")
def hostile():
    """A name as no module should have it."""
    return HOSTILE


def make(kind, **fields):
    """A stand-in of a result type whose real instances need a model: only its fields matter here."""
    return type(kind.__name__, (kind,), {"__init__": lambda self: None, **fields})()


@pytest.fixture(scope="session")
def stand_in():
    return make


class Attention(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.q_proj = nn.Linear(width, width)
        self.k_proj = nn.Linear(width, width)
        self.v_proj = nn.Linear(width, width)

    def forward(self, x, mask=None):
        # three calls on one value
        q = self.q_proj(x)
        k = self.k_proj(x)
        v = self.v_proj(x)
        if mask is not None:
            q = q + mask
        scores = torch.softmax(q @ k.transpose(-1, -2), dim=-1)
        return scores @ v


class Stops(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x):
        y = self.linear(x)
        if y.sum() > 0:
            y = y + 1
        return y


@pytest.fixture(scope="session")
def attention():
    return Attention()


def diff_of(module, title):
    here = source(module)
    after = here.text.replace(
        "        q = self.q_proj(x)\n", "        merged = self.merged(x)\n        q = merged[..., :16]\n"
    )
    return SourceDiff(here.text, after, here.path, here.line, title)


def make_site(name, fusion="qkv", parts=("q_proj", "k_proj", "v_proj"), type_name="Attention", **fields):
    module = Attention()
    given = dict(diff=diff_of(module, f"{name}: {fusion}"), trace=trace(module), aliasing=None, applied=False)
    return make(Site, name=name, fusion=fusion, parts=parts, type_name=type_name, **(given | fields))


@pytest.fixture(scope="session")
def site():
    return make_site


def make_plan(sites=(), refusals=(), applied=(), **fields):
    given = dict(model=None, model_name="Model", scope="", assumptions=())
    return make(Plan, sites=sites, refusals=refusals, applied=applied, **(given | fields))


@pytest.fixture(scope="session")
def plan():
    return make_plan


def make_check(what="outputs", name="", fusion="", ok=True, fused=1.2e-6, unfused=1.1e-6):
    detail = f"largest error {fused} against {unfused} unfused"
    return Check(what, name, fusion, ok, detail, fused, unfused, fused, unfused, None)


@pytest.fixture(scope="session")
def check():
    return make_check


def make_report(checks, layers=(), not_run=()):
    return VerifyReport(
        "Model", "float32", "cpu", 3, tuple(checks), tuple(layers), tuple(not_run), "1 x 8 tokens"
    )


@pytest.fixture(scope="session")
def report():
    return make_report


@pytest.fixture(scope="session")
def samples(attention):
    """name: a result."""
    here = source(attention)
    sites = tuple(make_site(f"layers.{i}.attn") for i in range(3))
    refusals = (
        Refusal(
            "layers.3.attn",
            "qkv",
            "input-written",
            "layers.3.attn: x is written",
            here.path,
            here.line,
            ("k_proj",),
        ),
        Refusal("", "columns", "no-source", "there is no source", None, None, ()),
    )
    joined = AliasSet(("q", "scores"), (Evidence(here.line + 2, "self.q_proj(x)", "may be a view", False),))
    write = Write(here.line + 3, "x.mul_(2)", ("x", "q"), True)
    assumptions = (Assumption("input", "x: [2, 7, 16]"), Assumption("branch", "mask is None was true", 5))
    checks = [make_check(), *(make_check("site", f"layers.{i}", "qkv", ok=i != 1) for i in range(6))]
    layers = [LayerError(f"layers.{i}", 1e-7, 2e-7, 1e-8, 2e-8) for i in range(3)]
    plan = make_plan(sites, refusals, assumptions=assumptions)
    kept = [SavedSite(site.name, "Attention", "qkv", site.parts, "a/b.py", 3) for site in sites]
    refused = (
        SavedRefusal("layers.2.attn", "Attention", "qkv", sites[2].parts, "tied", "is shared", "a/b.py", 7),
    )
    saved = SavedPlan("Model", tuple(kept), (), (), "", ("qkv",), (("torch", "2.13.0"),))
    changes = compare(saved, replace(saved, sites=tuple(kept[:2]), refusals=refused))
    return {
        "trace": trace(attention),
        "stopped trace": trace(Stops()),
        "source": here,
        "diff": diff_of(attention, "attn: qkv"),
        "aliasing": AliasReport(
            "Attention", here, (AliasSet(("x",), ()), joined), (write,), None, assumptions
        ),
        "empty aliasing": AliasReport(
            "Attention", None, (), (), Stopped("/a/b.py", 3, "a branch on data"), ()
        ),
        "plan": plan,
        "empty plan": make_plan(),
        "refusing plan": make_plan((), refusals),
        "site": sites[0],
        "refusal": refusals[0],
        "fused": make(Fused, plan=plan, sites=sites, reverted=False),
        "reverted": make(Fused, plan=plan, sites=sites, reverted=True),
        "report": make_report(checks, layers, [NotRun("generation", "no tokenizer", False)]),
        "empty report": make_report([]),
        "saved plan": saved,
        "saved refusing plan": SavedPlan("Model", (), refused, (), fusions=("qkv",)),
        "saved site": saved.sites[0],
        "saved refusal": refused[0],
        "changes": changes,
        "no changes": compare(saved, saved),
        "change": changes.disappeared[0],
        "graph": trace(attention).graph,
        "graph module": torch.fx.symbolic_trace(nn.Sequential(nn.Linear(4, 4), nn.ReLU())),
        "exported program": torch.export.export(nn.Linear(4, 4), (torch.ones(2, 4),)),
    }
