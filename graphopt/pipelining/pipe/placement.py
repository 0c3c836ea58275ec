"""Moves parameters, buffers and nested graphs into the stages that use them."""

from __future__ import annotations

import operator
from bisect import bisect
from collections.abc import Iterable
from typing import Any, cast

from torch import fx, nn

from graphopt.ir.metadata import modules_of
from graphopt.pipelining.pipe.model_tensors import ModelTensors
from graphopt.pipelining.pipe.sharing import ParameterReplica
from graphopt.pipelining.pipe.stage_module import StageModule, make_stage_module


def stage_nodes(graph: fx.Graph) -> list[fx.Node]:
    """The calls of stages, in order."""
    return graph.find_nodes(op="call_module")


def module_of(graph_module: fx.GraphModule, call: fx.Node) -> StageModule:
    """The module of the stage that a node calls."""
    stage = graph_module.get_submodule(str(call.target))
    assert isinstance(stage, StageModule)
    return stage


def arguments_of(call: fx.Node) -> list[fx.Node]:
    """The values that a stage receives; all are nodes."""
    return [value for value in call.args if isinstance(value, fx.Node)]


def results(call: fx.Node) -> dict[int, fx.Node]:
    """The results of a stage that another node reads, by position."""
    items: dict[Any, fx.Node] = {
        user.args[1]: user for user in call.users if user.target is operator.getitem
    }
    return dict(sorted(items.items())) or {0: call}


def place_state(
    top: fx.GraphModule, state: ModelTensors
) -> tuple[fx.GraphModule, list[ParameterReplica]]:
    """Moves each `get_attr` of the graph of stages into the stages that read it.

    Every name of the model's parameters and buffers is then in some stage: a name that no stage
    reads is where the name before it is, or where another name of the same tensor is.

    Returns:
        The graph of stages, which holds nothing but them, and the parameters that are in several.
    """
    calls = stage_nodes(top.graph)
    holders: dict[str, list[tuple[int, str]]] = {}
    stages = [cast(fx.GraphModule, top.get_submodule(str(call.target))) for call in calls]
    for node in top.graph.find_nodes(op="get_attr"):
        name = str(node.target)
        for index, call in enumerate(calls):
            if node in call.all_input_nodes:
                own = _move_into(stages[index], call, node, state)
                holders.setdefault(name, []).extend((index, alias) for alias in own)
        top.graph.erase_node(node)
    placed = {alias: stage for pairs in reversed(holders.values()) for stage, alias in pairs}
    _place_others(stages, placed, state)
    replicas = [
        _replica(pairs)
        for name, pairs in holders.items()
        if state.is_parameter(name) and len(dict(pairs)) > 1
    ]
    return _with_stages_alone(top, stages), replicas


def _with_stages_alone(top: fx.GraphModule, stages: list[fx.GraphModule]) -> fx.GraphModule:
    result = fx.GraphModule(nn.Module(), fx.Graph())
    for call, stage in zip(stage_nodes(top.graph), stages, strict=True):
        stage.graph.lint()
        result.add_module(str(call.target), make_stage_module(stage, stage.graph))
    result.graph = top.graph
    result.graph.lint()
    return result


def _move_into(
    stage: fx.GraphModule, call: fx.Node, node: fx.Node, state: ModelTensors
) -> list[str]:
    """Turns an argument of a stage into its own attribute; returns the attribute's names."""
    position = call.args.index(node)
    placeholder = stage.graph.find_nodes(op="placeholder")[position]
    names = _names_in_stage(placeholder.users, state.aliases(str(node.target)), str(node.target))
    for name in names:
        state.place(stage, name)
    first = next(n for n in stage.graph.nodes if n.op not in ("placeholder", "get_attr"))
    with stage.graph.inserting_before(first):
        attribute = stage.graph.create_node("get_attr", names[0])
    attribute.meta = dict(placeholder.meta)
    placeholder.replace_all_uses_with(attribute)
    stage.graph.erase_node(placeholder)
    call.args = (*call.args[:position], *call.args[position + 1 :])
    return names


def _names_in_stage(users: Iterable[fx.Node], aliases: list[str], traced: str) -> list[str]:
    """The names of a tied parameter whose modules run in the stage."""
    if len(aliases) == 1:
        return aliases
    paths = {entry[0] for user in users for entry in modules_of(user).values()}
    return [name for name in aliases if name.rpartition(".")[0] in paths - {""}] or [traced]


def _place_others(
    stages: list[fx.GraphModule], placed: dict[str, int], state: ModelTensors
) -> None:
    names = state.names()
    known = [index for index, name in enumerate(names) if name in placed]
    for index, name in enumerate(names):
        if name in placed:
            continue
        tied = [placed[alias] for alias in state.aliases(name) if alias in placed]
        before = known[bisect(known, index) - 1] if known and known[0] < index else None
        nearby = placed[names[before]] if before is not None else 0
        state.place(stages[min(tied, default=nearby)], name)


def _replica(pairs: list[tuple[int, str]]) -> ParameterReplica:
    """The replica of a parameter, with the first of its names in each stage."""
    return ParameterReplica(tuple(sorted(dict(reversed(pairs)).items())))
