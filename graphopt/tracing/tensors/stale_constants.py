"""Known values of new tensors (`torch.tensor(1.0)`), forgotten when unknown ones are written to
them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from graphopt import _compat
from graphopt.tracing.optimizers.optimizer_state import entries_at

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
