"""A pass may not leave collectives running whose results nobody reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx, nn

from graphopt.comm import CommBlock, get_all_comm_blocks, replace_collective
from graphopt.errors import VerificationError
from graphopt.graph_utils import call_function_with_meta
from graphopt.manager import Pass, PassManager, PassRegistry, graph_optimization_pass
from graphopt.testing import StepUnderTest, fake_ranks

aten = torch.ops.aten
c10d = torch.ops._c10d_functional


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
