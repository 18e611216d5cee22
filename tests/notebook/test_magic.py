"""The magic in a real shell, on a small random Llama: no kernel, no browser."""

import pytest
import torch
from IPython.core.interactiveshell import InteractiveShell
from transformers import LlamaConfig, LlamaForCausalLM

import fusekit
from fusekit.forward import ForwardSource, SourceDiff
from fusekit.model import Fused, Plan, VerifyReport
from fusekit.notebook.magic import COMMANDS
from fusekit.tracing import AliasReport, Trace


@pytest.fixture
def shell():
    InteractiveShell.clear_instance()
    shell = InteractiveShell.instance()
    shell.run_line_magic("unload_ext", "json")  # IPython makes these magics when first used
    yield shell
    InteractiveShell.clear_instance()


@pytest.fixture
def model():
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture
def ask(shell, model, capsys):
    """Runs a cell with the extension loaded and `model` there; gives its result, or fails."""
    shell.run_line_magic("load_ext", "fusekit")
    assert capsys.readouterr() == ("", ""), "loading prints"
    shell.user_ns["model"] = model

    def run(cell):
        done = shell.run_cell(cell)
        assert done.success, capsys.readouterr().err
        return done.result

    return run


@pytest.fixture
def refuse(ask, shell, capsys):
    """Runs a cell that must end in one line on stderr; gives that line."""

    def run(cell):
        capsys.readouterr()
        assert not shell.run_cell(cell).success
        out, err = capsys.readouterr()
        assert out == "" and err.count("\n") == 1 and err.startswith("UsageError: "), (out, err)
        return err.removeprefix("UsageError: ").strip()

    return run


# ---- loading and unloading ----


def state_of(shell):
    """What an extension could leave in a shell."""
    return {
        "line": dict(shell.magics_manager.magics["line"]),
        "cell": dict(shell.magics_manager.magics["cell"]),
        "registry": dict(shell.magics_manager.registry),
        "configurables": list(shell.configurables),
        "hooks": {name: str(vars(hook)) for name, hook in shell.hooks.items()},
        "completions": {name: str(vars(one)) for name, one in shell.strdispatchers.items()},
        "callbacks": {name: list(some) for name, some in shell.events.callbacks.items()},
        "completers": list(map(str, shell.Completer.custom_matchers)),
        "transformers": [*shell.input_transformers_cleanup, *shell.input_transformers_post],
        "formatters": {
            name: {**one.type_printers, **one.deferred_printers}
            for name, one in shell.display_formatter.formatters.items()
        },
        "names": set(shell.user_ns),
    }


def test_loading_adds_one_magic_and_unloading_leaves_nothing(shell, capsys):
    before = state_of(shell)
    shell.run_line_magic("load_ext", "fusekit")
    during = state_of(shell)
    assert set(during["line"]) - set(before["line"]) == {"fusekit"}
    for place in before.keys() - {"line", "registry", "configurables"}:
        assert during[place] == before[place]
    shell.run_line_magic("unload_ext", "fusekit")
    assert state_of(shell) == before
    assert capsys.readouterr() == ("", "")


def test_loading_twice_is_loading_once(shell):
    before = state_of(shell)
    fusekit.load_ipython_extension(shell)
    once = state_of(shell)
    fusekit.load_ipython_extension(shell)
    twice = state_of(shell)
    assert len(twice["configurables"]) == len(once["configurables"])
    assert set(twice["line"]) == set(once["line"])
    fusekit.unload_ipython_extension(shell)
    fusekit.unload_ipython_extension(shell)
    assert state_of(shell) == before


def test_reload_ext_keeps_the_magic_working(ask, shell):
    ask("%reload_ext fusekit")
    assert isinstance(ask("%fusekit plan model"), Plan)
    before = len(shell.configurables)
    ask("%reload_ext fusekit")
    assert len(shell.configurables) == before


def test_a_magic_that_is_unloaded_is_unknown(ask, shell, capsys):
    ask("%unload_ext fusekit")
    assert not shell.run_cell("%fusekit plan model").success
    assert "`%fusekit` not found" in capsys.readouterr().err


def test_help_teaches_every_word_and_flag_with_examples(ask, shell):
    text = shell.object_inspect_mime("%fusekit")["text/plain"]
    for word in (*COMMANDS, "--only", "--exclude", "--layers", "Examples::", "%fusekit plan model"):
        assert word in text


# ---- what each word gives ----


def test_plan_gives_the_plan_of_any_expression(ask, model):
    plan = ask("%fusekit plan model")
    assert isinstance(plan, Plan) and plan.model is model
    assert ask("%fusekit plan model.model.layers[ -1 ] . mlp").model is model.model.layers[-1].mlp
    assert ask('%fusekit plan {"a model": model}["a model"]').model is model
    assert (
        ask("%fusekit plan max([model, model.lm_head], key = lambda m: len(list(m.modules())))").model
        is model
    )


@pytest.mark.parametrize(
    ("flags", "fusions"),
    [
        ("--only qkv,glu", ["qkv", "glu"] * 2),
        ("--only qkv, glu", ["qkv", "glu"] * 2),
        ('--only="qkv,glu" --exclude glu', ["qkv", "qkv"]),
        ('--exclude "rms_norm" --layers "model.layers.1"', ["qkv", "glu"]),
        ("--layers model.layers.*.mlp,model.norm  # a comment -- with a --flag", ["glu", "glu", "rms_norm"]),
    ],
)
def test_flags_narrow_a_plan_before_or_after_the_expression(ask, flags, fusions):
    assert [site.fusion for site in ask(f"%fusekit plan model {flags}").sites] == fusions
    if "#" not in flags:
        assert [site.fusion for site in ask(f"%fusekit plan {flags}  model").sites] == fusions


def test_trace_source_and_aliasing_of_a_module_or_a_site(ask, shell):
    ask("attention = model.model.layers[0].self_attn")
    assert isinstance(ask("%fusekit trace attention"), Trace)
    assert isinstance(ask("%fusekit aliasing attention"), AliasReport)
    assert ask("%fusekit source attention").name == "LlamaAttention.forward"
    ask("plan = %fusekit plan model")
    assert isinstance(shell.user_ns["plan"], Plan)
    assert isinstance(ask("%fusekit source plan.sites[0]"), ForwardSource)


def test_diff_of_one_module_is_its_source_diff(ask, model):
    diff = ask("%fusekit diff model.model.layers[0].mlp")
    assert isinstance(diff, SourceDiff)
    assert str(diff) == str(fusekit.plan(model.model.layers[0].mlp).sites[0].diff)


def test_diff_of_a_model_shows_each_forward_once(ask):
    diffs = ask("%fusekit diff model")
    assert {diff.title for diff in diffs} == {
        "LlamaRMSNorm in 5 places: rms_norm",
        "LlamaAttention in 2 places: qkv",
        "LlamaMLP in 2 places: glu",
    }
    assert "+        q_proj, k_proj, v_proj = self.merged_qkv(hidden_states)" in repr(diffs)
    html = diffs._repr_mimebundle_()["text/html"]
    assert all(diff.title in html for diff in diffs) and "could not be drawn" not in html


def test_diff_of_a_plan_a_site_and_what_is_applied(ask, shell):
    diff = ask("%fusekit diff model --only glu")
    assert diff.title == "LlamaMLP in 2 places: glu"
    ask("plan = %fusekit plan model --only glu")
    assert ask("%fusekit diff plan") == diff
    assert ask("%fusekit diff plan.sites[0]").after == diff.after
    ask("fused = %fusekit apply plan")
    assert ask("%fusekit diff fused") == diff
    assert ask("%fusekit diff model.model.layers[0].mlp").after == diff.after
    ask("%fusekit revert fused")


def test_diff_without_a_site_says_why_and_lists_the_refusals(ask, model):
    model.model.layers[0].self_attn.k_proj.register_forward_hook(lambda *_: None)
    shown = ask("%fusekit diff model.model.layers[0].self_attn")
    assert "nothing to fuse in LlamaAttention" in repr(shown) and "hooked" in repr(shown)
    assert "nothing was refused" in repr(ask("%fusekit diff model.lm_head"))


def test_apply_and_revert_by_what_apply_gave(ask, shell, model):
    forward = type(model.model.layers[0].mlp)
    ask("fused = %fusekit apply model --only glu")
    assert isinstance(shell.user_ns["fused"], Fused)
    assert type(model.model.layers[0].mlp) is not forward
    assert ask("%fusekit revert fused").reverted
    assert type(model.model.layers[0].mlp) is forward


def test_apply_takes_a_plan_and_revert_a_model(ask, model, capsys):
    ask("plan = %fusekit plan model")
    assert ask("%fusekit apply plan").model is model
    capsys.readouterr()
    assert ask("%fusekit revert model") is None
    assert capsys.readouterr().out == "LlamaForCausalLM: 9 sites reverted\n"


def test_revert_takes_flags_as_plan_does(ask, model, capsys):
    ask("fused = %fusekit apply model")
    assert ask("%fusekit revert model --only glu --layers model.layers.0") is None
    assert capsys.readouterr().out == "LlamaForCausalLM: 1 site reverted\n"
    assert len(ask("%fusekit plan model").applied) == 8
    ask("%fusekit revert model")
    assert not fusekit.plan(model).applied


def test_verify_of_a_model_a_plan_and_what_is_applied(ask, shell, model):
    report = ask("%fusekit verify model --only glu")
    assert isinstance(report, VerifyReport) and report.ok and report.sites == 2
    ask("fused = %fusekit apply model --only qkv")
    assert ask("%fusekit verify fused").sites == 2
    assert ask("%fusekit verify fused.plan").ok


def test_a_cell_shows_the_result(ask, capsys):
    capsys.readouterr()
    ask("%fusekit plan model")
    assert "LlamaForCausalLM: 9 sites" in capsys.readouterr().out


def test_a_semicolon_is_no_part_of_the_expression(ask):
    assert isinstance(ask("%fusekit plan model;"), Plan)


# ---- one line for what goes wrong ----


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("", "say what to do: %fusekit plan model; there are plan, diff, apply, revert, verify, trace"),
        ("paln model", "there is no %fusekit paln (did you mean `plan`?); there are plan, diff, apply"),
        ("time model", "there is no %fusekit time; there are plan, diff, apply, revert, verify, trace"),
        ("plan", "%fusekit plan needs an expression: %fusekit plan model"),
        ("plan modell", "`modell`: name 'modell' is not defined (did you mean `model`?)"),
        ("plan model.modle", "`model.modle`: 'LlamaForCausalLM' object has no attribute 'modle' (did you"),
        ("plan model model", "`model model` is not a Python expression: invalid syntax"),
        ("plan [model][1]", "`[model][1]`: IndexError: list index out of range"),
        ("plan 3", "%fusekit plan takes a module; `3` is of type int"),
        ("trace type(model)", "%fusekit trace takes a module; `type(model)` is the class LlamaForCausalLM"),
        ("verify 3", "%fusekit verify takes a module or a plan; `3` is of type int"),
        ("revert 3", "%fusekit revert takes a module or what apply gave; `3` is of type int"),
        ("plan model --onyl qkv", "there is no flag --onyl (did you mean `--only`?); there are --only, --ex"),
        ("plan model --only", "--only needs a value: --only qkv,glu"),
        ("trace model --only qkv", "%fusekit trace takes no --only"),
        ("revert model --layers x", "layers='x' matches no module"),
        # what fusekit itself says comes through
        ("plan model --only qvk", "there is no fusion 'qvk' (did you mean 'qkv'?); there are "),
        ("plan model --layers nope", "layers='nope' matches no module"),
        ("revert model", "nothing is fused in this LlamaForCausalLM: there is nothing to revert"),
    ],
)
def test_what_a_user_can_put_right_is_one_line(refuse, line, said):
    assert refuse(f"%fusekit {line}").startswith(said)


def test_flags_are_refused_where_a_plan_is_made_already(ask, refuse):
    ask("plan = %fusekit plan model")
    assert refuse("%fusekit apply plan --only qkv") == (
        "%fusekit apply takes no --only: this plan is made already"
    )


def test_a_module_without_source_is_one_line(ask, refuse, shell):
    names = {"nn": torch.nn}
    exec("class Odd(nn.Module):\n    def forward(self, x):\n        return x\n", names)
    shell.user_ns["odd"] = names["Odd"]()
    assert "no source text" in refuse("%fusekit source odd")


def test_a_fault_of_fusekit_itself_keeps_its_traceback(ask, shell, monkeypatch, capsys):
    monkeypatch.setitem(COMMANDS, "plan", lambda asked: 1 // 0)
    assert isinstance(shell.run_cell("%fusekit plan model").error_in_exec, ZeroDivisionError)
