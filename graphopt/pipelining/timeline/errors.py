"""Errors of pipeline timelines."""

from __future__ import annotations

from graphopt.errors import GraphOptError


class ScheduleDeadlockError(GraphOptError, RuntimeError):
    """The ranks of a schedule wait for each other's actions, which never run.

    Attributes:
        waiting: for each rank that is not done, its next action and the action that it waits for.
    """

    def __init__(self, schedule: str, waiting: dict[int, tuple[str, str]]) -> None:
        self.waiting = waiting
        lines = [f"the schedule {schedule} cannot go on; these ranks wait:"]
        lines += [f"  rank {r}: {a} waits for {other}" for r, (a, other) in waiting.items()]
        super().__init__("\n".join(lines))
