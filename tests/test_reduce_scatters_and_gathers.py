"""Reductions that are scattered, and what is gathered: in buckets, both together, and wrongly."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx

from gloo import Pool
from graphopt.replicas.lockstep import Lockstep
from graphopt.verify import EquivalenceReport, check_equivalence
from sketch import Sketch, c10d
from slices import examples

aten = torch.ops.aten

Build = Callable[[Sketch, list[fx.Node], int], list[fx.Node]]
"""Draws what is computed of the inputs on so many ranks."""

WIDTH = 3
DENSE = torch.contiguous_format


def scatter(s: Sketch, x: fx.Node, size: int, how: str = "sum", group: str = "0") -> fx.Node:
    return s.wait(s.call(c10d.reduce_scatter_tensor.default, x, how, size, group))


def gather(s: Sketch, x: fx.Node, size: int, group: str = "0") -> fx.Node:
    return s.wait(s.call(c10d.all_gather_into_tensor.default, x, size, group))


def shaped_as(s: Sketch, value: fx.Node, like: fx.Node, factor: float = 1) -> fx.Node:
    first, *rest = like.meta["val"].shape
    return s.call(aten.reshape.default, value, [int(first * factor), *rest])


def widths(s: Sketch, tensors: list[fx.Node]) -> list[int]:
    return [x.meta["val"].numel() for x in tensors]


def items(s: Sketch, value: fx.Node, count: int) -> list[fx.Node]:
    return [s.call(operator.getitem, value, index) for index in range(count)]


# Each as it is meant, and in other ways that give the same


def summed(s: Sketch, given: list[fx.Node], size: int) -> list[fx.Node]:
    return [s.wait(s.all_reduce(x)) for x in given]


def scattered_and_gathered(s: Sketch, given: list[fx.Node], size: int) -> list[fx.Node]:
    return [gather(s, scatter(s, x, size), size) for x in given]


def transposed_meanwhile(s: Sketch, given: list[fx.Node], size: int) -> list[fx.Node]:
    """A matrix is summed by columns."""
    found = []
    for x in given:
        rows, columns = x.meta["val"].shape
        turned = s.call(aten.reshape.default, s.call(aten.t.default, x), [rows, columns])
        back = s.call(
            aten.reshape.default, gather(s, scatter(s, turned, size), size), [columns, rows]
        )
        found.append(s.call(aten.clone.default, s.call(aten.t.default, back), memory_format=DENSE))
    return found


def each_scattered(s: Sketch, given: list[fx.Node], size: int) -> list[fx.Node]:
    return [scatter(s, x, size) for x in given]


def scattered_in_a_bucket(s: Sketch, given: list[fx.Node], size: int) -> list[fx.Node]:
    rows = [s.call(aten.reshape.default, x, [size, -1]) for x in given]
    share = scatter(s, s.call(aten.reshape.default, s.call(aten.cat.default, rows, 1), [-1]), size)
    lengths = [n // size for n in widths(s, given)]
    parts = items(s, s.call(aten.split_with_sizes.default, share, lengths), len(given))
    return [shaped_as(s, part, x, 1 / size) for part, x in zip(parts, given, strict=True)]


def scattered_as_a_list(s: Sketch, given: list[fx.Node], size: int) -> list[fx.Node]:
    launch = s.call(c10d.reduce_scatter_tensor_coalesced.default, given, "sum", size, "0")
    return [s.wait(part) for part in items(s, launch, len(given))]


def each_gathered(s: Sketch, given: list[fx.Node], size: int) -> list[fx.Node]:
    return [gather(s, x, size) for x in given]


def gathered_in_a_bucket(s: Sketch, given: list[fx.Node], size: int) -> list[fx.Node]:
    flat = [s.call(aten.reshape.default, x, [-1]) for x in given]
    whole = gather(s, s.call(aten.cat.default, flat), size)
    by_rank = s.call(aten.reshape.default, whole, [size, -1])
    parts = items(
        s, s.call(aten.split_with_sizes.default, by_rank, widths(s, given), 1), len(given)
    )
    return [shaped_as(s, part, x, size) for part, x in zip(parts, given, strict=True)]


def gathered_as_a_list(s: Sketch, given: list[fx.Node], size: int) -> list[fx.Node]:
    launch = s.call(c10d.all_gather_into_tensor_coalesced.default, given, size, "0")
    return [s.wait(part) for part in items(s, launch, len(given))]


RIGHT: list[tuple[Build, Build]] = [
    (summed, scattered_and_gathered),
    (summed, transposed_meanwhile),
    (each_scattered, scattered_in_a_bucket),
    (each_scattered, scattered_as_a_list),
    (each_gathered, gathered_in_a_bucket),
    (each_gathered, gathered_as_a_list),
]


# Each wrong in one place


def bucket_not_by_ranks(s: Sketch, given: list[fx.Node], size: int) -> list[fx.Node]:
    """One gradient behind the other: the ranks get parts of one of them."""
    flat = [s.call(aten.reshape.default, x, [-1]) for x in given]
    share = scatter(s, s.call(aten.cat.default, flat), size)
    lengths = [n // size for n in widths(s, given)]
    parts = items(s, s.call(aten.split_with_sizes.default, share, lengths), len(given))
    return [shaped_as(s, part, x, 1 / size) for part, x in zip(parts, given, strict=True)]


def gathered_not_by_ranks(s: Sketch, given: list[fx.Node], size: int) -> list[fx.Node]:
    flat = [s.call(aten.reshape.default, x, [-1]) for x in given]
    whole = gather(s, s.call(aten.cat.default, flat), size)
    lengths = [n * size for n in widths(s, given)]
    parts = items(s, s.call(aten.split_with_sizes.default, whole, lengths), len(given))
    return [shaped_as(s, part, x, size) for part, x in zip(parts, given, strict=True)]


def the_largest(s: Sketch, given: list[fx.Node], size: int) -> list[fx.Node]:
    return [gather(s, scatter(s, x, size, "max"), size) for x in given]


def halves_exchanged(s: Sketch, given: list[fx.Node], size: int) -> list[fx.Node]:
    found = []
    for x in scattered_and_gathered(s, given, size):
        length = x.meta["val"].shape[0] // size
        first = s.call(aten.slice.Tensor, x, 0, 0, length)
        rest = s.call(aten.slice.Tensor, x, 0, length, length * size)
        found.append(s.call(aten.cat.default, [rest, first]))
    return found


def changed_between(s: Sketch, given: list[fx.Node], size: int) -> list[fx.Node]:
    return [gather(s, s.call(aten.neg.default, scatter(s, x, size)), size) for x in given]


def another_is_gathered(s: Sketch, given: list[fx.Node], size: int) -> list[fx.Node]:
    return [gather(s, scatter(s, x, size), size) for x in (given[0], given[0])]


def own_part_repeated(s: Sketch, given: list[fx.Node], size: int) -> list[fx.Node]:
    return [s.call(aten.cat.default, [scatter(s, x, size)] * size) for x in given]


WRONG: list[tuple[Build, Build]] = [
    *((summed, wrong) for wrong in (the_largest, halves_exchanged)),
    *((summed, wrong) for wrong in (changed_between, another_is_gathered, own_part_repeated)),
    (each_scattered, bucket_not_by_ranks),
    (each_gathered, gathered_not_by_ranks),
]


def graph(build: Build, shapes: list[tuple[int, ...]], size: int) -> fx.GraphModule:
    s = Sketch()
    given = [s.input(f"x{i}", *shape) for i, shape in enumerate(shapes)]
    return s.step([s.call(aten.neg.default, x) for x in build(s, given, size)])


def values(shapes: list[tuple[int, ...]], rank: int) -> list[Tensor]:
    """Whole numbers: their sums have the same bits in any order."""
    generator = torch.Generator().manual_seed(rank)
    return [torch.randint(-9, 9, shape, generator=generator).float() for shape in shapes]


def differs(pair: tuple[Build, Build], shapes: list[tuple[int, ...]], size: int) -> bool:
    """Whether ranks get other numbers."""
    inputs = [values(shapes, rank) for rank in range(size)]
    one, other = (
        Lockstep(size, {"0": list(range(size))}).run(graph(b, shapes, size), inputs) for b in pair
    )
    return any(
        not torch.equal(x, y)
        for (xs, _, _), (ys, _, _) in zip(one, other, strict=True)
        for x, y in zip(xs, ys, strict=True)
    )


def compared(
    pair: tuple[Build, Build], shapes: list[tuple[int, ...]], size: int
) -> EquivalenceReport:
    return check_equivalence(*(graph(build, shapes, size) for build in pair))


def named(pair: tuple[Build, Build]) -> str:
    return pair[1].__name__


@pytest.mark.parametrize("pair", RIGHT, ids=named)
@settings(max_examples=examples(24), deadline=None)
@given(
    size=st.integers(2, 5),
    rows=st.lists(st.tuples(st.integers(1, 3), st.integers(1, 4)), min_size=1, max_size=4),
)
def test_right(pair: tuple[Build, Build], size: int, rows: list[tuple[int, int]]) -> None:
    shapes = [(size * height, width) for height, width in rows]
    assert not differs(pair, shapes, size)
    report = compared(pair, shapes, size)
    assert report.ok, str(report)


@pytest.mark.parametrize("pair", WRONG, ids=named)
@pytest.mark.parametrize("size", [2, 3])
def test_wrong(pair: tuple[Build, Build], size: int) -> None:
    shapes = [(2 * size, WIDTH), (size, WIDTH)]
    if pair[1] is another_is_gathered:
        shapes = [(size, WIDTH)] * 2
    assert differs(pair, shapes, size)
    assert not compared(pair, shapes, size).ok


def of_another_group(s: Sketch, given: list[fx.Node], size: int) -> list[fx.Node]:
    return [gather(s, scatter(s, x, size), size, "turned") for x in given]


def of_larger_groups(s: Sketch, given: list[fx.Node], size: int) -> list[fx.Node]:
    found = []
    for x in given:
        whole = gather(s, scatter(s, x, size), 2 * size)
        found.append(s.call(aten.slice.Tensor, whole, 0, 0, x.meta["val"].shape[0]))
    return found


@pytest.mark.parametrize("wrong", [of_another_group, of_larger_groups])
def test_other_ranks_gather(wrong: Build) -> None:
    """In another group, ranks may have other places."""
    assert not compared((summed, wrong), [(4, WIDTH)], 2).ok


def alone(s: Sketch, zeros: list[fx.Node], x: fx.Node, collective: Any) -> list[fx.Node]:
    return [collective(s, each, 2) for each in zeros]


def beside_others(s: Sketch, zeros: list[fx.Node], x: fx.Node, collective: Any) -> list[fx.Node]:
    arrived = collective(s, s.call(aten.cat.default, [zeros[0], x, zeros[1]]), 2)
    length = arrived.meta["val"].shape[0] // 3
    return [s.call(aten.slice.Tensor, arrived, 0, at * length, (at + 1) * length) for at in (0, 2)]


@pytest.mark.parametrize("sent", [alone, beside_others])
@pytest.mark.parametrize("collective", [gather, scatter])
def test_constants_of_other_ranks_are_not_exchanged(sent: Any, collective: Any) -> None:
    """What this rank sends as zeros, another may send as anything."""

    def step(turned: bool) -> fx.GraphModule:
        s = Sketch()
        x = s.input("x", 4)
        zeros = [s.call(aten.zeros_like.default, x) for _ in range(2)]
        arrived = sent(s, zeros, x, collective)
        return s.step([s.call(aten.neg.default, y) for y in arrived[:: -1 if turned else 1]])

    assert check_equivalence(step(False), step(False)).ok
    assert not check_equivalence(step(False), step(True)).ok


@pytest.mark.parametrize("pair", [RIGHT[0], RIGHT[2]], ids=named)
def test_the_order_of_sums_may_be_another(pair: tuple[Build, Build]) -> None:
    assert compared(pair, [(6, WIDTH), (3, WIDTH)], 3).reorders_sums


def _gathered_in_place_of_a_sum(s: Sketch, given: list[fx.Node], size: int) -> list[fx.Node]:
    shares = each_scattered(s, given, size)
    kept = [s.call(aten.add.Tensor, x, x) for x in summed(s, given, size)]
    return [*(gather(s, share, size) for share in shares), *shares, *kept]


def _twice_and_summed(s: Sketch, given: list[fx.Node], size: int) -> list[fx.Node]:
    sums = summed(s, given, size)
    kept = [s.call(aten.add.Tensor, x, x) for x in sums]
    return [*sums, *each_scattered(s, given, size), *kept]


def test_one_sum_in_place_of_another_of_the_same_graph() -> None:
    report = compared((_twice_and_summed, _gathered_in_place_of_a_sum), [(3, WIDTH)], 3)
    assert report.ok and report.reorders_sums


def on_real_ranks(rank: int, build: Build, shapes: list[tuple[int, ...]]) -> list[Tensor]:
    results, _, _ = graph(build, shapes, 2)(*values(shapes, rank))
    return [result.clone() for result in results]


@pytest.mark.parametrize("pair", RIGHT, ids=named)
def test_real_ranks_get_the_same(pair: tuple[Build, Build], two_ranks: Pool) -> None:
    shapes = [(4, WIDTH), (2, 5), (6, 1)]
    one, other = (two_ranks.run(on_real_ranks, build, shapes) for build in pair)
    for mine, theirs in zip(one, other, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(mine, theirs, strict=True))
