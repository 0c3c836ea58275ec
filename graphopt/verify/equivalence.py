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

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from graphopt.errors import VerificationError
from graphopt.iter_graph import IterGraphModule
from graphopt.iter_graph.derive import CARRIED
from graphopt.verify.evaluation import Evaluation, NotDecidedError, evaluate_graph, input_value
from graphopt.verify.problems import Problem
from graphopt.verify.terms import Pending, ScalarValue, TensorValue, Terms

_SHOWN = 10


@dataclass
class EquivalenceReport:
    """The outcome of comparing what two graphs compute.

    Attributes:
        problems: what differs, or could not be decided; empty where both compute the same.
        reorders_sums: whether elements are summed over ranks in another place of what is sent:
            the same bits on two ranks, up to the order of sums on more.
        decidable: whether terms can speak of the graph before at all.
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

    Both are in the captured dialect (docs/ir.md). Of an `IterGraphModule` the step is compared, and
    if it has late nodes, the graphs that run them are compared with the step.

    Near-linear in the number of nodes. Changes nothing.

    Args:
        before: the graph that a pass was given, or a copy of it.
        after: what the pass made of it.
    """
    terms = Terms()
    try:
        old = evaluate_graph(before, terms)
    except NotDecidedError as error:
        return EquivalenceReport([error.problem], decidable=False)
    try:
        new = evaluate_graph(after, terms)
        problems = list(_differences(terms, old, new, ""))
        if not problems and isinstance(after, IterGraphModule) and after.graph.late:
            problems = list(_late(after, terms, new))
    except NotDecidedError as error:
        return EquivalenceReport([error.problem])
    return EquivalenceReport(problems, reorders_sums=bool(new.sent))


def _late(gm: IterGraphModule, terms: Terms, step: Evaluation) -> Iterator[Problem]:
    """Both statements about the graphs that run."""
    user = len(step.carried)
    setup = evaluate_graph(gm.setup_gm, terms)
    first = _flushed(gm, terms, setup, user)
    yield from _differences(terms, step, first, "the first iteration and a flush: ")
    carried = _arbitrary_carried(gm, terms, setup.carried[user:])
    drained = evaluate_graph(gm.drain_gm, terms, carried)
    expected = evaluate_graph(gm.graph, terms, drained.states)
    expected.states = drained.states | expected.states
    expected.sent = _together(drained.sent, expected.sent)
    found = _flushed(gm, terms, evaluate_graph(gm.main_gm, terms, carried), user)
    yield from _differences(terms, expected, found, "any other iteration and a flush: ")


def _carried_inputs(gm: fx.GraphModule) -> list[fx.Node]:
    """The placeholders of what the last iteration left, in order."""
    return [node for node in gm.graph.nodes if node.meta.get("kind") == CARRIED]


def _arbitrary_carried(gm: IterGraphModule, terms: Terms, left: Sequence[Any]) -> dict[str, Any]:
    """Arbitrary carried values; what is under way when an iteration ends is so when one begins."""
    found = {}
    for node, value in zip(_carried_inputs(gm.main_gm), left, strict=True):
        fresh = input_value(terms, node)
        found[str(node.target)] = Pending(fresh) if isinstance(value, Pending) else fresh
    return found


def _flushed(gm: IterGraphModule, terms: Terms, run: Evaluation, user: int) -> Evaluation:
    """A derived graph followed by drain."""
    names = [str(node.target) for node in _carried_inputs(gm.drain_gm)]
    given = dict(zip(names, run.carried[user:], strict=True)) | run.states
    drain = evaluate_graph(gm.drain_gm, terms, given)
    return Evaluation(
        results=run.results,
        carried=run.carried[:user],
        states=run.states | drain.states,
        draws=run.draws + drain.draws,
        effects=run.effects + drain.effects,
        sent=_together(run.sent, drain.sent),
        origins=drain.origins | run.origins,
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
        ("carried value", old.carried, new.carried),
    ):
        if len(before) != len(after):
            yield Problem(f"{where}{len(after)} {kind}s, before it was {len(before)}")
            continue
        for index, (one, other) in enumerate(zip(before, after, strict=True)):
            if one != other:
                yield _problem(terms, old, new, f"{where}{kind} {index}", one, other)
    for name in dict.fromkeys([*old.states, *new.states]):
        one, other = old.states.get(name), new.states.get(name)
        if one is None or other is None:
            verb = "is updated, before it was not" if one is None else "is not updated any more"
            yield Problem(f"{where}%{name} {verb}")
        elif one != other:
            yield _problem(terms, old, new, f"{where}the update of %{name}", one, other)


def _of_sends(terms: Terms, old: Evaluation, new: Evaluation, where: str) -> Iterator[Problem]:
    for key in dict.fromkeys([*old.sent, *new.sent]):
        before = {p: n for p, n in old.sent.get(key, {}).items() if n}
        after = {p: n for p, n in new.sent.get(key, {}).items() if n}
        if before == after:
            continue
        (kind, _), term = key
        node = new.origins.get(term) or old.origins.get(term)
        yield Problem(
            f"{where}not every element goes through {kind} as often as before",
            () if node is None else (node,),
            hint="each element that was sent is sent once; comm.get_all_comm_blocks lists the"
            " collectives, and a collective that nobody needs has to go with its wait",
        )


def _problem(
    terms: Terms, old: Evaluation, new: Evaluation, what: str, one: Any, other: Any
) -> Problem:
    """The smallest parts of two values that differ."""
    message, first, second = _smallest(terms, one, other)
    nodes = [new.origins.get(second), old.origins.get(first)] if first is not None else []
    shown = tuple(dict.fromkeys(node for node in nodes if node is not None))
    return Problem(f"{what} is not what it was: {message}", shown)


def _smallest(terms: Terms, one: Any, other: Any) -> tuple[str, Any, Any]:
    """Follow two values down to where they begin to differ."""
    found: tuple[str, Any, Any] = ("another value", None, None)
    while True:
        pair = _first_pair(one, other)
        if pair is None:
            return _layouts(one, other) or found[0], found[1], found[2]
        first, second = pair
        keys = terms[first].key, terms[second].key
        found = _message(*keys), first, second
        inner = _inner(*keys)
        if inner is None:
            return found
        one, other = inner


def _message(one: Sequence[Any], other: Sequence[Any]) -> str:
    if one[:2] != other[:2]:
        return f"{_operator(other)} in place of {_operator(one)}"
    return f"{_operator(one)} gets other arguments"


def _operator(key: Sequence[Any]) -> str:
    if key[0] in ("call", "entry", "each"):
        return str(key[1])
    if key[0] == "input":
        return f"%{key[1]}"
    return str(key[0])


def _inner(one: Any, other: Any) -> tuple[Any, Any] | None:
    """The one part of two keys that differs, if both are otherwise alike and it has terms."""
    if not isinstance(one, tuple) or not isinstance(other, tuple) or len(one) != len(other):
        return None
    different = [(a, b) for a, b in zip(one, other, strict=True) if a != b]
    if not different:
        return None
    a, b = different[0]
    if _first_pair(a, b) is not None:
        return a, b
    return _inner(a, b)


def _first_pair(one: Any, other: Any) -> tuple[int, int] | None:
    """The first terms of two values that differ."""
    if isinstance(one, TensorValue) and isinstance(other, TensorValue):
        for a, b in zip(one.segments, other.segments, strict=False):
            if a.term != b.term:
                return a.term, b.term
        return None
    if isinstance(one, ScalarValue) and isinstance(other, ScalarValue):
        return None if one == other else (one.term, other.term)
    if not isinstance(one, tuple) or not isinstance(other, tuple) or len(one) != len(other):
        return None
    if one[:1] == other[:1] == ("elements",) and one[1] != other[1]:
        return one[1], other[1]
    for a, b in zip(one, other, strict=True):
        found = _first_pair(a, b)
        if found is not None:
            return found
    return None


def _layouts(one: Any, other: Any) -> str | None:
    if not isinstance(one, TensorValue) or not isinstance(other, TensorValue):
        return None
    for name in ("shape", "dtype", "device", "stride"):
        a, b = getattr(one, name), getattr(other, name)
        if a != b:
            return f"{name} {b}, before it was {a}"
    return f"elements {other.segments}, before it was {one.segments}"
