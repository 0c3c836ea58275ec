"""Tensors that Python computes of values of the graph, as nodes of it.

    w = torch.from_numpy(scores.numpy() ** 0.4)      computed = graphopt.computed(scores)
    loss = (w * losses).sum()                   ==>  assumption = graphopt.assumption(computed, …)
                                                     mul = aten.mul.Tensor(computed, losses)

Such a node changes nothing, and waits for what it is computed of, on a GPU as eager code does. The
assumption holds where the tensor has the shape and the dtype that it had at capture.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from graphopt import _compat
from graphopt.host.functions import is_same

NUMBERS = (torch.SymFloat, torch.SymInt, torch.SymBool)
"""What Python numbers are that a graph computes, while it is traced."""
TRACED = (torch.Tensor, *NUMBERS)
"""Values of a graph, while it is traced."""


class OpenNest:
    """A nest with values of a graph at some of its leaves, which is made anew in each call.

    Args:
        nest: of such values, of constants, and of functions of them (`_compat.Applied`).
    """

    def __init__(self, nest: Any) -> None:
        leaves, self._spec = _compat.tree_flatten(nest)
        self._given = [i for i, leaf in enumerate(leaves) if isinstance(leaf, TRACED)]
        self.values = [leaves[i] for i in self._given]
        self._leaves = [None if i in self._given else x for i, x in enumerate(leaves)]
        self.count = len(self.values)

    def take_values(self) -> list[Any]:
        """The values at its leaves, which it then forgets."""
        values, self.values = self.values, []
        return values

    def made_of(self, values: Sequence[Any]) -> Any:
        """The nest with these values."""
        leaves = list(self._leaves)
        for position, value in zip(self._given, values[: self.count], strict=True):
            leaves[position] = value
        return _compat.tree_unflatten(leaves, self._spec)

    def repeats(self, other: OpenNest) -> bool:
        """Whether another trace of the same step computes the same."""
        known = (self._spec, self._given) == (other._spec, other._given)
        return known and all(map(is_same, self._leaves, other._leaves))


class Form(NamedTuple):
    """What is known of a value that Python computes before it does, from one call to the next.

    Attributes:
        kind: tensor, array or number.
        dtype: of the tensor that it is in the graph, as `shape` and `device`.
    """

    kind: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    device: torch.device

    def __str__(self) -> str:
        return f"of shape {list(self.shape)} and {self.dtype}"


def form_of(value: Any) -> Form | None:
    """Of a value that Python has computed; None of what is no tensor, array or number."""
    tensor = as_tensor(value)
    if tensor is None:
        return None
    kind = "array" if hasattr(value, "strides") and value.ndim else "number"
    kind = "tensor" if isinstance(value, torch.Tensor) else kind
    return Form(kind, tensor.dtype, tuple(tensor.shape), tensor.device)


def as_tensor(value: Any) -> torch.Tensor | None:
    """A tensor itself, of an array, or of a number, which is exactly what can be read from it; None
    of other values."""
    if isinstance(value, torch.Tensor):
        return value
    if hasattr(value, "strides") and value.ndim:
        return torch.from_numpy(value.copy()) if value.dtype.kind in "biuf" else None
    plain = value.item() if hasattr(value, "tobytes") else value
    dtype = _DTYPES.get(type(plain))
    return None if dtype is None else torch.tensor(plain, dtype=dtype)


_DTYPES = {bool: torch.bool, int: torch.int64, float: torch.float64}


class ComputedTensor:
    """The target of a node that gives a tensor which Python computes of values of the graph.

    Args:
        nest: the value that it is made of (`as_tensor`), as a nest.
        form: that it had at capture.
    """

    def __init__(self, nest: Any, form: Form) -> None:
        self._nest, self.form = OpenNest(nest), form
        # fx names nodes and writes code by these.
        self.__name__ = self.__qualname__ = "computed"
        self.__module__ = "graphopt"

    def take_values(self) -> list[Any]:
        """What it is computed of."""
        return self._nest.take_values()

    def __call__(self, *values: Any) -> torch.Tensor:
        mode = _compat.fake_mode_around(values)
        if mode is not None:
            shape, dtype = self.form.shape, self.form.dtype
            meta = torch.empty(shape, dtype=dtype, device="meta")
            return _compat.recorded(self, values, _compat.fake_like(mode, meta, self.form.device))
        return self._computed(values)

    def _computed(self, values: Sequence[Any]) -> torch.Tensor:
        found = as_tensor(self._nest.made_of(values))
        if found is None:
            raise TypeError("Python computes something else than a tensor, array or number now")
        taken = {_compat.storage_key(v) for v in values if isinstance(v, torch.Tensor)}
        return found.clone() if _compat.storage_key(found) in taken else found

    def repeats(self, other: ComputedTensor) -> bool:
        """Whether another trace of the same step computes the same."""
        return self.form == other.form and self._nest.repeats(other._nest)

    def __repr__(self) -> str:
        return "graphopt.computed"
