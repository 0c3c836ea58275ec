"""One call of a step, flattened: modules, optimizers, tensors and constants among its arguments."""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable, Iterator
from enum import Enum
from itertools import count
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DataParallel as TorchDataParallel
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from graphopt import _compat
from graphopt.errors import CaptureError
from graphopt.host.decisions.assumptions import Answer
from graphopt.host.decisions.sizes import Sizes
from graphopt.tracing.inputs.argument_objects import GivenField, OpenedObjects, may_be_taken_apart
from graphopt.tracing.inputs.implicit import NOTHING, EarlierInputs, ImplicitInputs
from graphopt.tracing.optimizers.optimizer_state import entries_at, is_known_kind, tensors_of
from graphopt.tracing.tensors.classes import check_class


class SizesKept(Enum):
    """The treatment of data-dependent sizes: unknown, a symbol with a value and recorded relations,
    or a plain number."""

    UNKNOWN = 0
    RELATED = 1
    EXACT = 2


class Call:
    """One call `fn(*args, **kwargs)`, flattened.

    Attributes:
        given: `(args, kwargs)`.
        leaves, treespec: its pytree.
        modules, optimizers: positions in `leaves` of distinct modules and optimizers, in order.
        tensors: positions in `leaves` of tensors.
        constants: positions in `leaves` of everything else.
        repeats: positions of modules and optimizers that stand at an earlier position, too.
        objects: the objects among them that are taken apart; what is in these follows in `leaves`.
        besides: what the step uses besides its arguments; the objects follow them in `leaves`.
        decided: answers to its first decisions by value, where they are known.
        decides_alone: each decision may go another way on each rank.
        sizes: what a trace makes of sizes that depend on values.
        earlier: what earlier graphs of the step use besides its arguments; None without any.
        remembered: objects and tensors of `besides` (by id) that are there because of these.
    """

    def __init__(
        self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        while isinstance(fn, functools.partial):  # whose arguments are the step's as well
            partial: functools.partial[Any] = fn
            fn, args = partial.func, (*partial.args, *args)
            kwargs = {**partial.keywords, **kwargs}
        self.fn = fn
        self.given = args, kwargs
        try:
            self.leaves, self.treespec = _compat.flatten_arguments(args, kwargs)
        except RecursionError:
            raise CaptureError(
                "a list or dictionary among its arguments contains itself",
                hint="pass what the step needs of it",
            ) from None
        self.modules: list[int] = []
        self.optimizers: list[int] = []
        self.tensors: list[int] = []
        self.constants: list[int] = []
        self.repeats: list[tuple[int, int]] = []
        seen: dict[int, int] = {}
        for position, leaf in enumerate(self.leaves):
            if isinstance(leaf, torch.Tensor):
                self.tensors.append(position)
            elif not isinstance(leaf, (nn.Module, Optimizer)):
                self.constants.append(position)
            elif id(leaf) in seen:
                self.repeats.append((position, seen[id(leaf)]))
            else:
                seen[id(leaf)] = position
                (self.modules if isinstance(leaf, nn.Module) else self.optimizers).append(position)
        self._names: list[str] | None = None
        self._using: Call | None = None
        self._given = len(self.leaves)
        self.objects = self._fields = OpenedObjects(self.leaves, self.constants)
        for field in self.objects.fields:
            is_tensor = isinstance(field.value, torch.Tensor)
            (self.tensors if is_tensor else self.constants).append(len(self.leaves))
            self.leaves.append(field.value)
        self._own = len(self.leaves)
        self._opened = self.tensors, self.constants
        self.besides = NOTHING
        self.decided: tuple[Answer, ...] = ()
        self.sizes = SizesKept.UNKNOWN
        self.decides_alone = False
        self.earlier: EarlierInputs | None = None
        self.remembered: frozenset[int] = frozenset()

    def using(self, besides: ImplicitInputs) -> Call | None:
        """Returns this call with other implicit inputs; None if one of them was freed."""
        if self.besides is besides:
            return self
        if self._using is not None and self._using.besides is besides:
            return self._using
        if not (besides or self.besides):
            return self
        objects = besides.live()
        if objects is None:
            return None
        new = self._using = copy.copy(self)
        new._using = None
        new.besides = besides
        new.leaves = [*self.leaves[: self._own], *(value for _, value in objects)]
        new.modules = [position for position in self.modules if position < self._own]
        new.optimizers = [position for position in self.optimizers if position < self._own]
        new.objects = OpenedObjects() if besides.whole_objects else self._fields
        if new.objects is not self.objects:
            last = self._given if besides.whole_objects else self._own
            new.tensors, new.constants = (
                [position for position in positions if position < last]
                for positions in self._opened
            )
        for position in range(self._own, len(new.leaves)):
            is_module = isinstance(new.leaves[position], nn.Module)
            (new.modules if is_module else new.optimizers).append(position)
        new._names = None
        return new

    def with_whole_objects(self) -> Call:
        """Returns this call with argument objects unopened, as if none held tensors: its graph also
        holds for objects with tensors that the step does not read."""
        kinds = {type(self.leaves[position]) for position in self.constants}
        if self.objects or not any(map(may_be_taken_apart, kinds)):
            return self
        return self.using(self.besides.joined(ImplicitInputs(whole_objects=True))) or self

    def deciding(self, answers: tuple[Answer, ...]) -> Call:
        """Returns this call with outcomes for its first decisions, and without implicit inputs."""
        known = self.besides
        kept = ImplicitInputs(as_traced=known.as_traced)
        new = copy.copy(self.using(kept) or self)
        new._using, new.decided = None, answers
        if any(isinstance(answer, Sizes) for answer in answers):
            new.sizes = SizesKept.RELATED
        return new

    def with_answers(self, answers: tuple[Answer, ...]) -> Call:
        """Returns this call with outcomes for its first decisions."""
        if answers == self.decided:
            return self
        new = copy.copy(self)
        new._using, new.decided = None, answers
        return new

    def deciding_alone(self) -> Call:
        """Returns this call with each decision treated as possibly different between ranks."""
        new = copy.copy(self)
        new._using, new.decides_alone = None, True
        return new

    def knowing_sizes(self) -> Call | None:
        """Returns this call, to be traced with more known of data-dependent sizes; None if they are
        numbers already, or tensors are fake."""
        if self.sizes is SizesKept.EXACT or any(map(_compat.is_fake, self.leaves)):
            return None
        new = copy.copy(self)
        new._using = None
        if self.sizes is SizesKept.UNKNOWN:
            new.decided = ()  # sizes are among the answers from now on
        new.sizes = SizesKept(self.sizes.value + 1)
        return new

    @property
    def names(self) -> list[str]:
        """One readable name per leaf, after the step's own argument names."""
        if self._names is None:
            given = _compat.leaf_names(self.fn, self.leaves[: self._given], self.treespec)
            fields = self._fields.fields
            given += [field.name(given[field.table.root]) for field in fields]
            self._names = [*given, *(name for name, _ in self.besides.objects)]
        return self._names

    def rebuild(self, leaves: list[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """`(args, kwargs)` with other leaves."""
        args, kwargs = _compat.tree_unflatten(leaves[: self._given], self.treespec)
        return args, kwargs

    def fields(self) -> Iterator[tuple[int, GivenField]]:
        """The fields of opened objects, with their positions in `leaves`."""
        return zip(count(self._given), self.objects.fields, strict=False)

    def optimizer_objects(self) -> list[Optimizer]:
        """The optimizers among the arguments, in order."""
        return [self.leaves[position] for position in self.optimizers]

    def named_roots(self) -> Iterator[tuple[str, nn.Module]]:
        """The modules among the arguments and implicit inputs, with names. A single argument has no
        name: its tensors are then named as in its `state_dict`."""
        given = [position for position in self.modules if position < self._own]
        unnamed = given or self.modules
        for position in self.modules:
            alone = unnamed == [position]
            yield ("" if alone else self.names[position]), self.leaves[position]

    def named_submodules(self) -> Iterator[tuple[str, nn.Module]]:
        """Every distinct module reachable from the arguments, with its qualified name."""
        seen: set[nn.Module] = set()
        for root_name, root in self.named_roots():
            yield from root.named_modules(memo=seen, prefix=root_name)


def check_supported(call: Call) -> None:
    """Refuses modes and arguments that no capture supports, before anything is changed."""
    _check_modes()
    for name, module in call.named_submodules():
        _check_module(name or "the model", module)
        _check_tensors_of(name, module)
    for position in call.optimizers:
        _check_optimizer(call.names[position], call.leaves[position])
    for position in call.tensors:
        _check_tensor(f"argument {call.names[position]}", call.leaves[position])
    for name, tensor in call.besides.tensors:
        check_class(name, tensor)
    for name, place, _ in call.besides.carried:
        for value in _compat.tree_leaves(place.now()):
            if isinstance(value, torch.Tensor):
                check_class(name, value)


def is_array(value: Any) -> bool:
    """True if an argument is a numpy array, in memory or memory-mapped."""
    numpy = sys.modules.get("numpy")
    kinds = () if numpy is None else (numpy.ndarray, numpy.memmap)
    return type(value) in kinds and not value.dtype.hasobject


def _check_modes() -> None:
    """Refuses a call under modes and hooks that watch functions: a graph calls others."""
    watching = _compat.watches_functions()
    if watching is not None:
        raise CaptureError(f"it is called with {watching.what}", hint=watching.cure)


def check_anomalies() -> None:
    """Refuses anomaly detection that checks each backward function for NaN.

    Raises:
        CaptureError: it is one.
    """
    if torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled():
        raise CaptureError(
            "torch looks for anomalies in it, in what each function of the backward gives",
            hint="switch that off (torch.autograd.set_detect_anomaly(False)), or give"
            " check_nan=False; to look for them run the step itself, or set GRAPHOPT_OFF=1",
        )


def _check_tensor(name: str, tensor: torch.Tensor) -> None:
    if tensor.is_nested or tensor.layout not in (torch.strided, torch.sparse_coo):
        layout = tensor.layout if tensor.layout is not torch.strided else "nested"
        raise CaptureError(
            f"{name} is a tensor of layout {layout}",
            hint="pass it dense, or sparse in coordinates: tensor.to_sparse_coo()",
        )
    check_class(name, tensor)
    if has_gradient(tensor) and tensor.grad.grad_fn is not None:  # type: ignore[union-attr]
        raise CaptureError(
            f"the gradient of {name} was computed with gradients outside the step",
            hint="set its .grad to None before each call, or to the detached gradient",
        )


def has_gradient(tensor: torch.Tensor) -> bool:
    """True if a tensor has a `.grad`. To ask one that is computed for it warns."""
    return tensor.is_leaf and tensor.grad is not None


def _check_tensors_of(name: str, module: nn.Module) -> None:
    for table in (*_compat.own_tables(module)[:2], vars(module)):
        for key, tensor in table.items():
            if isinstance(tensor, torch.Tensor):
                check_class(f"{name}.{key}".removeprefix("."), tensor)


def _check_optimizer(name: str, optimizer: Optimizer) -> None:
    for key, entries in optimizer.state.items():
        if not is_known_kind(key, entries):
            raise CaptureError(
                f"{name} keeps something else than tensors and numbers in its state"
                f" ({_key(key)}: {type(entries).__name__}), which is not that of a parameter",
                hint="let it keep tensors, numbers, or a dictionary of them there",
            )
        for entry, value in entries_at(entries).items():
            for _, tensor in tensors_of(entry, value):
                check_class(f"{name}.state[…][{entry!r}]", tensor)


def _key(key: object) -> str:
    return repr(key) if isinstance(key, (str, int)) else type(key).__name__


def _check_module(name: str, module: nn.Module) -> None:
    scatters = isinstance(module, TorchDataParallel) and module.device_ids  # else it only calls
    if scatters or isinstance(module, DistributedDataParallel):
        raise CaptureError(
            f"{name} is wrapped in {type(module).__name__}",
            hint="pass the bare model (model.module); with graphopt.DataParallel(), the default"
            " on several ranks, graphopt averages the gradients itself",
        )
    if _compat.is_fsdp(module):
        raise CaptureError(
            f"{name} is sharded by FSDP, which is not supported: its hooks communicate outside the"
            " graph",
            hint="call the undecorated step; or pass the unsharded model, which graphopt.ZeRO()"
            " shards",
        )
    if _compat.is_compiled_module(module):
        raise CaptureError(
            f"{name} is already compiled by torch.compile",
            hint="pass the original module (compiled._orig_mod)",
        )
    if isinstance(module, torch.jit.ScriptModule):
        raise CaptureError(
            f"{name} is a TorchScript module", hint="pass the Python module it was made from"
        )
