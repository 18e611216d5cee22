"""Every notebook runs from top to bottom, and what is committed is what a run shows."""

import itertools
import re
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests.noise import without_noise

FOLDER = Path(__file__).parents[2] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))

# What a reader of the committed file must find in its outputs, as text.
PROMISES = {
    "01_tour": [
        "The capital of France is Paris.",
        "4 module calls, complete",
        "LlamaAttention.forward",
        "alias sets, writes nothing",
        "LlamaForCausalLM: 121 sites (61 rms_norm, 30 qkv, 30 glu), 0 refusals, nothing applied",
        "+        q_proj, k_proj, v_proj = self.merged_qkv(hidden_states)",
        "+        gate_proj, up_proj = self.merged_glu(x)",
        "29 sites (29 qkv), 1 refusal",
        "cannot fuse qkv: k_proj carries hooks",
        "121 sites (61 rms_norm, 30 qkv, 30 glu) applied",
        "fused equals unfused within what float64 allows: ok",
        "k's weight begins where q's ends: True",
        "121 sites (61 rms_norm, 30 qkv, 30 glu) reverted",
        "30 sites (30 glu)",  # of the magic
    ],
    "02_aliasing": [
        "q differs by 0.00",
        "k differs by",
        "line 27: x.view(-1): aten::view returns a view of its input",
        "(read in line 26, written in line 28, read in line 29)",
        "-> fused, and the same numbers",
        "InAContainer: cannot fuse columns: x is written between the parts",
        "t *= by writes in place in scaled",
        "in ReLU.forward",
        "Activated: 1 site (1 columns), 0 refusals",
        "two tensors: 0.00, one tensor twice:",
        "what was there before the forward shared storage in this run",
        "not run: `halve` was false",
        "writes nothing for certain, 1 more place may",
        "false alarm",
        "missed",
    ],
    "07_own_fusion": [
        "TimesFmModelForPrediction: 2 sites (2 linear_add), 0 refusals, nothing applied",
        "+        return linear_plus_linear(hidden, x, self.output_layer, self.residual_layer)",
        "fused equals unfused within what float64 allows: ok",
        "forgets_a_bias gives other numbers than what it replaces",
        "In[11]:10  x.mul_(2) writes in place between the parts",
        "In[11]:26  first, which first = self.a(x) stores, is also read in line 26",
        "output_layer carries hooks, which would no longer be called",
        "linear_add takes a part of it, or its place in the forward; exclude linear_add to have it",
    ],
}


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def outputs(notebook):
    return [output for cell in code_cells(notebook) for output in cell.outputs]


def texts(output):
    """Everything of an output that a reader can see."""
    if output.output_type == "stream":
        return [output.text]
    if output.output_type == "error":
        return ["Traceback", *output.traceback]
    return [text for text in output.data.values() if isinstance(text, str)]


def kinds(notebook):
    """For each code cell, what sort of outputs it has; what is printed may come in one piece or several."""
    return [
        [
            kind
            for kind, _ in itertools.groupby(
                (output.output_type, *sorted(output.get("data", {})), output.get("name", ""))
                for output in cell.outputs
                if output.output_type != "stream" or without_noise(output.text)
            )
        ]
        for cell in code_cells(notebook)
    ]


@pytest.fixture(params=NOTEBOOKS, ids=lambda path: path.stem)
def path(request):
    return request.param


@pytest.fixture
def committed(path):
    return nbformat.read(path, as_version=4)


def test_there_are_notebooks():
    assert {path.stem for path in NOTEBOOKS} >= set(PROMISES)


def test_notebook_runs_and_shows_what_the_committed_one_shows(path, committed, monkeypatch):
    monkeypatch.setenv("FUSEKIT_QUICK", "1")
    run = nbformat.read(path, as_version=4)
    for cell in code_cells(run):
        cell.outputs = []
    client = NotebookClient(
        run, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(FOLDER)}}
    )
    client.execute()  # raises where a cell does
    assert not [output for output in outputs(run) if output.output_type == "error"]
    assert kinds(run) == kinds(committed)


def test_committed_notebook_was_run_once_from_top_to_bottom(committed):
    nbformat.validate(committed)
    assert [cell.execution_count for cell in code_cells(committed)] == list(
        range(1, len(code_cells(committed)) + 1)
    )
    # When a cell ran and how long it took would differ with every run.
    assert not [cell.id for cell in committed.cells if "execution" in cell.metadata]


def test_committed_outputs_hold_no_fault_and_no_place_of_this_machine(committed):
    here = {str(Path.home()), sys.prefix, str(FOLDER.parent)} - {"/", "/usr", "/usr/local"}
    private = re.compile("|".join([r"[/\\](home|Users|root|tmp)[/\\]", *map(re.escape, here)]))
    for output in outputs(committed):
        for text in texts(output):
            assert "Traceback" not in text
            assert "could not be drawn" not in text
            assert "site-packages" not in text
            assert not private.search(text), private.search(text)
        assert output.get("name") != "stderr", output.text


def test_committed_html_needs_no_script_and_no_network(committed):
    shown = [
        output.data["text/html"] for output in outputs(committed) if "text/html" in output.get("data", {})
    ]
    assert shown
    for html in shown:
        assert "<script" not in html
        assert not re.search(r"""(src|href)=["']?(https?:)?//""", html)
        assert "<table" in html or "<details" in html or "<pre" in html


@pytest.mark.parametrize("name", PROMISES)
def test_committed_outputs_keep_their_promises(name):
    notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    seen = "\n".join(text for output in outputs(notebook) for text in texts(output))
    assert [promise for promise in PROMISES[name] if promise not in seen] == []


def test_tour_shows_every_result_as_html():
    notebook = nbformat.read(FOLDER / "01_tour.ipynb", as_version=4)
    last_lines = {
        cell.source.splitlines()[-1]: set(cell.outputs[-1].get("data", {}))
        for cell in code_cells(notebook)
        if cell.outputs
    }
    for line in ("fk.trace(attention)", "fk.source(attention)", "fk.aliasing(attention)", "plan"):
        assert last_lines[line] == {"text/plain", "text/html"}
    for line in ("plan.sites[0].diff", "fused", "plan.verify()", "with_hook"):
        assert last_lines[line] == {"text/plain", "text/html"}
