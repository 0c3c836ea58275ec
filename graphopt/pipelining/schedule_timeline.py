"""The predicted timeline of one of torch's pipeline schedules: which stage runs when on each rank.

rank 0  |Ff..BB.bb|      F forward, B backward; capitals and small letters alternate between
rank 1  |.FBBfbb..|      microbatches; dots are idle time, whose share is the bubble share
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from graphopt.errors import ScheduleError

SCHEDULES = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved": "ScheduleInterleaved1F1B",
    "looped-bfs": "ScheduleLoopedBFS",
    "zero-bubble": "ScheduleInterleavedZeroBubble",
    "zbv": "ScheduleZBVZeroBubble",
    "dualpipev": "ScheduleDualPipeV",
}
"""The names that `graphopt trace` takes, with those of torch's classes."""
_V_SHAPED = ("zbv", "dualpipev")
_COLUMNS = 96


class Slot(NamedTuple):
    """An action of a rank: the forward (F) or backward (B; or I of inputs, then W of weights) of a
    stage on a microbatch, from `start` to `end` in seconds."""

    stage: int
    kind: str
    microbatch: int
    start: float
    end: float


@dataclass(frozen=True)
class ScheduleTimeline:
    """The slots of each rank in one step; `str` of it is a picture for a terminal.

    The *bubble share* is the share of the ranks' time in which they run nothing, between the first
    start and the last end: (p - 1) / (m + p - 1) for p equal stages and m microbatches under GPipe
    and 1F1B (Huang et al., GPipe, arXiv:1811.06965, section 2.3).
    """

    schedule: str
    ranks: Sequence[Sequence[Slot]]

    @property
    def step_seconds(self) -> float:
        """The seconds from the first start to the last end."""
        return max(slot.end for slots in self.ranks for slot in slots)

    @property
    def bubble_share(self) -> float:
        """The idle share of all ranks' time, from 0 to 1."""
        return sum(map(self._idle, self.ranks)) / len(self.ranks)

    def _idle(self, slots: Sequence[Slot]) -> float:
        busy = sum(slot.end - slot.start for slot in slots)
        return max(0.0, 1 - busy / self.step_seconds) if self.step_seconds else 0.0

    def __str__(self) -> str:
        shortest = min(
            (s.end - s.start for row in self.ranks for s in row if s.end > s.start), default=0
        )
        columns = max(1, min(_COLUMNS, round(self.step_seconds / shortest))) if shortest else 1
        scale = columns / self.step_seconds if self.step_seconds else 0.0
        lines = [
            f"{self.schedule}, predicted: {len(self.ranks)} ranks, step"
            f" {self.step_seconds:.4g} s, bubble share {100 * self.bubble_share:.1f} %"
        ]
        for rank, slots in enumerate(self.ranks):
            row = ["."] * columns
            for slot in slots:
                first, last = round(slot.start * scale), round(slot.end * scale)
                letter = slot.kind if slot.microbatch % 2 == 0 else slot.kind.lower()
                row[first:last] = letter * (last - first)
            lines.append(f"  rank {rank:<2} |{''.join(row)}| {self._idle(slots):6.1%} idle")
        legend = "  F forward, B backward, I input gradients, W weight gradients"
        return "\n".join([*lines, legend])


def predict_schedule(
    name: str,
    microbatches: int,
    forward: Sequence[float],
    backward: Sequence[float],
    *,
    ranks: int | None = None,
    stages: int | None = None,
    transfer: float = 0.0,
) -> ScheduleTimeline:
    """Predicts when each rank runs its actions, in the order of torch's schedule.

    An action starts when its rank is free and its inputs have arrived. Sends neither hold up their
    rank nor compete with one another, and Python takes no time.

    Args:
        name: one of `SCHEDULES`, or the name of torch's class, in any case of letters.
        forward, backward: the seconds of each stage, or one number: a rank's seconds, of which its
            stages take equal parts. I and W take half of a backward each.
        ranks, stages: None: as the other needs; four ranks, with one or two stages on each.
        transfer: the seconds until another rank has what is sent to it.

    Raises:
        ScheduleError: there is no such schedule, or the numbers do not fit it.
    """
    name = _known_name(name)
    if stages is None:
        stages = next((len(given) for given in (forward, backward) if len(given) > 1), None)
    ranks, stages = _layout(name, ranks, stages)
    seconds = {"F": _of_stages(forward, ranks, stages), "B": _of_stages(backward, ranks, stages)}
    seconds["I"] = seconds["W"] = [value / 2 for value in seconds["B"]]
    order = _order(name, ranks, stages, microbatches)
    return ScheduleTimeline(name, _as_early_as_possible(order, seconds, stages, transfer))


def _known_name(name: str) -> str:
    for known, torch_name in SCHEDULES.items():
        longer = torch_name.lower()
        if name.lower() in (known, longer, longer.removeprefix("schedule")):
            return known
    raise ScheduleError(f"there is no schedule {name!r}; known are {', '.join(SCHEDULES)}")


def _layout(name: str, ranks: int | None, stages: int | None) -> tuple[int, int]:
    single = name in ("gpipe", "1f1b")
    usual = 1 if single else 2
    if stages is None:
        stages = (ranks or 4) * usual
    if ranks is None:
        ranks = max(1, stages // usual)
    if single and stages != ranks:
        raise ScheduleError(
            f"{name} has one stage on each rank: {stages} stages need {stages} ranks, not {ranks}"
        )
    if name in _V_SHAPED and stages != 2 * ranks:
        raise ScheduleError(
            f"{name} has two stages on each rank: {ranks} ranks need {2 * ranks} stages, not"
            f" {stages}"
        )
    if stages % ranks:
        raise ScheduleError(
            f"{name} has as many stages on each rank: {stages} stages cannot be divided among"
            f" {ranks} ranks"
        )
    return ranks, stages


def _of_stages(seconds: Sequence[float], ranks: int, stages: int) -> list[float]:
    found = list(seconds) if len(seconds) > 1 else [seconds[0] * ranks / stages] * stages
    if len(found) != stages:
        raise ScheduleError(f"durations need one number for each stage: {len(found)}, not {stages}")
    if any(not 0 <= value < float("inf") for value in found):
        raise ScheduleError("durations are seconds: finite, and not less than 0")
    return found


def _order(name: str, ranks: int, stages: int, microbatches: int) -> list[list[Any]]:
    """The order of the actions (stage, kind, microbatch) of each rank."""
    from torch.distributed import pipelining

    from graphopt._compat import schedules

    local = [0, stages - 1] if name in _V_SHAPED else range(0, stages, ranks)
    made = [schedules.stage_stand_in(stage, stages, ranks) for stage in local]
    single = name in ("gpipe", "1f1b")
    try:
        schedule = getattr(pipelining, SCHEDULES[name])(made[0] if single else made, microbatches)
    except (ValueError, AssertionError) as error:
        reason = " ".join((str(error) or repr(error)).splitlines()[0].split())
        raise ScheduleError(f"{name} cannot run {microbatches} microbatches: {reason}") from error
    return schedules.compute_actions(schedule)


def _as_early_as_possible(
    order: Sequence[Sequence[tuple[int, str, int]]],
    seconds: dict[str, list[float]],
    stages: int,
    transfer: float,
) -> list[list[Slot]]:
    """List scheduling: each action starts when its rank is free and its inputs have arrived."""
    done: dict[tuple[int, str, int], tuple[int, float]] = {}
    rows: list[list[Slot]] = [[] for _ in order]
    queues = [deque(actions) for actions in order]
    backward = {(s, m): k for actions in order for s, k, m in actions if k in ("B", "I")}

    def needs(stage: int, kind: str, microbatch: int) -> list[tuple[int, str, int]]:
        if kind == "F":
            return [(stage - 1, "F", microbatch)] if stage else []
        if kind == "W":
            return [(stage, "I", microbatch)]
        own = (stage, "F", microbatch)
        if stage + 1 == stages:
            return [own]
        return [own, (stage + 1, backward[stage + 1, microbatch], microbatch)]

    while any(queues):
        for rank, queue in enumerate(queues):
            while queue and all(needed in done for needed in needs(*queue[0])):
                stage, kind, microbatch = action = queue.popleft()
                inputs = (done[needed] for needed in needs(*action))
                arrived = [end + transfer * (sender != rank) for sender, end in inputs]
                start = max([rows[rank][-1].end if rows[rank] else 0.0, *arrived])
                end = start + seconds[kind][stage]
                rows[rank].append(Slot(stage, kind, microbatch, start, end))
                done[action] = rank, end
    return rows
