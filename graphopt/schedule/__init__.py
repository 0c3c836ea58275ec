"""Schedules as data: decided on a plan of the messages, then applied to the graph.

`simulate` predicts how long a graph takes in its order; the passes decide orders.
"""

from __future__ import annotations

from graphopt.errors import ScheduleError
from graphopt.schedule.collectives_table import collectives_text
from graphopt.schedule.granularity import collectives_by_cost
from graphopt.schedule.order import Schedule, apply_schedule
from graphopt.schedule.overlap import overlap_schedule
from graphopt.schedule.program import Message, Program, program_of
from graphopt.schedule.simulator import simulate, simulate_program
from graphopt.schedule.timeline import CollectiveSlot, ComputeSlot, Timeline

__all__ = [
    "CollectiveSlot",
    "ComputeSlot",
    "Message",
    "Program",
    "Schedule",
    "ScheduleError",
    "Timeline",
    "apply_schedule",
    "collectives_by_cost",
    "collectives_text",
    "overlap_schedule",
    "program_of",
    "simulate",
    "simulate_program",
]
