"""Symbolic evaluation of operators that update storage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import fx

from graphopt.graph_utils import written
from graphopt.ir.entries import ListCall, list_call
from graphopt.ir.families import collective_kind
from graphopt.ir.metadata import fake_value
from graphopt.ir.operators import (
    fused_optimizer,
    is_list_operator,
    operator_of,
    rounds_a_list_in_place,
    written_positions,
)
from graphopt.verify.symbolic.collective_results import CollectiveTerms
from graphopt.verify.symbolic.contents import CannotWriteError, with_layout
from graphopt.verify.symbolic.evaluation_outcome import NotDecidedError
from graphopt.verify.symbolic.functional import functional_form, functional_form_for
from graphopt.verify.symbolic.node_values import NodeValues
from graphopt.verify.values.call_terms import entries
from graphopt.verify.values.casts import converted
from graphopt.verify.values.terms import TensorValue, Terms, tensor_value

Applied = Callable[[fx.Node, Any, dict[str, Any]], Any]
"""(node, operator, arguments by name) -> value of the call."""


class StorageUpdates:
    """Evaluates the updates of one graph.

    Args:
        applied: what an operator gives.
    """

    def __init__(
        self, terms: Terms, reading: NodeValues, communication: CollectiveTerms, applied: Applied
    ) -> None:
        self._terms, self._reading, self._contents = terms, reading, reading.contents
        self._communication, self._applied = communication, applied

    def copied(self, node: fx.Node) -> Any:
        """Evaluates a `copy_` and returns its result."""
        args = cast(Sequence[fx.Node], node.args)
        destination = args[0]
        if len(args) == 2 and not node.kwargs:
            before, source = self._reading.read(destination), self._reading.read(args[1])
        else:
            arguments = self._reading.arguments(node)
            before, source = arguments["self"], arguments["src"]
            if arguments["non_blocking"]:
                raise NotDecidedError("it copies asynchronously (non_blocking=True)", node)
        if not isinstance(source, TensorValue) or not isinstance(before, TensorValue):
            self._reading.refuse_pending(node)
            raise NotDecidedError("it copies what is no tensor", node)
        if source.shape != before.shape:
            arguments = {"self": before, "src": source, "non_blocking": False}
            value = self._applied(node, torch.ops.aten.copy.default, arguments)
            return self.written(node, destination, value)
        return self._put(node, destination, _copied(self._terms, source, destination))

    def written(self, node: fx.Node, destination: fx.Node, value: Any) -> Any:
        """Overwrites `destination` with a value that may have another layout."""
        if not isinstance(value, TensorValue):
            raise NotDecidedError("what it updates is not a tensor", node)
        return self._put(node, destination, with_layout(value, fake_value(destination)))

    def taken(self, node: fx.Node, workspace: fx.Node) -> None:
        """Gives an argument's storage to a node, after which nobody else may use it."""
        self._refuse_sent(node, workspace)
        self._contents.take(workspace)

    def in_place(self, node: fx.Node) -> Any:
        """Evaluates an in-place operator: its functional form's result is written."""
        if operator_of(node).collective:
            return self._in_place_collective(node)
        target = self._functional_form(node)
        if target is None:
            raise NotDecidedError("it updates an argument in place, in a way that is unknown", node)
        self._reading.refuse_pending(node)
        arguments = self._reading.arguments(node)
        if not is_list_operator(node):
            (destination,) = written(node)
            return self.written(node, destination, self._applied(node, target, arguments))
        return self._in_place_lists(node, target, arguments)

    def _functional_form(self, node: fx.Node) -> Any:
        if is_list_operator(node):
            held = [fake_value(destination) for destination in written(node)]
            rounds = rounds_a_list_in_place(node.target, held)
            return None if rounds else functional_form(node.target)
        return functional_form_for(node.target, fake_value(written(node)[0]))

    def _put(self, node: fx.Node, destination: fx.Node, value: TensorValue) -> Any:
        """Overwrites `destination` with a value of its own layout."""
        self._refuse_sent(node, destination)
        try:
            self._contents.write(destination, value)
        except CannotWriteError as error:
            raise NotDecidedError(str(error), node, foreign=True) from None
        return value

    def _refuse_sent(self, node: fx.Node, destination: fx.Node) -> None:
        reader = self._communication.sending.reader_of(destination)
        if reader is not None:
            raise NotDecidedError(f"it overwrites what %{reader.name} still sends", node)

    def _in_place_lists(self, node: fx.Node, target: Any, arguments: dict[str, Any]) -> Any:
        first = cast(Sequence[fx.Node], node.args[0])  # what it gives itself is nothing
        held = fake_value(node) or [fake_value(destination) for destination in first]
        found = entries(self._terms, target, arguments, held)
        call = list_call(node)
        if found is None or call is None:
            raise NotDecidedError("entries of its lists cannot be told apart", node)
        self._refuse_entries_of_one_storage(call)
        columns = (found,) if fused_optimizer(node.target) is None else found
        for position in written_positions(node):
            destinations = cast(Sequence[Any], node.args[position])
            for destination, value in zip(destinations, columns[position], strict=True):
                self.written(node, destination, value)
        return found

    def _refuse_entries_of_one_storage(self, call: ListCall) -> None:
        """Refuses an in-place list operator one entry of which reads what another one writes."""
        node = call.node
        places: dict[fx.Node, dict[fx.Node, set[int]]] = {}
        for item in range(call.count):
            for read, _ in call.reads(item):
                there = places.setdefault(self._contents.owner(read), {})
                there.setdefault(read, set()).add(item)
        for destination in written(node):
            there = places[self._contents.owner(destination)]
            mine = there[destination]
            others = [other for other, indices in there.items() if indices != mine]
            if len(mine) > 1 or any(self._contents.overlap(destination, n) for n in others):
                raise NotDecidedError("one entry of its lists writes memory of another one", node)

    def _in_place_collective(self, node: fx.Node) -> Any:
        """Evaluates an in-place collective, which may write at any time until its wait."""
        destination = node.args[0]
        kind = collective_kind(operator_of(node).reduction)
        if not isinstance(destination, fx.Node) or not kind.by_element:
            raise NotDecidedError("it is an update in place by several ranks", node)
        value = self._communication.launched(node).value
        self.written(node, destination, value)
        self._reading.in_flight[self._contents.owner(destination)] = node
        return value


def _copied(terms: Terms, source: TensorValue, destination: fx.Node) -> TensorValue:
    """Returns what a destination holds once a value of its shape has been copied there."""
    fake = fake_value(destination)
    if source.dtype != fake.dtype:
        return tensor_value(converted(terms, source, fake), fake)
    return cast(TensorValue, with_layout(source, fake))
