"""Roles under tensor parallelism against what real models say, and against two ranks that are summed.

`base_model_tp_plan` is what Transformers ships with a configuration; nothing in fusekit reads it.
"""

import copy
import re

import pytest
import torch
import torch.nn as nn
import transformers

import fusekit as fk
from fusekit.model.parallel import parallel_roles
from fusekit.model.shares import is_parallel
from tests.sizes import SIZES

MLA = dict(
    q_lora_rank=24,
    kv_lora_rank=16,
    qk_rope_head_dim=8,
    qk_nope_head_dim=8,
    v_head_dim=8,
    n_routed_experts=4,
    num_experts_per_tok=2,
    n_group=2,
    topk_group=1,
    moe_intermediate_size=24,
    first_k_dense_replace=1,
    n_shared_experts=1,
)
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**SIZES),
    "mistral": lambda: transformers.MistralConfig(**SIZES, sliding_window=None),
    "qwen3": lambda: transformers.Qwen3Config(**SIZES, head_dim=16),
    "olmo2": lambda: transformers.Olmo2Config(**SIZES),
    "gemma3": lambda: transformers.Gemma3TextConfig(**SIZES, head_dim=16, sliding_window=8),
    "phi3": lambda: transformers.Phi3Config(**SIZES),
    "mixtral": lambda: transformers.MixtralConfig(**SIZES, num_local_experts=4),
    "deepseek": lambda: transformers.DeepseekV3Config(**SIZES | {"num_key_value_heads": 4}, **MLA),
}

# What each style of Transformers makes of a linear's result: shares, a sum over the ranks, the whole.
ROLES = {
    "colwise": "column",
    "packed_colwise": "column",
    "rowwise": "row",
    "rowwise_split_input": "row",  # reads a whole value, of which each rank takes its share
    "colwise_gather_output": "replicated",
    "colwise_rep": "replicated",
    "replicated_with_grad_allreduce": "replicated",
    None: "replicated",  # not in the plan: every rank holds it
}

# Where fusekit says something else, and why it is right all the same.
DIFFERENT = {
    # The plan shares out contiguous rows, so the slices of a packed result would run across ranks, and
    # it gathers. With the rows of each piece shared out by themselves, as its own `packed_colwise`
    # does for experts and as a merged linear can, nothing is gathered.
    "phi3": {"self_attn.qkv_proj": "column", "mlp.gate_up_proj": "column"},
    # Queries and keys are needed whole by their norms, and the plan then runs the attention whole. No
    # norm reads the values: they may stay by heads, each rank taking its heads of queries and keys.
    "olmo2": {"self_attn.v_proj": "column"},
    # The plan leaves latent attention whole on every rank. The latents are, for their norms and since all
    # heads share them; what is made of them by heads can be shared out.
    "deepseek": {"self_attn.q_b_proj": "column", "self_attn.kv_b_proj": "column", "self_attn.o_proj": "row"},
}


def build(name):
    """The model, norm weights and biases random, all linears with a bias."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name]())
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.Linear) and module.bias is None:
                module.bias = nn.Parameter(torch.empty(module.out_features))
        for path, parameter in model.named_parameters():
            parameter.normal_(1 if "norm" in path else 0, 0.3)
    return model.eval()


def ids():
    return torch.arange(2, 20).view(2, 9)


def inputs_of_calls(model):
    """What each module is called with, its tensors' values with it."""
    found, hooks = {}, []
    for path, module in model.named_modules():

        def hook(_, args, kwargs, path=path):
            found.setdefault(path, (args, kwargs))

        hooks.append(module.register_forward_pre_hook(hook, with_kwargs=True))
    with torch.no_grad():
        model(input_ids=ids(), use_cache=False)
    for hook in hooks:
        hook.remove()
    return found


def found_roles(model, calls):
    """(path of a module, its roles) for every module whose forward calls linears."""
    for name, (args, kwargs) in calls.items():
        module = model.get_submodule(name)
        found = fk.trace(module, *args, **kwargs)
        if found.complete and any(is_parallel(node, module) for node in found.graph.nodes):
            if not type(module).__module__.startswith("torch."):
                yield name, parallel_roles(found, module)


@pytest.mark.parametrize("name", CONFIGS)
def test_roles_are_those_of_the_models_own_plan(name):
    model = build(name)
    plan = {f"model.{path}": style for path, style in model.config.base_model_tp_plan.items()}
    linears = {path for path, module in model.named_modules() if isinstance(module, nn.Linear)}
    different = dict(DIFFERENT.get(name, {}))
    seen, differs = set(), {}
    for where, roles in found_roles(model, inputs_of_calls(model)):
        for path, role in roles.items():
            full = f"{where}.{path}".removeprefix(".")
            seen.add(full)
            said = ROLES[plan.get(re.sub(r"\d+", "*", full))]
            if role != said:
                differs[re.sub(r"^model\.layers\.\d+\.", "", full)] = role
    assert differs == different
    assert linears - seen == {"lm_head"}  # below


def test_the_head_is_as_the_plan_says():
    model = build("llama")
    roles = parallel_roles(fk.trace(model, input_ids=ids()), model)
    assert roles == {"lm_head": ROLES[type(model)._tp_plan["lm_head"]]} == {"lm_head": "replicated"}


# -- two ranks --------------------------------------------------------------------------------


RANKS = 2


def share(tensor, rank, dim, pieces=(1,)):
    """This rank's share along `dim`, of each piece by itself."""
    sizes = [tensor.shape[dim] * piece // sum(pieces) for piece in pieces]
    return torch.cat([part.chunk(RANKS, dim)[rank] for part in tensor.split(sizes, dim)], dim)


def on_rank(module, roles, rank, pieces):
    """A copy of `module` with this rank's shares of its linears; the sum over the ranks holds one bias."""
    module = copy.deepcopy(module)
    with torch.no_grad():
        for path, role in roles.items():
            linear = module.get_submodule(path)
            if role == "column":
                packed = pieces.get(path, (1,))
                linear.weight = nn.Parameter(share(linear.weight, rank, 0, packed))
                linear.bias = nn.Parameter(share(linear.bias, rank, 0, packed))
            elif role == "row":
                linear.weight = nn.Parameter(share(linear.weight, rank, 1))
                linear.bias = nn.Parameter(linear.bias * (rank == 0))
    return module


class OwnHeads(nn.Module):
    """A norm over the whole width, of whose result a rank takes its heads."""

    def __init__(self, norm, rank):
        super().__init__()
        self.norm, self.rank = norm, rank

    def forward(self, x):
        return share(self.norm(x), self.rank, -1)


def localize(module, rank):
    """What a forward reads of the number of heads, for one rank's."""
    if type(module).__name__ == "Phi3Attention":
        module.config = copy.deepcopy(module.config)
        module.config.num_attention_heads //= RANKS
        module.num_key_value_heads //= RANKS
    if type(module).__name__ == "Olmo2Attention":
        module.q_norm, module.k_norm = OwnHeads(module.q_norm, rank), OwnHeads(module.k_norm, rank)


PIECES = {"qkv_proj": (2, 1, 1), "gate_up_proj": (1, 1)}  # 4 query heads to 2 of keys and of values


def first(result):
    return result[0] if isinstance(result, tuple) else result


@pytest.mark.parametrize("name", CONFIGS)
def test_what_two_ranks_give_is_summed_to_what_one_gives(name):
    model = build(name)
    calls = inputs_of_calls(model)
    checked = set()
    for where, roles in found_roles(model, calls):
        if "row" not in roles.values():
            continue
        module = model.get_submodule(where)
        args, kwargs = calls[where]
        ranks = [on_rank(module, roles, rank, PIECES) for rank in range(RANKS)]
        for rank, one in enumerate(ranks):
            localize(one, rank)
        with torch.no_grad():
            want = first(module(*args, **kwargs))
            got = sum(first(one(*args, **kwargs)) for one in ranks)
        assert (got - want).abs().max() <= 1e-5 * want.abs().max()
        checked.add(type(module).__name__)
    assert any("Attention" in kind for kind in checked)
    assert name == "mixtral" or any("MLP" in kind for kind in checked)
