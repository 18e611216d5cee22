"""torch.compile of fused modules: one graph for equal layers, never a stale weight."""

import copy

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import fusekit as fk


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.q = nn.Linear(8, 8)
        self.k = nn.Linear(8, 4, bias=False)
        self.v = nn.Linear(8, 4)
        self.gate = nn.Linear(8, 12)
        self.up = nn.Linear(8, 12)
        self.act = nn.SiLU()
        self.down = nn.Linear(12, 8)

    def forward(self, x):
        q = self.q(x).unflatten(-1, (2, 4)).transpose(-2, -3)
        k = self.k(x).unflatten(-1, (1, 4)).transpose(-2, -3)
        v = self.v(x).unflatten(-1, (1, 4)).transpose(-2, -3)
        y = F.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(-2, -3).flatten(-2)
        return x + self.down(self.act(self.gate(y)) * self.up(y))


class Model(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(layers))

    def forward(self, x, call=lambda layer, x: layer(x)):
        for layer in self.layers:
            x = call(layer, x)
        return x


class Counter:
    """A backend that counts the graphs it is given, and runs them as they are or through autograd."""

    def __init__(self):
        self.graphs = []

    def __call__(self, gm, inputs):
        self.graphs.append(gm)
        return gm.forward

    def linears(self):
        return [sum("linear" in str(node.target) for node in gm.graph.nodes) for gm in self.graphs]


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def counter():
    return Counter()


@pytest.mark.parametrize("grad", [True, False])
def test_twelve_equal_layers_are_one_graph(counter, grad):
    model = Model(12)
    twin = copy.deepcopy(model)
    fk.fuse(model)

    @torch.compile(backend=counter, fullgraph=True)
    def call(layer, x):
        return layer(x)

    # The second layer's input requires grad, and torch.compile tells inputs apart by that.
    x = torch.randn(2, 5, 8, requires_grad=grad)
    with torch.set_grad_enabled(grad):
        torch.testing.assert_close(model(x, call), twin(x))
    assert len(counter.graphs) == 1
    assert counter.linears() == [3]  # qkv, gate and up, down
    if grad:
        for one, how in ((model, call), (twin, lambda layer, x: layer(x))):
            one(x, how).square().sum().backward()
        for own, other in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(own.grad, other.grad)
        assert len(counter.graphs) == 1


def test_optimizer_steps_are_seen_without_compiling_again():
    model = Model(2)
    twin = copy.deepcopy(model)
    fk.fuse(model)
    counts = []

    def backend(gm, inputs):
        counts.append(1)
        return torch._dynamo.lookup_backend("aot_eager")(gm, inputs)

    compiled = torch.compile(model, backend=backend, fullgraph=True)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9) for one in (model, twin)]
    for _ in range(3):
        x = torch.randn(2, 5, 8)
        outputs = [compiled(x), twin(x)]
        torch.testing.assert_close(*outputs)
        for output, optimizer in zip(outputs, optimizers, strict=True):
            optimizer.zero_grad()
            output.square().mean().backward()
            optimizer.step()
    for own, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(own, other)
    assert len(counts) == 1


def test_layer_compiled_in_place(counter):
    model = Model(2)
    twin = copy.deepcopy(model)
    fused = fk.fuse(model)
    for layer in model.layers:
        layer.compile(backend=counter, fullgraph=True)
    x = torch.randn(2, 5, 8)
    torch.testing.assert_close(model(x), twin(x))
    assert counter.linears() and set(counter.linears()) == {3}
    fused.revert()
    torch.testing.assert_close(model(x), twin(x))


def test_compiled_before_it_was_fused(counter):
    model = Model(1)
    twin = copy.deepcopy(model)
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    x = torch.randn(2, 5, 8)
    compiled(x)
    with fk.fuse(model):
        torch.testing.assert_close(compiled(x), twin(x))
        with torch.no_grad():
            for one in (model, twin):
                one.layers[0].q.weight.mul_(2)
        torch.testing.assert_close(compiled(x), twin(x))
    torch.testing.assert_close(compiled(x), twin(x))
    assert counter.linears()[:2] == [6, 3]


def replace_weight(block):
    block.k.weight = nn.Parameter(torch.ones(4, 8))


def replace_part(block):
    block.up = nn.Sequential(nn.Linear(8, 12))
    nn.init.ones_(block.up[0].weight), nn.init.zeros_(block.up[0].bias)


def hook_part(block):
    block.up.register_forward_hook(lambda module, args, output: output * 2)


def load(block):
    block.load_state_dict({name: torch.ones_like(value) for name, value in block.state_dict().items()})


def assign(block):
    state = {name: torch.ones_like(value) for name, value in block.state_dict().items()}
    block.load_state_dict(state, assign=True)


def double(block):
    block.double()


def parametrize(block):
    torch.manual_seed(0)
    nn.utils.parametrizations.weight_norm(block.gate)
    with torch.no_grad():
        block.gate.parametrizations.weight.original0.mul_(2)


def data(block):
    block.q.weight.data = torch.ones(8, 8)


CHANGES = [replace_weight, replace_part, load, assign, double, parametrize]


@pytest.mark.parametrize("change", [*CHANGES, hook_part, data])
def test_changed_before_it_is_compiled(counter, change):
    model = Model(1)
    twin = copy.deepcopy(model)
    fk.fuse(model)
    for one in (model, twin):
        change(one.layers[0])
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    x = torch.randn(2, 5, 8, dtype=twin.layers[0].q.weight.dtype)
    torch.testing.assert_close(compiled(x), twin(x))


@pytest.mark.parametrize("change", CHANGES)
def test_changed_after_it_was_compiled(counter, change):
    model = Model(1)
    twin = copy.deepcopy(model)
    fk.fuse(model)
    compiled = torch.compile(model, backend=counter)
    x = torch.randn(2, 5, 8)
    torch.testing.assert_close(compiled(x), twin(x))
    for one in (model, twin):
        change(one.layers[0])
    x = x.to(twin.layers[0].q.weight.dtype)
    torch.testing.assert_close(compiled(x), twin(x))


def test_functional_call_inside_of_compiled_code(counter):
    model = Model(1)
    twin = copy.deepcopy(model)
    fk.fuse(model)
    other = {name: torch.randn_like(value) for name, value in twin.named_parameters()}
    call = torch.compile(
        lambda parameters, x: torch.func.functional_call(model, parameters, (x,)),
        backend=counter,
        fullgraph=True,
    )
    x = torch.randn(2, 5, 8)
    torch.testing.assert_close(call(other, x), torch.func.functional_call(twin, other, (x,)))


def test_deep_copy_is_compiled_with_its_own_weights(counter):
    model = Model(1)
    twin = copy.deepcopy(model)
    fk.fuse(model)
    made = copy.deepcopy(model)
    with torch.no_grad():
        model.layers[0].q.weight.zero_()
    x = torch.randn(2, 5, 8)
    torch.testing.assert_close(torch.compile(made, backend=counter, fullgraph=True)(x), twin(x))
    assert counter.linears() == [3]


def test_weights_loaded_after_fusing_on_meta(counter):
    twin = Model(1)
    with torch.device("meta"):
        model = Model(1)
    fk.fuse(model)
    for name, value in twin.state_dict().items():
        path, _, own = name.rpartition(".")
        setattr(model.get_submodule(path), own, nn.Parameter(value.clone()))
    x = torch.randn(2, 5, 8)
    torch.testing.assert_close(torch.compile(model, backend=counter, fullgraph=True)(x), twin(x))


@pytest.mark.parametrize("strict", [True, False])
def test_export(strict):
    model = Model(1).eval()
    twin = copy.deepcopy(model)
    fk.fuse(model)
    x = torch.randn(2, 5, 8)
    program = torch.export.export(model, (x,), strict=strict)
    torch.testing.assert_close(program.module()(x), twin(x))
    assert set(program.state_dict) == set(twin.state_dict())


def test_hook_put_in_after_it_was_compiled_is_seen_where_it_is_seen_unfused(counter):
    # torch.compile does not guard on the hooks of modules (skip_nnmodule_hook_guards); some versions
    # of it see them in a fused module all the same.
    model = Model(1)
    twin = copy.deepcopy(model)
    fk.fuse(model)
    x = torch.randn(2, 5, 8)
    compiled = [torch.compile(one, backend=counter) for one in (model, twin)]
    torch.testing.assert_close(*[call(x) for call in compiled])
    for one in (model, twin):
        hook_part(one.layers[0])
    fused, unfused = (torch.allclose(call(x), one(x)) for call, one in zip(compiled, (model, twin)))
    assert fused or not unfused


def test_inductor():
    model = Model(1)
    twin = copy.deepcopy(model)
    fk.fuse(model)
    x = torch.randn(2, 5, 8)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(model, fullgraph=True)(x), twin(x))
