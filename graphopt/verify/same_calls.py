"""Does a graph make the very same calls as another one, in an order that does as well?

Where terms cannot speak of a graph (calls of modules and of functions in Python, tensors of which
nothing is known), and where more is asked for than equal values: that autograd sees the same. Each
call has to be one of those before, of the same function with the same arguments and under the same
autocast and grad mode; none may be left out, and what has an order keeps it.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

from torch import fx

from graphopt._compat.partition import ENTER_INFERENCE_MODE, EXIT_OF, SET_GRAD_ENABLED
from graphopt.graph_utils import is_operator
from graphopt.verify.problems import Problem


class Ordered(Protocol):
    """Two calls that run one after the other, and why."""

    @property
    def before(self) -> fx.Node: ...

    @property
    def after(self) -> fx.Node: ...


_CALLS = ("call_function", "call_method", "call_module")
_EXITS = frozenset(EXIT_OF.values())


def call_problems(before: fx.Graph, after: fx.Graph, order: Iterable[Ordered]) -> Iterator[Problem]:
    """What is wrong with the calls of a graph.

    Args:
        before, after: in which one name stands for the same input, constant or module. Calls that
            copy a value, or rename it, in `after` alone are looked through.
        order: of calls of `before`.
    """
    match = _Match(before)
    for node in after.nodes:
        yield from match.take(node)
    yield from match.left_over()
    yield from match.out_of_order(order)


class _Match:
    """Finds for each call of another graph the one that it is."""

    def __init__(self, before: fx.Graph) -> None:
        self._context = _Context()
        self._own = {node: node for node in before.nodes}
        self._waiting: dict[Any, deque[fx.Node]] = defaultdict(deque)
        self._shared: dict[Any, fx.Node] = {}
        self._returned: Any = None
        for node in before.nodes:
            if self._context.enter(node):
                continue
            key = self._key(node, self._own)
            if node.op in _CALLS:
                self._waiting[key].append(node)
            elif node.op == "output":
                self._returned = key
            else:
                self._shared.setdefault(key, node)
                self._own[node] = self._shared[key]
        self._at_end = self._context.state()
        self._context = _Context()
        self._found: dict[fx.Node, fx.Node] = {}
        self._position: dict[fx.Node, int] = {}

    def take(self, node: fx.Node) -> Iterator[Problem]:
        """Find what a call is, in the order of its graph."""
        if self._context.enter(node):
            return
        missing = [source for source in node.all_input_nodes if source not in self._found]
        if missing:
            return  # of which something was said
        key = self._key(node, self._found)
        if node.op == "output":
            yield from self._ends(node, key)
        elif node.op not in _CALLS:
            self._found[node] = self._shared.setdefault(key, node)
        elif self._waiting[key]:
            self._found[node] = self._waiting[key].popleft()
            self._position[self._found[node]] = len(self._position)
        elif is_operator(node.target, "aten::alias", "aten::clone"):
            self._found[node] = self._found[node.all_input_nodes[0]]
        else:
            yield Problem("it makes a call that the graph as one does not make", (node,))

    def _ends(self, output: fx.Node, key: Any) -> Iterator[Problem]:
        if key != self._returned:
            yield Problem("it returns something else than the graph as one", (output,))
        if self._context.state() != self._at_end:
            yield Problem(
                "it leaves autocast or grad mode otherwise than the graph as one", (output,)
            )

    def left_over(self) -> Iterator[Problem]:
        for calls in self._waiting.values():
            for node in calls:
                yield Problem("a call of the graph as one is not made", (node,))

    def out_of_order(self, order: Iterable[Ordered]) -> Iterator[Problem]:
        position = self._position
        for pair in order:
            first, second = position.get(pair.before), position.get(pair.after)
            if first is not None and second is not None and first > second:
                yield Problem(f"it runs too early: {pair}", (pair.after, pair.before))

    def _key(self, node: fx.Node, known: dict[fx.Node, fx.Node]) -> Any:
        arguments = _written((node.args, node.kwargs), known)
        if node.op == "output":
            return arguments
        target = node.target if isinstance(node.target, str) else id(node.target)
        if node.op not in _CALLS:
            return node.op, target
        return node.op, target, self._context.state(), arguments


def _written(value: Any, known: dict[fx.Node, fx.Node]) -> Any:
    """An argument as part of a key: nodes by what they stand for, constants as they are written."""
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
    """Autocast, inference mode and grad mode, as a graph sets them."""

    def __init__(self) -> None:
        self._active: list[tuple[fx.Node, Any]] = []

    def enter(self, node: fx.Node) -> bool:
        """Take in a node, if it begins or ends a region. Returns whether it does."""
        if node.op != "call_function":
            return False
        if node.target is SET_GRAD_ENABLED:
            inner = self._innermost()
            self._active[inner:] = [
                *(e for e in self._active[inner:] if e[0].target is not SET_GRAD_ENABLED),
                (node, repr(node.args)),
            ]
        elif node.target in EXIT_OF:
            self._active.append((node, repr((node.args, node.kwargs))))
        elif node.target in _EXITS:
            self._leave(node.all_input_nodes[0])
        else:
            return False
        return True

    def state(self) -> tuple[Any, ...]:
        """What is in effect."""
        return tuple((id(node.target), written) for node, written in self._active)

    def _leave(self, entered: fx.Node) -> None:
        index = next(i for i, (node, _) in enumerate(self._active) if node is entered)
        if entered.target is ENTER_INFERENCE_MODE:
            del self._active[index:]
        else:
            del self._active[index]

    def _innermost(self) -> int:
        """Where the innermost inference region begins: its end restores the grad mode before it."""
        inside = [i for i, (n, _) in enumerate(self._active) if n.target is ENTER_INFERENCE_MODE]
        return inside[-1] + 1 if inside else 0
