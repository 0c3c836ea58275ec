"""The order in which each rank of a pipeline schedule runs its actions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from graphopt.errors import ScheduleError
from graphopt.pipelining.timeline.slots import Action

if TYPE_CHECKING:
    from torch.distributed.pipelining import PipelineStage


@dataclass(frozen=True)
class ScheduleKind:
    """A schedule class of `torch.distributed.pipelining`, such as 1F1B.

    Attributes:
        name: the name in `graphopt trace`.
        torch_name: the name of torch's class.
        several_stages: whether a rank may hold more than one stage.
        v_shaped: whether a rank holds exactly two, counted from both ends.
    """

    name: str
    torch_name: str
    several_stages: bool = False
    v_shaped: bool = False

    @property
    def usual_stages(self) -> int:
        """The default number of stages on each rank."""
        return 2 if self.several_stages else 1

    def stages_of(self, rank: int, ranks: int, stages: int) -> list[int]:
        """The pipeline stages that a rank holds under this schedule.

        Raises:
            ScheduleError: the stages do not fit the ranks.
        """
        self.check(ranks, stages)
        if self.v_shaped:
            return [rank, stages - 1 - rank]
        return list(range(rank, stages, ranks))

    def check(self, ranks: int, stages: int) -> None:
        """Raises ScheduleError if the number of stages does not fit the number of ranks."""
        if not self.several_stages and stages != ranks:
            raise ScheduleError(
                f"{self.name} has one stage on each rank: {stages} stages need {stages} ranks,"
                f" not {ranks}"
            )
        if self.v_shaped and stages != 2 * ranks:
            raise ScheduleError(
                f"{self.name} has two stages on each rank: {ranks} ranks need {2 * ranks} stages,"
                f" not {stages}"
            )
        if stages % ranks:
            raise ScheduleError(
                f"{self.name} has as many stages on each rank: {stages} stages cannot be divided"
                f" among {ranks} ranks"
            )

    def make(self, stages: Sequence[PipelineStage], microbatches: int, **options: Any) -> Any:
        """Makes torch's schedule object for the stages of one rank.

        Raises:
            ScheduleError: torch does not accept them.
        """
        from torch.distributed import pipelining

        made = getattr(pipelining, self.torch_name)
        given = list(stages) if self.several_stages else stages[0]
        try:
            return made(given, microbatches, **options)
        except (ValueError, AssertionError) as error:
            reason = " ".join(str(error).splitlines()[0].split()) if str(error) else repr(error)
            raise ScheduleError(
                f"{self.name} cannot run {microbatches} microbatches: {reason}"
            ) from error


SCHEDULES = {
    kind.name: kind
    for kind in (
        ScheduleKind("gpipe", "ScheduleGPipe"),
        ScheduleKind("1f1b", "Schedule1F1B"),
        ScheduleKind("interleaved", "ScheduleInterleaved1F1B", several_stages=True),
        ScheduleKind("looped-bfs", "ScheduleLoopedBFS", several_stages=True),
        ScheduleKind("zero-bubble", "ScheduleInterleavedZeroBubble", several_stages=True),
        ScheduleKind("zbv", "ScheduleZBVZeroBubble", several_stages=True, v_shaped=True),
        ScheduleKind("dualpipev", "ScheduleDualPipeV", several_stages=True, v_shaped=True),
    )
}
"""By name, the simplest first."""


def find_schedule(name: str) -> ScheduleKind:
    """The schedule of that name, or of torch's class of that name, in any case of letters.

    Raises:
        ScheduleError: there is none. The message lists all.
    """
    wanted = name.lower()
    for kind in SCHEDULES.values():
        torch_name = kind.torch_name.lower()
        if wanted in (kind.name, torch_name, torch_name.removeprefix("schedule")):
            return kind
    raise ScheduleError(f"there is no schedule {name!r}; known are {', '.join(SCHEDULES)}")


@dataclass(frozen=True)
class ScheduleOrder:
    """The order of the actions of each rank in one step of a schedule."""

    name: str
    actions: tuple[tuple[Action, ...], ...]

    def __post_init__(self) -> None:
        every = [action for rank in self.actions for action in rank]
        if not every:
            raise ScheduleError(f"the schedule {self.name} has no action")
        repeated = [action for action, count in Counter(every).items() if count > 1]
        if repeated:
            raise ScheduleError(f"the schedule {self.name} runs {repeated[0]} more than once")
        seen: dict[int, int] = {}
        for rank, actions in enumerate(self.actions):
            for action in actions:
                if seen.setdefault(action.stage, rank) != rank:
                    raise ScheduleError(
                        f"the schedule {self.name} has stage {action.stage} on rank"
                        f" {seen[action.stage]} and on rank {rank}"
                    )

    @property
    def num_ranks(self) -> int:
        """The number of ranks in the schedule."""
        return len(self.actions)

    @property
    def num_stages(self) -> int:
        """The number of pipeline stages on all ranks."""
        return 1 + max(action.stage for rank in self.actions for action in rank)

    @classmethod
    def named(cls, name: str, ranks: int, stages: int, microbatches: int) -> ScheduleOrder:
        """The order of a named schedule for given numbers of ranks, stages and microbatches.

        Raises:
            ScheduleError: there is no such schedule, or it does not fit.
        """
        from graphopt._compat import schedules

        kind = find_schedule(name)
        local = kind.stages_of(0, ranks, stages)
        schedule = kind.make(
            [schedules.stage_stand_in(stage, stages, ranks) for stage in local], microbatches
        )
        return cls.of(schedule, kind.name)

    @classmethod
    def of(cls, schedule: Any, name: str | None = None) -> ScheduleOrder:
        """The order that a schedule object of torch runs its actions in.

        Raises:
            ScheduleError: it does not say in what order it runs.
        """
        from graphopt._compat import schedules

        rows = schedules.compute_actions(schedule)
        torch_name = type(schedule).__name__
        if rows is None:
            raise ScheduleError(f"{torch_name} does not say in what order it runs its actions")
        known = {kind.torch_name: kind.name for kind in SCHEDULES.values()}
        return cls(name or known.get(torch_name, torch_name), _rows(rows))


def _rows(rows: Sequence[Sequence[tuple[int, Any, int]]]) -> tuple[tuple[Action, ...], ...]:
    return tuple(tuple(Action(*action) for action in row) for row in rows)
