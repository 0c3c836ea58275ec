"""Declarations are monotone: what is proven is accepted with every declaration and at every level;
`changes_communication` lets other amounts be sent, and values decide."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import graphopt
from graphopt.comm import get_all_comm_blocks, replace_collective
from graphopt.graph_utils import call_function_with_meta
from graphopt.manager import Pass, PassRegistry, graph_optimization_pass
from graphopt.passes import drop_unread_gradients
from graphopt.saved import load_graph, save_graph
from graphopt.saved.errors import SavedGraphError
from graphopt.testing import StepUnderTest, check_pass, fake_ranks

aten, c10d = torch.ops.aten, torch.ops._c10d_functional


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    model.zero_grad()
    return loss


def arguments() -> tuple[Any, ...]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01), torch.randn(5, 6)


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def new(gm: fx.GraphModule, like: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    return call_function_with_meta(gm.graph, target, args, kwargs, like=like)


def scatter_and_gather(gm: fx.GraphModule) -> int:
    """Each all-reduce of a matrix is a reduce-scatter and an all-gather."""
    blocks = [b for b in get_all_comm_blocks(gm, "all_reduce") if len(b.shape or ()) == 2]
    for block in blocks:
        like, group = block.comm_node, block.group
        with gm.graph.inserting_before(block.wait_nodes[0]):
            part = new(
                gm, like, c10d.reduce_scatter_tensor.default, block.inputs[0], "sum", 2, group
            )
            own = new(gm, like, c10d.wait_tensor.default, part)
            rest = new(gm, like, c10d.all_gather_into_tensor.default, own, 2, group)
            replace_collective(gm, block, new(gm, like, c10d.wait_tensor.default, rest))
    return len(blocks)


def scatter_in_bf16(gm: fx.GraphModule) -> int:
    """The same, of gradients in bfloat16."""
    blocks = [b for b in get_all_comm_blocks(gm, "all_reduce") if len(b.shape or ()) == 2]
    for block in blocks:
        like, group = block.comm_node, block.group
        with gm.graph.inserting_before(block.wait_nodes[0]):
            half = new(gm, like, aten._to_copy.default, block.inputs[0], dtype=torch.bfloat16)
            part = new(gm, like, c10d.reduce_scatter_tensor.default, half, "sum", 2, group)
            own = new(gm, like, c10d.wait_tensor.default, part)
            rest = new(gm, like, c10d.all_gather_into_tensor.default, own, 2, group)
            whole = new(gm, like, c10d.wait_tensor.default, rest)
            whole = new(gm, like, aten._to_copy.default, whole, dtype=torch.float32)
            replace_collective(gm, block, whole)
    return len(blocks)


def declared(function: Callable[..., Any], **constraints: Any) -> Pass:
    return graph_optimization_pass(registry=PassRegistry(), **constraints)(function)


@pytest.mark.parametrize(
    ("level", "numerics", "communication"),
    list(product(["off", "dependencies", "equivalence"], [False, True], [False, True])),
)
def test_what_is_proven_is_accepted(
    monkeypatch: pytest.MonkeyPatch, level: str, numerics: bool, communication: bool
) -> None:
    monkeypatch.setenv("GRAPHOPT_VERIFY", level)
    flags = {"changes_numerics": numerics, "changes_communication": communication}
    with fake_ranks(2):
        check_pass(step, arguments(), declared(scatter_and_gather, **flags), changes=2)


def test_compression_and_scattering_together() -> None:
    flags = {"changes_numerics": True, "changes_communication": True}
    with fake_ranks(2):
        check_pass(step, arguments(), declared(scatter_in_bf16, **flags), changes=2)


def do_not_average(gm: fx.GraphModule) -> None:
    block = get_all_comm_blocks(gm, "all_reduce")[0]
    replace_collective(gm, block, block.inputs[0])


def forget_to_gather(gm: fx.GraphModule) -> None:
    """Each rank's own part stands for both."""
    block = next(b for b in get_all_comm_blocks(gm, "all_reduce") if len(b.shape or ()) == 2)
    like = block.comm_node
    with gm.graph.inserting_before(block.wait_nodes[0]):
        part = new(
            gm, like, c10d.reduce_scatter_tensor.default, block.inputs[0], "sum", 2, block.group
        )
        own = new(gm, like, c10d.wait_tensor.default, part)
        replace_collective(gm, block, new(gm, like, aten.cat.default, [own, own]))


@pytest.mark.parametrize("wrong", [do_not_average, forget_to_gather])
@pytest.mark.parametrize("numerics", [False, True])
def test_other_communication_is_checked_by_value(wrong: Callable[..., Any], numerics: bool) -> None:
    flags = {"changes_numerics": numerics, "changes_communication": True}
    with fake_ranks(2), pytest.raises((AssertionError, graphopt.GraphOptError)):
        check_pass(step, arguments(), declared(wrong, **flags))


def with_frozen_part() -> tuple[Any, ...]:
    model, _, x = arguments()
    return model, torch.optim.SGD(model[2].parameters(), lr=0.1), x


def test_gradients_that_nobody_reads_are_dropped() -> None:
    with fake_ranks(2):
        under_test = StepUnderTest(step, with_frozen_part())
        record = under_test.check(drop_unread_gradients, changes=2)
        assert (record.collectives_before, record.collectives_after) == (4, 2)
        undeclared = declared(drop_unread_gradients.function)
        with pytest.raises(graphopt.VerificationError, match="sends"):
            under_test.check(undeclared)


def test_gradients_that_somebody_reads_stay() -> None:
    def keeps(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    with fake_ranks(2):
        assert not check_pass(keeps, with_frozen_part(), drop_unread_gradients, changes=0).changed


def other_size(gm: fx.GraphModule) -> None:
    """As `scatter_and_gather`, for a group of four."""
    for block in get_all_comm_blocks(gm, "all_reduce"):
        like, group = block.comm_node, block.group
        if block.shape is None or block.shape[0] % 4:
            continue
        with gm.graph.inserting_before(block.wait_nodes[0]):
            part = new(
                gm, like, c10d.reduce_scatter_tensor.default, block.inputs[0], "sum", 4, group
            )
            own = new(gm, like, c10d.wait_tensor.default, part)
            rest = new(gm, like, c10d.all_gather_into_tensor.default, own, 4, group)
            replace_collective(gm, block, new(gm, like, c10d.wait_tensor.default, rest))


def no_such_group(gm: fx.GraphModule) -> None:
    block = get_all_comm_blocks(gm, "all_reduce")[0]
    block.comm_node.update_arg(2, "9")


def uneven(gm: fx.GraphModule) -> None:
    block = max(
        get_all_comm_blocks(gm, "all_reduce"), key=lambda b: torch.Size(b.shape or ()).numel()
    )
    with gm.graph.inserting_before(block.wait_nodes[0]):
        row = new(gm, block.comm_node, aten.reshape.default, block.inputs[0], [-1])
        odd = new(gm, block.comm_node, aten.slice.Tensor, row, 0, 0, 47)
        part = new(
            gm, block.comm_node, c10d.reduce_scatter_tensor.default, odd, "sum", 2, block.group
        )
        new(gm, block.comm_node, c10d.wait_tensor.default, part)


@pytest.mark.parametrize("level", ["dependencies", "equivalence"])
@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (other_size, "says group_size=4, but group '0' has 2 ranks"),
        (no_such_group, "there is no process group '9'"),
    ],
)
@pytest.mark.parametrize("free", [False, True])
def test_groups_are_checked(
    monkeypatch: pytest.MonkeyPatch, level: str, wrong: Callable[..., Any], said: str, free: bool
) -> None:
    monkeypatch.setenv("GRAPHOPT_VERIFY", level)
    chosen = declared(wrong, changes_communication=free, changes_numerics=free)
    with fake_ranks(2), pytest.raises(graphopt.VerificationError, match=said):
        check_pass(step, arguments(), chosen)


def test_groups_of_a_file_are_checked(tmp_path: Path) -> None:
    with fake_ranks(2):
        gm = graphopt.capture(step, *arguments()).graph_module
        declared(scatter_and_gather)(gm)
        save_graph(gm, tmp_path / "good.pt")
        scattered = get_all_comm_blocks(gm, "reduce_scatter_tensor")[0].comm_node
        scattered.update_arg(2, 4)
        save_graph(gm, tmp_path / "bad.pt")
    load_graph(tmp_path / "good.pt")
    with pytest.raises(SavedGraphError, match="group_size"):
        load_graph(tmp_path / "bad.pt")
