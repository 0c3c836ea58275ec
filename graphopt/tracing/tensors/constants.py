"""Tensors that a step creates from numbers (`torch.tensor(x.item())`) or copies with `deepcopy`.

The known values of new tensors are forgotten where unknown ones are written to them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from graphopt import _compat
from graphopt.errors import CaptureError
from graphopt.graph_utils import is_dense
from graphopt.ir.user_frames import current_location
from graphopt.tracing.optimizers.optimizer_state import entries_at
from graphopt.tracing.rollback.nests import leaves_in
from graphopt.tracing.scalars.numbers import SYMBOLIC, TracedFloat


def holds_read(value: Any) -> bool:
    """True if nested lists contain numbers that are known only when a step runs."""
    return any(map(_is_read, leaves_in(value, lambda each: isinstance(each, (list, tuple)))))


def _is_read(value: Any) -> bool:
    if issubclass(type(value), TracedFloat):
        return not isinstance(value, int)  # integers that are known before a call are constants
    return issubclass(type(value), SYMBOLIC)


def holds_tensors(value: Any) -> bool:
    """True if nested lists of numbers contain tensors."""
    if not isinstance(value, (list, tuple)):
        return False
    return any(
        each.numel() == 1 if isinstance(each, torch.Tensor) else holds_tensors(each)
        for each in value
    )


def from_numbers(
    data: Any,
    dtype: torch.dtype | None = None,
    device: Any = None,
    requires_grad: bool = False,
    **options: Any,
) -> torch.Tensor:
    """`torch.tensor(data)` for nested lists with numbers computed by the graph.

    Args:
        options: options that change nothing here, such as `copy` and `pin_memory`.
    """
    if dtype is None:
        dtype = _dtype_of(data)
    return _stacked(data, dtype, device).requires_grad_(requires_grad)


def by_class(callee: Any, args: Sequence[Any]) -> Callable[..., torch.Tensor] | None:
    """The function to call instead of a constructor such as `torch.FloatTensor` for numbers of
    the graph; None for other callees."""
    if len(args) != 1 or type(args[0]) not in (list, tuple) or not holds_read(args[0]):
        return None
    legacy = _compat.made_by_legacy(callee)
    if legacy is None:
        return None
    dtype, device = legacy
    return lambda numbers: from_numbers(list(numbers), dtype, device)


def _stacked(data: Any, dtype: torch.dtype, device: Any) -> torch.Tensor:
    if isinstance(data, (list, tuple)):
        return torch.stack([_stacked(each, dtype, device) for each in data])
    if isinstance(data, torch.Tensor):
        return data.detach().reshape(()).to(dtype=dtype, device=device)
    return torch.scalar_tensor(data, dtype=dtype, device=device)


def _dtype_of(data: Any) -> torch.dtype:
    if isinstance(data, (list, tuple)):
        found = torch.bool
        for each in data:
            found = torch.promote_types(found, _dtype_of(each))
        return found
    if isinstance(data, torch.Tensor):
        return data.dtype
    if isinstance(data, (bool, torch.SymBool)):
        return torch.bool
    if isinstance(data, (int, torch.SymInt)):
        return torch.int64
    return torch.get_default_dtype()


def is_new(tensor: torch.Tensor) -> bool:
    """True if a new tensor has memory of its own, not that of an array or a file."""
    plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided
    if not plain or isinstance(tensor, nn.Parameter) or tensor.requires_grad or tensor.is_meta:
        return False
    return bool(tensor.untyped_storage().resizable())


def constant_of(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of a tensor's current values that each call of the graph creates."""
    with _compat.without_modes():
        own = tensor.detach().clone()  # the graph keeps it
    result: torch.Tensor = torch.ops.aten.lift_fresh_copy(own)
    return result


_IN_PLACE = frozenset(
    {"__iadd__", "__isub__", "__imul__", "__itruediv__", "__idiv__", "__ifloordiv__", "__imod__"}
    | {"__ipow__", "__iand__", "__ior__", "__ixor__"}
)


def writes(func: Any) -> bool:
    """True if a torch function updates its first argument in place."""
    name: str = getattr(func, "__name__", "")
    return name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))


def forget_mixed(tracer: Any, args: Any, kwargs: dict[str, Any]) -> None:
    """Forgets the known values of tensors that an operator mixes with unknown ones, so that
    `.item()` of them is recorded.

    Torch keeps that value although an operator mixes it with values it does not know (a symbolic
    float, other tensors in a list), and would bake in a wrong number.
    """
    leaves = _compat.tree_leaves((args, kwargs))
    tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
    constants = [x for x in tensors if _compat.is_constant(tracer, x)]
    if not constants:
        return
    symbolic = any(isinstance(x, (torch.SymFloat, torch.SymInt)) for x in leaves)
    if symbolic or len(constants) < len(tensors):
        for tensor in constants:
            _compat.forget_constant(tracer, tensor)


class CountsJustMade:
    """Step counts that optimizers have just created (`torch.tensor(0.0)`)."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = optimizers
        self._state: dict[int, Any] = {}

    def forget(self, tracer: Any, written: Any) -> None:
        """Makes the value of a count unknown once it is incremented, as it is in later steps."""
        leaves = _compat.tree_leaves(written)
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        for tensor in tensors:
            if _compat.is_constant(tracer, tensor) and self._is_state(tensor):
                _compat.forget_constant(tracer, tensor)

    def _is_state(self, tensor: torch.Tensor) -> bool:
        if self._state.get(id(tensor)) is not tensor:
            tables = [entries_at(e) for of in self._optimizers for e in of.state.values()]
            self._state = {id(v): v for entries in tables for v in entries.values()}
        return self._state.get(id(tensor)) is tensor


def deepcopied(tensor: torch.Tensor, memo: dict[Any, Any]) -> torch.Tensor:
    """A copy of a tensor, recorded in the trace.

    Raises:
        CaptureError: eager's copy is a part of a copied storage, which others may share.
    """
    if isinstance(tensor, torch.nn.Parameter):  # eager copies its values alone
        return _compat.deepcopied(tensor, memo)
    storage = ("storage", _compat.storage_key(tensor))
    if id(tensor) not in memo and (storage in memo or not _is_whole(tensor)):
        raise CaptureError(
            "copy.deepcopy of a tensor that shares its memory with others, or is a part of it",
            location=current_location(),
            hint="copy its values: tensor.detach().clone()",
        )
    memo[storage] = tensor
    return _compat.deepcopied(tensor, memo)


def _is_whole(tensor: torch.Tensor) -> bool:
    if not tensor.is_leaf or not is_dense(tensor):
        return False
    return tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
