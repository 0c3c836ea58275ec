"""A proof that a rewritten graph computes the same values, bit for bit.

Translation validation by value numbering (Necula, "Translation validation for an optimizing
compiler", PLDI 2000): both graphs are evaluated on arbitrary inputs to canonical terms
(`graphopt.verify.values.terms`) under the rules of `graphopt.verify.values.axioms`. Every result,
state update and carried value has to be the same term in both; every gradient has to be reduced as
often as before; random numbers have to be drawn by the same operators in the same order.

For a graph with late nodes two statements are shown of the graphs that run, for arbitrary state
`s`, carried values `c` and inputs `x`:

    drain(setup(s, x)) = step(s, x)            drain(main(s, c, x)) = step(drain(s, c), x)

With every further iteration the second applies again, so both hold for any number of iterations.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from graphopt.graph_utils.nodes import graph_of
from graphopt.iter_graph import IterGraphModule
from graphopt.verify.checks.module_constants import constant_problems
from graphopt.verify.differences.outcome_differences import (
    differences,
    error_problems,
    reorders_sums,
    total_problems,
)
from graphopt.verify.late_work import DerivedEvaluation, DerivedEvaluations, late_problems
from graphopt.verify.problems import CheckReport, Problem
from graphopt.verify.symbolic.evaluation import evaluate_graph
from graphopt.verify.symbolic.evaluation_outcome import (
    Evaluation,
    NotDecidedError,
    inputs_in_flight,
)
from graphopt.verify.trials.exchanged_regions import RewrittenRegions
from graphopt.verify.values.terms import Terms


@dataclass
class EquivalenceReport(CheckReport):
    """The outcome of comparing what two graphs compute.

    Attributes:
        problems: differences, and things that could not be decided; empty if both graphs compute
            the same.
        reorders_sums: elements are summed over ranks at another offset of a message: the same bits
            on two ranks, equal up to the order of sums on more.
        decidable: True if terms can describe the graph before at all.

    >>> report = graphopt.verify.check_equivalence(gm, gm)
    >>> report.ok, report.problems
    (True, [])
    """

    problems: list[Problem] = field(default_factory=list)
    reorders_sums: bool = False
    decidable: bool = True

    def _says(self) -> tuple[str, str]:
        end = ", up to the order of sums over more than two ranks" if self.reorders_sums else ""
        same = f"both graphs compute the same, bit for bit{end}"
        return same, "the graphs are not the same computation"


def check_equivalence(
    before: fx.GraphModule | fx.Graph, after: fx.GraphModule | fx.Graph
) -> EquivalenceReport:
    """Proves that `after` computes what `before` does, for all inputs.

    Graphs may update storages in place; what is seen through views of them is followed. Of an
    `IterGraphModule` the step is compared, and if it has late nodes, the graphs that run them are
    compared with the step.

    Near-linear in the number of nodes. Changes nothing.

    Args:
        before: the graph that a pass was given, or a copy of it.
        after: what the pass made of it.

    >>> graphopt.verify.check_equivalence(gm, gm).ok
    True
    """
    return Proof().compare(before, after)


class Proof:
    """Proves each graph of a pipeline equal to its predecessor.

    What is known of the graph after one pass is known of the graph before the next.
    """

    def __init__(self) -> None:
        self.terms = Terms()
        self.forget()

    def forget(self) -> None:
        """Drops the known evaluation, because something unproven changed the graph."""
        self._known: Evaluation | None = None
        self._graph: fx.Graph | None = None
        self._derived: DerivedEvaluations = {}

    @property
    def known(self) -> Evaluation | None:
        """The evaluation of the last graph, or None if there is none."""
        return self._known

    def knows(self, graph: fx.Graph) -> bool:
        """True if `known` belongs to this graph and nothing has edited it since."""
        return self._known is not None and self._graph is graph

    def learn(self, graph: fx.GraphModule | fx.Graph) -> None:
        """Evaluates a graph and remembers what it computes.

        Raises:
            NotDecidedError: terms cannot speak of it.
        """
        self.forget()
        self._known = evaluate_graph(graph, self.terms)
        self._graph = graph_of(graph)

    def compare(
        self,
        before: fx.GraphModule | fx.Graph,
        after: fx.GraphModule | fx.Graph,
        regions: RewrittenRegions | None = None,
    ) -> EquivalenceReport:
        """Proves as `check_equivalence` does. Without problems, the evaluation of `after` is
        remembered.

        Args:
            regions: parts of both graphs that are not compared.
        """
        unknown = {} if regions is None else regions.unknowns()[0]
        try:
            inputs = inputs_in_flight(self.terms, graph_of(before))
            old = evaluate_graph(before, self.terms, inputs, unknowns=unknown)
        except NotDecidedError as error:
            self.forget()
            return EquivalenceReport([error.problem], decidable=False)
        problems = list(constant_problems(before, after))
        return self._compared(old, after, regions, problems, inputs=inputs)

    def follow(self, after: fx.GraphModule, *, sends: bool = True) -> EquivalenceReport:
        """Compares `after` with the remembered graph, including sent elements (if `sends`) and
        listed updates. Problems name nodes of `after`."""
        old = self._known
        assert old is not None
        report = self._compared(old, after, None, [], sends=sends)
        if self._known is not None:
            report.problems += total_problems(old, self._known, sends=sends)
        return report

    def _compared(
        self,
        old: Evaluation,
        after: fx.GraphModule | fx.Graph,
        regions: RewrittenRegions | None,
        problems: list[Problem],
        *,
        sends: bool = True,
        inputs: dict[str, Any] | None = None,
    ) -> EquivalenceReport:
        self.forget()
        terms, unknown = self.terms, {} if regions is None else regions.unknowns()[1]
        try:
            new = evaluate_graph(after, terms, inputs, unknowns=unknown)
            problems += differences(terms, old, new, sends=sends)
            problems += () if unknown else error_problems(old, new)
            if not problems and isinstance(after, IterGraphModule) and after.graph.late:
                new = evaluate_graph(after, terms, inputs) if unknown else new
                problems = self._late(after.graph, after.derive(), new)
        except NotDecidedError as error:
            return EquivalenceReport([error.problem])
        if not problems and not unknown:
            self._known, self._graph = new, graph_of(after)
        return EquivalenceReport(problems, reorders_sums=reorders_sums(old, new))

    @property
    def derived(self) -> dict[str, fx.GraphModule]:
        """The proven graphs with late nodes (setup, main, drain) of the last step; empty if there
        are none."""
        return {name: found.module for name, found in self._derived.items()}

    def compare_derived(
        self, step: IterGraphModule, graphs: Mapping[str, fx.GraphModule]
    ) -> tuple[list[Problem], DerivedEvaluations]:
        """Returns the problems and the evaluations of the graphs derived from a step. Reuses what a
        comparison of the step has done on the same graphs.

        Raises:
            NotDecidedError: terms cannot speak of one of the graphs.
        """
        if self.derived == graphs:
            return [], self._derived
        whole = self._known or evaluate_graph(step, self.terms)
        if step.graph.late:
            return self._late(step.graph, graphs, whole), self._derived
        setup = evaluate_graph(graphs["setup"], self.terms)
        found = {"setup": DerivedEvaluation(graphs["setup"], setup)}
        return list(differences(self.terms, whole, setup)), found

    def _late(
        self, graph: fx.Graph, graphs: Mapping[str, fx.GraphModule], step: Evaluation
    ) -> list[Problem]:
        """Returns the problems of the graphs that run late nodes, by both statements of
        `graphopt.verify.late_work`."""
        found: DerivedEvaluations = {}
        problems = list(late_problems(graph, graphs, self.terms, step, found))
        self._derived = {} if problems else found
        return problems
