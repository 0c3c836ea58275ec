"""Reads of attributes `x.name` as guarded places: in an object, one of its classes, or a module."""

from __future__ import annotations

import inspect
import threading
import types
import weakref
from typing import Any

import torch
from torch.optim import Optimizer

from graphopt import _compat
from graphopt._compat.classes import is_made_by_statement
from graphopt.errors import CaptureError
from graphopt.ir.source import SourceLine
from graphopt.ir.user_frames import is_own_file
from graphopt.tracing.outside.places import MISSING, OutsidePlace, attributes_of
from graphopt.tracing.outside.record import OutsideRecord

_FIXED = frozenset({object, type, torch.nn.Module, types.ModuleType})
"""Classes that nobody gives new attributes to hide those of their subclasses."""

_WITH_OTHER_ATTRIBUTES = (threading.local, weakref.ProxyType, weakref.CallableProxyType)
"""Kinds of objects whose attributes are those of a thread, or of another object."""

_WATCHED_OF_OPTIMIZERS = frozenset({"param_groups", "state", "step"})
"""Attributes of optimizers that have stand-ins while a step is traced."""


def read_attribute(
    record: OutsideRecord, value: Any, name: str, path: str, line: SourceLine
) -> None:
    """Records that the step reads `value.name`; `path` names it in messages."""
    if isinstance(value, torch.Tensor):
        _of_class(record, torch.Tensor, name, f"Tensor.{name}", line)
    elif isinstance(value, super):
        _of_super(record, value, name, line)
    elif isinstance(value, type):
        _of_type(record, value, name, path, line)
    elif isinstance(value, types.MethodType) and not hasattr(types.MethodType, name):
        if record.is_outside(value):
            record.read(OutsidePlace("attribute", value, "__func__"), f"{path}.__func__", line)
        read_attribute(record, value.__func__, name, path, line)
    elif isinstance(value, Optimizer) and name in _WATCHED_OF_OPTIMIZERS:
        if name == "state" and record.is_outside(value):  # not one that the step has made
            record.optimizers[id(value)] = value
            _refuse_left_over(record, value, path, line)
    else:
        _of_object(record, value, name, path, line)


def _refuse_left_over(
    record: OutsideRecord, optimizer: Optimizer, path: str, line: SourceLine
) -> None:
    """Refuses iteration over optimizer state that has entries of parameters in no group; torch's
    own methods only look up single parameters."""
    if id(optimizer) not in record.left_over:
        return
    method = getattr(type(optimizer), line.function, None)
    code = None if method is None else getattr(inspect.unwrap(method), "__code__", None)
    if code is None or code.co_filename != line.file:
        raise CaptureError(
            f"it uses {path}, which also holds state of a parameter that is in no group of the"
            " optimizer, and which a trace does not find there",
            location=line,
            hint="take it out when the parameter goes: optimizer.state.pop(parameter)",
        )


def read_method(record: OutsideRecord, owner: type, name: str, line: SourceLine) -> None:
    """Records that the step calls a method, found in the class of an object."""
    _of_class(record, owner, name, f"{owner.__name__}.{name}", line)


def read_class(record: OutsideRecord, value: Any, path: str, line: SourceLine) -> None:
    """Records that the step reads an object's class, if the class can change."""
    attributes = attributes_of(value)
    if isinstance(value, torch.Tensor) or not record.is_outside(value):
        return
    if not is_made_by_statement(type(value)):
        return
    if attributes is None or not record.is_own(attributes):
        record.read(OutsidePlace("type", value), f"the class of {path}", line)


def read_function(record: OutsideRecord, function: types.FunctionType, line: SourceLine) -> None:
    """Records that the step runs a function: its code, defaults and closure. Those of graphopt are
    not looked at: some stand for functions of torch during a trace, and are gone after it."""
    if not record.is_outside(function) or is_own_file(function.__code__.co_filename):
        return
    name = function.__qualname__
    for attribute in ("__code__", "__defaults__", "__kwdefaults__"):
        record.read(OutsidePlace("attribute", function, attribute), f"{name}.{attribute}", line)
    if function.__defaults__ is not None:
        record.contents(function.__defaults__, f"{name}.__defaults__", line, nested=False)
    if function.__kwdefaults__ is not None:
        record.contents(function.__kwdefaults__, f"{name}.__kwdefaults__", line, nested=False)
    for cell in function.__closure__ or ():
        record.reached(cell, f"{name}.__closure__")
        record.owned(cell, function)


def read_setting(record: OutsideRecord, owner: Any, name: str, line: SourceLine) -> None:
    """Records that the step sets `owner.name`, which a class may intercept by a descriptor."""
    kinds = (type, types.ModuleType, torch.Tensor, torch.nn.Module, Optimizer)
    if not isinstance(owner, kinds) and record.is_outside(owner):
        for each in (name, "__setattr__"):
            read_method(record, type(owner), each, line)


def attribute_place(value: Any, name: str) -> OutsidePlace | None:
    """The place that `value.name = …` writes to, or None if a descriptor handles it."""
    if isinstance(value, type):
        return OutsidePlace("class", value, name)
    found = next((vars(c)[name] for c in type(value).__mro__ if name in vars(c)), None)
    if _is_data(found):
        return OutsidePlace("attribute", value, name) if _is_member(found) else None
    attributes = attributes_of(value)
    return None if attributes is None else OutsidePlace("item", attributes, name)


def _of_object(record: OutsideRecord, value: Any, name: str, path: str, line: SourceLine) -> None:
    owner = type(value)
    if issubclass(owner, _WITH_OTHER_ATTRIBUTES):
        if record.is_outside(value):
            record.read(OutsidePlace("attribute", value, name), path, line)
        return
    read_class(record, value, path.removesuffix(f".{name}"), line)
    found = _of_class(record, owner, name, f"{owner.__name__}.{name}", line)
    if found is not None and _is_data(found):
        _of_descriptor(record, value, found, name, path, line)
        return
    attributes = attributes_of(value)
    if attributes is None or not record.is_outside(value):
        return
    if owner.__module__ == "torch._ops":
        getattr(value, name, None)  # an operator is looked up once, and there from then on
    if not isinstance(value, types.ModuleType):
        record.owned(attributes, value)
    record.read(OutsidePlace("item", attributes, name), path, line)
    if name not in attributes and found is None:
        _registered(record, value, name, path)


def _of_descriptor(
    record: OutsideRecord, value: Any, found: Any, name: str, path: str, line: SourceLine
) -> None:
    """Records a read through a descriptor without Python code; those with are observed."""
    if not record.is_outside(value):
        return
    if type(found).__module__.startswith("torch.") or not _is_python(found):
        record.read(OutsidePlace("attribute", value, name), path, line)


def _is_python(descriptor: Any) -> bool:
    """True if a descriptor is implemented in Python, so that it can be observed."""
    if isinstance(descriptor, property):
        return isinstance(descriptor.fget, types.FunctionType)
    return isinstance(getattr(type(descriptor), "__get__", None), types.FunctionType)


def _registered(record: OutsideRecord, value: Any, name: str, path: str) -> None:
    """Records a read of a parameter, buffer or submodule, which its module's guard covers."""
    if isinstance(value, torch.nn.Module):
        for table in _compat.own_tables(value):
            if name in table:
                record.reached(table[name], path)


def _of_type(record: OutsideRecord, value: type, name: str, path: str, line: SourceLine) -> None:
    if _of_class(record, value, name, path, line) is None:
        _of_class(record, type(value), name, path, line)


def _of_super(record: OutsideRecord, value: Any, name: str, line: SourceLine) -> None:
    mro = value.__self_class__.__mro__
    following = mro[mro.index(value.__thisclass__) + 1 :]
    _in_classes(record, following, name, f"super().{name}", line)


def _of_class(record: OutsideRecord, owner: type, name: str, path: str, line: SourceLine) -> Any:
    """Records a lookup in a class and its bases; returns what they have, or None."""
    return _in_classes(record, owner.__mro__, name, path, line)


def _in_classes(
    record: OutsideRecord, classes: tuple[type, ...], name: str, path: str, line: SourceLine
) -> Any:
    for each in classes:
        if each in _FIXED and name not in vars(each):
            continue
        if not is_made_by_statement(each):
            if name in vars(each):
                return vars(each)[name]
            continue
        if record.is_outside(each):
            value = record.read(OutsidePlace("class", each, name), path, line)
        else:
            value = vars(each).get(name, MISSING)
        if value is not MISSING:
            return value
    return None


def _is_data(found: Any) -> bool:
    return hasattr(type(found), "__set__") or hasattr(type(found), "__delete__")


def _is_member(found: Any) -> bool:
    return isinstance(found, (types.MemberDescriptorType, types.GetSetDescriptorType))
