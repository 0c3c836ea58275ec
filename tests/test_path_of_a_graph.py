"""The way of a graph from a call of the step to its first run: the functions that it passes.

docs/ir.md lists them. Here they are recorded, as whoever goes through the stages calls them.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import fx, nn

import graphopt
from graphopt.iter_graph import IterGraph, IterGraphModule
from steps import mean_square

DRIVERS = frozenset(
    {
        "graphopt.manager.running",
        "graphopt.manager.stages",
        "graphopt.stages.compiling",
        "graphopt.tracing.capture",
        "graphopt.tracing.captured_dialect",
    }
)
"""Modules whose functions take a graph from stage to stage."""

DOCS = Path(__file__).parents[1] / "docs" / "ir.md"


class Way:
    """Functions that were called with a graph, by stage."""

    def __init__(self) -> None:
        self.stages: dict[str, list[tuple[str, fx.Graph]]] = {}
        self._now: list[tuple[str, fx.Graph]] = []

    def see(self, frame: FrameType, event: str, _: object) -> None:
        if event != "call" or not _module(frame).startswith("graphopt."):
            return
        caller = _caller(frame)
        if caller is None or _module(caller) not in DRIVERS or _module(frame) in DRIVERS:
            return
        code = frame.f_code
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        given = {name: frame.f_locals.get(name) for name in names}
        graphs = list(filter(None, map(_graph_of, given.values())))
        if graphs:
            self._note(frame, given, graphs[0])

    def _note(self, frame: FrameType, given: dict[str, Any], graph: fx.Graph) -> None:
        name, owner = frame.f_code.co_name, given.get("self")
        if name in ("graph", "late") and isinstance(owner, IterGraphModule | IterGraph):
            return
        if name.startswith("<") or _is_data(frame):
            return
        if name == "add_record":
            self.stages[_key(given["record"])] = self._now
            self._now = []
            return
        named = _named(frame, owner)
        self._now.append((named, graph))
        if named == "Snapshot":
            self.stages["admission"] = self._now
            self._now = []


def _graph_of(value: object) -> fx.Graph | None:
    """The graph that a function is given; a module has none while it is made."""
    if isinstance(value, fx.GraphModule):
        graph = getattr(value, "graph", None)
        return graph if isinstance(graph, fx.Graph) else None
    return value if isinstance(value, fx.Graph) else None


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _caller(frame: FrameType) -> FrameType | None:
    """Whose code calls; generators and context managers of Python's stand in between."""
    caller = frame.f_back
    while caller is not None and not _module(caller).startswith("graphopt."):
        caller = caller.f_back
    return caller


def _named(frame: FrameType, owner: Any) -> str:
    """A function by its name, a method by that of the class that has it, too."""
    name = frame.f_code.co_name
    for cls in type(owner).__mro__:
        if getattr(vars(cls).get(name), "__code__", None) is frame.f_code:
            return cls.__name__ if name == "__init__" else f"{cls.__name__}.{name}"
    return name


def _is_data(frame: FrameType) -> bool:
    """Whether it makes an object that only holds what it is given."""
    return frame.f_code.co_filename == "<string>"


def _key(record: Any) -> str:
    graph = record.arguments.get("graph")
    return f"{record.name} ({graph})" if graph else str(record.name)


@contextmanager
def watched() -> Iterator[Way]:
    way = Way()
    before = sys.getprofile()
    sys.setprofile(way.see)
    try:
        yield way
    finally:
        sys.setprofile(before)


def recorded(**options: Any) -> dict[str, list[tuple[str, fx.Graph]]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = graphopt.compile(mean_square, **options)
    with watched() as way:
        step(model, optimizer, torch.ones(4, 8))
    return way.stages


def documented() -> dict[str, list[str]]:
    section = DOCS.read_text().partition("## The way of a graph")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `([^`]+)` \| (.*) \|$", section, re.MULTILINE)
    return {stage: re.findall(r"`([^`]+)`", functions) for stage, functions in rows}


@pytest.mark.parametrize("pipeline", ["default", "schedule_comm_wait"])
def test_no_function_takes_a_graph_twice_in_a_stage(pipeline: str) -> None:
    for stage, passed in recorded(pipeline=pipeline).items():
        assert len(set(passed)) == len(passed), stage


def test_the_documented_way() -> None:
    way = recorded(pipeline="schedule_comm_wait").items()
    assert {stage: [name for name, _ in passed] for stage, passed in way} == documented()
