"""Waits for several tensors, which torch 2.15 introduced, are waits for one tensor each."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.distributed import _functional_collectives as funcol
from torch.optim import SGD, Optimizer

import graphopt
from graphopt.comm import get_all_comm_blocks
from graphopt.comm.waits import split_waits
from graphopt.graph_utils import find_nodes, is_collective, is_wait
from graphopt.verify import check_dependencies, dependency_graph

c10d = torch.ops._c10d_functional


@pytest.fixture(scope="module", autouse=True)
def _wait_tensors() -> Iterator[None]:
    """The operator, in a torch that has none."""
    if hasattr(c10d, "wait_tensors"):
        yield
        return
    library = torch.library.Library("_c10d_functional", "FRAGMENT")
    library.define("wait_tensors(Tensor[] tensors) -> Tensor[]")
    library.impl("wait_tensors", lambda tensors: list(map(c10d.wait_tensor, tensors)), "CPU")
    library.impl("wait_tensors", lambda tensors: list(tensors), "Meta")
    yield
    library._destroy()


def coalesced(items: bool) -> tuple[fx.GraphModule, list[fx.Node], fx.Node]:
    """A sum of two tensors over the ranks, waited for at once: as a list, or item by item."""
    graph = fx.Graph()
    inputs = [graph.placeholder(name) for name in "xy"]
    values = [torch.empty(size, device="meta") for size in (3, 4)]
    for node, value in zip(inputs, values, strict=True):
        node.meta["val"] = value
    launch = graph.call_function(c10d.all_reduce_coalesced.default, (inputs, "sum", "0"))
    launch.meta["val"] = [torch.empty_like(value) for value in values]
    waited: Any = launch
    if items:
        waited = [graph.call_function(operator.getitem, (launch, index)) for index in range(2)]
        for node, value in zip(waited, launch.meta["val"], strict=True):
            node.meta["val"] = value
    waits = graph.call_function(c10d.wait_tensors.default, (waited,))
    waits.meta["val"] = list(launch.meta["val"])
    first = graph.call_function(operator.getitem, (waits, 0))
    first.meta["val"] = waits.meta["val"][0]
    used = graph.call_function(torch.ops.aten.neg.default, (first,))
    used.meta["val"] = torch.empty_like(first.meta["val"])
    graph.output(([used, waits], [], []))
    return fx.GraphModule(nn.Module(), graph), inputs, waits


@pytest.mark.parametrize("items", [False, True])
def test_is_a_wait_and_no_launch(items: bool) -> None:
    gm, _, waits = coalesced(items)
    assert is_wait(waits)
    assert not is_collective(waits)
    launch = find_nodes(gm.graph, is_collective)[0]
    kinds = dependency_graph(gm).get_edge_data(launch, waits)
    assert kinds is not None or items


@pytest.mark.parametrize("items", [False, True])
def test_is_split(items: bool) -> None:
    gm, inputs, _ = coalesced(items)
    assert split_waits(gm.graph) == 1
    gm.graph.lint()
    (block,) = get_all_comm_blocks(gm)
    assert block.inputs == inputs
    assert [wait.meta["val"].shape[0] for wait in block.wait_nodes] == [3, 4]
    assert all(wait.target is c10d.wait_tensor.default for wait in block.wait_nodes)
    (results, *_) = gm.graph.output_node().args[0]
    assert results[1] == block.wait_nodes
    assert check_dependencies(gm, gm).ok
    assert split_waits(gm.graph) == 0


def test_passes_see_waits_for_one_tensor() -> None:
    gm, _, _ = coalesced(False)
    graphopt.PassManager("comm_fusion_with_concat -> schedule_comm_wait").run(gm)
    assert len(get_all_comm_blocks(gm)[0].wait_nodes) == 2


def sum_gradients(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    loss.backward()
    with torch.no_grad():
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        summed = funcol.all_reduce_coalesced(gradients, "sum", dist.group.WORLD)
        for gradient, total in zip(gradients, summed, strict=True):
            gradient.copy_(total)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def test_a_step_with_coalesced_collectives(one_rank: None) -> None:
    """Functional collectives that the step calls itself, whatever the torch makes of their end."""
    models = [nn.Linear(4, 3) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [SGD(model.parameters(), lr=0.1) for model in models]
    step = graphopt.compile(sum_gradients, parallel=graphopt.Manual())
    for i in range(3):
        x = torch.randn(5, 4, generator=torch.Generator().manual_seed(i))
        assert torch.equal(
            step(models[0], optimizers[0], x), sum_gradients(models[1], optimizers[1], x)
        )
    step.flush()
    for ours, theirs in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(ours, theirs)
