"""Tensor methods whose C++ code needs a CUDA build, replaced for fake CUDA tensors.

Hand-written bindings fail there even for fake tensors, on which nothing runs ("PyTorch is not
linked with support for cuda devices", torch 2.13); their operators do not. These four are those
that Inductor and its decompositions call: none of them assigns to items of a tensor.

They are set on the class of fake tensors, never on `torch.Tensor`: a class that once had a
`__getitem__` of Python's counts as a sequence even when that is gone, and `torch.tensor([loss])`
then asks a tensor without dimensions for its length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensor

aten = torch.ops.aten


@contextmanager
def methods_for_fake_cuda_tensors() -> Iterator[None]:
    """While active, such methods of fake CUDA tensors call operators instead."""
    replacements: dict[str, Callable[..., Any]] = {
        "__getitem__": _getitem,
        "__invert__": aten.bitwise_not.default,
        "contiguous": _contiguous,
        "copy_": _copy,
    }
    with ExitStack() as stack:
        for name, replacement in replacements.items():
            method = _for_cuda(getattr(FakeTensor, name), replacement)
            stack.enter_context(mock.patch.object(FakeTensor, name, method))
        yield


def _for_cuda(original: Callable[..., Any], replacement: Callable[..., Any]) -> Any:
    def method(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        chosen = replacement if self.device.type == "cuda" else original
        return chosen(self, *args, **kwargs)

    return method


def _contiguous(
    self: torch.Tensor, memory_format: torch.memory_format = torch.contiguous_format
) -> Any:
    return aten.contiguous.default(self, memory_format=memory_format)


def _copy(self: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> Any:
    return aten.copy_.default(self, source, non_blocking)


def _getitem(self: torch.Tensor, index: Any) -> Any:
    view, tensors = _indexed(self, index)
    return aten.index.Tensor(view, tensors) if tensors else view


def _indexed(self: torch.Tensor, index: Any) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
    """The view that basic indices (numbers, slices, None, `...`) select, and the tensor indices
    left over."""
    entries = index if isinstance(index, tuple) else (index,)
    left = sum(_dimensions(entry) for entry in entries)
    dimension = 0
    tensors: list[torch.Tensor | None] = []
    for entry in entries:
        left -= _dimensions(entry)
        passed = 1
        if isinstance(entry, torch.Tensor):
            tensors.append(entry)
            dimension += _dimensions(entry)
            continue
        if entry is Ellipsis:
            passed = self.dim() - dimension - left
        elif entry is None:
            self = aten.unsqueeze.default(self, dimension)
        elif isinstance(entry, slice):
            step = 1 if entry.step is None else entry.step
            self = aten.slice.Tensor(self, dimension, entry.start, entry.stop, step)
        else:
            self = aten.select.int(self, dimension, entry)
            continue
        dimension += passed
        tensors += [None] * passed
    return self, tensors if any(tensor is not None for tensor in tensors) else []


def _dimensions(entry: Any) -> int:
    """The number of dimensions that one index entry consumes."""
    if entry is None or entry is Ellipsis:
        return 0
    if isinstance(entry, torch.Tensor) and entry.dtype is torch.bool:
        return entry.dim()
    return 1
