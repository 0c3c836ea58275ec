"""A check that a graph keeps the contract of the captured dialect (docs/ir.md)."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING

import torch
from torch import fx

from graphopt import _compat
from graphopt.graph_utils import (
    find_nodes,
    follows_output_convention,
    get_outputs,
    is_collective,
    is_operator,
    is_wait,
    tensors_in,
)
from graphopt.ir.accesses import MemoryOrder
from graphopt.ir.metadata import fake_value, has_value, known_value, phase_of, source_line
from graphopt.ir.operators import calls_of, first_argument
from graphopt.ir.placement import placement_of
from graphopt.ir.views import launch_of
from graphopt.verify.checks.structure import waits_of_launches
from graphopt.verify.problems import CheckReport

if TYPE_CHECKING:
    from graphopt.tracing.captured_step import CapturedStep
    from graphopt.tracing.inputs.entries import InputSpec

KINDS = (*("parameter", "buffer", "optimizer_state", "gradient", "hyperparameter", "user_input"),)
PHASES = ("forward", "backward", "communication", "optimizer")


@dataclass
class SpecReport(CheckReport):
    """The outcome of checking one graph: `problems` says what breaks the contract, and where.

    >>> captured = graphopt.capture(lambda m, x: m(x), torch.nn.ReLU(), torch.ones(2))
    >>> report = graphopt.verify.check_captured(captured)
    >>> report.ok, list(report.problems)
    (True, [])
    """

    problems: list[str] = field(default_factory=list)

    shown = sys.maxsize

    def _says(self) -> tuple[str, str]:
        return (
            "the graph keeps the contract of the captured dialect",
            "the graph breaks the IR contract",
        )


def check_captured(captured: CapturedStep) -> SpecReport:
    """Checks placeholders, outputs, metadata, aliases, mutation and collectives of a captured step.

    Linear in the number of nodes. Changes nothing.

    >>> captured = graphopt.capture(lambda m, x: m(x), torch.nn.ReLU(), torch.ones(2))
    >>> graphopt.verify.check_captured(captured).ok
    True
    """
    return check_graph(captured.graph_module.graph, captured.inputs)


def check_graph(
    graph: fx.Graph, inputs: Sequence[InputSpec], *, marked: bool = False
) -> SpecReport:
    """Checks a bare graph as `check_captured` does, given the description of its placeholders.

    Args:
        marked: it may have markers, which no kind of parallelism has expanded yet.

    >>> from graphopt.verify import check_graph
    >>> captured = graphopt.capture(lambda m, x: m(x), torch.nn.ReLU(), torch.ones(2))
    >>> check_graph(captured.graph_module.graph, captured.inputs).ok
    True
    """
    report = SpecReport()
    for problems in (_placeholders(graph, inputs), _output_convention(graph)):
        report.problems += problems
    if report.ok:
        for problems in (_nodes(graph), _mutation(graph), _collectives(graph)):
            report.problems += problems
        if not marked:
            report.problems += _markers(graph)
    return report


def _at(node: fx.Node) -> str:
    source = source_line(node)
    return f"  > {node.format_node()}" + (f"\n    from:  {source}" if source else "")


def _placeholders(graph: fx.Graph, inputs: Sequence[InputSpec]) -> Iterator[str]:
    nodes = graph.find_nodes(op="placeholder")
    if [node.target for node in nodes] != [spec.placeholder for spec in inputs]:
        yield "the placeholders are not the inputs that the graph was captured with, in their order"
        return
    ranks = [KINDS.index(spec.kind) for spec in inputs]
    if ranks != sorted(ranks):
        yield f"placeholders are not in the order {', '.join(KINDS)}"
    owners: dict[int, str] = {}
    for node, spec in zip(nodes, inputs, strict=True):
        if placement_of(node) != spec.placement:
            yield f"{node.name} is {placement_of(node)}, and the input {spec.placement}"
        value = known_value(node)
        if not isinstance(value, torch.Tensor):
            yield f"placeholder {node.name} has no tensor in its metadata"
            continue
        if spec.kind == "user_input" or value.numel() == 0:
            continue
        other = owners.setdefault(_compat.storage_key(value), node.name)
        if other != node.name:
            yield f"placeholders {other} and {node.name} are two names of one storage"


def _output_convention(graph: fx.Graph) -> Iterator[str]:
    if not follows_output_convention(graph):
        yield "the output is not (user results, state updates, carried values)"
        return
    seen: dict[fx.Node, fx.Node] = {}
    for update in get_outputs(graph).updates:
        if not isinstance(update, fx.Node) or not is_operator(update.target, "aten::copy_"):
            yield f"state update {update} is not a copy_"
            continue
        destination = update.args[0]
        assert isinstance(destination, fx.Node)
        if destination in seen:
            yield f"{destination.name} is updated twice\n{_at(update)}"
        seen[destination] = update


def _nodes(graph: fx.Graph) -> Iterator[str]:
    for node in graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        if node.op not in ("call_function", "get_attr"):
            yield f"{node.op} is not part of the dialect\n{_at(node)}"
        elif not has_value(node):
            yield f"a node has no meta['val']\n{_at(node)}"
        elif node.op == "call_function" and phase_of(node) not in PHASES:
            yield f"a node has no phase\n{_at(node)}"


def _mutation(graph: fx.Graph) -> Iterator[str]:
    updates = set(get_outputs(graph).updates)
    stale = MemoryOrder(graph).implicit
    for node, source in ((n, s) for n in stale if not is_wait(n) for s in stale[n]):
        update = stale[node][source].node.name
        yield (
            f"{source.name} is read after {update} has updated it; read the result of the copy_\n"
            f"{_at(node)}"
        )
    for node in find_nodes(graph, _writes):
        destination = first_argument(node)
        if not is_operator(node.target, "aten::copy_"):
            yield f"an operator other than copy_ writes in place\n{_at(node)}"
        elif not isinstance(destination, fx.Node) or destination.op != "placeholder":
            yield f"copy_ into something other than a placeholder\n{_at(node)}"
        elif node not in updates:
            yield f"an orphan copy_: not listed among the state updates\n{_at(node)}"


def _writes(node: fx.Node) -> bool:
    if not isinstance(node.target, _compat.OpOverload):
        return False
    return bool(_compat.schema_of(node.target).is_mutable)


def _collectives(graph: fx.Graph) -> Iterator[str]:
    yield from map(str, waits_of_launches(graph))
    for node in graph.nodes:
        if is_wait(node) and launch_of(node) is None:
            yield f"a wait for something that is not a collective\n{_at(node)}"
        if not is_collective(node):
            continue
        if not isinstance(node.args[-1], str):
            yield f"a collective without a named group\n{_at(node)}"
        if not any(True for _ in tensors_in(fake_value(node))):
            yield f"a collective of unknown dtype and device\n{_at(node)}"


def _markers(graph: fx.Graph) -> Iterator[str]:
    for node in calls_of(graph, attrgetter("marker")):
        yield f"a marker that no kind of parallelism has expanded\n{_at(node)}"
