"""Tensors whose update is in flight: whoever uses one finds it done.

While an update is in flight, the tensors that it will change are of another class:

    class of p            p.add_(1), f(p), isinstance(p, …)          class of p
    Late Parameter   ──────────────────────────────────────►    Parameter, updated

The first use of any of them, in any thread, does what is in flight, gives all of them their own
class again and goes on. What only asks for metadata (shape, dtype, …) does nothing.

How a use is seen. The class is built on torch's base of all tensors, and its order of method
resolution leaves `torch.Tensor` out. So torch, which asks `isinstance(p, torch.Tensor)` before it
takes an object for a tensor, also in C++ and in extensions, has to ask the object for `__class__`.
Methods find the class's own; those called as `torch.Tensor.add_(p, 1)` ask `__torch_function__`.

What cannot be seen is a use that does not go through the tensor's Python object: of another view of
the same memory, or of the tensor by C++ code that holds it. How many of these there are is counted
before anything is left in flight.
"""

from __future__ import annotations

import atexit
import functools
import inspect
import logging
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from graphopt import _compat
from graphopt._compat.late import (
    TensorBase,
    TensorMeta,
    alias_of,
    holders_of,
    set_class,
    without_torch_function,
)

logger = logging.getLogger("graphopt")


class LateTensors:
    """Sees to it that nobody finds the tensors of one step before their update.

    Args:
        finish: does what is in flight; called when one of the tensors is used. Returns whether
            nothing is left to do. If it raises, so does the use, and the tensors stay late.
    """

    def __init__(self, finish: Callable[[], bool]) -> None:
        self._finish = finish
        self.tensors: list[torch.Tensor] = []
        self._kinds: list[type] = []
        self._aliases: dict[int, torch.Tensor] = {}
        self._warned = False

    @property
    def armed(self) -> bool:
        return bool(self.tensors)

    def arm(self, tensors: Sequence[torch.Tensor], anyway: bool = False) -> int | None:
        """Let the first use of these tensors be seen.

        Args:
            anyway: also where some are held in ways that cannot be seen.

        Returns:
            The number of the first that is so held; nothing is armed then. None: done.
        """
        settle(tensors)
        held = next((i for i, tensor in enumerate(tensors) if not self._arm(tensor)), None)
        if held is None:
            with without_torch_function():
                held = next((i for i, is_held in enumerate(held_elsewhere(tensors)) if is_held), None)
        if held is not None and not anyway:
            self.disarm()
            return held
        self._aliases = {id(tensor): alias_of(tensor) for tensor in self.tensors}
        return None

    def _arm(self, tensor: torch.Tensor) -> bool:
        kind = type(tensor)
        late = late_class(kind)
        if late is None:
            return False
        try:
            set_class(tensor, late)
        except TypeError:  # a class with slots
            return False
        self.tensors.append(tensor)
        self._kinds.append(kind)
        _armed[id(tensor)] = self
        return True

    def disarm(self) -> None:
        """Give the tensors their own classes again."""
        tensors, self.tensors = self.tensors, []
        kinds, self._kinds = self._kinds, []
        self._aliases = {}
        for tensor, kind in zip(tensors, kinds, strict=True):
            _armed.pop(id(tensor), None)
            set_class(tensor, kind)

    def own(self, values: Iterable[Any]) -> list[Any]:
        """The values, each of the late tensors as an alias that the step itself may use."""
        aliases = self._aliases
        return [aliases.get(id(value), value) for value in values]

    def settle(self) -> None:
        """Finish what is in flight."""
        if self._finish():
            self.disarm()
        if not self._warned and _within_dynamo():
            self._warned = True
            logger.warning(
                "a function made by torch.compile was called with tensors whose update was in"
                " flight, which lets torch compile it anew each time: call flush() of the training"
                " step before it"
            )


def _within_dynamo() -> bool:
    """Whether torch.compile is looking at the arguments of a function."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == "torch._dynamo.convert_frame":
            return True
        frame = frame.f_back
    return False


_armed: dict[int, LateTensors] = {}
"""Whose each late tensor is, by id: they live as long as they are late."""


def settle(values: Iterable[Any], besides: LateTensors | None = None) -> None:
    """Finish what is in flight for any of these values, other than in `besides`."""
    if len(_armed) == (0 if besides is None else len(besides.tensors)):
        return
    for value in values:
        owner = _armed.get(id(value))
        if owner is not None and owner is not besides:
            owner.settle()


def _settle_all() -> None:
    for owner in {id(owner): owner for owner in list(_armed.values())}.values():
        try:
            owner.settle()
        except Exception as error:
            logger.error("late work of a training step could not be finished: %s", error)


atexit.register(_settle_all)
# A forked process has none of the threads that its collectives would have to wait for.
os.register_at_fork(before=_settle_all)


# ------------------------------------------------------------------------------ who else holds it


def held_elsewhere(tensors: Sequence[torch.Tensor]) -> Iterator[bool]:
    """For each tensor, whether somebody could use it without the Python objects of these tensors:
    through another view of its memory, an array, the storage itself, or in C++."""
    storages = Counter(_compat.storage_key(tensor) for tensor in tensors)
    storage, *alone = _alone()
    for tensor in tensors:
        if tensor.layout is not torch.strided:
            yield True
            continue
        uses, *others = holders_of(tensor)
        sharing = storages[_compat.storage_key(tensor)]
        yield uses != storage + sharing - 1 or others != alone


def warn_of_held(names: str, consequence: str) -> None:
    """Say what is held so that its use is not seen, what comes of it and what to do."""
    logger.warning(
        "%s: also held by another view of its memory (as in a state_dict), an array, a live autograd"
        " graph or code outside of Python, which are not seen using it, so that %s. Delete what"
        " holds it, or hold the tensor itself or a copy instead",
        names,
        consequence,
    )


@functools.cache
def _alone() -> tuple[int, int, int]:
    """What is counted for a tensor that nobody else holds."""
    return holders_of(torch.empty(1))


# ------------------------------------------------------------------------------ the classes

_METADATA = (
    "shape dtype device ndim layout requires_grad is_leaf grad_fn itemsize nbytes names"
    " is_cuda is_cpu is_sparse is_meta is_quantized is_nested is_xpu is_mps output_nr"
    " retains_grad _backward_hooks _post_accumulate_grad_hooks"
).split()
_METADATA_METHODS = (
    "size stride dim ndimension numel nelement element_size storage_offset is_contiguous"
    " is_floating_point is_complex is_signed is_inference get_device is_conj is_neg"
).split()
_GRADIENT = TensorBase.grad.__get__
_SETTLES_NOTHING = frozenset(
    [getattr(TensorBase, name).__get__ for name in _METADATA if hasattr(TensorBase, name)]
    + [getattr(torch.Tensor, name) for name in _METADATA_METHODS]
)
_NOT_FORWARDED = frozenset(
    [*_METADATA, *_METADATA_METHODS, "grad"]
    + "__class__ __dict__ __weakref__ __doc__ __module__ __slots__ __new__ __init__".split()
    + "__init_subclass__ __subclasshook__ __getattribute__ __getattr__ __setattr__".split()
    + "__delattr__ __hash__ __len__ __sizeof__ __torch_function__ __annotations__".split()
    + "__torch_dispatch__ __abstractmethods__ __firstlineno__ __static_attributes__".split()
)


class _LateMeta(TensorMeta):  # type: ignore[misc, valid-type]
    """Metaclass of the late classes: what they stand for, and what makes them no `Tensor`."""

    kind: type
    shadow: type
    hidden = False

    def mro(cls) -> list[type]:
        return [cls, TensorBase, object] if vars(cls).get("hidden") else super().mro()

    def __getattr__(cls, name: str) -> Any:
        return getattr(vars(cls)["kind"], name)


@functools.cache
def late_class(kind: type) -> type | None:
    """The class of late tensors that are of class `kind`; None where uses could not be seen."""
    functions = (torch.Tensor.__torch_function__, torch.nn.Parameter.__torch_function__)
    own = getattr(kind.__torch_function__, "__func__", kind.__torch_function__)
    if own not in [getattr(function, "__func__", function) for function in functions]:
        return None
    namespace: dict[str, Any] = {
        name: _forwarding(kind, name) for name in dir(kind) if name not in _NOT_FORWARDED
    }
    shadow = type(kind)(kind.__name__, (kind,), {"__new__": _maker(kind)} | _names_of(kind))
    namespace |= _OWN | _names_of(kind) | {"__new__": _maker(kind), "kind": kind, "shadow": shadow}
    late: Any = _LateMeta(kind.__name__, (torch.Tensor,), namespace)
    late.hidden = True
    late.__bases__ = late.__bases__  # resolves the order anew
    _share_between_processes(late)
    return late  # type: ignore[no-any-return]


def _names_of(kind: type) -> dict[str, Any]:
    return {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}


def _maker(kind: type) -> Callable[..., Any]:
    """`type(p)(…)` makes a tensor of the class that `p` has again then."""

    def make(cls: type, *args: Any, **kwargs: Any) -> Any:
        return kind(*args, **kwargs)

    return make


def _share_between_processes(late: type) -> None:
    """Let queues of `torch.multiprocessing` share late tensors as they share others."""
    from multiprocessing.reduction import ForkingPickler

    def reduce(tensor: torch.Tensor) -> Any:
        _settled(tensor)
        return known[type(tensor)](tensor)

    known = ForkingPickler._extra_reducers  # type: ignore[attr-defined]
    if late.kind in known:  # type: ignore[attr-defined]
        ForkingPickler.register(late, reduce)


def _settled(tensor: torch.Tensor) -> bool:
    """Finish what is in flight for a tensor, if that can be done now: it is of its own class then.

    It cannot be done in the middle of the step that is to do it.
    """
    late: Any = type(tensor)
    if not isinstance(late, _LateMeta):  # another thread was faster
        return True
    owner = _armed.get(id(tensor))
    if owner is None:
        set_class(tensor, vars(late)["kind"])
        return True
    owner.settle()
    return not isinstance(type(tensor), _LateMeta)


def _forwarding(kind: type, name: str) -> Any:
    """A method or attribute that finishes what is in flight before it is what `kind` has."""
    static = inspect.getattr_static(kind, name)
    if isinstance(static, (staticmethod, classmethod)) or not hasattr(static, "__get__"):
        return static
    return _method(kind, name) if callable(static) else _attribute(kind, name)


def _method(kind: type, name: str) -> Any:
    def method(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if _settled(self):
            return getattr(self, name)(*args, **kwargs)
        with without_torch_function():
            return getattr(kind, name)(self, *args, **kwargs)

    method.__name__ = name
    return method


def _attribute(kind: type, name: str) -> Any:
    def value(self: torch.Tensor) -> Any:
        if _settled(self):
            return getattr(self, name)
        with without_torch_function():
            return inspect.getattr_static(kind, name).__get__(self, kind)

    return property(value)


def _class_of(self: torch.Tensor) -> type:
    """`p.__class__`, which is also how `isinstance` and torch's C++ code ask what `p` is."""
    late: Any = type(self)
    _settled(self)
    if not isinstance(late, _LateMeta):
        return late  # type: ignore[no-any-return]
    # Not `kind`: `isinstance` takes no notice of an answer that is the class of the object.
    return vars(late)["shadow"]  # type: ignore[no-any-return]


def _set_class_of(self: torch.Tensor, kind: type) -> None:
    _settled(self)
    set_class(self, kind)


def _missing(self: torch.Tensor, name: str) -> Any:
    """An attribute that only the class of the tensor has."""
    kind = vars(type(self)).get("kind")
    if _settled(self):
        return getattr(self, name)
    return getattr(kind, name)


def _assign(self: torch.Tensor, name: str, value: Any) -> None:
    kind = vars(type(self)).get("kind")
    if _settled(self):
        setattr(self, name, value)
        return
    static = inspect.getattr_static(kind, name, None)
    with without_torch_function():
        if hasattr(static, "__set__"):
            static.__set__(self, value)
        else:
            vars(self)[name] = value


def _delete(self: torch.Tensor, name: str) -> None:
    _settled(self)
    delattr(self, name)


def _length(self: torch.Tensor) -> int:
    with without_torch_function():
        return torch.Tensor.__len__(self)


def _detach(self: torch.Tensor) -> torch.Tensor:
    """`detach`, of which `nn.Parameter(p)` wants that it keeps the class when `p` is of a class that
    is neither `Tensor` nor `Parameter`, as it has just seen."""
    kind = vars(type(self)).get("kind")
    if not _settled(self):
        return alias_of(self)
    made = sys._getframe(1).f_code is torch.nn.Parameter.__new__.__code__
    if made and kind is torch.nn.Parameter:
        return torch.nn.Parameter(self)
    return self.detach()


def _torch_function(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    kwargs = kwargs or {}
    if func in _SETTLES_NOTHING:
        with without_torch_function():
            return func(*args, **kwargs)
    if func == _GRADIENT:  # an update in flight has left none, and changes none
        with without_torch_function():
            gradient = func(*args)
        if gradient is None:
            return None
    leaves = _compat.tree_leaves((args, kwargs))
    if all([_settled(leaf) for leaf in leaves if isinstance(type(leaf), _LateMeta)]):
        return func(*args, **kwargs)
    with without_torch_function():
        return func(*args, **kwargs)


_OWN: dict[str, Any] = {
    "__class__": property(_class_of, _set_class_of),
    "__getattr__": _missing,
    "__setattr__": _assign,
    "__delattr__": _delete,
    "__len__": _length,
    "__hash__": torch.Tensor.__hash__,
    "detach": _detach,
    "__torch_function__": classmethod(_torch_function),
}
