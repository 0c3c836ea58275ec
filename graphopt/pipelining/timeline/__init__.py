"""Predicted timelines of pipeline schedules, from the durations of stages."""

from graphopt.errors import ScheduleError
from graphopt.pipelining.timeline.durations import StageDurations, measure_durations
from graphopt.pipelining.timeline.errors import ScheduleDeadlockError
from graphopt.pipelining.timeline.orders import SCHEDULES, ScheduleOrder
from graphopt.pipelining.timeline.picture import ScheduleTimeline
from graphopt.pipelining.timeline.predicting import predict_schedule
from graphopt.pipelining.timeline.slots import Action, RankFigures, Slot

__all__ = [
    "SCHEDULES",
    "Action",
    "RankFigures",
    "ScheduleDeadlockError",
    "ScheduleError",
    "ScheduleOrder",
    "ScheduleTimeline",
    "Slot",
    "StageDurations",
    "measure_durations",
    "predict_schedule",
]
