"""A model written in the notebook itself: cells run by a real shell, edited and run again."""

import linecache
from concurrent.futures import ThreadPoolExecutor

import pytest
from IPython.core.interactiveshell import InteractiveShell

CELL = """
import torch
import torch.nn as nn
import fusekit as fk


class Norm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width) + 0.5)

    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5))


class Block(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.norm = Norm(width)
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x):
        x = self.norm(x)
        return torch.softmax(self.q(x) @ self.k(x).transpose(-1, -2), -1) @ self.v(x)  # plain
"""
EDITED = CELL.replace("self.v(x)  # plain", "(2 * self.v(x))  # twice")
CHECK = """
x = torch.randn(2, 5, 16)
with torch.no_grad():
    before = model(x)
    plan = fk.plan(model)
    fused = plan.apply()
    during = model(x)
    fused.revert()
    after = model(x)
torch.testing.assert_close(during, before)
assert torch.equal(after, before) and type(model).forward(model, x).shape == x.shape
report = plan.verify({"x": x})
assert report.ok, report
"""


def tip(name):
    """A compiler whose cells have names like files, as those of a notebook's kernel have."""
    from IPython.core.compilerop import CachingCompiler

    class Named(CachingCompiler):
        def get_code_name(self, raw, transformed, number):
            return f"{name}/{abs(hash(raw))}.py"

    return Named


@pytest.fixture(params=["shell", "kernel"])
def run(request, tmp_path, capsys):
    """Runs a cell, or fails; gives the names that cells have made. `run.shell` is the shell."""
    InteractiveShell.clear_instance()
    shell = InteractiveShell.instance()
    if request.param == "kernel":
        shell.compiler_class = tip(tmp_path)
        shell.compile = shell.compiler_class()

    def run(cell):
        # In a thread of its own: the browser's tests leave an event loop running in this one, and a
        # cell may await.
        with ThreadPoolExecutor(1) as thread:
            done = thread.submit(shell.run_cell, cell, store_history=True).result()
        assert done.success, capsys.readouterr()
        return shell.user_ns

    yield run
    InteractiveShell.clear_instance()


def fusions(plan):
    return sorted((site.name, site.fusion) for site in plan.sites)


def test_a_class_of_a_cell_is_planned_applied_verified_and_reverted(run):
    run(CELL)
    names = run("model = Block().eval()" + CHECK)
    assert fusions(names["plan"]) == [("", "columns"), ("norm", "rms_norm")]
    diff = str(next(site.diff for site in names["plan"].sites if site.fusion == "columns"))
    assert "-        return torch.softmax(self.q(x)" in diff and "# plain" in diff


def test_an_edited_cell_gives_new_instances_the_new_source_and_leaves_the_old(run):
    run(CELL)
    run("old = Block().eval()")
    run(EDITED)
    names = run(
        "new = Block().eval()\nnew.load_state_dict(old.state_dict())\nplans = fk.plan(old), fk.plan(new)"
    )
    for plan, comment in zip(names["plans"], ("# plain", "# twice"), strict=True):
        (diff,) = [str(site.diff) for site in plan.sites if site.fusion == "columns"]
        assert comment in diff and len([c for c in ("# plain", "# twice") if c in diff]) == 1
    run("x = torch.randn(2, 5, 16)\nwanted = old(x), new(x)")
    names = run(
        "both = [plan.apply() for plan in plans]\nfound = old(x), new(x)\nbelow = type(old), type(new)"
    )
    names["torch"].testing.assert_close(names["found"], names["wanted"])
    assert names["below"][0] is not names["below"][1]
    names["torch"].testing.assert_close(names["found"][1], 2 * names["found"][0])
    run("[fused.revert() for fused in both]\nassert torch.equal(old(x), wanted[0])")
    run("model = old" + CHECK)
    run("model = new" + CHECK)


def test_a_cell_run_again_unchanged_changes_nothing(run):
    run(CELL)
    run("model = Block().eval()")
    run(CELL)
    names = run("plan = fk.plan(model), fk.plan(Block())")
    assert fusions(names["plan"][0]) == fusions(names["plan"][1]) != []
    run(CHECK.strip())


@pytest.mark.parametrize(
    "around",
    [
        "%config InlineBackend.x\n{}",
        "import asyncio\nawait asyncio.sleep(0)\n{}",
        "from __future__ import annotations\n{}",
        "!true\n{}\nBlock",
        "%%capture\n{}",
    ],
    ids=["magic", "await", "future", "system", "capture"],
)
def test_cells_that_are_more_than_plain_python(run, around):
    run(around.format(CELL).replace("%config InlineBackend.x", "%precision 3"))
    names = run("model = Block().eval()" + CHECK)
    assert fusions(names["plan"]) == [("", "columns"), ("norm", "rms_norm")]


def test_a_class_of_a_timed_cell_has_no_source_and_says_so(run):
    run("%%time\n" + CELL)
    names = run("plan = fk.plan(Block())")
    assert names["plan"].sites == ()
    assert {refusal.reason for refusal in names["plan"].refusals} == {"no-source"}
    assert all("notebook cell" in refusal.message for refusal in names["plan"].refusals)


def test_a_class_that_inherits_from_one_of_another_cell(run):
    run(CELL)
    run("class Louder(Block):\n    def forward(self, x):\n        return 3 * super().forward(self.norm(x))\n")
    names = run("model = Louder().eval()\nplan = fk.plan(model)")
    assert ("norm", "rms_norm") in fusions(names["plan"])
    assert ("", "columns") not in fusions(names["plan"])  # its forward calls no linear itself


def test_a_traceback_shows_the_fused_line(run):
    run(CELL)
    names = run("model = Block().eval()\nfused = fk.plan(model).apply()")
    code = type(names["model"]).forward.__code__
    lines = "".join(linecache.getlines(code.co_filename))
    assert "self.merged_" in lines and "class Norm" in lines


def test_a_cell_is_named_by_its_number(run):
    run("first = 1")
    run(CELL)
    names = run("text = repr(fk.source(Block()))")
    assert names["text"].splitlines()[0] == "Block.forward  In[2]:21"
