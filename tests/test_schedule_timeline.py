"""Predicted timelines of pipeline schedules: known closed forms, and properties of any schedule."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphopt.pipelining.schedule_timeline import (
    _V_SHAPED,
    SCHEDULES,
    ScheduleTimeline,
    predict_schedule,
)


def predicted(
    name: str, ranks: int, microbatches: int, *, per_rank: int | None = None, transfer: float = 0.0
) -> ScheduleTimeline:
    """A forward takes 1 s and a backward 2 s on a rank, for all of its equal stages."""
    stages = None if per_rank is None else ranks * per_rank
    return predict_schedule(
        name, microbatches, [1.0], [2.0], ranks=ranks, stages=stages, transfer=transfer
    )


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("p", "m"), [(1, 1), (2, 2), (4, 4), (4, 8), (3, 7), (8, 32)])
def test_one_stage_on_each_rank(name: str, p: int, m: int) -> None:
    timeline = predicted(name, p, m)
    assert timeline.step_seconds == pytest.approx(3 * (m + p - 1))
    assert timeline.bubble_share == pytest.approx((p - 1) / (m + p - 1))


@pytest.mark.parametrize("name", ["interleaved", "looped-bfs"])
@pytest.mark.parametrize(("p", "m", "v"), [(2, 4, 2), (4, 8, 2), (4, 16, 3), (4, 8, 4)])
def test_v_stages_on_each_rank_divide_the_bubble_by_v(name: str, p: int, m: int, v: int) -> None:
    timeline = predicted(name, p, m, per_rank=v)
    assert timeline.step_seconds == pytest.approx(3 * (m + (p - 1) / v))
    assert timeline.bubble_share == pytest.approx((p - 1) / (v * m + p - 1))


@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (4, 16), (8, 16)])
def test_zero_bubble_v_waits_only_for_its_first_forward(p: int, m: int) -> None:
    """Where F = I = W, each rank only starts later than the one before."""
    assert predicted("zbv", p, m).step_seconds == pytest.approx(3 * m + (p - 1) / 2)


@pytest.mark.parametrize(("p", "m"), [(4, 8), (4, 16), (8, 16)])
def test_weight_gradients_fill_a_third_of_the_1f1b_bubble(p: int, m: int) -> None:
    """ZB-H1 with F = I = W: (p - 1) (F + I - W) instead of (p - 1) (F + B)."""
    timeline = predicted("zero-bubble", p, m, per_rank=1)
    assert timeline.step_seconds == pytest.approx(3 * m + (p - 1))


def test_a_transfer_delays_every_hop() -> None:
    without, with_transfer = predicted("gpipe", 4, 8), predicted("gpipe", 4, 8, transfer=0.25)
    assert with_transfer.step_seconds == pytest.approx(without.step_seconds + 2 * 3 * 0.25)
    assert predicted("1f1b", 1, 8, transfer=9.0).bubble_share == 0


def test_unequal_stages() -> None:
    timeline = predict_schedule("gpipe", 2, [1, 3], [1, 3])
    # Rank 1 runs from 1 to 13, and what follows it takes 1 second.
    assert timeline.step_seconds == 14
    assert timeline.bubble_share == pytest.approx((10 + 2) / 28)


def test_a_step_of_no_length() -> None:
    timeline = predict_schedule("gpipe", 2, [0.0], [0.0], ranks=2)
    assert timeline.bubble_share == 0 and "step 0 s" in str(timeline)


def test_the_last_rank_of_1f1b_begins_with_the_first_microbatch() -> None:
    last = predicted("1f1b", 2, 2).ranks[1]
    assert [(slot.kind, slot.microbatch) for slot in last] == [
        ("F", 0),
        ("B", 0),
        ("F", 1),
        ("B", 1),
    ]


SECONDS = st.floats(0.001, 10)


@given(st.data(), st.sampled_from(list(SCHEDULES)), st.sampled_from([0.0, 0.5]))
def test_any_schedule(data: st.DataObject, name: str, transfer: float) -> None:
    """Every stage does all its work once, after what it needs, and ranks do one thing at a time."""
    single = name in ("gpipe", "1f1b")
    ranks = data.draw(st.integers(1, 5))
    per_rank = 1 if single else 2 if name in _V_SHAPED else data.draw(st.integers(1, 3))
    stages = ranks * per_rank
    microbatches = stages * data.draw(st.integers(1, 3))
    seconds = [
        data.draw(st.lists(SECONDS, min_size=stages, max_size=stages)) if stages > 1 else [1.0]
        for _ in range(2)
    ]
    timeline = predict_schedule(
        name, microbatches, *seconds, ranks=ranks, stages=stages, transfer=transfer
    )
    ends: dict[tuple[int, str, int], tuple[int, float]] = {}
    kinds: defaultdict[tuple[int, int], str] = defaultdict(str)
    for rank, slots in enumerate(timeline.ranks):
        assert all(before.end <= after.start for before, after in pairwise(slots))
        for slot in slots:
            ends[slot.stage, slot.kind, slot.microbatch] = rank, slot.end
            kinds[slot.stage, slot.microbatch] += slot.kind
    assert len(kinds) == stages * microbatches and set(kinds.values()) <= {"FB", "FIW"}
    for rank, slots in enumerate(timeline.ranks):
        for stage, kind, microbatch, start, _ in slots:
            near = stage - 1 if kind == "F" else stage + 1
            wanted = ("F",) if kind == "F" else ("B", "I")
            if kind == "W" or not 0 <= near < stages:
                continue
            (sent,) = [ends[near, k, microbatch] for k in wanted if (near, k, microbatch) in ends]
            assert sent[1] + transfer * (sent[0] != rank) <= start
    assert 0 <= timeline.bubble_share <= 1
    assert str(timeline).count("rank ") == ranks
    assert max(map(len, str(timeline).splitlines())) <= 120
