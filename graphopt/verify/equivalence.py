"""Does a rewritten graph compute the same, bit for bit?

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

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import fx

from graphopt.errors import VerificationError
from graphopt.iter_graph import IterGraphModule
from graphopt.iter_graph.derive import CARRIED
from graphopt.verify.copies import is_copy_of
from graphopt.verify.difference import Difference
from graphopt.verify.evaluation import Evaluation, NotDecidedError, evaluate_graph, input_value
from graphopt.verify.problems import Problem
from graphopt.verify.regions import Regions
from graphopt.verify.terms import Pending, Terms, canonical

_SHOWN = 10


@dataclass
class EquivalenceReport:
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

    @property
    def ok(self) -> bool:
        return not self.problems

    def __str__(self) -> str:
        if self.ok:
            end = ", up to the order of sums over more than two ranks" if self.reorders_sums else ""
            return f"both graphs compute the same, bit for bit{end}"
        lines = [f"the graphs are not the same computation in {len(self.problems)} place(s):"]
        lines += [str(problem) for problem in self.problems[:_SHOWN]]
        if len(self.problems) > _SHOWN:
            lines.append(f"... and {len(self.problems) - _SHOWN} more")
        return "\n".join(lines)

    def raise_for_failure(self) -> None:
        """Raise `VerificationError` with the problems, if there are any."""
        if not self.ok:
            raise VerificationError(str(self))


def check_equivalence(
    before: fx.GraphModule | fx.Graph, after: fx.GraphModule | fx.Graph
) -> EquivalenceReport:
    """Whether `after` computes what `before` does, for all inputs.

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
        self._derived: DerivedEvaluations = {}

    def compare(
        self,
        before: fx.GraphModule | fx.Graph,
        after: fx.GraphModule | fx.Graph,
        regions: Regions | None = None,
    ) -> EquivalenceReport:
        """As `check_equivalence`. After a call without problems, `before` is what was `after`.

        Args:
            regions: parts of both graphs that are not compared.
        """
        terms, known = self.terms, self._known
        self.forget()
        unknown, unknown_now = ({}, {}) if regions is None else regions.unknowns()
        try:
            if known is None or unknown:
                old = evaluate_graph(before, terms, unknowns=unknown)
            else:
                old = known
        except NotDecidedError as error:
            return EquivalenceReport([error.problem], decidable=False)
        try:
            new = evaluate_graph(after, terms, unknowns=unknown_now)
            problems = [*_of_constants(before, after), *differences(terms, old, new)]
            if not problems and isinstance(after, IterGraphModule) and after.graph.late:
                new = evaluate_graph(after, terms) if unknown_now else new
                problems = self._late(after.graph, after.derive(), new)
        except NotDecidedError as error:
            return EquivalenceReport([error.problem])
        if not problems and not unknown_now:
            self._known = new
        return EquivalenceReport(problems, reorders_sums=bool(new.sent))

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
        problems = list(_late(graph, graphs, self.terms, step, found))
        self._derived = {} if problems else found
        return problems


class DerivedEvaluation(NamedTuple):
    """What a derived graph computes.

    Attributes:
        module: the derived graph.
        evaluation: what it leaves.
        inputs: values of placeholders, by target, that are not arbitrary inputs.
    """

    module: fx.GraphModule
    evaluation: Evaluation
    inputs: Mapping[str, Any] = MappingProxyType({})


DerivedEvaluations = dict[str, DerivedEvaluation]


def differences(terms: Terms, old: Evaluation, new: Evaluation) -> Iterator[Problem]:
    """Where two graphs leave different values, or values in storage that is shared otherwise."""
    yield from _differences(terms, old, new, "")
    yield from _of_aliases(old, new)


def _of_constants(
    before: fx.GraphModule | fx.Graph, after: fx.GraphModule | fx.Graph
) -> Iterator[Problem]:
    """Constants of the module are known by name: behind the name has to stand what stood there."""
    if not isinstance(before, fx.GraphModule) or not isinstance(after, fx.GraphModule):
        return
    there = {str(node.target) for node in before.graph.nodes if node.op == "get_attr"}
    for node in after.graph.nodes:
        if node.op != "get_attr" or str(node.target) not in there:
            continue
        if not _same_object(attribute(before, node), attribute(after, node)):
            yield Problem(f"the constant {node.target} of the module is another one", (node,))


def attribute(gm: fx.GraphModule, node: fx.Node) -> Any:
    """What a node that reads an attribute of the module gives; None where it is not there."""
    found: Any = gm
    for name in str(node.target).split("."):
        found = getattr(found, name, None)
    return found


def _same_object(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        alike = (one.dtype, one.shape, one.device) == (other.dtype, other.shape, other.device)
        return alike and torch.equal(one, other)
    if isinstance(one, fx.GraphModule) and isinstance(other, fx.GraphModule):
        return str(one.graph) == str(other.graph)
    return type(one) is type(other) and bool(one == other)


def _of_aliases(old: Evaluation, new: Evaluation) -> Iterator[Problem]:
    """What leaves the graph lies in storage of its own, as it did: not in that of state, which the
    next iteration overwrites, nor in that of another result."""
    apart = {
        place
        for owner, places in old.aliases.items()
        if _is_apart(owner, places)
        for place in places
    }
    for owner, places in new.aliases.items():
        if _is_apart(owner, places):
            continue
        for kind, index in places:
            if (kind, index) in apart:
                yield Problem(
                    f"{_KINDS[kind]} {index} shares its storage with %{owner.name}, which others"
                    " read or write",
                    (new.nodes[kind, index],),
                )


def _is_apart(owner: fx.Node, places: Sequence[Any]) -> bool:
    return owner.op not in ("placeholder", "get_attr") and len(places) == 1


_KINDS = {"result": "result", "carried": "carried value", "state": "state"}


def _late(
    step_graph: fx.Graph,
    graphs: Mapping[str, fx.GraphModule],
    terms: Terms,
    step: Evaluation,
    kept: DerivedEvaluations,
) -> Iterator[Problem]:
    """Both statements about the graphs that run. What each of them computes is put into `kept`."""
    user = len(step.carried)
    main_gm, drain_gm = graphs["main"], graphs["drain"]
    setup = evaluate_graph(graphs["setup"], terms)
    first = _flushed(drain_gm, terms, setup, user)
    yield from _differences(terms, step, first, "the first iteration and a flush: ")
    carried = _arbitrary_carried(main_gm, terms, setup.carried[user:])
    drained = evaluate_graph(drain_gm, terms, carried)
    expected = evaluate_graph(step_graph, terms, drained.states)
    expected.states = drained.states | expected.states
    expected.sent = _together(drained.sent, expected.sent)
    main = evaluate_graph(main_gm, terms, carried)
    kept["setup"] = DerivedEvaluation(graphs["setup"], setup)
    kept["main"] = DerivedEvaluation(main_gm, main, carried)
    kept["drain"] = DerivedEvaluation(drain_gm, drained, carried)
    found = _flushed(drain_gm, terms, main, user)
    yield from _differences(terms, expected, found, "any other iteration and a flush: ")


def _carried_inputs(gm: fx.GraphModule) -> list[fx.Node]:
    """The placeholders of what the last iteration left, in order."""
    return [node for node in gm.graph.nodes if node.meta.get("kind") == CARRIED]


def _arbitrary_carried(gm: fx.GraphModule, terms: Terms, left: Sequence[Any]) -> dict[str, Any]:
    """Arbitrary carried values; what is under way when an iteration ends is so when one begins."""
    found = {}
    for node, value in zip(_carried_inputs(gm), left, strict=True):
        fresh = input_value(terms, node)
        pending = isinstance(value, Pending) and not isinstance(fresh, Pending)
        found[str(node.target)] = Pending(fresh) if pending else fresh
    return found


def _flushed(drain_gm: fx.GraphModule, terms: Terms, run: Evaluation, user: int) -> Evaluation:
    """A derived graph followed by drain."""
    names = [str(node.target) for node in _carried_inputs(drain_gm)]
    given = dict(zip(names, run.carried[user:], strict=True)) | run.states
    drain = evaluate_graph(drain_gm, terms, given)
    return Evaluation(
        results=run.results,
        carried=run.carried[:user],
        states=run.states | drain.states,
        draws=run.draws + drain.draws,
        effects=run.effects + drain.effects,
        sent=_together(run.sent, drain.sent),
        origins=drain.origins | run.origins,
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


def _differences(terms: Terms, old: Evaluation, new: Evaluation, where: str) -> Iterator[Problem]:
    yield from _of_values(terms, old, new, where)
    if old.draws != new.draws:
        yield Problem(
            f"{where}{new.draws} operators draw random numbers, before it was {old.draws}"
        )
    remaining = iter(new.effects)
    if not all(effect in remaining for effect in old.effects):
        yield Problem(f"{where}the host does not see what it saw, or not in that order")
    yield from _of_sends(terms, old, new, where)


def _of_values(terms: Terms, old: Evaluation, new: Evaluation, where: str) -> Iterator[Problem]:
    for kind, before, after in (
        ("result", old.results, new.results),
        ("carried", old.carried, new.carried),
    ):
        if len(before) != len(after):
            yield Problem(f"{where}{len(after)} {_KINDS[kind]}s, before it was {len(before)}")
            continue
        for index, (one, other) in enumerate(zip(before, after, strict=True)):
            if canonical(one) != canonical(other):
                text = f"{where}{_KINDS[kind]} {index}"
                yield Difference(terms, old, new, (kind, index)).problem(text, one, other)
    for name in dict.fromkeys([*old.states, *new.states]):
        one, other = old.states.get(name), new.states.get(name)
        if one is None or other is None:
            verb = "is updated, before it was not" if one is None else "is not updated any more"
            node = new.nodes.get(("state", name)) or old.nodes.get(("state", name))
            yield Problem(f"{where}%{name} {verb}", () if node is None else (node,))
        elif one != other:
            text = f"{where}the update of %{name}"
            yield Difference(terms, old, new, ("state", name)).problem(text, one, other)


def _of_sends(terms: Terms, old: Evaluation, new: Evaluation, where: str) -> Iterator[Problem]:
    for key in dict.fromkeys([*old.sent, *new.sent]):
        before = {p: n for p, n in old.sent.get(key, {}).items() if n}
        after = {p: n for p, n in new.sent.get(key, {}).items() if n}
        if before == after:
            continue
        (kind, _), term = key
        node = new.origins.get(term) or old.origins.get(term)
        name = "what is sent" if node is None else f"%{node.name}"
        element, was, now = _first_change(before, after)
        yield Problem(
            f"{where}element {element} of {name} goes through {kind} {now} times, before it was"
            f" {was}",
            () if node is None else (node,),
            hint="each element that was sent is sent once; comm.get_all_comm_blocks lists the"
            " collectives, and a collective that nobody needs has to go with its wait",
        )


def _first_change(before: Mapping[int, int], after: Mapping[int, int]) -> tuple[int, int, int]:
    """The first element that is sent more or less often than before, how often it was, and is."""
    was = now = 0
    for position in sorted({*before, *after}):
        was, now = was + before.get(position, 0), now + after.get(position, 0)
        if was != now:
            break
    return position, was, now
