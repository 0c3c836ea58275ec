"""Optimizer blocks: the nodes of one optimizer, by their role."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import fx

from graphopt.graph_utils import call_function_with_meta, is_copy, is_operator
from graphopt.ir.entries import list_call
from graphopt.ir.operators import argument
from graphopt.optim.errors import OptimizerSplitError

aten = torch.ops.aten

FUSED_ADAM = ("aten::_fused_adam", "aten::_fused_adamw")

Output = fx.Node | None
"""The `copy_` of one entry; None where the graph does not copy it back."""


class AdamArgs(NamedTuple):
    """The list arguments of a fused Adam, each with one entry per parameter.

    `max_exp_avg_sqs` is empty without amsgrad. Entries of `state_steps` are items of the step
    counter, or the `copy_` of such an item.

    >>> (block,) = graphopt.optim.get_all_fused_optimizer_blocks(gm)
    >>> block.optim.optim_args.grads
    [wait_tensor_1, wait_tensor]
    """

    params: list[fx.Node]
    grads: list[fx.Node]
    exp_avgs: list[fx.Node]
    exp_avg_sqs: list[fx.Node]
    max_exp_avg_sqs: list[fx.Node]
    state_steps: list[fx.Node]


@dataclass
class FusedAdamBlock:
    """A fused Adam or AdamW and the copies of its results.

    Attributes:
        optim_node: the `_fused_adam` or `_fused_adamw`.
        param_outputs, exp_avgs_outputs, exp_avg_sqs_outputs, max_exp_avg_sqs_outputs: per parameter
            the `copy_` that stores the result; None where the graph does not store it.

    >>> (block,) = graphopt.optim.get_all_fused_optimizer_blocks(gm)
    >>> block.optim.optim_node, len(block.optim.param_outputs)
    (_fused_adam, 2)
    """

    optim_node: fx.Node
    param_outputs: list[Output]
    exp_avgs_outputs: list[Output]
    exp_avg_sqs_outputs: list[Output]
    max_exp_avg_sqs_outputs: list[Output]

    @classmethod
    def from_node(cls, optim_node: fx.Node) -> FusedAdamBlock:
        """Returns the block around a fused Adam of the graph."""
        lists = _stored_lists(optim_node)
        return cls(optim_node, *(find_outputs(optim_node, *stored) for stored in lists))

    @classmethod
    def with_new_outputs(cls, optim_node: fx.Node) -> FusedAdamBlock:
        """Returns the block around a new fused Adam, after inserting copies of its results into
        state."""
        graph, after = optim_node.graph, optim_node
        outputs: list[list[Output]] = []
        for position, entries in _stored_lists(optim_node):
            if not entries:
                outputs.append([])
                continue
            with graph.inserting_after(after):
                args = (optim_node, position)
                container = call_function_with_meta(graph, operator.getitem, args, like=optim_node)
            outputs.append(_make_outputs(container, container, entries))
            after = outputs[-1][-1] or container
        return cls(optim_node, *outputs)

    @property
    def optim_args(self) -> AdamArgs:
        """The list arguments."""
        return _adam_args(self.optim_node)

    @property
    def nodes(self) -> list[fx.Node]:
        """The list operators of the block."""
        return [self.optim_node]

    @property
    def grads(self) -> list[fx.Node]:
        """The gradients, one per parameter."""
        return self.optim_args.grads

    @property
    def copies(self) -> list[fx.Node]:
        """The existing copies of results into state."""
        lists = (
            self.param_outputs,
            self.exp_avgs_outputs,
            self.exp_avg_sqs_outputs,
            self.max_exp_avg_sqs_outputs,
        )
        return [output for outputs in lists for output in outputs if output is not None]


@dataclass
class ForeachAddBlock:
    """The list operator that increments an optimizer's step counts.

    Attributes:
        add_node: the `_foreach_add`.
        outputs: per entry the `copy_` that stores the new count.

    >>> (block,) = graphopt.optim.get_all_fused_optimizer_blocks(gm)
    >>> len(block.step.outputs)
    2
    """

    add_node: fx.Node
    outputs: list[Output]

    @classmethod
    def from_node(cls, add_node: fx.Node) -> ForeachAddBlock:
        """Returns the block around a `_foreach_add` of the graph."""
        if not is_operator(add_node.target, "aten::_foreach_add"):
            raise OptimizerSplitError(f"not a _foreach_add: {add_node.format_node()}")
        return cls(add_node, find_outputs(add_node, 0, entries_of(add_node, "self")))

    @classmethod
    def with_new_outputs(cls, add_node: fx.Node) -> ForeachAddBlock:
        """Returns the block around a new `_foreach_add`, after inserting copies of its results into
        state."""
        return cls(add_node, _make_outputs(add_node, add_node, entries_of(add_node, "self")))

    @property
    def copies(self) -> list[fx.Node]:
        """The existing copies of results into state."""
        return [output for output in self.outputs if output is not None]


@dataclass
class ListOptimizerBlock:
    """Any other optimizer made of list operators: another fused one, or several `_foreach_*`.

    Attributes:
        nodes: its list operators without the step counter, in graph order.
        grads: the gradients that they start from, in the order in which they are first read.
        copies: the copies of its results into state, in graph order.

    >>> from graphopt.optim import ListOptimizerBlock, get_all_fused_optimizer_blocks
    >>> [isinstance(b.optim, ListOptimizerBlock) for b in get_all_fused_optimizer_blocks(gm)]
    [False]
    """

    nodes: list[fx.Node]
    grads: list[fx.Node]
    copies: list[fx.Node]

    @property
    def optim_node(self) -> fx.Node:
        """The last list operator."""
        return self.nodes[-1]


@dataclass
class FusedOptimizerBlock:
    """One optimizer made of list operators, with its step counter.

    Attributes:
        step: what counts its steps; None for an optimizer that does not need the count.
        optim: what computes the new parameters and state.

    >>> (block,) = graphopt.optim.get_all_fused_optimizer_blocks(gm)
    >>> block.step.add_node, block.optim.optim_node
    (_foreach_add, _fused_adam)
    """

    step: ForeachAddBlock | None
    optim: FusedAdamBlock | ListOptimizerBlock

    @property
    def nodes(self) -> list[fx.Node]:
        """All list operators, the step counter first."""
        return [*([self.step.add_node] if self.step else []), *self.optim.nodes]

    @property
    def copies(self) -> list[fx.Node]:
        """The copies of all results into state, those of the step counter first."""
        return [*(self.step.copies if self.step else []), *self.optim.copies]


def _adam_args(node: fx.Node) -> AdamArgs:
    if not is_operator(node.target, *FUSED_ADAM):
        raise OptimizerSplitError(f"not a fused Adam: {node.format_node()}")
    names = ("self", *AdamArgs._fields[1:])
    return AdamArgs(*(entries_of(node, name) for name in names))


def _stored_lists(node: fx.Node) -> Iterator[tuple[int, list[fx.Node]]]:
    """Yields each list that a fused Adam updates, as its result position and its entries."""
    args = _adam_args(node)
    for position in (0, 2, 3, 4):  # result 1 are the gradients as they were
        yield position, args[position]


def entries_of(node: fx.Node, name: str) -> list[fx.Node]:
    """Returns the nodes in a list argument of a list operator."""
    return [entry for entry in argument(node, name) or () if isinstance(entry, fx.Node)]


def copy_of(item: fx.Node) -> Output:
    return next((user for user in item.users if is_copy(user) and user.args[1] is item), None)


def find_outputs(node: fx.Node, number: int, entries: list[fx.Node]) -> list[Output]:
    """Returns for each entry the `copy_` that stores its value in result list `number`, or None."""
    call = list_call(node)
    results = call.results(number) if call else {}
    copies = [map(copy_of, results.get(item, ())) for item in range(len(entries))]
    return [next(filter(None, found), None) for found in copies]


def _make_outputs(container: fx.Node, after: fx.Node, entries: list[fx.Node]) -> list[Output]:
    """Inserts `getitem` and `copy_` for each entry, behind `after`."""
    made: list[Output] = []
    graph = container.graph
    for index, entry in enumerate(entries):
        with graph.inserting_after(after):
            item = call_function_with_meta(
                graph, operator.getitem, (container, index), like=container
            )
        with graph.inserting_after(item):
            after = call_function_with_meta(
                graph, aten.copy_.default, (_placeholder_behind(entry), item), like=container
            )
        made.append(after)
    return made


def _placeholder_behind(entry: fx.Node) -> fx.Node:
    """Returns the placeholder that an entry holds, found behind earlier `copy_` nodes."""
    while is_copy(entry) and isinstance(entry.args[0], fx.Node):
        entry = entry.args[0]
    return entry
