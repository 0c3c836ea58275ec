"""The classes of tensors, as a step asks for them.

    if type(value) is torch.Tensor:     true, as in eager code
        value = value.item()

What stands for a tensor in a trace is of another class.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from graphopt import _compat


def class_of(tensor: torch.Tensor, stands_for: Mapping[int, torch.Tensor]) -> type:
    """The class that eager code finds.

    Args:
        stands_for: the tensors that have stand-ins, by the ids of these.
    """
    found = stands_for.get(id(tensor))
    if found is not None:
        return type(found)
    return torch.nn.Parameter if isinstance(tensor, torch.nn.Parameter) else torch.Tensor


class Classed:
    """Has the class of another object for `__class__`."""

    def __init__(self, kind: type) -> None:
        object.__setattr__(self, "_kind", kind)

    def __getattribute__(self, name: str) -> Any:
        return object.__getattribute__(self, "_kind")


def asking(
    originals: Callable[[], Mapping[int, torch.Tensor]],
) -> Callable[[Any, Sequence[Any]], Any]:
    """Says what is called in place of `type` of a tensor; None: itself."""

    def asked(callee: Any, args: Sequence[Any]) -> Any:
        if callee is type and len(args) == 1 and _compat.is_fake(args[0]):
            return lambda tensor: class_of(tensor, originals())
        return None

    return asked
