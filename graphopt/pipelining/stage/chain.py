"""Stages as a chain: each receives from the one before it and sends to the one after it.

In a pipe a value may skip stages and a model argument may be read by any stage. Schedules pass
values between neighbours. So in a chain a stage also passes on what only later stages read, and
autograd adds the gradients of a value's readers on the way back.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from graphopt.graph_utils import find_all_descendants, get_output
from graphopt.ir.metadata import known_value
from graphopt.pipelining.pipe.backward import value_before_cut
from graphopt.pipelining.pipe.boundary import give_back, receive, send
from graphopt.pipelining.pipe.placement import arguments_of, results, stage_nodes
from graphopt.pipelining.pipe.stage_module import StageModule, make_stage_module


@dataclass(frozen=True)
class ChainPlan:
    """The values that flow between the stages of a pipe.

    Attributes:
        received: for each stage the values it receives, as nodes of the graph of stages. The first
            stage receives the tensors among the model's arguments.
        returned: the tensors that the last stage returns.
    """

    received: list[list[fx.Node]]
    returned: list[fx.Node]


def plan_chain(graph: fx.Graph) -> ChainPlan:
    """The values that cross each stage boundary: made before it and read after it."""
    calls = stage_nodes(graph)
    returned = list(dict.fromkeys(get_output(graph).all_input_nodes))
    made_by = {value: index for index, call in enumerate(calls) for value in results(call).values()}
    live: dict[fx.Node, int] = {}
    for index, call in enumerate(calls):
        for argument in call.all_input_nodes:
            live[value_before_cut(argument)] = index
    live.update(dict.fromkeys(returned, len(calls) - 1))
    arguments = graph.find_nodes(op="placeholder")
    # Numbers and the like are part of the graph; nobody reads them.
    received = [[n for n in arguments if isinstance(known_value(n), torch.Tensor)]]
    order = {node: position for position, node in enumerate(graph.nodes)}
    for stage in range(1, len(calls)):
        crossing = [v for v, last in live.items() if made_by.get(v, 0) < stage <= last]
        received.append(sorted(crossing, key=order.__getitem__))
    return ChainPlan(received, returned)


def chain_stage(module: nn.Module, call: fx.Node, stage: int, plan: ChainPlan) -> fx.GraphModule:
    """The module of a stage as a flat function of received tensors.

    It holds the parameters and buffers of the stage itself, under the same names; or `module`
    itself as `stage`, where that is no `StageModule`.

    Args:
        module: the stage's module, or one with the same arguments and results.
        call: the stage in the graph of stages.
    """
    graph = fx.Graph()
    values = {value: _receive(graph, value, stage) for value in plan.received[stage]}
    inputs = [values.get(value_before_cut(argument)) for argument in arguments_of(call)]
    if isinstance(module, StageModule):
        outputs = _copy_body(graph, module.graph, inputs)
    else:
        outputs = _call_whole(graph, call, inputs)
    values.update({value: outputs[index] for index, value in results(call).items()})
    last = stage == len(plan.received) - 1
    sent = plan.returned if last else plan.received[stage + 1]
    end = give_back if last else send
    graph.output(tuple(graph.call_function(end, (values[value],)) for value in sent))
    if isinstance(module, StageModule):
        return make_stage_module(module, graph)
    return fx.GraphModule({"stage": module}, graph)


def weights_meet_inputs(
    graph: fx.Graph, received: Sequence[torch.Tensor], sent: Sequence[torch.Tensor]
) -> bool:
    """True if all gradients of a stage flow through nodes that read a received value.

    Schedules that divide the backward find the weight gradients to compute later between outputs
    and inputs. They would miss a parameter that is sent without having met an input, because a
    later stage uses it too.

    Args:
        graph: the graph of a stage in the chain.
        received, sent: descriptions of its arguments and results.
    """
    arguments = zip(graph.find_nodes(op="placeholder"), received, strict=True)
    reached = find_all_descendants([node for node, value in arguments if value.requires_grad])
    results: Any = get_output(graph).args[0]
    pairs = zip(results, sent, strict=True)
    return all(node in reached for node, value in pairs if value.requires_grad)


def _receive(graph: fx.Graph, value: fx.Node, stage: int) -> fx.Node:
    placeholder = graph.placeholder(value.name)
    placeholder.meta = dict(value.meta)
    return graph.call_function(receive, (placeholder,)) if stage else placeholder


def _call_whole(graph: fx.Graph, call: fx.Node, inputs: list[fx.Node | None]) -> list[Any]:
    result = graph.call_module("stage", tuple(inputs))
    positions = results(call)
    if positions == {0: call}:
        return [result]
    return [
        graph.call_function(operator.getitem, (result, index))
        for index in range(max(positions) + 1)
    ]


def _copy_body(graph: fx.Graph, body: fx.Graph, inputs: list[fx.Node | None]) -> list[Any]:
    copies: Any = dict(zip(body.find_nodes(op="placeholder"), inputs, strict=True))
    result: Any = graph.graph_copy(body, copies)
    return list(result) if isinstance(result, (tuple, list)) else [result]
