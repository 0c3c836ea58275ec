"""Random changes of captured steps: those that keep all dependencies are accepted, others not."""

from __future__ import annotations

import heapq
import random
from functools import cache
from itertools import combinations
from typing import Any

import networkx as nx
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import fx

import graphopt
from graphopt.graph_utils import (
    find_nodes,
    get_output,
    get_outputs,
    is_operator,
    is_random,
    same_kind,
)
from graphopt.ir.operators import operator_of
from graphopt.verify import check_dependencies, dependency_graph
from graphs import inputs_of, training_step
from rewrites import fuse, in_order, reduced, snapshot
from slices import examples
from twins import assert_same
from zoo import MLP, MODELS, train_step

aten = torch.ops.aten
OPTIMIZERS = ("fused", "foreach", "loop")
MODELS_TRIED = ("mlp", "convnet")
EXAMPLES = settings(max_examples=examples(8))


@cache
def original(model: str, optimizer: str) -> fx.GraphModule:
    """A step with AdamW, captured for a group of one rank: it has collectives, which nobody runs.

    The MLP has several layers of one shape.
    """
    torch.manual_seed(0)
    module = MLP(width=8, layers=3) if model == "mlp" else MODELS[model].make()
    form = {"foreach": optimizer == "foreach", "fused": optimizer == "fused"}
    adamw = torch.optim.AdamW(module.parameters(), **form)
    batch = MODELS[model].batch(0)
    train_step(module, adamw, *batch)
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        parallel = graphopt.DataParallel()
        return graphopt.capture(train_step, module, adamw, *batch, parallel=parallel).graph_module
    finally:
        torch.distributed.destroy_process_group()


def captured(model: str, optimizer: str) -> tuple[fx.Graph, fx.GraphModule, Any]:
    """The captured graph, a copy to be changed, and which node of it is which of the graph."""
    before = original(model, optimizer)
    graph, copies = snapshot(before)
    correspondence = {copy: node for node, copy in copies.items()}
    return before.graph, fx.GraphModule(before, graph), correspondence


def shuffled(graph_module: fx.GraphModule, seed: int) -> list[fx.Node]:
    """A random one of the orders that the dependency graph allows."""
    graph, draw = dependency_graph(graph_module), random.Random(seed)
    missing = dict(graph.in_degree())
    ready = [(draw.random(), node.name, node) for node in graph if not missing[node]]
    heapq.heapify(ready)
    order = []
    while ready:
        _, _, node = heapq.heappop(ready)
        order.append(node)
        for later in graph.successors(node):
            missing[later] -= 1
            if not missing[later]:
                heapq.heappush(ready, (draw.random(), later.name, later))
    return order


@pytest.mark.parametrize("model", MODELS_TRIED)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@EXAMPLES
@given(seed=st.integers(0, 10**6), size=st.integers(1, 5))
def test_allowed_orders_are_accepted(model: str, optimizer: str, seed: int, size: int) -> None:
    """Those of the step as it was captured, and those of the step in buckets."""
    before, step, correspondence = captured(model, optimizer)
    fuse(step, size)
    in_order(step, shuffled(step, seed))
    step.graph.lint()
    check_dependencies(before, step, correspondence=correspondence).raise_for_failure()
    check_dependencies(step, before).raise_for_failure()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@EXAMPLES
@given(seed=st.integers(0, 10**6))
def test_allowed_orders_compute_the_same(optimizer: str, seed: int) -> None:
    step = training_step(3, optimizer=optimizer, ranks=None, dropout=True)
    expected, values = run(step)
    in_order(step, shuffled(step, seed))
    step.graph.lint()
    step.recompile()
    assert_same(run(step), (expected, values), "in another order")


def run(step: fx.GraphModule) -> Any:
    inputs = inputs_of(step)
    torch.manual_seed(0)
    return step(*inputs), inputs


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@EXAMPLES
@given(data=st.data())
def test_a_missing_wait_is_found(optimizer: str, data: st.DataObject) -> None:
    before, step, correspondence = captured("mlp", optimizer)
    wait = data.draw(st.sampled_from(reduced(step)))
    replacement = data.draw(st.sampled_from([wait.args[0], wait.args[0].args[0]]))
    wait.replace_all_uses_with(replacement)
    if data.draw(st.booleans()):
        step.graph.erase_node(wait)
    assert not check_dependencies(before, step, correspondence=correspondence).ok


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@EXAMPLES
@given(data=st.data())
def test_gradients_for_the_wrong_parameters_are_found(optimizer: str, data: st.DataObject) -> None:
    before, step, correspondence = captured("mlp", optimizer)
    gradients = reduced(step)
    if data.draw(st.booleans()):
        fuse(step, data.draw(st.integers(2, 8)))
        parts = find_nodes(step.graph, lambda n: n.target is aten.split_with_sizes.default)
        gradients = [view for part in parts for item in part.users for view in item.users]
    pairs = [pair for pair in combinations(gradients, 2) if same_kind(*pair)]
    first, second = data.draw(st.sampled_from(pairs))
    exchanged = dict(zip((first, second), (second, first), strict=True))
    for reader in {*first.users, *second.users}:
        reader.args = fx.node.map_arg(reader.args, lambda n: exchanged.get(n, n))
    assert not check_dependencies(before, step, correspondence=correspondence).ok


@pytest.mark.parametrize("model", MODELS_TRIED)
@EXAMPLES
@given(data=st.data())
def test_another_input_is_found_if_a_dependency_is_lost(model: str, data: st.DataObject) -> None:
    """Of a reader of single tensors: it must still be computed from what it read."""
    before, step, correspondence = captured(model, "loop")
    nodes = list(step.graph.nodes)
    readers = [n for n in nodes if n.op == "call_function" and not _is_collected(n)]
    reader = data.draw(st.sampled_from(readers))
    sources = (
        reader.args[1:2] if is_operator(reader.target, "aten::copy_") else reader.all_input_nodes
    )
    sources = [n for n in sources if not _is_collected(n)]
    computed = [n for n in nodes if n < reader and n.op == "call_function" and not _is_alias(n)]
    pairs = [(a, b) for a in sources for b in computed if a is not b and same_kind(a, b)]
    assume(pairs)
    old, new = data.draw(st.sampled_from(pairs))
    reader.replace_input_with(old, new)
    data_only = nx.DiGraph((source, n) for n in nodes for source in n.all_input_nodes)
    kept = old in data_only and old in nx.ancestors(data_only, reader)
    assert check_dependencies(before, step, correspondence=correspondence).ok == kept


def _is_collected(node: fx.Node) -> bool:
    """Whether a node stands for pieces of others: its own place in the graph says nothing."""
    traits = operator_of(node)
    return traits.item or traits.collective or traits.wait or traits.elements == "split"


def _is_alias(node: fx.Node) -> bool:
    """Whether a node may share the storage of a placeholder, which must not be read later."""
    return is_operator(node.target, "aten::copy_") or operator_of(node).view


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@EXAMPLES
@given(data=st.data())
def test_a_lost_update_is_found(optimizer: str, data: st.DataObject) -> None:
    before, step, correspondence = captured("convnet", optimizer)
    update = data.draw(st.sampled_from(get_outputs(step.graph).updates))
    state, value = update.args
    update.replace_all_uses_with(value)
    step.graph.erase_node(update)
    report = check_dependencies(before, step, correspondence=correspondence)
    assert f"%{state.name} is not updated any more" in str(report)


@EXAMPLES
@given(data=st.data())
def test_random_numbers_in_another_order_are_found(data: st.DataObject) -> None:
    """One random node moves behind the next, with all that needs it first."""
    before, step, correspondence = captured("checkpointed", "loop")
    drawn = [node for node in step.graph.nodes if is_random(node)]
    index = data.draw(st.integers(0, len(drawn) - 2))
    first, second = drawn[index : index + 2]
    graph = nx.DiGraph((source, n) for n in step.graph.nodes for source in n.all_input_nodes)
    assume(first not in nx.ancestors(graph, second))
    moved = {first, *nx.descendants(graph, first)} - {get_output(step.graph)}
    order = [n for n in step.graph.nodes if n in moved and n < second]
    for node in reversed(order):
        second.append(node)
    step.graph.lint()
    report = check_dependencies(before, step, correspondence=correspondence)
    assert "draws random numbers where" in str(report)


@pytest.mark.parametrize("model", ["checkpointed", "convnet", "gpt", "shared-storage"])
def test_buckets_of_models(model: str) -> None:
    for size, optimizer in ((1, "loop"), (3, "fused"), (1000, "foreach")):
        before, step, correspondence = captured(model, optimizer)
        fuse(step, size)
        check_dependencies(before, step, correspondence=correspondence).raise_for_failure()
        check_dependencies(step, before).raise_for_failure()
