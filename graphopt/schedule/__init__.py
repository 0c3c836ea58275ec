"""Schedules as data: decided on a plan of what has to be sent, then applied to the graph."""

from __future__ import annotations

from graphopt.schedule.launch_order import LaunchOrder, Send, apply_launch_order, hold_back

__all__ = ["LaunchOrder", "Send", "apply_launch_order", "hold_back"]
