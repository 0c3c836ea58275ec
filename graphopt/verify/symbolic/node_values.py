"""Access to the values of nodes while a graph is evaluated."""

from __future__ import annotations

from typing import Any

from torch import fx

from graphopt import _compat
from graphopt.ir.operators import first_argument, operator_of
from graphopt.verify.symbolic.contents import StorageContents, View
from graphopt.verify.symbolic.evaluation_outcome import NotDecidedError
from graphopt.verify.values.call_terms import named
from graphopt.verify.values.terms import PendingResult, TensorValue, Terms


class NodeValues:
    """The values of one graph's nodes during its evaluation.

    Args:
        view: (view node, value of its first argument) -> value of the view.

    Attributes:
        contents: the contents of storages.
        in_flight: storage owner -> the collective that may still write to it.
    """

    def __init__(self, terms: Terms, view: View) -> None:
        self.contents = StorageContents(terms, view)
        self._current = self.contents.current
        self.in_flight: dict[fx.Node, fx.Node] = {}

    def read(self, value: Any, *, sent: bool = False) -> Any:
        """Replaces the nodes of an argument by their values. `sent`: pending results are
        allowed."""
        if isinstance(value, fx.Node):
            return self.read_node(value, sent)
        if isinstance(value, (list, tuple)):
            return tuple([self.read(entry, sent=sent) for entry in value])
        if isinstance(value, dict):
            return {key: self.read(entry, sent=sent) for key, entry in value.items()}
        if isinstance(value, slice):
            return slice(*map(self.read, (value.start, value.stop, value.step)))
        return value

    def read_node(self, node: fx.Node, sent: bool = False) -> Any:
        """Returns the value of a node. `sent`: a pending result is allowed."""
        if self.in_flight:
            launch = self.in_flight.get(self.contents.owner(node))
            if launch is not None and not sent:
                raise NotDecidedError(f"it is read while %{launch.name} is under way", node)
            if launch is not None:
                return PendingResult(self.contents.read(node))
        return self.contents.read(node)

    def gives(self, node: fx.Node, known: Any) -> bool:
        """True if a node has this value."""
        if self.in_flight:
            given = self.read_node(node)
        else:
            given = self._current.get(node)
            if given is None:
                given = self.contents.read(node)
        return given is known or bool(given == known)

    def arguments(self, node: fx.Node) -> dict[str, Any]:
        """Returns the arguments of a call by name, with values in place of nodes."""
        return named(node.target, self.read(node.args), self.read(node.kwargs))

    def refuse_pending(self, node: fx.Node) -> None:
        """Raises `NotDecidedError` if a node reads a collective's result before its wait."""
        for source in _compat.inputs_of(node):
            value = self.contents.read(source)
            if type(value) is not TensorValue and _is_pending(value):
                raise NotDecidedError("it reads what a collective gives before its wait", node)


def _is_pending(value: Any) -> bool:
    if isinstance(value, tuple):
        return any(map(_is_pending, value))
    return isinstance(value, PendingResult)


def is_itself(node: fx.Node) -> bool:
    """True if a node returns its first argument unchanged, under another name."""
    traits = operator_of(node)
    return traits.wait or (bool(traits.writes) and isinstance(first_argument(node), fx.Node))
