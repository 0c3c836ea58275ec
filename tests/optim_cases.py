"""Graphs with optimizers, captured and drawn by hand, for the tests of `graphopt.optim`."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.optim import Optimizer

import graphopt
from graphopt import _compat
from graphopt.graph_utils import call_function_with_meta, evaluate, get_outputs
from graphopt.iter_graph import copy_graph
from graphopt.tracing.call import Call
from twins import assert_same
from zoo import MODELS, OPTIMIZERS, train_step

aten = torch.ops.aten

Case = tuple[fx.GraphModule, list[Tensor]]
"""A graph and the values to call it with."""


def captured(
    optimizer: str | Callable[[nn.Module], Optimizer],
    model: str = "mlp",
    step: Callable[..., Any] = train_step,
    after: int = 2,
) -> Case:
    """The step that follows `after` eager ones."""
    torch.manual_seed(0)
    built = MODELS[model].make()
    if isinstance(optimizer, str):
        optimizers = [OPTIMIZERS[optimizer](built.parameters())]
    else:
        optimizers = [optimizer(built)]
    for index in range(after):
        step(built, *optimizers, *MODELS[model].batch(index))
    args = (built, *optimizers, *MODELS[model].batch(after))
    found = graphopt.capture(step, *args, warm=False)
    values = found.live.live_values(Call(step, args, {}))
    return found.graph_module, [value.detach().clone() for value in values]


def duplicate(graph_module: fx.GraphModule) -> fx.GraphModule:
    """A copy to change."""
    return fx.GraphModule(graph_module, copy_graph(graph_module.graph)[0])


def run(graph_module: fx.GraphModule, values: Sequence[Tensor]) -> list[Any]:
    """User results, carried values, and what the inputs hold afterwards."""
    graph_module.graph.lint()
    graph_module.recompile()
    torch.manual_seed(0)
    inputs = [value.clone() for value in values]
    with torch.no_grad():
        results, _, carried = graph_module(*inputs)
    return [results, carried, inputs]


def assert_same_run(graph_module: fx.GraphModule, other: fx.GraphModule, case: Case) -> None:
    """Equal bits, and metadata that a new evaluation confirms."""
    assert_same(run(graph_module, case[1]), run(other, case[1]), "run")
    for node in graph_module.graph.nodes:
        if node.target is operator.getitem or str(node.target).startswith("aten._f"):
            assert described(node.meta["val"]) == described(expected(node)), node.format_node()


def expected(node: fx.Node) -> Any:
    """What a list operator, or the choice of an item, gives."""
    if not str(node.target).startswith("aten._fused"):
        return evaluate(node.target, node.args, node.kwargs)
    # Symbolic settings cannot be given to a fused optimizer, whose results are like its arguments.
    return [[entry.meta["val"] for entry in node.args[i]] for i in range(len(node.meta["val"]))]


def described(value: Any) -> Any:
    """Shapes and types of tensors in a nest, or the type of a number."""
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype
    if isinstance(value, (list, tuple)):
        return [described(entry) for entry in value]
    return type(value)


def gradients(graph_module: fx.GraphModule) -> list[fx.Node]:
    """What the backward computes and something after it reads."""
    return [
        node
        for node in graph_module.graph.nodes
        if node.meta.get("phase") == "backward"
        and any(user.meta.get("phase") != "backward" for user in node.users)
    ]


def updated(graph_module: fx.GraphModule) -> list[Any]:
    """The inputs that the graph updates, in the order of its output."""
    return [copy.args[0] for copy in get_outputs(graph_module.graph).updates]


def called(graph_module: fx.GraphModule, target: Any) -> list[fx.Node]:
    """The calls of an operator overload."""
    return [node for node in graph_module.graph.nodes if node.target is target]


class Sheet:
    """A graph drawn by hand: state `w0, w1, …`, gradients from a batch `x`, and updates."""

    def __init__(self, count: int = 3) -> None:
        self.graph = fx.Graph()
        self._mode = _compat.new_fake_mode()
        self.weights = [self.input(f"w{i}", 2 + i) for i in range(count)]
        self.moments = [self.input(f"m{i}", 2 + i) for i in range(count)]
        self.squares = [self.input(f"v{i}", 2 + i) for i in range(count)]
        self.steps = [self.input(f"t{i}") for i in range(count)]
        self.x = self.input("x", 1, kind="user_input")
        self.updates: list[fx.Node] = []

    def input(self, name: str, *shape: int, kind: str = "optimizer_state") -> fx.Node:
        node = self.graph.placeholder(name)
        with self._mode:
            node.meta.update(val=torch.empty(shape), kind=kind)
        return node

    def call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        return call_function_with_meta(self.graph, target, args, kwargs)

    def items(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> list[fx.Node]:
        node = self.call(target, *args, **kwargs)
        return [self.call(operator.getitem, node, i) for i in range(len(node.meta["val"]))]

    def gradients(self) -> list[fx.Node]:
        return [self.call(aten.mul.Tensor, weight, self.x) for weight in self.weights]

    def store(self, states: Sequence[fx.Node], values: Sequence[fx.Node]) -> list[fx.Node]:
        pairs = zip(states, values, strict=True)
        copies = [self.call(aten.copy_.default, state, value) for state, value in pairs]
        self.updates += copies
        return copies

    def adam(self, grads: Sequence[fx.Node], steps: Sequence[fx.Node]) -> fx.Node:
        lists = [self.weights, list(grads), self.moments, self.squares, [], list(steps)]
        settings = {"beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1, "eps": 1e-8}
        flags = {"amsgrad": False, "maximize": False}
        return self.call(aten._fused_adam.default, *lists, lr=0.1, **settings, **flags)

    def finish(self, *results: fx.Node) -> Case:
        self.graph.output((list(results), self.updates, []))
        module = fx.GraphModule(nn.Module(), self.graph)
        generator = torch.Generator().manual_seed(0)
        inputs = [node for node in self.graph.nodes if node.op == "placeholder"]
        shapes = [node.meta["val"].shape for node in inputs]
        return module, [torch.rand(shape, generator=generator) for shape in shapes]
