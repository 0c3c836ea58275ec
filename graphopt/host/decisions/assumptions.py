"""Assumption nodes for data-dependent branches: each fails unless the captured branch is taken.

    loss = model(x)                         ok = isfinite(loss).item()
    if not torch.isfinite(loss):    ==>     assumption = graphopt.assumption(ok, w, m)   # True
        return loss                         …the rest of the step, in which w and m are updated
    optimizer.step()

An assumption reads everything that the step updates, so no update comes before it: where it fails,
the step has changed nothing. The step then runs again as the graph of the other branch.

On several ranks a decision is *uniform* where its value is known to be the same on all of them. It
fails on all ranks at once. Any other one may fail on one rank *alone*, while the others go on. That
rank runs the graph of its other branch, which launches the same collectives in the same order, and
takes what those launched so far have given.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx

from graphopt.errors import AssumptionFailedError
from graphopt.host import HostCall, is_host_call

Answer = bool | int | tuple[int, ...] | tuple[tuple[int, int], ...]

_HANDED_OUT = "handed_out"
"""Metadata of an assumption: how many of its last arguments are values for another branch."""


class Assumption(HostCall):
    """The target of a node that compares a number with its value at capture.

    Args:
        index: which assumption of the step it is, in the order of the program.
        place: the user's line.
        alone: it may fail on this rank alone.

    Attributes:
        answer: what the number was at capture.
        count: how many values of the node it looks at; what follows are inputs of the graph.
    """

    count: int = 1

    def __init__(self, index: int, place: str, alone: bool = False) -> None:
        super().__init__(_nothing, ())
        self.__name__ = self.__qualname__ = "assumption"
        self.index, self.line, self.alone = index, place, alone
        self.answer: Answer = True

    def run(self, values: Sequence[Any]) -> None:
        """Raises `AssumptionFailedError`, with the values that are handed out, if the outcome is
        another one than at capture."""
        found = self.outcome(values)
        if not self.holds(found):
            error = AssumptionFailedError(self.index, found, self.line)
            error.handed_out = tuple(values[self.count :])
            error.alone = self.alone
            raise error

    def outcome(self, values: Sequence[Any]) -> Answer:
        """The outcome in the call that runs."""
        return type(self.answer)(values[0])

    def holds(self, found: Answer) -> bool:
        """True if the graph holds for an outcome."""
        return found == self.answer

    def __repr__(self) -> str:
        return f"graphopt.assumption({self.index}: {self.answer!r})"


class ValuesAssumption(Assumption):
    """An assumption that compares all integers of a tensor with those at capture."""

    def outcome(self, values: Sequence[Any]) -> Answer:
        return tuple(values[0].tolist())


def _nothing() -> None:
    """Stands in for the user function that an assumption, as a `HostCall`, does not have."""


def assumptions(graph: fx.Graph) -> list[fx.Node]:
    """The assumption nodes of a graph, in order."""
    return [node for node in graph.nodes if isinstance(node.target, Assumption)]


def uniform_answers(graph: fx.Graph) -> tuple[Answer, ...]:
    """The outcomes of the decisions that all ranks take alike."""
    targets = (node.target for node in graph.nodes)
    return tuple(t.answer for t in targets if isinstance(t, Assumption) and not t.alone)


def assumption_number(graph: fx.Graph, index: int) -> fx.Node | None:
    """The assumption of that index; None if there is none."""
    for node in assumptions(graph):
        if isinstance(node.target, Assumption) and node.target.index == index:
            return node
    return None


def calls_function(node: fx.Node) -> bool:
    """True if a node calls a user's function, and is no assumption."""
    return is_host_call(node) and not isinstance(node.target, Assumption)


def _count(node: fx.Node) -> int:
    return node.target.count if isinstance(node.target, Assumption) else 0


def hold_updates(graph: fx.Graph, states: Sequence[fx.Node]) -> None:
    """Makes assumptions read all inputs that the graph updates, and moves host calls behind the
    last assumption, so that a failed step has no effects."""
    found = assumptions(graph)
    for node in found:
        node.args = (*node.args[: _count(node)], *states)
    if found:
        calls = [n for n in graph.nodes if n < found[-1] and calls_function(n)]
        for node in reversed(calls):
            found[-1].append(node)


def without_handed_out(node: fx.Node) -> tuple[Any, ...]:
    """The arguments of an assumption node without the values that it hands out."""
    return node.args[: len(node.args) - node.meta.get(_HANDED_OUT, 0)]


def hand_out(assumption: fx.Node, values: Sequence[fx.Node]) -> list[int]:
    """Makes an assumption hand out values when it fails.

    Returns:
        Where each of them stands in `AssumptionFailedError.handed_out`.
    """
    known = list(assumption.args[len(without_handed_out(assumption)) :])
    new = [value for value in values if value not in known]
    assumption.args = (*assumption.args, *new)
    assumption.meta[_HANDED_OUT] = len(known) + len(new)
    first = len(without_handed_out(assumption)) - _count(assumption)
    return [first + (known + new).index(value) for value in values]
