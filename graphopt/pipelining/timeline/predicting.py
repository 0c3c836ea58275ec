"""Prediction of a schedule's timeline from its order and the durations of its actions."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from graphopt.errors import ScheduleError
from graphopt.pipelining.timeline.orders import ScheduleOrder
from graphopt.pipelining.timeline.picture import ScheduleTimeline
from graphopt.pipelining.timeline.slots import Action, Slot


@dataclass(frozen=True)
class StageDurations:
    """The seconds that each stage takes for one microbatch.

    Attributes:
        forward: the seconds of F, the forward.
        backward: the seconds of B, the whole backward; I, the backward of the inputs, and W, that
            of the weights, take half of it each.
    """

    forward: Sequence[float]
    backward: Sequence[float]

    def __post_init__(self) -> None:
        if len(self.forward) != len(self.backward) or not self.forward:
            raise ScheduleError(
                "durations need one number for each stage: there are"
                f" {len(self.forward)} of forwards and {len(self.backward)} of backwards"
            )
        if any(not 0 <= value < float("inf") for value in (*self.forward, *self.backward)):
            raise ScheduleError("durations are seconds: finite, and not less than 0")

    @property
    def num_stages(self) -> int:
        """The number of stages that have durations."""
        return len(self.forward)

    def of(self, action: Action) -> float:
        """The duration of an action, in seconds."""
        if action.kind == "F":
            return self.forward[action.stage]
        return self.backward[action.stage] / (1 if action.kind == "B" else 2)


def predict_schedule(
    schedule: ScheduleOrder | Any, durations: StageDurations, *, transfer: float = 0.0
) -> ScheduleTimeline:
    """Predicts a schedule's timeline; every action starts as soon as its inputs are there.

    List scheduling in the order that the schedule fixes: an action starts when its rank is free and
    what it needs has arrived. A forward needs that of the stage before, a backward its own forward
    and the backward of the stage after, weight gradients their input gradients. Sends are taken not
    to hold up their rank, and not to compete with each other.

    Args:
        schedule: an order, or a schedule object of torch.
        durations: seconds of each stage's actions.
        transfer: seconds from the end of an action to when another rank has what it sends.

    Raises:
        ScheduleError: there are not as many durations as stages, or the ranks would wait for each
            other forever.
    """
    order = schedule if isinstance(schedule, ScheduleOrder) else ScheduleOrder.of(schedule)
    if durations.num_stages != order.num_stages:
        raise ScheduleError(
            f"the schedule {order.name} has {order.num_stages} stages, and there are durations of"
            f" {durations.num_stages}"
        )
    return _Simulation(order, durations, transfer).run()


class _Simulation:
    def __init__(self, order: ScheduleOrder, durations: StageDurations, transfer: float) -> None:
        self._order = order
        self._durations = durations
        self._transfer = transfer
        self._queues = [deque(actions) for actions in order.actions]
        self._free = [0.0] * order.num_ranks
        self._done: dict[Action, Slot] = {}
        # A stage's input gradients are there after I, or after B where a schedule does all at once.
        self._backward = {
            (action.stage, action.microbatch): action
            for actions in order.actions
            for action in actions
            if action.kind in ("B", "I")
        }

    def run(self) -> ScheduleTimeline:
        waiting: defaultdict[Action, list[int]] = defaultdict(list)
        runnable = deque(range(self._order.num_ranks))
        while runnable:
            rank = runnable.popleft()
            queue = self._queues[rank]
            while queue:
                lacking = self._lacking(queue[0])
                if lacking is not None:
                    waiting[lacking].append(rank)
                    break
                action = queue.popleft()
                self._run(rank, action)
                runnable.extend(waiting.pop(action, ()))
        self._check_done()
        slots = sorted(self._done.values(), key=lambda slot: (slot.rank, slot.start, slot.end))
        return ScheduleTimeline(self._order.name, self._order.num_ranks, tuple(slots))

    def _run(self, rank: int, action: Action) -> None:
        start = max([self._free[rank], *(self._arrival(n, rank) for n in self._needs(action))])
        end = start + self._durations.of(action)
        self._free[rank] = end
        self._done[action] = Slot(rank, *action, start, end)

    def _arrival(self, needed: Action, rank: int) -> float:
        slot = self._done[needed]
        return slot.end if slot.rank == rank else slot.end + self._transfer

    def _lacking(self, action: Action) -> Action | None:
        return next((needed for needed in self._needs(action) if needed not in self._done), None)

    def _needs(self, action: Action) -> list[Action]:
        stage, kind, microbatch = action
        if kind == "F":
            return [Action(stage - 1, "F", microbatch)] if stage else []
        if kind == "W":
            return [Action(stage, "I", microbatch)]
        needs = [Action(stage, "F", microbatch)]
        if stage + 1 < self._order.num_stages:
            after = Action(stage + 1, "B", microbatch)
            needs.append(self._backward.get((stage + 1, microbatch), after))
        return needs

    def _check_done(self) -> None:
        stuck = [
            f"  rank {rank}: {queue[0]} waits for {self._lacking(queue[0])}"
            for rank, queue in enumerate(self._queues)
            if queue
        ]
        if stuck:
            waiting = "\n".join(stuck)
            raise ScheduleError(
                f"the schedule {self._order.name} cannot go on; these ranks wait:\n{waiting}"
            )
