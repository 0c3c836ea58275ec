"""Which all-reduces share a bucket, and what has to move for it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx

from graphopt.comm import get_all_comm_blocks
from graphopt.passes import comm_fusion_with_concat
from sketch import Sketch, bucket_sizes, c10d, fused, gradients, one_rank, targets
from slices import examples

aten = torch.ops.aten
KB = 1024


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    with one_rank():
        yield


@pytest.mark.parametrize(
    ("kilobytes", "bucket_size_mb", "expected"),
    [
        # The first bucket closes at 1 MB, whatever the size of later ones.
        ([512] * 7, 2, [2, 4, 1]),
        ([512] * 7, 25, [2, 5]),
        ([512] * 5, 0.5, [1, 1, 1, 1, 1]),
        # A bucket closes once it is full, so that it may grow beyond its size.
        ([300] * 8, 1, [4, 4]),
        ([4096, 4, 4], 25, [1, 2]),
        ([4, 4, 4], 1e-9, [1, 1, 1]),
        ([600] * 4, float("inf"), [2, 2]),
        # One of small gradients closes whenever four times its size has gone by beside it, with the
        # last of those in it, unless that is too large to be copied.
        ([4, 512, 4, 512, 4, 4, 1024, 4], 0.25, [1, 3, 3, 1]),
        ([4, 2048, 4, 1024, 4, 300, 4], 0.25, [2, 2, 1, 2]),
        ([4, 8192, 4, 1024, 4, 4096, 4], 0.25, [1, 1, 2, 2, 1]),
    ],
)
def test_bucket_sizes(kilobytes: list[int], bucket_size_mb: float, expected: list[int]) -> None:
    gm = gradients(*((k * KB // 4,) for k in kilobytes))
    fused(gm, bucket_size_mb=bucket_size_mb)
    assert bucket_sizes(gm) == expected


@pytest.mark.parametrize(
    ("kilobytes", "min_buckets", "expected"),
    [
        ([512] * 8, 1, [2, 6]),
        ([512] * 8, 4, [2, 2, 2, 2]),
        ([512] * 8, 8, [1] * 8),
        # The first still closes at 1 MB, and none below 256 KB.
        ([1024] * 8, 2, [1, 4, 3]),
        ([64] * 12, 100, [4, 4, 4]),
        # The smaller of both limits counts: 25 MB here.
        ([30 * 1024] * 4, 2, [1, 1, 1, 1]),
        # One that is much larger than the others does not make their buckets larger.
        ([4096] + [256] * 8, 8, [1, 2, 2, 2, 2]),
        ([256] * 4 + [8192] + [256] * 4 + [16384], 8, [2, 2, 1, 2, 2, 1]),
        ([4096, 64, 64], 1, [1, 2]),
    ],
)
def test_number_of_buckets(kilobytes: list[int], min_buckets: int, expected: list[int]) -> None:
    gm = gradients(*((k * KB // 4,) for k in kilobytes))
    comm_fusion_with_concat(gm, min_buckets=min_buckets)
    assert bucket_sizes(gm) == expected


def test_bytes_of_each_dtype() -> None:
    """Two bytes for each element of bfloat16, eight of float64."""
    for dtype, expected in ((torch.bfloat16, [4, 4]), (torch.float64, [1, 1, 1, 1, 1, 1, 1, 1])):
        gm = gradients(*(((128 * KB,),) * 8), dtype=dtype)
        comm_fusion_with_concat(gm, bucket_size_mb=1)
        assert bucket_sizes(gm) == expected


def test_kinds_are_not_mixed() -> None:
    """Each combination of group, operation and dtype has its own open bucket."""
    s = Sketch()
    kinds = [("sum", torch.float32), ("max", torch.float32), ("sum", torch.float64)]
    launches = []
    for i in range(6):
        operation, dtype = kinds[i % 3]
        launches.append(s.all_reduce(s.input(f"x{i}", 4, dtype=dtype), operation))
    gm = fused(s.step([s.call(aten.neg.default, s.wait(launch)) for launch in launches]))
    blocks = get_all_comm_blocks(gm)
    assert [(block.reduce_op, block.dtype) for block in blocks] == kinds
    assert bucket_sizes(gm) == [2, 2, 2]


def test_groups_are_not_mixed() -> None:
    s = Sketch()
    launches = [s.all_reduce(s.input(f"x{i}", 4), "sum", "ab"[i % 2]) for i in range(4)]
    gm = s.step([s.call(aten.neg.default, s.wait(launch)) for launch in launches])
    comm_fusion_with_concat(gm)
    assert [block.group for block in get_all_comm_blocks(gm)] == ["a", "b"]
    assert bucket_sizes(gm) == [2, 2]


def test_single_member_is_left_alone() -> None:
    gm = gradients((4, 4))
    before = str(gm.graph)
    fused(gm, changes=0)
    assert str(gm.graph) == before


def test_other_collectives_are_left_alone() -> None:
    s = Sketch()
    x = s.input("x", 4)
    launches = [s.call(c10d.broadcast.default, x, 0, "0") for _ in range(3)]
    gm = fused(s.step([s.call(aten.neg.default, s.wait(launch)) for launch in launches]))
    assert targets(gm).count("broadcast") == 3


def test_launches_move_up_to_their_gradients() -> None:
    s = Sketch()
    first = s.call(aten.neg.default, s.input("x", 4))
    second = s.call(aten.exp.default, first)
    unrelated = s.call(aten.sin.default, second)
    launches = [s.all_reduce(first, "max"), s.all_reduce(second)]
    gm = fused(s.step([unrelated, *(s.call(aten.neg.default, s.wait(x)) for x in launches)]))
    assert targets(gm)[:5] == ["neg", "all_reduce", "exp", "all_reduce", "sin"]


def test_launches_of_a_group_keep_their_order() -> None:
    """A rank that does not use a parameter knows its gradient, zero, from the start."""
    s = Sketch()
    zeros = s.call(aten.zeros_like.default, s.input("w", 4))
    gradient = s.call(aten.neg.default, s.input("x", 4))
    first = s.all_reduce(gradient, "max")
    second = s.all_reduce(zeros, "sum")
    gm = fused(s.step([s.call(aten.neg.default, s.wait(x)) for x in (first, second)]))
    assert targets(gm)[:4] == ["zeros_like", "neg", "all_reduce", "all_reduce"]
    assert [block.reduce_op for block in get_all_comm_blocks(gm)] == ["max", "sum"]


# Dependencies


def test_dependent_pair_is_not_fused() -> None:
    s = Sketch()
    first = s.wait(s.average(s.input("x", 4)))
    second = s.wait(s.average(s.call(aten.exp.default, first)))
    gm = fused(s.step([s.call(aten.neg.default, second)]), changes=0)
    assert bucket_sizes(gm) == [1, 1]


def test_sum_of_a_sum() -> None:
    s = Sketch()
    other = s.all_reduce(s.input("y", 4))
    again = s.wait(s.all_reduce(s.wait(s.all_reduce(s.input("x", 4)))))
    gm = fused(s.step([s.call(aten.neg.default, x) for x in (s.wait(other), again)]), changes=2)
    assert bucket_sizes(gm) == [2, 1]


def test_buckets_do_not_wait_for_each_other_in_a_circle() -> None:
    """b1 -> a2 and a1 -> b2: of the pairs (a1, a2) and (b1, b2) only one can be fused."""
    s = Sketch()
    a1, b1 = s.all_reduce(s.input("x", 4)), s.all_reduce(s.input("y", 4), "max")
    a2 = s.all_reduce(s.call(aten.exp.default, s.wait(b1)))
    b2 = s.all_reduce(s.call(aten.exp.default, s.wait(a1)), "max")
    gm = fused(s.step([s.call(aten.neg.default, s.wait(x)) for x in (a2, b2)]))
    assert [block.reduce_op for block in get_all_comm_blocks(gm)] == ["max", "sum", "max"]
    assert bucket_sizes(gm) == [1, 2, 1]


def test_readers_move_behind_the_fused_wait_in_order() -> None:
    s = Sketch()
    first = s.wait(s.average(s.input("x", 4)))
    early = s.call(aten.exp.default, first)
    later = s.call(aten.sin.default, early)
    other = s.call(aten.neg.default, s.input("y", 4))
    second = s.wait(s.average(other))
    gm = fused(s.step([later, s.call(aten.add.Tensor, second, early)]), changes=2)
    assert bucket_sizes(gm) == [2]
    tail = targets(gm)[targets(gm).index("wait_tensor") :]
    assert tail == ["wait_tensor", "split_with_sizes", "getitem", "getitem", "exp", "sin", "add"]
    assert targets(gm)[0] == "neg"


def test_random_numbers_keep_their_order() -> None:
    """A reader that draws moves, so everything that draws after it does; the launch cannot."""
    s = Sketch()
    first = s.wait(s.average(s.input("x", 4)))
    noisy = s.call(aten.bernoulli.default, s.call(aten.sigmoid.default, first))
    drawn = s.call(aten.bernoulli.p, s.input("y", 4), 0.5)
    second = s.wait(s.average(drawn))
    gm = fused(s.step([noisy, s.call(aten.neg.default, second)]), changes=0)
    assert targets(gm).count("all_reduce") == 2


def update_in_backward() -> tuple[Sketch, fx.Node, list[fx.Node]]:
    """A parameter that is updated as soon as its gradient is there, and again read."""
    s = Sketch()
    w = s.input("w", 4, kind="parameter")
    gradient = s.wait(s.average(s.input("x", 4)))
    scaled = s.call(aten.mul.Tensor, gradient, w)
    updated = s.call(aten.copy_.default, w, s.call(aten.add.Tensor, w, scaled))
    return s, updated, [scaled]


def test_updates_move_with_what_they_depend_on() -> None:
    s, updated, results = update_in_backward()
    second = s.wait(s.average(s.input("y", 4)))
    gm = fused(s.step([*results, s.call(aten.neg.default, second)], [updated]), changes=2)
    assert targets(gm)[-6:] == ["getitem", "getitem", "mul", "add", "copy_", "neg"]


def test_read_of_an_update_is_a_dependency() -> None:
    s, updated, results = update_in_backward()
    second = s.wait(s.average(s.call(aten.exp.default, updated)))
    fused(s.step([*results, s.call(aten.neg.default, second)], [updated]), changes=0)


def test_overwriting_what_a_moved_reader_needs() -> None:
    """The reader of the wait reads `w` as well; an update of `w` must not overtake it."""
    s = Sketch()
    w = s.input("w", 4, kind="parameter")
    first = s.wait(s.average(s.input("x", 4)))
    product = s.call(aten.mul.Tensor, first, w)
    updated = s.call(aten.copy_.default, w, s.call(aten.zeros_like.default, w))
    second = s.wait(s.average(s.input("y", 4)))
    gm = fused(s.step([product, s.call(aten.neg.default, second)], [updated]), changes=2)
    assert targets(gm).index("copy_") > targets(gm).index("wait_tensor")


def test_overwriting_what_a_member_sends() -> None:
    s = Sketch()
    buffer = s.input("buffer", 4, kind="buffer")
    first = s.all_reduce(buffer)
    updated = s.call(aten.copy_.default, buffer, s.call(aten.zeros_like.default, buffer))
    second = s.all_reduce(s.input("y", 4))
    results = [s.call(aten.neg.default, s.wait(launch)) for launch in (first, second)]
    fused(s.step(results, [updated]), changes=0)


# Any order of launches, readers, random numbers and updates


@settings(max_examples=examples(40))
@given(st.lists(st.tuples(st.integers(0, 7), st.integers(0, 99)), max_size=24))
def test_random_programs(program: list[tuple[int, int]]) -> None:
    """Verified, the same bits, and nothing left for a second run."""
    s = Sketch()
    states = [s.input(name, 4, kind="parameter") for name in "pqr"]
    values = [s.input("x", 4), s.input("y", 4)]
    pending: list[fx.Node] = []
    updates: list[fx.Node] = []
    for instruction, number in program:
        value = values[number % len(values)]
        if instruction <= 2:
            pending.append(s.all_reduce(value, "max") if instruction else s.average(value))
        elif instruction == 3 and pending:
            values.append(s.wait(pending.pop(number % len(pending))))
        elif instruction == 4:
            values.append(s.call(aten.bernoulli.p, value, 0.5))
        elif instruction == 5 and len(updates) < len(states):
            updates.append(s.call(aten.copy_.default, states[len(updates)], value))
            values.append(updates[-1])
        elif instruction == 6:
            values.append(s.call(aten.mul.Tensor, value, states[number % len(states)]))
        else:
            values.append(s.call(aten.sin.default, value))
    values += [s.wait(launch) for launch in pending]
    fused(s.step([s.call(aten.neg.default, value) for value in values], updates))
