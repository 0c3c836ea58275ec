"""A tensor that is sent in parts is neither copied apart nor together, and nobody reads what is
not there any more."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx

import graphopt
from cudagraphs_emulation import EmulatedRecorder
from graphopt.executable import finalize
from graphopt.graph_utils import get_outputs, set_outputs
from graphopt.ir.parts import CAPTURED, PUT_TOGETHER, TAKE_APART
from graphopt.lowering.cudagraphs import CudaGraphs
from graphopt.testing import fake_ranks
from graphopt.verify import check_dependencies, check_finalized
from graphopt.verify.recorded import recording_problems
from test_dependencies_executable import at
from test_two_parts import PARTS, captured

aten = torch.ops.aten
c10d = torch.ops._c10d_functional
ALL_REDUCE, WAIT = c10d.all_reduce.default, c10d.wait_tensor.default

Edit = Callable[[fx.Graph], None]


@pytest.mark.parametrize("sizes", [[3, 4], [1, 0, 6], [7]])
def test_the_same_memory(sizes: list[int]) -> None:
    whole = torch.arange(9.0)[1:8]
    parts = TAKE_APART(whole, sizes)
    again = PUT_TOGETHER(parts)
    assert [part.numel() for part in parts] == sizes
    assert again.data_ptr() == whole.data_ptr() and torch.equal(again, whole)
    parts[0][0] = 5.0
    assert again[0] == whole[0] == 5.0


FLAT = torch.arange(9.0)


@pytest.mark.parametrize(
    "parts",
    [
        [FLAT[4:8], FLAT[:4]],
        [FLAT[:4], FLAT[5:8]],
        [FLAT[:4], FLAT[3:8]],
        [FLAT[:4], FLAT.clone()[4:8]],
        [FLAT[:4:2], FLAT[3:8]],
        [FLAT[:4].view(2, 2), FLAT[4:8].view(2, 2)],
    ],
)
def test_elsewhere_they_are_concatenated(parts: list[Tensor]) -> None:
    before = FLAT.clone()
    again = PUT_TOGETHER(parts)
    assert torch.equal(again, torch.cat(parts))
    again.fill_(0.0)
    assert torch.equal(FLAT, before)


def test_of_several_dtypes_they_are_concatenated() -> None:
    parts = [FLAT[:4].view(torch.int16), FLAT.clone()[4:8].view(torch.int32)]
    assert torch.equal(PUT_TOGETHER(parts), torch.cat(parts))
    other = FLAT[8:].view(torch.int32)
    assert torch.equal(PUT_TOGETHER([parts[0], other]), torch.cat([parts[0], other]))


# ------------------------------------------------------------------------------------ whole graphs


def step(*, read: bool = False, returned: bool = False, halves: bool = True) -> fx.GraphModule:
    """A gradient that is reduced in parts, and updates a parameter.

    Args:
        read: it is read behind the launches.
        returned: what has arrived is a result.
        halves: as many elements in each part, so that nothing else tells them apart.
    """
    sizes = [4, 4] if halves else [5, 3]
    graph = fx.Graph()

    def add(name: str, target: Any, *args: Any, value: Any = 8) -> fx.Node:
        node = graph.create_node("call_function", target, args, name=name)
        node.meta["val"] = torch.empty(value, device="meta") if isinstance(value, int) else value
        return node

    inputs = {name: graph.placeholder(name) for name in ("p", "x")}
    for node in inputs.values():
        node.meta["val"] = torch.empty(8, device="meta")
    g = add("g", aten.mul.Tensor, inputs["p"], inputs["x"])
    pieces = [torch.empty(size, device="meta") for size in sizes]
    split = add("split", aten.split_with_sizes_copy.default, g, sizes, value=pieces)
    parts = [add(f"part{i}", operator.getitem, split, i, value=pieces[i]) for i in (0, 1)]
    sent = [
        add(f"launch{i}", c10d.all_reduce.default, parts[i], "sum", "0", value=sizes[i])
        for i in (0, 1)
    ]
    norm = add("norm", aten.exp.default, g) if read else None
    waits = [add(f"wait{i}", c10d.wait_tensor.default, sent[i], value=sizes[i]) for i in (0, 1)]
    again = add("again", aten.cat.default, waits)
    last = add("last", aten.exp.default, again)
    new = add("new", aten.add.Tensor, inputs["p"], again)
    copy = add("copy", aten.copy_.default, inputs["p"], new)
    results = [last, *([again] if returned else []), *([norm] if norm is not None else [])]
    graph.output((results, [copy], []))
    return fx.GraphModule(torch.nn.Module(), graph)


def targets(graph: fx.Graph) -> set[Any]:
    return {node.target for node in graph.nodes}


@pytest.mark.parametrize("halves", [True, False])
def test_nothing_is_copied(halves: bool) -> None:
    before = step(halves=halves)
    after = finalize(before)
    assert {TAKE_APART, PUT_TOGETHER, c10d.all_reduce_.default} <= targets(after.graph)
    assert not targets(after.graph) & {*CAPTURED.values(), c10d.all_reduce.default}
    check_dependencies(before, after).raise_for_failure()
    check_finalized(before, after).raise_for_failure()


@pytest.mark.parametrize(
    ("read", "returned", "kept"),
    [(True, False, {CAPTURED[TAKE_APART]}), (False, True, {CAPTURED[PUT_TOGETHER]})],
)
def test_what_is_needed_elsewhere_is_copied(read: bool, returned: bool, kept: set[Any]) -> None:
    before = step(read=read, returned=returned)
    after = finalize(before)
    assert targets(after.graph) & set(CAPTURED.values()) == kept
    check_dependencies(before, after).raise_for_failure()
    check_finalized(before, after).raise_for_failure()


def test_in_a_step_with_late_work() -> None:
    with fake_ranks(2):
        module = captured()
        graphopt.PassManager(PARTS, verify="equivalence").run(module)
        for graph in module.derive().values():
            after = finalize(graph)
            assert not targets(after.graph) & {CAPTURED[TAKE_APART]}
            check_dependencies(graph, after).raise_for_failure()
            check_finalized(graph, after).raise_for_failure()
        assert PUT_TOGETHER in targets(finalize(module.main_gm).graph)


def carrying(whole: bool) -> fx.GraphModule:
    """A forward and a backward, between them what cannot be recorded, whose gradient is handed on
    under way; it shows what has arrived of the last step's."""
    graph = fx.Graph()

    def add(name: str, target: Any, *args: Any, size: int = 8) -> fx.Node:
        node = graph.create_node("call_function", target, args, name=name)
        node.meta["val"] = torch.empty(size)
        return node

    x, *carried = (graph.placeholder(name) for name in ("x", *(["c"] if whole else ["c0", "c1"])))
    x.meta["val"] = torch.empty(8)
    for index, node in enumerate(carried):
        node.meta |= {"val": torch.empty(8 if whole else 4), "carried_index": index}
    g = x
    for index in range(20):
        g = add(f"sin{index}", aten.sin.default, g)
        if index == 10:
            drawn = add("drawn", aten.randperm.default, 8)
            drawn.meta["val"] = torch.empty(8, dtype=torch.int64)
    parts = [g]
    if not whole:
        split = graph.call_function(aten.split_with_sizes_copy.default, (g, [4, 4]))
        split.meta["val"] = [torch.empty(4), torch.empty(4)]
        parts = [add(f"part{i}", operator.getitem, split, i, size=4) for i in (0, 1)]
    size = 8 // len(parts)
    sent = [add(f"launch{i}", ALL_REDUCE, p, "sum", "0", size=size) for i, p in enumerate(parts)]
    waits = [add(f"wait{i}", WAIT, c, size=size) for i, c in enumerate(carried)]
    arrived = waits[0] if whole else add("again", aten.cat.default, waits)
    graph.output(([add("shown", aten.exp.default, arrived)], [], sent))
    return fx.GraphModule(torch.nn.Module(), graph)


@pytest.mark.parametrize("whole", [True, False])
def test_recorded_pieces_leave_what_is_handed_on_alone(whole: bool, one_rank: None) -> None:
    shown = []
    for recorded in (False, True):
        module = finalize(carrying(whole))
        assert whole or TAKE_APART in targets(module.graph)
        if recorded:
            CudaGraphs(EmulatedRecorder()).apply(module)
            assert not list(recording_problems(module))
        flight = [torch.zeros(8)] if whole else [torch.zeros(4), torch.zeros(4)]
        for number in range(6):
            (result,), _, flight = module(torch.linspace(0.1, 0.9, 8) * number, *flight)
            shown.append(result.clone())
        for each in flight:
            WAIT(each)
    assert all(map(torch.equal, shown[:6], shown[6:]))


def test_what_the_user_is_given_is_no_part() -> None:
    before = step()
    outputs = get_outputs(before.graph)
    results = [*outputs.results, at(before.graph, "wait0")]
    set_outputs(before.graph, outputs._replace(results=results))
    after = finalize(before)
    assert TAKE_APART not in targets(after.graph) and PUT_TOGETHER not in targets(after.graph)
    check_finalized(before, after).raise_for_failure()


def test_what_was_launched_elsewhere_is_concatenated() -> None:
    """And so is a list that only one node stands for."""
    graph = fx.Graph()
    launches = [graph.placeholder(name) for name in ("p", "q")]
    waits = [graph.call_function(WAIT, (launch,)) for launch in launches]
    again = graph.call_function(aten.cat.default, (waits,))
    split = graph.call_function(aten.split_with_sizes_copy.default, (again, [4, 4]))
    last = graph.call_function(aten.cat.default, (split,))
    for node in (*launches, *waits):
        node.meta["val"] = torch.empty(4, device="meta")
    split.meta["val"] = [torch.empty(4, device="meta") for _ in range(2)]
    again.meta["val"], last.meta["val"] = (torch.empty(8, device="meta") for _ in range(2))
    graph.output(([last], [], []))
    after = finalize(fx.GraphModule(torch.nn.Module(), graph))
    assert not targets(after.graph) & {TAKE_APART, PUT_TOGETHER}


# ------------------------------------------------------------------------------------ wrong edits


def inserted(graph: fx.Graph, after: str, target: Any, *args: Any) -> fx.Node:
    with graph.inserting_after(at(graph, after)):
        node = graph.call_function(target, args)
    node.meta["val"] = torch.empty_like(args[0].meta["val"])
    return node


def whole_read(graph: fx.Graph) -> None:
    at(graph, "last").update_arg(0, at(graph, "g"))


def whole_read_while_it_is_sent(graph: fx.Graph) -> None:
    read = inserted(graph, "launch1", aten.exp.default, at(graph, "g"))
    at(graph, "last").replace_all_uses_with(read)


def whole_written(graph: fx.Graph) -> None:
    inserted(graph, "wait1", aten.mul_.Tensor, at(graph, "g"), 2.0)


def part_written_behind(graph: fx.Graph) -> None:
    inserted(graph, "again", aten.mul_.Tensor, at(graph, "wait0"), 2.0)


def written_where_it_is_read(graph: fx.Graph) -> None:
    """What is put together is overwritten, and one of the parts read behind that."""
    scaled = inserted(graph, "again", aten.mul_.Tensor, at(graph, "again"), 2.0)
    at(graph, "new").update_arg(1, scaled)


def parts_swapped(graph: fx.Graph) -> None:
    again: Any = at(graph, "again")
    again.args = (again.args[0][::-1],)


def one_part_twice(graph: fx.Graph) -> None:
    again: Any = at(graph, "again")
    again.args = (again.args[0][:1] * 2,)


def taken_apart_otherwise(graph: fx.Graph) -> None:
    at(graph, "split").update_arg(1, [3, 5])


def items_swapped(graph: fx.Graph) -> None:
    for index in (0, 1):
        at(graph, f"part{index}").update_arg(1, 1 - index)


def sent_as_a_whole(graph: fx.Graph) -> None:
    at(graph, "launch1").update_arg(0, at(graph, "part0"))


def put_together_before_it_is_there(graph: fx.Graph) -> None:
    again: Any = at(graph, "again")
    again.args = ([at(graph, "wait0"), at(graph, "launch1")],)


def parameter_taken(graph: fx.Graph) -> None:
    at(graph, "split").update_arg(0, at(graph, "p"))
    at(graph, "g").replace_all_uses_with(at(graph, "p"))


WRONG = [
    *(whole_read, whole_read_while_it_is_sent, whole_written, part_written_behind),
    *(written_where_it_is_read, parts_swapped, one_part_twice, taken_apart_otherwise),
    *(items_swapped, sent_as_a_whole, put_together_before_it_is_there, parameter_taken),
]
HARMLESS = [
    taken_apart_otherwise,  # each element is summed once
    put_together_before_it_is_there,  # by another name of the memory, behind the wait
]


@pytest.mark.parametrize("edit", WRONG)
def test_a_wrong_graph_is_refused(edit: Edit) -> None:
    before = step()
    after = finalize(before)
    edit(after.graph)
    assert not check_dependencies(before, after).ok, after.graph
    assert edit in HARMLESS or not check_finalized(before, after).ok, after.graph
