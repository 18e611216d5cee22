"""What holds for the picture of every result."""

import dataclasses
import re
import subprocess
import sys

import pytest

from fusekit import display
from fusekit.forward import ForwardSource, SourceDiff
from fusekit.fusions import Refusal
from fusekit.model import Fused, Plan, Site, VerifyReport
from fusekit.model.changes import Change, PlanChanges, compare
from fusekit.model.saved import SavedPlan, SavedRefusal, SavedSite
from fusekit.shown import Shown
from fusekit.tracing import AliasReport, Assumption, Stopped, Trace

NAMES = [
    "trace", "stopped trace", "source", "diff", "aliasing", "empty aliasing", "plan", "empty plan",
    "refusing plan", "site", "refusal", "fused", "reverted", "report", "empty report", "graph",
    "graph module", "exported program", "saved plan", "saved refusing plan", "saved site", "saved refusal",
    "changes", "no changes", "change",
]  # fmt: skip
TYPES = [
    AliasReport, Change, ForwardSource, Fused, Plan, PlanChanges, Refusal, SavedPlan, SavedRefusal, SavedSite,
    Site, SourceDiff, Trace, VerifyReport,
]  # fmt: skip


def test_every_sample_is_tried(samples):
    assert set(samples) == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
class TestEveryPicture:
    def test_html_is_well_formed_and_has_no_script_id_or_address(self, samples, read, name):
        html = display.html(samples[name])
        seen = read(html)
        assert not {"script", "iframe", "object", "link", "form", "title", "a"} & set(seen.seen)
        assert not [key for key, _ in seen.attributes if key.startswith("on") or key in ("id", "href", "src")]
        assert "http" not in html and "url(" not in html
        assert not re.search(r"0x[0-9a-f]{6}", html)

    def test_html_has_a_table_or_details_and_is_drawn_by_its_own_file(self, samples, name):
        html = display.html(samples[name])
        assert "<table" in html or "<details" in html
        assert "could not be drawn" not in html
        assert html.startswith("<style>")

    def test_inline_styles_are_ones_jupyterlab_keeps(self, samples, read, name):
        for key, value in read(display.html(samples[name])).attributes:
            if key != "style":
                continue
            for rule in filter(None, value.split(";")):
                assert not re.search(r"var\(|inherit|currentcolor|calc\(|\.\d*em.*!", rule, re.I), rule
                assert rule.partition(":")[0] in KEPT, rule

    def test_text_says_something_without_html(self, samples, name):
        text = display.text(samples[name])
        assert len(text) > 20 and "<table" not in text
        assert "could not be drawn" not in text
        assert not re.search(r"0x[0-9a-f]{6}", text)

    def test_the_same_object_gives_the_same_bytes(self, samples, name):
        assert display.bundle(samples[name]) == display.bundle(samples[name])

    def test_the_picture_is_text_and_html(self, samples, name):
        picture = display.render(samples[name])
        assert picture == display.Picture(display.text(samples[name]), display.html(samples[name]))


# of sanitizer.ts in JupyterLab 4.6, those used here; what stands on the svg goes with it
KEPT = set(
    """background border border-bottom border-collapse border-left border-radius caption-side color cursor
    display font-family font-size font-weight height line-height margin margin-left max-height max-width
    min-width opacity overflow overflow-x padding padding-right table-layout text-align text-decoration
    vertical-align white-space width""".split()
)


def test_without_style_nothing_of_the_drawing_leaks(samples, read):
    html = re.sub(r"<style>.*?</style>", "", display.html(samples["trace"]))
    assert html.count('<div style="display:none" class="fk-rich">') == html.count("<svg") == 1


@pytest.mark.parametrize("kind", TYPES)
def test_an_object_without_any_field_still_shows(kind, read):
    broken = object.__new__(type(kind.__name__, (kind,), {"__slots__": ()}))
    assert kind.__name__ in display.text(broken)
    read(display.html(broken))
    assert kind.__name__ in display.html(broken)


@pytest.mark.parametrize("kind", TYPES)
def test_an_object_whose_every_field_raises_still_shows(kind, read):
    class Vicious(Exception):
        def __str__(self):
            raise ValueError("no message either")

    def refuse(self, name):
        raise Vicious

    broken = object.__new__(type(kind.__name__, (kind,), {"__getattribute__": refuse}))
    assert "could not be drawn" in display.text(broken)
    assert read(display.html(broken))


def test_the_apology_names_the_error_in_one_line():
    class Torn(Shown):
        pass

    @display.as_text.register
    def _(obj: Torn) -> str:
        raise RuntimeError("first line\nsecond line")

    assert display.text(Torn()) == "<Torn: could not be drawn (RuntimeError: first line)>"


def test_a_type_nobody_draws_shows_its_fields(read):
    @dataclasses.dataclass(frozen=True, repr=False)
    class Unknown(Shown):
        count: int
        parts: tuple[str, ...]

    assert display.text(Unknown(3, ("a", "b"))) == "Unknown\n  count: 3\n  parts: 2 in a tuple"
    assert "count" in read(display.html(Unknown(3, ()))).text


def test_a_room_that_cannot_be_imported_spoils_only_its_own_pictures(samples, monkeypatch):
    monkeypatch.setitem(sys.modules, "fusekit.display.verify", None)
    assert "could not be drawn (ModuleNotFoundError" in display.text(samples["report"])
    assert "could not" not in display.text(samples["trace"])


def test_a_result_shows_itself(samples):
    source = samples["source"]
    assert repr(source) == display.text(source)
    assert source._repr_mimebundle_() == {
        "text/plain": display.text(source),
        "text/html": display.html(source),
    }


def test_what_models_and_sources_say_is_escaped(hostile, read, site, plan, check, report, attention, samples):
    source = dataclasses.replace(samples["source"], text=f"def f(x):\n    return '{hostile}'\n", name=hostile)
    diff = SourceDiff(source.text, source.text.replace("return", "yield"), hostile, 1, hostile)
    stopped = Stopped(hostile, 1, hostile)
    kept = SavedSite(hostile, hostile, hostile, (hostile,), hostile, 1)
    refused = SavedRefusal(hostile, hostile, hostile, (hostile,), hostile, hostile, hostile, 1)
    saved = SavedPlan(hostile, (kept,), (refused,), (), hostile, (hostile,), (("torch", hostile),))
    nothing = dataclasses.replace(saved, sites=())
    some = site(hostile, hostile, (hostile,), hostile, diff=diff)
    for obj in [
        source,
        diff,
        some,
        plan(
            [some], [Refusal(hostile, hostile, "tied", hostile, hostile, 1, (hostile,))], model_name=hostile
        ),
        Trace(samples["trace"].graph, hostile, source, stopped, (Assumption(hostile, hostile),)),
        AliasReport(hostile, source, (), (), stopped, ()),
        report([check(hostile, hostile, hostile)]),
        plan((), [Refusal(hostile, hostile, "tied", hostile, hostile, 1, ())], model_name=hostile),
        saved,
        nothing,
        dataclasses.replace(nothing, refusals=()),
        kept,
        refused,
        compare(saved, nothing),
        compare(saved, nothing).disappeared[0],
    ]:
        html = display.html(obj)
        assert hostile in read(html).text  # it is there, as text
        assert "<img" not in html


def test_a_node_name_is_escaped_in_the_drawing(hostile, read):
    import torch.fx

    graph = torch.fx.Graph()
    graph.output(graph.call_module(hostile + '"', (graph.placeholder("x"),)))
    html = display.html(graph)
    assert "<svg" in html and "img" not in read(html).seen
    assert hostile in read(html).text


def test_what_steers_a_terminal_is_spelled_out():
    refusal = Refusal("a\x1b[31mb\u202ec\ud800", "qkv", "tied", "is shared", None, None, ())
    assert display.text(refusal).startswith("<Refusal a\\x1b[31mb\\u202ec\\ud800: qkv (tied)")
    display.html(refusal).encode()


def test_a_page_is_a_whole_file_for_light_and_dark(samples, read):
    page = display.page(samples["plan"], "The <plan>")
    assert page.startswith("<!doctype html>") and "The &lt;plan&gt;" in page
    assert 'name="color-scheme" content="light dark"' in page
    read(page.replace("<!doctype html>", ""))


def test_showing_imports_neither_pandas_nor_matplotlib_nor_ipython():
    code = (
        "import sys; from torch import nn; from fusekit.tracing import trace; from fusekit import display;"
        "display.bundle(trace(nn.Sequential(nn.Linear(2, 2))));"
        "heavy = ['pandas', 'matplotlib', 'IPython', 'ipywidgets'];"
        "print([name for name in heavy if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
