"""Proof that the stages of a pipe together compute the same as the exported model.

    exported graph  =  stages, composed along the graph of stages        (`Pipe.from_tracing`)
    graph of stages =  stages, composed as a chain, by position          (`build_stage`)

Stages are told by what they hold: a parameter or buffer is known by the tensor that it is, not by
its name. Besides equal values it is shown that the very same calls are made, so that autograd
differentiates what it would in the model. Boundaries hand values on (`cut`, and the functions of
`graphopt.pipelining.pipe.boundary`), which is trusted, as is autograd itself.
"""

from __future__ import annotations

import logging
import operator
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from torch import fx, nn

from graphopt.errors import VerificationError
from graphopt.graph_utils import find_all_descendants, get_output
from graphopt.partition.hazards import hazards
from graphopt.pipelining.pipe.backward import add_gradients, cut, stage_backward, value_before_cut
from graphopt.pipelining.pipe.boundary import give_back, receive, send
from graphopt.pipelining.pipe.placement import arguments_of, module_of, results, stage_nodes
from graphopt.pipelining.pipe.sharing import ParameterReplica
from graphopt.pipelining.stage.chain import ChainPlan
from graphopt.verify.checks.module_constants import attribute
from graphopt.verify.checks.same_calls import call_problems
from graphopt.verify.composition import ComposedGraph, NamedObjects
from graphopt.verify.equivalence import check_equivalence
from graphopt.verify.problems import Problem

logger = logging.getLogger("graphopt")

HANDING = (cut, receive, send, give_back)
"""Functions that hand a value from one stage to the next, or to the loss function."""


class PipeProof:
    """Proves that the stages of a pipe compute the same as the exported model.

    Args:
        exported: the graph as one, without marks, of which this takes note.
        find: returns the object that a node of the exported graph names: a parameter or buffer.
    """

    def __init__(self, exported: fx.GraphModule, find: Callable[[fx.Node], Any]) -> None:
        self._objects = NamedObjects(state=True)
        self._objects.learn(exported.graph, find)
        self._whole = _composed(exported, self._objects)

    def check_stages(self, top: fx.GraphModule, replicas: Sequence[ParameterReplica]) -> None:
        """Proves that the graph of stages computes the model's forward.

        Raises:
            VerificationError: it does not.
        """
        after = _composed(top, self._objects)
        problem = next(_differing(self._whole, after, self._objects), None)
        problem = problem or next(_not_listed(top, replicas), None)
        if problem is not None:
            raise VerificationError(f"the division into stages was refused: {problem}")


def check_chain(top: fx.GraphModule, chain: Sequence[fx.GraphModule], plan: ChainPlan) -> None:
    """Proves that the chained stages, each given only what its predecessor sends, compute the
    forward of the graph of stages.

    Args:
        top: the graph of stages.
        chain: the stages, each a function of what it receives.
        plan: the values that the stages of the chain exchange.

    Raises:
        VerificationError: they do not.
    """
    objects = NamedObjects(state=True)
    before, composition = _composed(top, objects), ComposedGraph(objects, handing=HANDING)
    arguments = top.graph.find_nodes(op="placeholder")
    given = dict(zip(arguments, composition.inputs(top.graph), strict=True))
    sent: Sequence[Any] = [given[value] for value in plan.received[0]]
    for stage in chain:
        sent = composition.call(stage, sent)
    returned = dict(zip(plan.returned, sent, strict=True))
    leaves: Any = get_output(top.graph).args[0]
    after = composition.end(fx.node.map_arg(leaves, {**given, **returned}.__getitem__))
    problem = next(_differing(before, after, objects), None)
    if problem is not None:
        raise VerificationError(f"the chain of stages was refused: {problem}")


def _composed(module: fx.GraphModule, objects: NamedObjects) -> fx.Graph:
    """The graph with the calls of stages inlined, and without the backward that a pipe has."""
    names = [str(call.target) for call in stage_nodes(module.graph)]
    composition = ComposedGraph(objects, pieces=names, handing=HANDING)
    graph = composition.end(composition.call(module, composition.inputs(module.graph)))
    backwards = graph.find_nodes(op="call_function", target=stage_backward)
    backward = {*backwards, *find_all_descendants(backwards)}
    for node in reversed(list(graph.nodes)):
        if node in backward:
            graph.erase_node(node)
    return graph


def _differing(before: fx.Graph, after: fx.Graph, objects: NamedObjects) -> Iterator[Problem]:
    # The order is known to terms, through copies as well.
    yield from call_problems(before, after, lambda graph: ())
    report = check_equivalence(before, after)
    if report.decidable:
        yield from report.problems
        return
    message = report.problems[0].message
    logger.info("values between the stages of a pipe are not compared: %s", message)
    if len(before.nodes) == len(after.nodes):  # nothing was copied
        yield from call_problems(before, after, partial(hazards, find=objects.find))


def _not_listed(top: fx.GraphModule, replicas: Sequence[ParameterReplica]) -> Iterator[Problem]:
    """Yields a problem for each parameter that several stages read but that `replicas` does not
    list with all of them: its gradients would not be added."""
    calls = stage_nodes(top.graph)
    held: dict[int, dict[int, fx.Node]] = {}
    for stage, call in enumerate(calls):
        module = module_of(top, call)
        for node in module.graph.find_nodes(op="get_attr"):
            value = attribute(module, node)
            if isinstance(value, nn.Parameter):
                held.setdefault(id(value), {})[stage] = node
    listed: set[tuple[int, tuple[int, ...]]] = set()
    for replica in replicas:
        tensors = {
            id(module_of(top, calls[stage]).get_parameter(name)) for stage, name in replica.holders
        }
        listed.update((tensor, tuple(stage for stage, _ in replica.holders)) for tensor in tensors)
    for tensor, stages in held.items():
        if len(stages) > 1 and (tensor, tuple(sorted(stages))) not in listed:
            yield Problem(
                f"the parameter is held by stages {sorted(stages)}, which are not listed together:"
                " a part of its gradient would be lost",
                (next(iter(stages.values())),),
            )


def check_backward(top: fx.GraphModule, loss_index: int) -> None:
    """Proves that each stage which the loss depends on has its backward, in reverse order, with the
    sum of the gradients of everything that it sent.

    Args:
        top: the graph of stages, backward included.
        loss_index: the index of the loss among the leaves that the graph returns.

    Raises:
        VerificationError: a backward is missing, or a gradient is, or one is added twice.
    """
    leaves: Any = get_output(top.graph).args[0]
    sums: dict[fx.Node, Counter[Any]] = {leaves[loss_index]: Counter()}
    found = iter(top.graph.find_nodes(op="call_function", target=stage_backward))
    for call in reversed(stage_nodes(top.graph)):
        outputs = list(results(call).values())
        indices = [index for index, value in enumerate(outputs) if value in sums]
        if not indices:
            continue
        backward = next(found, None)
        received = [node for node in arguments_of(call) if node.target is cut]
        if backward is None or not _is_backward_of(backward, outputs, indices, received, sums):
            message = (
                f"the backward of {call.target} was refused: it does not take the gradients of"
            )
            raise VerificationError(f"{message} all that depends on what it sends")
        for index, value in enumerate(received):
            sums.setdefault(value_before_cut(value), Counter())[backward, index] += 1
    if next(found, None) is not None:
        raise VerificationError("the graph of stages has a backward that the loss does not need")


def _is_backward_of(
    backward: fx.Node,
    outputs: list[fx.Node],
    indices: list[int],
    received: list[fx.Node],
    sums: Mapping[fx.Node, Counter[Any]],
) -> bool:
    given = backward.kwargs
    gradients: Any = given["output_grads"]
    return (
        list(given["stage_output"]) == outputs  # type: ignore[arg-type]
        and list(given["outputs_with_grads_idxs"]) == indices  # type: ignore[arg-type]
        and list(given["input_values"]) == received  # type: ignore[arg-type]
        and [_summed(gradient) for gradient in gradients]
        == [sums.get(value, Counter()) for value in outputs]
    )


def _summed(gradient: Any) -> Counter[Any]:
    """The stage gradients that a gradient is the sum of."""
    if not isinstance(gradient, fx.Node):
        return Counter()
    if gradient.target is add_gradients:
        return _summed(gradient.args[0]) + _summed(gradient.args[1])
    if gradient.target is operator.getitem:
        return Counter([gradient.args])
    return Counter([gradient])
