"""The nodes of a trace that make optimizer state, and the state that they make, beforehand.

    zeros = zeros_like(weight)         ─┐ make state, read nothing that changes
    step = lift_fresh_copy(0.0)        ─┘
    …
    step.add_(1); zeros.lerp_(gradient, 0.1)        the step itself, from state that is there

State that is a copy of a gradient (`buffer = gradient.clone()`, where later steps compute
`buffer.mul_(momentum).add_(gradient)`) is made of negative zeros: for a positive momentum,
``-0.0 * momentum + gradient`` is the gradient, bit for bit. Whether later steps do compute that
is for `steady` to see.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from graphopt import _compat
from graphopt._compat.fresh_state import takes_negative_zeros
from graphopt.graph_utils import (
    get_output,
    is_operator,
    is_random,
    same_kind,
    without_autocast,
    written,
)
from graphopt.ir.inplace import uninitialised_like
from graphopt.ir.metadata import fake_value, known_value
from graphopt.ir.operators import operator_of
from graphopt.tracing.results.signature import Computed, Constant, StateResult
from graphopt.tracing.scalars.numbers import ARITHMETIC
from graphopt.tracing.trace import RawTrace


@dataclass(frozen=True)
class Creation:
    """How one trace makes optimizer state.

    Attributes:
        states: all of it, in the order in which it appears.
        made: per node that makes a tensor of the state, which one it is.
        copies: those of them that copy a value of the step.
        constants: entries of the state that are no tensors, with their values after the step.
        needed: nodes from which the others of `made` are computed, in order.
    """

    states: list[StateResult]
    made: dict[fx.Node, StateResult]
    copies: frozenset[fx.Node]
    constants: list[tuple[StateResult, Any]]
    needed: list[fx.Node]

    def private(self) -> set[fx.Node]:
        """The nodes that compute tensors for the new state alone."""
        found = set(self.made)
        for node in reversed(self.needed):
            value = known_value(node)
            tensor = node.op == "get_attr" or isinstance(value, torch.Tensor)
            if node.op != "placeholder" and tensor and found.issuperset(node.users):
                found.add(node)
        return found

    def run(
        self, graph_module: fx.GraphModule, inputs: Sequence[Any]
    ) -> list[tuple[StateResult, Any]] | None:
        """The state, made of the live inputs; None where a kernel makes another kind of tensor than
        the trace says."""
        values = dict(zip(graph_module.graph.find_nodes(op="placeholder"), inputs, strict=True))
        entries = {(s.optimizer, s.owner, s.key): value for s, value in self.constants}
        # Of fake tensors, as of a device that is not there, the state is fake as well.
        fake = _compat.fake_mode_of([v for v in inputs if isinstance(v, torch.Tensor)])
        unseen = _compat.without_modes()
        with unseen, torch.no_grad(), without_autocast(), fake or nullcontext():
            for node in self.needed:
                if node not in values:
                    values[node] = _computed(graph_module, node, values)
            for node, state in self.made.items():
                value = _negative_zeros(node) if node in self.copies else values[node]
                if not _is_like(value, fake_value(node), fake is not None):
                    return None
                entries[state.optimizer, state.owner, state.key] = value
        return [(s, entries[s.optimizer, s.owner, s.key]) for s in self.states]


def creation_of(raw: RawTrace) -> Creation | None:
    """What makes the optimizer state that a trace leaves behind; None where that depends on more
    than the inputs as the step finds them."""
    results = get_output(raw.graph_module.graph).args[0]
    first = _first_of_storages(raw.graph_module.graph)
    made: dict[fx.Node, StateResult] = {}
    constants: list[tuple[StateResult, Any]] = []
    for state in raw.signature.states:
        if isinstance(state.recipe, Constant):
            constants.append((state, state.recipe.value))
            continue
        node = _maker(results, state, first)
        if node is None or node in made:
            return None
        made[node] = state
    return _divided(raw, made, constants)


def _divided(
    raw: RawTrace, made: dict[fx.Node, StateResult], constants: list[tuple[StateResult, Any]]
) -> Creation | None:
    position = {node: index for index, node in enumerate(raw.graph_module.graph.nodes)}
    writes = _first_writes(position)
    needed: set[fx.Node] = set()
    copies: set[fx.Node] = set()
    for node in made:
        sources = _sources(node, position[node], writes)
        if sources is not None:
            needed |= sources
        elif is_operator(node.target, "aten::clone") and _takes_zeros(node):
            copies.add(node)
        else:
            return None
    ordered = sorted(needed, key=position.__getitem__)
    return Creation(raw.signature.states, made, frozenset(copies), constants, ordered)


def _maker(results: Any, state: StateResult, first: Mapping[int, fx.Node]) -> fx.Node | None:
    """The node that makes the tensor which a trace leaves in the optimizer's state."""
    if not isinstance(state.recipe, Computed):
        return None
    final = results[state.recipe.index]
    value = known_value(final) if isinstance(final, fx.Node) else None
    if not isinstance(value, torch.Tensor) or value.requires_grad:
        return None
    node = first[_compat.storage_key(value)]
    return node if node.op == "call_function" and same_kind(node, final) else None


def _first_of_storages(graph: fx.Graph) -> dict[int, fx.Node]:
    found: dict[int, fx.Node] = {}
    for node in graph.nodes:
        value = known_value(node)
        if isinstance(value, torch.Tensor):
            found.setdefault(_compat.storage_key(value), node)
    return found


def _first_writes(position: Mapping[fx.Node, int]) -> dict[int, int]:
    """The position of the first write to each storage."""
    found: dict[int, int] = {}
    for node, index in position.items():
        for target in written(node):
            value = known_value(target)
            if isinstance(value, torch.Tensor):
                found.setdefault(_compat.storage_key(value), index)
    return found


def _sources(node: fx.Node, end: int, writes: Mapping[int, int]) -> set[fx.Node] | None:
    """`node` and everything from whose values it is computed, back to inputs that nothing before
    position `end` has written to; None where there is more to it."""
    found: set[fx.Node] = set()
    pending = [node]
    while pending:
        source = pending.pop()
        if source in found:
            continue
        value = known_value(source)
        storage = _compat.storage_key(value) if isinstance(value, torch.Tensor) else None
        if not _is_pure(source) or writes.get(storage or 0, end) < end:
            return None
        found.add(source)
        pending += _value_inputs(source)
    return found


def _value_inputs(node: fx.Node) -> list[fx.Node]:
    """The arguments whose values a node reads."""
    if operator_of(node).metadata_only:
        return [source for source in node.all_input_nodes if source is not node.args[0]]
    return node.all_input_nodes


def _is_pure(node: fx.Node) -> bool:
    if node.op in ("placeholder", "get_attr"):
        return True
    if node.target in ARITHMETIC:
        return True
    target = node.target
    if not isinstance(target, _compat.OpOverload) or target.namespace != "aten":
        return False
    return not _compat.schema_of(target).is_mutable and not is_random(node)


def _takes_zeros(node: fx.Node) -> bool:
    return takes_negative_zeros(fake_value(node).dtype)


def _negative_zeros(node: fx.Node) -> torch.Tensor:
    return uninitialised_like(fake_value(node)).fill_(-0.0)


def _computed(graph_module: fx.GraphModule, node: fx.Node, values: Mapping[fx.Node, Any]) -> Any:
    if node.op == "get_attr":
        return getattr(graph_module, str(node.target))

    def value_of(source: fx.Node) -> Any:
        known = values.get(source)
        return uninitialised_like(fake_value(source)) if known is None else known

    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), value_of)
    target: Callable[..., Any] = node.target  # type: ignore[assignment]
    return target(*args, **kwargs)


def _is_like(value: Any, traced: torch.Tensor, fake: bool) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and _compat.is_fake(value) is fake
        and value.shape == traced.shape
        and value.dtype == traced.dtype
        and value.device == traced.device
        and value.stride() == traced.stride()
    )
