"""Recording of everything that an evaluated graph leaves: results, state, and shared storage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx

from graphopt.graph_utils import get_outputs
from graphopt.verify.symbolic.evaluation_outcome import Evaluation, NotDecidedError
from graphopt.verify.symbolic.node_values import NodeValues


def record_outcome(graph: fx.Graph, reading: NodeValues, found: Evaluation) -> None:
    """Records what an evaluated graph leaves: results, carried values, state, and aliases.

    Raises:
        NotDecidedError: it updates a constant of its module.
    """
    outputs, contents = get_outputs(graph), reading.contents
    found.results = _returned("result", outputs.results, reading, found)
    found.carried = _returned("carried", outputs.carried, reading, found)
    for owner in contents.written:
        if owner.op == "placeholder":
            found.states[str(owner.target)] = contents.read(owner)
            found.nodes["state", str(owner.target)] = owner
        elif owner.op == "get_attr":
            raise NotDecidedError("it updates a constant of the module", owner)
    for update in outputs.updates:
        if isinstance(update, fx.Node):
            owner = contents.owner(update)
            found.nodes["state", str(owner.target)] = update
            found.listed.add(str(owner.target))


def _returned(
    kind: str, values: Sequence[Any], reading: NodeValues, found: Evaluation
) -> list[Any]:
    for index, value in enumerate(values):
        if isinstance(value, fx.Node):
            found.nodes[kind, index] = value
            for owner in reading.contents.owners(value):
                found.aliases.setdefault(owner, []).append((kind, index))
    return [reading.read(value, sent=True) for value in values]
