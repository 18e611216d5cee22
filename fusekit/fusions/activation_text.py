"""How a rewrite names the activation that a forward calls."""

import ast
import types
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from fusekit.forward.reads import attribute_chain, resolve
from fusekit.fusions.match import Refused
from fusekit.fusions.reading import may_be_activation, reads_plainly
from fusekit.fusions.view import ForwardView
from fusekit.kernels import activation_name

# Methods of a tensor that are activations, by their names among `kernels.ACTIVATIONS`.
METHODS = frozenset({"relu", "sigmoid", "tanh"})
GELUS = {"none": "gelu", "tanh": "gelu_pytorch_tanh"}


def activation_text(view: ForwardView, act: fx.Node, value: fx.Node) -> tuple[str, frozenset[str]]:
    """(what `act_and_mul` is given for `act`, the submodules that must be known activations for that).

    The text is the callee itself, evaluated later than before, or the name of an activation in
    quotes. `value` is what it is applied to. Raises `Refused` where it is no call of a known one with
    `value` and nothing else.
    """
    call = view.expression_at(act)
    line = call.lineno if call is not None else view.source.line
    if not isinstance(call, ast.Call):
        raise Refused("module-escapes", f"{act.name} is no call in the forward itself", line)
    text = " ".join(view.text(call.func).split())
    if act.op == "call_module":
        path = str(act.target)
        if not may_be_activation(view.submodule(path)):
            kind = type(view.submodule(path)).__name__
            raise Refused("not-this-function", f"{text} is a {kind}, which is no known activation", line)
        if view.call_of(act) is None:
            why = f"{path} is called as {view.text(call)}, not by a plain self.name(...)"
            raise Refused("module-escapes", why, line)
        _check_one_argument(view, call)
        return view.text(call.func), frozenset({path})
    if _is_method(view, call, act, value):
        return f'"{act.target}"', frozenset()
    function = _function(view, call.func, line)
    name = activation_name(function)
    # `F.tanh(x)` calls `x.tanh()`: the trace has the method.
    is_it = name is not None and name in (activation_name(act.target), act.target)
    if not is_it or not act.meta.get("direct"):
        raise Refused("not-this-function", f"{text} is no activation that act_and_mul knows", line)
    if function is F.gelu and [keyword.arg for keyword in call.keywords] == ["approximate"]:
        how = call.keywords[0].value
        if len(call.args) == 1 and isinstance(how, ast.Constant) and how.value in GELUS:
            return f'"{GELUS[how.value]}"', frozenset()
    _check_one_argument(view, call)
    return view.text(call.func), frozenset()


def _check_one_argument(view: ForwardView, call: ast.Call) -> None:
    if len(call.args) != 1 or call.keywords or isinstance(call.args[0], ast.Starred):
        why = f"{view.text(call)} is not called with one value and nothing else, as act_and_mul does"
        raise Refused("not-this-function", why, call.lineno)


def _is_method(view: ForwardView, call: ast.Call, act: fx.Node, value: fx.Node) -> bool:
    """Whether the call is `value.sigmoid()`, of the tensor itself."""
    if act.op != "call_method" or act.target not in METHODS or not act.meta.get("direct"):
        return False
    if call.args or call.keywords or not isinstance(call.func, ast.Attribute) or call.func.attr != act.target:
        return False
    receiver = call.func.value
    if isinstance(receiver, ast.Name):
        held = {(binding.name, binding.node) for binding in view.trace.bindings}
        return (receiver.id, value.name) in held
    return view.expression(value) is receiver


def _function(view: ForwardView, callee: ast.expr, line: int) -> Any:
    """What a callee is, where reading it a little earlier or later gives the same and runs no code."""
    chain = attribute_chain(callee, view.source.self_name)
    if chain and reads_plainly(view.module, chain):
        value = resolve(view.module, chain)
        if isinstance(value, (types.FunctionType, types.BuiltinFunctionType)):
            return value  # anything else (a partial, an object) may be another thing on a like instance
        if not isinstance(value, torch.Tensor):
            kind = type(value).__name__
            why = f"{view.text(callee)} is a {kind}, and only plain functions and modules are known"
            raise Refused("not-this-function", why, line)
    elif not chain:
        names = []
        base = callee
        while isinstance(base, ast.Attribute):
            names.append(base.attr)
            base = base.value
        if isinstance(base, ast.Name) and not view.stores(base.id):
            names_of_module: dict[str, Any] = view.source.function.__globals__  # type: ignore[attr-defined]
            value = names_of_module.get(base.id)
            while names and isinstance(value, types.ModuleType):
                value = vars(value).get(names.pop())
            if not names and value is not None:
                return value
    why = (
        f"{view.text(callee)} is a local name or belongs to an object; call the activation as a function, "
        "F.silu(...), or as an attribute of self"
    )
    raise Refused("not-this-function", why, line)
