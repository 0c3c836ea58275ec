"""Collection of everything that a traced step leaves, as the step's `Signature`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from graphopt import _compat
from graphopt.errors import CaptureError
from graphopt.guards.values import is_plain
from graphopt.tracing.call import has_gradient
from graphopt.tracing.effects.argument_changes import ContainerChange
from graphopt.tracing.effects.written_values import MadeAnew
from graphopt.tracing.inputs.entries import Inputs
from graphopt.tracing.optimizers.first_gradients import FirstGradients
from graphopt.tracing.optimizers.optimizer_state import (
    NonParameterKey,
    distinct_states,
    entries_at,
    is_known_kind,
    is_nest,
    same_nest,
)
from graphopt.tracing.refusals.failures import located
from graphopt.tracing.results.recipes import Recipes
from graphopt.tracing.results.signature import (
    AttributeResult,
    Constant,
    GradientResult,
    PlacedResult,
    Recipe,
    SettingResult,
    Signature,
    StateResult,
)
from graphopt.tracing.rollback.substitute import StandIns, traced_key
from graphopt.tracing.scalars.numbers import SYMBOLIC
from graphopt.tracing.tensors.attributes import AttributeChange
from graphopt.tracing.tensors.lost_history import check_history, is_computed
from graphopt.tracing.tensors.rebinding import Rebinding


class TraceOutcome(NamedTuple):
    """The outcome of tracing a step once: what it returned, and what it changed.

    Attributes:
        returned, spec: what it returned, the leaves and how they are nested.
        stepped: the optimizers that it stepped.
        placed: the values that it has stored outside its arguments.
        made: what it has made of all that it leaves.
        given: the changes of lists and dictionaries among its arguments.
        rebinding: the assignments to `.data`.
        told: what it has left in attributes, with objects of which is told what they are.
    """

    returned: list[Any]
    spec: Any
    stepped: list[int]
    placed: list[PlacedResult]
    made: MadeAnew
    given: list[ContainerChange]
    rebinding: Rebinding
    told: list[AttributeChange]


class ResultCollector:
    """Collects, at the end of a traced step, everything that it leaves.

    Args:
        recipes: makes the results that the graph has to return.
        gradients: the first use of each gradient.
    """

    def __init__(
        self,
        leaves: Sequence[Any],
        optimizers: Sequence[Optimizer],
        inputs: Inputs,
        traced: StandIns,
        recipes: Recipes,
        gradients: FirstGradients,
    ) -> None:
        self.inputs, self.traced, self.recipes = inputs, traced, recipes
        self._leaves, self._optimizers = leaves, optimizers
        self._first = gradients
        self._dropped = set(self._dropped_gradients())

    def collect(
        self,
        ran: TraceOutcome,
        attributes: Iterable[AttributeChange],
        counted: Sequence[tuple[int, int, str, Any]],
    ) -> Signature:
        """Builds the signature of the step.

        Args:
            attributes: those of modules, optimizers and other objects that are others now.
            counted: settings of parameter groups that are, each behind its place.
        """
        recipes = self.recipes
        outputs = [recipes.of(leaf, "what the step returns") for leaf in ran.returned]
        return Signature(
            output_spec=ran.spec,
            outputs=outputs,
            user_results=len(recipes.results),
            stepped=ran.stepped,
            gradients=list(self._gradients()),
            dropped_gradients=sorted(self._dropped),
            states=list(self._states()),
            attributes=self.attributes(attributes),
            placed=[self._placed(each) for each in ran.placed],
            settings=[
                SettingResult(
                    index,
                    group,
                    key,
                    recipes.of_nest(value)
                    if type(value) is tuple
                    else recipes.of(value, "a count"),
                )
                for index, group, key, value in counted
            ],
            containers=[self._given(change) for change in ran.given],
            flags=dict(self._flags()),
            flags_of_parameters=dict(self._flags_of_parameters()),
        )

    def attributes(self, changes: Iterable[AttributeChange]) -> list[AttributeResult]:
        """The recipes of attributes that the step has set."""
        return [
            AttributeResult(each.table, each.key, self.recipes.of_attribute(each))
            for each in changes
        ]

    def _placed(self, placed: PlacedResult) -> PlacedResult:
        with located(placed.line):
            return replace(placed, recipe=self.recipes.of_nest(placed.recipe))

    def _given(self, change: ContainerChange) -> ContainerChange:
        """A container change with recipes for its new items."""
        items = tuple((key, self.recipes.of_nest(value)) for key, value in change.items)
        return replace(change, items=items)

    def _flags_of_parameters(self) -> Iterator[tuple[int, bool]]:
        """The changed `requires_grad` flags of module tensors, by number."""
        for index, entry in enumerate(self.inputs.module_tensors):
            stand_in = self.traced.by_id[id(entry.tensor)]
            check_history(entry.fqn, entry.tensor, stand_in)
            if stand_in.requires_grad == entry.tensor.requires_grad or is_computed(entry.tensor):
                continue
            if not stand_in.is_leaf or _compat.rank_among_several() is not None:
                raise CaptureError(
                    f"it changes requires_grad of {entry.fqn}",
                    hint="call requires_grad_() outside the step",
                )
            yield index, stand_in.requires_grad

    def _flags(self) -> Iterator[tuple[int, bool]]:
        """The changed `requires_grad` flags of arguments, by position."""
        for position in self.inputs.user:
            leaf = self._leaves[position]
            stand_in = self.traced.by_id[id(leaf)]
            check_history(f"argument {self.inputs.names[position]}", leaf, stand_in)
            if stand_in.is_leaf and stand_in.requires_grad != leaf.requires_grad:
                yield position, stand_in.requires_grad

    def _gradients(self) -> Iterator[GradientResult]:
        entry_gradients = {id(g.owner): g for g in self.inputs.gradients}
        for index, entry in enumerate(self.inputs.module_tensors):
            stand_in = self.traced.by_id[id(entry.tensor)]
            gradient = stand_in.grad if has_gradient(stand_in) else None
            existed = id(entry) in entry_gradients
            undone = index in self._dropped and bool(self.inputs.answers)
            if gradient is None and not (existed or undone):
                continue
            if existed and gradient is self.traced.gradients[id(entry)]:
                continue
            yield GradientResult(index, None, self.recipes.of(gradient, "a gradient"))
        for position in self.inputs.user:
            leaf = self._leaves[position]
            stand_in = self.traced.by_id[id(leaf)]
            gradient = stand_in.grad if has_gradient(stand_in) else None
            before = self.traced.by_id.get(id(leaf.grad)) if has_gradient(leaf) else None
            if gradient is not before:
                yield GradientResult(None, position, self.recipes.of(gradient, "a gradient"))

    def _dropped_gradients(self) -> Iterator[int]:
        """The module tensors that have no gradient, and whose gradient the step would drop."""
        known = {id(gradient.owner) for gradient in self.inputs.gradients}
        for index, entry in enumerate(self.inputs.module_tensors):
            trained = id(entry) not in known and entry.tensor.requires_grad
            if trained and self._first.drops(self.traced.by_id[id(entry.tensor)]):
                yield index

    def _states(self) -> Iterator[StateResult]:
        owners = {
            id(self.traced.by_id[id(entry.tensor)]): (index, entry)
            for index, entry in enumerate(self.inputs.module_tensors)
        }
        for number, optimizer in distinct_states(self._optimizers):
            for stands_at, value in optimizer.state.items():
                owner = self._state_owner(stands_at, value, owners)
                before = self.traced.states[number].get(traced_key(stands_at), {})
                entries = entries_at(value)
                if before.keys() - entries.keys():
                    raise _drops_state()
                for key, entry in entries.items():
                    if key in before and same_nest(entry, before[key]):
                        continue
                    yield StateResult(number, owner, key, self._state_recipe(entry))
            if self.traced.states[number].keys() - set(map(traced_key, optimizer.state)):
                raise _drops_state()

    def _state_recipe(self, value: Any) -> Recipe:
        if is_plain(value) and not any(isinstance(v, SYMBOLIC) for v in _compat.tree_leaves(value)):
            return Constant(value)
        if is_nest(value):
            return self.recipes.of_nest(value)
        if isinstance(value, (list, tuple, dict)):
            raise CaptureError(
                f"its optimizer keeps a {type(value).__name__} in its state, which is neither a"
                " tensor nor a constant",
                hint="let it keep each tensor in an entry of its own",
            )
        return self.recipes.of(value, "optimizer state")

    def _state_owner(
        self, key: Any, value: Any, owners: dict[int, tuple[int, Any]]
    ) -> int | NonParameterKey:
        """The parameter that an entry of a traced optimizer's state belongs to."""
        if id(key) in owners:
            return owners[id(key)][0]
        if isinstance(key, torch.Tensor) or not is_known_kind(key, value):
            name = f"the key {key!r}" if is_plain(key) else f"a {type(key).__name__} as the key"
            raise CaptureError(
                f"its optimizer makes state that belongs to no parameter, with {name}, and is no"
                " tensor, number, or dictionary of these",
                hint="let it keep that in its parameter groups, or in the state of each parameter",
            )
        return NonParameterKey(key)


def _drops_state() -> CaptureError:
    return CaptureError(
        "its optimizer takes entries out of its state",
        hint="let it keep them, and give them other values",
    )
