"""Sorts what a traced step has left behind by where it belongs: the step's `Signature`."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn

from graphopt import _compat
from graphopt.errors import CaptureError
from graphopt.tracing.call import Call, has_gradient
from graphopt.tracing.changed import Changed
from graphopt.tracing.draws.arguments import is_known
from graphopt.tracing.draws.live import as_later as later_of
from graphopt.tracing.draws.picked import StoredItem
from graphopt.tracing.draws.rows import Row
from graphopt.tracing.failures import definition_of
from graphopt.tracing.given import ContainerChange
from graphopt.tracing.guard_values import is_plain
from graphopt.tracing.host_numbers import is_host_number
from graphopt.tracing.inputs import Inputs, is_exact, is_number
from graphopt.tracing.later import Later, as_later, holds_later, is_later, nest_of, refuse_shared
from graphopt.tracing.marks import AttributeChange
from graphopt.tracing.numbers import SYMBOLIC
from graphopt.tracing.obtained import ObtainedValues
from graphopt.tracing.optimizer_state import (
    OfNone,
    distinct_states,
    entries_at,
    is_known_kind,
    is_nest,
    same_nest,
)
from graphopt.tracing.outside.places import is_value
from graphopt.tracing.placed import Placed
from graphopt.tracing.replacing import Replacing
from graphopt.tracing.scheduled import ScheduledSetting
from graphopt.tracing.signature import (
    AttributeResult,
    ChangedResult,
    Computed,
    Constant,
    ContainerResult,
    GradientResult,
    Live,
    Nested,
    PlacedResult,
    Recipe,
    Scheduled,
    SelectedResult,
    SettingResult,
    Signature,
    StateResult,
    View,
)
from graphopt.tracing.substitute import Traced, traced_key

_OF_OPTIMIZERS = frozenset({"state", "param_groups", "step"})
"""Attributes of optimizers that the trace itself replaces."""

_TABLES = "registered names"


class Ran(NamedTuple):
    """What a traced step has done.

    Attributes:
        returned, spec: what it returned, the leaves and how they are nested.
        stepped: the optimizers that it stepped.
        placed: what it has left outside its arguments.
        changed: how it has changed lists, queues and sets there.
        rows: lists there that numbers of the call select.
        given: what it has changed in lists and dictionaries among its arguments.
    """

    returned: list[Any]
    spec: Any
    stepped: list[int]
    placed: list[Placed]
    changed: list[Changed]
    rows: list[Row | StoredItem]
    given: list[ContainerChange]


class ResultCollector:
    """Collects, at the end of a traced step, everything it leaves behind.

    Attributes:
        results: traced values that the graph has to return, in order.
        numbers: those of them that are numbers (by id).
    """

    def __init__(
        self,
        call: Call,
        inputs: Inputs,
        traced: Traced,
        flat: Sequence[torch.Tensor],
        made: ObtainedValues,
        left_storages: Collection[int],
    ) -> None:
        self.call, self.inputs, self.traced, self.made = call, inputs, traced, made
        self._left_storages = left_storages
        self.results: list[Any] = []
        self.numbers: set[int] = set()
        self._live: dict[int, Live] = {id(tensor): Live(None, i) for i, tensor in enumerate(flat)}
        self._storages: dict[int, Live] = {
            _compat.storage_key(tensor): Live(None, i)
            for i, tensor in enumerate(flat)
            if tensor.numel()
        }
        self._offsets = {Live(None, i): int(t.storage_offset()) for i, t in enumerate(flat)}
        for index, entry in enumerate(inputs.module_tensors):
            stand_in = traced.by_id[id(entry.tensor)]
            self._live[id(stand_in)] = self._live[id(entry.tensor)] = Live(index, None)

    def recipe(self, value: Any, what: Callable[[], str]) -> Recipe:
        if isinstance(value, ScheduledSetting):
            return Scheduled(value.read_later())
        if is_later(value):
            return self._computed_later(as_later(value))
        if isinstance(value, torch.Tensor):
            return self._tensor_recipe(value)
        if isinstance(value, SYMBOLIC):
            self.numbers.add(id(value))
        value = self.made.calls.as_scalar(value)
        if isinstance(value, SYMBOLIC):
            self.results.append(value)
            self.numbers.add(id(value))
            return Computed(len(self.results) - 1)
        if value is None or isinstance(value, (int, float, str, bool, complex, bytes)):
            return Constant(value)
        if type(value).__module__ == "numpy" and is_value(value):  # a number, of one type of many
            return Constant(value)
        if is_known(value):
            return self._computed_later(later_of(self.made.calls, value))
        raise CaptureError(
            f"{what()} is a {type(value).__name__}, neither a tensor nor a constant",
            hint="return tensors, numbers, strings, None or containers of them;"
            " register other containers with torch.utils._pytree.register_pytree_node",
        )

    def _tensor_recipe(self, tensor: torch.Tensor) -> Recipe:
        live = self._live.get(id(tensor))
        if live is not None:
            return live
        if _compat.storage_key(tensor) in self._left_storages:
            raise CaptureError(
                "it keeps what a parameter was before `.data = …`",
                location=str(self.made.line_of(tensor) or definition_of(self.call)),
                hint="keep a copy: tensor.clone()",
            )
        base = self._storages.get(_compat.storage_key(tensor)) if tensor.numel() else None
        if base is not None:
            offset = int(tensor.storage_offset()) - self._offsets[base]
            return View(base, tuple(tensor.shape), tensor.stride(), offset)
        self.results.append(tensor)
        return Computed(len(self.results) - 1)

    def left(self, rebound: Mapping[int, torch.Tensor]) -> dict[int, Computed | None]:
        """The results that are found in the storage that tensors had, by their positions."""
        return {**self.computed(rebound)}

    def computed(self, tensors: Mapping[int, torch.Tensor]) -> dict[int, Computed]:
        """Further results of the graph, by what they are known by."""
        found: dict[int, Computed] = {}
        for key, tensor in sorted(tensors.items()):
            self.results.append(tensor)
            found[key] = Computed(len(self.results) - 1)
        return found

    def collect(
        self,
        ran: Ran,
        before: dict[int, dict[str, Any]],
        holders: Sequence[tuple[str, dict[str, Any], dict[str, Any]]],
        counted: Sequence[tuple[int, int, str, Any]],
    ) -> Signature:
        """Build the signature.

        Args:
            before: `vars(module)` by module id, as the step found them.
            holders: name, attributes and former attributes of optimizers and other objects.
        """
        outputs = [self.recipe(leaf, lambda: "what the step returns") for leaf in ran.returned]
        return Signature(
            output_spec=ran.spec,
            outputs=outputs,
            user_results=len(self.results),
            stepped=ran.stepped,
            gradients=self._gradients(),
            states=self._states(),
            attributes=[
                *self._attributes(before),
                *self._attributes_of_others(holders),
            ],
            placed=[
                PlacedResult(each.place, self._nest(each.value), each.within) for each in ran.placed
            ],
            changed=[
                ChangedResult(
                    each.container,
                    tuple((change, self._nest(value)) for change, value in each.changes),
                    each.within,
                )
                for each in ran.changed
            ],
            selected=[
                SelectedResult(row.container, self._nest(row.key), position, self._nest(value))
                for row in ran.rows
                for position, value in row.written.items()
            ],
            settings=[
                SettingResult(index, group, key, self.recipe(value, lambda: "a count"))
                for index, group, key, value in counted
            ],
            containers=[ContainerResult(self._made(change)) for change in ran.given],
            flags=dict(self._flags()),
            flags_of_parameters=dict(self._flags_of_parameters()),
        )

    def _flags_of_parameters(self) -> Iterator[tuple[int, bool]]:
        """Module tensors whose `requires_grad` the step has changed, by their number."""
        for index, entry in enumerate(self.inputs.module_tensors):
            stand_in = self.traced.by_id[id(entry.tensor)]
            if stand_in.requires_grad == entry.tensor.requires_grad:
                continue
            if not stand_in.is_leaf or _compat.rank_among_several() is not None:
                raise CaptureError(
                    f"it changes requires_grad of {entry.fqn}",
                    hint="call requires_grad_() outside the step",
                )
            yield index, stand_in.requires_grad

    def _flags(self) -> Iterator[tuple[int, bool]]:
        """Arguments whose `requires_grad` the step has changed, by position."""
        for position in self.inputs.user:
            leaf = self.call.leaves[position]
            stand_in = self.traced.by_id[id(leaf)]
            if stand_in.is_leaf and stand_in.requires_grad != leaf.requires_grad:
                yield position, stand_in.requires_grad

    def _made(self, change: ContainerChange) -> ContainerChange:
        """A change with recipes for what it puts into the container."""
        items = tuple((key, self._nest(value)) for key, value in change.items)
        return replace(change, items=items)

    def _gradients(self) -> list[GradientResult]:
        found = []
        entry_gradients = {id(g.owner): g for g in self.inputs.gradients}
        for index, entry in enumerate(self.inputs.module_tensors):
            stand_in = self.traced.by_id[id(entry.tensor)]
            gradient = stand_in.grad
            existed = id(entry) in entry_gradients
            if gradient is None and not existed:
                continue
            if existed and gradient is self.traced.gradients[id(entry)]:
                continue
            recipe = self.recipe(gradient, lambda: "a gradient")
            found.append(GradientResult(index, None, recipe))
        for position in self.inputs.user:
            leaf = self.call.leaves[position]
            gradient = self.traced.by_id[id(leaf)].grad
            before = self.traced.by_id.get(id(leaf.grad)) if has_gradient(leaf) else None
            if gradient is not before:
                recipe = self.recipe(gradient, lambda: "a gradient")
                found.append(GradientResult(None, position, recipe))
        return found

    def _states(self) -> list[StateResult]:
        found = []
        owners = {
            id(self.traced.by_id[id(entry.tensor)]): (index, entry)
            for index, entry in enumerate(self.inputs.module_tensors)
        }
        for number, optimizer in distinct_states(self.call.optimizer_objects()):
            for stands_at, value in optimizer.state.items():
                owner = self._state_owner(stands_at, value, owners)
                before = self.traced.states[number].get(traced_key(stands_at), {})
                entries = entries_at(value)
                if before.keys() - entries.keys():
                    raise _drops_state()
                for key, entry in entries.items():
                    if key in before and same_nest(entry, before[key]):
                        continue
                    found.append(StateResult(number, owner, key, self._state_recipe(entry)))
            if self.traced.states[number].keys() - set(map(traced_key, optimizer.state)):
                raise _drops_state()
        return found

    def _state_recipe(self, value: Any) -> Recipe:
        if is_plain(value) and not any(isinstance(v, SYMBOLIC) for v in _compat.tree_leaves(value)):
            return Constant(value)
        if is_nest(value):
            return self._nest(value)
        if isinstance(value, (list, tuple, dict)):
            raise CaptureError(
                f"its optimizer keeps a {type(value).__name__} in its state, which is neither a"
                " tensor nor a constant",
                hint="let it keep each tensor in an entry of its own",
            )
        return self.recipe(value, lambda: "optimizer state")

    def _state_owner(
        self, key: Any, value: Any, owners: dict[int, tuple[int, Any]]
    ) -> int | OfNone:
        """Whose state stands at a key of a traced optimizer's."""
        if id(key) in owners:
            return owners[id(key)][0]
        if isinstance(key, torch.Tensor) or not is_known_kind(key, value):
            name = f"the key {key!r}" if is_plain(key) else f"a {type(key).__name__} as the key"
            raise CaptureError(
                f"its optimizer makes state that belongs to no parameter, with {name}, and is no"
                " tensor, number, or dictionary of these",
                hint="let it keep that in its parameter groups, or in the state of each parameter",
            )
        return OfNone(key)

    def _attributes(self, before: dict[int, dict[str, Any]]) -> list[AttributeResult]:
        found = []
        for name, module in self.call.named_submodules():
            former = before[id(module)]
            if former[_TABLES] != table_names(module):
                raise CaptureError(
                    f"it registers or removes parameters, buffers or submodules of"
                    f" {name or 'the model'}",
                    hint="do that outside the step",
                )
            for key, value in vars(module).items():
                if key in former and self._same_attribute(former[key], value):
                    continue
                recipe = self._attribute_recipe(f"{name}.{key}".strip("."), former.get(key), value)
                found.append(AttributeResult(vars(module), key, recipe))
        return found

    def attributes_set(self, changes: Iterable[AttributeChange]) -> list[AttributeResult]:
        """Attributes that have been set, as recipes."""
        return [
            AttributeResult(each.table, each.key, self._attribute_recipe(*each.described))
            for each in changes
        ]

    def _attributes_of_others(
        self, holders: Sequence[tuple[str, dict[str, Any], dict[str, Any]]]
    ) -> Iterator[AttributeResult]:
        for name, attributes, former in holders:
            for key, value in attributes.items():
                if key in _OF_OPTIMIZERS and "param_groups" in attributes:
                    continue
                if key not in former or not self._same_attribute(former[key], value):
                    recipe = self._attribute_recipe(f"{name}.{key}", former.get(key), value)
                    yield AttributeResult(attributes, key, recipe)

    def _same_attribute(self, before: Any, after: Any) -> bool:
        """Whether an attribute is as it was, or holds stand-ins of what it held (as an RNN's list
        of flat weights does)."""
        if after is before:
            return True
        if not isinstance(after, (list, tuple)) or not isinstance(before, (list, tuple)):
            return False
        return len(after) == len(before) and all(
            new is old or self.traced.by_id.get(id(_referent(old))) is _referent(new)
            for old, new in zip(before, after, strict=True)
        )

    def _attribute_recipe(self, name: str, before: Any, after: Any) -> Recipe:
        _refuse_counter(name, before, after)
        if isinstance(after, torch.Tensor):
            return self._tensor_recipe(after)
        leaves, spec = _compat.tree_flatten(after)
        numbers = (ScheduledSetting, *SYMBOLIC)
        if any(isinstance(leaf, numbers) or is_later(leaf) for leaf in leaves):
            return self._nest(after)
        if not any(isinstance(leaf, torch.Tensor) for leaf in leaves):
            return Constant(after)
        real = [self._real(leaf) for leaf in leaves]
        if not any(leaf is None for leaf in real):
            return Constant(_compat.tree_unflatten(real, spec))
        return self._nest(after)

    def _nest(self, value: Any) -> Recipe:
        """How every call makes a value, its containers anew."""
        if isinstance(value, Constant):
            return value
        if is_value(value) and not holds_later(value):
            return Constant(value)
        leaves, spec = _compat.tree_flatten(value)
        recipes = tuple(map(self._leaf, leaves))
        return recipes[0] if spec == _compat.ONE_VALUE else Nested(spec, recipes)

    def _leaf(self, leaf: Any) -> Recipe:
        """How every call makes what is in a nest."""
        traced = (torch.Tensor, *SYMBOLIC, ScheduledSetting)
        if isinstance(leaf, traced) or is_known(leaf) or is_later(leaf):
            return self.recipe(leaf, lambda: "what it leaves outside its arguments")
        return leaf if isinstance(leaf, Constant) else Constant(leaf)

    def _computed_later(self, value: Later) -> Recipe:
        """How every call makes a value that only Python computes."""
        refuse_shared(value)
        leaves, spec = _compat.tree_flatten(nest_of(value))
        return Nested(spec, tuple(map(self._leaf, leaves)))

    def _real(self, leaf: Any) -> Any:
        """What stands in a container for a leaf: the model's own tensor for its stand-in; None for
        a tensor that the step has computed."""
        if not isinstance(leaf, torch.Tensor):
            return leaf
        live = self._live.get(id(leaf))
        if live is None or live.module_tensor is None:
            return None
        return self.inputs.module_tensors[live.module_tensor].tensor


def _drops_state() -> CaptureError:
    return CaptureError(
        "its optimizer takes entries out of its state",
        hint="let it keep them, and give them other values",
    )


def _referent(value: Any) -> Any:
    return value() if isinstance(value, weakref.ref) else value


def plain_objects(call: Call) -> Iterator[tuple[str, dict[str, Any]]]:
    """Name and attributes of the optimizers and other objects among the arguments."""
    for position in (*call.optimizers, *call.constants):
        attributes = getattr(call.leaves[position], "__dict__", None)
        if isinstance(attributes, dict):
            yield call.names[position], attributes


def _refuse_counter(name: str, before: Any, after: Any) -> None:
    """Refuse a count that no input of a graph holds. Others are found by `note_counted`."""
    if not is_number(before) or is_exact(before) or is_host_number(before):
        return
    if is_number(after) and before != after:
        raise CaptureError(
            f"it counts in the Python attribute {name} ({before!r} became {after!r}), a"
            f" {type(before).__name__} that is no input of a graph",
            hint="count in an int below 2**53 or a float, or keep the count in a tensor: in a"
            " buffer of the model (register_buffer), or in the optimizer's state",
        )


def finish_buffers(inputs: Inputs, traced: Traced, replacing: Replacing) -> None:
    """Turn assignments `self.buffer = new` made by the step into updates of the buffer, and those
    of parameters into updates of the parameter."""
    for entry in inputs.module_tensors:
        stand_in = traced.by_id[id(entry.tensor)]
        values = [owner.get(key) for owner, key in entry.slots]
        if any(value is not values[0] for value in values) and entry.kind != "parameter":
            raise CaptureError(
                f"it replaces {entry.fqn} in one of the places where it stands, and not in others",
                hint="update it in place (copy_), or give each place a tensor of its own (clone())",
            )
        for (owner, key), value in zip(entry.slots, values, strict=True):
            if value is stand_in or entry.rebindable:
                continue
            if entry.kind == "parameter":
                replacing.update(entry, stand_in, value)
                owner[key] = stand_in
                continue
            same = (
                isinstance(value, torch.Tensor)
                and value.shape == stand_in.shape
                and value.dtype == stand_in.dtype
                and value.device == stand_in.device
            )
            if not same or value is None:
                raise CaptureError(
                    f"it replaces {entry.fqn} by another object",
                    hint="update it in place (copy_), with the same shape and dtype",
                )
            with torch.no_grad():
                stand_in.copy_(value)
            owner[key] = stand_in


def module_attributes(call: Call) -> dict[int, dict[str, Any]]:
    """Attributes of all modules and the names of what is registered, to compare with later."""
    return {
        id(module): {**vars(module), _TABLES: table_names(module)}
        for _, module in call.named_submodules()
    }


def table_names(module: nn.Module) -> tuple[list[str], ...]:
    """Names of the registered parameters, buffers and submodules."""
    return tuple(map(list, _compat.own_tables(module)))
