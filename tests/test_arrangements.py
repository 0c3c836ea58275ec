"""Rules about views and concatenations of inner dimensions: what is equal by them is equal, and
what passes write in one way for another is equal by them."""

from __future__ import annotations

import operator
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

import graphopt
from graphopt.graph_utils import call_function_with_meta
from graphopt.verify.evaluation import evaluate_graph
from graphopt.verify.terms import TensorValue, Terms

aten = torch.ops.aten

SHAPES = [
    (2, 3, 4),
    (4, 6),
    (6, 4),
    (24,),
    (2, 12),
    (1, 2, 3, 4),
    (3, 1, 8),
    (2, 2, 2, 3),
    (4, 3, 2),
]


def permuted(draw: Random, call: Any, x: fx.Node, _: fx.Node) -> fx.Node:
    dims = list(range(x.meta["val"].dim()))
    draw.shuffle(dims)
    return call(aten.permute.default, x, dims)


def reshaped(draw: Random, call: Any, x: fx.Node, _: fx.Node) -> fx.Node:
    count = x.meta["val"].numel()
    shapes = [[-1, 1], [1, -1], [-1], *([k, -1] for k in (2, 3, 4) if count % k == 0)]
    shapes += [list(shape) for shape in SHAPES if count == 24]
    return call(aten.reshape.default, x, draw.choice(shapes))


def sliced(draw: Random, call: Any, x: fx.Node, _: fx.Node) -> fx.Node:
    dim = draw.randrange(x.meta["val"].dim())
    low = draw.randrange(x.meta["val"].shape[dim])
    high = draw.randrange(low, x.meta["val"].shape[dim]) + 1
    return call(aten.slice.Tensor, x, dim, low, high)


def selected(draw: Random, call: Any, x: fx.Node, _: fx.Node) -> fx.Node:
    if x.meta["val"].dim() < 2:
        return x
    dim = draw.randrange(-x.meta["val"].dim(), x.meta["val"].dim())
    return call(aten.select.int, x, dim, draw.randrange(x.meta["val"].shape[dim]))


def divided(draw: Random, call: Any, x: fx.Node, _: fx.Node) -> fx.Node:
    dim = draw.randrange(x.meta["val"].dim())
    parts = call(aten.split.Tensor, x, draw.randrange(1, x.meta["val"].shape[dim] + 1), dim)
    items = [call(operator.getitem, parts, i) for i in range(len(parts.meta["val"]))]
    return call(aten.cat.default, items, dim) if draw.random() < 0.5 else draw.choice(items)


def joined(draw: Random, call: Any, x: fx.Node, y: fx.Node) -> fx.Node:
    if (x.meta["val"].shape, x.meta["val"].dtype) != (y.meta["val"].shape, y.meta["val"].dtype):
        y = x
    if draw.random() < 0.5:
        return call(aten.stack.default, [x, y], draw.randrange(x.meta["val"].dim() + 1))
    return call(aten.cat.default, [x, y], draw.randrange(x.meta["val"].dim()))


def added(draw: Random, call: Any, x: fx.Node, y: fx.Node) -> fx.Node:
    same = x.meta["val"].shape == y.meta["val"].shape
    return call(aten.add.Tensor, x, y if same else 1.5)


def cast(draw: Random, call: Any, x: fx.Node, _: fx.Node) -> fx.Node:
    return call(aten._to_copy.default, x, dtype=draw.choice([torch.float64, torch.bfloat16]))


def of_zeros(draw: Random, call: Any, x: fx.Node, _: fx.Node) -> fx.Node:
    return call(draw.choice([aten.zeros_like.default, aten.ones_like.default]), x)


STEPS = [permuted, permuted, reshaped, reshaped, sliced, selected, divided, joined, added, cast]


def random_graph(draw: Random) -> fx.Graph:
    graph = fx.Graph()
    with FakeTensorMode():
        pool = []
        for name in "xy":
            node = graph.placeholder(name)
            node.meta["val"] = torch.empty(2, 3, 4)
            pool.append(node)

    def call(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return call_function_with_meta(graph, target, args, kwargs)

    for _ in range(90):
        x, y = draw.choice(pool), draw.choice(pool)
        new = draw.choice([*STEPS, of_zeros])(draw, call, x, y)
        if new.meta["val"].numel() <= 96:
            pool.append(new)
    graph.output(([], [], []))
    return graph


@pytest.mark.parametrize("seed", range(12))
def test_equal_terms_are_equal_elements(seed: int) -> None:
    graph = random_graph(Random(seed))
    inputs = [torch.randn(2, 3, 4), torch.randn(2, 3, 4)]
    run = fx.Interpreter(fx.GraphModule({}, graph), garbage_collect_values=False)
    run.run(*inputs)
    found: dict[Any, Tensor] = {}
    met = 0
    for node, value in evaluate_graph(graph, Terms()).made:
        if isinstance(value, TensorValue):
            elements = run.env[node].reshape(-1)
            first = found.setdefault((value.segments, value.dtype), elements)
            met += first is not elements
            assert torch.equal(first, elements), node.format_node()
    assert met > 5


PAIRS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "chunk as slice": (lambda x, y: x.chunk(3, -1)[1] * 2, lambda x, y: x[..., 4:8] * 2),
    "chunk as narrow": (lambda x, y: x.chunk(3, -1)[1] * 2, lambda x, y: x.narrow(-1, 4, 4) * 2),
    "chunk as select": (
        lambda x, y: x.chunk(3, -1)[1] * 2,
        lambda x, y: x.view(2, 4, 3, 4).select(2, 1) * 2,
    ),
    "select as slice": (lambda x, y: x.select(1, 2) * 2, lambda x, y: x[:, 2:3].squeeze(1) * 2),
    "unbind as select": (lambda x, y: x.unbind(1)[1] * 2, lambda x, y: x.select(1, 1) * 2),
    "slices of slices": (lambda x, y: x[..., 2:9][..., 1:4] * 2, lambda x, y: x[..., 3:6] * 2),
    "a slice of parts joined": (
        lambda x, y: torch.cat([x, y], -1)[..., 12:] * 2,
        lambda x, y: y * 2,
    ),
    "parts joined again": (lambda x, y: torch.cat(x.split(5, -1), -1) * 2, lambda x, y: x * 2),
    "stack as cat": (
        lambda x, y: torch.stack([x, y], 1) * 2,
        lambda x, y: torch.cat([x.unsqueeze(1), y.unsqueeze(1)], 1) * 2,
    ),
    "views and transposes": (
        lambda x, y: x.view(2, 48).t() * 2,
        lambda x, y: x.permute(1, 2, 0).reshape(48, 2) * 2,
    ),
    "transposed around a dimension of one": (
        lambda x, y: x.transpose(1, 2).unsqueeze(1).transpose(2, 3).squeeze(1) * 2,
        lambda x, y: x * 2,
    ),
    "a sum through a slice": (
        lambda x, y: (x + y)[..., 3:] * 2,
        lambda x, y: (x[..., 3:] + y[..., 3:]) * 2,
    ),
    "a sum through parts joined": (
        lambda x, y: torch.cat([x, y], -1) + torch.cat([y, x], -1),
        lambda x, y: torch.cat([x + y, y + x], -1),
    ),
    "a cast through a transpose": (
        lambda x, y: x.transpose(1, 2).half() * 2,
        lambda x, y: x.half().transpose(1, 2) * 2,
    ),
    "a cast of ones": (
        lambda x, y: x + torch.ones(2, 4, 12, dtype=torch.int64).float(),
        lambda x, y: x + torch.ones(2, 4, 12),
    ),
}


def graph_of(function: Callable[..., Any], tensors: tuple[Tensor, ...]) -> fx.GraphModule:
    def step(_: torch.nn.Module, x: Tensor, y: Tensor) -> Any:
        return function(x, y)

    return graphopt.capture(step, torch.nn.Identity(), *tensors).graph_module


@pytest.mark.parametrize("name", PAIRS)
def test_one_way_for_another(name: str) -> None:
    tensors = torch.randn(2, 4, 12), torch.randn(2, 4, 12)
    before, after = (graph_of(function, tensors) for function in PAIRS[name])
    assert torch.equal(before(*tensors)[0][0], after(*tensors)[0][0])
    report = graphopt.verify.check_equivalence(before, after)
    assert report.ok, str(report)


def shifted_often(x: Tensor, _: Tensor) -> Tensor:
    """Rows and columns are shifted in turn, so that each arrangement is one of the one before."""
    for _ in range(20):
        x = torch.cat([x[:, 1:], x[:, :1]], 1)
        x = torch.cat([x[..., 1:], x[..., :1]], -1) * 2
        x = x.to(torch.float64 if x.dtype == torch.float32 else torch.float32)
    return x


def test_arrangements_of_arrangements_are_gone_through_once() -> None:
    tensors = torch.randn(2, 4, 12), torch.randn(2, 4, 12)
    gm = graph_of(shifted_often, tensors)
    terms = Terms()
    evaluate_graph(gm, terms)
    assert 0 < len(terms.rearranged) < len(gm.graph.nodes) ** 2
    assert graphopt.verify.check_equivalence(gm, gm).ok


OTHERS: list[Callable[..., Any]] = [
    lambda x, y: x[..., 4:8] * 2,
    lambda x, y: x[..., 3:7] * 2,
    lambda x, y: y[..., 4:8] * 2,
    lambda x, y: torch.cat([x, y], -1)[..., 10:14] * 2,
    lambda x, y: x.view(2, 12, 4)[:, 1:5] * 2,
    lambda x, y: x[..., 4:8].transpose(1, 2).contiguous() * 2,
]


def test_other_columns_differ() -> None:
    tensors = torch.randn(2, 4, 12), torch.randn(2, 4, 12)
    graphs = [graph_of(function, tensors) for function in OTHERS]
    for i, before in enumerate(graphs):
        for j, after in enumerate(graphs):
            assert graphopt.verify.check_equivalence(before, after).ok == (i == j)
