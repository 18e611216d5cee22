"""Roles under tensor parallelism, found in the dataflow of small forwards."""

import operator

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from transformers.pytorch_utils import Conv1D

import fusekit as fk
from fusekit import display
from fusekit.model import shares
from fusekit.model.parallel import parallel_roles, roles_around
from fusekit.model.shares import indexed, reshaped

HEADS, WIDTH = 4, 3
SIZE = HEADS * WIDTH


class RMSNorm(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size))

    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class Careful(nn.Module):
    """An elementwise submodule that no trace gets through."""

    def forward(self, x):
        return x if bool((x > 0).all()) else -x


class Both(nn.Module):
    """A submodule of several inputs and results."""

    def forward(self, x, *, by):
        return {"scaled": x * by["factor"], "plain": x}


class Net(nn.Module):
    """Linears of equal sizes, to be given a forward; their names say nothing."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(SIZE, SIZE) for _ in range(4))
        self.packed = nn.Linear(SIZE, 2 * SIZE)
        self.one = nn.Linear(SIZE, WIDTH)  # a single head
        self.scalar = nn.Linear(SIZE, 1)
        self.head = nn.Linear(WIDTH, WIDTH)
        self.turned = Conv1D(SIZE, SIZE)
        self.norm, self.layer_norm = RMSNorm(SIZE), nn.LayerNorm(SIZE)
        self.head_norm = RMSNorm(WIDTH)
        self.act, self.careful, self.both = nn.SiLU(), Careful(), Both()
        self.soft, self.soft_over_length = nn.Softmax(-1), nn.Softmax(1)
        self.end = nn.Sequential(nn.Dropout(0.1), nn.Linear(SIZE, SIZE))
        self.scale = nn.Parameter(torch.randn(SIZE))
        self.buffer = nn.Buffer(torch.zeros(2, 7, SIZE))


def heads(x):
    return x.view(*x.shape[:-1], -1, WIDTH).transpose(1, 2)


def joined(x):
    return x.transpose(1, 2).reshape(x.shape[0], x.shape[2], -1)


def attend(q, k, v):
    return joined(F.scaled_dot_product_attention(heads(q), heads(k), heads(v)))


def half_turned(x):
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def roles_of(forward, *inputs):
    module = type("Net", (Net,), {"forward": forward})()
    found = fk.trace(module, *(inputs or (torch.empty(2, 7, SIZE),)))
    assert found.complete, found.stopped
    return parallel_roles(found, module)


def roles(**columns_rows_and_whole):
    letters = {"column": "column", "row": "row", "whole": "replicated"}
    return {path: letters[role] for role, paths in columns_rows_and_whole.items() for path in paths.split()}


# -- column and row ---------------------------------------------------------------------------


def test_a_gated_mlp():
    def forward(self, x):
        return self.c(F.silu(self.a(x)) * self.b(x))

    assert roles_of(forward) == roles(column="a b", row="c")


def test_attention_with_what_is_done_for_each_head():
    def forward(self, x):
        q, k, v = heads(self.a(x)), heads(self.b(x)), heads(self.c(x))
        q, k = self.head_norm(q), self.head_norm(k)
        q = q * x[..., :WIDTH].unsqueeze(1) + torch.cat((-q[..., 1:], q[..., :1]), dim=-1)
        return self.d(joined(F.scaled_dot_product_attention(q, k, v)))

    assert roles_of(forward) == roles(column="a b c", row="d")


def test_attention_written_out():
    def forward(self, x):
        q, k, v = heads(self.a(x)), heads(self.b(x)), heads(self.c(x))
        scores = torch.matmul(q, k.transpose(-1, -2)) * WIDTH**-0.5
        scores = scores + torch.ones(7, 7)
        weights = self.soft(scores.float()).to(q.dtype)
        return self.d(joined(weights @ v)), weights

    assert roles_of(forward) == roles(column="a b c", row="d")


def test_attention_written_out_with_heads_and_batch_in_one_dimension():
    def forward(self, x):
        q, k, v = (heads(y).reshape(-1, 7, WIDTH) for y in (self.a(x), self.b(x), self.c(x)))
        scores = torch.bmm(q, k.transpose(1, 2)).view(2, HEADS, 7, 7) + torch.ones(2, 1, 7, 7)
        weights = torch.max(scores, torch.tensor(-1e30)).view(2 * HEADS, 7, 7).softmax(-1)
        return self.d(joined(torch.bmm(weights, v).view(2, HEADS, 7, WIDTH)))

    assert roles_of(forward) == roles(column="a b c", row="d")

    def heads_that_mix(self, x):
        q, k = (heads(y).reshape(-1, 7, WIDTH) for y in (self.a(x), self.b(x)))
        v = self.c(x).repeat_interleave(HEADS, dim=0)  # shared out in another way
        return self.d(torch.bmm(torch.bmm(q, k.transpose(1, 2)), v).view(2, HEADS, 7, SIZE).sum(1))

    # The weights are gathered where shares of heads have met; the values cannot be shared out.
    assert roles_of(heads_that_mix) == roles(column="a b", whole="c d")


def leaf(module, query, key, value, mask=None, scaling=1.0):
    return query.transpose(1, 2).contiguous(), query @ key.transpose(-1, -2)


def test_an_attention_leaf_whose_result_leaves_the_forward():
    def forward(self, x):
        output, weights = leaf(self, heads(self.a(x)), heads(self.b(x)), value=heads(self.c(x)))
        return output.reshape(2, 7, -1), weights

    assert roles_of(forward) == roles(column="a b c")


def test_keys_and_values_may_be_returned_by_heads_too():
    def forward(self, x):
        k, v = heads(self.b(x)), heads(self.c(x))
        out = joined(F.scaled_dot_product_attention(heads(self.a(x)), k, v))
        return self.d(out), (k, v)

    assert roles_of(forward) == roles(column="a b c", row="d")


@pytest.mark.parametrize(
    "between",
    [
        lambda self, y: torch.relu(y),
        lambda self, y: self.act(y).float().type_as(y) * 2 + 1,
        lambda self, y: y * self.scale + self.buffer,
        lambda self, y: F.dropout(y, 0.1).contiguous().clamp(max=3),
        lambda self, y: y.view(14, SIZE).view(2, 7, SIZE),
        lambda self, y: y.reshape(2, 7, HEADS, WIDTH).flatten(2),
        lambda self, y: y[:, -3:, :][:, 1],
        lambda self, y: y[None, ..., None].squeeze(-1).squeeze(0),
        lambda self, y: y.softmax(1).mean(dim=(0, 1)),
        lambda self, y: self.soft_over_length(y).sum(0, keepdim=True),
        lambda self, y: self.both(y, by={"factor": y})["scaled"],
        lambda self, y: y.permute(2, 0, 1).permute(1, 2, 0).transpose(0, 1),
        lambda self, y: torch.stack([y, y * 2], dim=1).unbind(1)[1],
        lambda self, y: torch.cat([y, y * 2], dim=1),
        lambda self, y: torch.where(y > 0, y, torch.zeros_like(y)),
        lambda self, y: F.pad(y, (0, 0, 1, 0)).narrow(1, 0, 7),
        lambda self, y: y.repeat_interleave(2, dim=1),
        lambda self, y: y.split(4, dim=1)[0],
        lambda self, y: y.expand(3, 2, 7, SIZE),
        lambda self, y: torch.max(y, y * 2).min(self.scale),
        lambda self, y: y.mul_(2),
        lambda self, y: operator.iadd(torch.tanh(y), self.scale),
    ],
)
def test_what_keeps_the_shares_apart(between):
    assert roles_of(lambda self, x: self.b(between(self, self.a(x)))) == roles(column="a", row="b")


@pytest.mark.parametrize(
    "between",
    [
        lambda self, y: self.norm(y),
        lambda self, y: self.layer_norm(y),
        lambda self, y: F.rms_norm(y, (SIZE,)),
        lambda self, y: y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True)),
        lambda self, y: y.softmax(-1),
        lambda self, y: self.soft(y),
        lambda self, y: y - y.sum(dim=-1, keepdim=True),
        lambda self, y: y - y.mean(),
        lambda self, y: F.normalize(y, dim=-1),
        lambda self, y: y.flip(-1),
        lambda self, y: y.cumsum(-1),
        lambda self, y: half_turned(y),
        lambda self, y: y[..., ::2].repeat_interleave(2, dim=-1),
        lambda self, y: y @ y.transpose(-1, -2) @ y,
        lambda self, y: F.linear(y, self.a.weight),
        lambda self, y: y.view(2, 7, WIDTH, HEADS).transpose(-1, -2).reshape(2, 7, SIZE),
        lambda self, y: y.transpose(1, 2).reshape(2, 7, SIZE),
        lambda self, y: y.roll(1, -1),
        lambda self, y: y[..., torch.arange(SIZE)],
        lambda self, y: F.pad(y[..., :-1], (0, 1)),
        lambda self, y: self.careful_or(y),
        lambda self, y: y + y.transpose(1, 2).reshape(2, 7, SIZE),
    ],
)
def test_what_needs_the_whole(between):
    class Whole(Net):
        def careful_or(self, y):
            return torch.einsum("bld,de->ble", y, self.b.weight)

        def forward(self, x):
            return self.b(between(self, self.a(x)))

    module = Whole()
    found = fk.trace(module, torch.empty(2, 7, SIZE))
    assert found.complete, found.stopped
    # What reads the whole and hands on its own result to nobody is whole, too.
    assert parallel_roles(found, module) == roles(whole="a b")


def test_a_submodule_that_cannot_be_followed_needs_the_whole():
    # On meta its trace stops, and so would the module's own: a mask makes it take the other way.
    module = type("Net", (Net,), {"forward": lambda self, x: self.b(self.act(self.a(x)))})()
    found = fk.trace(module, torch.empty(2, 7, SIZE))
    assert parallel_roles(found, module) == roles(column="a", row="b")
    module.act = Careful()
    assert parallel_roles(found, module) == roles(whole="a b")


def test_an_operator_called_in_a_way_that_is_not_known_needs_the_whole(monkeypatch):
    def rule(walk, node, splits):
        return node.args[7]

    def forward(self, x):
        return self.b(torch.tanh(self.a(x)))

    assert roles_of(forward) == roles(column="a", row="b")
    monkeypatch.setitem(shares.RULES, "tanh", rule)
    assert roles_of(forward) == roles(whole="a b")


def test_only_the_linear_whose_result_is_needed_whole_is_replicated():
    def forward(self, x):
        return self.d(attend(self.norm(self.a(x)), self.norm(self.b(x)), self.c(x)))

    assert roles_of(forward) == roles(whole="a b", column="c", row="d")


def test_low_rank_projections_with_a_norm_between():
    def forward(self, x):
        q = self.b(self.norm(self.a(x)))
        return self.d(attend(q, self.c(x), self.c(x)))

    assert roles_of(forward) == roles(whole="a", column="b c", row="d")


def test_a_result_that_leaves_the_forward_is_whole():
    assert roles_of(lambda self, x: self.a(x)) == roles(whole="a")
    assert roles_of(lambda self, x: (self.b(self.a(x)), self.c(x))) == roles(column="a", row="b", whole="c")

    def handed_out(self, x):
        y = self.a(x)
        return self.b(y), y

    assert roles_of(handed_out) == roles(whole="a b")


def test_a_result_that_nobody_reads_is_whole():
    def forward(self, x):
        self.a(x)
        return self.b(x).sum()

    assert roles_of(forward) == roles(whole="a b")


def test_after_the_row_everything_is_whole_again():
    def forward(self, x):
        x = x + self.b(torch.relu(self.a(self.norm(x))))
        return x + self.d(torch.relu(self.c(self.norm(x))))

    assert roles_of(forward) == roles(column="a c", row="b d")


def test_a_whole_value_gives_each_rank_its_share():
    assert roles_of(lambda self, x: self.b(self.a(x) + x)) == roles(column="a", row="b")
    assert roles_of(lambda self, x: self.b(self.norm(self.a(x) + x))) == roles(whole="a b")


def test_one_key_head_cannot_be_shared_out_by_heads():
    def forward(self, x):
        k, v = heads(self.one(x)), heads(self.one(x))
        q = heads(self.a(x))
        return self.d(joined(F.scaled_dot_product_attention(q, k.expand_as(q), v.expand_as(q))))

    assert roles_of(forward) == roles(column="a", row="d", whole="one")


def test_key_heads_that_several_query_heads_read():
    def forward(self, x):
        q = heads(self.packed(x))
        k, v = (
            y[:, :, None].expand(2, HEADS, 2, 7, WIDTH).reshape(2, 2 * HEADS, 7, WIDTH)
            for y in (heads(self.a(x)), heads(self.b(x)).repeat_interleave(1, dim=1))
        )
        out = joined(F.scaled_dot_product_attention(q, k, v))
        return self.d(out[..., :SIZE])

    # What cuts the result of an attention gathers it there; query, key and value are as they were.
    assert roles_of(forward) == roles(column="packed a b", whole="d")


def test_an_attention_of_one_head_needs_the_whole():
    def forward(self, x):
        return self.d(F.scaled_dot_product_attention(self.a(x), self.b(x), self.c(x)))

    assert roles_of(forward) == roles(whole="a b c d")


def test_a_norm_after_the_attention_gathers_there():
    def forward(self, x):
        return self.d(self.norm(attend(self.a(x), self.b(x), self.c(x))))

    assert roles_of(forward) == roles(column="a b c", whole="d")

    def written_out(self, x):
        weights = (heads(self.a(x)) @ heads(self.b(x)).mT).softmax(-1)
        return self.d(self.norm(joined(weights @ heads(self.c(x)))))

    assert roles_of(written_out) == roles(column="a b c", whole="d")


def test_a_gate_on_the_result_of_an_attention():
    def forward(self, x):
        gate = torch.sigmoid(self.turned(x))
        return self.d(attend(self.a(x), self.b(x), self.c(x)) * gate)

    assert roles_of(forward) == roles(column="turned a b c", row="d")


def test_a_linear_that_works_on_each_head_holds_no_share():
    def forward(self, x):
        q = self.head(heads(self.a(x)))
        return self.d(joined(F.scaled_dot_product_attention(q, heads(self.b(x)), heads(self.c(x)))))

    assert roles_of(forward) == roles(column="a b c", whole="head", row="d")


def test_a_linear_that_is_called_in_two_ways_is_replicated():
    assert roles_of(lambda self, x: self.a(self.a(x))) == roles(whole="a")
    assert roles_of(lambda self, x: self.b(self.a(x)) + self.b(x)) == roles(whole="a b")
    twice = roles_of(lambda self, x: self.c(self.a(x) + self.a(2 * x)))
    assert twice == roles(column="a", row="c")  # twice in one way

    def after_attention(self, x):
        return self.d(attend(self.a(x), self.b(x), self.c(x))) + self.d(x)

    assert roles_of(after_attention) == roles(column="a b c", whole="d")


def test_one_feature_cannot_be_shared_out():
    assert roles_of(lambda self, x: self.a(self.scalar(x).expand_as(x))) == roles(whole="scalar a")


def test_conv1d_is_a_linear():
    assert roles_of(lambda self, x: self.turned(torch.relu(self.a(x)))) == roles(column="a", row="turned")


def test_a_row_inside_of_a_submodule_that_shares_enter():
    def forward(self, x):
        return self.end(torch.relu(self.a(x))) + self.end(x).sum() * 0

    assert roles_of(lambda self, x: self.end(torch.relu(self.a(x)))) == {"a": "column", "end.1": "row"}


# -- one linear that is several ---------------------------------------------------------------


@pytest.mark.parametrize(
    "cut",
    [
        lambda y: y.chunk(2, dim=-1),
        lambda y: y.split(SIZE, dim=-1),
        lambda y: (y[..., :SIZE], y[..., SIZE:]),
        lambda y: (y.narrow(-1, 0, SIZE), y.narrow(-1, SIZE, SIZE)),
        lambda y: torch.tensor_split(y, 2, dim=2),
    ],
)
def test_a_packed_linear_is_shared_out_piece_by_piece(cut):
    def forward(self, x):
        gate, up = cut(self.packed(x))
        return self.b(F.silu(gate) * up)

    assert roles_of(forward) == roles(column="packed", row="b")
    assert roles_of(lambda self, x: self.b(F.glu(self.packed(x)))) == roles(column="packed", row="b")


def test_packed_query_and_key():
    def forward(self, x):
        q, k = self.packed(x).split([SIZE, SIZE], dim=2)
        return self.d(attend(q, k, self.c(x)))

    assert roles_of(forward) == roles(column="packed c", row="d")

    def by_heads(self, x):
        q, k = heads(self.packed(x)).chunk(2, dim=1)
        return self.d(joined(F.scaled_dot_product_attention(q, k, heads(self.c(x)))))

    assert roles_of(by_heads) == roles(column="packed c", row="d")


def test_packed_within_each_head():
    def forward(self, x):
        q, k = self.packed(x).view(2, 7, HEADS, 2 * WIDTH).transpose(1, 2).chunk(2, dim=-1)
        return self.d(joined(F.scaled_dot_product_attention(q, k, heads(self.c(x)))))

    assert roles_of(forward) == roles(column="packed c", row="d")


@pytest.mark.parametrize(
    "use",
    [
        lambda self, y: self.b(y[..., :SIZE] * y[..., SIZE // 2 : SIZE // 2 + SIZE]),
        lambda self, y: self.b(y[..., :SIZE]) + F.linear(torch.relu(y), torch.ones(SIZE, 2 * SIZE)),
        lambda self, y: self.b(torch.relu(y[..., :SIZE])[..., :WIDTH].repeat(1, 1, HEADS)),
        lambda self, y: self.b(y[..., 0::2] * y[..., 1::2]),
        lambda self, y: self.b(y[..., :SIZE] * y[..., SIZE:].flip(-1)),
    ],
    ids=["pieces overlap", "also used uncut", "a piece of a piece", "every other", "one piece mixes"],
)
def test_pieces_that_do_not_fit_need_the_whole(use):
    found = roles_of(lambda self, x: use(self, self.packed(x)))
    assert found["packed"] == "replicated"


def test_a_piece_and_the_uncut_result_may_not_both_reach_a_row():
    def forward(self, x):
        y = self.a(x)
        return self.b(y) + self.one(x)[..., :1] * self.c(F.pad(y[..., : SIZE // 2], (0, 0))).sum()

    class Half(Net):
        def __init__(self):
            super().__init__()
            self.c = nn.Linear(SIZE // 2, SIZE)

    module = type("Net", (Half,), {"forward": forward})()
    found = fk.trace(module, torch.empty(2, 7, SIZE))
    assert found.complete, found.stopped
    assert parallel_roles(found, module)["a"] == "replicated"


# -- writes -----------------------------------------------------------------------------------


def test_a_buffer_filled_with_shares_by_pieces_of_each_head():
    def forward(self, x):
        q, k, v = heads(self.a(x)), heads(self.b(x)), heads(self.c(x))
        keys = k.new_empty(*k.shape[:-1], 2 * WIDTH)
        keys[..., :WIDTH].copy_(k)
        keys[..., WIDTH:].copy_(x[:, None, :, :WIDTH].expand_as(k))  # one for all heads
        return self.d(joined(F.scaled_dot_product_attention(torch.cat((q, q), -1), keys, v)))

    assert roles_of(forward) == roles(column="a b c", row="d")


def test_a_buffer_filled_with_shares_that_are_then_needed_whole():
    def forward(self, x):
        y = torch.empty(2, 7, SIZE)
        y[:, :4] = self.a(x)[:, :4]
        y[:, 4:] = self.b(x)[:, 4:]
        return self.c(y), self.d(self.norm(y))

    assert roles_of(forward) == roles(whole="a b c d")

    def alone(self, x):
        y = torch.zeros(2, 7, SIZE)
        y[:, :4] = self.a(x)[:, :4]
        y[:, 4:] = self.b(x)[:, 4:]
        return self.c(y)

    assert roles_of(alone) == roles(column="a b", row="c")


def test_shares_written_along_two_dimensions_of_a_buffer_are_needed_whole():
    def forward(self, x):
        y = torch.zeros(2, SIZE, SIZE)
        y[:, :7] = self.a(x)
        y[:, :, :7] += self.b(x).transpose(1, 2)
        return self.c(y)

    assert roles_of(forward) == roles(whole="a b c")


def test_shares_written_into_what_others_hold_are_needed_whole():
    def into_the_input(self, x):
        x += self.a(x)
        return self.b(x)

    def through_a_view(self, x):
        y = x * 2
        y[:, :3] = self.a(x)[:, :3]
        return self.b(y)

    assert roles_of(into_the_input) == roles(whole="a b")
    assert roles_of(through_a_view) == roles(whole="a b")


def test_a_product_in_place():
    def forward(self, x):
        return self.c(F.silu(self.a(x)).mul_(self.b(x)))

    assert roles_of(forward) == roles(column="a b", row="c")

    def seen_elsewhere(self, x):
        y = torch.relu(self.a(x))
        seen = y[:, :3]
        y *= self.b(x)
        return self.c(y), self.d(self.norm(seen))

    assert set(roles_of(seen_elsewhere).values()) == {"replicated"}


# -- what is around a site --------------------------------------------------------------------


def test_a_trace_that_stopped_says_nothing():
    class Stops(Net):
        def forward(self, x):
            y = self.a(x)
            return self.b(y) if y.sum() > 0 else y

    found = fk.trace(Stops(), torch.empty(2, 7, SIZE))
    assert not found.complete and parallel_roles(found, Stops()) == {}


class Layer(Net):
    """An attention and an MLP in one forward."""

    def forward(self, x):
        q, k, v = self.a(x), self.b(x), self.c(x)
        x = x + self.d(attend(q, k, v))
        return x + self.end(F.silu(self.turned(x)))


def test_around_are_the_parts_and_what_takes_their_result():
    module = Layer()
    found = fk.trace(module, torch.empty(2, 7, SIZE))
    assert roles_around(found, module, ["b", "a"]) == roles(column="b a", row="d")
    assert roles_around(found, module, ["turned"]) == {"turned": "column", "end.1": "row"}
    assert roles_around(found, module, []) == {}
    # The attention's result comes to the MLP through another linear.
    assert list(roles_around(found, module, ["a", "b", "c"])) == ["a", "b", "c", "d"]
    assert len(parallel_roles(found, module)) == 6


def test_around_follows_what_a_write_carries():
    def forward(self, x):
        y = torch.empty(2, 7, SIZE)
        y[:, :4].copy_(self.a(x)[:, :4])
        return self.b(y) + self.c(x)

    module = type("Net", (Net,), {"forward": forward})()
    found = fk.trace(module, torch.empty(2, 7, SIZE))
    assert list(roles_around(found, module, ["a"])) == ["a", "b"]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.mlp = RMSNorm(SIZE), Gated()

    def forward(self, x):
        return x + self.mlp(self.norm(x))


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(SIZE, SIZE) for _ in range(3))

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


def test_a_site_has_roles_and_shows_them():
    plan = fk.plan(Block())
    by_fusion = {site.fusion: site for site in plan.sites}
    want = {"gate": "column", "up": "column", "down": "row"}
    assert by_fusion["glu"].roles == want and by_fusion["rms_norm"].roles == {}
    text = "<Site mlp: glu of gate, up (Gated); column: gate, up; row: down>"
    assert display.text(by_fusion["glu"]) == text
    html = display.html(by_fusion["glu"])
    assert "column under tensor parallelism" in html and "row under tensor parallelism" in html
    assert "tensor parallelism" not in display.html(by_fusion["rms_norm"])
    frame = plan.to_frame().set_index("fusion")
    assert frame.roles["glu"] == "gate: column, up: column, down: row" and frame.roles["rms_norm"] == ""


def test_applied_sites_have_their_roles_too():
    model = Block()
    fk.fuse(model)
    (glu,) = [site for site in fk.plan(model).applied if site.fusion == "glu"]
    assert glu.roles == {"gate": "column", "up": "column", "down": "row"}


# -- shapes -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "after", "dim", "want"),
    [
        ((2, 7, 12), (2, 7, 4, 3), 2, (2, 1)),
        ((2, 7, 4, 3), (2, 7, 12), 2, (2, 1)),
        ((2, 7, 12), (14, 12), 2, (1, 1)),
        ((2, 7, 12), (2, 7, 1, 12), 2, (3, 1)),
        ((2, 4, 2, 7, 3), (2, 8, 7, 3), 1, (1, 1)),
        ((2, 4, 7, 3), (8, 7, 3), 1, (0, 2)),  # each sequence of the batch has its heads
        ((2, 7, 4, 3), (2, 7, 12), 3, (2, 4)),  # and each head its features
        ((6, 2), (4, 3), 0, None),
        ((2, 6), (3, 4), 1, None),
        ((2, 7, 12), (2, 7, 6), 2, None),  # not the same numbers
    ],
)
def test_where_the_shares_lie_after_a_reshape(before, after, dim, want):
    assert reshaped(before, after, dim) == want
    if want:
        assert reshaped(after, before, *want) == (dim, 1)


@pytest.mark.parametrize(
    ("index", "want"),
    [
        ((slice(None), 0), [0, None, 1]),
        ((..., None), [0, 1, 2]),
        ((None, ..., slice(1, None)), [1, 2, None]),
        (slice(0, 5), [0, 1, 2]),
        (slice(0, 4), [None, 1, 2]),
        ((..., slice(None, None, 2)), [0, 1, None]),
        (torch.tensor([0]), []),
        (True, []),
    ],
)
def test_where_dimensions_are_after_indexing(index, want):
    assert indexed((5, 6, 7), index) == want
