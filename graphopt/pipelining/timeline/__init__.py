"""Predicted timelines of pipeline schedules, from the durations of stages."""

from graphopt.errors import ScheduleError
from graphopt.pipelining.timeline.orders import SCHEDULES, ScheduleOrder
from graphopt.pipelining.timeline.picture import ScheduleTimeline
from graphopt.pipelining.timeline.predicting import StageDurations, predict_schedule
from graphopt.pipelining.timeline.slots import Action, RankFigures, Slot

__all__ = [
    "SCHEDULES",
    "Action",
    "RankFigures",
    "ScheduleError",
    "ScheduleOrder",
    "ScheduleTimeline",
    "Slot",
    "StageDurations",
    "predict_schedule",
]
