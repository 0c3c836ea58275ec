"""The time slots of a pipeline schedule, and figures such as its bubble share."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple

Kind = Literal["F", "B", "I", "W"]

KIND_NAMES: dict[Kind, str] = {
    "F": "forward",
    "B": "backward",
    "I": "input gradients",
    "W": "weight gradients",
}
"""What the letters stand for, which are those of torch's schedules: B is I and W in one."""


class Action(NamedTuple):
    """One action of a stage on a microbatch, written as torch writes it: `2F0`."""

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


class Slot(NamedTuple):
    """The time in which a rank runs one action, from `start` to `end` in seconds."""

    rank: int
    stage: int
    kind: Kind
    microbatch: int
    start: float
    end: float

    @property
    def action(self) -> Action:
        """The action that runs in this slot."""
        return Action(self.stage, self.kind, self.microbatch)

    @property
    def seconds(self) -> float:
        """The length of the slot in seconds."""
        return self.end - self.start


@dataclass(frozen=True)
class RankFigures:
    """Busy and idle time of one rank in a step, in seconds.

    Attributes:
        stages: the stages that it ran.
        busy, idle: together the step.
        bubble_share: `idle` as a share of the step.
    """

    rank: int
    stages: tuple[int, ...]
    busy: float
    idle: float
    bubble_share: float


@dataclass(frozen=True)
class ScheduleTimes:
    """All slots of one step, in order of rank and start.

    The *bubble share* is the share of the ranks' time in which they run nothing, between the first
    start and the last end of the step on any rank: 1 - busy / (ranks x step). For equal stages
    under GPipe or 1F1B it is (p - 1) / (m + p - 1) for p ranks and m microbatches (Huang et al.,
    GPipe, arXiv:1811.06965, section 2.3). Qi et al. (Zero Bubble Pipeline Parallelism,
    arXiv:2401.10241) call it the bubble rate, for equal stages. Megatron's fraction (Narayanan et
    al., arXiv:2104.04473) divides the same idle time by the busy time instead.
    """

    schedule: str
    num_ranks: int
    slots: tuple[Slot, ...] = field(repr=False)

    @cached_property
    def step_seconds(self) -> float:
        """The seconds from the first start to the last end."""
        return self.end - self.start

    @cached_property
    def start(self) -> float:
        """The time at which the first action begins, in seconds."""
        return min(slot.start for slot in self.slots)

    @cached_property
    def end(self) -> float:
        """The time at which the last action ends, in seconds."""
        return max(slot.end for slot in self.slots)

    @cached_property
    def microbatches(self) -> int:
        """The number of microbatches."""
        return len({slot.microbatch for slot in self.slots})

    @cached_property
    def by_rank(self) -> tuple[tuple[Slot, ...], ...]:
        """The time slots of a schedule, grouped by rank."""
        rows: list[list[Slot]] = [[] for _ in range(self.num_ranks)]
        for slot in self.slots:
            rows[slot.rank].append(slot)
        return tuple(map(tuple, rows))

    @cached_property
    def ranks(self) -> tuple[RankFigures, ...]:
        """The busy and idle figures of each rank."""
        return tuple(self._figures(rank, slots) for rank, slots in enumerate(self.by_rank))

    @cached_property
    def bubble_share(self) -> float:
        """Idle share of all ranks' time, from 0 to 1."""
        return sum(figures.bubble_share for figures in self.ranks) / self.num_ranks

    @cached_property
    def imbalance_share(self) -> float:
        """The part of the bubble share that is due to unequal ranks, whatever the schedule.

        A step is at least as long as the busiest rank, and this is the others' idle time in that
        case: it goes away by dividing the model better, the rest of the bubble by another schedule
        or more microbatches.
        """
        if not self.step_seconds:
            return 0.0
        busy = [figures.busy for figures in self.ranks]
        return (max(busy) - sum(busy) / len(busy)) / self.step_seconds

    def _figures(self, rank: int, slots: tuple[Slot, ...]) -> RankFigures:
        # Rounding must not make an idle time of less than nothing.
        idle = max(0.0, self.step_seconds - sum(slot.seconds for slot in slots))
        return RankFigures(
            rank=rank,
            stages=tuple(sorted({slot.stage for slot in slots})),
            busy=self.step_seconds - idle,
            idle=idle,
            bubble_share=idle / self.step_seconds if self.step_seconds else 0.0,
        )
