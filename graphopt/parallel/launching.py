"""Placement of collective launches in a captured step: right after the values that they send.

g1 = …                            g1 = …
g2 = …                            s1 = mul(g1, 0.5); launch1 = all_reduce(s1)
s1 = mul(g1, 0.5)                 g2 = …
launch1 = all_reduce(s1)          s2 = mul(g2, 0.5); launch2 = all_reduce(s2)
mean1 = wait(launch1)             mean1 = wait(launch1)
s2 = mul(g2, 0.5) …               mean2 = wait(launch2)
"""

from __future__ import annotations

from torch import fx

from graphopt.graph_utils import after_placeholders, is_collective, is_wait
from graphopt.graph_utils.nodes import with_own_inputs
from graphopt.host.decisions.assumptions import Assumption
from graphopt.ir.metadata import phase_of


def place_launches(graph: fx.Graph) -> None:
    """Moves each collective, with nodes that only it needs, to just after the values it sends.

    Launches of one group keep their order, which all ranks share, and stay behind decisions that
    come before them: where one fails, nothing has been launched that another branch may not launch.
    """
    previous: dict[str, fx.Node] = {}
    decision: fx.Node | None = None
    for node in list(graph.nodes):
        if isinstance(node.target, Assumption):
            decision = node
        if not is_collective(node):
            continue
        chain = with_own_inputs(node, _is_communication)
        sources = {source for member in chain for source in member.all_input_nodes} - set(chain)
        group = str(node.args[-1])
        if decision is not None:
            sources.add(decision)
        if group in previous:
            sources.add(previous[group])
        previous[group] = node
        anchor = after_placeholders(max(sources))
        for member in chain:
            if anchor.next is not member:
                anchor.append(member)
            anchor = member


def _is_communication(node: fx.Node) -> bool:
    return node.op == "call_function" and phase_of(node) == "communication" and not is_wait(node)
