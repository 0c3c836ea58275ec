"""Equivalence checks of the stages behind the passes: dividing, lowering, finalizing.

Each stage is proven to compute what its input graph computes. Reused storage is followed: a value
that was overwritten too early is read as its new contents. A stage that makes a graph undecidable
is refused, except for calls of unknown code and writes to overlapping parts of a storage, which are
logged.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from torch import fx

from graphopt.iter_graph import IterGraphModule
from graphopt.verify.checks.launches import launches_of, other_launches
from graphopt.verify.checks.module_constants import constant_problems
from graphopt.verify.differences.outcome_differences import differences
from graphopt.verify.equivalence import EquivalenceReport, Proof, check_equivalence
from graphopt.verify.late_work import DerivedEvaluation, DerivedEvaluations
from graphopt.verify.problems import Problem
from graphopt.verify.symbolic.evaluation import evaluate_graph
from graphopt.verify.symbolic.evaluation_outcome import NotDecidedError
from graphopt.verify.values.terms import Terms

logger = logging.getLogger("graphopt")


def check_finalized(before: fx.GraphModule, after: fx.GraphModule) -> EquivalenceReport:
    """Proves that a graph in the executable dialect computes what its functional form does.

    Shown is, besides equivalence, that results and carried values lie in storage of their own as
    they did, not in that of state, which the next iteration overwrites; and that a value which was
    carried from the last iteration is overwritten only where the functional form updates it.

    Args:
        before: a derived graph (setup, main, drain) in the captured dialect.
        after: what `graphopt.executable.finalize` made of it.

    >>> import copy
    >>> from graphopt.verify import check_finalized
    >>> module = graphopt.IterGraphModule(gm)
    >>> check_finalized(module.main_gm, copy.deepcopy(module.main_gm)).ok
    True
    """
    return check_equivalence(before, after)


def check_divided(before: fx.GraphModule, after: fx.GraphModule) -> EquivalenceReport:
    """Proves that a graph divided into submodules computes what it did as one.

    Parts are read through their graphs: those of `graphopt.partition.split_module`, and those from
    which regions are compiled. What Inductor makes of a region is not looked at, but trusted.

    Args:
        before: the graph as one.
        after: the graph that calls the submodules.

    >>> from graphopt.verify import check_divided
    >>> def part_of(node):
    ...     return int(node.meta.get("phase") == "optimizer")
    >>> parts = graphopt.partition.split_module(gm, gm, part_of)
    >>> check_divided(gm, parts).ok
    True
    """
    report = check_equivalence(before.graph, after.graph)
    if report.ok or other_launches(launches_of(before), launches_of(after)) is not None:
        return report
    with suppress(NotDecidedError):  # the report says so then
        report.problems = _differing(before.graph, after.graph, Terms(), {})
    return report


def _differing(
    before: fx.Graph, after: fx.Graph, terms: Terms, inputs: Mapping[str, Any]
) -> list[Problem]:
    """Returns the differences between graphs with the same launches in the same order. Sent
    constants go by launch, since lowering makes padding anew."""
    old, new = (
        evaluate_graph(graph, terms, dict(inputs), by_launch=True) for graph in (before, after)
    )
    return list(differences(terms, old, new))


class StageProof:
    """Proves the graphs derived from one step equal from stage to stage.

    What is known of a graph after one stage is known of it before the next, so that each graph is
    evaluated once. A graph of which terms cannot speak is not compared, which is logged.

    Args:
        proof: what is known of the step after its passes.
    """

    def __init__(self, proof: Proof) -> None:
        self._proof = proof
        self._known: DerivedEvaluations = {}

    def derived(self, step: IterGraphModule, graphs: Mapping[str, fx.GraphModule]) -> list[Problem]:
        """Returns the problems of the graphs (by name) that were derived from a step."""
        try:
            problems, self._known = self._proof.compare_derived(step, graphs)
        except NotDecidedError as error:
            logger.info("the graphs derived from the step are not checked: %s", error)
            return []
        return problems

    def problems(self, name: str, before: fx.Graph, after: fx.GraphModule) -> list[Problem]:
        """Returns the differences that a stage made to the derived graph `name`."""
        try:
            return self._by_terms(name, before, after)
        except NotDecidedError as error:
            logger.info("the graph %s is not checked: %s", name, error)
            return []

    def _by_terms(self, name: str, before: fx.Graph, after: fx.GraphModule) -> list[Problem]:
        """Returns the same differences, found by symbolic evaluation.

        Raises:
            NotDecidedError: terms cannot speak of the graphs.
        """
        known = self._known.pop(name, None)
        terms = self._proof.terms
        exchanged = list(constant_problems(before.owning_module, after))
        if exchanged:
            return exchanged
        if known is None:
            known = DerivedEvaluation(after, evaluate_graph(before, terms))
        try:
            new = evaluate_graph(after, terms, dict(known.inputs))
            found = list(differences(terms, known.evaluation, new))
            if found:
                found = _differing(before, after.graph, terms, known.inputs)
        except NotDecidedError as error:
            if not error.foreign:  # terms could speak of the graph before
                return [error.problem]
            raise
        self._known[name] = known._replace(module=after, evaluation=new)
        return found
