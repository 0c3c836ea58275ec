"""Contents of a graph's HTML page, as values that JSON can hold."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from typing import Any

from torch import fx

from graphopt.ir.metadata import has_value, input_name, modules_of, provenance_of, source_line
from graphopt.iter_graph import IterGraph
from graphopt.manager import PassRecord, records_of
from graphopt.readable.listing import MARKS
from graphopt.readable.plain_text import summary
from graphopt.readable.rows import row_of, target_text, title_of
from graphopt.schedule.pictures import PARAMETERS, facts_of, lanes_of
from graphopt.schedule.simulator import simulate

_LONGEST = 400
"""Characters of a call."""


def contents_of(
    gm: fx.GraphModule, title: str, diffs: Mapping[str, Sequence[str]] | None = None
) -> dict[str, Any]:
    """The contents of a graph's HTML page.

    Args:
        title: over the page.
        diffs: for passes by name, the lines of the difference that they made.
    """
    known = all(has_value(node) for node in gm.graph.nodes if node.op != "output")
    timeline = simulate(gm) if known else None
    nodes = _Nodes(gm.graph)
    slots = () if timeline is None else timeline.collectives
    facts = [facts_of(slot) for slot in slots]
    heads = list(facts[0]) if facts else []
    return {
        "title": title,
        "summary": next(summary(gm.graph)),
        "legend": ", ".join(f"{mark} {meaning}" for mark, meaning in MARKS.items()),
        "nodes": nodes.rows,
        "phases": list(nodes.phases),
        "modules": list(nodes.modules),
        "places": list(nodes.places),
        "collectives": [
            {"node": nodes.index[slot.message.launch], "cells": list(fact.values())}
            for slot, fact in zip(slots, facts, strict=True)
        ],
        "heads": heads,
        "wide": heads.index(PARAMETERS) if heads else -1,
        "table": "",
        "passes": list(_passes(records_of(gm), diffs or {})),
        "lanes": [] if timeline is None else list(lanes_of(timeline, nodes.index)),
        "seconds": 0.0 if timeline is None else timeline.end - timeline.begin,
    }


def _numbers() -> defaultdict[str, int]:
    """Numbers for repeated texts, each of which is stored once."""
    return defaultdict(count().__next__)


class _Nodes:
    """The page's table of nodes, one row each.

    Attributes:
        rows: name, call, shape, bytes, phase, module, line, marks, pass, note, inputs, operator.
        index: the number of each node.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.phases, self.modules, self.places = _numbers(), _numbers(), _numbers()
        self.index: dict[fx.Node, int] = {}
        self.rows: list[list[Any]] = []
        late = graph.late if isinstance(graph, IterGraph) else {}
        for node in graph.nodes:
            if node.op != "output":
                self.index[node] = len(self.rows)
                self.rows.append(self._row(node, late))

    def _row(self, node: fx.Node, late: Mapping[fx.Node, fx.Node]) -> list[Any]:
        row = row_of(node, late)
        source = source_line(node)
        made = (provenance_of(node) or ("",))[-1]
        return [
            node.name,
            row.text[:_LONGEST],
            row.shape,
            row.size,
            self.phases[title_of(node)],
            self.modules[_module(node)],
            self.places["" if source is None else str(source)],
            row.marks,
            "" if made == "capture" else made,
            row.note,
            [self.index[source] for source in node.all_input_nodes if source in self.index],
            target_text(node),
        ]


def _module(node: fx.Node) -> str:
    if node.op == "placeholder":
        return (input_name(node) or "").rpartition(".")[0]
    modules = modules_of(node)
    return str(list(modules.values())[-1][0]) if modules else ""


def _passes(
    records: Sequence[PassRecord], diffs: Mapping[str, Sequence[str]]
) -> Iterator[dict[str, Any]]:
    times: dict[str, int] = {}
    for record in records:
        times[record.name] = number = times.get(record.name, 0) + 1
        key = record.name if number == 1 else f"{record.name}_{number}"
        yield {
            "name": record.name,
            "text": [str(record), ""],
            "diff": list(diffs.get(key) or str(record.difference).splitlines()),
        }
