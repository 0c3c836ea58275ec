"""Schedules as data: decided on a plan of what has to be sent, then applied to the graph.

`simulate` predicts how long a graph takes in its order; the passes decide orders.
"""

from __future__ import annotations

from graphopt.schedule.launch_order import LaunchOrder, Send, apply_launch_order, hold_back
from graphopt.schedule.program import Message, Program, program_of
from graphopt.schedule.simulator import simulate, simulate_program
from graphopt.schedule.steps import CollectiveSlot, ComputeSlot
from graphopt.schedule.timeline import Timeline

__all__ = [
    "CollectiveSlot",
    "ComputeSlot",
    "LaunchOrder",
    "Message",
    "Program",
    "Send",
    "Timeline",
    "apply_launch_order",
    "hold_back",
    "program_of",
    "simulate",
    "simulate_program",
]
