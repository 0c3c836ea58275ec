"""Recording of the actions of a real schedule, with their times.

The ranges that torch's schedules give to its profiler (`record_function`) would not do: those of a
forward or backward begin before what other ranks send has arrived, so that waiting would count as
work and the bubble vanish, and `Schedule1F1B` gives none (torch 2.13).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

from graphopt._compat import schedules
from graphopt.errors import ScheduleError
from graphopt.pipelining.timeline.orders import SCHEDULES
from graphopt.pipelining.timeline.picture import ScheduleTimeline
from graphopt.pipelining.timeline.slots import Action, Kind, Slot


class _Noted(NamedTuple):
    action: Action
    start: Any
    end: Any


@contextmanager
def record_schedule(schedule: Any) -> Iterator[Recording]:
    """Note when the stages of this rank begin and end each action of one step.

    ```python
    with record_schedule(schedule) as recording:
        schedule.step(x)
    timeline = recording.timeline()
    ```

    The loss belongs to the forward of the last stage. Waiting for other ranks belongs to nothing.
    On a CUDA device moments are those of the stream that computes. The stages and the schedule are
    as before afterwards.

    Args:
        schedule: of torch, with the stages of this rank.
    """
    from graphopt.pipelining.timeline.clock import marks_for

    stages = schedules.stages_of(schedule)
    recording = Recording(_name(schedule), stages[0], marks_for(stages[0].device))
    with ExitStack() as stack:
        for stage in stages:
            for method, kind in _METHODS.items():
                stack.enter_context(_wrapped(recording, stage, method, kind))
        stack.enter_context(schedules.loss_wrapped(schedule, recording.with_loss))
        yield recording


class Recording:
    """Times that `record_schedule` noted on this rank."""

    def __init__(self, schedule: str, stage: Any, marks: Any) -> None:
        self._schedule = schedule
        self._stage = stage
        self._marks = marks
        self._noted: list[_Noted] = []

    def note(self, action: Action, run: Callable[[], Any]) -> Any:
        """Run an action and note it."""
        start = self._marks.mark()
        result = run()
        self._noted.append(_Noted(action, start, self._marks.mark()))
        return result

    def with_loss(self, loss_fn: Callable[..., Any]) -> Callable[..., Any]:
        """A loss function that belongs to the forward noted last."""

        def computed(*args: Any, **kwargs: Any) -> Any:
            loss = loss_fn(*args, **kwargs)
            self._noted[-1] = self._noted[-1]._replace(end=self._marks.mark())
            return loss

        return computed

    def timeline(self) -> ScheduleTimeline:
        """The slots of all ranks, on every rank. Collective over the group of the stages.

        Raises:
            ScheduleError: there was not exactly one step.
        """
        import torch.distributed as dist

        from graphopt.pipelining.timeline.clock import clock_offsets

        group = self._stage.group
        size = dist.get_world_size(group)
        rank = self._stage.group_rank
        offset = clock_offsets(group)[rank]
        own = [
            Slot(rank, *noted.action, self._at(noted.start) - offset, self._at(noted.end) - offset)
            for noted in self._noted
        ]
        gathered: list[Any] = [None] * size
        dist.all_gather_object(gathered, own, group)
        return _timeline(self._schedule, [slot for slots in gathered for slot in slots], size)

    def _at(self, mark: Any) -> float:
        return float(self._marks.seconds(mark))


_METHODS: dict[str, Kind] = {
    "forward_one_chunk": "F",
    "backward_one_chunk": "B",
    "backward_weight_one_chunk": "W",
}


@contextmanager
def _wrapped(recording: Recording, stage: Any, method: str, kind: Kind) -> Iterator[None]:
    original = getattr(stage, method)

    def noted(chunk: int, *args: Any, **kwargs: Any) -> Any:
        divided = kind == "B" and not kwargs.get("full_backward", True)
        run = partial(original, chunk, *args, **kwargs)
        return recording.note(Action(stage.stage_index, "I" if divided else kind, chunk), run)

    before = vars(stage).get(method)
    setattr(stage, method, noted)
    try:
        yield
    finally:
        if before is None:
            delattr(stage, method)
        else:
            setattr(stage, method, before)


def _timeline(schedule: str, slots: list[Slot], ranks: int) -> ScheduleTimeline:
    if not slots:
        raise ScheduleError("no step of the schedule ran inside record_schedule")
    if len({slot.action for slot in slots}) < len(slots):
        raise ScheduleError("more than one step of the schedule ran inside record_schedule")
    begin = min(slot.start for slot in slots)
    moved = (slot._replace(start=slot.start - begin, end=slot.end - begin) for slot in slots)
    ordered = sorted(moved, key=lambda slot: (slot.rank, slot.start, slot.end))
    return ScheduleTimeline(schedule, "measured", ranks, tuple(ordered))


def _name(schedule: Any) -> str:
    known = {kind.torch_name: kind.name for kind in SCHEDULES.values()}
    torch_name = type(schedule).__name__
    return known.get(torch_name, torch_name)
