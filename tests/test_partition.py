"""What `split_module` makes of a graph, and what it refuses."""

from __future__ import annotations

import copy
import operator
import pickle
from typing import Any

import pytest
import torch
from functorch import make_fx
from torch import Tensor, fx, nn
from torch.fx.passes.split_module import split_module as torch_split_module

import graphopt
from graphopt.partition import split_module
from partitions import by_name, children, ops


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.scale = nn.Parameter(torch.randn(4))
        self.unused = nn.Linear(2, 2)

    def forward(self, x: Tensor, *rest: Tensor, factor: float = 2.0, **named: Tensor) -> Any:
        for layer in self.layers:
            x = layer(x) * self.scale
        return {"x": x * factor, "rest": rest[0] + named["bias"]}


def one_per_layer(node: fx.Node) -> int:
    """Partition of a node of the traced `Blocks`: one for each layer, with what follows."""
    return {
        "layers_0": 0,
        "mul": 0,
        "layers_1": 1,
        "mul_1": 1,
        "layers_2": 2,
        "mul_2": 2,
        "mul_3": 2,
        "getitem": 2,
        "getitem_1": 2,
        "add": 2,
    }[node.name]


def test_documented_form() -> None:
    def f(x: Tensor, y: Tensor) -> Any:
        first = x + y
        second = first * 2
        return second - first, x

    split = split_module(
        fx.symbolic_trace(f), None, by_name(add="a", mul="a", sub="b"), keep_original_node_name=True
    )
    assert ops(split) == [
        "placeholder x",
        "placeholder y",
        "call_module submod_a",
        "call_function getitem",
        "call_function getitem_1",
        "call_module submod_b",
        "output output",
    ]
    assert ops(split.submod_a) == [
        "placeholder x",
        "placeholder y",
        "call_function add",
        "call_function mul",
        "output output",
    ]
    (several,) = split.submod_a.graph.find_nodes(op="output")[0].args
    assert [node.name for node in several] == ["mul", "add"]  # by first use
    (one,) = split.submod_b.graph.find_nodes(op="output")[0].args
    assert one.name == "sub"


def test_signature_survives() -> None:
    module = fx.symbolic_trace(Blocks())
    split = split_module(module, None, one_per_layer, keep_original_node_name=True)
    x, y, b = torch.randn(3, 4)
    for arguments, keywords in [((x, y), {}), ((x, 0.5, y), {}), ((x, 3.0, y, x), {"other": x})]:
        if len(arguments) == 2:  # `factor` is positional in a traced module
            arguments = (x, 2.0, y)
        expected = module(*arguments, bias=b, **keywords)
        found = split(*arguments, bias=b, **keywords)
        assert {k: v.tolist() for k, v in found.items()} == {
            k: v.tolist() for k, v in expected.items()
        }
    placeholders = split.graph.find_nodes(op="placeholder")
    assert [(n.target, n.args) for n in placeholders] == [
        ("x", ()),
        ("factor", (2.0,)),
        ("*rest", ()),
        ("**named", ()),
    ]


def test_callback_sees_each_call_once_in_order() -> None:
    module = fx.symbolic_trace(Blocks())
    asked: list[fx.Node] = []

    def callback(node: fx.Node) -> int:
        asked.append(node)
        return 0

    split_module(module, None, callback)
    assert asked == [n for n in module.graph.nodes if n.op.startswith("call")]


def test_modules_are_shared_and_named() -> None:
    module = fx.symbolic_trace(Blocks())
    names = {"kept": "entry"}
    split = split_module(module, None, one_per_layer, names)
    assert names == {
        "kept": "entry",
        "submod_0.layers_0": "layers.0",
        "submod_1.layers_1": "layers.1",
        "submod_2.layers_2": "layers.2",
    }
    for new, old in names.items():
        if new != "kept":
            assert split.get_submodule(new) is module.get_submodule(old)
    assert split.scale is module.scale


def test_a_module_used_twice_and_names_that_collide() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Module()
            self.a.b = nn.Linear(4, 4)
            self.a_b = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.a.b(self.a_b(self.a.b(x)))

    module = fx.symbolic_trace(Model())
    names: dict[str, str] = {}
    split = split_module(module, None, lambda node: 0, names)
    assert names == {"submod_0.a_b": "a.b", "submod_0.a_b_1": "a_b"}
    x = torch.randn(2, 4)
    assert torch.equal(split(x), module(x))
    # Torch's takes both for one.
    theirs = torch_split_module(module, None, lambda node: 0)
    assert not torch.equal(theirs(x), module(x))


def test_training_mode_is_kept() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = nn.Module()
            self.block.inner = nn.Linear(4, 4)
            self.drop = nn.Dropout(0.5)

        def forward(self, x: Tensor) -> Tensor:
            return self.drop(x + self.block.inner.weight)

    split = split_module(fx.symbolic_trace(Model()).eval(), None, lambda node: node.name)
    assert [name for name, module in split.named_modules() if module.training] == []
    split = split_module(fx.symbolic_trace(Model()), None, lambda node: node.name)
    assert [name for name, module in split.named_modules() if not module.training] == []


def test_buffers_that_are_not_saved_stay_so() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Module()
            self.inner.register_buffer("saved", torch.ones(2))
            self.inner.register_buffer("derived", torch.ones(2), persistent=False)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.inner.saved + self.inner.derived

    model = Model()
    module = fx.GraphModule(model, fx.symbolic_trace(model).graph)
    owner = module.get_submodule("inner")
    owner.register_buffer("derived", model.inner.derived, persistent=False)
    split = split_module(module, None, lambda node: 0)
    assert [*split.state_dict()] == [*module.state_dict()] == ["inner.saved"]
    assert {name for name, _ in split.named_buffers()} == {"inner.saved", "inner.derived"}


def test_what_the_graph_module_lacks_is_found_in_the_root() -> None:
    model = Blocks()
    module = fx.symbolic_trace(model)
    del module.scale
    with pytest.raises(graphopt.PartitionError, match="%scale names scale, which the module does"):
        split_module(module, None, one_per_layer)
    assert split_module(module, model, one_per_layer).scale is model.scale


def test_input_graph_is_untouched() -> None:
    module = fx.symbolic_trace(Blocks())
    for node in module.graph.nodes:
        node.meta["note"] = [node.name]
    before = [(n, n.name, n.target, n.args, n.kwargs, dict(n.meta)) for n in module.graph.nodes]
    code, modules = module.code, dict(module.named_modules())
    split = split_module(module, None, one_per_layer)
    for node in [n for g in (split, *children(split).values()) for n in g.graph.nodes]:
        node.meta["note"] = "changed"
        node.name = f"changed_{node.name}"
    assert before == [
        (n, n.name, n.target, n.args, n.kwargs, dict(n.meta)) for n in module.graph.nodes
    ]
    assert (module.code, dict(module.named_modules())) == (code, modules)
    assert "submod_0" not in dict(module.named_children())


def test_pytree_signature_and_module_metadata_survive() -> None:
    class Model(nn.Module):
        def forward(self, batch: dict[str, Tensor], scale: list[Tensor]) -> dict[str, Tensor]:
            return {"sum": batch["a"] + batch["b"], "scaled": batch["a"] * scale[0]}

    batch = {"a": torch.randn(2), "b": torch.randn(2)}
    scale = [torch.randn(2)]
    module = torch.export.export(Model(), (batch, scale)).module()
    module.meta["note"] = "kept"
    split = split_module(module, None, lambda node: node.name)
    found, expected = split(batch, scale), module(batch, scale)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in found)
    assert split.meta["note"] == "kept"


def test_value_of_calls() -> None:
    def f(x: Tensor) -> Tensor:
        a = x.sin()
        return a.cos() * a

    module = make_fx(f, tracing_mode="fake")(torch.randn(3))
    split = split_module(module, None, by_name(sin=0, cos=0, mul=1))
    first, second = split.graph.find_nodes(op="call_module")
    assert [v.shape for v in first.meta["val"]] == [(3,), (3,)]
    assert second.meta["val"].shape == (3,)
    for item in split.graph.find_nodes(op="call_function", target=operator.getitem):
        assert item.meta["val"] is first.meta["val"][item.args[1]]


def test_a_whole_training_step() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters())

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    step(model, optimizer, torch.randn(4, 4))
    module = graphopt.capture(step, model, optimizer, torch.randn(4, 4)).graph_module
    calls = [n for n in module.graph.nodes if n.op.startswith("call")]
    number = {node: index * 7 // len(calls) for index, node in enumerate(calls)}
    split = split_module(module, None, number.__getitem__)

    def run(module: nn.Module) -> list[Tensor]:
        torch.manual_seed(0)
        inputs = []
        for node in split.graph.find_nodes(op="placeholder"):
            value = node.meta["val"]
            inputs.append(torch.rand(value.shape).to(value.dtype))
        leaves, _ = torch.utils._pytree.tree_flatten(module(*inputs))
        return [*inputs, *leaves]

    for ours, theirs in zip(run(split), run(module), strict=True):
        assert torch.equal(ours, theirs)


def test_stages_pickle_and_copy() -> None:
    module = fx.symbolic_trace(Blocks())
    split = split_module(module, None, one_per_layer)
    stage = split.submod_1
    x = torch.randn(2, 4)
    for other in (pickle.loads(pickle.dumps(stage)), copy.deepcopy(stage)):
        assert torch.equal(other(x, module.scale), stage(x, module.scale))
