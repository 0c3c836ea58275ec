"""What authors ask of a collective: the size of its group, and the members of its bucket."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphopt
from graphopt.comm import bucket_members, get_all_comm_blocks, late_nodes
from graphopt.testing import fake_ranks


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.fixture(params=[2, 3])
def ranks(request: pytest.FixtureRequest) -> Iterator[int]:
    with fake_ranks(request.param):
        yield request.param


def graph(width: int = 3) -> graphopt.IterGraphModule:
    model = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 5))
    args = model, torch.optim.AdamW(model.parameters()), torch.randn(2, 4)
    return graphopt.IterGraphModule(graphopt.capture(train_step, *args).graph_module)


@pytest.mark.parametrize("width", [1, 3, 16])
def test_members_are_the_tensors_that_were_sent_alone(ranks: int, width: int) -> None:
    gm = graph(width)
    alone = [m for block in get_all_comm_blocks(gm) for m in bucket_members(block)]
    graphopt.PassManager("comm_fusion_with_concat").run(gm)
    (block,) = get_all_comm_blocks(gm, "all_reduce")
    together = bucket_members(block)
    assert block.group_size == ranks
    assert [m.parameter for m in together] == [m.parameter for m in alone]
    assert [m.size for m in together] == [m.size for m in alone]
    for member in together:
        assert member.start % 16 == 0, "members begin at multiples of 64 bytes"
        assert member.sent.meta["val"].numel() == member.size
        assert member.received and member.received[-1].users
        assert all(node.meta["val"].numel() == member.size for node in member.received)
    starts = [member.start for member in together]
    assert starts == sorted(set(starts))


def test_members_of_a_bucket_that_a_pass_cut_by_slices(ranks: int) -> None:
    aten = torch.ops.aten
    gm = graph()
    graphopt.PassManager("comm_fusion_with_concat").run(gm)
    (block,) = get_all_comm_blocks(gm, "all_reduce")
    before = [(m.parameter, m.start, m.size) for m in bucket_members(block)]
    (wait,) = block.wait_nodes
    for member in bucket_members(block):
        piece = member.received[0]
        place = (wait, 0, member.start, member.start + member.size)
        with gm.graph.inserting_before(piece):
            cut = graphopt.graph_utils.call_function_with_meta(
                gm.graph, aten.slice.Tensor, place, like=piece
            )
        piece.replace_all_uses_with(cut)
    gm.graph.eliminate_dead_code()
    (block,) = get_all_comm_blocks(gm, "all_reduce")
    assert [(m.parameter, m.start, m.size) for m in bucket_members(block)] == before
    assert all(m.received for m in bucket_members(block))


def test_late_nodes_take_a_graph_module_as_their_neighbours_do(ranks: int) -> None:
    gm = graph()
    graphopt.PassManager("remove_copy_from_optimizer -> iter_move_grads_and_optimizers").run(gm)
    assert late_nodes(gm) and late_nodes(gm) == late_nodes(gm.graph)
    wrong: Any = [gm]
    with pytest.raises(TypeError, match="late_nodes takes a graph module, not list"):
        late_nodes(wrong)


def test_the_size_of_a_group_that_is_not_here() -> None:
    with fake_ranks(2):
        gm = graph()
    block = get_all_comm_blocks(gm, "all_reduce")[0]
    with pytest.raises(
        graphopt.VerificationError, match=r"no process group .* here(.*\n)*.*fake_ranks"
    ):
        _ = block.group_size
