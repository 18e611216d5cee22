"""Which siblings are merged, in what role, and what is said of those left out."""

import copy
import functools
import inspect
import operator

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import fusekit as fk

told = operator.methodcaller("size")  # written in C: it has no text


def attend(q, k, v):
    return F.scaled_dot_product_attention(q, k, v)


class Attention(nn.Module):
    """Two heads of query, one of key and value, values narrower than keys, a bias on some."""

    def __init__(self):
        super().__init__()
        self.q = nn.Linear(8, 8)
        self.k = nn.Linear(8, 4, bias=False)
        self.v = nn.Linear(8, 3)
        self.gate = nn.Linear(8, 6, bias=False)
        self.other = nn.Linear(8, 6)
        self.norm = nn.RMSNorm(5)
        self.down = nn.Linear(8, 5)
        self.up = nn.Linear(5, 8)
        self.kv_down = nn.Linear(8, 9, bias=False)
        self.kv_up = nn.Linear(5, 7)
        self.rank = 5
        with torch.no_grad():
            self.norm.weight.normal_()


def heads(t, width):
    return t.unflatten(-1, (-1, width)).transpose(1, 2)


class Grouped(Attention):
    def forward(self, x):
        q, v, k = self.q(x), self.v(x), self.k(x)
        q, k, v = heads(q, 4), heads(k, 4), heads(v, 3)
        return attend(q, k.expand(-1, 2, -1, -1), v.expand(-1, 2, -1, -1))


class CrossKeys(Attention):
    def forward(self, x, context=None):
        context = x * 2 if context is None else context
        q, v, k = self.q(x), self.v(context), self.k(context)
        q, k, v = heads(q, 4), heads(k, 4), heads(v, 3)
        return attend(q, k.expand(-1, 2, -1, -1), v.expand(-1, 2, -1, -1))


class Gated(Attention):
    def forward(self, x):
        gate = self.gate(x)
        q, k, v = self.q(x), self.k(x), self.v(x)
        q, k, v = heads(q, 4), heads(k, 4), heads(v, 3)
        out = attend(q, k.expand(-1, 2, -1, -1), v.expand(-1, 2, -1, -1))
        return out.transpose(1, 2).flatten(2) * torch.sigmoid(gate)


class GatedAfter(Attention):
    def forward(self, x):
        q, k, v = self.q(x), self.k(x), self.v(x)
        q, k, v = heads(q, 4), heads(k, 4), heads(v, 3)
        out = attend(q, k.expand(-1, 2, -1, -1), v.expand(-1, 2, -1, -1))
        out = out.transpose(1, 2).flatten(2)
        told(x)
        return out * torch.sigmoid(self.gate(x)) * self.other(x)


class LatentQuery(Attention):
    def forward(self, x):
        if self.rank is None:
            q = self.q(x)
        else:
            q = self.up(self.norm(self.down(x)))
        latent, rope = self.kv_down(x).split([5, 4], dim=-1)
        k, v = self.kv_up(self.norm(latent)).split([4, 3], dim=-1)
        q, k, v = heads(q, 4), heads(k + rope, 4), heads(v, 3)
        return attend(q, k.expand(-1, 2, -1, -1), v.expand(-1, 2, -1, -1))


class LatentGated(LatentQuery):
    def forward(self, x):
        gate = self.gate(x)
        latent, rope = self.kv_down(x).split([5, 4], dim=-1)
        k, v = self.kv_up(self.norm(latent)).split([4, 3], dim=-1)
        q, k, v = heads(self.q(x), 4), heads(k + rope, 4), heads(v, 3)
        out = attend(q, k.expand(-1, 2, -1, -1), v.expand(-1, 2, -1, -1))
        return out.transpose(1, 2).flatten(2) * gate


class PackedKeys(Attention):
    def forward(self, x):
        k, v = self.kv_down(x).split([4, 5], dim=-1)
        q, k, v = heads(self.q(x), 4), heads(k, 4), heads(v, 5)
        return attend(q, k.expand(-1, 2, -1, -1), v.expand(-1, 2, -1, -1))


class Columns(Attention):
    def forward(self, x):
        return self.q(x), self.gate(x), self.other(x), self.down(x), self.kv_down(x)


@pytest.mark.parametrize(
    "cls, fusion, parts",
    [
        (Grouped, "qkv", ("q", "k", "v")),
        (CrossKeys, "kv", ("k", "v")),
        (Gated, "qkv", ("q", "k", "v", "gate")),
        (LatentQuery, "mla", ("down", "kv_down")),
        (LatentGated, "mla", ("q", "kv_down", "gate")),
        (PackedKeys, "columns", ("kv_down", "q")),
        (Columns, "columns", ("q", "gate", "other", "down", "kv_down")),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_role_and_rows_come_from_the_dataflow(cls, fusion, parts, dtype):
    module = cls().to(dtype)
    plan = fk.plan(module)
    (site,) = plan.sites
    assert (site.fusion, site.parts) == (fusion, parts), [no.message for no in plan.refusals]
    x = torch.randn(2, 3, 8, dtype=dtype)
    want, names = module(x), [*module.state_dict()]
    with plan.apply():
        torch.testing.assert_close(module(x), want)
        assert [*module.state_dict()] == names


def test_missing_bias_is_no_parameter_and_gets_no_gradient():
    module = Grouped()
    names = [name for name, _ in module.named_parameters()]
    fk.fuse(module)
    module(torch.randn(2, 3, 8)).sum().backward()
    assert [name for name, _ in module.named_parameters()] == names
    assert module.k.bias is None and module.q.bias.grad is not None


def test_both_ways_of_latent_attention_are_right_after_a_change():
    module, x = LatentQuery(), torch.randn(2, 3, 8)
    want = module(x)
    module.rank = None
    other = module(x)
    module.rank = 5
    fk.fuse(module)
    torch.testing.assert_close(module(x), want)
    module.rank = None
    torch.testing.assert_close(module(x), other)


def test_only_names_the_latent_merge():
    plan = fk.plan(LatentQuery(), only="mla")
    assert [site.fusion for site in plan.sites] == ["mla"]
    assert not fk.plan(LatentQuery(), exclude="mla").sites


# -- the most that is safe --------------------------------------------------------------------


def line_of(module, text):
    lines, first = inspect.getsourcelines(type(module).forward)
    return next(first + index for index, line in enumerate(lines) if text in line)


class OneEscapes(Attention):
    def project(self, x):
        return self.gate(x)

    def forward(self, x):
        q, k = self.q(x), self.k(x)
        return q, k, self.v(x), self.project(x)


class OneTwice(Attention):
    def forward(self, x):
        return self.q(x), self.k(x), self.v(x), self.v(x) * 2


class OneInALoop(Attention):
    def forward(self, x):
        q, k, v = self.q(x), self.k(x), 0
        for _ in range(2):
            v = v + self.v(x)
        return q, k, v


class TwoAndTwo(Attention):
    def forward(self, x):
        q, k, v = self.q(x), self.k(x), self.v(x)
        told(x)
        return q, k, v, self.gate(x), self.other(x)


class PrintsBetween(Attention):
    def forward(self, x):
        q, k, v = self.q(x), self.k(x), self.v(x)
        q, k, v = heads(q, 4), heads(k, 4), heads(v, 3)
        out = attend(q, k.expand(-1, 2, -1, -1), v.expand(-1, 2, -1, -1))
        print(end="")
        return out.transpose(1, 2).flatten(2) * torch.sigmoid(self.gate(x)) * self.other(x)


UNREAD = "input-may-be-written"


@pytest.mark.parametrize(
    "cls, sites, left, reason, text",
    [
        (GatedAfter, [("qkv", "q k v"), ("columns", "gate other")], "gate and other", UNREAD, "told(x)"),
        (OneEscapes, [("columns", "q k v")], "gate", "module-escapes", "self.project(x)"),
        (OneTwice, [("columns", "q k")], "v", "called-twice", "self.v(x)"),
        (OneInALoop, [("columns", "q k")], "v", "called-twice", "v + self.v(x)"),
        (TwoAndTwo, [("columns", "q k v"), ("columns", "gate other")], "gate and other", UNREAD, "told(x)"),
    ],
)
def test_the_most_that_is_safe_is_merged_and_the_rest_is_told_why(cls, sites, left, reason, text):
    module = cls()
    plan = fk.plan(module)
    found = [(site.fusion, " ".join(site.parts)) for site in plan.sites]
    assert found == sites, [no.message for no in plan.refusals]
    no = plan.refusals[0]
    assert (no.reason, no.line) == (reason, line_of(module, text)), no.message
    assert f"{left} left out: " in no.message
    assert no.fusion == "columns" and set(left.split(" and ")) < set(no.parts)
    x = torch.randn(2, 3, 8)
    want = module(x)
    with plan.apply():
        torch.testing.assert_close(module(x), want)


def test_what_is_called_behind_an_attention_is_merged_with_its_query():
    module, x = PrintsBetween(), torch.randn(2, 3, 8)
    want, plan = module(x), fk.plan(module)
    assert [(site.fusion, site.parts) for site in plan.sites] == [("qkv", ("q", "k", "v", "gate", "other"))]
    assert not plan.refusals
    with plan.apply():
        torch.testing.assert_close(module(x), want)


def test_message_of_a_part_called_twice_says_how():
    (no,) = fk.plan(OneTwice()).refusals
    assert "more than once with this input, at line " in no.message
    (no,) = fk.plan(OneInALoop()).refusals
    assert "in every round of a loop with one and the same input" in no.message


def test_part_called_again_with_another_input_keeps_that_call():
    class Again(Attention):
        def forward(self, x, y):
            return self.q(x), self.other(x), self.q(y)

    module, inputs = Again(), (torch.randn(2, 3, 8), torch.randn(2, 3, 8))
    want = module(*inputs)
    with fk.fuse(module) as fused:
        assert [site.parts for site in fused.sites] == [("q", "other")]
        assert "self.q(y)" in fk.source(module).text
        torch.testing.assert_close(module(*inputs), want)


class SelfOrCross(Attention):
    """Bros, GroupViT, Idefics: key and value are called once in each arm."""

    def __init__(self):
        super().__init__()
        self.key, self.value = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x, context=None):
        q = self.q(x).unflatten(-1, (-1, 4)).transpose(1, 2)
        is_cross = context is not None
        if is_cross:
            k, v = heads(self.key(context), 4), heads(self.value(context), 4)
        else:
            k = self.key(x).unflatten(-1, (-1, 4)).transpose(1, 2)
            v = self.value(x).unflatten(-1, (-1, 4)).transpose(1, 2)
        return attend(q, k, v)


def test_key_and_value_of_an_arm_are_merged_in_it_and_the_query_is_told_why():
    module, x, context = SelfOrCross(), torch.randn(2, 3, 8), torch.randn(2, 5, 8)
    plan = fk.plan(module)
    assert [(site.fusion, site.parts) for site in plan.sites] == [("kv", ("key", "value"))]
    (no,) = plan.refusals
    assert (no.fusion, no.reason) == ("qkv", "different-branches") and "is_cross says so" in no.message
    want = module(x), module(x, context)
    with plan.apply():
        torch.testing.assert_close((module(x), module(x, context)), want)


# -- one value by two names -------------------------------------------------------------------------


class Renamed(Attention):
    def forward(self, x):
        y = x
        return self.q(x), self.other(y)


class RenamedBetween(Attention):
    def forward(self, x):
        x = x * 2
        q = self.q(x)
        y = x
        z = y
        return q, self.other(z), self.gate(y)


class RenamedInAnArm(Attention):
    def forward(self, x):
        if self.rank:
            y = x
            q, other = self.q(y), self.other(x)
        return q, other


class NamedInALoop(Attention):
    def forward(self, x):
        for _ in range(2):
            y = x
            q, other = self.q(x), self.other(y)
            x = q
        return q, other


@pytest.mark.parametrize(
    "cls, name", [(Renamed, "x"), (RenamedBetween, "x"), (RenamedInAnArm, "y"), (NamedInALoop, "x")]
)
def test_another_name_for_good_is_the_same_value(cls, name):
    module, x = cls(), torch.randn(2, 3, 8)
    want = module(x)
    (site,) = fk.plan(module).sites
    assert site.diff.after.split("self.merged")[1].partition("(")[2].startswith(f"{name})")
    with fk.fuse(module):
        torch.testing.assert_close(module(x), want)


class Chosen(Attention):
    def forward(self, x, context=None):
        y = context if context is not None else x
        return self.q(x), self.other(y)


class Cast(Attention):
    def forward(self, x):
        y = x.to(self.q.weight.dtype)
        return self.q(x), self.other(y)


class StoredTwice(Attention):
    def forward(self, x, context=None):
        y = x
        if context is not None:
            y = context
        return self.q(x), self.other(y)


class StoredLater(Attention):
    def forward(self, x, context=None):
        y = x
        if context is not None:
            x = context
        return self.q(x), self.other(y)


class SometimesNamed(Attention):
    def forward(self, x):
        if self.rank == 5:
            y = x
        return self.q(x), self.other(y)


class NamedInTheRoundBefore(Attention):
    def forward(self, x):
        y = x
        for _ in range(self.rank - 4):
            q, other = self.q(x), self.other(y)
            x = q
        return q, other


class Captured(Attention):
    def forward(self, x):
        def change():
            nonlocal x
            x = x * 2

        y = x
        if self.rank != 5:
            change()
        return self.q(x), self.other(y)


class CaughtAs(Attention):
    def forward(self, x):
        y = x
        try:
            self.rank + 1
        except TypeError as y:
            pass
        return self.q(x), self.other(y)


class MatchedAs(Attention):
    def forward(self, x):
        y = x
        match self.rank:
            case 5:
                pass
            case y:
                pass
        return self.q(x), self.other(y)


class ImportedAs(Attention):
    def forward(self, x):
        y = x
        if self.rank != 5:
            import torch as y
        return self.q(x), self.other(y)


@pytest.mark.parametrize(
    "cls",
    [
        CaughtAs,
        MatchedAs,
        ImportedAs,
        Chosen,
        Cast,
        StoredTwice,
        StoredLater,
        SometimesNamed,
        NamedInTheRoundBefore,
        Captured,
    ],
)
def test_another_name_that_may_hold_another_value_is_refused(cls):
    module = cls()
    plan = fk.plan(module)
    assert not plan.sites
    (no,) = plan.refusals
    assert no.reason == "different-inputs", no.message
    assert "q reads x, self.other reads y: one value here, but not on every way" in no.message
    assert no.line == line_of(module, "self.other(")


def test_arguments_that_are_no_plain_name_are_refused():
    class Squeezed(Attention):
        def forward(self, x):
            return self.q(x.squeeze(1)), self.other(x.squeeze(1))

    class Attribute(Attention):
        def forward(self, x):
            self.rank = x
            return self.q(self.rank), self.other(self.rank)

    assert [no.reason for no in fk.plan(Attribute()).refusals] == ["different-inputs"]
    assert not fk.plan(Squeezed()).sites


# -- one module, one parameter, two calls -----------------------------------------------------------


class OneModule(Attention):
    def __init__(self):
        super().__init__()
        self.other = self.q

    def forward(self, x):
        return self.q(x), self.other(x)


class Holder(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = Renamed(), Renamed()
        self.embedding = nn.Embedding(8, 8)


def test_one_module_under_two_names_of_the_forward_is_tied():
    (no,) = fk.plan(OneModule()).refusals
    assert no.reason == "tied" and "self.q and self.other are one module" in no.message


def test_tied_modules_and_parameters_say_where():
    model = Holder()
    model.first.q = model.second.q
    messages = {no.name: no for no in fk.plan(model).refusals}
    assert {no.reason for no in messages.values()} == {"tied"}
    assert "q is one module in several places: first.q, second.q" in messages["first"].message

    model = Holder()
    model.first.q.weight = model.second.gate.weight = nn.Parameter(torch.randn(8, 8))
    (no,) = fk.plan(model).refusals
    assert no.name == "first"
    assert "tied: one parameter in several places: first.q.weight, second.gate.weight" in no.message

    model = Holder()
    model.first.q.weight = model.embedding.weight
    (no,) = fk.plan(model).refusals
    assert "shared with an embedding: first.q.weight, embedding.weight" in no.message


def test_conv1d_of_gpt2_is_a_linear_that_is_refused_for_its_layout():
    from transformers.pytorch_utils import Conv1D

    module = Renamed()
    module.q, module.other = Conv1D(8, 8), Conv1D(6, 8)
    (no,) = fk.plan(module).refusals
    assert no.reason == "layout" and "q is a Conv1D" in no.message and no.parts == ("q", "other")
    module.q = nn.Linear(8, 8)
    (no,) = fk.plan(module).refusals
    assert no.reason == "layout" and "other is a Conv1D" in no.message

    class Scaled(Conv1D):
        def forward(self, x):
            return 2 * super().forward(x)

    module.q, module.other = Scaled(8, 8), Scaled(6, 8)
    assert not fk.plan(module).sites


# -- parts that are no plain linears ----------------------------------------------------------------


class Wrapped(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base_layer = base

    def forward(self, x):
        return self.base_layer(x) * 2


class WritesItsInput(Wrapped):
    def forward(self, x):
        return self.base_layer(x.mul_(2))


class OneByOne(Attention):
    def forward(self, x):
        q = self.q(x)
        k = self.k(x)
        v = self.v(x)
        q, k, v = heads(q, 4), heads(k, 4), heads(v, 3)
        return attend(q, k.expand(-1, 2, -1, -1), v.expand(-1, 2, -1, -1))


@pytest.mark.parametrize(
    "one, wrapper, fusion, left",
    [
        ("q", Wrapped, "kv", ("k", "v")),
        ("v", Wrapped, "columns", ("q", "k")),
        ("k", Wrapped, "columns", ("q", "v")),
        ("q", WritesItsInput, "kv", ("k", "v")),
        ("k", WritesItsInput, "columns", ()),
    ],
)
def test_parts_beside_one_that_is_wrapped_are_merged_unless_it_writes_between_them(
    one, wrapper, fusion, left
):
    module, x = OneByOne(), torch.randn(2, 3, 8)
    setattr(module, one, wrapper(getattr(module, one)))
    plan = fk.plan(module)
    assert [(site.fusion, site.parts) for site in plan.sites] == ([(fusion, left)] if left else [])
    reasons = {no.reason for no in plan.refusals}
    assert reasons == {"adapter"} if wrapper is Wrapped else "different-inputs" in reasons
    want = module(x.clone())
    with plan.apply():
        torch.testing.assert_close(module(x.clone()), want)
        again = fk.plan(module)
        assert not again.sites and [site.parts for site in again.applied] == ([left] if left else [])


def test_fused_latent_attention_compiles_as_one_graph():
    torch._dynamo.reset()
    module, x = LatentQuery(), torch.randn(2, 3, 8)
    want = module(x)
    fk.fuse(module)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), want)
    module.rank = None
    torch.testing.assert_close(compiled(x), module(x))
    torch._dynamo.reset()


class FirstFitsTheLater(Attention):
    """q may go with k, v and other, gate only with q: the larger set is found though q comes first."""

    def forward(self, x):
        y = x
        if self.rank != 5:
            y = y * 2
        return self.q(x), self.gate(y), self.k(x), self.v(x)


def test_largest_is_found_whichever_comes_first():
    plan = fk.plan(FirstFitsTheLater())
    assert [site.parts for site in plan.sites] == [("q", "k", "v")]
    (no,) = plan.refusals
    assert no.reason == "different-inputs"
    assert "gate left out: q reads x, self.gate reads y: one value here, but not on every way" in no.message


def test_a_part_that_is_called_by_keyword_is_named():
    class ByKeyword(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k = nn.Linear(8, 6), nn.Linear(8, 6)

        def forward(self, x):
            return self.q(input=x) * self.k(x)

    plan = fk.plan(ByKeyword())
    (refusal,) = plan.refusals
    assert not plan.sites and (refusal.reason, refusal.parts) == ("module-escapes", ("q", "k"))
    assert "q is called as self.q(input=x)" in refusal.message and refusal.line


# -- the same parts in other arms, which the trace did not come by -------------------------------


class Arms(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.flag = nn.Linear(8, 8), nn.Linear(8, 8), True


class InEachArm(Arms):
    def forward(self, x, y=None):
        if y is None:
            q = self.q(x)
            k = self.k(x)
        else:
            q = self.q(y)
            k = self.k(y) * 2
        return q * 1, k * 1


class InAnotherOrder(Arms):
    def forward(self, x, y=None):
        if y is None:
            q = self.q(x)
            k = self.k(x)
        else:
            k = self.k(y)
            q = self.q(y)
        return q * 1, k * 1


class SometimesInTheFirst(Arms):
    def forward(self, x, y=None):
        if y is None:
            q = self.q(x)
            if self.flag:
                k = self.k(x)
            else:
                k = q
        else:
            q = self.q(y)
            k = self.k(y)
        return q * 1, k * 1


@pytest.mark.parametrize("cls", [InEachArm, InAnotherOrder, SometimesInTheFirst])
@pytest.mark.parametrize("hooked", [(), ("q",), ("q", "k")])
def test_each_arm_merges_for_itself_and_runs_its_parts_in_its_order(cls, hooked):
    unfused = cls()
    fused = copy.deepcopy(unfused)
    fk.fuse(fused)
    assert str(fk.plan(unfused).sites[0].diff).count("self.merged_q_k(") == 2
    called = {}
    for module in (unfused, fused):
        called[module] = []
        for name in hooked:  # put on after fusing: the parts run apart
            hook = functools.partial(lambda calls, name, *_: calls.append(name), called[module], name)
            getattr(module, name).register_forward_hook(hook)
    x, y = torch.randn(2, 8), torch.randn(2, 8)
    for inputs in ((x,), (x, y)):
        for wanted, found in zip(unfused(*inputs), fused(*inputs), strict=True):
            torch.testing.assert_close(found, wanted)
    assert called[fused] == called[unfused]
