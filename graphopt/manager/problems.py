"""How a check says that a pass is refused."""

from __future__ import annotations

from collections.abc import Sequence

from graphopt.verify import Problem


class Refused(Exception):
    """A pass is refused; becomes the error that users see once the graph is restored.

    Args:
        problems: why; at least one.
        broken: whether the graph is broken or means something else; otherwise the pass broke its
            own contract.
    """

    def __init__(self, problems: Sequence[Problem], *, broken: bool = True) -> None:
        super().__init__(problems[0].message)
        self.problems, self.broken = tuple(problems), broken
