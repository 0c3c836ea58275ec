"""Who shares memory in a graph, who reads it, and what therefore keeps its order."""

from __future__ import annotations

from operator import getitem

import torch
from torch import fx

from graphopt.ir.accesses import Hazard, MemoryOrder
from graphopt.ir.effects import Effects
from graphopt.ir.views import is_pure_view, may_be_view
from graphopt.pipelining.pipe.mutation import Mutations

aten = torch.ops.aten
c10d = torch.ops._c10d_functional


def hazards(graph: fx.Graph) -> set[Hazard]:
    return set(MemoryOrder(graph).hazards)


def test_a_result_written_out_of_place_shares_memory_with_out() -> None:
    graph = fx.Graph()
    x, low, high = (graph.placeholder(name) for name in ("x", "low", "high"))
    both = graph.call_function(aten.aminmax.out, (x,), {"min": low, "max": high})
    both.meta["val"] = (torch.empty(()), torch.empty(()))
    items = [graph.call_function(getitem, (both, i)) for i in (0, 1)]
    graph.output(items)
    effects = Effects(graph)
    assert [effects.input_of(item) for item in items] == [low, high]


def test_what_a_coalesced_collective_sends_is_read_until_the_wait_of_each_item() -> None:
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    launch = graph.call_function(c10d.all_gather_into_tensor_coalesced.default, ([x, y], 2, "g"))
    launch.meta["val"] = [torch.empty(2), torch.empty(2)]
    item = graph.call_function(getitem, (launch, 0))
    wait = graph.call_function(c10d.wait_tensor.default, (item,))
    update = graph.call_function(aten.copy_.default, (y, wait))
    graph.output(update)
    assert Effects(graph).read_after(x, launch)
    assert not Effects(graph).read_after(x, wait)
    assert Hazard(wait, update, "WAR") in hazards(graph)


def test_a_collective_without_its_wait_reads_beyond_the_graph() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    launch = graph.call_function(c10d.all_gather_into_tensor.default, (x, 2, "g"))
    last = graph.call_function(aten.sin.default, (launch,))
    graph.output(last)
    effects = Effects(graph)
    assert effects.is_in_flight(x) and effects.read_after(x, last)
    assert not effects.is_in_flight(last)


def test_a_wait_holds_the_memory_of_its_launch() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    launch = graph.call_function(c10d.all_reduce.default, (x, "sum", "g"))
    wait = graph.call_function(c10d.wait_tensor.default, (launch,))
    update = graph.call_function(aten.mul_.Tensor, (wait, 2.0))
    reader = graph.call_function(aten.sin.default, (launch,))
    graph.output((update, reader))
    effects = Effects(graph)
    assert effects.same(launch, wait) and not effects.same(x, wait)
    assert Hazard(update, reader, "RAW") in hazards(graph)


def test_a_reshape_that_may_copy_reads() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    view = graph.call_function(aten.t.default, (x,))
    copied = graph.call_function(aten.reshape.default, (view, [12]))
    update = graph.call_function(aten.add_.Tensor, (x, 1))
    graph.output((copied, update))
    assert is_pure_view(view) and may_be_view(copied) and not is_pure_view(copied)
    assert Hazard(copied, update, "WAR") in hazards(graph)
    assert not any(hazard.earlier is view for hazard in hazards(graph))


def test_a_copy_reads_what_stays_around_a_view_and_no_more() -> None:
    graph = fx.Graph()
    x, value = graph.placeholder("x"), graph.placeholder("value")
    first = graph.call_function(aten.copy_.default, (x, value))
    row = graph.call_function(aten.select.int, (x, 0, 0))
    part = graph.call_function(aten.copy_.default, (row, value))
    graph.output((first, part))
    found = hazards(graph)
    assert Hazard(first, part, "RAW") in found
    again = graph.call_function(aten.copy_.default, (x, value))
    part.append(again)
    assert {hazard.kind for hazard in hazards(graph) if hazard.later is again} == {"WAW"}


def test_moving_a_reader_moves_the_last_read() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    early = graph.call_function(aten.sin.default, (x,))
    late = graph.call_function(aten.cos.default, (x,))
    graph.output((early, late))
    effects = Effects(graph)
    assert effects.read_after(x, early)
    early.prepend(late)
    effects.moved([late])
    assert not effects.read_after(x, early)


def test_joined_classes_are_read_by_the_readers_of_both() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    a = graph.call_function(aten.sin.default, (x,))
    b = graph.call_function(aten.cos.default, (a,))
    c = graph.call_function(aten.exp.default, (b,))
    d = graph.call_function(aten.exp.default, (c,))
    graph.output(d)
    effects = Effects(graph)
    assert not effects.read_after(a, b)
    effects.join(a, b)
    assert effects.read_after(a, b) and not effects.read_after(a, c)
    effects.join(c, a)
    assert effects.read_after(b, c) and not effects.read_after(b, d)


def test_an_update_through_a_dropout_that_drops_nothing_is_one_of_its_argument() -> None:
    for train in (False, True):
        graph = fx.Graph()
        x = graph.placeholder("x")
        dropped = graph.call_function(aten.dropout.default, (x, 0.5, train))
        update = graph.call_function(aten.add_.Tensor, (dropped, 1))
        graph.output(update)
        assert Mutations(graph, {}).writers(x) == ([] if train else [update])
