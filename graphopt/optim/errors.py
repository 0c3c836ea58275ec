"""The error of dividing an optimizer."""

from graphopt.errors import GraphOptError


class OptimizerSplitError(GraphOptError, ValueError):
    """An optimizer cannot be found or divided as asked.

    >>> from graphopt.optim import OptimizerSplitError
    >>> issubclass(OptimizerSplitError, graphopt.GraphOptError)
    True
    """
