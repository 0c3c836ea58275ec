"""Entries of list operators: what each reads and writes, and calls divided between them."""

from __future__ import annotations

import operator
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_map

from graphopt.ir.accesses import MemoryOrder
from graphopt.ir.entries import Entry, divide, list_call
from graphopt.verify import check_dependencies
from observed import same_bits as same_tensor
from operators import cloned, list_arguments, list_operators

aten = torch.ops.aten
c10d = torch.ops._c10d_functional

TENSORS = [torch.rand(3, 2) + 0.5, torch.rand(4) + 0.5, torch.rand(3, 2) + 0.5]
OTHERS = [torch.rand(3, 2) + 0.5, torch.rand(4) + 0.5, torch.rand(3, 2) + 0.5]


def same_bits(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(map(same_tensor, a, b))


def drawn(target: Any, args: Any) -> tuple[fx.GraphModule, fx.Node, list[Tensor]]:
    """A graph of one call of a list operator, the call, and what to give the graph."""
    graph = fx.Graph()
    values: list[Tensor] = []

    def noted(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        values.append(value)
        node = graph.placeholder(f"x{len(values)}")
        node.meta["val"] = value
        return node

    call = graph.call_function(target, tree_map(noted, args))
    call.meta["val"] = target(*cloned(args))
    given = call.meta["val"] or ()
    graph.output([graph.call_function(operator.getitem, (call, i)) for i in range(len(given))])
    return fx.GraphModule(nn.Module(), graph), call, values


def cases(*, in_place: bool) -> list[tuple[Any, Any]]:
    """Operators with arguments that they take."""
    found = []
    for target, args in product(list_operators(), list_arguments(TENSORS[:2], OTHERS[:2])):
        if target._schema.is_mutable == in_place:
            try:
                target(*cloned(args))
            except RuntimeError:
                continue  # it takes other arguments
            found.append((target, args))
    return found


def test_every_list_operator_divides() -> None:
    """Into calls with the bits of the whole, in any order of the entries."""
    divided = set()
    for target, args in cases(in_place=False):
        module, node, values = drawn(target, args)
        call = list_call(node)
        assert call is not None and call.count == 2
        if not call.can_be_divided:
            continue
        whole = module(*cloned(tuple(values)))
        parts = divide(call, [[1], [0]])
        assert [[len(new.meta["val"]) for new in nodes] for nodes in parts] == [[1], [1]]
        module.graph.lint()
        module.recompile()
        assert same_bits(module(*values), whole), target
        divided.add(target._schema.name)
    assert len(divided) > 40


def test_one_vector_of_numbers_is_not_divided() -> None:
    others = [OTHERS[:2], OTHERS[:2]]
    numbers = torch.tensor([0.5, 0.25])
    _, node, _ = drawn(aten._foreach_addcmul.Tensor, (TENSORS[:2], *others, numbers))
    call = list_call(node)
    assert call is not None and not call.can_be_divided


def test_entries_write_what_kernels_write() -> None:
    """Each its own tensor, and nothing else."""
    seen = set()
    for target, args in cases(in_place=True):
        _, node, values = drawn(target, args)
        call = list_call(node)
        assert call is not None and not call.can_be_divided
        given = cloned(args)
        before = [t._version for t in given[0]]
        target(*given)
        assert [t._version for t in given[0]] > before
        assert [call.writes(item) for item in (0, 1)] == [[entry] for entry in node.args[0]]
        reads = [{source for source, _ in call.reads(item)} for item in (0, 1)]
        assert reads[0].isdisjoint(reads[1])
        assert len(reads[0] | reads[1] | set(call.shared)) == len(values)
        readers = [{n for n, items in call.readers.items() if item in items} for item in (0, 1)]
        assert readers == [set(call.given(item)) for item in (0, 1)]
        seen.add(target._schema.name)
    assert len(seen) > 40


@pytest.mark.parametrize("order", [[[0, 2], [1]], [[2], [1, 0]], [[2, 1, 0]]])
def test_parts_keep_what_is_picked(order: list[list[int]]) -> None:
    module, node, values = drawn(aten._foreach_lerp.ScalarList, (TENSORS, OTHERS, [0.1, 0.2, 0.3]))
    whole = module(*values)
    call = list_call(node)
    assert call is not None
    parts = [part for (part,) in divide(call, order)]
    assert [part.args[2] for part in parts] == [[[0.1, 0.2, 0.3][i] for i in g] for g in order]
    module.recompile()
    assert same_bits(module(*values), whole)


def test_lists_of_other_lengths_are_no_rows_of_entries() -> None:
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    call = graph.call_function(aten._foreach_add.List, ([x, y], [x]))
    assert list_call(call) is None
    assert list_call(x) is None
    assert list_call(graph.call_function(aten.cat.default, ([x, y],))) is None


def test_a_coalesced_collective_has_an_entry_for_each_tensor() -> None:
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    launch = graph.call_function(c10d.all_reduce_coalesced_.default, ([x, y], "sum", "0"))
    call = list_call(launch)
    assert call is not None
    assert [call.writes(item) for item in (0, 1)] == [[x], [y]]
    assert [call.reads(item) for item in (0, 1)] == [[(x, None)], [(y, None)]]


def in_a_row(*, by_item: bool) -> tuple[fx.Graph, list[fx.Node]]:
    """exp(neg([x, y])), with the list of negatives given as a whole or item by item."""
    graph = fx.Graph()
    inputs = [graph.placeholder("x"), graph.placeholder("y")]
    for node, tensor in zip(inputs, TENSORS, strict=False):
        node.meta["val"] = tensor
    negative = graph.call_function(aten._foreach_neg.default, (inputs,))
    negative.meta["val"] = TENSORS[:2]
    items = [graph.call_function(operator.getitem, (negative, i)) for i in (0, 1)]
    given = items if by_item else negative
    listed = graph.call_function(aten._foreach_exp.default, (given,))
    listed.meta["val"] = TENSORS[:2]
    graph.output(([graph.call_function(operator.getitem, (listed, i)) for i in (0, 1)], [], []))
    return graph, [negative, listed]


@pytest.mark.parametrize("before", [True, False])
def test_entries_stay_apart_where_a_list_is_given_as_a_whole(before: bool) -> None:
    was, _ = in_a_row(by_item=before)
    now, (negative, listed) = in_a_row(by_item=not before)
    assert check_dependencies(was, now).ok
    call = list_call(listed)
    assert call is not None
    assert call.can_be_divided == (not before)
    assert before is False or call.reads(1) == [(negative, 1)]
    negative.args = (list(reversed(negative.args[0])),)
    assert not check_dependencies(was, now).ok


def test_the_write_of_one_entry_is_read_by_its_readers_alone() -> None:
    graph = fx.Graph()
    x, y = (graph.placeholder(name) for name in ("x", "y"))
    for node, tensor in zip((x, y), TENSORS, strict=False):
        node.meta["val"] = tensor
    update = graph.call_function(aten._foreach_add_.Scalar, ([x, y], 1))
    reader = graph.call_function(aten.neg.default, (y,))
    reader.meta["val"] = TENSORS[1]
    graph.output(reader)
    assert MemoryOrder(graph).implicit == {reader: {y: Entry(update, 1)}}
