"""Symbolic results of collectives during evaluation, and counts of the elements they send."""

from __future__ import annotations

from typing import Any

from torch import fx

from graphopt.ir.families import collective_kind
from graphopt.ir.metadata import fake_value
from graphopt.ir.operators import first_argument, operator_of
from graphopt.verify.dependency.signatures import as_reduced, sent_tensors, signature_of
from graphopt.verify.symbolic.collectives_in_flight import CollectivesInFlight, mark_sent_constants
from graphopt.verify.symbolic.evaluation_outcome import Evaluation, NotDecidedError
from graphopt.verify.symbolic.node_values import NodeValues
from graphopt.verify.values.call_terms import fresh
from graphopt.verify.values.elementwise import reduced
from graphopt.verify.values.gathering import (
    EXCHANGES,
    GATHERS,
    SCATTERS,
    as_reduction,
    even_exchange,
    exchanged,
    gathered,
    is_share,
    parts,
    scattered,
)
from graphopt.verify.values.terms import PendingResult, TensorValue, Terms, canonical

_SUMMING = ("all_reduce", "reduce_scatter_tensor")


class CollectiveTerms:
    """Evaluates the collectives of one graph.

    Args:
        found: the evaluation in which sent elements are recorded.
        by_launch: identify sent constants by the launch that sends them.
    """

    def __init__(
        self, terms: Terms, reading: NodeValues, found: Evaluation, *, by_launch: bool
    ) -> None:
        self._terms, self._reading, self._found = terms, reading, found
        self._by_launch = by_launch
        self.sending = CollectivesInFlight(reading.contents.owners)

    def launched(self, node: fx.Node) -> PendingResult:
        """Returns the pending result of a collective that this node launches."""
        reduction = operator_of(node).reduction
        self._reading.refuse_pending(node)
        arguments = self._reading.arguments(node)
        first, sent = next(iter(arguments.items()))
        options = canonical({name: v for name, v in arguments.items() if name != first})
        kind = even_exchange((reduction, options))
        if self._by_launch:
            sent = mark_sent_constants(self._terms, sent, (self._found.launches,))
        self._note(node, kind, sent)
        fake = fake_value(node)
        if isinstance(sent, tuple):
            given = [self._given(kind, v, f) for v, f in zip(sent, fake, strict=True)]
            known = tuple(value for value in given if value is not None)
            if len(known) == len(sent):
                return PendingResult(known)
        elif (value := self._given(kind, sent, fake)) is not None:
            return PendingResult(value)
        return PendingResult(fresh(self._terms, ("collective", *kind, canonical(sent)), fake))

    def _given(self, kind: Any, sent: Any, fake: Any) -> TensorValue | None:
        """Returns the result of a collective for one tensor. None if it is not known element by
        element."""
        if not isinstance(sent, TensorValue) or not sent.is_static:
            return None
        if collective_kind(kind[0]).by_element:
            return reduced(self._terms, kind, sent, fake)
        rule = {SCATTERS: scattered, GATHERS: gathered, EXCHANGES: exchanged}.get(kind[0])
        size = None if rule is None else parts(kind, sent)
        return None if rule is None or size is None else rule(self._terms, kind, size, sent, fake)

    def waited(self, node: fx.Node) -> Any:
        """Returns the value that a wait gives."""
        source = first_argument(node)
        value = self._reading.read(source, sent=True)
        if not isinstance(value, PendingResult):
            raise NotDecidedError("it waits for something that is not a collective's", node)
        if isinstance(source, fx.Node):
            self._reading.in_flight.pop(self._reading.contents.owner(source), None)
        self.sending.waited(node)
        return value.value

    def _note(self, node: fx.Node, kind: Any, sent: Any) -> None:
        """Records the launch of a collective and how many elements it sends."""
        self._found.launches += 1
        self.sending.launched(node)
        signature = as_reduced(signature_of(node))
        for tensor in sent_tensors(node):
            elements = tensor.numel()
            if isinstance(elements, int):
                self._found.amounts[signature, str(tensor.dtype)] += elements
            else:  # of which no more is known than that there are as many
                self._found.amounts[signature, f"{tensor.dtype} times {elements}"] += 1
        rows = sent if isinstance(sent, tuple) else (sent,)
        for row in rows:
            self._count(kind, row)
        if kind[0] in _SUMMING or self._completes(kind, rows):
            self._found.places[kind, tuple(canonical(row) for row in rows)] += 1

    def _completes(self, kind: Any, rows: Any) -> bool:
        """True if a collective gathers the shares of a scattered reduction."""
        terms = (s.term for row in rows if isinstance(row, TensorValue) for s in row.segments)
        return kind[0] == GATHERS and any(is_share(self._terms, term, kind) for term in terms)

    def _count(self, kind: Any, row: Any) -> None:
        counted = as_reduction(kind)
        for segment in row.segments if isinstance(row, TensorValue) else ():
            if not self._terms[segment.term].constant:
                edges = self._found.edges(counted, segment.term)
                edges[segment.start] += 1
                edges[segment.start + segment.length] -= 1
