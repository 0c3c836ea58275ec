"""Tensor subclasses that change what torch computes, or that several ranks hold in parts: no
graph of plain tensors replaces them."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn

from graphopt import _compat
from graphopt.errors import CaptureError
from graphopt.ir.placement import Placement
from graphopt.runtime.late.classes import class_behind
from graphopt.tracing.ranks.admitted_shards import is_admitted

WITH_GRADIENTS = (
    "keep what it was computed of, and let the step run the model on that; where no gradient is to"
    " go through it, keep tensor.detach(); where one is asked for it, make it a leaf:"
    " tensor.detach().requires_grad_()"
)
"""The hint about a tensor that was computed with gradients outside the step."""

_SAYS_OF_ITSELF = """
__class__ __module__ __qualname__ __name__ __doc__ __dict__ __weakref__ __slots__ __new__ __init__
__init_subclass__ __annotations__ __abstractmethods__ __firstlineno__ __static_attributes__
__repr__ __str__ __format__ __reduce__ __reduce_ex__ __getstate__ __setstate__ __parameters__
__orig_bases__
"""
_OF_ITS_OWN = frozenset(_SAYS_OF_ITSELF.split())
"""What a class may say of itself without a say in what torch computes."""


_CURES = {
    "NestedTensor": "pad the parts to one length (torch.nn.utils.rnn.pad_sequence), with a mask",
    "UninitializedParameter": "run the model once before the first step: model(batch)",
    "UninitializedBuffer": "run the model once before the first step: model(batch)",
    "MaskedTensor": "compute with a plain tensor and a mask: torch.where(mask, x, 0)",
}
"""What to write in place of classes of torch's that hold more than a plain tensor does."""


def special_class(tensor: torch.Tensor) -> type | None:
    """The class of a tensor if it does not compute as plain ones do, else None. Does not count
    as a use of the tensor."""
    return _special(type(tensor))


def check_class(name: str, tensor: torch.Tensor) -> None:
    """Refuses a tensor whose class no graph of plain tensors can replace.

    Raises:
        CaptureError: it is held in parts, or its class decides what is computed of it.
    """
    kind = special_class(tensor)
    if kind is None or is_admitted(tensor):
        return
    if _is_distributed(kind):
        raise CaptureError(
            f"{name} is a DTensor, and a graph takes tensors that each rank holds in"
            f" {Placement.FULL}",
            hint="give the step the plain model and plain tensors (tensor.full_tensor()):"
            " graphopt.DataParallel averages the gradients",
        )
    raise CaptureError(
        f"{name} is a tensor of the class {kind.__qualname__}, whose operators need not"
        " compute what they do on plain tensors",
        hint=_CURES.get(kind.__name__, "pass tensor.as_subclass(torch.Tensor)"),
    )


@functools.lru_cache(maxsize=1024)
def _special(kind: type) -> type | None:
    kind = class_behind(kind)
    if kind in (torch.Tensor, nn.Parameter) or _compat.is_fake_class(kind):
        return None
    return None if _computes_as_torch(kind) else kind


def _is_distributed(kind: type) -> bool:
    if not dist.is_available():
        return False
    from torch.distributed.tensor import DTensor

    return issubclass(kind, DTensor)


def _computes_as_torch(kind: type) -> bool:
    """True for a subclass whose operators give plain tensors, such as a parameter class with
    attributes."""
    if not _compat.results_are_plain(kind):
        return False
    return not any(hasattr(torch.Tensor, name) for name in _own_names(kind))


def _own_names(kind: type) -> Iterator[str]:
    for parent in kind.__mro__:
        if parent in (torch.Tensor, nn.Parameter):
            return
        yield from vars(parent).keys() - _OF_ITS_OWN
