"""Small modules with the right verdict: how they are told, and how each is checked.

A file makes `cases = Cases()` and decorates its modules with `@cases.fuses("q k")` or
`@cases.refuses("input-written")`. `check_values` compares unfused and fused in all that a caller can see;
`check_verdict` asks whether what may be merged is, and what may not be is refused for a right reason;
`check_case` asks whether that verdict is right itself: it merges at the first call, whatever comes between.
"""

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn as nn

import fusekit as fk
from fusekit.fusions.refusal import REASONS

Inputs = Callable[[], tuple[Any, ...]]

NORMS = ("rms_norm", "gated_rms_norm")
OWN_ATTRIBUTES = frozenset(vars(nn.Module()))


class Pair(nn.Module):
    """Linears of one width, and one more behind them; a norm, a dropout, and room for state."""

    def __init__(self):
        super().__init__()
        self.q = nn.Linear(8, 8)
        self.k = nn.Linear(8, 8)
        self.v = nn.Linear(8, 8, bias=False)
        self.o = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.register_buffer("steps", torch.zeros(()))
        self.scale = 2.0
        self.flag = True
        self.absent = None
        self.kept = None
        self.calls = 0


def one() -> tuple[torch.Tensor]:
    return (torch.randn(2, 3, 8),)


def two() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(2, 3, 8), torch.randn(2, 3, 8)


def same() -> tuple[torch.Tensor, torch.Tensor]:
    """One tensor, passed twice."""
    x = torch.randn(2, 3, 8)
    return x, x


def view_of_other() -> tuple[torch.Tensor, torch.Tensor]:
    """A tensor, and a view of it of the same shape."""
    x = torch.randn(2, 3, 8)
    return x, x.view(2, 3, 8)


@dataclass(frozen=True)
class Case:
    """A module and the verdict on it.

    `build` makes the module, the same under one seed. Each of `inputs` makes the arguments of a call;
    together they take every way through the forward, and the verdict holds for all of them. `fused` are
    the sets of parts that must be merged, by their paths in the module, and nothing else may be; with
    `optional` it may also be refused. `reasons` are those of which one must be told: where nothing may
    be merged, or not all; none where nothing looks fusable. `calls` is how often a module is called with
    each of its inputs, keeping what it stores on itself. `shows` says that a merge that must be refused
    would give another result for one of the inputs.
    """

    build: Callable[[], nn.Module]
    inputs: tuple[Inputs, ...] = (one,)
    fused: frozenset[frozenset[str]] = frozenset()
    reasons: frozenset[str] = frozenset()
    calls: int = 2
    backward: bool = True
    optional: bool = False
    shows: bool = True

    def __str__(self) -> str:
        return getattr(self.build, "__name__", repr(self.build))

    def __post_init__(self) -> None:
        if not self.reasons <= REASONS.keys():
            raise ValueError(f"{self}: no reasons of a refusal: {sorted(self.reasons - REASONS.keys())}")

    def module(self) -> nn.Module:
        """A new one, every parameter random, with the same values each time."""
        torch.manual_seed(0)
        module = self.build()
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.normal_(std=0.3)
        return module


class Cases(list[Case]):
    """The cases of one file, in its order."""

    def fuses(self, *groups: str, but: tuple[str, ...] = (), **options: Any) -> Callable:
        """Each of `groups` is one merge, "q k v"; `but` are reasons of which one is told for what is left."""
        return self._adding(frozenset(frozenset(group.split()) for group in groups), but, options)

    def refuses(self, *reasons: str, **options: Any) -> Callable:
        """Nothing is merged, and one of `reasons` is told; without any, nothing looks fusable."""
        return self._adding(frozenset(), reasons, options)

    def may_fuse(self, *groups: str, but: tuple[str, ...] = (), **options: Any) -> Callable:
        """Each of `groups` may be merged: it is so, or one of the reasons `but` is told."""
        return self.fuses(*groups, but=but, optional=True, **options)

    def tests(self) -> tuple[Callable, Callable, Callable]:
        """What a file ends with: `test_case, test_values, test_verdict = cases.tests()`."""

        def test_case(case):
            check_case(case)

        def test_values(case):
            check_values(case)

        def test_verdict(case):
            check_verdict(case)

        each = pytest.mark.parametrize("case", self, ids=str)
        return each(test_case), each(test_values), each(test_verdict)

    def _adding(self, fused: frozenset, reasons: tuple[str, ...], options: dict) -> Callable:
        def add(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
            self.append(Case(build, fused=fused, reasons=frozenset(reasons), **options))
            return build

        return add


def check(case: Case) -> None:
    check_case(case)
    check_values(case)
    check_verdict(case)


def check_verdict(case: Case) -> None:
    """What may be merged is a site, nothing else is, and what may not be has a refusal with its reason."""
    plan = fk.plan(case.module())
    merged = {
        frozenset(f"{site.name}.{part}".lstrip(".") for part in site.parts)
        for site in plan.sites
        if len(site.parts) > 1
    }
    told = {refusal.reason: refusal.message for refusal in plan.refusals if refusal.fusion not in NORMS}
    if merged == case.fused and case.optional:
        return
    if merged != (frozenset() if case.optional else case.fused):
        raise AssertionError(f"{case}: merged {_texts(merged)}, right is {_texts(case.fused)}; told: {told}")
    if case.reasons and not case.reasons & told.keys():
        raise AssertionError(f"{case}: right is one of {sorted(case.reasons)}; told: {told}")


def _texts(groups: Any) -> list[str]:
    return sorted(" ".join(sorted(group)) for group in groups)


def check_case(case: Case) -> None:
    """A merge at the first call, whatever comes between, changes nothing where it is said to be right.

    And it changes something where it is said to be wrong, if that shows with one of the inputs.
    """
    want, got = case.module(), case.module()
    of_pairs = frozenset(
        name for name, _ in got.named_modules() if name.rpartition(".")[2] in ("q", "k", "v")
    )
    for group in case.fused or [of_pairs]:
        merge_naively(got, group)
    try:
        _compare(case, got, want, "merged at the first call")
    except AssertionError:
        if case.fused:
            raise
        return
    if not case.fused and case.shows:
        raise AssertionError(f"{case}: merged at the first call, it does the same: why refuse?")


def merge_naively(module: nn.Module, group: frozenset[str]) -> None:
    """The first call of one of `group` computes the others too, and their next calls give what it got."""
    parts = [part for name, part in module.named_modules() if name in group]
    waiting: dict[nn.Module, torch.Tensor] = {}

    def forward(part: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if part not in waiting:
            waiting.clear()
            waiting.update((other, type(other).forward(other, x)) for other in parts)
        return waiting.pop(part)

    for part in parts:
        part.forward = functools.partial(forward, part)


def check_values(case: Case) -> None:
    """Fused, reverted, and planned anew, a module does all that an unfused one does."""
    want, got = case.module(), case.module()
    before = attributes(got)
    plan = fk.plan(got)
    assert_same(attributes(got), before, f"{case}: attributes after planning")
    fused = plan.apply()
    _compare(case, got, want, "fused")
    fused.revert()
    _compare(case, got, want, "reverted")
    fused = fk.plan(got).apply()
    _compare(case, got, want, "planned after calls")
    fused.revert()
    assert_same(list(vars(got)), list(vars(want)), f"{case}: names of attributes, reverted")


def _compare(case: Case, got: nn.Module, want: nn.Module, state: str) -> None:
    for number, inputs in enumerate(case.inputs):
        torch.manual_seed(number + 1)
        given = inputs()
        for grad in (False, True) if case.backward else (False,):
            for call in range(case.calls):
                where = f"{case}, {state}, input {number}, {'with' if grad else 'no'} grad, call {call}"
                mine, his = outcome(got, given, grad), outcome(want, given, grad)
                for key in his:
                    assert_same(mine[key], his[key], f"{where}: {key}")


def outcome(module: nn.Module, given: tuple[Any, ...], grad: bool) -> dict[str, Any]:
    """All that a caller can see of one call: results, its own tensors, gradients, the module's state."""
    torch.manual_seed(0)
    module.train(grad)
    args = copy.deepcopy(given)
    leaves: list[torch.Tensor] = []
    if grad:
        made: dict[int, torch.Tensor] = {}
        for arg in args:
            if isinstance(arg, torch.Tensor) and arg.is_floating_point() and id(arg) not in made:
                leaves.append(arg.clone().requires_grad_())
                made[id(arg)] = leaves[-1] * 1  # what is written in place may be no leaf
        args = tuple(made.get(id(arg), arg) for arg in args)
    seen: dict[str, Any] = {}
    result = failure = None
    with torch.set_grad_enabled(grad):
        try:
            result = module(*args)
        except Exception as error:
            failure = type(error)
    seen["failure"] = failure
    seen["result"] = snapshot(result)
    seen["the caller's tensors"] = snapshot(args)
    seen["shared storages"] = sharing((result, args))
    seen["strides"] = [(one.stride(), one.storage_offset()) for one in tensors(result)]
    seen["random state"] = torch.get_rng_state()
    seen["grad mode"] = torch.is_grad_enabled()
    if grad:
        seen["needs grad"] = [one.requires_grad for one in tensors(result)]
        ends = [one for one in tensors(result) if one.requires_grad]
        try:
            if ends:
                sum(one.square().sum() for one in ends).backward()
            seen["failure of backward"] = None
        except RuntimeError as error:
            seen["failure of backward"] = type(error)
        else:
            seen["gradients of inputs"] = [leaf.grad for leaf in leaves]
            seen["gradients of parameters"] = {name: one.grad for name, one in module.named_parameters()}
        module.zero_grad()
    seen["state dict"] = snapshot(module.state_dict())
    seen["attributes"] = attributes(module)
    return seen


def attributes(module: nn.Module) -> dict[str, Any]:
    """What a module and those in it keep beside parameters, buffers and modules, but for merged storages."""
    return {
        f"{name}.{key}": snapshot(value)
        for name, part in module.named_modules()
        for key, value in vars(part).items()
        if key not in OWN_ATTRIBUTES and not key.startswith("merged_") and key != "forward"
    }


def snapshot(value: Any) -> Any:
    """`value` with its tensors as they are now; of an object of another kind, its type."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: snapshot(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [type(value), *map(snapshot, value)]
    if value is None or isinstance(
        value, (bool, int, float, str, bytes, range, torch.dtype, torch.Size, type)
    ):
        return value
    return type(value)


def tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        return [one for item in value.values() for one in tensors(item)]
    if isinstance(value, (tuple, list)):
        return [one for item in value for one in tensors(item)]
    return []


def sharing(value: Any) -> list[int]:
    """For each tensor in `value`, the place of the first one with its storage."""
    storages = [one.untyped_storage().data_ptr() for one in tensors(value)]
    return [storages.index(storage) for storage in storages]


def assert_same(got: Any, want: Any, where: str) -> None:
    if type(got) is not type(want):
        raise AssertionError(f"{where}: {got!r}, right is {want!r}")
    if isinstance(want, torch.Tensor):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4, msg=lambda text: f"{where}: {text}")
    elif isinstance(want, dict):
        assert_same(list(got), list(want), f"{where}: names")
        for key in want:
            assert_same(got[key], want[key], f"{where}: {key}")
    elif isinstance(want, (tuple, list)) and not isinstance(want, torch.Size):
        assert_same(len(got), len(want), f"{where}: length")
        for index, (mine, his) in enumerate(zip(got, want, strict=True)):
            assert_same(mine, his, f"{where}: [{index}]")
    elif got != want:
        raise AssertionError(f"{where}: {got!r}, right is {want!r}")
