"""The inputs of a captured graph (tensors and numbers), in the order of its placeholders.

Every input knows how to find its live value again, so that a captured graph can be called with the
parameters, optimizer state and learning rate as they are now.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Set
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from graphopt import _compat
from graphopt._compat.tensor_classes import alias_of
from graphopt.host.decisions.assumptions import Answer
from graphopt.ir.placement import Placement
from graphopt.tracing.call import Call, SizesKept
from graphopt.tracing.effects.tuples import leaves_of
from graphopt.tracing.optimizers import optimizer_state
from graphopt.tracing.optimizers.optimizer_state import NonParameterKey
from graphopt.tracing.outside.places import OutsidePlace
from graphopt.tracing.scalars.expressions import Conditions
from graphopt.tracing.scalars.host_numbers import EXACT, is_of_numpy

Kind = Literal["parameter", "buffer", "optimizer_state", "gradient", "hyperparameter", "user_input"]


@dataclass(frozen=True)
class InputSpec:
    """The description of one placeholder of a captured graph.

    Attributes:
        kind: where the value lives between calls.
        fqn: qualified name, as in `state_dict` where there is one.
        placeholder: target of the placeholder node.
        placement: how the ranks hold it.
    """

    kind: Kind
    fqn: str
    placeholder: str
    placement: Placement = Placement.FULL


@dataclass
class ModuleTensor:
    """A parameter, buffer or plain tensor attribute of a module.

    Attributes:
        slots: every `(dictionary, key)` of a module that holds it; tied weights have several.
        rebindable: it is in one place, in which each call may find another tensor: a plain
            attribute, or a buffer that the step replaces.
        bare: it belongs to no module.
    """

    kind: Kind
    fqn: str
    tensor: torch.Tensor
    slots: list[tuple[MutableMapping[str, Any], str]]
    rebindable: bool = False
    bare: bool = False

    def is_in(self, tables: Set[int]) -> bool:
        """True if one of the dictionaries (given by id) holds the tensor."""
        return any(id(table) in tables for table, _ in self.slots)

    @property
    def members(self) -> list[ModuleTensor]:
        """The tensor alone; see `Storage`."""
        return [self]

    def live(self) -> torch.Tensor:
        """The current tensor: a plain attribute may hold another one of the same kind."""
        if not self.rebindable:
            return self.tensor
        owner, key = self.slots[0]
        found: torch.Tensor = owner[key]
        return found


@dataclass
class Storage:
    """An input for a storage that several module tensors share as views."""

    kind: Kind
    fqn: str
    members: list[ModuleTensor]

    def live(self) -> torch.Tensor:
        """The whole storage as a 1-D tensor of the members' dtype."""
        first = alias_of(self.members[0].live())
        storage = first.untyped_storage()
        length = storage.nbytes() // first.element_size()
        return first.new_empty(0).set_(storage, 0, (length,), (1,))


@dataclass(frozen=True)
class _StateEntry:
    """A value in `optimizers[optimizer].state`, under a parameter or another key."""

    optimizer: int
    parameter: ModuleTensor | NonParameterKey
    key: str
    fqn: str

    def read(self, call: Call) -> Any:
        """The current value of the state entry, or None."""
        state = call.leaves[call.optimizers[self.optimizer]].state
        return optimizer_state.read(state, state_key(self.parameter), self.key)


class StateTensor(_StateEntry):
    """An optimizer state entry that is a tensor."""


class StateNumber(_StateEntry):
    """An optimizer state entry that is a Python number."""


def state_key(owner: ModuleTensor | NonParameterKey) -> Any:
    """Returns the key of a parameter's entries in an optimizer's state."""
    return owner.tensor if isinstance(owner, ModuleTensor) else owner.key


@dataclass(frozen=True)
class GradientInput:
    """The `.grad` that a parameter has when the step begins."""

    owner: ModuleTensor
    fqn: str


@dataclass(frozen=True)
class Hyperparameter:
    """A number in `optimizers[optimizer].param_groups[group][key]`, or one element of a tuple
    there; a user may give a tensor instead."""

    optimizer: int
    group: int
    key: str
    element: int | None
    fqn: str

    def read(self, call: Call) -> Any:
        value = call.leaves[call.optimizers[self.optimizer]].param_groups[self.group][self.key]
        return value if self.element is None else value[self.element]


@dataclass(frozen=True)
class ArgumentNumber:
    """A Python number among the arguments, at a position of `call.leaves`."""

    position: int
    fqn: str

    def read(self, call: Call) -> Any:
        return call.leaves[self.position]


@dataclass(frozen=True)
class PlacedNumber:
    """A Python number outside the arguments (attribute, item, variable) that differs between calls.

    Attributes:
        counted: the step itself changes it.
        element: which number of a tuple or a list that is there, and how it is nested.
        apart: lists that the step changes in place, none of which it may be.
    """

    place: OutsidePlace
    fqn: str
    counted: bool = False
    element: tuple[int, Any] | None = None
    apart: tuple[Any, ...] = field(default=(), compare=False)

    def read(self, call: Call) -> Any:
        """The number's current value; None if the place holds another tuple than captured."""
        value = self.place.now()
        if self.element is None:
            return value
        position, spec = self.element
        found = leaves_of(value, is_exact)
        if found is None or found[1] != spec or any(other is value for other in self.apart):
            return None
        return found[0][position]


Number = Hyperparameter | StateNumber | ArgumentNumber | PlacedNumber


@dataclass
class Inputs:
    """All inputs of one call, in the order of the captured dialect.

    Attributes:
        names: of `user`, and of `argument_gradients`.
        conditions: what has to be so of `hyperparameters`.
        answers: to the decisions by value that the step takes, in their order, as far as known.
        guessed: the position of the last answer that may be taken back, if one may.
        sizes: what is made of sizes that depend on values.
        meets_sizes: a trace has met such a size.
        asked: a library has asked whether it is traced; see `tracing_questions`.
        rebound: `module_tensors` that get other storage in each call; see `rebinding`.
        aliases: entries of optimizer state that are the memory of a module tensor, as `rebinding`
            leaves them; no inputs of their own.
        held: names of what others may use without being seen (`graphopt.runtime.late.tensors`);
            none where that is so of all parameters, as while a variable holds a checkpoint.
        argument_gradients: positions of arguments that have a `.grad` when the step begins.
        unread: which of `hyperparameters` nothing depends on.
    """

    module_tensors: list[ModuleTensor]
    placeholders: list[ModuleTensor | Storage]
    states: list[StateTensor]
    gradients: list[GradientInput]
    hyperparameters: list[Number]
    user: list[int]
    names: Mapping[int, str] = field(default_factory=dict)
    held: frozenset[str] = frozenset()
    conditions: Conditions = field(default_factory=Conditions)
    rebound: list[int] = field(default_factory=list)
    aliases: list[tuple[StateTensor, ModuleTensor]] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    guessed: int | None = None
    sizes: SizesKept = SizesKept.UNKNOWN
    meets_sizes: bool = False
    asked: bool = False
    argument_gradients: list[int] = field(default_factory=list)
    unread: frozenset[int] = frozenset()

    @property
    def parameters(self) -> list[ModuleTensor]:
        """The module tensors that are parameters."""
        return [entry for entry in self.module_tensors if entry.kind == "parameter"]

    def kinds_and_names(self) -> Iterator[tuple[Kind, str]]:
        """`(kind, qualified name)` per placeholder."""
        for holder in self.placeholders:
            yield holder.kind, holder.fqn
        for state in self.states:
            yield "optimizer_state", state.fqn
        for gradient in self.gradients:
            yield "gradient", gradient.fqn
        for position in self.argument_gradients:
            yield "gradient", f"{self.names[position]}.grad"
        for number in self.hyperparameters:
            yield "hyperparameter", number.fqn
        for position in self.user:
            yield "user_input", self.names[position]

    @property
    def first_number(self) -> int:
        """The position of the first hyperparameter's placeholder."""
        first = len(self.placeholders) + len(self.states) + len(self.gradients)
        return first + len(self.argument_gradients)

    def numbers(self, call: Call) -> dict[int, float]:
        """The hyperparameters that are Python numbers, by placeholder position."""
        values = (number.read(call) for number in self.hyperparameters)
        found = enumerate(values, self.first_number)
        return {position: float(v) for position, v in found if isinstance(v, (int, float))}

    def live_values(self, call: Call) -> list[torch.Tensor]:
        """The current tensors of modules and optimizers, to call the graph with."""
        values = [
            holder.live() if isinstance(holder, Storage) else holder.tensor
            for holder in self.placeholders
        ]
        values += [state.read(call) for state in self.states]
        for gradient in self.gradients:
            assert gradient.owner.tensor.grad is not None
            values.append(gradient.owner.tensor.grad)
        values += [call.leaves[position].grad for position in self.argument_gradients]
        numbers = [number.read(call) for number in self.hyperparameters]
        values += map(as_tensor, numbers)
        values += [call.leaves[position] for position in self.user]
        return values


def is_alias(value: object, owner: ModuleTensor) -> bool:
    """True if a value is a tensor with the memory and layout of a module tensor."""
    if not isinstance(value, torch.Tensor):
        return False
    layouts = [
        (_compat.storage_key(t), t.storage_offset(), t.shape, t.stride(), t.dtype, t.requires_grad)
        for t in (value, alias_of(owner.tensor))
    ]
    return layouts[0] == layouts[1]


def is_exact(value: object) -> bool:
    """True for a Python number that float64 holds exactly, so that it may be an input."""
    return type(value) is float or (type(value) is int and abs(value) < EXACT)


def may_be_input(value: object) -> bool:
    """True for an exact Python number or a 64-bit numpy number."""
    return is_exact(value) or is_of_numpy(value)


def as_tensor(number: Any) -> torch.Tensor:
    """A hyperparameter as a graph input: 0-dim float64 on the CPU, or the user's own tensor."""
    if isinstance(number, torch.Tensor):
        return number
    return torch.tensor(number, dtype=torch.float64, device="cpu")


def is_switch(value: object) -> bool:
    """True for a non-numeric setting of an optimizer, such as `nesterov`, on which graphs
    specialize."""
    return value is None or type(value) is bool


def is_number(value: object) -> bool:
    """True for a Python number other than a bool."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)
