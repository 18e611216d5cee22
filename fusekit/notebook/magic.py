"""The line magic `%fusekit`: plan, look at, apply, check and revert without leaving the cell.

Loading registers this one magic and nothing else, and unloading takes it away again. What a user
can put right is one line without a traceback; a fault of fusekit itself keeps its traceback.
"""

import difflib
from collections.abc import Callable, Iterable
from typing import Any

import torch.nn as nn
from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell
from IPython.core.magic import Magics, line_magic, magics_class, no_var_expand
from IPython.core.magic_arguments import argument, kwds, magic_arguments

import fusekit
from fusekit.errors import FusekitError
from fusekit.model import Fused, Plan, Site
from fusekit.model.binding import applied_matches
from fusekit.notebook.diffs import diffs_of

NAME = "fusekit"
EXPLAINED = "%fusekit? explains"
FLAGS = {"--only": "qkv,glu", "--exclude": "rms_norm", "--layers": '"model.layers.*"'}  # with an example each


def load(shell: InteractiveShell) -> None:
    """Register `%fusekit`; a second time changes nothing."""
    unload(shell)
    shell.register_magics(FusekitMagics(shell))


def unload(shell: InteractiveShell) -> None:
    """Take `%fusekit` off `shell`, and everything that came with it."""
    # By name: `%autoreload` may have made the class anew since an instance of it was registered.
    name = FusekitMagics.__name__
    manager = shell.magics_manager
    found = manager.registry.pop(name, None)
    if found is not None:
        manager.magics["line"].pop(NAME, None)
        shell.configurables[:] = [one for one in shell.configurables if one is not found]


@magics_class
class FusekitMagics(Magics):
    """Holds the line magic `%fusekit`."""

    @no_var_expand  # EXPR is Python: `{...}` and `$` in it are the user's own
    @magic_arguments()
    @kwds(usage="%(prog)s WHAT EXPR [--only FUSIONS] [--exclude FUSIONS] [--layers PATTERNS]")
    @argument("what", metavar="WHAT", help="one of the words below")
    @argument("expr", metavar="EXPR", help="any Python expression, such as model.model.layers[0].mlp")
    @argument("--only", metavar="FUSIONS", help="these fusions, joined by commas: qkv,glu")
    @argument("--exclude", metavar="FUSIONS", help="all fusions but these: rms_norm")
    @argument("--layers", metavar="PATTERNS", help='the modules to look at: "model.layers.*"')
    @line_magic
    def fusekit(self, line: str) -> Any:
        """See what can be fused in a PyTorch module, why not, and what it looks like; then do it.

        WHAT is one of

          plan       every site (a place where a fusion applies) and every refusal (where one almost does)
          diff       the forwards before and after, side by side
          apply      fuse, in place; gives what `revert` takes
          revert     exactly what was there before
          verify     compare the fused model with the original and with float64

          trace      the graph of one module's forward, every submodule one node
          source     the forward that really runs
          aliasing   which names may share storage, and what is written

        Examples::

          %fusekit plan model
          %fusekit plan model --only qkv,glu --layers "model.layers.*"
          %fusekit diff model.model.layers[0].mlp
          %fusekit trace model.model.layers[0].self_attn
          %fusekit verify model
          fused = %fusekit apply model --exclude rms_norm
          %fusekit revert fused

        Only `apply` and `revert` change the model. The flags go with plan, diff, apply, revert and verify of
        a module. diff, apply and verify also take a plan, and diff, verify and revert what apply gave.
        Each gives what the Python of the same name gives, fusekit.plan(model) and so on, so the result
        can be kept: plan = %fusekit plan model
        """
        words, flags = _split(line)
        what, _, expr = words.partition(" ")
        _check_what(what)
        if not expr:
            raise UsageError(f"%fusekit {what} needs an expression: %fusekit {what} model")
        options = {name.removeprefix("--"): _listed(value) for name, value in flags}
        assert self.shell is not None
        target = _value(self.shell, expr.strip())
        try:
            return COMMANDS[what](_Asked(what, expr.strip(), target, options))
        except FusekitError as error:
            raise UsageError(_one_line(error)) from None


def _value(shell: InteractiveShell, expr: str) -> Any:
    """What `expr` is in the user's namespace; raises `UsageError` for whatever goes wrong there."""
    names: Iterable[str] = ()
    try:
        return shell.ev(expr)
    except SyntaxError as error:
        raise UsageError(f"`{expr}` is not a Python expression: {error.msg}") from None
    except (NameError, AttributeError) as error:
        names = dir(error.obj) if isinstance(error, AttributeError) else shell.user_ns
        names = [name for name in names if not name.startswith("_")]
        raise UsageError(f"`{expr}`: {_one_line(error)}{_did_you_mean(error.name, names)}") from None
    except Exception as error:
        raise UsageError(f"`{expr}`: {type(error).__name__}: {_one_line(error)}") from None


# ---- what each word does ----


class _Asked:
    """One line of the magic, read: the word, the expression and its value, the flags."""

    def __init__(self, what: str, expr: str, target: Any, options: dict[str, Any]):
        self.what, self.expr, self.target, self.options = what, expr, target, options

    def module(self, others: str = "") -> nn.Module:
        """The target, which is to be a module; `others` names what else would have done."""
        if not isinstance(self.target, nn.Module):
            kind = type(self.target).__name__
            said = f"the class {self.target.__name__}" if isinstance(self.target, type) else f"of type {kind}"
            raise UsageError(f"%fusekit {self.what} takes a module{others}; `{self.expr}` is {said}")
        return self.target

    def no_flags(self, why: str = "") -> None:
        if self.options:
            flags = ", ".join(f"--{name}" for name in self.options)
            raise UsageError(f"%fusekit {self.what} takes no {flags}{why}")

    def plan(self) -> Plan:
        """The plan that the target is, or the one that is made of it."""
        if isinstance(self.target, Plan):
            self.no_flags(": this plan is made already")
            return self.target
        return fusekit.plan(self.module(" or a plan"), **self.options)


def _plan(asked: _Asked) -> Plan:
    asked.module()
    return asked.plan()


def _of_one_module(of: Callable[[nn.Module], Any]) -> Callable[[_Asked], Any]:
    def command(asked: _Asked) -> Any:
        asked.no_flags()
        if isinstance(asked.target, Site):
            return of(asked.target.module)
        return of(asked.module())

    return command


def _diff(asked: _Asked) -> Any:
    if isinstance(asked.target, Site):
        asked.no_flags(": this is one site")
        return asked.target.diff
    if isinstance(asked.target, Fused):
        asked.no_flags(": this is applied already")
        sites, plan = asked.target.sites, asked.target.plan
    else:
        plan = asked.plan()
        sites = (*plan.sites, *plan.applied)
    # Without a site the plan itself says in a sentence what stood in the way, and lists the refusals.
    return diffs_of(sites) if sites else plan


def _apply(asked: _Asked) -> Fused:
    return asked.plan().apply()


def _revert(asked: _Asked) -> Fused | None:
    if isinstance(asked.target, Fused):
        asked.no_flags(": this is one plan's; with flags it takes the model")
        asked.target.revert()
        return asked.target
    model = asked.module(" or what apply gave")
    before = _applied(model)
    fusekit.revert(model, **asked.options)
    number = before - _applied(model)
    print(f"{type(model).__name__}: {number} {'site' if number == 1 else 'sites'} reverted")
    return None


def _applied(model: nn.Module) -> int:
    return sum(len(applied_matches(module)) for module in model.modules())


def _verify(asked: _Asked) -> Any:
    if isinstance(asked.target, Fused):
        asked.no_flags(": this is applied already")
        return asked.target.plan.verify()
    return asked.plan().verify()


COMMANDS: dict[str, Callable[[_Asked], Any]] = {
    "plan": _plan,
    "diff": _diff,
    "apply": _apply,
    "revert": _revert,
    "verify": _verify,
    "trace": _of_one_module(lambda module: fusekit.trace(module)),
    "source": _of_one_module(lambda module: fusekit.source(module)),
    "aliasing": _of_one_module(lambda module: fusekit.aliasing(module)),
}


def _check_what(what: str) -> None:
    if what not in COMMANDS:
        there_are = f"there are {', '.join(COMMANDS)}; {EXPLAINED}"
        if not what:
            raise UsageError(f"say what to do: %fusekit plan model; {there_are}")
        raise UsageError(f"there is no %fusekit {what}{_did_you_mean(what, COMMANDS)}; {there_are}")


# ---- reading the line ----


def _split(line: str) -> tuple[str, list[tuple[str, str]]]:
    """The line without its flags, and the flags with their values.

    A flag is a word that starts with `--` outside of brackets and quotes, so that `WHAT EXPR` may
    be any Python, and flags may stand before, after or in the middle.
    """
    words: list[str] = []
    flags: list[tuple[str, str]] = []
    for word in _words(line):
        if flags and (flags[-1][1] == "" or flags[-1][1].endswith(",")) and not word.startswith("--"):
            name, value = flags.pop()
            flags.append((name, value + _unquoted(word)))
        elif word.startswith("--"):
            name, _, value = word.partition("=")
            flags.append((name, _unquoted(value)))
        else:
            words.append(word)
    for name, value in flags:
        if name not in FLAGS:
            there_are = f"there are {', '.join(FLAGS)}; {EXPLAINED}"
            raise UsageError(f"there is no flag {name}{_did_you_mean(name, FLAGS)}; {there_are}")
        if not value:
            raise UsageError(f"{name} needs a value: {name} {FLAGS[name]}")
    return " ".join(words).rstrip("; "), flags


def _words(line: str) -> list[str]:
    """`line` cut at white space outside of brackets and quotes; a comment ends it."""
    words = [""]
    quote = ""
    depth = 0
    escaped = False
    for letter in line:
        if quote:
            if letter == quote and not escaped:
                quote = ""
            escaped = letter == "\\" and not escaped
        elif letter in "\"'":
            quote = letter
        elif letter == "#":
            break
        elif letter in "([{":
            depth += 1
        elif letter in ")]}":
            depth -= 1
        elif letter.isspace() and depth <= 0:
            words.append("")
            continue
        words[-1] += letter
    return [word for word in words if word]


def _unquoted(text: str) -> str:
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "\"'" else text


def _listed(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _did_you_mean(name: str | None, names: Iterable[str]) -> str:
    close = difflib.get_close_matches(name or "", list(names), n=1)
    return f" (did you mean `{close[0]}`?)" if close else ""
