"""Stand-ins as keys of dictionaries and sets, and what `id` and `hash` say of them.

A tensor is known by its identity, and while a step is traced another one stands for it. Each has
the hash of the other then, and is equal to it where a container looks for a key, so that either is
found under the other; `id` says of a stand-in what it says of the tensor.
"""

from __future__ import annotations

import builtins
import dis
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch

from graphopt._compat.storages import STORAGES
from graphopt.ir.user_frames import is_own_file, is_torch_file
from graphopt.tracing.interception.replaced_functions import calling_frame, replaced
from graphopt.tracing.refusals.unknown_features import refuse_address

_COMPARE = dis.opmap["COMPARE_OP"]
_EQUAL = torch.Tensor.__eq__


@contextmanager
def found_as_keys(tensors: Mapping[int, torch.Tensor]) -> Iterator[None]:
    """While active, containers find a stand-in under its tensor, and the reverse.

    Args:
        tensors: by the ids of their stand-ins.
    """
    own, equal = builtins.id, _EQUAL

    def hashed(tensor: torch.Tensor) -> int:
        return own(tensors.get(own(tensor), tensor))

    def is_equal(one: Any, other: Any) -> Any:
        if one is not other and hashed(one) == hashed(other) and not _compares(calling_frame()):
            return True
        return equal(one, other)

    is_equal.__name__ = is_equal.__qualname__ = equal.__name__
    with replaced((torch.Tensor, "__hash__", hashed), (torch.Tensor, "__eq__", is_equal)):
        yield


def own_equality(func: Any) -> Any:
    """Torch's `Tensor.__eq__` for what stands in its place; any other function unchanged."""
    return _EQUAL if getattr(func, "stands_for", None) is _EQUAL else func


def _compares(frame: FrameType) -> bool:
    """True if a frame is at an `==`, whose result is a tensor."""
    return frame.f_code.co_code[frame.f_lasti] == _COMPARE


@contextmanager
def identified(tensors: Mapping[int, torch.Tensor]) -> Iterator[None]:
    """While active, `id` of a stand-in gives that of its tensor.

    Args:
        tensors: by the ids of their stand-ins.
    """
    functions = (builtins.id, builtins.hash)
    with replaced(*((builtins, each.__name__, _of_tensors(each, tensors)) for each in functions)):
        yield


def _of_tensors(function: Callable[[Any], int], tensors: Mapping[int, torch.Tensor]) -> Any:
    """A replacement for `id` or `hash` in the step's code."""
    own = builtins.id

    def asked(value: Any) -> int:
        tensor = tensors.get(own(value))
        if tensor is None and not isinstance(value, STORAGES):
            return function(value)
        file = calling_frame().f_code.co_filename
        if is_torch_file(file) or is_own_file(file):
            return function(value)
        if tensor is None:
            refuse_address()
        return function(tensor)

    return asked
