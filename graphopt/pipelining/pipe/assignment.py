"""Assignment of the nodes of an exported graph to stages."""

from __future__ import annotations

from torch import fx

from graphopt.errors import PartitionError
from graphopt.graph_utils import is_operator
from graphopt.pipelining.pipe.marks import is_mark, mark_label


def assign_stages(graph: fx.Graph) -> dict[fx.Node, int]:
    """Numbers each call of a graph by the stage marks before it, and removes the marks.

    Raises:
        PartitionError: nothing is computed between two marks, before the first or after the last,
            or nowhere.
    """
    for node in list(graph.nodes):
        if is_operator(node.target, "aten::_assert_tensor_metadata"):
            graph.erase_node(node)
    calls = [n for n in graph.nodes if n.op in ("call_function", "call_module", "call_method")]
    marks = [node for node in calls if is_mark(node)]
    stage_of: dict[fx.Node, int] = {}
    stage = 0
    for node in calls:
        if is_mark(node):
            stage += 1
        else:
            stage_of[node] = stage
    _check_none_empty(marks, set(stage_of.values()))
    for mark in marks:
        graph.erase_node(mark)
    return stage_of


def _check_none_empty(marks: list[fx.Node], stages: set[int]) -> None:
    if not stages and not marks:
        raise PartitionError(
            "the model computes nothing with tensors, so that there is nothing to divide"
        )
    labels = [mark_label(mark) for mark in marks]
    for stage in range(len(marks) + 1):
        if stage in stages or not marks:
            continue
        if stage == 0:
            where = f"before {labels[0]}"
        elif stage == len(marks):
            where = f"after {labels[-1]}"
        else:
            where = f"between {labels[stage - 1]} and {labels[stage]}"
        raise PartitionError(f"stage {stage} is empty: nothing is computed {where}")
