"""A check that a pass leaves a well-formed graph; `graphopt.verify` checks its meaning."""

from __future__ import annotations

from collections.abc import Iterator
from types import FunctionType

from torch import fx

from graphopt._compat import graphs
from graphopt.ir.metadata import has_value
from graphopt.manager.snapshot import Snapshot
from graphopt.verify import Problem


def find_problem(gm: fx.GraphModule, before: Snapshot) -> Problem | None:
    """Returns the first reason why a pass's graph is not well formed, or None, in linear time."""
    malformed = _lint(gm)
    checks = (_placeholders, _output, _values)
    for check in checks if malformed is None else (_order, *checks):  # lint looks at the order, too
        found = next(check(gm, before), None)
        if found is not None:
            return found
    if isinstance(malformed, Exception):
        raise malformed
    return malformed


def _order(gm: fx.GraphModule, before: Snapshot) -> Iterator[Problem]:
    seen: set[fx.Node] = set()
    for node in gm.graph.nodes:
        for source in node.all_input_nodes:
            if source not in seen:
                yield _missing(gm.graph, node, source, before)
        seen.add(node)


def _missing(graph: fx.Graph, node: fx.Node, source: fx.Node, before: Snapshot) -> Problem:
    if source.graph is not graph:
        return Problem(
            "it used a node of another graph",
            (node, source),
            hint="copy the node with gm.graph.node_copy, or use the one of this graph",
        )
    if source not in set(graph.nodes):
        return Problem(
            "it used a node that it has erased",
            (node, source),
            hint="replace all uses of a node before erasing it",
        )
    if _was_moved(source, before) and not _was_moved(node, before):
        return Problem(
            f"it moved %{source.name} behind %{node.name}, which reads it",
            (source, node),
            hint="move the readers of a node as well, or leave it in front of them",
        )
    return Problem(
        "it moved a read before the value exists",
        (node, source),
        hint="insert the new reader after all of its inputs",
    )


def _was_moved(node: fx.Node, before: Snapshot) -> bool:
    """True if a node has other neighbours than before."""
    copy = before.copies.get(node)
    if copy is None:
        return False
    return before.copies.get(node.prev) is not copy.prev and (
        before.copies.get(node.next) is not copy.next
    )


def _placeholders(gm: fx.GraphModule, before: Snapshot) -> Iterator[Problem]:
    nodes = gm.graph.find_nodes(op="placeholder")
    targets = [node.target for node in nodes]
    if targets == before.placeholders:
        return
    added = [node for node in nodes if node.target not in set(before.placeholders)]
    lost = [target for target in before.placeholders if target not in set(targets)]
    if added:
        what = "it added a placeholder"
    elif lost:
        what = f"it removed the placeholder {lost[0]}"
    else:
        what = "it changed the order of the placeholders"
    yield Problem(
        what, tuple(added[:1]), hint="the inputs of a graph are fixed: leave them as they are"
    )


def _output(gm: fx.GraphModule, before: Snapshot) -> Iterator[Problem]:
    outputs = [node for node in gm.graph.nodes if node.op == "output"]
    if len(outputs) != 1:
        yield Problem(
            f"it left a graph with {len(outputs) or 'no'} outputs", hint="a graph has one output"
        )
        return
    last = next(iter(reversed(gm.graph.nodes)))
    if last.op != "output":
        yield Problem("it put a node behind the output", (last,), hint="insert before the output")


def _values(gm: fx.GraphModule, before: Snapshot) -> Iterator[Problem]:
    if not before.annotated:
        return
    for node in gm.graph.nodes:
        if node.op != "output" and not has_value(node):
            yield Problem(
                "it left a node without meta['val']",
                (node,),
                hint="graphopt.host.insert_callback calls functions written in Python"
                if isinstance(node.target, FunctionType)
                else "insert nodes with graphopt.graph_utils.call_function_with_meta",
            )


def _lint(gm: fx.GraphModule) -> Problem | Exception | None:
    """Returns the problem that torch's `lint` finds, or the exception it raises, or None."""
    if _is_well_formed(gm.graph):
        return None
    try:
        gm.graph.lint()
    except (RuntimeError, ValueError) as error:
        return Problem(f"the graph is malformed: {str(error).partition(chr(10))[0]}")
    except Exception as error:  # ours may say better what is wrong
        return error
    return None


def _is_well_formed(graph: fx.Graph) -> bool:
    """True if `lint` would pass, in a third of its time. Constants and modules are left to `lint`.

    The table of calls by target holds the very nodes of the graph, each in its place: passes and
    checks ask it for them.
    """
    seen: set[fx.Node] = set()
    names: set[str] = set()
    for node in graph.nodes:
        if node.graph is not graph or not seen.issuperset(graphs.inputs_of(node)):
            return False
        seen.add(node)
        names.add(node.name)
    filed = 0
    for op, target, nodes in graphs.nodes_by_kind(graph):
        if op == "call_function":
            fits = callable(target) and all(n.op == op and n.target is target for n in nodes)
        else:
            plain = op in ("placeholder", "call_method", "output")
            fits = plain and all(n.op == op and isinstance(n.target, str) for n in nodes)
        if not fits or not seen.issuperset(nodes):
            return False
        filed += len(nodes)
    return len(names) == len(seen) == filed
