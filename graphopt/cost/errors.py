"""Errors about costs that were given or saved."""

from __future__ import annotations

from graphopt.errors import GraphOptError


class CostTableError(GraphOptError, ValueError):
    """Costs that cannot be used: a damaged file, a name that nobody knows, a negative time.

    >>> from graphopt.cost import CostTableError
    >>> issubclass(CostTableError, graphopt.GraphOptError)
    True
    """
