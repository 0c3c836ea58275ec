"""The error raised when a graph cannot be saved or loaded."""

from __future__ import annotations

from graphopt.errors import GraphOptError


class SavedGraphError(GraphOptError, ValueError):
    """A graph cannot be saved, or a file holds no graph that can be loaded.

    >>> from graphopt.saved import SavedGraphError, load_graph
    >>> torch.save([1, 2], "other.pt")
    >>> try:
    ...     load_graph("other.pt")
    ... except SavedGraphError as error:
    ...     print("does not hold a graph" in str(error))
    True
    """
