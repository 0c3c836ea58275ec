"""Updates of a part of what was computed: through columns, transposed, viewed otherwise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx

import graphopt
from graphopt.verify import check_equivalence

aten = torch.ops.aten
Call = tuple[Any, tuple[Any, ...]]
"""An operator, and its arguments: nodes by their numbers, as text."""

VIEWS: list[Call] = [
    (aten.view.default, ([6, 4],)),
    (aten.view.default, ([2, 2, 6],)),
    (aten.view.default, ([24],)),
    (aten.t.default, ()),
    (aten.transpose.int, (0, -1)),
    (aten.permute.default, ([1, 2, 0],)),
    (aten.slice.Tensor, (1, 1, 4)),
    (aten.slice.Tensor, (1, 2, 5)),
    (aten.slice.Tensor, (0, 0, 2)),
    (aten.slice.Tensor, (0, 0, 4, 2)),
    (aten.select.int, (1, 1)),
    (aten.select.int, (0, -1)),
    (aten.diagonal.default, ()),
    (aten.unsqueeze.default, (1,)),
    (aten.as_strided.default, ([3, 2], [6, 2], 1)),
]
UPDATES: list[Call] = [
    (aten.add_.Scalar, (1.5,)),
    (aten.mul_.Scalar, (-2.0,)),
    (aten.relu_.default, ()),
    (aten.zero_.default, ()),
    (aten.exp_.default, ()),
]


def graph_of(program: Sequence[tuple[Call, int]], read: Sequence[int]) -> fx.GraphModule | None:
    """A graph that changes a tensor of its own; None where some call does not fit.

    Args:
        program: calls, each with the number of the value that it takes first.
        read: numbers of values that are returned, as copies.
    """
    graph = fx.Graph()
    x = graph.placeholder("x")
    with torch._subclasses.FakeTensorMode():
        x.meta["val"] = torch.empty(4, 6)
    values = [call(graph, aten.mul.Tensor, x, x)]
    for (target, args), first in program:
        try:
            values.append(call(graph, target, values[first % len(values)], *args))
        except Exception:
            return None
    results = [call(graph, aten.clone.default, values[number % len(values)]) for number in read]
    graph.output((results, [], []))
    return fx.GraphModule(torch.nn.Module(), graph)


def call(graph: fx.Graph, target: Any, *args: Any) -> fx.Node:
    return graphopt.graph_utils.call_function_with_meta(graph, target, args)


def same_numbers(one: fx.GraphModule, other: fx.GraphModule) -> bool:
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(3))
    return all(map(torch.equal, one(x.clone())[0], other(x.clone())[0]))


calls = st.tuples(st.sampled_from(VIEWS + UPDATES), st.integers(0, 5))


@settings(max_examples=80)
@given(st.lists(calls, min_size=2, max_size=7), st.integers(0, 6), calls, st.booleans())
def test_what_is_accepted_gives_the_same_numbers(
    program: list[tuple[Call, int]], place: int, instead: tuple[Call, int], exchanged: bool
) -> None:
    """One call is made another one, or trades places with the next."""
    read = range(len(program) + 1)
    before = graph_of(program, read)
    edited, place = list(program), place % len(program)
    if exchanged:
        edited[place - 1], edited[place] = edited[place], edited[place - 1]
    else:
        edited[place] = instead
    after = graph_of(edited, read)
    if before is None or after is None:
        return
    assert check_equivalence(before, before).ok
    if check_equivalence(before, after).ok:
        assert same_numbers(before, after)


def written_through(*views: Call, then: Call = UPDATES[0]) -> fx.GraphModule:
    """The whole tensor, after one of its parts was updated."""
    program = [(view, number) for number, view in enumerate(views)]
    gm = graph_of([*program, (then, len(views))], [0, len(views) + 1])
    assert gm is not None
    return gm


COLUMNS = (VIEWS[6],)
OTHERS = {
    "columns": COLUMNS,
    "other columns": (VIEWS[7],),
    "every second row": (VIEWS[9],),
    "the diagonal": (VIEWS[12],),
    "by strides": (VIEWS[14],),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_part_that_is_no_range(name: str) -> None:
    mine = written_through(*OTHERS[name])
    assert check_equivalence(mine, written_through(*OTHERS[name])).ok
    for other, views in OTHERS.items():
        assert check_equivalence(mine, written_through(*views)).ok == (other == name)
    assert not check_equivalence(mine, written_through(*OTHERS[name], then=UPDATES[1])).ok


def functional(change: Callable[[fx.Graph, fx.Node], fx.Node]) -> fx.GraphModule:
    graph = fx.Graph()
    x = graph.placeholder("x")
    with torch._subclasses.FakeTensorMode():
        x.meta["val"] = torch.empty(4, 6)
    square = call(graph, aten.mul.Tensor, x, x)
    result = change(graph, square)
    graph.output(([call(graph, aten.clone.default, result)], [], []))
    return fx.GraphModule(torch.nn.Module(), graph)


def as_heads(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """Transposed, and then in yet another shape."""
    turned = call(graph, aten.transpose.int, call(graph, aten.view.default, node, [4, 2, 3]), 0, 1)
    return call(graph, aten.view.default, turned, [2, 2, 2, 3])


def test_a_part_that_is_permuted_and_viewed_otherwise() -> None:
    def plain(graph: fx.Graph, node: fx.Node) -> fx.Node:
        return call(graph, aten.mul.Scalar, as_heads(graph, node), 2.0)

    def in_place(graph: fx.Graph, node: fx.Node) -> fx.Node:
        return call(graph, aten.mul_.Scalar, as_heads(graph, node), 2.0)

    def whole(graph: fx.Graph, node: fx.Node) -> fx.Node:
        call(graph, aten.mul_.Scalar, as_heads(graph, node), 2.0)
        return node

    def whole_at_once(graph: fx.Graph, node: fx.Node) -> fx.Node:
        return call(graph, aten.mul.Scalar, node, 2.0)

    assert check_equivalence(functional(plain), functional(in_place)).ok
    assert check_equivalence(functional(whole_at_once), functional(whole)).ok
    assert not check_equivalence(functional(plain), functional(whole)).ok


def test_elements_that_lie_in_one_place_are_not_decided() -> None:
    overlapping = (aten.as_strided.default, ([4, 3], [1, 1], 0))
    gm = written_through(overlapping)
    report = check_equivalence(gm, gm)
    assert not report.decidable and "updates a part" in str(report)
