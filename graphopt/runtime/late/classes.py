"""Tensor subclasses that intercept every use of a tensor.

The class of a late tensor is built on torch's base of all tensors, and its order of method
resolution leaves `torch.Tensor` out:

    isinstance(p, Tensor), f(p) in C++  ->  asks p for `__class__`         ->  settle
    p.add_(1), p + 1, p.data            ->  find the late class's own      ->  settle
    torch.Tensor.add_(p, 1), torch.f(p) ->  ask for `__torch_function__`   ->  settle
    p.shape, p.size(), hash(p), …       ->  as they are

Torch asks `isinstance(p, torch.Tensor)` before it takes an object for a tensor, also in C++ and in
extensions, unless it is of one of the two classes that it knows by heart.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from graphopt import _compat
from graphopt._compat.tensor_classes import (
    TensorBase,
    TensorMeta,
    alias_of,
    set_class,
    without_torch_function,
)

if TYPE_CHECKING:
    from graphopt.runtime.late.tensors import LateTensors

_METADATA = """
shape dtype device ndim layout requires_grad is_leaf grad_fn itemsize nbytes names is_cuda is_cpu
is_sparse is_meta is_quantized is_nested is_xpu is_mps output_nr retains_grad _backward_hooks
_post_accumulate_grad_hooks
"""
_METADATA_METHODS = """
size stride dim ndimension numel nelement element_size storage_offset is_contiguous
is_floating_point is_complex is_signed is_inference get_device is_conj is_neg
"""
_OF_CLASSES = """
__class__ __dict__ __weakref__ __doc__ __module__ __slots__ __new__ __init__ __init_subclass__
__subclasshook__ __getattribute__ __getattr__ __setattr__ __delattr__ __hash__ __len__ __sizeof__
__torch_function__ __torch_dispatch__ __annotations__ __abstractmethods__ __firstlineno__
__static_attributes__
"""
_GRADIENT = TensorBase.grad.__get__
_SETTLES_NOTHING = frozenset(
    [getattr(TensorBase, name).__get__ for name in _METADATA.split() if hasattr(TensorBase, name)]
    + [getattr(torch.Tensor, name) for name in _METADATA_METHODS.split()]
)
_NOT_FORWARDED = frozenset(f"{_METADATA} {_METADATA_METHODS} {_OF_CLASSES} grad".split())


OWNERS: dict[int, LateTensors] = {}
"""Who has each late tensor's update in flight, by id: they live as long as they are late."""


class _LateMeta(TensorMeta):  # type: ignore[misc, valid-type]
    """The metaclass of late classes, which hides that they derive from `Tensor`."""

    kind: type
    shadow: type
    hidden = False

    def mro(cls) -> list[type]:
        return [cls, TensorBase, object] if vars(cls).get("hidden") else super().mro()

    def __getattr__(cls, name: str) -> Any:
        return getattr(vars(cls)["kind"], name)


@functools.cache
def late_class(kind: type) -> type | None:
    """The late subclass for tensors of class `kind`, or None if uses could not be seen."""
    known = [_function_of(torch.Tensor), _function_of(torch.nn.Parameter)]
    if _function_of(kind) not in known:
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


def class_behind(kind: type) -> type:
    """The original class of a late class; of others, the class itself."""
    return vars(kind)["kind"] if isinstance(kind, _LateMeta) else kind


def _function_of(kind: Any) -> Any:
    """The function behind a class's `__torch_function__`."""
    return getattr(kind.__torch_function__, "__func__", kind.__torch_function__)


def _names_of(kind: type) -> dict[str, Any]:
    return {
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__,
    }


def _maker(kind: type) -> Callable[..., Any]:
    """A constructor, for `type(p)(…)`, that makes tensors of the original class."""

    def make(cls: type, *args: Any, **kwargs: Any) -> Any:
        return kind(*args, **kwargs)

    return make


def _share_between_processes(late: type) -> None:
    """Registers late tensors with `torch.multiprocessing`, so that queues share them."""
    from multiprocessing.reduction import ForkingPickler

    def reduce(tensor: torch.Tensor) -> Any:
        _settled(tensor)
        return known[type(tensor)](tensor)

    known = ForkingPickler._extra_reducers  # type: ignore[attr-defined]
    if late.kind in known:  # type: ignore[attr-defined]
        ForkingPickler.register(late, reduce)


def _settled(tensor: torch.Tensor) -> bool:
    """Completes a tensor's updates in flight if possible; the tensor has its own class then.

    It cannot be done in the middle of the step that is to do it.
    """
    late: Any = type(tensor)
    if not isinstance(late, _LateMeta):  # another thread was faster
        return True
    owner = OWNERS.get(id(tensor))
    if owner is None:
        set_class(tensor, vars(late)["kind"])
        return True
    owner.settle()
    return not isinstance(type(tensor), _LateMeta)


def _forwarding(kind: type, name: str) -> Any:
    """A method or attribute that completes updates before it acts as that of `kind`."""
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
    """The property `p.__class__`, which `isinstance` and torch's C++ code read."""
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
    """Looks up an attribute that only the tensor's own class has."""
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
    if not self.shape:
        raise TypeError("len() of a 0-d tensor")
    return self.shape[0]


def _detach(self: torch.Tensor) -> torch.Tensor:
    """`detach` for `nn.Parameter(p)`, which needs the class kept."""
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
    late = [leaf for leaf in leaves if isinstance(type(leaf), _LateMeta)]
    if all(list(map(_settled, late))):
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
