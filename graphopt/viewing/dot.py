"""A graph in the language of Graphviz."""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from graphopt.graph_utils.nodes import graph_of
from graphopt.ir.metadata import known_value
from graphopt.readable.rows import describe, target_text, title_of


def dot_text(graph: fx.GraphModule | fx.Graph, name: str = "step") -> str:
    """A graph as DOT: a box for each phase, a node for each node, an edge for each argument.

    >>> import graphopt, torch
    >>> from graphopt.viewing import dot_text
    >>> captured = graphopt.capture(lambda m, x: m(x), torch.nn.ReLU(), torch.ones(2))
    >>> gm = captured.graph_module
    >>> print(dot_text(gm).splitlines()[0])
    digraph "step" {
    """
    return "\n".join(_lines(graph_of(graph), name)) + "\n"


def _lines(graph: fx.Graph, name: str) -> Iterator[str]:
    numbers = {node: index for index, node in enumerate(graph.nodes)}
    phases: dict[str, list[fx.Node]] = {}
    for node in graph.nodes:
        phases.setdefault("output" if node.op == "output" else title_of(node), []).append(node)
    yield f"digraph {_quoted(name)} {{"
    yield "  node [shape=box, fontsize=10];"
    for index, (title, nodes) in enumerate(phases.items()):
        yield f"  subgraph cluster_{index} {{"
        yield f"    label={_quoted(title)};"
        yield from (f"    n{numbers[node]} [label={_quoted(_label(node))}];" for node in nodes)
        yield "  }"
    for node in graph.nodes:
        yield from (f"  n{numbers[source]} -> n{numbers[node]};" for source in node.all_input_nodes)
    yield "}"


def _label(node: fx.Node) -> str:
    lines = [f"%{node.name}", target_text(node), describe(known_value(node))]
    return "\n".join(line for line in lines if line)


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
