"""Blocks: the nodes of one optimizer, by what they do."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from torch import fx

from graphopt.graph_utils import call_function_with_meta, is_operator
from graphopt.optim.lists import OptimizerSplitError
from graphopt.optim.outputs import (
    ForeachAddBlock,
    Output,
    entries_of,
    find_list,
    find_outputs,
    make_outputs,
)

FUSED_ADAM = ("aten::_fused_adam", "aten::_fused_adamw")


class AdamArgs(NamedTuple):
    """The list arguments of a fused Adam, one entry per parameter each.

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
        """The block around a fused Adam, as the graph has it."""
        outputs: list[list[Output]] = []
        for position, entries in _stored_lists(optim_node):
            container = find_list(optim_node, position)
            nothing: list[Output] = [None] * len(entries)
            outputs.append(nothing if container is None else find_outputs(container, entries))
        return cls(optim_node, *outputs)

    @classmethod
    def with_new_outputs(cls, optim_node: fx.Node) -> FusedAdamBlock:
        """The block around a new fused Adam: inserts what copies its results back."""
        graph, after = optim_node.graph, optim_node
        outputs: list[list[Output]] = []
        for position, entries in _stored_lists(optim_node):
            if not entries:
                outputs.append([])
                continue
            with graph.inserting_after(after):
                args = (optim_node, position)
                container = call_function_with_meta(graph, operator.getitem, args, like=optim_node)
            outputs.append(make_outputs(container, container, entries))
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
        """The outputs that there are."""
        lists = (
            self.param_outputs,
            self.exp_avgs_outputs,
            self.exp_avg_sqs_outputs,
            self.max_exp_avg_sqs_outputs,
        )
        return [output for outputs in lists for output in outputs if output is not None]


@dataclass
class ListOptimizerBlock:
    """Any other optimizer of list operators: another fused one, or several `_foreach_*`.

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
    """One optimizer of list operators.

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
    """Position among the results, and the entries, of each list that fused Adam updates."""
    args = _adam_args(node)
    for position in (0, 2, 3, 4):  # result 1 are the gradients as they were
        yield position, args[position]
