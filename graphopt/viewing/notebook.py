"""HTML of a graph for notebooks, which show it instead of its `repr`."""

from __future__ import annotations

from html import escape

from torch import fx

from graphopt.iter_graph.module import register_notebook_view
from graphopt.readable.plain_text import summary
from graphopt.viewing.page import view_page

_MOST_NODES = 20_000
"""Of a graph that is shown whole: what is shown is part of the notebook's file."""


def graph_html(gm: fx.GraphModule) -> str:
    """Returns the page of `graphopt view` of a graph as HTML in a frame, as notebooks show it.

    >>> from graphopt.viewing import graph_html
    >>> graph_html(gm).count("<iframe")
    1
    """
    text = escape(next(summary(gm.graph)))
    if len(gm.graph.nodes) > _MOST_NODES:
        return (
            f"<p>{text}; <code>graphopt.saved.save_graph</code> and <code>graphopt view</code></p>"
        )
    page = escape(view_page(gm, "step"), quote=True)
    style = "width:100%;height:32rem;border:1px solid #ccc;border-radius:6px"
    return f'<p>{text}</p><iframe srcdoc="{page}" style="{style}" title="graph"></iframe>'


register_notebook_view(graph_html)
