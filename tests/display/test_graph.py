"""The drawing, and the table that says the same."""

import shutil
import stat
import sysconfig

import pytest
import torch
import torch.fx
from torch import nn

from fusekit import display
from fusekit.display import layout
from fusekit.display.drawing import BOXES, boxes_of, drawing
from fusekit.tracing import trace


def chain(length, sharers=0):
    graph = torch.fx.Graph()
    x = mask = graph.placeholder("x")
    for i in range(length):
        x = graph.call_function(torch.add, (x, mask) if i < sharers else (x, 1))
    graph.output(x)
    return graph


def test_the_table_names_the_node_its_shape_and_its_source(attention, read):
    text = read(display.html(trace(attention))).text
    for said in ("q_proj", "call_module", "[2, 7, 16] float32", "self.q_proj(x)", "torch.softmax"):
        assert said in text
    plain = display.text(trace(attention))
    row = next(line for line in plain.splitlines() if line.startswith("  q_proj "))
    assert row.split() == [
        "q_proj",
        "call_module",
        "q_proj",
        "x",
        "[2,",
        "7,",
        "16]",
        "float32",
        *row.split()[-2:],
    ]
    assert row.endswith("self.q_proj(x)")


def test_a_stop_stands_before_the_table(samples, read):
    text = read(display.html(samples["stopped trace"])).text
    assert "incomplete" in text and text.index("Stopped at conftest.py:") < text.index("shape and dtype")
    assert "  stopped at conftest.py:" in display.text(samples["stopped trace"]).splitlines()[1]


def test_assumptions_are_listed(attention, read):
    assert "mask is left out: None" in read(display.html(trace(attention))).text


def test_the_drawing_scales_by_its_view_box_and_scrolls(read):
    html = drawing(chain(3), "a chain")
    attributes = dict(read(html).attributes)
    assert "viewbox" in attributes and "width" not in attributes and "height" not in attributes
    assert attributes["role"] == "img" and "Drawing of a chain: 5 boxes" in attributes["aria-label"]
    assert "overflow:auto" in html and "xmlns" not in html


def test_a_source_with_many_users_becomes_stubs():
    boxes = boxes_of(chain(9, sharers=9))
    stubs = [title for title, (kind, _) in boxes.nodes.items() if kind == "stub"]
    assert len(stubs) == 9 and all((stub, stub.partition("_")[2]) in boxes.edges for stub in stubs)
    assert not [edge for edge in boxes.edges if edge[0] == "n0"]
    assert not [kind for kind, _ in boxes_of(chain(9, sharers=8)).nodes.values() if kind == "stub"]
    assert "stroke-dasharray" in drawing(chain(9, sharers=9), "")


def test_too_many_boxes_are_a_table_and_a_notice(read):
    html = display.html(chain(BOXES + 1))
    assert "<svg" not in html and f"{BOXES + 3} boxes" in html
    assert "nodes 1 to 100: x … add_98" in read(html).text
    assert len(display.html(chain(5000))) < 250_000 and "5002 nodes, the first" in display.html(chain(5000))


def test_without_a_program_the_table_stands_and_a_line_says_why(monkeypatch):
    monkeypatch.setattr(layout, "program", lambda: None)
    layout.lay_out.cache_clear()
    html = display.html(chain(3))
    assert "<svg" not in html and "pip install graphviz-pure" in html and "<table" in html
    layout.lay_out.cache_clear()


@pytest.mark.parametrize(
    ("script", "said"),
    [("sleep 30", "more than 0.2 seconds"), ("exit 3", "exit code 3"), ("echo '<svg/>'", "exit code 0")],
)
def test_a_program_that_hangs_or_fails_is_told(tmp_path, script, said):
    exe = tmp_path / "dot"
    exe.write_text(f"#!/bin/sh\nexec {script}\n" if "sleep" in script else f"#!/bin/sh\n{script}\n")
    exe.chmod(exe.stat().st_mode | stat.S_IEXEC)
    with pytest.raises(layout.NoLayout, match=said):
        layout.lay_out("digraph { a -> b }", str(exe), 0.2)


def test_dot_on_the_path_goes_before_graphviz_pure(monkeypatch, tmp_path):
    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}" if name == "dot" else None)
    assert layout.program() == "/bin/dot"
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    assert layout.program() is None
    (tmp_path / "graphviz-pure").touch()
    assert layout.program() == str(tmp_path / "graphviz-pure")


def test_coordinates_are_rounded_and_signs_kept():
    assert layout._short("M37.68,-71.74C-1.04,2 3,-4.96") == "M37.7,-71.7C-1,2 3,-5"


def test_a_module_call_has_the_heavy_frame_and_attention_the_double_one(read):
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaAttention

    with torch.device("meta"):
        llama = LlamaAttention(LlamaConfig(hidden_size=16, num_attention_heads=2, num_key_value_heads=1), 0)
    html = drawing(trace(llama).graph, "")
    assert html.count('stroke-width="2"') == 4
    assert "attention, opaque (double frame)" in html


def test_an_unused_argument_is_no_box_but_a_row():
    class Plain(nn.Module):
        def forward(self, x, unused):
            return x + 1

    some = trace(Plain(), torch.ones(2), torch.ones(2))
    assert "unused" not in str(boxes_of(some.graph).nodes)
    assert "unused" in display.html(some)
