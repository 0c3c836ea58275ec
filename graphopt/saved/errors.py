"""The error of saving and loading graphs."""

from __future__ import annotations

from graphopt.errors import GraphOptError


class SavedGraphError(GraphOptError, ValueError):
    """A graph cannot be saved, or a file does not hold a graph that can be loaded."""
