"""The exception by which a check refuses a pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from graphopt.errors import GraphOptError
from graphopt.verify import Problem


class Refused(Exception):
    """A check refuses a pass; becomes the user's error once the graph is restored.

    Args:
        problems: why; at least one.
        broken: whether the graph is broken or means something else; otherwise the pass broke its
            own contract.
        of_values: whether it is about what the graph computes, and not about its form.
    """

    def __init__(
        self, problems: Sequence[Problem], *, broken: bool = True, of_values: bool = False
    ) -> None:
        super().__init__(problems[0].message)
        self.problems, self.broken, self.of_values = tuple(problems), broken, of_values


@contextmanager
def refusing_errors() -> Iterator[None]:
    """Turns errors of code that processes a pass's graph into refusals of the pass."""
    try:
        yield
    except (Refused, GraphOptError):
        raise
    except Exception as error:
        what = f"{type(error).__name__}: {error}".partition("\n")[0]
        problem = Problem(
            f"what it left is no graph that can run: {what}",
            hint="insert nodes with graphopt.graph_utils.call_function_with_meta, which calls the"
            " operator on the metadata of its arguments",
        )
        raise Refused([problem]) from error
