"""Private parts of a tensor: storage, version, hooks and subclasses."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from operator import attrgetter
from typing import Any

import torch

version_of: attrgetter[int] = attrgetter("_version")
"""How often a tensor, or what shares its memory, was updated in place."""

base_of: attrgetter[torch.Tensor | None] = attrgetter("_base")
"""The tensor that a tensor is a view of; None where it is no view."""


def as_parameter(tensor: torch.Tensor) -> torch.Tensor:
    """Marks a tensor as an `nn.Parameter`, whatever its class."""
    tensor._is_param = True
    return tensor


def made_by_legacy(kind: Any) -> tuple[torch.dtype, str] | None:
    """Dtype and device of legacy constructors such as `torch.FloatTensor`; None for other
    classes."""
    if kind is torch.Tensor:
        return torch.get_default_dtype(), torch._C._get_default_device()
    if type(kind) is not type(torch.FloatTensor) or kind.is_sparse:
        return None
    return kind.dtype, "cuda" if kind.is_cuda else "cpu"


def deepcopied(tensor: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
    """A deep copy of a fake tensor that shares its mode and, as for real ones, drops the gradient.

    Args:
        tensor: a leaf, all of its storage.
        memo: the copies made so far, by identity of the original.
    """
    if id(tensor) in memo:
        return memo[id(tensor)]  # type: ignore[no-any-return]
    with torch.no_grad():
        copied = tensor.detach().clone()
    if isinstance(tensor, torch.nn.Parameter):
        copied = torch.nn.Parameter(copied, tensor.requires_grad)
    else:
        copied.requires_grad_(tensor.requires_grad)
        if tensor.grad is not None:
            copied.grad = deepcopied(tensor.grad, memo)
    memo[id(tensor)] = copied
    return copied


version_kept: Callable[[torch.Tensor], AbstractContextManager[None]]
version_kept = torch.autograd._unsafe_preserve_version_counter
"""While active, writes to a tensor do not change its version."""


def strided_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The strided tensors that a tensor consists of: itself, or indices and values of a sparse
    one."""
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    return (tensor,)


def storage_key_of_value(value: torch.Tensor) -> int:
    """The storage key of a node's value, in half the time of `storage_key`. It asks for the
    tensor's class, which may finish its late updates."""
    try:
        return torch._C._storage_id(value)  # type: ignore[no-any-return, attr-defined]
    except NotImplementedError:  # indices and values in storage of their own
        return id(value)


def read_as(tensor: torch.Tensor, conjugated: bool, negated: bool) -> torch.Tensor:
    """The tensor with its conjugate and negative bits set as given."""
    if tensor.is_conj() is not conjugated:
        tensor = tensor.conj()
    return tensor if tensor.is_neg() is negated else torch._neg_view(tensor)


def may_be_written(tensor: torch.Tensor) -> bool:
    """True if somebody may have written to a tensor since it was created."""
    return tensor.is_inference() or tensor._version > 0


hook_tables: Callable[[torch.Tensor], tuple[dict[int, Any] | None, ...]] = attrgetter(
    "_backward_hooks", "_post_accumulate_grad_hooks"
)
"""The gradient hooks of a tensor by key, None where there have not been any."""


def hooks_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """The keys of a tensor's gradient hooks, which change when hooks are added or removed."""
    return tuple(key for table in hook_tables(tensor) for key in table or ())


def functions_of_hooks(tensor: torch.Tensor) -> list[Any]:
    return [hook for table in hook_tables(tensor) for hook in (table or {}).values()]


def count_hooks_on_sum(tensor: torch.Tensor) -> int:
    """The number of a tensor's post-accumulate-grad hooks."""
    return len(getattr(tensor, "_post_accumulate_grad_hooks", None) or ())


def copy_hooks(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copies the gradient hooks of the first tensor of each pair to the second, also those of a
    parameter that has been frozen since, to which torch adds none."""
    for source, target in pairs:
        of_gradient, of_sum = (table or {} for table in hook_tables(source))
        frozen = bool(of_gradient or of_sum) and not target.requires_grad
        if frozen:
            target.requires_grad_(True)
        for hook in of_gradient.values():
            target.register_hook(hook)
        for hook in of_sum.values():
            target.register_post_accumulate_grad_hook(hook)
        if frozen:
            target.requires_grad_(False)


def copy_attributes(source: torch.Tensor, target: torch.Tensor) -> dict[str, Any]:
    """Copies the attributes that a program has set on a tensor to another; returns all of them."""
    for name, value in vars(source).items():
        if name not in vars(target):
            setattr(target, name, value)
    return dict(vars(target))


def attributes_changed(tensor: torch.Tensor, before: dict[str, Any]) -> dict[str, Any]:
    """The attributes of a fake tensor that a program has set since `before`."""
    return {
        name: value
        for name, value in vars(tensor).items()
        if "memo" not in name and before.get(name, tensor) is not value
    }


def is_transformed(tensor: torch.Tensor) -> bool:
    """True if a tensor is a wrapper of a running `torch.func` transform."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))


class DescribedTensor(torch.Tensor):
    """A meta tensor that reports another device: for inspection, not for computing. Unlike a fake
    tensor it needs none of torch's tracers, which take seconds to import.

    Attributes:
        described_device: the device that the tensor reports.
    """

    described_device: torch.device
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """The device that the tensor reports to be on."""
        return self.described_device


def described_tensor(meta: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A described tensor over the storage of a meta tensor."""
    described = meta.as_subclass(DescribedTensor)
    described.described_device = device
    return described


def results_are_plain(kind: type) -> bool:
    """True if operators on tensors of a class give plain tensors, as on parameters."""
    return (
        kind.__torch_function__ is torch._C._disabled_torch_function_impl  # type: ignore[attr-defined]
        and kind.__torch_dispatch__ is torch._C._disabled_torch_dispatch_impl  # type: ignore[attr-defined]
    )
