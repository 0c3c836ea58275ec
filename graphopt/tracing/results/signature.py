"""The signature of a captured graph: which result is returned, new state, gradient or attribute."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import getitem
from typing import Any

import torch

from graphopt import _compat
from graphopt.tracing.effects.argument_changes import ContainerChange
from graphopt.tracing.inputs.entries import ModuleTensor
from graphopt.tracing.optimizers.optimizer_state import NonParameterKey
from graphopt.tracing.outside.places import OutsidePlace
from graphopt.tracing.rollback.nests import Path


@dataclass(frozen=True)
class Computed:
    """A recipe for the graph's result number `index`.

    Attributes:
        has_history: true if it is a tensor that has an autograd history in eager code.
    """

    index: int
    has_history: bool = False


@dataclass(frozen=True)
class Live:
    """A recipe for an input's real tensor, which the step returned itself and not as a copy.

    `module_tensor` numbers `Inputs.module_tensors`; `placeholder` numbers all placeholders.
    """

    module_tensor: int | None
    placeholder: int | None


@dataclass(frozen=True)
class View:
    """A recipe for a view of an input's storage.

    Attributes:
        offset: the offset in bytes, from the input's own.
        dtype: the dtype that its elements are read as.
        flags: two flags: whether the elements are read conjugated, and negated.
    """

    of: Live
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    flags: tuple[bool, bool]

    def made(self, base: torch.Tensor) -> torch.Tensor:
        """Makes the view from the input."""
        offset = (base.storage_offset() * base.element_size() + self.offset) // self.dtype.itemsize
        if base.dtype == self.dtype:
            view = torch.as_strided(base, self.size, self.stride, offset)
        else:
            view = torch.empty(0, dtype=self.dtype, device=base.device)
            view.set_(base.untyped_storage(), offset, self.size, self.stride)
        return _compat.read_as(view, *self.flags)


@dataclass(frozen=True)
class Constant:
    """A recipe for a Python value that is the same in every call of this graph."""

    value: Any


@dataclass(frozen=True)
class Nested:
    """A recipe for a container that each call creates again, such as an LSTM's pair of states. All
    uses of the same recipe get one object.

    Attributes:
        spec: its structure, a pytree's.
        leaves: the recipes of its leaves.
    """

    spec: Any
    leaves: tuple[Recipe, ...]


@dataclass(frozen=True)
class FromCall:
    """A recipe for a list, dictionary or object among the arguments of each call; see
    `found_in`."""

    path: Path


@dataclass(frozen=True)
class FromPlace:
    """A recipe for a list or tuple of tensors that each call finds in a place.

    Attributes:
        path: its position in what stands there.
    """

    place: OutsidePlace
    path: tuple[Any, ...]

    def now(self) -> Any:
        """What is there."""
        return reduce(getitem, self.path, self.place.now())


Recipe = Computed | Live | View | Constant | Nested | FromCall | FromPlace


def leaves_of(recipe: Recipe) -> Iterator[Recipe]:
    """The leaf recipes of a nested recipe; of another recipe itself."""
    if not isinstance(recipe, Nested):
        yield recipe
        return
    for leaf in recipe.leaves:
        yield from leaves_of(leaf)


@dataclass(frozen=True)
class GradientResult:
    """The `.grad` after the step of module tensor `owner` or of tensor argument `argument`."""

    owner: int | None
    argument: int | None
    recipe: Recipe


@dataclass(frozen=True)
class StateResult:
    """An optimizer state entry that the step created or replaced, of module tensor `owner` or of
    no parameter."""

    optimizer: int
    owner: int | NonParameterKey
    key: str
    recipe: Recipe

    def stands_at(self, tensors: Sequence[ModuleTensor]) -> Any:
        """The key in the optimizer's state: one of the module tensors, or another value."""
        return (
            self.owner.key
            if isinstance(self.owner, NonParameterKey)
            else tensors[self.owner].tensor
        )


@dataclass(frozen=True)
class SettingResult:
    """A parameter group's setting that the step has changed."""

    optimizer: int
    group: int
    key: str
    recipe: Recipe


@dataclass(frozen=True)
class AttributeResult:
    """An attribute of an object, or an item of a dictionary, that the step set."""

    attributes: dict[str, Any]
    name: str
    recipe: Recipe

    @property
    def place(self) -> OutsidePlace:
        """The place in which the step stores the value."""
        return OutsidePlace("item", self.attributes, self.name)


@dataclass(frozen=True)
class PlacedResult:
    """A value that the step has stored in a place outside its arguments.

    Attributes:
        behind: of a key that is new, those that come behind it in the dictionary.
        line: which has put it there, as a message says it.
    """

    place: OutsidePlace
    recipe: Recipe
    behind: tuple[Any, ...] = ()
    line: str | None = field(default=None, compare=False)


@dataclass
class Signature:
    """The mapping from a graph's results to the effects of a step.

    Attributes:
        output_spec, outputs: pytree of the step's return value.
        gradients, states, attributes: values that live on between calls and are not updated in
            place; their results follow the user's in `results`.
        user_results: the number of the graph's results that belong to the return value.
        stepped: optimizers whose `step` ran.
        settings: the changed settings of parameter groups.
        containers: changes of dictionaries among the arguments, whose items are recipes.
        placed: the values that the step stores outside its arguments.
        rebound: module tensors that get other storage in each call, with what the step has written
            to the storage that they had, None where it has not; see `tensors.rebinding`.
        data: gradients and arguments that get other storage (`.data = …`), by their placeholder.
        flags: `requires_grad` of arguments that get another, by position.
        flags_of_parameters: `requires_grad` of module tensors that get another, by their number.
        dead_gradients: module tensors whose gradient is dropped before anyone reads it.
        dropped_gradients: module tensors whose gradient is no input, and dropped if there is one.
        keeps_casts: whether the step enters autocast; see `kept_casts`.
    """

    output_spec: Any
    outputs: list[Recipe]
    gradients: list[GradientResult]
    states: list[StateResult]
    attributes: list[AttributeResult]
    user_results: int
    stepped: list[int]
    dead_gradients: list[int] = field(default_factory=list)
    dropped_gradients: list[int] = field(default_factory=list)
    settings: list[SettingResult] = field(default_factory=list)
    containers: list[ContainerChange] = field(default_factory=list)
    placed: list[PlacedResult] = field(default_factory=list)
    rebound: dict[int, Computed | None] = field(default_factory=dict)
    data: dict[int, Computed] = field(default_factory=dict)
    flags: dict[int, bool] = field(default_factory=dict)
    flags_of_parameters: dict[int, bool] = field(default_factory=dict)
    keeps_casts: bool = False

    def recipes(self) -> Iterator[Recipe]:
        """The recipes of everything that the step returns or stores."""
        yield from self.outputs
        yield from (gradient.recipe for gradient in self.gradients)
        yield from (state.recipe for state in self.states)
        yield from (leaf for attribute in self.attributes for leaf in leaves_of(attribute.recipe))
        yield from (setting.recipe for setting in self.settings)
        yield from (leaf for each in self.placed for leaf in leaves_of(each.recipe))
        for container in self.containers:
            yield from (leaf for _, item in container.items for leaf in leaves_of(item))

    def numbers_inputs(self) -> bool:
        """True if a recipe refers to an input by its number among all placeholders."""
        live = (each.of if isinstance(each, View) else each for each in self.recipes())
        numbered = any(isinstance(each, Live) and each.placeholder is not None for each in live)
        return numbered or bool(self.data)
