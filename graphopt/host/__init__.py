"""Host callbacks in a graph: `graphopt.callback`, and the node that stands for it.

    loss = mse_loss(mm, y)                     loss     = mse_loss(mm, y)
    graphopt.callback(log, loss)       ==>     callback = graphopt.callback(loss)
    loss.backward()                            backward = mse_loss_backward(…)

The target of the node is a `HostCall`, which knows the user's function. Who runs the graph calls it
with the values of this step; who traces the graph gets the same node again; on fake tensors it does
nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import fx
from torch.fx.node import has_side_effect

from graphopt import _compat
from graphopt.graph_utils import call_function_with_meta
from graphopt.host.counts import Place, TimesReached
from graphopt.host.functions import name_of
from graphopt.host.held import HeldByFunction
from graphopt.host.modes import GradientModes
from graphopt.host.running import current_run
from graphopt.host.seen import EarlierWrite, UsedPlace
from graphopt.ir.metadata import phase_of, set_phase

__all__ = ["HostCall", "host_call_of", "host_calls", "insert_callback", "is_host_call"]


_NUMBERS = (torch.SymFloat, torch.SymInt, torch.SymBool)
"""Numbers that a graph computes, while it is traced."""


_VALUE_OF_GRAPH = object()
"""A placeholder among the arguments of a `HostCall` for a value of the graph."""


class HostCall:
    """The target of a node that calls a user's function on the host.

    Args:
        fn: the function.
        arguments: what it is called with: pytrees with values of the graph at some leaves (tensors,
            symbolic numbers or nodes), and any other objects, which are handed on as they are.
        every: call it every so many times only.
        place: where in the program it was called, the same in each capture; empty: nowhere.

    Attributes:
        count: how many values of the node it looks at; None: all.
        counts: how often places were reached; all graphs of one step share them.
        first: no update of state comes before it in the program.
        last: no update of state follows it in the program.
        found: places outside the step that it has set before.
        watched: places outside the step that the function may not change, since the step uses them.
        held: what the function and its arguments hold that the step has made.

    >>> from graphopt.host import host_call_of, insert_callback
    >>> (loss,) = graphopt.graph_utils.get_outputs(gm.graph).results
    >>> host_call_of(insert_callback(gm.graph, print, loss, every=10)).every
    10
    """

    count: int | None = None

    def __init__(
        self, fn: Callable[..., Any], arguments: Sequence[Any], every: int = 1, place: Place = ()
    ) -> None:
        if not callable(fn):
            raise TypeError(f"graphopt.callback takes a function first, not {type(fn).__name__}")
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ValueError(f"every={every!r}: give a whole number of at least 1")
        # fx names nodes and writes code by these.
        self.__name__ = self.__qualname__ = "callback"
        self.__module__ = "graphopt"
        self.fn, self.every, self.place = fn, every, place
        self.counts = TimesReached()
        self.first = self.last = False
        self.values: list[Any] = []
        self._arguments = [self._taken_apart(argument) for argument in arguments]
        self.found: list[EarlierWrite] = []
        self.watched: list[UsedPlace] = []
        self.held: HeldByFunction | None = None
        self._modes = GradientModes()

    def _taken_apart(self, argument: Any) -> tuple[Any, list[Any]]:
        """Flattens an argument and marks values of the graph; one without any stays whole."""
        leaves, spec = _compat.tree_flatten(argument)
        found = [leaf for leaf in leaves if isinstance(leaf, (torch.Tensor, fx.Node, *_NUMBERS))]
        if not found and not _compat.is_applied(spec):
            return None, [argument]
        self.values += found
        return spec, [_VALUE_OF_GRAPH if any(leaf is v for v in found) else leaf for leaf in leaves]

    def take_apart(self, is_own: Callable[[Any], bool]) -> None:
        """Makes each call rebuild nests of constants that the step has made."""
        for index, (spec, leaves) in enumerate(self._arguments):
            if spec is None and is_own(leaves[0]):
                parts, found = _compat.tree_flatten(leaves[0], is_leaf=lambda v: not is_own(v))
                self._arguments[index] = found, parts

    def take_values(self) -> list[Any]:
        """Returns the values among the arguments, and drops them here."""
        values, self.values = self.values, []
        return values

    def constants_in(self, *, rebuilt: bool = False) -> list[Any]:
        """The arguments' leaves that are not values of the graph.

        Args:
            rebuilt: only those in arguments that each call rebuilds.
        """
        leaves = (ls for spec, ls in self._arguments if spec is not None or not rebuilt)
        return [leaf for each in leaves for leaf in each if leaf is not _VALUE_OF_GRAPH]

    def __call__(self, *values: Any) -> Any:
        """Calls the function with private copies of `values`.

        Under a tracer, record the call; on fake tensors, do nothing.
        """
        if _compat.is_recording():
            _compat.record_call(self, values)
        elif not _compat.is_fake_mode_on() and not any(map(_compat.is_fake, values[: self.count])):
            self.run(values)

    def run(self, values: Sequence[Any]) -> None:
        """Calls the function now, unless `every` skips this time."""
        if self.every > 1 and not self.counts.is_due(self.place, self.every):
            return
        arguments = self._with(map(_owned, values))
        run = current_run()
        with self._modes.restored():
            if run is None:
                self.fn(*arguments)
            else:
                run.call(self, arguments)

    def made_anew(self, arguments: Sequence[Any]) -> list[Any]:
        """The arguments that each call rebuilds, because they hold values of the graph."""
        pairs = zip(self._arguments, arguments, strict=True)
        return [argument for (spec, _), argument in pairs if spec is not None]

    def _with(self, values: Iterator[Any]) -> list[Any]:
        arguments = []
        for spec, leaves in self._arguments:
            leaves = [next(values) if leaf is _VALUE_OF_GRAPH else leaf for leaf in leaves]
            arguments.append(leaves[0] if spec is None else _compat.tree_unflatten(leaves, spec))
        return arguments

    def __hash__(self) -> int:
        return hash(HostCall)

    def __eq__(self, other: object) -> bool:
        return self is other

    def __repr__(self) -> str:
        every = "" if self.every == 1 else f", every={self.every}"
        return f"graphopt.callback({name_of(self.fn)}{every})"


class _AnyHostCall:
    """An object that equals every `HostCall`. Torch keeps the targets that have side effects in a
    set, for good: one entry that stands for all of them keeps none of them alive."""

    def __hash__(self) -> int:
        return hash(HostCall)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, (HostCall, _AnyHostCall))

    def __call__(self) -> None:
        """Does nothing; torch requires a callable."""


has_side_effect(_AnyHostCall())


def host_call_of(node: fx.Node) -> HostCall | None:
    """The `HostCall` of a node; None for a node that calls no user function.

    >>> from graphopt.host import host_call_of
    >>> (loss,) = graphopt.graph_utils.get_outputs(gm.graph).results
    >>> host_call_of(loss) is None
    True
    """
    target = node.target
    return target if isinstance(target, HostCall) else None


def is_host_call(node: fx.Node) -> bool:
    """True if a node calls a user's function on the host.

    >>> from graphopt.host import insert_callback, is_host_call
    >>> (loss,) = graphopt.graph_utils.get_outputs(gm.graph).results
    >>> is_host_call(loss), is_host_call(insert_callback(gm.graph, print, loss))
    (False, True)
    """
    return isinstance(node.target, HostCall)


def host_calls(graph: fx.Graph) -> list[fx.Node]:
    """The nodes that call user functions, in graph order, found by target.

    >>> from graphopt.host import host_calls, insert_callback
    >>> (loss,) = graphopt.graph_utils.get_outputs(gm.graph).results
    >>> call = insert_callback(gm.graph, print, loss)
    >>> host_calls(gm.graph) == [call]
    True
    """
    known = _compat.calls_by_target(graph)
    return sorted(n for target, nodes in known if isinstance(target, HostCall) for n in nodes)


def insert_callback(
    graph: fx.Graph, fn: Callable[..., Any], *arguments: Any, every: int = 1
) -> fx.Node:
    """Inserts a node that calls `fn(*arguments)` on the host in every step, like
    `graphopt.callback`. Where no insertion point is active, the call stands behind the nodes among
    `arguments`.

    Args:
        arguments: nodes, pytrees of them with constants, and any other objects.
        every: see `graphopt.callback`.

    >>> from graphopt.host import insert_callback
    >>> norms = []
    >>> (loss,) = graphopt.graph_utils.get_outputs(gm.graph).results
    >>> insert_callback(gm.graph, norms.append, loss)
    callback
    """
    return insert_call(graph, HostCall(fn, arguments, every))


def insert_call(graph: fx.Graph, call: HostCall) -> fx.Node:
    """Inserts a node for an existing `HostCall`, as `insert_callback` does."""
    values = call.take_values()
    nodes = [value for value in values if isinstance(value, fx.Node)]
    with _insertion_point(graph, nodes):
        like = nodes[0] if nodes else None
        node = call_function_with_meta(graph, call, tuple(values), like=like)
    set_phase(node, phase_of(node) or "forward")
    return node


def _insertion_point(graph: fx.Graph, nodes: Sequence[fx.Node]) -> AbstractContextManager[object]:
    """The active insertion point, or one behind `nodes`."""
    if not _compat.inserts_at_end(graph):
        return nullcontext()
    behind = max(nodes, default=None)
    if behind is not None and behind.op != "placeholder":
        return graph.inserting_after(behind)
    first = next(node for node in graph.nodes if node.op != "placeholder")
    return graph.inserting_before(first)


def note_order(graph: fx.Graph, updates: Sequence[fx.Node]) -> None:
    """Records for each host call if any state update precedes or follows it in program order."""
    places = {node: index for index, node in enumerate(graph.nodes)}
    updated = [places[update] for update in updates]
    for node, place in places.items():
        call = host_call_of(node)
        if call is not None:
            call.first = all(place < other for other in updated)
            call.last = all(place > other for other in updated)


def share_counts(graph: fx.Graph, counts: TimesReached) -> None:
    """Makes a graph's host calls share their `every` counts with the step's other graphs."""
    for call in filter(None, map(host_call_of, graph.nodes)):
        if call.place:
            call.counts = counts


def _owned(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value
