"""A proof that the graphs which run (setup, main, drain) leave what the step with late work leaves.

    drain(setup(s, x)) = step(s, x)            drain(main(s, c, x)) = step(drain(s, c), x)

for arbitrary state `s`, carried values `c` and inputs `x`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import fx

from graphopt.ir.metadata import CARRIED, input_kind
from graphopt.verify.differences.outcome_differences import sent_problems, value_problems
from graphopt.verify.problems import Problem
from graphopt.verify.symbolic.evaluation import evaluate_graph
from graphopt.verify.symbolic.evaluation_outcome import Evaluation, input_value
from graphopt.verify.values.terms import PendingResult, Terms


class DerivedEvaluation(NamedTuple):
    """The evaluation of one derived graph.

    Attributes:
        module: the derived graph.
        evaluation: what it leaves.
        inputs: values of placeholders, by target, that are not arbitrary inputs.
    """

    module: fx.GraphModule
    evaluation: Evaluation
    inputs: Mapping[str, Any] = MappingProxyType({})


DerivedEvaluations = dict[str, DerivedEvaluation]


def late_problems(
    step_graph: fx.Graph,
    graphs: Mapping[str, fx.GraphModule],
    terms: Terms,
    step: Evaluation,
    kept: DerivedEvaluations,
) -> Iterator[Problem]:
    """Yields the problems of both statements about the derived graphs, and stores their evaluations
    in `kept`."""
    user = len(step.carried)
    setup = evaluate_graph(graphs["setup"], terms)
    kept["setup"] = DerivedEvaluation(graphs["setup"], setup)
    first = _drained(graphs["drain"], terms, setup, user)
    where = "the first iteration and a flush: "
    yield from value_problems(terms, step, first, where)
    yield from sent_problems(terms, step, first, where)
    carried = _arbitrary_carried(graphs["main"], terms, setup.carried[user:])
    flushed = evaluate_graph(graphs["drain"], terms, carried)
    expected = evaluate_graph(step_graph, terms, flushed.states)
    expected.states = flushed.states | expected.states
    expected.sent = _together(flushed.sent, expected.sent)
    main = evaluate_graph(graphs["main"], terms, carried)
    kept["main"] = DerivedEvaluation(graphs["main"], main, carried)
    kept["drain"] = DerivedEvaluation(graphs["drain"], flushed, carried)
    found = _drained(graphs["drain"], terms, main, user)
    where = "any other iteration and a flush: "
    yield from value_problems(terms, expected, found, where)
    yield from sent_problems(terms, expected, found, where)


def _carried_inputs(gm: fx.GraphModule) -> list[fx.Node]:
    """Returns the placeholders of values carried over from the last iteration, in order."""
    return [node for node in gm.graph.nodes if input_kind(node) == CARRIED]


def _arbitrary_carried(gm: fx.GraphModule, terms: Terms, left: Sequence[Any]) -> dict[str, Any]:
    """Returns arbitrary carried values; those that end an iteration as pending also begin one as
    such."""
    found = {}
    for node, value in zip(_carried_inputs(gm), left, strict=True):
        fresh = input_value(terms, node)
        pending = isinstance(value, PendingResult) and not isinstance(fresh, PendingResult)
        found[str(node.target)] = PendingResult(fresh) if pending else fresh
    return found


def _drained(drain: fx.GraphModule, terms: Terms, run: Evaluation, user: int) -> Evaluation:
    """Evaluates drain on what a derived graph leaves, and combines both outcomes."""
    names = [str(node.target) for node in _carried_inputs(drain)]
    given = dict(zip(names, run.carried[user:], strict=True)) | run.states
    return _followed(run, evaluate_graph(drain, terms, given), user)


def _followed(run: Evaluation, drain: Evaluation, user: int) -> Evaluation:
    return Evaluation(
        results=run.results,
        carried=run.carried[:user],
        states=run.states | drain.states,
        draws=run.draws + drain.draws,
        effects=run.effects + drain.effects,
        sent=_together(run.sent, drain.sent),
        made=run.made + drain.made,
        nodes=drain.nodes | run.nodes,
    )


def _together(
    first: Mapping[Any, Counter[int]], second: Mapping[Any, Counter[int]]
) -> dict[Any, Counter[int]]:
    """Returns the sum of two counts of sent elements."""
    found = {key: edges.copy() for key, edges in first.items()}
    for key, edges in second.items():
        found.setdefault(key, Counter()).update(edges)
    return found
