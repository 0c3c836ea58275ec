"""A check that a graph makes exactly the calls of another one, in a compatible order.

It is used where symbolic evaluation is impossible (calls of modules and Python functions, tensors
without metadata), and where more than equal values is asked for: that autograd sees the same. Each
call must be one of the former, with the same function, arguments, autocast and grad mode; none may
be missing, and constrained calls keep their order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import fx

from graphopt.graph_utils import is_operator
from graphopt.ir.modes import switch_mode, switches_mode
from graphopt.verify.problems import Problem

Order = Callable[[fx.Graph], Iterable[tuple[fx.Node, fx.Node, str]]]
"""graph -> pairs of calls, the second of which must run after the first, and why."""

_CALLS = ("call_function", "call_method", "call_module")


def call_problems(before: fx.Graph, after: fx.Graph, order: Order) -> Iterator[Problem]:
    """Yields a problem for each call that only one of the two graphs makes, or makes out of order.

    Args:
        before, after: in which one name stands for the same input, constant or module. Calls that
            copy a value, or rename it, in `after` alone are looked through.
        order: finds pairs of calls of a graph that have to run one after the other: reads and
            updates of the same memory, and random numbers.
    """
    match = _Match(before, _earlier(order(before)))
    earlier = _earlier(order(after))
    for node in after.nodes:
        yield from match.take(node, earlier.get(node, ()))
    yield from match.unmatched()


def _earlier(order: Iterable[tuple[fx.Node, fx.Node, str]]) -> dict[fx.Node, list[fx.Node]]:
    found: dict[fx.Node, list[fx.Node]] = defaultdict(list)
    for before, after, _ in order:
        found[after].append(before)
    return found


class _Match:
    """Matches each call of a graph to the same call of another one. Repeated calls with nothing
    relevant between them count as one.

    Args:
        earlier: for each call those that it has to run after.
    """

    def __init__(self, before: fx.Graph, earlier: Mapping[fx.Node, Sequence[fx.Node]]) -> None:
        self._context = _Context()
        self._left: dict[Any, list[fx.Node]] = defaultdict(list)
        self._first: dict[Any, fx.Node] = {}
        self._returned: Any = None
        self._known: dict[fx.Node, fx.Node] = {}
        for node in before.nodes:
            if self._context.enter(node):
                continue
            key = self._key(node, earlier.get(node, ()))
            if node.op == "output":
                self._returned = key
                continue
            self._known[node] = self._first.setdefault(key, node)
            if node.op in _CALLS:
                self._left[key].append(node)
        self._at_end = self._context.state
        self._context, self._known = _Context(), {}

    def take(self, node: fx.Node, earlier: Sequence[fx.Node]) -> Iterator[Problem]:
        """Matches one call; calls are given in graph order."""
        if self._context.enter(node):
            return
        if any(source not in self._known for source in node.all_input_nodes):
            return  # of which something was said
        key = self._key(node, earlier)
        if node.op == "output":
            yield from self._ends(node, key)
        elif node.op not in _CALLS:
            self._known[node] = self._first.setdefault(key, node)
        elif self._left[key]:
            self._left[key].pop(0)
            self._known[node] = self._first[key]
        elif is_operator(node.target, "aten::alias", "aten::clone"):
            self._known[node] = self._known[node.all_input_nodes[0]]
        else:
            yield Problem("it makes a call that the undivided graph does not make there", (node,))

    def _ends(self, output: fx.Node, key: Any) -> Iterator[Problem]:
        if key != self._returned:
            yield Problem("it returns something else than the undivided graph", (output,))
        if self._context.state != self._at_end:
            yield Problem(
                "it leaves autocast or grad mode otherwise than the undivided graph", (output,)
            )

    def unmatched(self) -> Iterator[Problem]:
        """Yields a problem for each call that was not matched."""
        for calls in self._left.values():
            for node in calls:
                yield Problem("a call of the undivided graph is missing", (node,))

    def _key(self, node: fx.Node, earlier: Sequence[fx.Node]) -> Any:
        arguments = _written((node.args, node.kwargs), self._known)
        if node.op == "output":
            return arguments
        target = node.target if isinstance(node.target, str) else id(node.target)
        if node.op not in _CALLS:
            return node.op, target
        behind = frozenset(id(self._known[n]) for n in earlier if n in self._known)
        return node.op, target, self._context.state, behind, arguments


def _written(value: Any, known: Mapping[fx.Node, fx.Node]) -> Any:
    """Returns an argument as part of a key: nodes by their match, constants by their source
    text."""
    if isinstance(value, fx.Node):
        return "node", id(known[value])
    if isinstance(value, (list, tuple)):
        return ("list", *(_written(entry, known) for entry in value))
    if isinstance(value, dict):
        return ("dict", *((key, _written(entry, known)) for key, entry in value.items()))
    if isinstance(value, slice):
        return ("slice", *(_written(end, known) for end in (value.start, value.stop, value.step)))
    return type(value).__name__, repr(value)


class _Context:
    """The autocast, inference and grad modes while a graph is read.

    Attributes:
        state: the modes that are in effect.
    """

    def __init__(self) -> None:
        self._active: list[fx.Node] = []
        self.state: tuple[Any, ...] = ()

    def enter(self, node: fx.Node) -> bool:
        """Updates the modes if a node begins or ends a region. Returns True if it does."""
        if not switches_mode(node):
            return False
        switch_mode(self._active, node)
        self.state = tuple((id(n.target), repr((n.args, n.kwargs))) for n in self._active)
        return True
