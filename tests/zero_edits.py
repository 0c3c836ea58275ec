"""Edits of sharded graphs: what a wrong kind of parallelism could write, and what a right one may.

Each edit goes through all places of a graph: it changes one, yields its name, and undoes that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import permutations
from random import Random
from typing import Any

import torch
from torch import fx

from graphopt.graph_utils import call_function_with_meta, is_collective, is_copy
from graphopt.ir.metadata import fake_value, input_kind
from graphopt.ir.placement import placement_of

aten, c10d = torch.ops.aten, torch.ops._c10d_functional
Edit = Callable[[fx.Graph], Iterator[str]]


def called(graph: fx.Graph, *names: str) -> list[fx.Node]:
    return [node for node in graph.nodes if any(name in str(node.target) for name in names)]


def argument(name: str, index: int, *changes: Callable[[Any], Any]) -> Edit:
    """An argument of each call of an operator, as each change has it."""

    def edit(graph: fx.Graph) -> Iterator[str]:
        for node in called(graph, name):
            before = node.args
            for number, change in enumerate(changes):
                new = change(before[index])
                if new == before[index]:
                    continue
                node.args = (*before[:index], new, *before[index + 1 :])
                yield f"{node.name}, change {number}"
                node.args = before

    return edit


def given_another(name: str, index: int = 0, most: int = 12) -> Edit:
    """Each call gets what another value of the same kind is: rows of another tensor, say."""

    def edit(graph: fx.Graph) -> Iterator[str]:
        for node in called(graph, name):
            now: Any = node.args[index]
            if not isinstance(now, fx.Node):
                continue
            others = [other for other in graph.nodes if _alike(now, other) and other < node]
            before = node.args
            for other in others[-most:]:
                if _same(now, other):
                    continue
                node.args = (*before[:index], other, *before[index + 1 :])
                yield f"{node.name} of {other.name}"
                node.args = before

    return edit


def _alike(one: fx.Node, other: fx.Node) -> bool:
    a, b = one.meta.get("val"), other.meta.get("val")
    if one is other or not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return False
    return (
        a.shape == b.shape and a.dtype == b.dtype and other.op in ("call_function", "placeholder")
    )


def _same(one: fx.Node, other: fx.Node) -> bool:
    """Whether both are views or copies of one value, or updates that leave it."""

    def root(node: Any) -> Any:
        while isinstance(node, fx.Node) and (is_copy(node) or _only_passes(node)):
            node = node.args[1] if is_copy(node) else node.args[0]
        return node

    return root(one) is root(other)


def _only_passes(node: fx.Node) -> bool:
    names = ("aten.view", "aten.clone", "aten.alias", "wait_tensor", "aten.detach")
    return any(name in str(node.target) for name in names)


def left_out(name: str) -> Edit:
    """What a call is given stands in its place, where that has as many elements."""

    def edit(graph: fx.Graph) -> Iterator[str]:
        for node in called(graph, name):
            source: Any = node.args[0]
            if not isinstance(source, fx.Node) or not _alike(node, source):
                continue
            users = list(node.users)
            node.replace_all_uses_with(source)
            yield f"{node.name} left out"
            for user in users:
                user.replace_input_with(source, node)

    return edit


def not_reduced(graph: fx.Graph) -> Iterator[str]:
    """A rank takes its rows of what it has itself, in place of the sum."""
    for node in called(graph, "sum_of_ranks"):
        length = fake_value(node).numel()
        launch: Any = node.args[0].args[0]  # type: ignore[union-attr, index]
        with graph.inserting_before(node):
            own = call_function_with_meta(graph, aten.slice.Tensor, (launch.args[0], 0, 0, length))
        node.replace_all_uses_with(own)
        yield f"{node.name} is this rank's own"
        own.replace_all_uses_with(node)
        graph.erase_node(own)


def once_more(target: Any, *args: Any) -> Edit:
    """Something more is done to what is scattered, gathered, or copied."""

    def edit(graph: fx.Graph) -> Iterator[str]:
        chosen = called(graph, "sum_of_ranks", "all_gather_into_tensor", "all_to_all_single")
        for node in chosen:
            source: Any = node.args[0]
            with graph.inserting_before(node):
                new = call_function_with_meta(graph, target, (source, *args))
            node.args = (new, *node.args[1:])
            yield f"{node.name} of {new.name}"
            node.args = (source, *node.args[1:])
            graph.erase_node(new)

    return edit


def other_halves(graph: fx.Graph) -> Iterator[str]:
    """What was gathered is put together in another order of the ranks."""
    for node in called(graph, "all_gather_into_tensor"):
        (wait,) = node.users
        size = fake_value(node).numel()
        half = size // 2
        with graph.inserting_after(wait):
            second = call_function_with_meta(graph, aten.slice.Tensor, (wait, 0, half, size))
        with graph.inserting_after(second):
            first = call_function_with_meta(graph, aten.slice.Tensor, (wait, 0, 0, half))
        with graph.inserting_after(first):
            joined = call_function_with_meta(graph, aten.cat.default, ([second, first],))
        users = [user for user in wait.users if user not in (first, second)]
        for user in users:
            user.replace_input_with(wait, joined)
        yield f"{wait.name} in another order"
        for user in users:
            user.replace_input_with(joined, wait)
        for added in (joined, first, second):
            graph.erase_node(added)


def other_reductions(graph: fx.Graph) -> Iterator[str]:
    for node in called(graph, "_c10d_functional.all_reduce", "reduce_scatter_tensor"):
        before = node.args
        for how in ("sum", "avg", "max", "min", "product"):
            if how != before[1]:
                node.args = (before[0], how, *before[2:])
                yield f"{node.name} by {how}"
        node.args = before


def other_groups(graph: fx.Graph) -> Iterator[str]:
    for node in graph.nodes:
        names = ("graphopt_shards::window", "graphopt_shards::owned")
        if is_collective(node) or any(name.split("::")[1] in str(node.target) for name in names):
            if not isinstance(node.args[-1], str):
                continue
            before = node.args
            node.args = (*before[:-1], "another")
            yield f"{node.name} over other ranks"
            node.args = before


def swapped_updates(graph: fx.Graph) -> Iterator[str]:
    """Two inputs of one kind get each other's new value."""
    copies = [node for node in graph.nodes if is_copy(node)]
    for one, other in permutations(copies, 2):
        a, b = one.args[1], other.args[1]
        last = max(one, other)
        if one > other or not _alike(a, b) or max(a, b) > min(one, other):  # type: ignore[arg-type]
            continue
        one.args, other.args = (one.args[0], b), (other.args[0], a)
        yield f"{one.name} and {other.name}, before {last.name}"
        one.args, other.args = (one.args[0], a), (other.args[0], b)


def not_updated(graph: fx.Graph) -> Iterator[str]:
    """A parameter or state stays what it was."""
    for node in graph.nodes:
        destination: Any = node.args[0] if is_copy(node) else None
        if destination is None or input_kind(destination) not in ("parameter", "optimizer_state"):
            continue
        before = node.args
        node.args = (before[0], before[0])
        yield f"{node.name} copies nothing new"
        node.args = before


def not_cut(graph: fx.Graph) -> Iterator[str]:
    """A placeholder of rows says that it is whole."""
    for node in graph.find_nodes(op="placeholder"):
        if placement_of(node).rows is not None:
            before = dict(node.meta)
            node.meta.pop("placement", None)
            if placement_of(node).rows is None:
                yield f"{node.name} is whole"
            node.meta = before


def _rotated(values: Any) -> Any:
    return [*values[1:], values[0]]


def _shifted(values: Any) -> Any:
    return [max(value - 64, 0) for value in values]


ILLEGAL: dict[str, Edit] = {
    "rows of another rank": argument("graphopt_shards.window", 1, lambda s: s[::-1], _rotated),
    "rows from elsewhere": argument(
        "graphopt_shards.window", 1, _shifted, lambda s: [s[0]] * len(s)
    ),
    "what another rank owns": argument(
        "graphopt_shards.owned", 1, lambda s: [0] * len(s), lambda s: [*s[:-1], s[-1] + 1]
    ),
    "fewer owned rows": argument("graphopt_shards.owned", 2, lambda s: [n - 1 for n in s]),
    "padding in a norm": left_out("graphopt_shards.owned"),
    "another scale": argument(
        "aten.mul.Tensor", 1, lambda s: s if not isinstance(s, float) else 1.0 if s != 1.0 else 2.0
    ),
    "a missing scale": left_out("aten.mul.Tensor"),
    "fewer ranks": argument("sum_of_ranks", 1, lambda ranks: 1, lambda ranks: ranks * 2),
    "other sizes": argument("all_to_all_single", 2, lambda s: [s[0] - 1, s[1] + 1, *s[2:]]),
    "more in a group": argument("all_gather_into_tensor", 1, lambda ranks: ranks + 1),
    "not summed": not_reduced,
    "summed twice": once_more(aten.mul.Tensor, 2.0),
    "negated": once_more(aten.neg.default),
    "shifted": once_more(aten.roll.default, [1]),
    "another gradient": given_another("sum_of_ranks"),
    "another value sent": given_another("all_to_all_single"),
    "a stale or other gather": given_another("all_gather_into_tensor"),
    "another value copied": given_another("aten.copy_", 1, 6),
    "another window": given_another("graphopt_shards.window"),
    "another norm": given_another("graphopt_shards.owned"),
    "ranks in another order": other_halves,
    "another reduction": other_reductions,
    "another group": other_groups,
    "swapped updates": swapped_updates,
    "a lost update": not_updated,
    "a placement that is not so": not_cut,
}


# ---------------------------------------------------------------------------------- what is legal


def in_other_orders(graph: fx.Graph) -> Iterator[str]:
    """All nodes in another order, in which updates stay after reads."""
    from graphopt.schedule import Schedule, apply_schedule
    from graphopt.schedule.constraints import predecessors

    given = Schedule(tuple(graph.nodes))
    for seed in range(6):
        draw, before = Random(seed), predecessors(graph)
        done: dict[fx.Node, None] = dict.fromkeys(graph.find_nodes(op="placeholder"))
        left = [node for node in graph.nodes if node not in done and node.op != "output"]
        while left:
            free = [node for node in left[:40] if all(source in done for source in before[node])]
            node = draw.choice(free)
            done[node] = None
            left.remove(node)
        apply_schedule(graph, Schedule((*done, *graph.find_nodes(op="output"))))
        yield f"order {seed}"
        apply_schedule(graph, given)


def copied_between(graph: fx.Graph) -> Iterator[str]:
    """A copy of what is sent, or of what was received, goes on in its place."""
    for node in called(graph, "sum_of_ranks", "graphopt_shards.window", "aten.view"):
        users = [user for user in node.users if user.op != "output"]
        if not users:
            continue
        with graph.inserting_after(node):
            new = call_function_with_meta(graph, aten.clone.default, (node,))
        for user in users:
            user.replace_input_with(node, new)
        yield f"a copy of {node.name}"
        for user in users:
            user.replace_input_with(new, node)
        graph.erase_node(new)


def gathered_again(graph: fx.Graph) -> Iterator[str]:
    """One reader gets a gather of its own."""
    for node in called(graph, "all_gather_into_tensor"):
        (wait,) = node.users
        with graph.inserting_after(node):
            launch = call_function_with_meta(graph, node.target, node.args)  # type: ignore[arg-type]
        with graph.inserting_after(wait):
            other = call_function_with_meta(graph, wait.target, (launch,))  # type: ignore[arg-type]
        users = list(wait.users)
        for user in users[:1]:
            user.replace_input_with(wait, other)
        yield f"{node.name} twice"
        for user in users[:1]:
            user.replace_input_with(other, wait)
        graph.erase_node(other)
        graph.erase_node(launch)


LEGAL: dict[str, Edit] = {
    "another order": in_other_orders,
    "a copy in between": copied_between,
    "a gather of its own": gathered_again,
}
