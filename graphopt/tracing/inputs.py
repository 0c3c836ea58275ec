"""The tensors and numbers a step works on, in the order in which the graph takes them.

Every input knows how to find its live value again, so that a captured graph can be called with the
parameters, optimizer state and learning rate as they are now.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from graphopt import _compat
from graphopt._compat.late import alias_of
from graphopt.errors import CaptureError
from graphopt.host.assumptions import Answer
from graphopt.ir.placement import Placement
from graphopt.runtime.late import names_of_held
from graphopt.tracing import optimizer_state
from graphopt.tracing.call import Call, SizesKept
from graphopt.tracing.host_numbers import EXACT, Conditions
from graphopt.tracing.numbers import SCHEDULED
from graphopt.tracing.optimizer_state import ITSELF, OfNone, distinct_states, of_none

Kind = Literal["parameter", "buffer", "optimizer_state", "gradient", "hyperparameter", "user_input"]


@dataclass(frozen=True)
class InputSpec:
    """One placeholder of a captured graph: what it stands for.

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
        rebindable: it is a plain attribute, to which a step may assign a new tensor.
        bare: it belongs to no module.
    """

    kind: Kind
    fqn: str
    tensor: torch.Tensor
    slots: list[tuple[dict[str, Any], str]]
    rebindable: bool = False
    bare: bool = False

    def live(self) -> torch.Tensor:
        """The tensor as it is now: a plain attribute may hold another one of the same kind."""
        if not self.rebindable:
            return self.tensor
        owner, key = self.slots[0]
        found: torch.Tensor = owner[key]
        return found


@dataclass
class Storage:
    """A placeholder that is not itself a module tensor: storage that several of them view."""

    kind: Kind
    fqn: str
    members: list[ModuleTensor]

    def base(self) -> torch.Tensor:
        """The whole storage as a 1-D tensor of the members' dtype."""
        first = alias_of(self.members[0].tensor)
        storage = first.untyped_storage()
        length = storage.nbytes() // first.element_size()
        return first.new_empty(0).set_(storage, 0, (length,), (1,))


@dataclass(frozen=True)
class StateTensor:
    """`optimizers[optimizer].state[parameter][key]`, or what stands there for no parameter."""

    optimizer: int
    parameter: ModuleTensor | OfNone
    key: str
    fqn: str

    def read(self, call: Call) -> Any:
        """What stands there now; None where nothing does."""
        state = call.leaves[call.optimizers[self.optimizer]].state
        return optimizer_state.read(state, state_key(self.parameter), self.key)


def state_key(owner: ModuleTensor | OfNone) -> Any:
    """The key of an optimizer's state at which the entries of a parameter stand, or of none."""
    return owner.tensor if isinstance(owner, ModuleTensor) else owner.key


@dataclass(frozen=True)
class GradientInput:
    """`.grad` of a parameter (or of a tensor argument) that exists when the step begins."""

    owner: ModuleTensor
    fqn: str


@dataclass(frozen=True)
class Hyperparameter:
    """`optimizers[optimizer].param_groups[group][key]`, or one element of it: a Python number,
    or the tensor that the user gave in place of one."""

    optimizer: int
    group: int
    key: str
    element: int | None
    fqn: str

    def read(self, call: Call) -> Any:
        value = call.leaves[call.optimizers[self.optimizer]].param_groups[self.group][self.key]
        return value if self.element is None else value[self.element]


@dataclass(frozen=True)
class StateNumber:
    """`optimizers[optimizer].state[parameter][key]`, a Python number."""

    optimizer: int
    parameter: ModuleTensor | OfNone
    key: str
    fqn: str

    def read(self, call: Call) -> Any:
        state = call.leaves[call.optimizers[self.optimizer]].state
        return optimizer_state.read(state, state_key(self.parameter), self.key)


@dataclass(frozen=True)
class ArgumentNumber:
    """A Python number among the arguments, by its position in `call.leaves`."""

    position: int
    fqn: str

    def read(self, call: Call) -> Any:
        return call.leaves[self.position]


Number = Hyperparameter | StateNumber | ArgumentNumber


@dataclass
class Inputs:
    """All inputs of one call, in the order of the captured dialect.

    Attributes:
        conditions: what has to be so of `hyperparameters`.
        answers: to the decisions by value that the step takes, in their order, as far as known.
        sizes: what is made of sizes that depend on values.
        meets_sizes: a trace has met such a size.
        rebound: `module_tensors` that get other storage in each call; see `rebinding`.
        aliases: entries of optimizer state that are the memory of a module tensor, as `rebinding`
            leaves them; no inputs of their own.
        held: names of what others may use without being seen (`graphopt.runtime.late`); none where
            that is so of all parameters, as while a variable holds a checkpoint.
        found_held: the same without exception.
    """

    module_tensors: list[ModuleTensor]
    placeholders: list[ModuleTensor | Storage]
    states: list[StateTensor]
    gradients: list[GradientInput]
    hyperparameters: list[Number]
    user: list[int]
    held: frozenset[str] = frozenset()
    found_held: frozenset[str] = frozenset()
    conditions: Conditions = field(default_factory=Conditions)
    rebound: list[int] = field(default_factory=list)
    aliases: list[tuple[StateTensor, ModuleTensor]] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    sizes: SizesKept = SizesKept.UNKNOWN
    meets_sizes: bool = False

    @property
    def parameters(self) -> list[ModuleTensor]:
        return [entry for entry in self.module_tensors if entry.kind == "parameter"]

    def kinds_and_names(self, call: Call) -> Iterator[tuple[Kind, str]]:
        """`(kind, qualified name)` per placeholder."""
        for holder in self.placeholders:
            yield holder.kind, holder.fqn
        for state in self.states:
            yield "optimizer_state", state.fqn
        for gradient in self.gradients:
            yield "gradient", gradient.fqn
        for number in self.hyperparameters:
            yield "hyperparameter", number.fqn
        for position in self.user:
            yield "user_input", call.names[position]

    def live_values(self, call: Call) -> list[torch.Tensor]:
        """The tensors to call the graph with, read from the modules and optimizers now."""
        values = [
            holder.base() if isinstance(holder, Storage) else holder.tensor
            for holder in self.placeholders
        ]
        values += [state.read(call) for state in self.states]
        for gradient in self.gradients:
            assert gradient.owner.tensor.grad is not None
            values.append(gradient.owner.tensor.grad)
        for number in self.hyperparameters:
            values.append(as_tensor(number.read(call)))
        values += [call.leaves[position] for position in self.user]
        return values


def collect(call: Call, known: Inputs | None = None) -> Inputs:
    """Find every input of `call`. Touches nothing.

    Args:
        known: those of the call before, found a moment ago.
    """
    tensors = _module_tensors(call)
    gradients = [
        GradientInput(entry, f"{entry.fqn}.grad")
        for entry in tensors
        if entry.kind == "parameter" and entry.tensor.grad is not None
    ]
    by_id = {id(entry.tensor): entry for entry in tensors}
    inputs = Inputs(
        module_tensors=tensors,
        placeholders=_placeholders(tensors),
        states=list(_states(call, by_id)),
        gradients=gradients,
        hyperparameters=[
            *_hyperparameters(call),
            *_state_numbers(call, by_id),
            *_argument_numbers(call),
        ],
        user=[p for p in call.tensors if id(call.leaves[p]) not in by_id],
    )
    _take_aliases(inputs, call)
    inputs.answers.extend(call.decided)
    inputs.sizes = call.sizes
    _refuse_overlaps(inputs, call)
    inputs.held = _held(inputs, call, frozenset() if known is None else known.found_held)
    return inputs


def _held(inputs: Inputs, call: Call, known: frozenset[str]) -> frozenset[str]:
    named = [(entry.fqn, entry.tensor) for entry in inputs.module_tensors]
    named += [(state.fqn, state.read(call)) for state in inputs.states]
    found = inputs.found_held = names_of_held(named, known)
    return found if any(entry.fqn not in found for entry in inputs.parameters) else frozenset()


def _module_tensors(call: Call) -> list[ModuleTensor]:
    found: dict[int, ModuleTensor] = {}

    def add(kind: Kind, fqn: str, owner: dict[str, Any], key: str) -> None:
        tensor = owner[key]
        if not isinstance(tensor, torch.Tensor):
            return
        entry = found.setdefault(id(tensor), ModuleTensor(kind, fqn, tensor, []))
        entry.slots.append((owner, key))

    modules = list(call.named_submodules())
    for prefix, module in modules:
        for key in module._parameters:
            add("parameter", _join(prefix, key), module._parameters, key)
    for prefix, module in modules:
        for key in module._buffers:
            add("buffer", _join(prefix, key), module._buffers, key)
    for name, tensor in bare_tensors(call):
        kind: Kind = "parameter" if tensor.requires_grad else "buffer"
        found.setdefault(id(tensor), ModuleTensor(kind, name, tensor, [], bare=True))
    attributes: set[int] = set()
    for prefix, module in modules:
        for key in tensor_attributes(module):
            if id(vars(module)[key]) not in found:
                attributes.add(id(vars(module)[key]))
            add("buffer", _join(prefix, key), vars(module), key)
    entries = list(found.values())
    for entry in entries:
        entry.rebindable = id(entry.tensor) in attributes and len(entry.slots) == 1
    return sorted(entries, key=lambda entry: entry.kind != "parameter")


def bare_tensors(call: Call) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors that the step uses and that belong to no module, with names: those that optimizers
    update, and those that it reads outside its arguments."""
    yield from call.besides.tensors
    for position in call.optimizers:
        name = call.names[position]
        for index, group in enumerate(call.leaves[position].param_groups):
            for place, parameter in enumerate(group["params"]):
                yield f"{name}.param_groups[{index}]['params'][{place}]", parameter


def tensor_attributes(module: nn.Module) -> list[str]:
    """Attributes of a module that are tensors without being registered."""
    return [key for key, value in vars(module).items() if isinstance(value, torch.Tensor)]


def _join(prefix: str, key: str) -> str:
    return f"{prefix}.{key}" if prefix else key


def _placeholders(tensors: list[ModuleTensor]) -> list[ModuleTensor | Storage]:
    groups: dict[int, list[ModuleTensor]] = {}
    for entry in tensors:
        key = _compat.storage_key(entry.tensor) if entry.tensor.numel() else id(entry)
        groups.setdefault(key, []).append(entry)
    result: list[ModuleTensor | Storage] = []
    for members in groups.values():
        if len(members) == 1:
            result.append(members[0])
            continue
        if len({member.tensor.dtype for member in members}) > 1:
            raise CaptureError(
                f"{members[0].fqn} and {members[1].fqn} view one storage with different dtypes",
                hint="give one of them storage of its own (tensor.clone())",
            )
        result.append(Storage(members[0].kind, members[0].fqn, members))
    return result


def _states(call: Call, by_id: dict[int, ModuleTensor]) -> Iterator[StateTensor]:
    for index, optimizer in distinct_states(call.optimizer_objects()):
        prefix = call.names[call.optimizers[index]]
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                owner = by_id[id(parameter)]
                for key, value in optimizer.state.get(parameter, {}).items():
                    if isinstance(value, torch.Tensor):
                        yield StateTensor(index, owner, key, f"{prefix}.{owner.fqn}.{key}")
        for none, entries in of_none(optimizer.state):
            for key, value in entries.items():
                if isinstance(value, torch.Tensor):
                    yield StateTensor(index, none, key, _name_of_none(prefix, none, key))


def _take_aliases(inputs: Inputs, call: Call) -> None:
    """Tell entries of optimizer state that are the memory of a module tensor from others."""
    if not inputs.states:
        return
    alone = [holder for holder in inputs.placeholders if isinstance(holder, ModuleTensor)]
    by_storage = {_compat.storage_key(h.tensor): h for h in alone if h.tensor.numel()}
    for state in list(inputs.states):
        value = state.read(call)
        owner = by_storage.get(_compat.storage_key(value)) if value.numel() else None
        if owner is not None and is_alias(value, owner):
            inputs.states.remove(state)
            inputs.aliases.append((state, owner))


def is_alias(value: object, owner: ModuleTensor) -> bool:
    """Whether a value is a tensor over the memory of a module tensor, laid out alike."""
    if not isinstance(value, torch.Tensor):
        return False
    layouts = [
        (_compat.storage_key(t), t.storage_offset(), t.shape, t.stride(), t.dtype, t.requires_grad)
        for t in (value, alias_of(owner.tensor))
    ]
    return layouts[0] == layouts[1]


def _hyperparameters(call: Call) -> Iterator[Hyperparameter]:
    known: set[int] = set()  # an optimizer that wraps another one has its groups
    for index, optimizer in enumerate(call.optimizer_objects()):
        prefix = call.names[call.optimizers[index]]
        for number, group in enumerate(optimizer.param_groups):
            if id(group) in known:
                continue
            known.add(id(group))
            for key, value in group.items():
                name = f"{prefix}.param_groups[{number}].{key}"
                parts = value if isinstance(value, tuple) else (value,)
                for element, part in enumerate(parts):
                    if not _is_input(key, part, call.besides.counts):
                        continue
                    if parts is value:
                        yield Hyperparameter(index, number, key, element, f"{name}[{element}]")
                    else:
                        yield Hyperparameter(index, number, key, None, name)


def _state_numbers(call: Call, by_id: dict[int, ModuleTensor]) -> Iterator[StateNumber]:
    for index, optimizer in distinct_states(call.optimizer_objects()):
        prefix = call.names[call.optimizers[index]]
        for parameter, of_parameter in optimizer.state.items():
            if id(parameter) not in by_id:
                continue
            owner = by_id[id(parameter)]
            for key, value in of_parameter.items():
                if is_exact(value):
                    yield StateNumber(index, owner, key, f"{prefix}.{owner.fqn}.{key}")
        for none, entries in of_none(optimizer.state):
            for key, value in entries.items():
                if is_exact(value):
                    yield StateNumber(index, none, key, _name_of_none(prefix, none, key))


def _name_of_none(prefix: str, none: OfNone, key: str) -> str:
    name = f"{prefix}.state[{none.key!r}]"
    return name if key == ITSELF else f"{name}[{key!r}]"


def _argument_numbers(call: Call) -> Iterator[ArgumentNumber]:
    """Integers and floats as such: what other classes of numbers do with tensors is their own."""
    if call.besides.plain:
        return
    for position in call.constants:
        if is_exact(call.leaves[position]):
            yield ArgumentNumber(position, call.names[position])


def is_exact(value: object) -> bool:
    """A Python number that float64 holds, and so may be an input."""
    return type(value) is float or (type(value) is int and abs(value) < EXACT)


def _is_input(key: str, value: object, counts: Collection[str]) -> bool:
    if isinstance(value, torch.Tensor):
        return True
    return (key in SCHEDULED or key in counts) and is_number(value)


def as_tensor(number: Any) -> torch.Tensor:
    """A hyperparameter as a graph input: 0-dim float64 on the CPU, or the user's own tensor."""
    if isinstance(number, torch.Tensor):
        return number
    return torch.tensor(number, dtype=torch.float64, device="cpu")


def is_number(value: object) -> bool:
    """A Python number other than a bool."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _refuse_overlaps(inputs: Inputs, call: Call) -> None:
    """Two placeholders over one storage would hide a write from the other."""
    owner: dict[int, str] = {}
    values = inputs.live_values(call)
    for (kind, fqn), tensor in zip(inputs.kinds_and_names(call), values, strict=True):
        if kind in ("user_input", "hyperparameter") or tensor.numel() == 0:
            continue
        other = owner.setdefault(_compat.storage_key(tensor), fqn)
        if other != fqn:
            raise CaptureError(
                f"{other} and {fqn} share storage",
                hint="give one of them storage of its own (tensor.clone())",
            )
