"""Graphs of training steps run on several replicas in one process, collectives included.

All replicas run the same graph node by node, side by side: where one launches a collective, so do
the others, and the result is made of what all of them send.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor, fx

from graphopt.graph_utils import get_outputs, is_collective, is_random, is_wait, without_autocast
from graphopt.iter_graph import IterGraphModule

Row = list[Any]
"""One value for each replica."""

_COMBINE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add,
    "avg": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
    "product": torch.mul,
}


class Replicas:
    """So many replicas, each with its generator of random numbers.

    Args:
        count: of replicas.
        seed: replica number r draws from a generator seeded with seed + r.
    """

    def __init__(self, count: int, seed: int = 0) -> None:
        self.count = count
        self._random = []
        for rank in range(count):
            torch.manual_seed(seed + rank)
            self._random.append(torch.get_rng_state())

    def run(self, gm: fx.GraphModule, inputs: Sequence[Row]) -> tuple[list[Row], list[Row]]:
        """Run a graph; state is updated in `inputs`, one row for each placeholder.

        Returns:
            Rows of results and of carried values.
        """
        values: dict[fx.Node, Row] = {}
        remaining = iter(inputs)
        with torch.no_grad(), without_autocast():
            for node in gm.graph.nodes:
                if node.op == "output":
                    break
                values[node] = next(remaining) if node.op == "placeholder" else []
                if node.op != "placeholder":
                    values[node] = self._row(gm, node, values)
        outputs = get_outputs(gm.graph)
        results = [self._read(value, values) for value in outputs.results]
        return results, [self._read(value, values) for value in outputs.carried]

    def _read(self, value: Any, values: dict[fx.Node, Row]) -> Row:
        return values[value] if isinstance(value, fx.Node) else [value] * self.count

    def _row(self, gm: fx.GraphModule, node: fx.Node, values: dict[fx.Node, Row]) -> Row:
        if node.op == "get_attr":
            return [_attribute(gm, str(node.target))] * self.count
        if is_wait(node):
            return self._read(node.args[0], values)
        calls = [self._arguments(node, values, rank) for rank in range(self.count)]
        if is_collective(node):
            return collective(node.target, calls)
        return [self._call(node, rank, *calls[rank]) for rank in range(self.count)]

    def _arguments(self, node: fx.Node, values: dict[fx.Node, Row], rank: int) -> tuple[Any, Any]:
        return fx.node.map_arg((node.args, node.kwargs), lambda n: values[n][rank])

    def _call(self, node: fx.Node, rank: int, args: Any, kwargs: Any) -> Any:
        target: Any = node.target
        if not is_random(node):
            return target(*args, **kwargs)
        torch.set_rng_state(self._random[rank])
        result = target(*args, **kwargs)
        self._random[rank] = torch.get_rng_state()
        return result


def _attribute(gm: fx.GraphModule, name: str) -> Any:
    return reduce(getattr, name.split("."), gm)


def collective(target: Any, calls: Sequence[tuple[Any, Any]]) -> Row:
    """What each replica gets of a collective, given the arguments of all."""
    name = target._schema.name.split("::")[1]
    kind = name.removesuffix("_").removesuffix("_coalesced")
    sent = [args[0] for args, _ in calls]
    options = calls[0][0][1:]
    if isinstance(sent[0], (list, tuple)):
        columns = [_combined(kind, list(column), options) for column in zip(*sent, strict=True)]
        found = [list(row) for row in zip(*columns, strict=True)]
    else:
        found = _combined(kind, sent, options)
    if not name.endswith("_"):
        return found
    for mine, new in zip(sent, found, strict=True):
        for tensor, value in zip(_leaves(mine), _leaves(new), strict=True):
            tensor.copy_(value)
    return sent


def _leaves(value: Any) -> list[Tensor]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _combined(kind: str, sent: list[Tensor], options: Sequence[Any]) -> list[Tensor]:
    if kind == "broadcast":
        return [sent[options[0]].clone() for _ in sent]
    if kind == "all_gather_into_tensor":
        return [torch.cat(sent) for _ in sent]
    total = reduce(_COMBINE[options[0]], sent)
    if options[0] == "avg":
        total = total / len(sent)
    if kind == "reduce_scatter_tensor":
        return list(total.chunk(len(sent)))
    assert kind == "all_reduce", kind
    return [total.clone() for _ in sent]


def run_steps(
    gm: fx.GraphModule, inputs: Sequence[Row], iterations: int, seed: int = 0
) -> list[Row]:
    """Rows of everything that some iterations return, and of the state that they leave.

    Late work runs as it does: one iteration later, and at the end.
    """
    rows = [[_copied(value) for value in row] for row in inputs]
    replicas = Replicas(len(rows[0]), seed)
    kinds = [node.meta.get("kind") for node in gm.graph.nodes if node.op == "placeholder"]
    late = isinstance(gm, IterGraphModule) and bool(gm.graph.late)
    given = len(get_outputs(gm.graph).carried)
    found: list[Row] = []
    carried: list[Row] = []
    for iteration in range(iterations):
        if iteration:
            rows = [_next(row, kind) for row, kind in zip(rows, kinds, strict=True)]
        graph = _graph(gm, late, iteration)
        results, left = replicas.run(graph, [*rows, *carried])
        found += [[_copied(value) for value in row] for row in (*results, *left[:given])]
        carried = left[given:] if late else []
    if late:
        assert isinstance(gm, IterGraphModule)
        replicas.run(gm.drain_gm, [*rows, *carried])
    return [*found, *rows]


def _graph(gm: fx.GraphModule, late: bool, iteration: int) -> fx.GraphModule:
    if not late:
        return gm
    assert isinstance(gm, IterGraphModule)
    return gm.main_gm if iteration else gm.setup_gm


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _next(row: Row, kind: str | None) -> Row:
    """What a placeholder gets in the next iteration."""
    if kind == "hyperparameter":
        return [value * 0.9 for value in row]
    if kind == "user_input" and isinstance(row[0], Tensor) and row[0].dim():
        return [value.roll(1, 0) for value in row]
    return row


def difference(one: Sequence[Row], other: Sequence[Row]) -> str | None:
    """Where two runs do not agree bit for bit; None: nowhere."""
    if len(one) != len(other):
        return f"{len(other)} values in place of {len(one)}"
    for index, (old, new) in enumerate(zip(one, other, strict=True)):
        for rank, (a, b) in enumerate(zip(old, new, strict=True)):
            if not _same(a, b):
                return f"value {index} of replica {rank}"
    return None


def _same(a: Any, b: Any) -> bool:
    a, b = (torch.tensor(v) if isinstance(v, (int, float)) else v for v in (a, b))
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return bool(operator.eq(a, b))
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return False
    return bool(((a == b) | ((a != a) & (b != b))).all())


def random_inputs(specs: Sequence[Any], values: Sequence[Any], count: int, seed: int) -> list[Row]:
    """Rows for the placeholders of a captured step: state is the same for all replicas and near
    what it was, what the user gives differs."""
    draw = torch.Generator().manual_seed(seed)
    rows = []
    for spec, value in zip(specs, values, strict=True):
        if not isinstance(value, Tensor):
            rows.append([value] * count)
        elif spec.kind == "user_input":
            rows.append([_drawn(value, draw, rank) for rank in range(count)])
        else:
            moved = _moved(value.detach(), spec.kind, draw)
            rows.append([moved.clone() for _ in range(count)])
    return rows


def _drawn(value: Tensor, draw: torch.Generator, rank: int) -> Tensor:
    if value.dim() and value.is_floating_point():
        return torch.randn(value.shape, generator=draw).to(value.dtype)
    return value.roll(rank, 0).clone() if value.dim() else value.clone()


def _moved(value: Tensor, kind: str, draw: torch.Generator) -> Tensor:
    if not value.is_floating_point() or not value.dim():
        return value
    noise = torch.rand(value.shape, generator=draw).to(value.dtype)
    moved = value * (noise + 0.5)
    if kind in ("parameter", "gradient"):
        moved = moved + (noise - 0.5) * 0.1
    if value.stride() == moved.stride():
        return moved
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype).copy_(moved)
