"""Private parts of torch's pipeline schedules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

_COMPUTE = ("F", "B", "I", "W")

_Computed = tuple[int, str, int]
"""Stage, kind, microbatch."""


def stage_stand_in(stage: int, stages: int, ranks: int) -> Any:
    """A stand-in for a stage of rank 0, enough to construct a schedule.

    A real one needs a process group.
    """
    return SimpleNamespace(
        stage_index=stage, num_stages=stages, group_rank=0, group_size=ranks, submod=None
    )


def compute_actions(schedule: Any) -> list[list[_Computed]]:
    """The compute actions of each rank in order."""
    from torch.distributed.pipelining.schedules import PipelineScheduleSingle

    order = schedule.pipeline_order
    rows = [list(_computed(order[rank])) for rank in sorted(order)]
    # Schedule1F1B (torch 2.11 to 2.15) numbers the last rank's forwards from 1 in what it says;
    # what it runs, as all schedules with one stage on each rank, is numbered from 0.
    return (
        [_renumbered(row) for row in rows] if isinstance(schedule, PipelineScheduleSingle) else rows
    )


def _computed(actions: Iterable[Any]) -> Iterator[_Computed]:
    for action in actions:
        if action is None:
            continue
        # An overlapped forward and backward (DualPipeV): torch runs one after the other.
        for part in action.sub_actions or (action,):
            if part.computation_type.value in _COMPUTE:
                yield part.stage_index, part.computation_type.value, part.microbatch_index


def _renumbered(row: list[_Computed]) -> list[_Computed]:
    counts: Counter[str] = Counter()
    result = []
    for stage, kind, _ in row:
        result.append((stage, kind, counts[kind]))
        counts[kind] += 1
    return result
