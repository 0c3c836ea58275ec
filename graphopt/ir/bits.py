"""Bitwise equality of tensors."""

from __future__ import annotations

import torch

from graphopt import _compat


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """True if two tensors have one dtype, shape and device, and the same bits in every element.

    0.0 and -0.0 differ, and what is not a number is equal to itself, which `torch.equal` sees
    otherwise. Strides are not compared. A fake tensor is like no other.

    >>> from graphopt.ir.bits import same_bits
    >>> same_bits(torch.tensor([float("nan")]), torch.tensor([float("nan")]))
    True
    >>> same_bits(torch.tensor(0.0), torch.tensor(-0.0))
    False
    """
    if one is other:
        return True
    if (one.dtype, one.shape, one.device) != (other.dtype, other.shape, other.device):
        return False
    if one.layout is not other.layout or _compat.is_fake(one) or _compat.is_fake(other):
        return False
    if one.layout is not torch.strided:
        return torch.equal(one, other)
    return torch.equal(_bits(one), _bits(other))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the elements as bytes. A single element is made contiguous by hand, since
    `contiguous` keeps its strides."""
    plain = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
    flat = torch.empty_like(plain, memory_format=torch.contiguous_format)
    return flat.copy_(plain).view(torch.uint8)
