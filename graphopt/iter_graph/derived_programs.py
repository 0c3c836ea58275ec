"""Execution of derived graphs, and the work in flight between two iterations."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

from torch import fx

from graphopt import _compat
from graphopt.errors import GraphOptError
from graphopt.graph_utils import is_collective, written
from graphopt.ir.metadata import carried_index, has_late_work, late_group, set_late_group


class LateWorkError(GraphOptError):
    """Late work failed and cannot be repeated, because it may have updated state."""


@dataclass
class WorkInFlight:
    """The late work of one iteration that is still to be done, group by group.

    A group is the late nodes with one destination. Between groups a failure loses nothing: the
    groups that are left can be done later. A group begins by taking what it needs and waiting for
    it; if that fails, its update is lost. Then it writes, and if that fails, state is half updated.

    Generated code takes the carried values, and says where a group begins, writes and ends.

    Attributes:
        carried: what the work needs of its iteration. Values are taken out as they are needed, so
            that each is freed after its last use.
        state: arguments of that iteration that live on between calls, None for all others.
        done: how many groups are done.
        begun: a group is running, and has not written yet.
        writing: a group is writing.
    """

    carried: list[Any]
    state: tuple[Any, ...]
    done: int = 0
    begun: bool = False
    writing: bool = False
    _interrupt: _HeldInterrupt | None = field(default=None, repr=False)

    def take(self, index: int) -> Any:
        """Returns a carried value and removes it."""
        value, self.carried[index] = self.carried[index], None
        return value

    def look_at(self, index: int) -> Any:
        """Returns a carried value and keeps it, since other groups need it as well."""
        return self.carried[index]

    def begin(self) -> None:
        """Marks the start of a group of late nodes; Ctrl-C waits for its end."""
        self._interrupt = _HeldInterrupt.start()
        self.begun = True

    def write(self) -> None:
        """Marks that the running group of late nodes is about to update state."""
        self.writing = True

    def end(self) -> None:
        """Marks the end of the running group of late nodes."""
        self.begun = self.writing = False
        self.done += 1
        self.release()

    def release(self) -> None:
        """Lets Ctrl-C through again."""
        held, self._interrupt = self._interrupt, None
        if held is not None:
            held.stop()

    @property
    def lost(self) -> bool:
        """True if the work updated nothing and never can: state stays one step behind."""
        return self.begun and not self.writing and not self.done

    def check(self, can_resume: bool) -> None:
        """Raises `LateWorkError` unless the remaining work can be done.

        Args:
            can_resume: whether groups that are left need nothing of those that are done.
        """
        if self.begun or (self.done and not can_resume):
            raise LateWorkError(
                "an earlier call of the step failed in the middle of updating parameters, so that"
                " some are updated and some are not\n"
                "  hint:  call reset() of the step, then load a checkpoint"
            )


class _HeldInterrupt:
    """A handler that defers Ctrl-C while it is active."""

    def __init__(self, handler: Callable[..., Any]) -> None:
        self._handler = handler
        self._came: list[Any] = []
        signal.signal(signal.SIGINT, self._note)

    @classmethod
    def start(cls) -> _HeldInterrupt | None:
        handler = signal.getsignal(signal.SIGINT)
        if threading.current_thread() is not threading.main_thread() or not callable(handler):
            return None
        return cls(handler)

    def _note(self, number: int, frame: Any) -> None:
        self._came.append((number, frame))

    def stop(self) -> None:
        signal.signal(signal.SIGINT, self._handler)
        if self._came:
            self._handler(*self._came[0])


class DerivedProgram:
    """One derived graph, ready to run.

    Args:
        graph_module: the derived graph, after all stages.
        carried: how many values it leaves to the next iteration.
        reads: per placeholder of the step, whether the graph reads or updates it.
    """

    def __init__(self, graph_module: fx.GraphModule, carried: int, reads: tuple[bool, ...]) -> None:
        self._carried, self.reads = carried, reads
        self._takes = has_late_work(graph_module.graph)
        if self._takes:
            _take_from_flight(graph_module)
        graph_module.graph.lint()
        self._graph_module = graph_module
        self._call = _compat.forward_of(graph_module)

    def run(
        self, args: Sequence[Any], flight: WorkInFlight | None
    ) -> tuple[tuple[list[Any], list[Any], list[Any]], list[Any]]:
        """Runs the graph once.

        Args:
            args: one value per placeholder of the step.
            flight: what the previous iteration left, for graphs that take it.

        Returns:
            The results (user results, state updates, carried values of the step), and what is
            carried to the next iteration.
        """
        if self._takes:
            assert flight is not None
            try:
                user, updates, carried = self._call(*args, flight)
            finally:
                flight.release()
        else:
            user, updates, carried = self._call(*args)
        split = len(carried) - self._carried
        return (user, updates, carried[:split]), carried[split:]

    @property
    def graph(self) -> fx.Graph:
        """The graph that runs."""
        return self._graph_module.graph

    def node_at(self, code: CodeType, line: int) -> fx.Node | None:
        """Returns the node that a line of generated code runs, or None for other code."""
        if code is not type(self._graph_module).forward.__code__:
            return None
        return _compat.node_at_line(self._graph_module, line)


def reads_of(graph: fx.Graph) -> tuple[bool, ...]:
    """Returns, for each placeholder of the step, True if the derived graph reads or updates it."""
    placeholders = graph.find_nodes(op="placeholder")
    return tuple(bool(node.users) for node in placeholders if carried_index(node) is None)


def _take_from_flight(graph_module: fx.GraphModule) -> None:
    """Makes a graph take carried values from a `WorkInFlight` and report its finished groups."""
    graph = graph_module.graph
    placeholders = graph.find_nodes(op="placeholder")
    with graph.inserting_after(placeholders[-1]):
        flight = graph.placeholder("flight")
    for node in placeholders:
        if carried_index(node) is None:
            continue
        users = sorted(user for user in node.users if user.op != "output")
        if users:
            method = "look_at" if len(set(map(late_group, users))) > 1 else "take"
            with graph.inserting_before(users[0]):
                value = graph.call_method(method, (flight, carried_index(node)))
            set_late_group(value, late_group(users[0]))
            node.replace_all_uses_with(value)
        graph.erase_node(node)
    _mark_groups(graph, flight)


def _mark_groups(graph: fx.Graph, flight: fx.Node) -> None:
    groups: dict[int, list[fx.Node]] = {}
    for node in graph.nodes:
        group = late_group(node)
        if group is not None:
            groups.setdefault(group, []).append(node)
    for nodes in groups.values():
        with graph.inserting_before(nodes[0]):
            graph.call_method("begin", (flight,))
        updates = (node for node in nodes if written(node) and not is_collective(node))
        first = next(updates, None)
        if first is not None:
            with graph.inserting_before(first):
                graph.call_method("write", (flight,))
        with graph.inserting_after(nodes[-1]):
            graph.call_method("end", (flight,))
