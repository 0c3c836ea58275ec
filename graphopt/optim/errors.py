"""The error for optimizers that cannot be split."""

from graphopt.errors import GraphOptError


class OptimizerSplitError(GraphOptError, ValueError):
    """An optimizer cannot be found or split as asked.

    >>> from graphopt.optim import OptimizerSplitError
    >>> issubclass(OptimizerSplitError, graphopt.GraphOptError)
    True
    """
