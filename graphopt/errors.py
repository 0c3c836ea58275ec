"""Every error graphopt raises on purpose. All derive from `GraphOptError`."""

from __future__ import annotations


class GraphOptError(Exception):
    """Base of all graphopt errors."""


class CaptureError(GraphOptError, RuntimeError):
    """A training step cannot be captured.

    Attributes:
        reason: what was found, without location or advice.
        location: ``file:line  code`` of the user's line, or None when no line is involved.
        hint: what to write instead, or None.
    """

    def __init__(
        self, reason: str, *, location: str | None = None, hint: str | None = None
    ) -> None:
        self.reason = reason
        self.location = location
        self.hint = hint
        super().__init__(reason)

    def __str__(self) -> str:
        lines = [f"the step cannot be captured: {self.reason}"]
        if self.location is not None:
            lines.append(f"  from:  {self.location}")
        if self.hint is not None:
            lines.append(f"  hint:  {self.hint}")
        return "\n".join(lines)


class VerificationError(GraphOptError, RuntimeError):
    """A graph breaks the IR contract, or is not the computation it was made from."""


class SpmdMismatchError(GraphOptError, RuntimeError):
    """Ranks are about to run different communication; raised in place of a hang.

    Attributes:
        refused: whether another rank cannot capture the step, so that this one does not run it.
    """

    def __init__(self, reason: str, *, refused: bool = False) -> None:
        self.refused = refused
        super().__init__(reason)


class CollectiveError(GraphOptError, RuntimeError):
    """Communication with other ranks failed while a step ran. `__cause__` is what torch raised.

    Attributes:
        step: which call of the step, counted from 1; None outside of a step.
        collective: such as ``"all_reduce"``; None where it is not known.
        group: name of the process group.
        parameters: whose gradients or values were under way.
        ranks: those in the group that are known to have failed.
        hint: what to do, or None.
    """

    def __init__(
        self,
        reason: str,
        *,
        step: int | None = None,
        collective: str | None = None,
        group: str | None = None,
        parameters: tuple[str, ...] = (),
        ranks: tuple[int, ...] = (),
        hint: str | None = None,
    ) -> None:
        self.step, self.collective, self.group = step, collective, group
        self.parameters, self.ranks, self.hint = parameters, ranks, hint
        super().__init__(reason if hint is None else f"{reason}\n  hint:  {hint}")


class PassDefinitionError(GraphOptError, TypeError):
    """A pass is declared wrongly."""


class PassOrderError(GraphOptError, RuntimeError):
    """Passes are applied in an order their constraints forbid."""


class PipelineSyntaxError(GraphOptError, ValueError):
    """A pipeline text or name cannot be understood."""


class LoweringError(GraphOptError, RuntimeError):
    """Part of a graph cannot be lowered."""


class PartitionError(GraphOptError, ValueError):
    """A graph cannot be split as asked."""


class PassError(GraphOptError, RuntimeError):
    """A pass raised; the graph is as it was before. `__cause__` is what it raised."""


class FileError(GraphOptError, OSError):
    """A file or folder cannot be read or written; the message names it."""


class MissingFileError(FileError, FileNotFoundError):
    """There is no such file."""


class IterationError(GraphOptError, ValueError):
    """Nodes cannot run one iteration late."""
