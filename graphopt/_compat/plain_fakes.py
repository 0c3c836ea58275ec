"""Fast shape computation for plain fake tensors, past most of their mode's dispatch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch._decomp import decomposition_table, meta_table
from torch._subclasses.fake_impls import fast_detach
from torch._subclasses.fake_tensor import FakeTensor, in_kernel_invocation_manager


def are_plain_fakes(mode: Any, tensors: Iterable[torch.Tensor]) -> bool:
    """True if all tensors are fakes of a mode without known values and special marks."""
    return all(
        type(tensor) is FakeTensor
        and tensor.fake_mode is mode
        and tensor.constant is None
        and tensor.real_tensor is None
        and not (tensor.is_conj() or tensor.is_neg() or tensor.is_quantized)
        for tensor in tensors
    )


def detached(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor.detach()`, for a fake tensor by its kernel alone."""
    if type(tensor) is not FakeTensor or tensor.layout is not torch.strided:
        return tensor.detach()
    if not are_plain_fakes(tensor.fake_mode, [tensor]):
        return tensor.detach()
    with torch.no_grad():
        found: torch.Tensor = fast_detach(tensor.fake_mode, tensor)
    return found


def plain_view(target: object, args: tuple[Any, ...]) -> Any:
    """The result of a view or split of a fake tensor, by the kernel alone: an eighth of the mode's
    time.

    Args:
        args: values, not nodes.

    Returns:
        None for other operators and arguments, those that do not fit among them, and for tensors of
        which more is to be kept.
    """
    if (target is not _VIEW and target is not _SPLIT) or len(args) != 2:
        return None
    source, sizes = args
    if type(source) is not FakeTensor or not isinstance(sizes, (list, tuple)):
        return None
    if not all(type(size) is int for size in sizes):
        return None
    mode, device = source.fake_mode, source.fake_device
    kept = source.constant is not None or source.real_tensor is not None or source.requires_grad
    if kept or source.is_conj() or source.is_neg() or source._has_symbolic_sizes_strides:
        return None
    try:
        with torch.no_grad(), in_kernel_invocation_manager(mode):
            found: Any = target(source, sizes)
    except RuntimeError:  # the mode says what is wrong
        return None
    if target is _VIEW:
        return FakeTensor(mode, found, device)
    return [FakeTensor(mode, part, device) for part in found]


_VIEW = torch.ops.aten.view.default
_SPLIT = torch.ops.aten.split_with_sizes.default


def is_ruled_in_python(func: Any) -> bool:
    """True if an operator's shape rule is in Python and no size depends on values."""
    if func not in decomposition_table and func not in meta_table:
        return False
    if func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd):
        return False
    by_value = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
    return not any(tag in func.tags for tag in by_value)
