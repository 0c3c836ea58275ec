"""Strides of incoming gradients: a backward is captured for one layout, which decides its bits."""

from __future__ import annotations

from collections.abc import Sequence

import torch

Layouts = tuple["tuple[int, ...] | None", ...]
"""For each gradient its strides, None where there is no gradient."""


def strides_of(gradients: Sequence[torch.Tensor | None], like: Sequence[torch.Tensor]) -> Layouts:
    """The strides of gradients, None for a missing one; contiguous ones count as laid out as
    `like`."""
    return tuple(
        None
        if gradient is None
        else sent.stride()
        if gradient.is_contiguous()
        else gradient.stride()
        for gradient, sent in zip(gradients, like, strict=True)
    )


def common_layouts(
    everyone: Sequence[Sequence[Sequence[int] | None]], like: Sequence[torch.Tensor]
) -> Layouts:
    """The gradient layouts that fit all ranks: `like` where ranks differ, missing if on all."""
    found: list[tuple[int, ...] | None] = []
    for layouts, sent in zip(zip(*everyone, strict=True), like, strict=True):
        different = {None if layout is None else tuple(layout) for layout in layouts}
        found.append(different.pop() if len(different) == 1 else sent.stride())
    return tuple(found)


def laid_out(
    gradient: torch.Tensor | None, like: torch.Tensor, stride: tuple[int, ...], device: torch.device
) -> torch.Tensor:
    """The gradient with the captured strides; zeros for a missing one.

    Args:
        like: has its shape and dtype.
        device: the device of the gradient.
    """
    if gradient is not None and (gradient.stride() == stride or _overlaps(stride, like)):
        return gradient
    result = torch.empty_strided(like.shape, stride, dtype=like.dtype, device=device)
    return result.zero_() if gradient is None else result.copy_(gradient)


def _overlaps(stride: tuple[int, ...], like: torch.Tensor) -> bool:
    """True if several elements of a tensor share one place in memory."""
    return any(step == 0 and size > 1 for step, size in zip(stride, like.shape, strict=True))


def to_add_to(owner: torch.Tensor) -> torch.Tensor:
    """The gradient that a backward adds to, laid out as autograd lays it out.

    Where there is none it is -0.0, to which any number may be added without changing a bit of it.
    """
    if owner.grad is None:
        return torch.zeros_like(owner).neg_()
    if owner.grad.stride() == torch.empty_like(owner, device="meta").stride():
        return owner.grad
    return torch.empty_like(owner).copy_(owner.grad)
