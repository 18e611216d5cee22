"""What two processes do together: `python ranks.py RANK FOLDER` runs every case below, once a rank.

Each case has a process group of its own, so that one that fails or hangs takes no other with it; what
became of it is a line of JSON in FOLDER/rank-RANK.
"""

import copy
import json
import sys
import traceback
import warnings
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from conftest import assert_same_state, build, fuse_all, token_ids
from torch.distributed.checkpoint import state_dict as dcp_state
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import fusekit as fk

WORLD, PATIENCE = 2, timedelta(seconds=60)


def whole(value):
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def assert_same_training(pair, rank, steps=3, before_step=None):
    """Both take the same `steps`, each rank with tokens of its own: losses, gradients, parameters."""
    optimizers = [torch.optim.AdamW(one.parameters(), lr=0.01) for one in pair]
    for step in range(steps):
        if before_step:
            before_step(step)
        ids = token_ids(seed=10 * step + rank)
        losses = []
        for one, optimizer in zip(pair, optimizers, strict=True):
            optimizer.zero_grad()
            loss = one(input_ids=ids, labels=ids).loss
            loss.backward()
            losses.append(loss.detach())
            assert any(parameter.grad is not None for parameter in one.parameters())
        torch.testing.assert_close(*losses)
        assert_same_values(*pair, grads=True)
        for optimizer in optimizers:
            optimizer.step()
            assert optimizer.state, "no parameter was stepped"
    assert_same_values(*pair)


def assert_same_values(own, other, grads=False):
    pairs = zip(own.named_parameters(), other.named_parameters(), strict=True)
    for (name, mine), (other_name, his) in pairs:
        assert name == other_name
        if grads:
            mine, his = mine.grad, his.grad
            if his is None:  # a share of no elements
                assert mine is None, name
                continue
        assert type(mine) is type(his), name
        torch.testing.assert_close(whole(mine), whole(his), rtol=2e-4, atol=2e-5, msg=name)


def shard(model, **options):
    for layer in model.model.layers:
        fully_shard(layer, mesh=MESH, **options)
    return fully_shard(model, mesh=MESH, **options)


def refused(plan):
    return {(refusal.fusion, refusal.reason) for refusal in plan.refusals}


def names(places):
    return [place.name for place in places]


# -- cases -------------------------------------------------------------------------------------


def ddp_of_a_fused_model(rank, folder):
    twin = build()
    model = copy.deepcopy(twin)
    fused = fuse_all(model)
    with torch.no_grad():  # as the other rank has it after DDP's first broadcast
        for one in (model, twin) if rank else ():
            one.lm_head.weight.zero_()
            one.model.layers[0].self_attn.k_proj.weight.zero_()
    assert_same_training([DistributedDataParallel(one) for one in (model, twin)], rank)
    fused.revert()
    assert_same_values(model, twin)


def ddp_fused_inside(rank, folder):
    pair = [DistributedDataParallel(build(), static_graph=True) for _ in range(2)]
    fused = fk.fuse(pair[0])
    assert len(fused.sites) == 9 and all(site.name.startswith("module.") for site in fused.sites)
    assert_same_training(pair, rank, before_step=lambda step: fused.revert() if step == 2 else None)


def ddp_with_bucket_views_and_unused_parameters(rank, folder):
    twin = build()
    model = copy.deepcopy(twin)
    fuse_all(model)
    for one in (model, twin):
        one.model.layers[1].mlp.gate_proj.weight.requires_grad_(False)
        one.extra = nn.Linear(3, 3)
        nn.init.zeros_(one.extra.weight)
        nn.init.zeros_(one.extra.bias)
    pair = [
        DistributedDataParallel(one, gradient_as_bucket_view=True, find_unused_parameters=True)
        for one in (model, twin)
    ]
    for step in range(2):
        ids = token_ids(seed=step * 10 + rank)
        for one in pair:
            one.zero_grad()
            one(input_ids=ids, labels=ids).loss.backward()
        for (name, mine), his in zip(model.named_parameters(), twin.parameters(), strict=True):
            assert (mine.grad is None) == (his.grad is None), name
            if his.grad is not None:
                torch.testing.assert_close(mine.grad, his.grad, rtol=1e-4, atol=1e-6, msg=name)


def fuse_then_shard(rank, folder):
    model, twin = build(), build()
    fused = fuse_all(model)
    for one in (model, twin):
        shard(one)
    assert_same_training([model, twin], rank)
    storage = model.model.layers[0].self_attn.merged_qkv
    assert storage.weight is None, "the whole weights are held beside the shards"
    fused.revert()
    assert_same_training([model, twin], rank)


def shard_then_fuse(rank, folder):
    model, twin = build(), build()
    for one in (model, twin):
        shard(one)
    plan = fk.plan(model)
    assert {site.fusion for site in plan.sites} == {"rms_norm"}
    assert refused(plan) == {("qkv", "sharded"), ("glu", "sharded")}
    with plan.apply():
        assert_same_training([model, twin], rank)
    assert_same_training([model, twin], rank)


def shard_left_unsharded_then_fuse(rank, folder):
    model, twin = build(), build()
    for one in (model, twin):
        shard(one, reshard_after_forward=False)
        one(input_ids=token_ids())  # the parameters now in the modules are whole, and FSDP's own
    assert type(model.model.layers[0].self_attn.q_proj.weight) is nn.Parameter
    plan = fk.plan(model)
    assert refused(plan) == {("qkv", "sharded"), ("glu", "sharded")}
    part = fk.plan(model.model.layers[0].self_attn)
    assert not part.sites and refused(part) == {("qkv", "sharded")}
    with plan.apply():
        for one in (model, twin):  # so that optimizers get the shards
            for module in (one, *one.model.layers):
                module.reshard()
        assert_same_training([model, twin], rank)


def whole_weights_moved(rank, folder):
    model, twin = build(), build()
    fuse_all(model)
    optimizers = []
    for one in (model, twin):
        shard(one, reshard_after_forward=False)
        optimizers.append(torch.optim.SGD(one.parameters(), lr=0.5))
        one(input_ids=token_ids())
        one.model.layers[0].self_attn.to(torch.float32)  # lays merged weights out anew
    for step in range(3):
        losses = []
        for one, optimizer in zip((model, twin), optimizers, strict=True):
            optimizer.zero_grad()
            losses.append(one(input_ids=token_ids(step), labels=token_ids(step)).loss)
            losses[-1].backward()
            optimizer.step()
        torch.testing.assert_close(*losses)


def fsdp_of_flat_parameters(rank, folder):
    from torch.distributed.fsdp import FullyShardedDataParallel

    model, late, twin = build(), build(), build()
    fused = fuse_all(model)
    cpu = torch.device("cpu")
    model, late, twin = (
        FullyShardedDataParallel(one, device_id=cpu, use_orig_params=True) for one in (model, late, twin)
    )
    plan = fk.plan(late)
    assert {site.fusion for site in plan.sites} <= {"rms_norm"}
    assert {reason for _, reason in refused(plan)} == {"sharded"}
    places = {(kind, n) for kind in ("self_attn", "mlp") for n in "01"}
    assert places <= {(name.split(".")[-1], name.split(".")[-2]) for name in names(plan.refusals)}
    plan.apply()
    ids = token_ids()
    torch.testing.assert_close(late(input_ids=ids).logits, twin(input_ids=ids).logits)
    assert_same_training([model, twin], rank)
    fused.revert()
    assert_same_training([model, twin], rank, steps=1)


def planned_before_sharding_and_applied_after(rank, folder):
    model, twin = build(), build()
    plan = fk.plan(model)
    for one in (model, twin):
        shard(one)
    try:
        plan.apply()
    except fk.FusekitError as error:
        assert "plan again" in str(error)
    else:
        raise AssertionError("sharded weights were merged")
    assert_same_training([model, twin], rank, steps=1)


def fused_modules_are_what_is_sharded(rank, folder):
    model, twin = build(), build()
    fused = fuse_all(model)
    for one in (model, twin):
        for layer in one.model.layers:
            fully_shard(layer.self_attn, mesh=MESH)
            fully_shard(layer.mlp, mesh=MESH)
        fully_shard(one, mesh=MESH)
    assert_same_training([model, twin], rank)
    try:
        fused.revert()
    except fk.FusekitError as error:
        assert "undo what replaced it first" in str(error)
    else:
        raise AssertionError("the class that FSDP gave was taken away")
    assert_same_training([model, twin], rank, steps=1)


def shard_with_tensor_parallelism(rank, folder):
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    ways = {"gate_proj": ColwiseParallel(), "up_proj": ColwiseParallel(), "down_proj": RowwiseParallel()}
    model, twin, late = build(), build(), build()
    fused = fuse_all(model)
    for one in (model, twin, late):
        for layer in one.model.layers:
            parallelize_module(layer.mlp, MESH, ways)
    plan = fk.plan(late)
    assert [site.fusion for site in plan.sites].count("qkv") == 2
    assert refused(plan) == {("glu", "sharded")}
    plan.apply()
    ids = token_ids()
    for one in (model, late):
        torch.testing.assert_close(one(input_ids=ids).logits, twin(input_ids=ids).logits)
    fused.revert()
    torch.testing.assert_close(model(input_ids=ids).logits, twin(input_ids=ids).logits)


def checkpoint_from_fused_to_unfused_and_back(rank, folder):
    model, twin = build(), build()
    fused = fuse_all(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05)
    state = dcp_state.get_model_state_dict(model)
    dcp.save({"model": state}, checkpoint_id=folder / "fused")
    own = {"model": dcp_state.get_model_state_dict(twin)}
    dcp.load(own, checkpoint_id=folder / "fused")  # in place, into the tensors of the state dict
    dcp_state.set_model_state_dict(twin, own["model"])
    assert_same_state(model.state_dict(), twin.state_dict())
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(0.9)
    dcp.save({"model": dcp_state.get_model_state_dict(twin)}, checkpoint_id=folder / "unfused")
    for into in (model.state_dict(), dcp_state.get_model_state_dict(model)):
        dcp.load({"model": into}, checkpoint_id=folder / "unfused")
    ids = token_ids()
    torch.testing.assert_close(model(input_ids=ids).logits, twin(input_ids=ids).logits)
    fused.revert()
    assert_same_state(model.state_dict(), twin.state_dict())


def checkpoint_with_the_optimizer(rank, folder):
    model, twin = build(), build()
    fuse_all(model)
    optimizers = [torch.optim.AdamW(one.parameters(), lr=0.01) for one in (model, twin)]
    ids = token_ids()
    for one, optimizer in zip((model, twin), optimizers, strict=True):
        one(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    of_model, of_optimizer = dcp_state.get_state_dict(model, optimizers[0])
    dcp.save({"model": of_model, "optimizer": of_optimizer}, checkpoint_id=folder / "optimizer")
    fresh = build(rms_norm_eps=1e-6)
    optimizer = torch.optim.AdamW(fresh.parameters(), lr=0.01)
    state = dict(zip(("model", "optimizer"), dcp_state.get_state_dict(fresh, optimizer), strict=True))
    dcp.load(state, checkpoint_id=folder / "optimizer")
    dcp_state.set_state_dict(
        fresh, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    assert_same_values(fresh, twin)
    for one, its in ((fresh, optimizer), (twin, optimizers[1])):
        one.zero_grad()
        one(input_ids=ids, labels=ids).loss.backward()
        its.step()
    assert_same_values(fresh, twin)


def checkpoint_of_shards_into_a_fused_model(rank, folder):
    sharded, model, twin = shard(build()), build(), build()
    with torch.no_grad():
        for one in (sharded, twin):
            for parameter in one.parameters():
                parameter.mul_(1.25)
    dcp.save({"model": dcp_state.get_model_state_dict(sharded)}, checkpoint_id=folder / "shards")
    fused = fuse_all(model)
    own = {"model": dcp_state.get_model_state_dict(model)}
    dcp.load(own, checkpoint_id=folder / "shards")
    dcp_state.set_model_state_dict(model, own["model"])
    assert fk.plan(model).applied and model.model.layers[0].self_attn.merged_qkv.is_tied()
    ids = token_ids()
    torch.testing.assert_close(model(input_ids=ids).logits, twin(input_ids=ids).logits)
    fused.revert()
    assert_same_state(model.state_dict(), twin.state_dict())


def full_state_dict_from_rank_0(rank, folder):
    model, twin = build(), build()
    fuse_all(model)
    shard(model)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(1.5)
    options = dcp_state.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    state = {} if rank else {name: value.clone() for name, value in twin.state_dict().items()}
    dcp_state.set_model_state_dict(model, state, options=options)
    ids = token_ids()
    torch.testing.assert_close(model(input_ids=ids).logits, twin(input_ids=ids).logits)
    options = dcp_state.StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = dcp_state.get_model_state_dict(model, options=options)
    if not rank:
        assert_same_state(state, dict(twin.state_dict()))


CASES = [
    ddp_of_a_fused_model,
    ddp_fused_inside,
    ddp_with_bucket_views_and_unused_parameters,
    fuse_then_shard,
    shard_then_fuse,
    shard_left_unsharded_then_fuse,
    whole_weights_moved,
    fsdp_of_flat_parameters,
    planned_before_sharding_and_applied_after,
    fused_modules_are_what_is_sharded,
    shard_with_tensor_parallelism,
    checkpoint_from_fused_to_unfused_and_back,
    checkpoint_with_the_optimizer,
    checkpoint_of_shards_into_a_fused_model,
    full_state_dict_from_rank_0,
]


def main(rank, folder, wanted):
    global MESH
    warnings.simplefilter("ignore")
    for case in CASES:
        name = case.__name__
        if wanted and name not in wanted:
            continue
        own = folder / name
        own.mkdir(exist_ok=True)
        store = dist.FileStore(str(own / "store"), WORLD)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD, timeout=PATIENCE)
        MESH = init_device_mesh("cpu", (WORLD,))
        said = ""
        try:
            case(rank, own)
            dist.barrier()
        except BaseException:
            said = traceback.format_exc()
        with open(folder / f"rank-{rank}", "a") as file:
            print(json.dumps([name, said]), file=file)
        dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
