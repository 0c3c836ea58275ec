"""Problems that a check of a rewritten graph finds, and the reports that hold them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from graphopt import _compat
from graphopt.errors import VerificationError
from graphopt.ir.metadata import source_line

_SHOWN_PROBLEMS = 10
_SHOWN_ITEMS = 4
_LINE = 110


@dataclass(frozen=True)
class Problem:
    """One violation that a check found, with the nodes involved and a hint.

    Attributes:
        message: the fact, in one sentence.
        nodes: the offending node first, then those it should agree with. Nodes that a pass removed
            are those of the graph before it.
        hint: what to do instead, or None.

    >>> from graphopt.verify import Problem
    >>> print(Problem("something is wrong", hint="do this"))
    something is wrong
      hint:      do this
    """

    message: str
    nodes: tuple[fx.Node, ...] = ()
    hint: str | None = None

    @property
    def source(self) -> object | None:
        """The user's source line of the first offending node that has one."""
        lines = (source_line(node) for node in self.nodes)
        return next((line for line in lines if line is not None), None)

    def __str__(self) -> str:
        marks = (">", *" " * len(self.nodes))
        shown = [f"  {m} {describe(n)}" for m, n in zip(marks, self.nodes, strict=False)]
        lines = [self.message, *shown]
        if self.source is not None:
            lines.append(f"  from:      {self.source}")
        if self.hint is not None:
            lines.append(f"  hint:      {self.hint}")
        return "\n".join(lines)


class CheckReport:
    """Base class of reports: a list of problems with a readable text.

    Attributes:
        problems: the violations found.
        shown: the number of problems in its text.
    """

    problems: Sequence[Problem | str]
    shown = _SHOWN_PROBLEMS

    @property
    def ok(self) -> bool:
        """True if there are no problems."""
        return not self.problems

    def _says(self) -> tuple[str, str]:
        """Returns the headlines of the report, without and with problems."""
        raise NotImplementedError

    def __str__(self) -> str:
        fine, broken = self._says()
        if self.ok:
            return fine
        count = len(self.problems)
        lines = [f"{broken} in {count} place(s):", *map(str, self.problems[: self.shown])]
        if count > self.shown:
            lines.append(f"... and {count - self.shown} more")
        return "\n".join(lines)

    def raise_for_failure(self) -> None:
        """Raises `VerificationError` with the problems, if there are any."""
        if not self.ok:
            raise VerificationError(str(self))


@dataclass
class DependencyReport(CheckReport):
    """The report of a comparison of two graphs' dependencies.

    >>> graphopt.verify.check_dependencies(gm, gm).ok
    True
    """

    problems: list[Problem] = field(default_factory=list)

    def _says(self) -> tuple[str, str]:
        return "the graph keeps every dependency", "the graph breaks dependencies"


def operator_name(node: fx.Node) -> str:
    """Returns the operator or kind of a node, as in ``aten.add.Tensor``, ``getitem`` or
    ``placeholder``."""
    if node.op != "call_function":
        return node.op
    if isinstance(node.target, _compat.OpOverload):
        return str(node.target)
    return str(getattr(node.target, "__name__", node.target))


def describe(node: fx.Node) -> str:
    """Formats a node in one line: ``%add = aten.add.Tensor(%mm, %wait_tensor_3)``."""
    if node.op in ("placeholder", "get_attr"):
        return f"%{node.name} = {node.op}[{node.target}]"
    arguments = [_text(argument) for argument in node.args]
    arguments += [f"{key}={_text(value)}" for key, value in node.kwargs.items()]
    text = f"{operator_name(node)}({', '.join(arguments)})"
    line = text if node.op == "output" else f"%{node.name} = {text}"
    return line if len(line) <= _LINE else line[: _LINE - 4] + " ..."


def _text(argument: Any) -> str:
    if isinstance(argument, fx.Node):
        return f"%{argument.name}"
    if not isinstance(argument, (list, tuple)):
        return str(argument)
    items = [_text(item) for item in argument[:_SHOWN_ITEMS]]
    if len(argument) > _SHOWN_ITEMS:
        items.append(f"... {len(argument)} items")
    return f"[{', '.join(items)}]"
