"""A graph as one self-contained HTML page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import fx

from graphopt.readable.html_page import page_of
from graphopt.viewing.graph_contents import contents_of


def view_page(
    gm: fx.GraphModule, title: str = "step", diffs: Mapping[str, Sequence[str]] | None = None
) -> str:
    """The HTML page of a graph: phases, folded modules, collectives, passes, timeline, search.

    Args:
        gm: nothing in it changes.
        title: over the page.
        diffs: for passes by name, the lines of the difference that they made.

    >>> import graphopt, torch
    >>> from graphopt.viewing import view_page
    >>> captured = graphopt.capture(lambda m, x: m(x), torch.nn.ReLU(), torch.ones(2))
    >>> gm = captured.graph_module
    >>> "aten.relu.default" in view_page(gm, "a step")
    True
    """
    return page_of(contents_of(gm, title, diffs))
