"""What the operator of a node writes and whether its result shares storage."""

from typing import Any

from torch import fx

from fusekit.forward.operators import SPELLINGS, Effect, operator_effect

# Operators that only change the dtype of a tensor, by `operator_name`.
CASTS = frozenset({"to", "type_as"})


def node_effect(node: fx.Node) -> Effect | None:
    """The effect of a node that calls a torch operator, None for what has no schema.

    Flags that make a call write its argument (`inplace=True`, `out=`) count.
    """
    name = operator_name(node)
    if name is None:
        return None
    out = "out" in node.kwargs
    effect = operator_effect(name, out)
    if effect is None:
        # No schema to ask: a method that is named like one that writes does (`map_`, `apply_`).
        by_name = node.op == "call_method" and name.endswith("_") and not name.endswith("__")
        return Effect(True, "may be a view") if by_name else None
    if node.meta.get("written") or _asks_for_inplace(node):
        return Effect(True, effect.returns)
    return effect


def operator_name(node: fx.Node) -> str | None:
    """The name in the `aten` namespace of what a node calls, None for leaves and foreign functions."""
    if node.op == "call_method":
        name = str(node.target)
    elif node.op == "call_function":
        target: Any = node.target
        if target is getattr:
            name = str(node.args[1])
        elif target is setattr:
            name = f"set_{node.args[1]}"
        elif getattr(target, "__module__", None) in TORCH_MODULES:
            name = target.__name__
        else:
            return None
    else:
        return None
    if name in ("getitem", "setitem"):
        return {"getitem": "slice", "setitem": "copy_"}[name]
    return SPELLINGS.get(name, name)


TORCH_MODULES = {
    "_operator",
    "torch",
    "torch.nn.functional",
    "torch._C._nn",
    "torch._tensor",
    "torch.functional",
    None,
}


def _asks_for_inplace(node: fx.Node) -> bool:
    if node.kwargs.get("inplace") not in (None, False):
        return True
    # Functions of torch.nn.functional take the flag by position too.
    return getattr(node.target, "__module__", None) == "torch.nn.functional" and any(
        argument is True for argument in node.args[1:]
    )
