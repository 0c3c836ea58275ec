"""The error for unusable costs."""

from __future__ import annotations

from graphopt.errors import GraphOptError


class CostTableError(GraphOptError, ValueError):
    """Costs that cannot be used: a damaged file, an unknown name, a negative time.

    >>> from graphopt.cost import CostTableError
    >>> issubclass(CostTableError, graphopt.GraphOptError)
    True
    """
