"""What notebooks show of graphs, records and steps (`_repr_html_`)."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from torch import fx

from graphopt.manager.records import Counts, PassRecord
from graphopt.readable.text import summary
from graphopt.viewing.page import view_page

_MOST_NODES = 20_000
"""Of a graph that is shown whole: what is shown is part of the notebook's file."""


def graph_html(gm: fx.GraphModule, title: str = "step") -> str:
    """A graph module: the page of `graphopt view` in a frame."""
    text = escape(next(summary(gm.graph)))
    if len(gm.graph.nodes) > _MOST_NODES:
        return (
            f"<p>{text}; <code>graphopt.saved.save_graph</code> and <code>graphopt view</code></p>"
        )
    page = escape(view_page(gm, title), quote=True)
    style = "width:100%;height:32rem;border:1px solid #ccc;border-radius:6px"
    return f'<p>{text}</p><iframe srcdoc="{page}" style="{style}" title="graph"></iframe>'


def records_html(records: Sequence[PassRecord]) -> str:
    """A table of passes."""
    heads = ["pass", "options", "outcome", "ms", *Counts._fields]
    head = "".join(f"<th>{escape(text)}</th>" for text in heads)
    body = "".join(f"<tr>{''.join(map(_cell, _values(record)))}</tr>" for record in records)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _cell(text: str) -> str:
    return f"<td>{escape(text)}</td>"


def _values(record: PassRecord) -> list[str]:
    options = ", ".join(f"{name}={value!r}" for name, value in record.arguments.items())
    counts = [
        str(old) if old == new else f"{old} → {new}"
        for old, new in zip(record.before, record.after, strict=True)
    ]
    outcome = "skipped" if record.skipped else record.outcome
    return [record.name, options, outcome, f"{1e3 * record.seconds:.1f}", *counts]
