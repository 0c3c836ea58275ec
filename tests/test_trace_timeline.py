"""Pictures of schedules: known closed forms, properties of any schedule, files and messages."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphopt.errors import GraphOptError
from graphopt.pipelining.timeline import (
    SCHEDULES,
    Action,
    ScheduleError,
    ScheduleOrder,
    ScheduleTimeline,
    StageDurations,
    predict_schedule,
)
from graphopt.pipelining.timeline.orders import find_schedule
from graphopt.viewing import trace_page


def predicted(
    name: str, ranks: int, microbatches: int, *, per_rank: int | None = None, transfer: float = 0.0
) -> ScheduleTimeline:
    """Equal stages. A forward takes 1 s and a backward 2 s on a rank, for all of its stages."""
    stages = ranks * (per_rank or SCHEDULES[name].usual_stages)
    order = ScheduleOrder.named(name, ranks, stages, microbatches)
    share = ranks / stages
    durations = StageDurations([share] * stages, [2 * share] * stages)
    return predict_schedule(order, durations, transfer=transfer)


# ---------------------------------------------------------------------------- closed forms


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("p", "m"), [(1, 1), (2, 2), (4, 4), (4, 8), (3, 7), (8, 32)])
def test_one_stage_on_each_rank(name: str, p: int, m: int) -> None:
    timeline = predicted(name, p, m)
    assert timeline.step_seconds == pytest.approx(3 * (m + p - 1))
    assert timeline.bubble_share == pytest.approx((p - 1) / (m + p - 1))
    assert timeline.imbalance_share == pytest.approx(0)


@pytest.mark.parametrize("name", ["interleaved", "looped-bfs"])
@pytest.mark.parametrize(("p", "m", "v"), [(2, 4, 2), (4, 8, 2), (4, 16, 3), (4, 8, 4)])
def test_v_stages_on_each_rank_divide_the_bubble_by_v(name: str, p: int, m: int, v: int) -> None:
    timeline = predicted(name, p, m, per_rank=v)
    assert timeline.step_seconds == pytest.approx(3 * (m + (p - 1) / v))
    assert timeline.bubble_share == pytest.approx((p - 1) / (v * m + p - 1))


@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (4, 16), (8, 16)])
def test_zero_bubble_v_waits_only_for_its_first_forward(p: int, m: int) -> None:
    """Where F = I = W, each rank only starts later than the one before."""
    timeline = predicted("zbv", p, m)
    assert timeline.step_seconds == pytest.approx(3 * m + (p - 1) / 2)
    assert all(figures.busy == pytest.approx(3 * m) for figures in timeline.ranks)


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
    order = ScheduleOrder.named("gpipe", 2, 2, 2)
    timeline = predict_schedule(order, StageDurations([1, 3], [1, 3]))
    # Rank 1 runs from 1 to 13, and what follows it takes 1 second.
    assert timeline.step_seconds == 14
    assert [figures.busy for figures in timeline.ranks] == [4, 12]
    assert timeline.bubble_share == pytest.approx((10 + 2) / 28)
    assert timeline.imbalance_share == pytest.approx(8 / 28)


def test_the_last_rank_of_1f1b_begins_with_the_first_microbatch() -> None:
    order = ScheduleOrder.named("1f1b", 2, 2, 2)
    assert [" ".join(map(str, rank)) for rank in order.actions] == [
        "0F0 0F1 0B0 0B1",
        "1F0 1B0 1F1 1B1",
    ]


# ---------------------------------------------------------------------------- properties


def needs(action: Action, every: set[Action], stages: int) -> list[Action]:
    """What must have ended before an action starts."""
    stage, kind, microbatch = action
    if kind == "F":
        return [Action(stage - 1, "F", microbatch)] if stage else []
    if kind == "W":
        return [Action(stage, "I", microbatch)]
    after = {Action(stage + 1, "B", microbatch), Action(stage + 1, "I", microbatch)} & every
    assert bool(after) == (stage + 1 < stages)
    return [Action(stage, "F", microbatch), *after]


def check(timeline: ScheduleTimeline, order: ScheduleOrder, transfer: float) -> None:
    slots = {slot.action: slot for slot in timeline.slots}
    assert set(slots) == {action for rank in order.actions for action in rank}
    for rank, row in enumerate(timeline.by_rank):
        assert [slot.action for slot in row] == list(order.actions[rank])
        assert all(before.end <= after.start for before, after in pairwise(row))
    longest: defaultdict[Action, float] = defaultdict(float)
    for slot in sorted(timeline.slots, key=lambda slot: (slot.end, slot.start)):
        for needed in needs(slot.action, set(slots), order.num_stages):
            arrived = slots[needed].end + transfer * (slots[needed].rank != slot.rank)
            assert arrived <= slot.start
            longest[slot.action] = max(longest[slot.action], longest[needed])
        longest[slot.action] += slot.seconds
    assert timeline.step_seconds >= max(longest.values()) - 1e-9
    assert timeline.step_seconds >= max(figures.busy for figures in timeline.ranks) - 1e-9
    assert 0 <= timeline.imbalance_share <= timeline.bubble_share + 1e-9 <= 1 + 1e-9


SECONDS = st.floats(0.001, 10)


@st.composite
def cases(draw: st.DrawFn) -> tuple[ScheduleOrder, StageDurations]:
    kind = SCHEDULES[draw(st.sampled_from(list(SCHEDULES)))]
    ranks = draw(st.integers(1, 5))
    per_rank = 2 if kind.v_shaped else draw(st.integers(1, 3)) if kind.several_stages else 1
    stages = ranks * per_rank
    microbatches = stages * draw(st.integers(1, 3))
    order = ScheduleOrder.named(kind.name, ranks, stages, microbatches)
    lists = [draw(st.lists(SECONDS, min_size=stages, max_size=stages)) for _ in range(2)]
    return order, StageDurations(*lists)


@given(cases(), st.sampled_from([0.0, 0.5]))
def test_any_schedule(case: tuple[ScheduleOrder, StageDurations], transfer: float) -> None:
    order, durations = case
    timeline = predict_schedule(order, durations, transfer=transfer)
    check(timeline, order, transfer)
    assert str(timeline).count("rank ") == order.num_ranks


# ---------------------------------------------------------------------------- orders and errors


def order_of(*ranks: str) -> ScheduleOrder:
    rows = [[Action(int(a[0]), a[1], int(a[2:])) for a in rank.split()] for rank in ranks]  # type: ignore[arg-type]
    return ScheduleOrder("mine", tuple(map(tuple, rows)))


def test_a_deadlock_names_what_waits() -> None:
    order = order_of("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1")
    with pytest.raises(ScheduleError) as raised:
        predict_schedule(order, StageDurations([1, 1], [2, 2]))
    waiting = ["  rank 0: 0B0 waits for 1B0", "  rank 1: 1F1 waits for 0F1"]
    assert str(raised.value).splitlines()[1:] == waiting


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        (("0F0 0B0 0F0",), "runs 0F0 more than once"),
        (("0F0", "0B0"), "stage 0 on rank 0 and on rank 1"),
        ((), "has no action"),
    ],
)
def test_orders_that_make_no_sense(ranks: tuple[str, ...], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        order_of(*ranks)


@pytest.mark.parametrize(
    ("name", "ranks", "stages", "microbatches", "message"),
    [
        ("fastest", 2, 2, 2, "no schedule 'fastest'; known are gpipe, 1f1b, interleaved"),
        ("gpipe", 2, 4, 2, "one stage on each rank: 4 stages need 4 ranks, not 2"),
        ("zbv", 2, 2, 2, "two stages on each rank: 2 ranks need 4 stages, not 2"),
        ("interleaved", 2, 3, 2, "3 stages cannot be divided among 2 ranks"),
        ("1f1b", 4, 4, 2, r"1f1b cannot run 2 microbatches: Number of microbatches \(2\) must be"),
        ("interleaved", 2, 4, 5, "interleaved cannot run 5 microbatches: .*multiple"),
        ("dualpipev", 2, 4, 3, "dualpipev cannot run 3 microbatches"),
    ],
)
def test_what_does_not_fit(
    name: str, ranks: int, stages: int, microbatches: int, message: str
) -> None:
    with pytest.raises(ScheduleError, match=message) as raised:
        ScheduleOrder.named(name, ranks, stages, microbatches)
    assert isinstance(raised.value, GraphOptError) and isinstance(raised.value, ValueError)


def test_names_of_torch() -> None:
    assert find_schedule("Interleaved1F1B").name == "interleaved"
    assert find_schedule("ScheduleZBVZeroBubble").name == "zbv"


@pytest.mark.parametrize(
    ("forward", "backward", "message"),
    [
        ([1.0], [2.0, 2.0], "there are 1 of forwards and 2 of backwards"),
        ([], [], "one number for each stage"),
        ([-1.0], [2.0], "not less than 0"),
        ([float("nan")], [2.0], "finite"),
    ],
)
def test_durations_that_make_no_sense(
    forward: list[float], backward: list[float], message: str
) -> None:
    with pytest.raises(ScheduleError, match=message):
        StageDurations(forward, backward)


def test_durations_of_other_stages() -> None:
    order = ScheduleOrder.named("gpipe", 2, 2, 2)
    with pytest.raises(ScheduleError, match="has 2 stages, and there are durations of 3"):
        predict_schedule(order, StageDurations([1] * 3, [2] * 3))


# ---------------------------------------------------------------------------- pictures


def test_text() -> None:
    assert str(predicted("1f1b", 2, 2)) == "\n".join(
        [
            "1f1b, predicted: 2 ranks, 2 microbatches, step 9 s, bubble share 33.3 %",
            "  rank 0  |Ff..BB.bb|  33.3% idle",
            "  rank 1  |.FBBfbb..|  33.3% idle",
            "  F forward, B backward, I input gradients, W weight gradients",
        ]
    )


def test_text_of_a_long_schedule_fits_a_terminal() -> None:
    lines = str(predicted("zbv", 16, 64)).splitlines()
    assert len(lines) == 18 and max(map(len, lines)) <= 120


def test_chrome_trace(tmp_path: Path) -> None:
    timeline = predicted("zbv", 2, 4)
    timeline.save_chrome_trace(tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text())
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert [
        (event["tid"], event["name"], event["ts"] / 1e6, event["dur"] / 1e6) for event in events
    ] == [(s.rank, str(s.action), s.start, pytest.approx(s.seconds)) for s in timeline.slots]
    names = [e["args"]["name"] for e in trace["traceEvents"] if e["ph"] == "M"]
    assert names == ["rank 0: stages 0, 3", "rank 1: stages 1, 2"]
    assert trace["otherData"]["bubble_share"] == timeline.bubble_share


def test_a_trace_is_shown_as_a_page(tmp_path: Path) -> None:
    predicted("zbv", 16, 64).save_chrome_trace(tmp_path / "zbv.json")
    page = trace_page((tmp_path / "zbv.json").read_text(), "zbv.json")
    assert "rank 15: stages 15, 16" in page and len(page) < 2_000_000


def test_a_step_of_no_length() -> None:
    timeline = predict_schedule(
        ScheduleOrder.named("gpipe", 2, 2, 2), StageDurations([0, 0], [0, 0])
    )
    assert timeline.bubble_share == timeline.imbalance_share == 0
    assert "step 0 s, bubble share 0.0 %" in str(timeline)


def test_the_documentation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    document = Path(__file__).resolve().parent.parent / "docs" / "pipelining.md"
    section = document.read_text().partition("## Pictures of schedules")[2]
    code, text = re.findall(r"^```(?:python|text)\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)[
        :2
    ]
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "pipelining.md", "exec"), {})
    assert capsys.readouterr().out == text
    assert Path("1f1b.json").exists()
