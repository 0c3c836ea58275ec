"""A proof that the graphs which run (setup, main, drain) leave what the step with late work leaves.

    drain(setup(s, x)) = step(s, x)            drain(main(s, c, x)) = step(drain(s, c), x)

for arbitrary state `s`, carried values `c` and inputs `x`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple, cast

from torch import fx

from graphopt.graph_utils import get_outputs
from graphopt.ir.metadata import CARRIED, input_kind, known_value
from graphopt.verify.differences.outcome_differences import outcome_problems
from graphopt.verify.problems import Problem
from graphopt.verify.symbolic.evaluation import evaluate_graph
from graphopt.verify.symbolic.evaluation_outcome import Evaluation, SettledUpdate, input_value
from graphopt.verify.values.call_terms import fresh
from graphopt.verify.values.terms import PendingResult, Terms


class DerivedEvaluation(NamedTuple):
    """The evaluation of one derived graph.

    Attributes:
        module: the derived graph.
        evaluation: what it leaves.
        inputs: values of placeholders, by target, that are not arbitrary inputs.
        settled: as of `evaluate_graph`.
    """

    module: fx.GraphModule
    evaluation: Evaluation
    inputs: Mapping[str, Any] = MappingProxyType({})
    settled: Mapping[str, SettledUpdate] = MappingProxyType({})


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
    drain = _Drain(graphs["drain"], terms)
    first = drain.after(setup, user)
    yield from outcome_problems(terms, step, first, "the first iteration and a flush: ")
    carried = _arbitrary_carried(graphs["main"], terms, setup.carried[user:])
    if not _is_step_after_drain(graphs, drain, step, carried, kept):
        yield from _any_iteration(step_graph, graphs, drain, carried, kept, user)


def _is_step_after_drain(
    graphs: Mapping[str, fx.GraphModule],
    drain: _Drain,
    step: Evaluation,
    carried: dict[str, Any],
    kept: DerivedEvaluations,
) -> bool:
    """True if main followed by drain equals drain followed by the step, for any state drain leaves.

    As soon as main has brought state to what drain makes of it, that is taken for an unknown: for
    the one that the step begins with, so that all that follows is what was evaluated with the step.
    What holds for every such state holds for the one that drain leaves. Where main does not go by
    this state, nothing is shown so, and `_any_iteration` has to tell.
    """
    terms = drain.terms
    updates = get_outputs(graphs["drain"].graph).updates
    names = {str(cast(Any, update.args[0]).target) for update in updates}
    given = carried | {
        str(node.target): fresh(terms, ("earlier input", str(node.target)), known_value(node))
        for node in graphs["drain"].graph.nodes
        if node.op == "placeholder" and str(node.target) in names
    }
    drained = drain.of(given)
    if names != drained.states.keys() or drained.draws or drained.effects:
        return False
    settled = {
        str(node.target): SettledUpdate(drained.states[str(node.target)], input_value(terms, node))
        for node in graphs["main"].graph.nodes
        if node.op == "placeholder" and str(node.target) in names
    }
    main = evaluate_graph(graphs["main"], terms, given, settled=settled)
    expected = replace(step, sent=_together(drained.sent, step.sent))
    expected.states = {name: one.stands_for_it for name, one in settled.items()} | step.states
    found = drain.after(main, len(step.carried))
    if any(outcome_problems(terms, expected, found, "")):
        return False
    kept["main"] = DerivedEvaluation(graphs["main"], main, given, settled)
    kept["drain"] = DerivedEvaluation(graphs["drain"], drained, given)
    return True


def _any_iteration(
    step_graph: fx.Graph,
    graphs: Mapping[str, fx.GraphModule],
    drain: _Drain,
    carried: dict[str, Any],
    kept: DerivedEvaluations,
    user: int,
) -> Iterator[Problem]:
    """Checks the second statement by evaluating all graphs anew."""
    terms = drain.terms
    main_gm, drain_gm = graphs["main"], graphs["drain"]
    drained = drain.of(carried)
    expected = evaluate_graph(step_graph, terms, drained.states)
    expected.states = drained.states | expected.states
    expected.sent = _together(drained.sent, expected.sent)
    main = evaluate_graph(main_gm, terms, carried)
    kept["main"] = DerivedEvaluation(main_gm, main, carried)
    kept["drain"] = DerivedEvaluation(drain_gm, drained, carried)
    found = drain.after(main, user)
    yield from outcome_problems(terms, expected, found, "any other iteration and a flush: ")


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


class _Drain:
    """The drain graph, with its evaluations remembered by their inputs.

    Main leaves to drain what setup leaves to it, nearly always. What a graph computes follows from
    its nodes and its inputs; nobody edits it meanwhile, since this lives as long as one comparison.
    """

    def __init__(self, drain: fx.GraphModule, terms: Terms) -> None:
        self._module, self.terms = drain, terms
        self._inputs = drain.graph.find_nodes(op="placeholder")
        self._known: list[tuple[list[Any], Evaluation]] = []

    def of(self, given: dict[str, Any]) -> Evaluation:
        """Evaluates drain for inputs by placeholder name, as `evaluate_graph` takes them."""
        values = [self._input(node, given) for node in self._inputs]
        for known, found in self._known:
            if all(map(_is_same, values, known)):
                return found
        found = evaluate_graph(self._module, self.terms, given)
        self._known.append((values, found))
        return found

    def _input(self, node: fx.Node, given: dict[str, Any]) -> Any:
        value = given.get(str(node.target))
        return input_value(self.terms, node) if value is None else value

    def after(self, run: Evaluation, user: int) -> Evaluation:
        """Evaluates drain on what a derived graph leaves, and combines both outcomes."""
        names = [str(node.target) for node in _carried_inputs(self._module)]
        given = dict(zip(names, run.carried[user:], strict=True)) | run.states
        return _followed(run, self.of(given), user)


def _is_same(one: Any, other: Any) -> bool:
    return one is other or bool(one == other)


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


def _together(first: dict[Any, Any], second: dict[Any, Any]) -> dict[Any, Any]:
    found = {key: edges.copy() for key, edges in first.items()}
    for key, edges in second.items():
        if key in found:
            for position, count in edges.items():
                found[key][position] += count
        else:
            found[key] = edges
    return found
