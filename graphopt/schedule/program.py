"""The program of one steady-state iteration: its compute, launches and waits, in order.

    graph with late nodes            program
    ---------------------            -------
    mm   = mm(x, w)                  wait(0), of the iteration before
    g    = …                         compute: update of w, late
    bucket = all_reduce(g)    ==>    compute: mm, g, …
    wait   = wait(bucket)    late    launch(0)
    copy_(w, add(w, wait))   late

One stream computes, in the order of the graph. Each group has a queue of its own, first in, first
out, as communicators do.
"""

from __future__ import annotations

import itertools
import operator
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import fx

from graphopt import _compat
from graphopt.comm import argument, kind_of, late_nodes, view_tail
from graphopt.cost import CostModel, Transfer
from graphopt.graph_utils import is_collective, is_wait, tensors_in
from graphopt.graph_utils.tensor_metadata import bytes_in
from graphopt.ir.metadata import known_value, sent_names


@dataclass(frozen=True, eq=False)
class Message:
    """One collective of an iteration.

    Attributes:
        index: in launch order.
        launch: its node; of a bucket that is planned, the last launch that goes into it.
        transfer: what it asks for.
        nbytes: that it receives.
        lag: 1 where it is waited for in the next iteration, else 0.
        waits: its wait nodes.
        reader: the first node that reads what it received, None if nobody does.
        joined: the launches that go into a bucket that is planned, `launch` among them.

    >>> from graphopt.cost import default_cost_model
    >>> from graphopt.schedule import program_of
    >>> program = program_of(gm.graph, default_cost_model(gm.graph), world_size=2)
    >>> [message.nbytes for message in program.messages]
    [8, 32]
    """

    index: int
    launch: fx.Node
    transfer: Transfer
    nbytes: int
    lag: int
    waits: tuple[fx.Node, ...]
    reader: fx.Node | None
    joined: tuple[fx.Node, ...] = ()

    @cached_property
    def kind(self) -> str:
        """The kind of collective, such as ``"all_reduce"``."""
        return kind_of(self.launch)

    @cached_property
    def group(self) -> str:
        """The name of the process group."""
        return str(argument(self.launch, "group_name"))

    @property
    def parameters(self) -> tuple[str, ...]:
        """The names of the parameters whose gradients or values are sent, if recorded."""
        return sent_names(self.launch)


@dataclass
class Program:
    """One iteration in the steady state: an order of nodes with their costs.

    Attributes:
        order: all nodes, late ones before their destinations.
        late: those that belong to the iteration before.
        seconds: of each node that computes, and what launches take of compute.
        messages: all collectives, in launch order.
        launched: the message of each launch.
        waited: the message of each wait.

    >>> from graphopt.cost import default_cost_model
    >>> from graphopt.schedule import program_of
    >>> program = program_of(gm.graph, default_cost_model(gm.graph), world_size=2)
    >>> len(program.order) > 10
    True
    """

    order: list[fx.Node]
    late: frozenset[fx.Node]
    seconds: dict[fx.Node, float]
    messages: list[Message]
    launched: dict[fx.Node, Message] = field(init=False)
    waited: dict[fx.Node, Message] = field(init=False)

    def __post_init__(self) -> None:
        self.launched = {message.launch: message for message in self.messages}
        self.waited = {wait: message for message in self.messages for wait in message.waits}

    @property
    def compute_seconds(self) -> float:
        """The total seconds of all nodes, without waiting."""
        return sum(self.seconds.values())


def program_of(graph: fx.Graph, cost_model: CostModel, world_size: int | None = None) -> Program:
    """Builds the program of a graph.

    Args:
        world_size: ranks of its groups, where these are not there to be asked.

    Raises:
        CostTableError: a cost is negative or not finite.

    >>> from graphopt.cost import default_cost_model
    >>> from graphopt.schedule import program_of
    >>> program = program_of(gm.graph, default_cost_model(gm.graph), world_size=2)
    >>> len(program.messages)
    2
    """
    late = late_nodes(graph)
    order = list(steady_order(graph))
    position = {node: index for index, node in enumerate(order)}
    seconds = {}
    messages: list[Message] = []
    for node in order:
        if is_collective(node):
            transfer = cost_model.transfer(node, world_size)
            if transfer.overhead:
                seconds[node] = transfer.overhead
            messages.append(_message(len(messages), node, transfer, late.keys(), position))
        elif node.op not in ("placeholder", "output", "get_attr"):
            taken = cost_model.compute_seconds(node)
            if taken:
                seconds[node] = taken
    return Program(order, frozenset(late), seconds, messages)


def steady_order(graph: fx.Graph) -> Iterator[fx.Node]:
    """Yields the nodes of one iteration, each late one before its destination."""
    late = late_nodes(graph)
    arriving: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.nodes:
        if node in late:
            arriving.setdefault(late[node], []).append(node)
    for node in graph.nodes:
        if node in late:
            continue
        yield from arriving.get(node, ())
        yield node


def _message(
    index: int,
    launch: fx.Node,
    transfer: Transfer,
    late: Collection[fx.Node],
    position: dict[fx.Node, int],
) -> Message:
    waits = tuple(sorted(_waits_of(launch), key=position.__getitem__))
    lag = int(any(wait in late for wait in waits) and launch not in late)
    tails = {node for wait in waits for node in view_tail(wait)}
    readers = {user for node in tails for user in node.users} - tails
    reader = min(readers, key=position.__getitem__, default=None)
    received = bytes_in(known_value(launch))
    return Message(index, launch, transfer, received, lag, waits, reader)


def _waits_of(launch: fx.Node) -> Iterator[fx.Node]:
    for node in view_tail(launch):
        yield from (user for user in node.users if is_wait(user))


class Storages:
    """Numbers and sizes of the storages that nodes make and read, cached across orders of a
    graph."""

    def __init__(self) -> None:
        self._made: dict[fx.Node, list[tuple[int, int]]] = {}
        self._touched: dict[fx.Node, dict[int, int]] = {}

    def made(self, node: fx.Node) -> list[tuple[int, int]]:
        """Returns the storages (number, bytes) that a node makes."""
        found = self._made.get(node)
        if found is None:
            value = None if node.op == "output" else known_value(node)
            tensors = (value,) if isinstance(value, torch.Tensor) else tensors_in(value)
            found = [(_compat.storage_key_of_value(t), bytes_in(t)) for t in tensors]
            self._made[node] = found
        return found

    def touched(self, node: fx.Node) -> dict[int, int]:
        """Returns the storages (number -> bytes) that a node makes or reads; an item of a list
        reads only its own."""
        found = self._touched.get(node)
        if found is None:
            sources = () if node.target is operator.getitem else _compat.inputs_of(node)
            found = self._touched[node] = dict(self.made(node))
            for source in sources:
                found.update(self.made(source))
        return found


def peak_bytes(program: Program, storages: Storages | None = None) -> int:
    """Returns the peak bytes of live values, without inputs of the step.

    Args:
        storages: what is known of nodes, where several orders of a graph are compared.
    """
    return int(held_bytes(program, storages).max(initial=0))


def step_peak_bytes(graph: fx.Graph, storages: Storages | None = None) -> int:
    """Returns the peak bytes of live values in one steady-state iteration of a graph in its order,
    without inputs of the step.

    >>> from graphopt.schedule.program import step_peak_bytes
    >>> step_peak_bytes(gm.graph) > 0
    True
    """
    order = list(steady_order(graph))
    return peak_bytes(Program(order, frozenset(late_nodes(graph)), {}, []), storages)


def held_bytes(program: Program, storages: Storages | None = None) -> NDArray[np.int64]:
    """Returns the bytes of live values while each node of the order runs, without inputs.

    A value is held from the node that makes its storage to the last one that reads it, and what is
    sent until it has been waited for; what late nodes read of the iteration before is held
    throughout.
    """
    return LiveStorages(program, storages or Storages()).held(range(len(program.order)))[1]


class LiveStorages:
    """The storages that the nodes of a program make or read, without inputs of the step.

    Attributes:
        touched: for each node of the order, the numbers of the storages that it makes or reads.
        sizes: bytes of each storage.
        touches: how many nodes make or read each storage.
    """

    def __init__(self, program: Program, storages: Storages) -> None:
        self.touched, self.sizes = _touched_storages(program, storages)
        counts = np.fromiter(map(len, self.touched), dtype=np.int64, count=len(self.touched))
        numbers = np.fromiter(itertools.chain.from_iterable(self.touched), dtype=np.int64)
        by_storage = np.argsort(numbers, kind="stable")
        self._touching = np.repeat(np.arange(len(counts)), counts)[by_storage]
        self._begins = np.searchsorted(numbers[by_storage], np.arange(len(self.sizes)))
        self.touches = np.bincount(numbers, minlength=len(self.sizes)).tolist()

    def held(self, order: Sequence[int]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns the bytes of the storages that each node is the first to touch, and the bytes of
        live values while it runs.

        Args:
            order: the positions of all nodes of the program, in the order in which they run.
        """
        made, gone = np.zeros((2, len(order) + 1), dtype=np.int64)
        if self.sizes:
            place = np.empty(len(order), dtype=np.int64)
            place[np.asarray(order, dtype=np.int64)] = np.arange(len(order))
            places = place[self._touching]
            np.add.at(made, np.minimum.reduceat(places, self._begins), self.sizes)
            np.add.at(gone, np.maximum.reduceat(places, self._begins) + 1, self.sizes)
        return made[:-1], (made - gone).cumsum()[:-1]


def _touched_storages(program: Program, storages: Storages) -> tuple[list[list[int]], list[int]]:
    """Returns the storages that each node makes or reads, by number, and the bytes of each.

    What a planned bucket makes and reads, its last launch does. What late nodes read of the
    iteration before, the first and the last node touch as well.
    """
    sizes: dict[int, int] = {}
    found: list[Collection[int]] = []
    inputs: set[int] = set()
    carried: set[int] = set()
    members = {node: m.launch for m in program.messages for node in m.joined}
    of_bucket: dict[fx.Node, set[int]] = {}
    for node in program.order:
        made, keys = storages.made(node), storages.touched(node)
        message = program.waited.get(node)
        if message is not None and not message.lag:
            made = [*made, *(held for source in _sent(message) for held in storages.made(source))]
            keys = {**keys, **dict(made)}
        for key, nbytes in made:
            if nbytes > sizes.get(key, -1):
                sizes[key] = nbytes
        if node.op in ("placeholder", "get_attr"):
            inputs.update(keys)
        if node in program.late:
            before = (source for source in node.all_input_nodes if source not in program.late)
            carried |= keys.keys() & {key for source in before for key, _ in storages.made(source)}
        touched: Collection[int] = [key for key in keys if key in sizes]
        if node in members:
            together = of_bucket.setdefault(members[node], set())
            together.update(touched)
            touched = together if members[node] is node else ()
        found.append(touched)
    found[0], found[-1] = carried.union(found[0]), carried.union(found[-1])
    numbers = {key: number for number, key in enumerate(k for k in sizes if k not in inputs)}
    touching = [[numbers[key] for key in touched if key in numbers] for touched in found]
    return touching, [sizes[key] for key in numbers]


def _sent(message: Message) -> Iterator[fx.Node]:
    """Yields the values that a message sends, which must live until it has arrived."""
    for launch in message.joined or (message.launch,):
        yield from launch.all_input_nodes


def communication_bound(program: Program) -> float:
    """Returns the seconds that the busiest group or link needs: no order of a step is shorter."""
    groups: defaultdict[str, float] = defaultdict(float)
    links: defaultdict[str, float] = defaultdict(float)
    for message in program.messages:
        groups[message.group] += message.transfer.seconds
        for link in message.transfer.links:
            links[link] += message.transfer.transfer
    return max((*groups.values(), *links.values()), default=0.0)
