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
from graphopt.host.decisions.assumptions import Assumption
from graphopt.ir.metadata import phase_of

_BETWEEN = 2.0**-20
"""Distance between nodes placed after one another, where untouched nodes are 1 apart."""


def place_launches(graph: fx.Graph) -> None:
    """Moves each collective, with nodes that only it needs, to just after the values it sends.

    Launches of one group keep their order, which all ranks share, and stay behind decisions that
    come before them: where one fails, nothing has been launched that another branch may not launch.
    """
    position = {node: float(index) for index, node in enumerate(graph.nodes)}
    previous: dict[str, fx.Node] = {}
    decision: fx.Node | None = None
    for node in list(graph.nodes):
        if isinstance(node.target, Assumption):
            decision = node
        if not is_collective(node):
            continue
        chain = sorted(_private_inputs(node), key=position.__getitem__)
        sources = {source for member in chain for source in member.all_input_nodes} - set(chain)
        group = str(node.args[-1])
        if decision is not None:
            sources.add(decision)
        if group in previous:
            sources.add(previous[group])
        previous[group] = node
        anchor = after_placeholders(max(sources, key=position.__getitem__))
        for member in chain:
            if anchor.next is not member:
                anchor.append(member)
            position[member] = position[anchor] + _BETWEEN
            anchor = member


def _private_inputs(collective: fx.Node) -> list[fx.Node]:
    """A collective and the communication nodes that only it needs."""
    chain = {collective}
    pending = list(collective.all_input_nodes)
    while pending:
        node = pending.pop()  # once for each of its users: at the last all of them are known
        private = phase_of(node) == "communication" and chain.issuperset(node.users)
        if node.op == "call_function" and private and node not in chain and not is_wait(node):
            chain.add(node)
            pending += node.all_input_nodes
    return list(chain)
