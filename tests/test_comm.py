"""Communication blocks: what belongs to a collective, and what is wrong with one."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import graphopt
from graphopt.comm import (
    CommBlock,
    bucket_members,
    get_all_comm_blocks,
    get_comm_block,
    late_nodes,
    parameters_of,
    replace_collective,
    wait_of,
)
from graphopt.errors import VerificationError
from graphopt.graph_utils import call_function_with_meta
from graphopt.testing import fake_ranks
from graphopt.tracing import SourceLine
from sketch import Sketch, c10d

aten = torch.ops.aten


def test_block_of_an_all_reduce() -> None:
    s = Sketch()
    x = s.input("x", 2, 3)
    scaled = s.call(aten.mul.Tensor, x, 0.5)
    launch = s.all_reduce(scaled)
    wait = s.wait(launch)
    flat = s.call(aten.view.default, wait, [6])
    left, right = (s.call(aten.slice.Tensor, flat, 0, i, i + 3) for i in (0, 3))
    unread = s.call(aten.detach.default, wait)
    first, second = (s.call(aten.neg.default, part) for part in (left, right))
    third = s.call(aten.exp.default, wait)
    s.step([first, second, third])
    block = get_comm_block(launch)
    assert block.comm_node is launch
    assert block.shape == (2, 3)
    assert block.inputs == [scaled]
    assert block.wait_nodes == [wait]
    assert block.node_list == [launch, wait, flat, left, right, unread]
    assert block.tail == [wait, flat, left, right, unread]
    assert block.outputs == [wait, left, right]
    assert block.users == [first, second, third]
    assert (block.kind, block.group, block.reduce_op) == ("all_reduce", "0", "sum")
    assert (block.dtype, block.device, block.nbytes) == (torch.float32, torch.device("cpu"), 24)


def test_split_and_items_belong_to_the_block() -> None:
    s = Sketch()
    launch = s.all_reduce(s.input("x", 6))
    wait = s.wait(launch)
    split = s.call(aten.split_with_sizes.default, wait, [2, 4])
    items = [s.call(operator.getitem, split, i) for i in range(2)]
    shaped = s.call(aten.reshape.default, items[1], [2, 2])
    s.step([items[0], s.call(aten.neg.default, shaped)])
    block = get_comm_block(launch)
    assert block.node_list == [launch, wait, split, *items, shaped]
    assert block.outputs == [items[0], shaped]


@pytest.mark.parametrize(
    ("kind", "args", "reduce_op"),
    [
        ("all_reduce", ("max", "g"), "max"),
        ("broadcast", (0, "g"), None),
        ("all_gather_into_tensor", (2, "g"), None),
        ("reduce_scatter_tensor", ("sum", 2, "g"), "sum"),
        ("all_to_all_single", ([2, 2], [2, 2], "g"), None),
    ],
)
def test_every_collective(kind: str, args: tuple[Any, ...], reduce_op: str | None) -> None:
    s = Sketch()
    x = s.input("x", 4, 3, dtype=torch.bfloat16)
    launch = s.call(getattr(c10d, kind).default, x, *args)
    wait = s.wait(launch)
    gm = s.step([wait])
    (block,) = get_all_comm_blocks(gm)
    assert (block.kind, block.group, block.reduce_op) == (kind, "g", reduce_op)
    assert (block.dtype, block.nbytes, block.shape) == (torch.bfloat16, 24, (4, 3))
    assert block.outputs == [wait]
    assert get_all_comm_blocks(gm, kind)[0].comm_node is launch
    assert get_all_comm_blocks(gm, ("isend", "irecv")) == []


@pytest.mark.parametrize(
    ("kind", "args"),
    [
        ("all_reduce_coalesced", ("sum", "g")),
        ("all_gather_into_tensor_coalesced", (2, "g")),
        ("reduce_scatter_tensor_coalesced", ("sum", 2, "g")),
    ],
)
def test_coalesced_collectives(kind: str, args: tuple[Any, ...]) -> None:
    """One launch sends several tensors, and each is waited for."""
    s = Sketch()
    sent = [s.input("x", 4), s.input("y", 2, 3)]
    launch = s.call(getattr(c10d, kind).default, sent, *args)
    items = [s.call(operator.getitem, launch, i) for i in range(2)]
    waits = [s.wait(item) for item in items]
    gm = s.step([s.call(aten.neg.default, wait) for wait in waits])
    (block,) = get_all_comm_blocks(gm, [kind])
    assert block.inputs == sent
    assert block.shape is None
    assert block.nbytes == 40
    assert block.wait_nodes == block.outputs == waits
    assert block.node_list == [launch, *items, *waits]
    assert block.group == "g"


def test_names_do_not_matter() -> None:
    s = Sketch()
    launch = s.all_reduce(s.input("x", 4))
    wait = s.wait(launch)
    neg = s.call(aten.neg.default, wait)
    s.step([neg])
    launch._rename("wait_tensor_7")
    wait._rename("view")
    neg._rename("getitem")
    block = get_comm_block(launch)
    assert (block.node_list, block.users) == ([launch, wait], [neg])


def test_blocks_in_launch_order() -> None:
    s = Sketch()
    launches = [s.all_reduce(s.input(name, 4)) for name in "abc"]
    gm = s.step([s.wait(launch) for launch in reversed(launches)])
    assert [block.comm_node for block in get_all_comm_blocks(gm)] == launches


def chain(distance: int) -> tuple[fx.Node, fx.GraphModule]:
    """A launch whose wait is `distance` nodes away."""
    s = Sketch()
    launch = node = s.all_reduce(s.input("x", 4))
    for _ in range(distance - 1):
        node = s.call(aten.alias.default, node)
    return launch, s.step([s.wait(node)])


def test_wait_at_a_distance() -> None:
    launch, _ = chain(5)
    assert len(get_comm_block(launch).node_list) == 6


def test_wait_too_far_away() -> None:
    launch, gm = chain(6)
    with pytest.raises(graphopt.VerificationError, match=r"%all_reduce.* has no wait"):
        get_comm_block(launch)
    with pytest.raises(graphopt.VerificationError, match=r"%all_reduce.* has no wait"):
        get_all_comm_blocks(gm)


def test_collective_without_wait_names_the_line() -> None:
    s = Sketch()
    x = s.input("x", 4)
    launch = s.all_reduce(x)
    launch.meta["source"] = SourceLine("train.py", 41, "train_step")
    s.step([s.call(aten.neg.default, x)])
    with pytest.raises(graphopt.VerificationError) as caught:
        get_comm_block(launch)
    text = str(caught.value)
    assert f"%{launch.name} " in text
    assert "train.py:41" in text
    assert "hint:" in text


def test_not_a_collective() -> None:
    s = Sketch()
    wait = s.wait(s.all_reduce(s.input("x", 4)))
    s.step([wait])
    with pytest.raises(graphopt.VerificationError, match="not the launch of a collective"):
        get_comm_block(wait)


def test_graph_without_communication() -> None:
    s = Sketch()
    assert get_all_comm_blocks(s.step([s.input("x", 4)])) == []


def halved(gm: fx.GraphModule, block: CommBlock, *, whole: bool = True) -> fx.Node:
    """What a collective gives, sent in half precision; put before its first reader."""
    (sent,) = block.inputs
    launch = block.comm_node

    def new(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return call_function_with_meta(gm.graph, target, args, kwargs, like=launch)

    with gm.graph.inserting_before(block.wait_nodes[0]):
        half = new(aten._to_copy.default, sent, dtype=torch.bfloat16)
        wait = new(c10d.wait_tensor.default, new(launch.target, half, *launch.args[1:]))
        return new(aten._to_copy.default, wait, dtype=torch.float32) if whole else wait


def captured_average() -> fx.GraphModule:
    """One gradient that is averaged, read through a view."""
    s = Sketch()
    launch = s.average(s.input("g", 2, 3))
    launch.meta["sends"] = ("weight",)
    flat = s.call(aten.view.default, s.wait(launch), [6])
    return s.step([s.call(aten.neg.default, flat)])


def test_replacing_a_collective_takes_the_old_one_out() -> None:
    gm = captured_average()
    (block,) = get_all_comm_blocks(gm)
    new = halved(gm, block)
    replace_collective(gm, block, new)
    gm.graph.lint()
    (left,) = get_all_comm_blocks(gm)
    assert left.dtype == torch.bfloat16
    assert block.comm_node not in set(gm.graph.nodes)
    assert block.wait_nodes[0] not in set(gm.graph.nodes)
    assert [user.target for user in new.users] == [aten.view.default]
    assert wait_of(left.comm_node) is left.wait_nodes[0]
    assert parameters_of(gm, left) == ("weight",)


def test_a_replacement_of_another_kind_is_refused() -> None:
    gm = captured_average()
    (block,) = get_all_comm_blocks(gm)
    inserted = halved(gm, block, whole=False)
    with pytest.raises(VerificationError, match=r"(?s)is torch.bfloat16 of .* convert it back"):
        replace_collective(gm, block, inserted)
    with pytest.raises(VerificationError, match="has 1 waits, and 2 new outputs"):
        replace_collective(gm, block, [inserted, inserted])
    assert [user.target for user in block.wait_nodes[0].users] == [aten.view.default]


def test_a_replacement_that_needs_the_collective_is_refused() -> None:
    gm = captured_average()
    (block,) = get_all_comm_blocks(gm)
    (wait,) = block.wait_nodes
    with gm.graph.inserting_after(wait):
        scaled = call_function_with_meta(gm.graph, aten.mul.Tensor, (wait, 2.0), like=wait)
    with pytest.raises(
        VerificationError, match=r"(?s)is computed from %all_reduce.*delete_user_cb"
    ):
        replace_collective(gm, block, scaled)
    assert wait in scaled.all_input_nodes and len(wait.users) == 2


def test_replacing_a_coalesced_collective() -> None:
    s = Sketch()
    x, y = s.input("x", 2), s.input("y", 3)
    both = s.call(c10d.all_reduce_coalesced.default, [x, y], "sum", "0")
    waits = [s.wait(s.call(operator.getitem, both, index)) for index in range(2)]
    singles = [s.wait(s.all_reduce(value)) for value in (x, y)]
    gm = s.step([s.call(aten.neg.default, wait) for wait in waits])
    with pytest.raises(VerificationError, match="has 2 waits"):
        wait_of(both)
    replace_collective(gm, get_comm_block(both), singles)
    gm.graph.lint()
    assert [block.comm_node.target for block in get_all_comm_blocks(gm)] == [
        c10d.all_reduce.default
    ] * 2


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
