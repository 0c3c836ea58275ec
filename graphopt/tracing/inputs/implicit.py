"""Implicit inputs of a step: modules, optimizers and tensors that it uses besides its arguments.

    step ──trace──▶ uses a tensor that is no input ──▶ whose is it?
                      of a module that the step has reached ──▶ the module becomes an input
                      it stands in a place that the step has read ──▶ the tensor becomes an input
                    steps an optimizer that is no input ──▶ the optimizer becomes an input

The trace that finds something goes on with a stand-in, to find the rest, and is then done anew
with what was found. How the step got there is guarded (`outside`): where another object stands
there later, the step is captured anew. Nothing is copied: a graph reads and writes the tensors
themselves.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from graphopt import _compat
from graphopt.errors import CaptureError
from graphopt.ir.source import SourceLine
from graphopt.ir.user_frames import current_location, current_user_line
from graphopt.tracing.bytecode.attributes import read_attribute
from graphopt.tracing.optimizers.new_state import NewState
from graphopt.tracing.outside.places import OutsidePlace
from graphopt.tracing.outside.record import OutsideRecord
from graphopt.tracing.tensors.classes import WITH_GRADIENTS, check_class, special_class
from graphopt.tracing.tensors.constants import constant_of, is_new
from graphopt.tracing.tensors.lost_history import marks_of, without_history

NamedModules = Sequence[tuple[str, nn.Module]]
"""Every distinct module that a step reaches, with its qualified name."""


class CarriedPlace(NamedTuple):
    """A place outside the step whose tensor or number may differ in each call.

    Attributes:
        path: how a message calls it.
        counted: the step itself changes the number, or the bool, text or None for whose value a
            graph holds.
    """

    path: str
    place: OutsidePlace
    counted: bool = False


@dataclass
class ImplicitInputs:
    """The objects and tensors outside the arguments that a graph works on, with their paths.

    Attributes:
        objects: modules and optimizers. Not kept alive.
        tensors: those that belong to none of them.
        counts: keys of parameter groups in which an optimizer counts.
        plain: numbers that the step does not change itself are no inputs of the graph, but
            constants.
        whole_objects: objects among the arguments are not taken apart.
        unfollowed: why it was refused with objects of each call, where there are none.
        as_traced: libraries that ask find out that they are traced (see `tracing_questions`), since
            the step is refused otherwise, for this reason.
        carried: places in which the step finds a tensor or a number, and leaves another one.
        made: attributes that the first call gives tensors, which are among `tensors`: of which
            object, name, tensor.
        rounds: how many traces have found some of all that.
        found_twice: places, by their identities, whose tensor it finds elsewhere as well.
        replaced: those of buffers that it replaces.
    """

    objects: list[tuple[str, weakref.ref[Any]]] = field(default_factory=list)
    tensors: list[tuple[str, torch.Tensor]] = field(default_factory=list)
    counts: frozenset[str] = frozenset()
    plain: bool = False
    whole_objects: bool = False
    unfollowed: CaptureError | None = None
    as_traced: str = ""
    carried: list[CarriedPlace] = field(default_factory=list)
    made: list[tuple[dict[str, Any], str, Any]] = field(default_factory=list)
    rounds: int = 0
    found_twice: frozenset[Hashable] = frozenset()
    replaced: frozenset[Hashable] = frozenset()

    def __bool__(self) -> bool:
        found = self.objects or self.tensors or self.counts or self.carried
        otherwise = self.plain or self.as_traced
        held = self.found_twice or self.replaced
        return bool(found or otherwise or self.whole_objects or held)

    def live(self) -> list[tuple[str, Any]] | None:
        """Returns the implicit inputs with their names; None if one of them has been freed."""
        found = [(name, reference()) for name, reference in self.objects]
        return None if any(value is None for _, value in found) else found

    def joined(self, other: ImplicitInputs) -> ImplicitInputs:
        """The union of both sets of implicit inputs."""
        return ImplicitInputs(
            [*self.objects, *other.objects],
            [*self.tensors, *other.tensors],
            self.counts | other.counts,
            self.plain or other.plain,
            self.whole_objects or other.whole_objects,
            self.unfollowed or other.unfollowed,
            self.as_traced or other.as_traced,
            [*self.carried, *other.carried],
            [*self.made, *other.made],
            self.rounds + other.rounds,
            self.found_twice | other.found_twice,
            self.replaced | other.replaced,
        )

    def present(self) -> AbstractContextManager[None]:
        """While active, attributes hold the tensors that the first call stores in them."""
        return NewState([], self.made).present()


NOTHING = ImplicitInputs()
"""What a call uses besides its arguments until something is found. Nobody changes it."""


@dataclass(frozen=True)
class EarlierInputs:
    """The implicit inputs of a step's earlier graphs.

    Attributes:
        objects, tensors: as of `ImplicitInputs`.
        related: sizes that depend on values were symbols of which answers are kept.
    """

    objects: Sequence[tuple[str, weakref.ref[Any]]] = ()
    tensors: Sequence[tuple[str, torch.Tensor]] = ()
    related: bool = False


class MoreInputs(Exception):
    """Raised if a trace finds inputs that it was not given, so that it must be repeated.

    Attributes:
        besides: what it has found.
        idle: what the call remembers, by id, that the trace has left alone.
    """

    def __init__(self, besides: ImplicitInputs) -> None:
        super().__init__("the step works on more than its inputs")
        self.besides = besides
        self.idle: frozenset[int] = frozenset()


class ImplicitInputFinder:
    """Finds the implicit inputs that one trace uses without having them as inputs.

    Args:
        record: what the step has read outside, and how.
        known: modules and optimizers that are inputs (by id).
        besides: whose places are inputs.
    """

    def __init__(
        self, record: OutsideRecord, known: set[int], mode: Any, besides: ImplicitInputs
    ) -> None:
        self._carried = list(besides.carried)
        self._record, self._known, self._mode = record, set(known), mode
        self._inputs = frozenset(known)
        self._stand_ins: dict[int, torch.Tensor] = {}
        self._made: list[torch.Tensor] = []
        self.found = ImplicitInputs()

    def stand_in(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """A stand-in for a tensor that is no input yet; None if no guarded path leads to it."""
        if id(tensor) not in self._stand_ins:
            if special_class(tensor) is not None:
                raise self.unknown(tensor)
            if not self._record.is_outside(tensor) and is_new(tensor):
                self._made.append(tensor)  # which keeps its identity
                self._stand_ins[id(tensor)] = constant_of(tensor)
            elif self._find(tensor):
                self._stand_ins[id(tensor)] = _compat.to_fake(self._mode, without_history(tensor))
            else:
                return None
        return self._stand_ins[id(tensor)]

    def _find(self, tensor: torch.Tensor) -> bool:
        owner = self._owners().get(id(tensor))
        # The tensors of modules that are inputs have stand-ins; others the step has put there.
        if owner is not None and id(owner[1]) not in self._inputs:
            self._add(*owner)
            return True
        optimizer = self._optimizer_over(tensor)
        if optimizer is not None:  # `zero_grad` comes first; the module is reached later
            self._add(*optimizer)
            return True
        path = self._record.path_to(tensor)
        if path is None:
            return False
        self.found.tensors.append((path, tensor))
        return True

    def stand_in_of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The existing stand-in of a tensor that is no input yet, or None."""
        return self._stand_ins.get(id(tensor))

    def carries(self, path: str, place: OutsidePlace, counted: bool = False) -> bool:
        """Records that the step replaces the tensor or number in a place.

        Args:
            counted: it is a number.

        Returns:
            Whether the place is no input yet.
        """
        known = [*self._carried, *self.found.carried]
        new = not any(
            each.place.identity == place.identity and each.counted == counted for each in known
        )
        if new:
            self.found.carried.append(CarriedPlace(path, place, counted))
        return new

    def leads_to(self, value: Any) -> bool:
        """True if the step reached an object by guarded reads."""
        return self._record.path_to(value) is not None

    def made(self, owner: Any, tensors: Mapping[str, torch.Tensor]) -> None:
        """Records that an object creates tensors in its attributes, to be inputs of a new trace."""
        path = self._record.path_to(owner)
        for name, tensor in tensors.items():
            self._stand_ins[id(tensor)] = _compat.to_fake(self._mode, tensor)
            self.found.tensors.append((f"{path}.{name}", tensor))
            self.found.made.append((vars(owner), name, tensor))

    def uses(self, owner: Any, attributes: Iterable[str], notes: str) -> None:
        """Records that unobserved code reads attributes of an object, and uses a dictionary in one
        as temporary storage; the graph is specialized on their values."""
        record, table = self._record, vars(owner)
        path, line = record.path(owner, ""), current_user_line() or SourceLine("", 0, "")
        for name in attributes:
            read_attribute(record, owner, name, f"{path}.{name}", line)
        record.read(OutsidePlace("length", table, notes), f"len({path}.{notes})", line)
        record.wrote(OutsidePlace("item", table, notes))
        record.emptied(table[notes])

    def unknown(self, tensor: torch.Tensor) -> CaptureError:
        """Builds the error for a tensor that has no stand-in.

        Raises:
            CaptureError: it is of another class than plain ones, or what one of those is made of.
        """
        for path, reached in list(self._tensors_reached()):
            check_class(path, reached)  # that, or what it is made of
        check_class("a tensor that the step uses", tensor)
        what = f"(shape {list(tensor.shape)}, {tensor.dtype})"
        if tensor.grad_fn is not None:
            reason = f"it uses a tensor {what} that was computed with gradients outside the step"
            hint = WITH_GRADIENTS
        elif self._record.is_outside(tensor):
            reason = (
                f"it uses a tensor from outside its arguments {what}, which would be baked in as a"
                " constant"
            )
            hint = (
                "pass it, or the module that owns it, as an argument of the step, or register it as"
                " a buffer of the model"
            )
        else:
            reason = (
                f"it makes a tensor {what} in a way that is not seen, such as torch.from_numpy or"
                " torch.frombuffer, which would be baked in as a constant"
            )
            hint = "torch.tensor(values) of numbers is seen; make others outside, and pass them"
        return CaptureError(reason, location=current_location(), hint=hint)

    def optimizer(self, optimizer: Optimizer) -> bool:
        """Records that the step steps an optimizer; returns True if the step has reached it."""
        path = self._record.path_to(optimizer)
        if path is None or self._record.is_made_here(optimizer):
            return False
        self._add(path, optimizer)
        return True

    def let_go(self) -> list[torch.Tensor]:
        """Removes and returns the tensors that the step has created unobserved."""
        made, self._made = self._made, []
        return made

    def count(self, key: str) -> None:
        """Records that an optimizer counts in a parameter-group entry."""
        self.found.counts |= {key}

    def owners_of(self, tensors: list[torch.Tensor]) -> None:
        """Makes modules inputs that own parameters found only through an optimizer."""
        owners = self._owners() if tensors else {}
        for tensor in tensors:
            if id(tensor) in owners:
                self._add(*owners[id(tensor)])

    def _add(self, path: str, value: Any) -> None:
        if id(value) not in self._known:
            self._known.add(id(value))
            self.found.objects.append((path, weakref.ref(value)))

    def _owners(self) -> dict[int, tuple[str, nn.Module]]:
        """Maps the id of each tensor to the outermost reached module that has it."""
        reached = [(path, module, list(module.modules())) for path, module in self._modules()]
        owners: dict[int, tuple[str, nn.Module]] = {}
        seen: set[int] = set()
        for path, module, modules in sorted(reached, key=lambda each: -len(each[2])):
            if id(module) in seen:
                continue  # within another one
            seen.update(map(id, modules))
            for tensor in tensors_of(modules):
                owners.setdefault(id(tensor), (path, module))
        return owners

    def _optimizer_over(self, tensor: torch.Tensor) -> tuple[str, Optimizer] | None:
        """A reached optimizer that updates a tensor and is no input yet."""
        for value, path in self._reached():
            if isinstance(value, Optimizer) and id(value) not in self._known:
                groups = value.param_groups
                if any(each is tensor for group in groups for each in group["params"]):
                    return path, value
        return None

    def _reached(self) -> Iterator[tuple[Any, str]]:
        """Yields the outside objects that the step reached and did not create."""
        for value, path in self._record.paths():
            if not self._record.is_made_here(value):
                yield value, path

    def _modules(self) -> Iterator[tuple[str, nn.Module]]:
        for value, path in self._reached():
            if isinstance(value, nn.Module):
                yield path, value

    def _tensors_reached(self) -> Iterator[tuple[str, torch.Tensor]]:
        for value, path in self._record.paths():
            if isinstance(value, torch.Tensor):
                yield path, value
            elif isinstance(value, Optimizer):
                of_groups = (each for group in value.param_groups for each in group["params"])
                yield from ((f"a parameter of {path}", each) for each in of_groups)
        for path, module in self._modules():
            for named in (module.named_parameters, module.named_buffers):
                yield from ((f"{path}.{name}", tensor) for name, tensor in named())


def tensors_of(modules: Iterable[nn.Module]) -> Iterator[torch.Tensor]:
    """Yields modules' parameters and buffers, and tensors in attributes of modules and tensors."""
    for module in modules:
        for table in (vars(module), _compat.own_parameters(module), _compat.own_buffers(module)):
            for each in filter(torch.is_tensor, list(table.values())):
                yield each
                yield from (mark for _, mark in marks_of(each))
