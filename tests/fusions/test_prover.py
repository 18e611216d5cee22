"""What the prover lets move, and what it refuses: the code, and the line that decided."""

import copy
import importlib.util
import inspect
import operator

import pytest
import torch
import torch.nn as nn

import fusekit as fk


class Pair(nn.Module):
    """Two linears of one input, and a norm."""

    def __init__(self):
        super().__init__()
        self.q = nn.Linear(8, 8)
        self.k = nn.Linear(8, 6)
        self.norm = nn.RMSNorm(8)
        self.scale = 2
        with torch.no_grad():
            self.norm.weight.normal_()


opaque = operator.methodcaller("size")  # written in C: it has no text


def refusal(module):
    """The one refusal of a module that has no site."""
    plan = fk.plan(module)
    assert not [site for site in plan.sites if not site.name]
    (found,) = plan.refusals
    return found


def line_of(module, text):
    """The number of the line of the forward that holds `text`."""
    lines, first = inspect.getsourcelines(type(module).forward)
    return next(first + index for index, line in enumerate(lines) if text in line)


def assert_fused_equals_unfused(module, fusion="columns"):
    x = torch.randn(2, 3, 8)
    want = module(x)
    plan = fk.plan(module)
    assert [site.fusion for site in plan.sites] == [fusion], [r.message for r in plan.refusals]
    with plan.apply():
        assert "merged" in fk.source(module).text
        torch.testing.assert_close(module(x), want)
    assert torch.equal(torch.cat(module(x), -1), torch.cat(want, -1))


# -- refused -----------------------------------------------------------------------------------


class WritesBetween(Pair):
    def forward(self, x):
        q = self.q(x)
        x.mul_(2)
        return q, self.k(x)


class WritesThroughView(Pair):
    def forward(self, x):
        half = x[..., :4]
        q = self.q(x)
        half.add_(1)
        return q, self.k(x)


class SetsItem(Pair):
    def forward(self, x):
        q = self.q(x)
        x[..., 0] = 1
        return q, self.k(x)


class AddsInPlace(Pair):
    def forward(self, x):
        q = self.q(x)
        x += 1
        return q, self.k(x)


class WritesWithOut(Pair):
    def forward(self, x):
        q = self.q(x)
        torch.add(x, 1, out=x)
        return q, self.k(x)


class WritesWithFlag(Pair):
    def forward(self, x):
        q = self.q(x)
        nn.functional.relu(x, inplace=True)
        return q, self.k(x)


class WritesByModule(Pair):
    def __init__(self):
        super().__init__()
        self.act = nn.ReLU(inplace=True)

    def forward(self, x):
        q = self.q(x)
        self.act(x)
        return q, self.k(x)


class Rebinds(Pair):
    def forward(self, x, y=None):
        q = self.q(x)
        x = x if y is None else y
        return q, self.k(x)


class CallsHelper(Pair):
    def helper(self, q, x):
        return q.mul_(x.neg_())

    def forward(self, x):
        q = self.q(x)
        q = self.helper(q, x)
        return q, self.k(x)


class CallsWhatCannotBeRead(Pair):
    def forward(self, x):
        q = self.q(x)
        opaque(x)
        return q, self.k(x)


class InComprehension(Pair):
    def forward(self, x):
        (q,) = [self.q(x) for _ in range(1)]
        return q, self.k(x)


class InLambda(Pair):
    def forward(self, x):
        make = lambda: self.q(x)
        return make(), self.k(x)


class UnderNoGrad(Pair):
    def forward(self, x):
        with torch.no_grad():
            q = self.q(x)
        return q, self.k(x)


class UnderAutocast(Pair):
    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            q = self.q(x)
        return q, self.k(x)


class TurnsGradOff(Pair):
    def forward(self, x):
        q = self.q(x)
        torch.set_grad_enabled(False)
        k = self.k(x)
        torch.set_grad_enabled(True)
        return q, k


class CalledTwice(Pair):
    def forward(self, x):
        return self.q(x) + self.q(x), self.k(x)


class ByAnotherName(Pair):
    def forward(self, x):
        project = self.q
        return project(x), self.k(x)


@pytest.mark.parametrize(
    "cls, reason, text",
    [
        (WritesBetween, "input-written", "x.mul_(2)"),
        (WritesThroughView, "input-written", "half.add_(1)"),
        (SetsItem, "input-written", "x[..., 0] = 1"),
        (AddsInPlace, "input-written", "x += 1"),
        (WritesWithOut, "input-written", "out=x"),
        (WritesWithFlag, "input-written", "inplace=True"),
        (WritesByModule, "input-written", "self.act(x)"),
        (Rebinds, ("input-rebound", "different-inputs"), "x = x if"),
        (CallsHelper, "input-written", "self.helper(q, x)"),
        (CallsWhatCannotBeRead, "input-may-be-written", "opaque(x)"),
        (InComprehension, ("module-escapes", "different-branches"), "for _ in"),
        (InLambda, "module-escapes", "make()"),
        (UnderNoGrad, "different-context", "return q"),
        (UnderAutocast, "different-context", "return q"),
        (TurnsGradOff, "different-context", "k = self.k(x)"),
        (CalledTwice, "called-twice", "self.q(x) + self.q(x)"),
        (ByAnotherName, "module-escapes", "project(x)"),
    ],
)
def test_refused_with_the_reason_and_the_line(cls, reason, text):
    module = cls()
    found = refusal(module)
    assert found.reason in reason, found.message
    assert found.line == line_of(module, text), found.message


def test_different_values_are_no_site_and_no_refusal():
    class Shifted(Pair):
        def forward(self, x, pos):
            return self.q(x), self.k(x + pos)

    plan = fk.plan(Shifted())
    assert plan.sites == plan.refusals == ()


def test_both_arms_of_an_if_are_told_apart():
    class Arms(Pair):
        def forward(self, x, flag=True):
            if flag:
                q = self.q(x)
                k = self.k(x)
            else:
                k = self.k(x)
                x.mul_(2)
                q = self.q(x)
            return q, k

    module, x = Arms(), torch.randn(2, 8)
    want = module(x.clone()), module(x.clone(), False)
    with fk.fuse(module, only="columns"):
        torch.testing.assert_close((module(x.clone()), module(x.clone(), False)), want)


# -- spellings that fuse -------------------------------------------------------------------------


class OneLine(Pair):
    def forward(self, x): return self.q(x), self.k(x)  # fmt: skip


class Semicolons(Pair):
    def forward(self, x):
        s = self.scale; q = self.q(x) * s; k = self.k(x)  # noqa: E702  # fmt: skip
        return q, k


class OneLineIf(Pair):
    def forward(self, x):
        if self.scale: q = self.q(x); k = self.k(x)  # noqa: E701, E702  # fmt: skip
        return q, k


class Nested(Pair):
    def forward(self, x):
        if self.scale == 1:
            pass
        elif self.scale == 2:
            for _ in range(1):
                try:
                    q = self.q(x)
                    k = self.k(x)
                finally:
                    pass
        return q, k


class SeveralRounds(Pair):
    def __init__(self):
        super().__init__()
        self.k = nn.Linear(8, 8)

    def forward(self, x):
        for _ in range(3):
            q = self.q(x)
            k = self.k(x)
            x = q + k
        return q, k


class NormBetween(Pair):
    def forward(self, x):
        shape = x.shape[:-1]
        q = self.norm(self.q(x)).view(*shape, 2, 4).transpose(1, 2)
        width = self.scale * 3
        k = self.k(x)[..., :width]
        return q.flatten(-2).transpose(1, 2).reshape(*shape, 8), k


class StoresTheSameAgain(Pair):
    def forward(self, x):
        y = x
        q = self.q(x)
        x = y
        return q, self.k(x)


class WritesItsOwn(Pair):
    def helper(self, q):
        return q.mul_(2)

    def forward(self, x):
        q = self.q(x)
        q = self.helper(q)
        return q, self.k(x)


class Prints(Pair):
    def forward(self, x):
        q = self.q(x)
        print("between", q.shape)
        return q, self.k(x)


class CommentsAndStrings(Pair):
    def forward(self, x):
        """Keeps é and its docstring."""
        q = self.q(x)  # comment with ünicode
        k = self.k(
            x,
        )
        return (q, k)


class Holder(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Pair()
        self.inner_q = nn.Linear(8, 4)

    def forward(self, x):
        return self.inner.q(x), self.inner_q(x)


@pytest.mark.parametrize(
    "cls",
    [
        OneLine,
        Semicolons,
        OneLineIf,
        Nested,
        SeveralRounds,
        NormBetween,
        StoresTheSameAgain,
        WritesItsOwn,
        Prints,
        CommentsAndStrings,
        Holder,
    ],
)
def test_spelling_fuses_and_equals(cls):
    assert_fused_equals_unfused(cls())


def test_parts_in_a_container_whose_paths_spell_one_name_stay_apart():
    # inner.q and inner_q would both make a local called inner_q.
    module = Holder()
    (site,) = fk.plan(module).sites
    assert site.parts == ("inner.q", "inner_q")
    assert (
        len({name.strip() for name in str(site.diff).split("= self.merged")[0].split("+")[-1].split(",")})
        == 2
    )


def test_decorators_keep_their_effect():
    def doubled(function):
        def wrapper(self, x):
            return tuple(2 * y for y in function(self, x))

        return wrapper

    class Decorated(Pair):
        @doubled
        def forward(self, x):
            return self.q(x), self.k(x)

    assert_fused_equals_unfused(Decorated())


# -- the state of the instance ---------------------------------------------------------------------


class Plain(Pair):
    def forward(self, x):
        return self.q(x), self.k(x)


class Adapter(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base_layer = base
        self.delta = nn.Linear(base.in_features, base.out_features)

    def forward(self, x):
        return self.base_layer(x) + self.delta(x)


class Scaled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def hook(module):
    module.q.register_forward_hook(lambda *_: None)


def pre_hook(module):
    module.q.register_forward_pre_hook(lambda *_: None)


def backward_hook(module):
    module.q.register_full_backward_hook(lambda *_: None)


def tie_weight(module):
    module.k = nn.Linear(8, 8)
    module.k.weight = module.q.weight


def tie_module(module):
    module.again = module.q


def subclass(module):
    module.q = Scaled(8, 8)


def adapter(module):
    module.q = Adapter(module.q)


def parametrize(module):
    nn.utils.parametrizations.weight_norm(module.q)


def prune(module):
    import torch.nn.utils.prune as prune

    prune.l1_unstructured(module.q, "weight", 2)


def dtype(module):
    module.q.double()


def device(module):
    module.q.to("meta")


def own_forward(module):
    module.q.forward = lambda x: x


def forward_of_the_module(module):
    module.forward = lambda x: (x, x)


def integers(module):
    module.q.weight = nn.Parameter(torch.ones(8, 8, dtype=torch.int8), requires_grad=False)


def sparse(module):
    module.q.weight = nn.Parameter(torch.eye(8).to_sparse(), requires_grad=False)


def flat_buffer(module):
    flat = torch.randn(1000)
    module.q.weight.data = flat[:64].view(8, 8)


def offloaded(module):
    module.q._hf_hook = object()


@pytest.mark.parametrize(
    "change, reason",
    [
        (hook, "hooked"),
        (pre_hook, "hooked"),
        (backward_hook, "hooked"),
        (tie_weight, "tied"),
        (tie_module, "tied"),
        (subclass, "subclass"),
        (adapter, "adapter"),
        (parametrize, "parametrized"),
        (prune, "hooked"),
        (dtype, "dtype-mismatch"),
        (device, "device-mismatch"),
        (own_forward, "instance-forward"),
        (forward_of_the_module, "instance-forward"),
        (integers, "quantized"),
        (sparse, "quantized"),
        (flat_buffer, "tied"),
        (offloaded, "offloaded"),
    ],
)
def test_instance_is_refused(change, reason):
    module = Plain()
    assert [site.fusion for site in fk.plan(module).sites] == ["columns"]
    change(module)
    assert refusal(module).reason == reason


def test_quantised_class_is_refused_by_its_home():
    Quantised = type("Linear4bit", (nn.Linear,), {"__module__": "bitsandbytes.nn.modules"})
    module = Plain()
    module.q = Quantised(8, 8)
    found = refusal(module)
    assert found.reason == "quantized" and "Linear4bit" in found.message


def test_hook_on_a_norm_between_the_parts_is_refused():
    module = NormBetween()
    module.norm.register_forward_hook(lambda *_: None)
    assert refusal(module).reason == "input-may-be-written"


def test_submodule_between_the_parts_that_overrides_call_is_no_norm():
    class Counting(nn.RMSNorm):
        def __call__(self, x):
            return super().__call__(x) + 1

    module = NormBetween()
    module.norm = Counting(8)
    assert refusal(module).reason == "input-may-be-written"


def test_norm_between_the_parts_whose_call_does_more_than_its_forward_is_refused():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.eps = nn.Parameter(torch.rand(8) + 0.5), 1e-6

        def forward(self, x):
            h = x.to(torch.float32)
            h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps)
            return self.weight * h.to(x.dtype)

    class Telling(Own):
        def __call__(self, x):
            print("a call that the trace does not see")
            return super().__call__(x)

    module = NormBetween()
    module.norm = Own()
    assert ("", "columns") in {(site.name, site.fusion) for site in fk.plan(module).sites}
    module.norm = Telling()
    assert refusal(module).reason == "input-may-be-written"


class Cross(nn.Module):
    """Without a context all three read one value, q under another name than k and v."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x, context=None):
        source = x if context is None else context
        q, k, v = self.q(x), self.k(source), self.v(source)
        return nn.functional.scaled_dot_product_attention(q, k, v)


def test_those_that_read_it_by_one_name_merge_without_the_other():
    model = Cross()
    plan = fk.plan(model)
    assert [(site.fusion, site.parts) for site in plan.sites] == [("kv", ("k", "v"))]
    assert [(no.fusion, no.reason) for no in plan.refusals] == [("qkv", "different-inputs")]
    x, context = torch.randn(2, 5, 8), torch.randn(2, 3, 8)
    want = model(x), model(x, context)
    with plan.apply():
        torch.testing.assert_close((model(x), model(x, context)), want)


# -- an `if` between the parts, or around one of them ---------------------------------------------


class Settings(nn.Module):
    """Linears, norms and settings for forwards that branch; `absent` is what some instances lack."""

    def __init__(self):
        super().__init__()
        self.q = nn.Linear(8, 8)
        self.k = nn.Linear(8, 6, bias=False)
        self.v = nn.Linear(8, 8)
        self.norm = nn.RMSNorm(8)
        self.up = nn.Linear(8, 8)
        self.absent = None
        self.rank = 4
        self.flag = True
        self.kept = []
        with torch.no_grad():
            self.norm.weight.normal_()

    def plus(self, t):
        return t.add_(1)


class Latent(Settings):
    def forward(self, x):
        if self.rank is None:
            q = self.absent(x)
        else:
            q = self.up(self.norm(self.q(x)))
        q = q.view(q.shape[0], -1, 2, 4).transpose(1, 2)
        k = self.k(x)
        return q, k


class LatentOther(Latent):
    """The same, traced on its other way."""

    def __init__(self):
        super().__init__()
        self.absent, self.rank = self.q, None
        self.q = None


class AfterAnArm(Settings):
    def forward(self, x):
        q = self.q(x)
        if not self.flag:
            q = self.norm(q) * self.rank
        elif self.rank == 3:
            q = self.up(q).view(-1, 8).reshape(x.shape)
        return q, self.k(x)


class SeveralArms(Settings):
    def forward(self, x):
        if self.flag:
            q = self.q(x)
        else:
            q = None
        if self.rank > 2 and not self.kept is None:  # noqa: E714
            v = self.v(x)
        else:
            v = None
        k = self.k(x)
        return (k if q is None else q), (k if v is None else v), k


class RaisesInAnArm(Settings):
    def forward(self, x):
        q = self.q(x)
        if not self.flag:
            self.kept.append(x.mul_(2))
            raise ValueError("flag")
        return q, self.k(x)


class LastInAnArm(Settings):
    def forward(self, x):
        q = self.q(x)
        if self.flag:
            return q, self.k(x)
        x.mul_(2)
        return q, x


class NestedArms(Settings):
    def forward(self, x):
        if self.flag:
            if self.rank == 4:
                q = self.q(x)
            else:
                q = self.v(x)
        else:
            q = self.up(x)
        return q, self.k(x)


FLIPS = [{}, {"flag": False}, {"rank": None}, {"rank": 3}, {"rank": 3, "flag": False}, {"rank": 1}]


def outcome(module, x):
    """Outputs and the input afterwards, or the kind of the error."""
    torch.manual_seed(0)
    x = x.clone()
    try:
        found = module(x)
    except (AssertionError, TypeError, ValueError, UnboundLocalError, RuntimeError) as error:
        return type(error)
    return [*found, x]


def assert_same_whatever_is_set(module, flips=FLIPS):
    """Fused on one setting, the module must equal its twin on every other one."""
    twin = copy.deepcopy(module)
    x = torch.randn(2, 3, 8)
    fused = fk.fuse(module)
    assert fused.sites
    for flip in flips:
        for one in (module, twin):
            one.flag, one.rank = flip.get("flag", True), flip.get("rank", 4)
            one.kept.clear()
        for training in (True, False):
            want, got = (outcome(one.train(training), x) for one in (twin, module))
            torch.testing.assert_close(got, want) if isinstance(want, list) else None
            assert isinstance(want, list) or want is got, (flip, want, got)


@pytest.mark.parametrize(
    "cls, parts",
    [
        (Latent, ("q", "k")),
        (AfterAnArm, ("q", "k")),
        (SeveralArms, ("q", "v", "k")),
        (RaisesInAnArm, ("q", "k")),
        (LastInAnArm, ("q", "k")),
        (NestedArms, ("q", "k")),
    ],
)
def test_arms_that_leave_the_input_alone(cls, parts):
    module = cls()
    (site,) = fk.plan(module).sites
    assert (site.fusion, site.parts) == ("columns", parts)
    assert_same_whatever_is_set(module)


def test_submodule_of_the_arm_not_taken_that_is_missing_may_come_later():
    module = LatentOther()
    (site,) = fk.plan(module).sites
    assert site.parts == ("absent", "k")
    assert_same_whatever_is_set(module, [{"rank": None}])
    module.q = nn.Linear(8, 8)
    twin = copy.deepcopy(module)
    fk.revert(twin)
    module.rank = twin.rank = 4
    x = torch.randn(2, 3, 8)
    torch.testing.assert_close(module(x), twin(x))


def test_line_goes_before_the_if_and_the_call_in_the_arm_stays_for_parts_run_apart():
    (site,) = fk.plan(Latent()).sites
    after = site.diff.after
    assert after.index("q_, k_ = self.merged_q_k(x)") < after.index("if self.rank is None")
    assert "(self.q(x) if q_ is None else q_)" in after


def test_part_in_an_arm_that_is_hooked_or_gone_later_runs_only_where_it_stands():
    module = Latent()
    fk.fuse(module)
    x, called = torch.randn(2, 3, 8), []
    module.q.register_forward_hook(lambda *_: called.append(1))
    module(x)
    assert called == [1]
    module.rank, module.absent = None, nn.Linear(8, 8)
    want = module.absent(x).view(2, -1, 2, 4).transpose(1, 2), module.k(x)
    torch.testing.assert_close(module(x), want)
    assert called == [1]
    del module.q
    torch.testing.assert_close(module(x), want)


def test_part_of_an_arm_not_taken_gets_no_gradient():
    module = Latent()
    fk.fuse(module)
    module.rank, module.absent = None, nn.Linear(8, 8)
    sum(out.sum() for out in module(torch.randn(2, 3, 8))).backward()
    assert module.q.weight.grad is None and module.q.bias.grad is None
    assert module.k.weight.grad is not None and module.absent.weight.grad is not None


def arm(text, name):
    """A class whose forward has `text` as the arm that is not taken, between q and k."""
    return f"""
class {name}(Settings):
    def forward(self, x):
        y = x
        q = self.q(x)
        if not self.flag:
{text}
        return q, self.k(x)
"""


UNSAFE = [
    ("x.mul_(2)", "input-written"),
    ("x += 1", "input-written"),
    ("x[..., 0] = 1", "input-written"),
    ("y.zero_()", "input-written"),
    ("q = y.view(-1).zero_()", "input-written"),
    ("x = self.norm(q)", "input-rebound"),
    ("x = self.norm(x)", "input-rebound"),
    ("x, q = q, x", "input-rebound"),
    ("self = y", "input-rebound"),
    ("del x", "input-rebound"),
    ("q = (x := x + 1)", "input-rebound"),
    ("q = self.plus(x)", "input-written"),
    ("q = self.absent.call(x)", "input-may-be-written"),
    ("self.kept = x; self.plus(self.kept)", "input-written"),
    ("self.q.weight.data.zero_(); self.k.weight.data.zero_()", "input-written"),
    ("self.k = self.v", "input-written"),
    ("torch.add(x, 1, out=x)", "input-written"),
    ("torch.set_grad_enabled(False)", "different-context"),
    ("opaque(x)", "input-may-be-written"),
    ("return q, q", "different-branches"),
    ("for _ in range(2): x.add_(1)", "input-written"),
    ("while q.sum() < 0: q = q + x.neg_()", "input-written"),
    ("with torch.no_grad(): x.add_(1)", "input-written"),
    ("try: x.add_(1)\n            finally: pass", "input-written"),
    ("def late(): return x.add_(1)\n            q = late()", "input-written"),
    ("q = [x.add_(1) for _ in range(2)][0]", "input-written"),
    ("q = (lambda: x.add_(1))()", "input-written"),
    ("global late\n            late = x; late.neg_()", "input-may-be-written"),
    ("import torch as x", "input-rebound"),
    ("assert x.neg_().sum() < 0", "input-written"),
    ("q = self.kept\n        q = q.view(-1, 8)", "input-may-be-written"),
    ("q = f'{x.neg_()}'", "input-written"),
    ("q = x @ opaque(q)", "input-may-be-written"),
    ("q = await_(x)", "input-may-be-written"),
    ("if x.sum() > 0: q = x.neg_()", "input-written"),
    ("if self.kept: q = x.neg_()", "input-written"),
    ("if self.rank: x.add_(1)", "input-written"),
    ("if self.rank: x = q", "input-rebound"),
]

SAFE = [
    "self.flag = False",
    "self.kept.append(x)",
    "print(x.shape)",
    "while q.sum() < 0: q = q + 1",
    "global late\n            late = x",
    "assert q.sum() < 0",
    "q = q * len(f'{x.shape}')",
    "q = self.norm(self.kept)",
    "q = self.kept\n        q = q * 2",
    "q = x @ self.kept",
    "q = x.to(self.kept)",
    "q = x.view(*self.kept)",
    "if x.sum() > 0: q = x",
    "if self.kept: q = x",
    "q = self.plus(q)",
    "q += 1; q[..., 0] = 2",
]


@pytest.fixture(scope="module")
def arms(tmp_path_factory):
    """The classes of `UNSAFE` and `SAFE` by their texts."""
    path = tmp_path_factory.mktemp("arms") / "arms_not_taken.py"
    bodies = [*(body for body, _ in UNSAFE), *SAFE]
    text = "import torch\n" + "".join(
        arm(f"            {body}", f"Arm{index}") for index, body in enumerate(bodies)
    )
    path.write_text(text)
    spec = importlib.util.spec_from_file_location("arms_not_taken", path)
    module = importlib.util.module_from_spec(spec)
    module.Settings, module.opaque = Settings, opaque
    spec.loader.exec_module(module)
    return {body: getattr(module, f"Arm{index}") for index, body in enumerate(bodies)}


@pytest.mark.parametrize(("body", "reason"), UNSAFE, ids=[body for body, _ in UNSAFE])
def test_arm_not_taken_that_may_touch_the_input_is_refused(arms, body, reason):
    module = arms[body]()
    found = refusal(module)
    first = line_of(module, "if not self.flag:")
    assert found.reason == reason, found.message
    assert first < found.line <= first + body.count("\n") + 1, found.message


@pytest.mark.parametrize("body", SAFE)
def test_arm_not_taken_that_leaves_the_input_alone_fuses_and_equals_whatever_is_set(arms, body):
    module = arms[body]()
    (site,) = fk.plan(module).sites
    assert site.parts == ("q", "k")
    assert_same_whatever_is_set(module)


class ByAnArgument(Settings):
    def forward(self, x, flag=True):
        if flag:
            q = self.q(x)
        return self.k(x), q


class ByTheMode(Settings):
    def forward(self, x):
        if self.training:
            q = self.q(x)
        return self.k(x), q


class OneInEachArm(Settings):
    def forward(self, x):
        if self.flag:
            q = self.q(x)
        if self.rank:
            q = self.k(x)
        return q


class ReturnsBetween(Settings):
    def forward(self, x):
        q = self.q(x)
        if self.rank is None:
            return q, q
        return q, self.k(x)


class WritesInTheArmTaken(Settings):
    def forward(self, x):
        q = self.q(x)
        if self.flag:
            x.mul_(2)
        return q, self.k(x)


class NoGradInAnArm(Settings):
    def forward(self, x):
        if self.flag:
            with torch.no_grad():
                q = self.q(x)
        return self.k(x), q


class WithInAnArm(Settings):
    def forward(self, x):
        if self.flag:
            with torch.enable_grad():
                q = self.q(x)
        return self.k(x), q


class LoopInAnArm(Settings):
    def forward(self, x):
        if self.flag:
            for _ in range(2):
                q = self.q(x)
        return self.k(x), q


class RaisesFirst(Settings):
    """A fused one would ask for the width of x before it says that flag is wrong."""

    def forward(self, x):
        if not self.flag:
            raise ValueError("flag")
        elif self.rank:
            q = self.q(x)
        return self.k(x), q


class AsksATensor(Settings):
    def forward(self, x, mask=None):
        q = self.q(x)
        if mask:
            q = q * 2
        return q, self.k(x)


@pytest.mark.parametrize("mask", [None, True, torch.ones(1)])
def test_an_argument_may_be_asked_for_its_truth(mask):
    unfused = AsksATensor()
    fused = copy.deepcopy(unfused)
    fk.fuse(fused)
    assert [site.parts for site in fk.plan(fused).applied] == [("q", "k")]
    x = torch.randn(2, 8)
    for wanted, found in zip(unfused(x, mask), fused(x, mask), strict=True):
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize(
    "cls, reason, text",
    [
        (ByAnArgument, "different-branches", "q = self.q(x)"),
        (ByTheMode, "different-branches", "q = self.q(x)"),
        (OneInEachArm, "different-branches", "q = self.k(x)"),
        (ReturnsBetween, "different-branches", "return q, q"),
        (WritesInTheArmTaken, "input-written", "x.mul_(2)"),
        (NoGradInAnArm, "different-context", "return self.k"),
        (WithInAnArm, "different-context", "return self.k"),
        (LoopInAnArm, "called-twice", "q = self.q(x)"),
        (RaisesFirst, "different-branches", "raise ValueError"),
    ],
)
def test_branches_are_refused(cls, reason, text):
    module = cls()
    found = refusal(module)
    assert found.reason == reason, found.message
    assert found.line == line_of(module, text), found.message


class DoneByASetting(Pair):
    def forward(self, x):
        if self.scale == 2:
            q = self.q(x)
        return q, self.k(x)


def test_call_that_a_setting_decides_is_merged_and_stays_right():
    module, x = DoneByASetting(), torch.randn(2, 3, 8)
    assert_fused_equals_unfused(module)
    fk.fuse(module)
    module.scale = 3
    with pytest.raises(UnboundLocalError):
        module(x)


class Sly:
    """Has the methods of a tensor, and writes what it holds."""

    def __init__(self):
        self.held = None

    def view(self, *shape):
        self.held.zero_()
        return self.held


class OtherKindBefore(Settings):
    def forward(self, x):
        t = self.sly
        q = self.q(x)
        if self.flag:
            t = q
        t = t.view(-1, 8)
        return t, self.k(x)


class OtherKindBeforeTheParts(Settings):
    def forward(self, x):
        t = self.sly
        if self.flag:
            t = x * 2
        q = self.q(x)
        t = t.view(-1, 8)
        return q, self.k(x), t


class OtherKindInTheArmNotTaken(Settings):
    def forward(self, x):
        if self.flag:
            t = x * 2
        else:
            t = self.sly
        q = self.q(x)
        t = t.view(-1, 8)
        return q, self.k(x), t


class OtherKindOnOneLine(Settings):
    def forward(self, x):
        q = self.q(x)
        if not self.flag:
            q = self.norm(q); q = self.sly  # noqa: E702  # fmt: skip
        q = q.view(-1, 8)
        return q, self.k(x)


@pytest.mark.parametrize(
    "cls", [OtherKindBefore, OtherKindBeforeTheParts, OtherKindInTheArmNotTaken, OtherKindOnOneLine]
)
def test_name_that_holds_another_kind_of_thing_on_another_way_is_refused(cls):
    module = cls()
    module.sly = Sly()
    found = refusal(module)
    assert found.reason == "input-may-be-written", found.message
    x = module.sly.held = torch.randn(2, 3, 8)
    module.flag = False
    module(x)
    assert not x.any()  # it does write


class Remembers(Settings):
    """The tensor that it keeps in one call it writes in the next, where that may get the same one."""

    def __init__(self):
        super().__init__()
        self.last = None

    def forward(self, x):
        q = self.q(x)
        if self.last is not None:
            self.last.mul_(2)
        k = self.k(x)
        self.last = x
        return q, k


def test_what_an_earlier_call_has_left_on_the_module_may_be_the_input():
    module, x = Remembers(), torch.ones(2, 8)
    first, second = module(x), module(x)
    assert torch.equal(first[0], second[0]) and not torch.equal(first[1], second[1])  # q before, k after
    found = refusal(Remembers())
    assert found.reason in ("input-written", "input-may-be-written"), found.message
    assert found.line == line_of(module, "self.last.mul_(2)")


class SameKind(Settings):
    def forward(self, x, mask=None):
        if self.rank is None:
            shape, scale = (-1, 8), 2
        else:
            shape, scale = x.shape, None
        if mask is None:
            mask = x
        q = self.q(x).view(shape)
        q = q * (scale or 1) + mask
        return q, self.k(x)


def test_names_that_hold_sizes_numbers_and_tensors_on_every_way_are_passed():
    assert [site.parts for site in fk.plan(SameKind()).sites] == [("q", "k")]
