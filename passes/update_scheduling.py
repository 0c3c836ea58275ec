"""Update each large parameter as soon as its gradient is there.

    g1 = mm(…)                              g1 = mm(…)
    g0 = mm(…)                              w1', … = _fused_adamw([w1], [g1], …)
    w0', w1', … = _fused_adamw(      ==>    g0 = mm(…)
        [w0, w1], [g0, g1], …)              w0', … = _fused_adamw([w0], [g0], …)

The memory of a gradient is then free for the next one, which saves up to a tenth of a step where
gradients are so large that the allocator gives their memory back to the system. An update does not
move before the last read of the values that it replaces, so that it still happens in place.

Other parameters keep one update at the end: among the matrix products it would only displace what
these have in the processor's cache (`benchmarks/compute.py`: no gain up to 1 MiB, some loss at
256 KiB). So do parameters on other devices than the CPU, where one launch for all is what counts,
and all of a graph with collectives: what stands before a launch delays it.

Needs optimizers that update each parameter on its own; with clipping by the norm of all gradients
nothing moves before the norm is known. Bitwise: every element is computed as before.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Sequence

import torch
from torch import fx

from graphopt.graph_utils import (
    is_needed,
    move_after,
    readers_through_views,
    written,
)
from graphopt.ir.effects import Effects
from graphopt.ir.operators import calls_of
from graphopt.manager import graph_optimization_pass
from graphopt.optim import OptimizerSplitError, get_all_fused_optimizer_blocks, split_updates

logger = logging.getLogger("graphopt")

_MB = 2**20


@graph_optimization_pass(
    apply_after=["remove_copy_from_optimizer", "iter_move_grads_and_optimizers"]
)
def schedule_updates(gm: fx.GraphModule, larger_than_mb: float = 2) -> int:
    """Update each large parameter as soon as its gradient is there.

    Args:
        larger_than_mb: gradients up to this size are left to one update for all, in MiB.

    Returns:
        How many updates moved.
    """
    if calls_of(gm.graph, lambda known: known.collective or known.wait):
        return 0
    try:
        gradients = list(_large_gradients(gm, larger_than_mb * _MB))
        updates = split_updates(gm, [[gradient] for gradient in gradients])
    except OptimizerSplitError as error:
        logger.info("updates stay where they are: %s", error)
        return 0
    distinct = list({id(update): update for update in updates}.values())
    return _Scheduler(gm.graph, distinct).run()


def _large_gradients(gm: fx.GraphModule, limit: float) -> Iterator[fx.Node]:
    """Gradients that an optimizer of list operators takes, each once."""
    seen: set[fx.Node] = set()
    for block in get_all_fused_optimizer_blocks(gm):
        for gradient in block.optim.grads:
            value = gradient.meta["val"]
            if gradient in seen or gradient.op != "call_function":
                continue
            seen.add(gradient)
            if isinstance(value, torch.Tensor) and _is_large(value, limit):
                yield gradient


def _is_large(gradient: torch.Tensor, limit: float) -> bool:
    return gradient.device.type == "cpu" and gradient.nbytes > limit


class _Scheduler:
    """Moves updates in one graph, each together with what only optimizers need of it."""

    def __init__(self, graph: fx.Graph, updates: Sequence[Sequence[fx.Node]]) -> None:
        self._updates = updates
        self._owned = {node for update in updates for node in update}
        self._nodes = list(graph.nodes)
        self._position = {node: index for index, node in enumerate(self._nodes)}
        self._effects = Effects(graph)
        self._states = Counter(
            self._effects.key(n) for n in self._nodes if n.op in ("placeholder", "get_attr")
        )
        self._first_call = next(i for i, n in enumerate(self._nodes) if n.op == "call_function")

    def run(self) -> int:
        """Move what can move; returns how many updates did."""
        needed = [[*self._shared(update), *update] for update in self._updates]
        last_before = list(map(self._last_before, needed))
        moving = {node for nodes in needed for node in nodes}
        behind: dict[int, list[list[fx.Node]]] = {}
        placed: set[fx.Node] = set()
        for index in sorted(range(len(needed)), key=last_before.__getitem__):
            last = last_before[index]
            if self._nodes[last] in moving:  # it would have to follow another update
                continue
            nodes = [n for n in needed[index] if n not in placed and self._position[n] > last]
            placed.update(nodes)
            behind.setdefault(last, []).append(nodes)
        return sum(self._place(last, groups) for last, groups in behind.items())

    def _place(self, last: int, groups: Sequence[Sequence[fx.Node]]) -> int:
        """Move updates behind a node, unless they stand there; returns how many moved."""
        nodes = [node for group in groups for node in group]
        if self._nodes[last + 1 : last + 1 + len(nodes)] == nodes:
            return 0
        move_after(nodes, self._nodes[last])
        return len(groups)

    def _shared(self, update: Sequence[fx.Node]) -> list[fx.Node]:
        """What an update needs that only optimizers compute, and of which no update is the owner:
        values of hyperparameters, in graph order."""
        found: set[fx.Node] = set()
        pending = list(update)
        while pending:
            for source in pending.pop().all_input_nodes:
                if source not in found and source not in self._owned and _can_move(source):
                    found.add(source)
                    pending.append(source)
        return sorted(found, key=self._position.__getitem__)

    def _last_before(self, nodes: Sequence[fx.Node]) -> int:
        """Position of the last node that has to stand before an update."""
        moving = set(nodes)
        before = [source for node in nodes for source in node.all_input_nodes]
        for node in nodes:
            for state in written(node):
                alone = self._states[self._effects.key(state)] == 1 and state.op == "placeholder"
                before += readers_through_views(state) if alone else [_stands_behind(node, moving)]
        return max(
            self._first_call - 1,
            *(self._position[node] for node in before if node not in moving),
        )


def _stands_behind(node: fx.Node, moving: set[fx.Node]) -> fx.Node:
    """The last node before `node` that does not move."""
    before = node.prev
    while before in moving:
        before = before.prev
    return before


def _can_move(node: fx.Node) -> bool:
    movable = node.op == "call_function" and node.meta.get("phase") == "optimizer"
    return movable and not is_needed(node) and not written(node)
