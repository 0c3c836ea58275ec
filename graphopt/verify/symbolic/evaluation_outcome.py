"""The outcome of evaluating a graph, or the reason why it cannot be evaluated."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import fx

from graphopt.graph_utils import is_wait
from graphopt.ir.metadata import known_value
from graphopt.verify.dependency.signatures import Signature
from graphopt.verify.problems import Problem
from graphopt.verify.values.call_terms import fresh, terms_in
from graphopt.verify.values.terms import Origins, PendingResult, Terms


class NotDecidedError(Exception):
    """The graph does something that terms cannot describe.

    Attributes:
        foreign: the reason is a call of an unknown graph or an untraceable write, neither of which
            need be wrong.
    """

    def __init__(self, message: str, node: fx.Node, *, foreign: bool = False) -> None:
        super().__init__(message)
        self.foreign = foreign
        self.problem = Problem(f"not decided: {message}", (node,), hint=_HINT)


_HINT = (
    "write it in the captured dialect (docs/ir.md): functional operators, and copy_ into inputs as"
    " the only update; or check dependencies alone with verify='dependencies'"
)


@dataclass
class Evaluation:
    """The outcome of evaluating one graph: results, state, random draws, sent elements.

    Attributes:
        results, carried: values that the graph returns.
        states: value of each placeholder that the graph updates, by its target.
        draws: keys of the calls that drew random numbers or used a generator, in order.
        launches: the number of launched collectives.
        effects: keys of the calls whose effects the host sees, in order.
        may_raise: calls that end the step for some values, as keys, with their first nodes.
        calls_of_host: how many of these call functions of the program.
        sent: for each kind of collective and term: position -> change in the number of copies sent.
        amounts: the number of elements sent by collective signature and dtype; symbolic numbers as
            text.
        places: by kind of collective and row of elements, how often it is summed over ranks.
        listed: placeholders whose updates the output lists, by target.
        made: each node with the value that it gave, in order.
        nodes: the node of each result and carried value, by kind and number, and the last update
            of each state by its target.
        aliases: results, carried values and states that share a storage, by its owner.
    """

    results: list[Any] = field(default_factory=list)
    carried: list[Any] = field(default_factory=list)
    states: dict[str, Any] = field(default_factory=dict)
    draws: list[Any] = field(default_factory=list)
    launches: int = 0
    effects: list[Any] = field(default_factory=list)
    may_raise: dict[Any, fx.Node] = field(default_factory=dict)
    calls_of_host: int = 0
    sent: dict[Any, Counter[int]] = field(default_factory=dict)
    amounts: Counter[tuple[Signature, str]] = field(default_factory=Counter)
    places: Counter[Any] = field(default_factory=Counter)
    listed: set[str] = field(default_factory=set)
    made: list[tuple[fx.Node, Any]] = field(default_factory=list)
    nodes: dict[tuple[str, Any], Any] = field(default_factory=dict)
    aliases: dict[fx.Node, list[tuple[str, Any]]] = field(default_factory=dict)

    def edges(self, kind: Any, term: int) -> Counter[int]:
        """Returns, by position, the change in how often a collective kind sends a term's
        elements."""
        return self.sent.setdefault((kind, term), Counter())

    @cached_property
    def origins(self) -> Origins:
        """The first node that makes each term, computed only when a report needs it."""
        found: Origins = {}
        for node, value in self.made:
            for term in terms_in(value):
                found.setdefault(term, node)
        return found


def input_value(terms: Terms, node: fx.Node) -> Any:
    """Returns an arbitrary value for a placeholder; a pending one if it holds a running
    collective."""
    value = _unknown_input(terms, node)
    return PendingResult(value) if any(map(is_wait, node.users)) else value


def inputs_in_flight(terms: Terms, graph: fx.Graph) -> dict[str, Any]:
    """Returns the pending values of the placeholders, by name, that hold running collectives: those
    that `graph` waits for."""
    found = graph.find_nodes(op="placeholder")
    return {str(n.target): input_value(terms, n) for n in found if any(map(is_wait, n.users))}


def _unknown_input(terms: Terms, node: fx.Node) -> Any:
    fake = known_value(node)
    for call in terms.recall.by_name.get(node.name, ()):
        if call.fake is fake and call.target == node.target and not call.args:
            return call.value
    value = fresh(terms, ("input", str(node.target)), fake)
    terms.recall.note(node, (), {}, value, based=False)
    return value
