"""A proof that a rewritten graph computes the same, bit for bit.

Translation validation by value numbering (Necula, "Translation validation for an optimizing
compiler", PLDI 2000): both graphs are evaluated on arbitrary inputs to canonical terms
(`graphopt.verify.terms`) under the rules of `graphopt.verify.axioms`. Every result, state update
and carried value has to be the same term in both; every gradient has to be reduced as often as
before; random numbers have to be drawn by the same operators in the same order.

For a graph with late nodes two statements are shown of the graphs that run, for arbitrary state
`s`, carried values `c` and inputs `x`:

    drain(setup(s, x)) = step(s, x)            drain(main(s, c, x)) = step(drain(s, c), x)

With every further iteration the second applies again, so both hold for any number of iterations.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import fx

from graphopt.graph_utils.nodes import graph_of
from graphopt.iter_graph import IterGraphModule
from graphopt.verify.copies import is_copy_of
from graphopt.verify.evaluated import Evaluation, NotDecidedError
from graphopt.verify.evaluation import evaluate_graph
from graphopt.verify.exchanged_regions import RewrittenRegions
from graphopt.verify.late import DerivedEvaluation, DerivedEvaluations, late_problems
from graphopt.verify.module_constants import of_constants
from graphopt.verify.outcomes import differences, of_errors, of_what_is_said, reorders_sums
from graphopt.verify.problems import CheckReport, Problem
from graphopt.verify.terms import Terms


@dataclass
class EquivalenceReport(CheckReport):
    """The outcome of comparing what two graphs compute.

    Attributes:
        problems: what differs, or could not be decided; empty where both compute the same.
        reorders_sums: whether elements are summed over ranks in another place of what is sent:
            the same bits on two ranks, up to the order of sums on more.
        decidable: whether terms can speak of the graph before at all.

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
    """Prove that `after` computes what `before` does, for all inputs.

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
    """Compares one graph after another with what it was, as a pipeline changes it.

    What is known of the graph after one pass is known of the graph before the next.
    """

    def __init__(self) -> None:
        self.terms = Terms()
        self.forget()

    def forget(self) -> None:
        """Let nothing be known of the graph: it was changed by something that is not proven."""
        self._known: Evaluation | None = None
        self._graph: fx.Graph | None = None
        self._derived: DerivedEvaluations = {}

    @property
    def known(self) -> Evaluation | None:
        """Terms of the graph, if they are known."""
        return self._known

    def knows(self, graph: fx.Graph) -> bool:
        """True if `known` is of this graph, as it was left by who changed it last."""
        return self._known is not None and self._graph is graph

    def learn(self, graph: fx.GraphModule | fx.Graph) -> None:
        """Find out what a graph computes.

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
        """As `check_equivalence`. After a call without problems, what `after` computes is known.

        Args:
            regions: parts of both graphs that are not compared.
        """
        unknown = {} if regions is None else regions.unknowns()[0]
        try:
            old = evaluate_graph(before, self.terms, unknowns=unknown)
        except NotDecidedError as error:
            self.forget()
            return EquivalenceReport([error.problem], decidable=False)
        return self._compared(old, after, regions, list(of_constants(before, after)))

    def follow(self, after: fx.GraphModule, *, sends: bool = True) -> EquivalenceReport:
        """As `compare` with the graph of which it is known what it computes; `after` also has to
        send as much, if `sends`, and to list the same updates. What problems say of nodes that were
        there before is what they are now."""
        old = self._known
        assert old is not None
        report = self._compared(old, after, None, [], sends=sends)
        if self._known is not None:
            report.problems += of_what_is_said(old, self._known, sends=sends)
        return report

    def _compared(
        self,
        old: Evaluation,
        after: fx.GraphModule | fx.Graph,
        regions: RewrittenRegions | None,
        problems: list[Problem],
        *,
        sends: bool = True,
    ) -> EquivalenceReport:
        self.forget()
        terms, unknown = self.terms, {} if regions is None else regions.unknowns()[1]
        try:
            new = evaluate_graph(after, terms, unknowns=unknown)
            problems += differences(terms, old, new, sends=sends)
            problems += () if unknown else of_errors(old, new)
            if not problems and isinstance(after, IterGraphModule) and after.graph.late:
                new = evaluate_graph(after, terms) if unknown else new
                problems = self._late(after.graph, after.derive(), new)
        except NotDecidedError as error:
            return EquivalenceReport([error.problem])
        if not problems and not unknown:
            self._known, self._graph = new, graph_of(after)
        return EquivalenceReport(problems, reorders_sums=reorders_sums(old, new))

    @property
    def derived(self) -> dict[str, fx.GraphModule]:
        """The graphs with late nodes, derived from the last graph, of which both statements are
        shown; empty where none are."""
        return {name: found.module for name, found in self._derived.items()}

    def of_derived(
        self, step: IterGraphModule, graphs: Mapping[str, fx.GraphModule]
    ) -> tuple[list[Problem], DerivedEvaluations]:
        """What is wrong with the graphs that are derived from a step, and what each of them
        computes. Nothing is done twice that a comparison of the step has done on the same graphs.

        Raises:
            NotDecidedError: terms cannot speak of one of the graphs.
        """
        if self.derived == graphs:
            return [], self._derived
        whole = self._known or evaluate_graph(step, self.terms)
        if step.graph.late:
            return self._late(step.graph, graphs, whole), self._derived
        if is_copy_of(step.graph, graphs["setup"].graph):
            return [], {"setup": DerivedEvaluation(graphs["setup"], whole)}
        setup = evaluate_graph(graphs["setup"], self.terms)
        found = {"setup": DerivedEvaluation(graphs["setup"], setup)}
        return list(differences(self.terms, whole, setup)), found

    def _late(
        self, graph: fx.Graph, graphs: Mapping[str, fx.GraphModule], step: Evaluation
    ) -> list[Problem]:
        """What is wrong with the graphs that run late nodes, by both statements."""
        found: DerivedEvaluations = {}
        problems = list(late_problems(graph, graphs, self.terms, step, found))
        self._derived = {} if problems else found
        return problems
