"""A split policy that balances stages by weight, without marks in the model."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
from torch import fx

from graphopt.errors import PartitionError
from graphopt.graph_utils import is_operator, tensors_in
from graphopt.ir.metadata import known_value
from graphopt.pipelining.pipe.marks import insert_mark_after

Weight = Callable[[fx.Node], float]


def balanced(
    num_stages: int, weight: Weight | None = None, slack: float = 0.05
) -> Callable[[fx.GraphModule], fx.GraphModule]:
    """A `split_policy` that makes the heaviest stage as light as it can be.

    Among the divisions whose heaviest stage is at most `slack` above the lightest possible, the one
    that moves the fewest bytes between stages is taken.

    Args:
        num_stages: the number of stages.
        weight: of one call of the graph, in any unit and not negative, such as seconds by a cost
            model. By default the elements of the parameters and buffers that it is the first
            to read.
        slack: share of weight that fewer bytes may cost.

    Raises:
        PartitionError: by the policy, when the model has fewer calls than stages.

    >>> model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(4)))
    >>> policy = graphopt.pipelining.balanced(2)
    >>> pipe = graphopt.pipelining.pipeline(model, (torch.ones(1, 4),), split_policy=policy)
    >>> [len(list(pipe.get_stage_module(i).parameters())) for i in range(2)]
    [4, 4]
    """
    if num_stages < 1:
        raise ValueError(f"a pipe has at least 1 stage, not {num_stages}")

    def policy(graph_module: fx.GraphModule) -> fx.GraphModule:
        nodes = [n for n in graph_module.graph.nodes if _is_computation(n)]
        if len(nodes) < num_stages:
            raise PartitionError(f"{len(nodes)} calls cannot be divided into {num_stages} stages")
        weights = [weight(n) for n in nodes] if weight else _parameter_elements(graph_module, nodes)
        limit = lightest_maximum(weights, num_stages) * (1 + slack)
        ends = cheapest_cuts(weights, _bytes_across(graph_module, nodes), num_stages, limit)
        for stage, end in enumerate(ends):
            insert_mark_after(nodes[end], f"balanced end of stage {stage}")
        return graph_module

    return policy


def _is_computation(node: fx.Node) -> bool:
    called = node.op in ("call_function", "call_module", "call_method")
    return called and not is_operator(node.target, "aten::_assert_tensor_metadata")


def _parameter_elements(graph_module: fx.GraphModule, nodes: Sequence[fx.Node]) -> list[float]:
    seen: set[fx.Node] = set()
    weights = []
    for node in nodes:
        new = [n for n in node.all_input_nodes if n.op == "get_attr" and n not in seen]
        seen.update(new)
        values = tensors_in([known_value(n) for n in new])
        weights.append(float(sum(value.numel() for value in values)))
    return weights


def _bytes_across(graph_module: fx.GraphModule, nodes: Sequence[fx.Node]) -> list[float]:
    """The bytes of values that are alive after each node: made before it, read later.

    Infinite where a list of tensors is alive, which no stage can send.
    """
    position = {node: index for index, node in enumerate(nodes)}
    size = [0] * (len(nodes) + 1)
    lists = [0] * (len(nodes) + 1)
    for node in [*graph_module.graph.find_nodes(op="placeholder"), *nodes]:
        last = max((position.get(user, len(nodes)) for user in node.users), default=-1)
        made = position.get(node, 0)
        if last <= made:
            continue
        value = known_value(node)
        change, amount = (size, value.nbytes) if isinstance(value, torch.Tensor) else (lists, 1)
        change[made] += amount
        change[last] -= amount
    sizes = zip(accumulate(size), accumulate(lists), strict=True)
    return [math.inf if alive else float(total) for total, alive in sizes][: len(nodes)]


def lightest_maximum(weights: Sequence[float], num_stages: int) -> float:
    """The weight of the heaviest stage in the most even division, found by bisection."""
    low, high = max(weights), sum(weights)
    if _fits(weights, num_stages, low):
        return low
    for _ in range(60):
        middle = (low + high) / 2
        if _fits(weights, num_stages, middle):
            high = middle
        else:
            low = middle
    return high


def _fits(weights: Sequence[float], num_stages: int, limit: float) -> bool:
    stages, load = 1, 0.0
    for weight in weights:
        if load + weight > limit:
            stages, load = stages + 1, 0.0
        load += weight
    return stages <= num_stages


def cheapest_cuts(
    weights: Sequence[float], across: Sequence[float], num_stages: int, limit: float
) -> list[int]:
    """The last node of every stage but the last, so that the fewest bytes cross the cuts.

    Dynamic programming over (stages so far, last node); a stage reaches back as far as `limit` lets
    it, so the best start is the minimum of a sliding window.
    """
    count = len(weights)
    total = [0.0, *accumulate(weights)]
    cost = [0.0 if total[end + 1] <= limit else math.inf for end in range(count)]
    came_from: list[list[int]] = []
    for stage in range(1, num_stages):
        reached = [math.inf] * count
        origin = [-1] * count
        window: deque[int] = deque()
        for end in range(stage, count):
            candidate = end - 1
            price = cost[candidate] + across[candidate]
            while window and cost[window[-1]] + across[window[-1]] >= price:
                window.pop()
            window.append(candidate)
            while window and total[end + 1] - total[window[0] + 1] > limit:
                window.popleft()
            if window:
                origin[end] = window[0]
                reached[end] = cost[origin[end]] + across[origin[end]]
        came_from.append(origin)
        cost = reached
    ends = [count - 1]
    for origin in reversed(came_from):
        ends.append(origin[ends[-1]])
    return ends[:0:-1]
