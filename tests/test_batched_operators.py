"""Small operators of optimizers on lists: the same bits, in an order that is right."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx, nn

import graphopt
from graphopt.executable.batching import LIST_BYTES, SMALL_BYTES, batch_small_operators
from graphopt.graph_utils import call_function_with_meta, evaluate
from graphopt.verify.values.call_terms import CALLED

aten = torch.ops.aten


def train_step(model: nn.Module, optimizer: Any, x: torch.Tensor) -> torch.Tensor:
    """Forward, backward, update."""
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


def trained(
    kind: str, options: dict[str, Any], compiled: bool, dtype: torch.dtype, width: int = 6
) -> tuple[list[torch.Tensor], Any]:
    """All that six steps leave, and the graph that runs."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(5, width), nn.Tanh(), nn.Linear(width, width), nn.Linear(width, 3)
    )
    model = model.to(dtype)
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.03, **options)
    step = graphopt.compile(train_step) if compiled else train_step
    losses = [step(model, optimizer, torch.randn(4, 5, dtype=dtype)) for _ in range(6)]
    states = [v for of in optimizer.state.values() for v in of.values() if torch.is_tensor(v)]
    return [*losses, *model.parameters(), *states], graph_of(step) if compiled else None


def graph_of(step: Any) -> fx.Graph:
    """What runs in a step."""
    graph: fx.Graph = step._entries[0].module.first_executable
    return graph


def listed(graph: fx.Graph) -> Counter[str]:
    """How often operators on lists run, by name."""
    schemas = (getattr(node.target, "_schema", None) for node in graph.nodes)
    names = (schema.name for schema in schemas if schema is not None)
    return Counter(name for name in names if name.startswith("aten::_foreach_"))


OPTIMIZERS = [
    ("SGD", {"foreach": False, "momentum": 0.9, "weight_decay": 0.1}),
    ("SGD", {"foreach": False, "momentum": 0.9, "nesterov": True}),
    ("Adam", {"foreach": False, "weight_decay": 0.1, "amsgrad": True}),
    ("AdamW", {"foreach": False}),
    ("RMSprop", {"foreach": False, "centered": True, "momentum": 0.9}),
    ("Adagrad", {"foreach": False}),
    ("Adadelta", {"foreach": False}),
    ("Adamax", {"foreach": False}),
    ("NAdam", {"foreach": False}),
    ("RAdam", {"foreach": False}),
    ("ASGD", {"foreach": False}),
    ("Rprop", {"foreach": False}),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("kind", "options"), OPTIMIZERS, ids=lambda value: str(value))
def test_looping_optimizers(kind: str, options: dict[str, Any], dtype: torch.dtype) -> None:
    eager, _ = trained(kind, options, False, dtype)
    found, graph = trained(kind, options, True, dtype)
    assert all(torch.equal(a, b) for a, b in zip(eager, found, strict=True))
    lists = listed(graph)
    assert lists or dtype is torch.bfloat16
    for node in graph.nodes:
        if "_foreach_" in str(node.target):  # counts are float32 whatever the parameters are
            kinds = {entry.meta["val"].dtype for entry in node.args[0]}
            assert kinds <= {torch.float32, torch.float64}


def test_adam_takes_one_call_for_each_operator() -> None:
    _, graph = trained("Adam", {"foreach": False}, True, torch.float32)
    once = {f"aten::_foreach_{name}_" for name in ("lerp", "mul", "addcmul", "div", "addcdiv")}
    found = listed(graph)
    assert {name: found[name] for name in once} == dict.fromkeys(once, 1)
    assert found["aten::_foreach_add_"] == 2  # counts, and eps


def test_large_parameters_keep_calls_of_their_own() -> None:
    width = int((SMALL_BYTES // 4) ** 0.5) + 1
    _, graph = trained("AdamW", {"foreach": False}, True, torch.float32, width)
    lists = [n.args[0] for n in graph.nodes if "_foreach_lerp" in str(n.target)]
    assert [len(entries) for entries in lists] == [5]  # all but the square weight


# ------------------------------------------------------------------------------- graphs at random

UNARY = [aten.sqrt.default, aten.neg.default, aten.abs.default, aten.reciprocal.default]
BINARY = [aten.mul.Tensor, aten.div.Tensor, aten.add.Tensor, aten.sub.Tensor]
SHAPES = ([3], [2, 2], [])


def graph_at_random(draw: random.Random) -> fx.GraphModule:
    """Operators of all kinds on tensors of some shapes, with updates of inputs in between."""
    graph = fx.Graph()
    values: list[fx.Node] = []
    for index in range(draw.randint(2, 5)):
        node = graph.placeholder(f"x{index}")
        value = fake(draw.choice(SHAPES))
        node.meta["val"] = value.t() if value.ndim == 2 and draw.random() < 0.5 else value
        values.append(node)
    inputs, updated, updates = list(values), set[fx.Node](), []
    for _ in range(draw.randint(5, 30)):
        first = draw.choice([v for v in values if v not in updated])
        shape = first.meta["val"].shape
        alike = [v for v in values if v not in updated and v.meta["val"].shape == shape]
        number = draw.choice([0.5, 2, 1])
        kind = draw.randint(0, 5)
        owner = draw.choice(inputs)
        if (
            kind == 0
            and owner not in updated
            and any(
                v.meta["val"].shape == owner.meta["val"].shape and v not in inputs for v in alike
            )
        ):
            source = next(v for v in reversed(alike) if v not in inputs)
            updates.append(added(graph, aten.copy_.default, owner, source))
            updated.add(owner)
            if len(updated) == len(inputs):
                break
            continue
        if kind <= 1:
            new = added(graph, draw.choice(UNARY), first)
        elif kind == 2:
            new = added(graph, draw.choice(BINARY), first, number)
        elif kind == 3:
            new = added(graph, aten.add.Tensor, first, draw.choice(alike), alpha=number)
        elif kind == 4:
            new = added(graph, aten.lerp.Scalar, first, draw.choice(alike), number)
        else:
            three = first, draw.choice(alike), draw.choice(alike)
            new = added(graph, aten.addcmul.default, *three, value=number)
        values.append(new)
    results = [v for v in values if v not in inputs]
    graph.output((results, updates, []))
    return fx.GraphModule({}, graph)


def fake(shape: list[int]) -> torch.Tensor:
    """Of a placeholder."""
    with MODE:
        return torch.empty(shape)


MODE = graphopt._compat.new_fake_mode()


def added(graph: fx.Graph, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """A node of an optimizer."""
    node = call_function_with_meta(graph, target, args, kwargs)
    node.meta["phase"] = "optimizer"
    return node


def everything(gm: fx.GraphModule) -> list[torch.Tensor]:
    """What a graph returns, and what it leaves in its inputs."""
    generator = torch.Generator().manual_seed(0)
    inputs = [
        torch.randn(node.meta["val"].shape, generator=generator)
        for node in gm.graph.find_nodes(op="placeholder")
    ]
    results, _, _ = gm(*inputs)
    return [*results, *inputs]


def assert_metadata_as_computed(graph: fx.Graph) -> None:
    """What a list gives is noted as what its operators gave, and not computed anew."""
    for node in graph.nodes:
        if "_foreach_" in str(node.target):
            noted, computed = node.meta["val"], evaluate(node.target, node.args, node.kwargs)
            kinds = [[(x.dtype, x.shape, x.stride()) for x in v] for v in (noted, computed)]
            assert kinds[0] == kinds[1], node


@settings(max_examples=60, deadline=None)
@given(st.randoms(use_true_random=False))
def test_graphs_at_random(draw: random.Random) -> None:
    gm = graph_at_random(draw)
    expected = everything(gm)
    count = len(gm.graph.nodes)
    batched = batch_small_operators(gm.graph)
    gm.graph.lint()
    gm.recompile()
    assert batched or len(gm.graph.nodes) == count
    assert_metadata_as_computed(gm.graph)
    for a, b in zip(expected, everything(gm), strict=True):
        assert torch.equal(a.view(torch.int32), b.view(torch.int32)) or torch.equal(
            a.isnan(), b.isnan()
        )


def test_lists_fit_into_a_cache() -> None:
    graph = fx.Graph()
    numbers = SMALL_BYTES // 4
    inputs = [graph.placeholder(f"x{i}") for i in range(20)]
    for node in inputs:
        node.meta["val"] = fake([numbers])
    results = [added(graph, aten.sqrt.default, node) for node in inputs]
    graph.output((results, [], []))
    assert batch_small_operators(graph) == 20
    lists = [node.args[0] for node in graph.nodes if node.target is aten._foreach_sqrt.default]
    assert [len(entries) for entries in lists] == [8, 8, 4]
    assert all(len(entries) * SMALL_BYTES <= LIST_BYTES for entries in lists)


DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("target", CALLED, ids=str)
def test_what_lists_call_for_an_entry(target: Any, dtype: torch.dtype) -> None:
    """The rule of proofs: on CPUs a list operator gives what the other one gives for each entry."""
    if dtype.is_complex and "imum" in str(target):
        pytest.skip("complex numbers have no order")
    called, names, _ = CALLED[target]
    generator = torch.Generator().manual_seed(0)
    shapes = ([7], [1, 33], [], [64, 3])
    arguments: dict[str, Any] = {}
    for argument in target._schema.arguments:
        if "Tensor[]" in str(argument.type) or str(argument.type) == "List[Tensor]":
            arguments[argument.name] = [
                torch.randn(shape, generator=generator, dtype=torch.float32).to(dtype)
                for shape in shapes
            ]
        elif "List" in str(argument.type):
            arguments[argument.name] = [0.3, 1, -1.7, 1e-3]
        else:
            arguments[argument.name] = 0.7
    results = target(**arguments)
    for index, found in enumerate(results):
        one = {
            names.get(name, name): value[index] if isinstance(value, list) else value
            for name, value in arguments.items()
        }
        expected = called(**one)
        assert found.dtype is expected.dtype and found.stride() == expected.stride()
        assert torch.equal(
            found.view(torch.uint8) if found.dim() else found,
            expected.view(torch.uint8) if found.dim() else expected,
        )
