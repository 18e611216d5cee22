"""Activations by name, and the name of an activation.

The names are the keys of Transformers' ACT2CLS (5.24). Two activations of one formula may differ in
bits by the order of their operations, so the order here is part of what each name means. Transformers
is never imported: its classes can only be met where it has been already.
"""

import difflib
import functools
import math
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Activation = Callable[[Tensor], Tensor]


def activation_name(act: object) -> str | None:
    """The name in `ACTIVATIONS` that `act_and_mul` may use for `act`, or None.

    A name is given only where `act` is exactly a known activation: that class and no subclass, that
    configuration (`nn.GELU(approximate="tanh")`, bounds, slopes), no hook, no forward of its own, not
    compiled, and not in place (in place it would also write the gate). Functions count as well:
    `F.silu`, `torch.tanh`, `functools.partial(F.gelu, approximate="tanh")`. `nn.SiLU()` is "silu",
    not "swish". A string that is a name is its own name.
    """
    if isinstance(act, str):
        return act if act in ACTIVATIONS else None
    if isinstance(act, nn.Module):
        return _module_name(act) if _is_untouched(act) else None
    if type(act) is functools.partial:
        plain = act.func is F.gelu and not act.args and act.keywords.keys() == {"approximate"}
        return GELU_BY_APPROXIMATION.get(act.keywords["approximate"]) if plain else None
    return next((name for function, name in FUNCTIONS if function is act), None)


def named_activation(name: str) -> Activation:
    """The function called `name`. Raises `ValueError` for a name without one, saying what to pass."""
    if name in ACTIVATIONS:
        return ACTIVATIONS[name]
    if name in PARAMETRIC:
        raise ValueError(f"act_and_mul: {name!r} has parameters, which no name carries; pass the module")
    near = difflib.get_close_matches(name, ACTIVATIONS, n=4)
    hint = f"did you mean {' or '.join(map(repr, near))}?" if near else f"known are {', '.join(ACTIVATIONS)}"
    raise ValueError(f"act_and_mul: no activation is called {name!r}; {hint}")


def _gelu_clipped(x: Tensor) -> Tensor:
    return F.gelu(x).clamp(-10, 10)


def _gelu_exact(x: Tensor) -> Tensor:
    normal_cdf_twice = 1.0 + torch.erf(x / math.sqrt(2.0))
    return x * 0.5 * normal_cdf_twice


def _gelu_cubic(x: Tensor) -> Tensor:
    cubic = x + 0.044715 * x.pow(3)
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * cubic))


def _gelu_factored(x: Tensor) -> Tensor:
    # sqrt(2 / pi) to ten digits and x taken out of the cubic: other bits than `_gelu_cubic`.
    even = 1.0 + 0.044715 * x * x
    return 0.5 * x * (1.0 + torch.tanh(x * 0.7978845608 * even))


def _gelu_sigmoid(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _identity(x: Tensor) -> Tensor:
    return x


def _laplace(x: Tensor) -> Tensor:
    # The distribution function of a normal with this mean and deviation (MEGA, arXiv:2209.10655).
    mean, deviation = 0.707107, 0.282095
    return 0.5 * (1.0 + torch.erf((x - mean) / (deviation * math.sqrt(2.0))))


def _relu_squared(x: Tensor) -> Tensor:
    return F.relu(x).square()


def _sqrt_softplus(x: Tensor) -> Tensor:
    return F.softplus(x).sqrt()


ACTIVATIONS: Mapping[str, Activation] = {
    "gelu": F.gelu,
    "gelu_10": _gelu_clipped,
    "gelu_fast": _gelu_factored,
    "gelu_new": _gelu_cubic,
    "gelu_python": _gelu_exact,
    "gelu_pytorch_tanh": _gelu_tanh,
    "gelu_python_tanh": _gelu_cubic,
    "gelu_accurate": _gelu_cubic,
    "hardswish": F.hardswish,
    "laplace": _laplace,
    "leaky_relu": F.leaky_relu,
    "linear": _identity,
    "mish": F.mish,
    "quick_gelu": _gelu_sigmoid,
    "relu": F.relu,
    "relu2": _relu_squared,
    "relu6": F.relu6,
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "sqrtsoftplus": _sqrt_softplus,
    "swish": F.silu,
    "tanh": torch.tanh,
}
"""Name -> function of one tensor, out of place, equal bit for bit to Transformers' module of that name."""

PARAMETRIC = ("prelu", "xielu")

GELU_BY_APPROXIMATION = {"none": "gelu", "tanh": "gelu_pytorch_tanh"}

# A list, not a dict: what is asked about need not be hashable.
FUNCTIONS: tuple[tuple[object, str], ...] = (
    (F.gelu, "gelu"),
    (F.hardswish, "hardswish"),
    (F.leaky_relu, "leaky_relu"),
    (F.mish, "mish"),
    (F.relu, "relu"),
    (torch.relu, "relu"),
    (F.relu6, "relu6"),
    (F.sigmoid, "sigmoid"),
    (torch.sigmoid, "sigmoid"),
    (F.silu, "silu"),
    (F.tanh, "tanh"),
    (torch.tanh, "tanh"),
)


def _is_untouched(module: nn.Module) -> bool:
    """Whether a call of `module` is a call of its class's own forward and nothing else."""
    hooks = (
        module._forward_hooks,
        module._forward_pre_hooks,
        module._backward_hooks,
        module._backward_pre_hooks,
    )
    if any(hooks) or "forward" in vars(module) or module._compiled_call_impl is not None:
        return False
    if isinstance(module, nn.ReLU6):  # inherits the forward of Hardtanh, one file with it
        return _is_home_made(nn.Hardtanh)
    return _is_home_made(type(module))


def _is_home_made(cls: type) -> bool:
    # A forward put on the class later (a kernel swapped in for the whole process) lives elsewhere.
    return getattr(vars(cls).get("forward"), "__module__", None) == cls.__module__


def _module_name(module: nn.Module) -> str | None:
    cls = type(module)
    if cls in TORCH_MODULES:
        return TORCH_MODULES[cls](module)
    # By identity with what the module holds under that name: a class may be called anything.
    transformers = sys.modules.get("transformers.activations")
    if transformers is None or cls is not getattr(transformers, cls.__name__, None):
        return None
    decide = TRANSFORMERS_MODULES.get(cls.__name__)
    return decide(module) if decide else None


def _always(name: str) -> Callable[[Any], str | None]:
    return lambda module: name


def _out_of_place(name: str) -> Callable[[Any], str | None]:
    return lambda module: None if module.inplace else name


def _leaky_relu(module: Any) -> str | None:
    return None if module.inplace or module.negative_slope != 0.01 else "leaky_relu"


def _relu6(module: Any) -> str | None:
    return None if module.inplace or (module.min_val, module.max_val) != (0.0, 6.0) else "relu6"


def _clipped(module: Any) -> str | None:
    return "gelu_10" if (module.min, module.max) == (-10, 10) else None


def _accurate(module: Any) -> str | None:
    return "gelu_accurate" if module.precomputed_constant == math.sqrt(2 / math.pi) else None


def _holding(own_method: str, own_name: str) -> Callable[[Any], str | None]:
    """For a module that calls what it holds as `act`: a function, or a method of its own."""

    def decide(module: Any) -> str | None:
        function = getattr(module.act, "__func__", None)
        if function is not None:
            mine = module.act.__self__ is module and function is vars(type(module)).get(own_method)
            return own_name if mine else None
        return activation_name(module.act)

    return decide


TORCH_MODULES: Mapping[type, Callable[[Any], str | None]] = {
    nn.GELU: lambda module: GELU_BY_APPROXIMATION.get(module.approximate),
    nn.Hardswish: _out_of_place("hardswish"),
    nn.Identity: _always("linear"),
    nn.LeakyReLU: _leaky_relu,
    nn.Mish: _out_of_place("mish"),
    nn.ReLU: _out_of_place("relu"),
    nn.ReLU6: _relu6,
    nn.SiLU: _out_of_place("silu"),
    nn.Sigmoid: _always("sigmoid"),
    nn.Tanh: _always("tanh"),
}

TRANSFORMERS_MODULES: Mapping[str, Callable[[Any], str | None]] = {
    "AccurateGELUActivation": _accurate,
    "ClippedGELUActivation": _clipped,
    "FastGELUActivation": _always("gelu_fast"),
    "GELUActivation": _holding("_gelu_python", "gelu_python"),
    "GELUTanh": _holding("_gelu_tanh_python", "gelu_python_tanh"),
    "LaplaceActivation": _always("laplace"),
    "LinearActivation": _always("linear"),
    "MishActivation": _holding("_mish_python", "mish"),
    "NewGELUActivation": _always("gelu_new"),
    "QuickGELUActivation": _always("quick_gelu"),
    "ReLUSquaredActivation": _always("relu2"),
    "SiLUActivation": _always("silu"),
    "SqrtSoftplusActivation": _always("sqrtsoftplus"),
}
