"""`graphopt demo`: one training step, run by eager DDP and as a captured graph, compared."""

from __future__ import annotations


class DemoError(Exception):
    """The demo cannot run; ends it with one readable message.

    Attributes:
        exit_code: 2 where the request itself cannot be met, 1 where the run failed.
    """

    def __init__(self, message: str, *, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code
