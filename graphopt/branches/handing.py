"""Makes a failing assumption hand out the values that the graph has computed before it.

    ok = isfinite(norm).item()                     ok = isfinite(norm).item()
    assumption = graphopt.assumption(ok, w)  ==>   assumption = graphopt.assumption(ok, w, g0, g1)

The assumption reads the values, so that they are there, and nothing has overwritten them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import takewhile

from torch import fx

from graphopt.branches.continuation import NotSharedError
from graphopt.host.decisions.assumptions import calls_function, hand_out
from graphopt.ir.operators import draws, is_collective
from graphopt.iter_graph import IterGraphModule, copy_graph
from graphopt.verify.checks.launches import launch_of
from graphopt.verify.inlining import in_one


def handing_out(
    step: IterGraphModule, assumption: fx.Node, values: Sequence[fx.Node]
) -> tuple[IterGraphModule, list[int]]:
    """A copy of a step in which an assumption hands out further values when it fails.

    Args:
        assumption, values: nodes of its graph.

    Returns:
        The copy, and where each of the values stands among those that are handed out.
    """
    graph, copies = copy_graph(step.graph)
    positions = hand_out(copies[assumption], [copies[value] for value in values])
    return IterGraphModule(fx.GraphModule(step, graph)), positions


def launched_before(executable: fx.Graph, assumption: object, drawn: int) -> list[str]:
    """The collectives that an executable graph launches before an assumption.

    Args:
        assumption: the target of its node.
        drawn: how many operators draw random numbers before it.

    Raises:
        NotSharedError: a stage has moved effects across it.
    """
    nodes = in_one(executable).nodes
    before = list(takewhile(lambda node: node.target is not assumption, nodes))
    if sum(map(draws, before)) != drawn:
        raise NotSharedError("random numbers are drawn elsewhere in the graph that runs")
    if any(map(calls_function, before)):
        raise NotSharedError("a function of the program's is called before the decision")
    return _launched(before)


def launched_by(executable: fx.Graph) -> list[str]:
    """The collectives that an executable graph launches."""
    return _launched(in_one(executable).nodes)


def _launched(nodes: Iterable[fx.Node]) -> list[str]:
    return [launch_of(node).text for node in nodes if is_collective(node)]
