"""Waits of collectives: several tensors in one (torch 2.15), and results that nobody reads."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.distributed import _functional_collectives as funcol
from torch.optim import SGD, Optimizer

import graphopt
from graphopt.comm import CommBlock, get_all_comm_blocks, replace_collective
from graphopt.comm.waits import split_waits
from graphopt.errors import VerificationError
from graphopt.graph_utils import call_function_with_meta, find_nodes, is_collective, is_wait
from graphopt.manager import Pass, PassManager, PassRegistry, graph_optimization_pass
from graphopt.testing import StepUnderTest, fake_ranks
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


aten = torch.ops.aten


class Net(nn.Module):
    """Two layers, of which the optimizer has one."""

    def __init__(self) -> None:
        super().__init__()
        self.trained, self.forgotten = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.forgotten(self.trained(x))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    model.zero_grad()
    return loss


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def under_test() -> Iterator[StepUnderTest]:
    model = Net()
    optimizer = torch.optim.SGD(model.trained.parameters(), lr=0.1)
    with fake_ranks(2):
        yield StepUnderTest(step, (model, optimizer, torch.randn(3, 4)))


def declared(function: Callable[..., Any], **options: Any) -> Pass:
    return graph_optimization_pass(registry=PassRegistry(), **options)(function)


def compressed(gm: fx.GraphModule, block: CommBlock) -> fx.Node:
    """The average of a gradient that is sent as bfloat16."""

    def new(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return call_function_with_meta(gm.graph, target, args, kwargs, like=block.comm_node)

    with gm.graph.inserting_before(block.wait_nodes[0]):
        half = new(aten._to_copy.default, block.inputs[0], dtype=torch.bfloat16)
        launch = new(c10d.all_reduce.default, half, *block.comm_node.args[1:])
        wait = new(c10d.wait_tensor.default, launch)
        return new(aten._to_copy.default, wait, dtype=torch.float32)


def compress(gm: fx.GraphModule) -> int:
    blocks = [b for b in get_all_comm_blocks(gm, "all_reduce") if b.dtype == torch.float32]
    for block in blocks:
        replace_collective(gm, block, compressed(gm, block))
    return len(blocks)


def send_twice(gm: fx.GraphModule) -> int:
    """The obvious way, which leaves the old collective running."""
    block = get_all_comm_blocks(gm, "all_reduce")[-1]
    block.wait_nodes[0].replace_all_uses_with(compressed(gm, block))
    return 1


def test_replaced_collectives(under_test: StepUnderTest) -> None:
    record = under_test.check(declared(compress, changes_numerics=True), changes=4)
    assert record.collectives_before == record.collectives_after == 4


def test_what_still_runs_is_refused(under_test: StepUnderTest) -> None:
    with pytest.raises(VerificationError) as caught:
        under_test.check(declared(send_twice, changes_numerics=True))
    text = str(caught.value)
    assert "nobody reads the result of the collective %all_reduce" in text
    assert "graphopt.comm.replace_collective(gm, block, new_output)" in text
    assert "reproduce: graphopt optimize" in text


def test_a_new_collective_that_nobody_reads_is_refused(under_test: StepUnderTest) -> None:
    def send_for_nothing(gm: fx.GraphModule) -> int:
        compressed(gm, get_all_comm_blocks(gm, "all_reduce")[0])
        return 1

    with pytest.raises(VerificationError, match="which it put in"):
        under_test.check(declared(send_for_nothing))


def test_a_gradient_that_no_optimizer_has_is_averaged_as_before(under_test: StepUnderTest) -> None:
    gm = under_test.graph_module
    read = [bool(block.users) for block in get_all_comm_blocks(gm, "all_reduce")]
    assert sorted(read) == [False, False, True, True], "the case is what it is meant to be"
    PassManager("comm_fusion_with_concat -> schedule_comm_wait").run(gm)
    gm = under_test.graph_module
    PassManager("schedule_comm_wait -> remove_copy_from_optimizer").run(gm)
    under_test.check(declared(compress, changes_numerics=True))
