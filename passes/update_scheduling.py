"""Updates each large parameter as soon as its gradient is computed.

    g1 = mm(…)                              g1 = mm(…)
    g0 = mm(…)                              w1', … = _fused_adamw([w1], [g1], …)
    w0', w1', … = _fused_adamw(      ==>    g0 = mm(…)
        [w0, w1], [g0, g1], …)              w0', … = _fused_adamw([w0], [g0], …)

The memory of a gradient is then free for the next one, which saves up to a tenth of a step where
gradients are so large that the allocator gives their memory back to the system. An update does not
move before the last read of the values that it replaces, so that it still happens in place.

Other parameters keep one update at the end: among the matrix products it would only displace what
these have in the processor's cache (no gain up to 1 MiB, some loss at 256 KiB). So do parameters on
other devices than the CPU, where one launch for all is what counts, and all of a graph with
collectives: what stands before a launch delays it.

Where updates go is found entry by entry, in the graph as it is. A call is then divided for those
that move, and only if something computes between two parts of it: what stays is one call as before.

Needs optimizers that update each parameter on its own; with clipping by the norm of all gradients
nothing moves before the norm is known. Bitwise: every element is computed as before.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from operator import itemgetter

import torch
from torch import fx

from graphopt.graph_utils import is_copy, is_needed, move_after, written
from graphopt.ir.effects import Effects
from graphopt.ir.metadata import fake_value, phase_of
from graphopt.ir.operators import calls_of
from graphopt.manager import graph_optimization_pass
from graphopt.optim import OptimizerSplitError, get_all_fused_optimizer_blocks
from graphopt.optim.descendants import Descendants
from graphopt.optim.elements import NONE
from graphopt.optim.split import separate

logger = logging.getLogger("graphopt")

_MB = 2**20


@graph_optimization_pass(
    apply_after=["remove_copy_from_optimizer", "iter_move_grads_and_optimizers"]
)
def schedule_updates(gm: fx.GraphModule, larger_than_mb: float = 2) -> int:
    """Update each large parameter as soon as its gradient is computed.

    Args:
        larger_than_mb: gradients up to this size are left to one update for all, in MiB.

    Returns:
        How many updates moved.
    """
    if calls_of(gm.graph, lambda known: known.collective or known.wait):
        return 0
    try:
        gradients = list(_large_gradients(gm, larger_than_mb * _MB))
        if not gradients:
            return 0
        plan = _UpdatePlan(gm.graph, Descendants(gm.graph, [[gradient] for gradient in gradients]))
        plan.make()
        updates = separate(gm.graph, plan.elements, plan.owners)
    except OptimizerSplitError as error:
        logger.info("updates stay where they are: %s", error)
        return 0
    for place, moved in plan.places.items():
        move_after([node for index in moved for node in updates[index]], plan.nodes[place])
    return sum(map(len, plan.places.values()))


def _large_gradients(gm: fx.GraphModule, limit: float) -> Iterator[fx.Node]:
    """The gradients above `limit` that list operators of an optimizer take, each once."""
    seen: set[fx.Node] = set()
    for block in get_all_fused_optimizer_blocks(gm):
        for gradient in block.optim.grads:
            value = fake_value(gradient)
            if gradient in seen or gradient.op != "call_function":
                continue
            seen.add(gradient)
            if isinstance(value, torch.Tensor) and _is_large(value, limit):
                yield gradient


def _is_large(gradient: torch.Tensor, limit: float) -> bool:
    return gradient.device.type == "cpu" and gradient.nbytes > limit


class _UpdatePlan:
    """The new places of a graph's optimizer updates, entry by entry, with the nodes that only
    optimizers need.

    Attributes:
        nodes: the nodes of the graph.
        elements: the elements of the graph: list entries, and nodes that are no lists.
        places: which updates move behind the node of which position, in their new order.
        owners: the update with which each element moves, or `NONE`.
    """

    def __init__(self, graph: fx.Graph, found: Descendants) -> None:
        self.nodes = list(graph.nodes)
        self.elements = found.elements
        self.places: dict[int, list[int]] = {}
        self.owners = [NONE] * len(self.elements)
        self._sets = found.owners
        self._position = {node: index for index, node in enumerate(self.nodes)}
        self._first = [self._position[node] for node in self.elements.nodes]
        self._last = list(self._first)
        for node in self.nodes[:-1]:  # what picks an entry is the last of it
            self._last[self.elements.number[node]] = self._position[node]
        self._effects = Effects(graph)
        self._states = Counter(
            self._effects.key(n) for n in self.nodes if n.op in ("placeholder", "get_attr")
        )
        self._first_call = next(i for i, n in enumerate(self.nodes) if n.op == "call_function")

    def make(self) -> None:
        """Finds a place for each update that can move."""
        updates: dict[int, list[int]] = {}
        for element, index in enumerate(self._sets):
            if index != NONE:
                updates.setdefault(index, []).append(element)
        needed = {i: sorted({*update, *self._shared(update)}) for i, update in updates.items()}
        last_before = {index: self._last_before(update) for index, update in needed.items()}
        moving = self._nodes_of(element for update in needed.values() for element in update)
        for last, group in groupby(sorted((last_before[i], i) for i in needed), itemgetter(0)):
            if self._node_of(self.nodes[last]) in moving:  # it would have to follow another update
                continue
            owners: dict[int, int] = {}
            for _, index in group:
                free = (e for e in needed[index] if self.owners[e] == NONE and e not in owners)
                owners.update((e, index) for e in free if self._first[e] > last)
            if self._separates(last, owners):
                self.places[last] = list(dict.fromkeys(owners.values()))
                for element, index in owners.items():
                    self.owners[element] = index

    def _separates(self, last: int, owners: Mapping[int, int]) -> bool:
        """True if compute lies between updates and their place, or would lie between two parts
        of a call that is divided."""
        end = max((self._first[element] for element in owners), default=last)
        before: int | None = -1
        for node in self.nodes[last + 1 : end + 1]:
            left = [e for e in self.elements.of(node) if self.owners[e] == NONE]
            if is_copy(node) or self._node_of(node) is not node or not left:
                continue
            found = {owners.get(element, NONE) for element in left}
            if before is None or found == {NONE} or max(found) < before:
                return True
            before = found.pop() if len(found) == 1 else None  # divided: nothing may follow
        return False

    def _shared(self, update: Sequence[int]) -> set[int]:
        """The hyperparameter values that an update needs: computed for optimizers only, and
        owned by no update."""
        found: set[int] = set()
        pending = list(update)
        while pending:
            for source in self.elements.inputs[pending.pop()]:
                unowned = self._sets[source] == NONE and source not in found
                if unowned and _can_move(self.elements.nodes[source]):
                    found.add(source)
                    pending.append(source)
        return found

    def _last_before(self, update: Sequence[int]) -> int:
        """The position of the last node that must run before an update."""
        elements, moving, nodes = self.elements, set(update), self._nodes_of(update)
        before = [self._first_call - 1]
        for element in update:
            given = (n for n in elements.given(element) if elements.number[n] not in moving)
            before += map(self._position.__getitem__, given)
            for state in written(elements.nodes[element]):
                if state.op == "placeholder" and self._states[self._effects.key(state)] == 1:
                    readers = (r for r in elements.readers(state) if r not in moving)
                    before += map(self._first.__getitem__, readers)
                else:
                    before.append(self._stands_behind(element, nodes))
        last = max(before)
        for element in update:  # one that begins before that place stays, and is needed whole
            if self._first[element] <= last:
                last = max(last, self._last[element])
        return last

    def _stands_behind(self, element: int, moving: set[fx.Node]) -> int:
        """The position of the last unmoved node before an element that stays."""
        position = self._first[element] - 1
        while self._node_of(self.nodes[position]) in moving:
            position -= 1
        return position

    def _nodes_of(self, elements: Iterable[int]) -> set[fx.Node]:
        return {self.elements.nodes[element] for element in elements}

    def _node_of(self, node: fx.Node) -> fx.Node:
        """The list operator that a node takes a result of, or the node itself."""
        return self.elements.nodes[self.elements.number[node]]


def _can_move(node: fx.Node) -> bool:
    movable = node.op == "call_function" and phase_of(node) == "optimizer"
    return movable and not is_needed(node) and not written(node)
