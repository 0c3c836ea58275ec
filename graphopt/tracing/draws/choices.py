"""Items that may be what a step has put into a list itself, or what was there: the graph has both,
and chooses by what is known before it runs."""

from __future__ import annotations

from typing import Any

import torch

from graphopt.tracing.draws.arguments import Known, is_known
from graphopt.tracing.draws.arrays import HostBool
from graphopt.tracing.draws.item_kinds import is_nest, kind_of
from graphopt.tracing.draws.live import is_array
from graphopt.tracing.draws.recorder import HostCalls
from graphopt.tracing.host_numbers import is_host_number
from graphopt.tracing.numbers import SYMBOLIC, ReadFloat, ReadInt


class Choice:
    """Chooses between an item that the step has put into a list and one that was there.

    Args:
        is_new: whether it is the former, before the graph runs.
    """

    def __init__(self, calls: HostCalls, is_new: Known) -> None:
        self._calls, self._is_new = calls, is_new
        self._flag: torch.Tensor | None = None

    def of(self, new: Any, old: Any) -> Any:
        """The item."""
        if self._fit(new, old):
            return self._chosen(new, old)
        self._calls.by_value(self._is_new.expression, self._is_new.plain)
        return new if self._is_new.plain else old

    def _fit(self, new: Any, old: Any) -> bool:
        """Whether there is one kind for both."""
        if is_nest(old):
            if type(new) is not type(old) or len(new) != len(old):
                return False
            if type(new) is dict:
                return list(new) == list(old) and all(map(self._fit, new.values(), old.values()))
            return all(map(self._fit, new, old))
        if isinstance(old, torch.Tensor):
            return isinstance(new, torch.Tensor) and _alike(new, old)
        if old is None or type(old) is str:
            return type(new) is type(old) and bool(new == old)
        if is_host_number(old):
            return type(new) is type(old.value) or _is_number(new, type(old.value))
        if type(old) is ReadInt or type(old) is ReadFloat:
            return _is_number(new, int if type(old) is ReadInt else float)
        if type(old) is HostBool:
            return type(new) is bool or type(new) is HostBool
        known = new.plain if is_known(new) else new
        return is_array(known) and kind_of(known) == kind_of(old.plain)

    def _chosen(self, new: Any, old: Any) -> Any:
        if type(old) is dict:
            return {key: self._chosen(new[key], each) for key, each in old.items()}
        if is_nest(old):
            parts = [self._chosen(*each) for each in zip(new, old, strict=True)]
            return parts if type(old) is list else tuple.__new__(type(old), parts)
        if isinstance(old, torch.Tensor):
            return torch.where(self._flagged(), new, old)
        if old is None or type(old) is str:
            return old
        if any(isinstance(each, SYMBOLIC) and not is_host_number(each) for each in (new, old)):
            return self._in_graph(new, old)
        return self._calls.given(self._calls.found(_either, (self._is_new, new, old)))

    def _in_graph(self, new: Any, old: Any) -> Any:
        """A number of the graph's, or one that was there."""
        kind = torch.float64 if any(map(_is_float, (new, old))) else torch.int64
        one, other = (self._as_tensor(each, kind) for each in (new, old))
        return torch.where(self._flagged(), one, other).item()

    def _as_tensor(self, number: Any, kind: torch.dtype) -> torch.Tensor:
        if is_host_number(number):
            return self._calls.tensor(torch.tensor, (number, kind), ("dtype",))
        return torch.tensor(number, dtype=kind)

    def _flagged(self) -> torch.Tensor:
        if self._flag is None:
            self._flag = self._calls.tensor(torch.tensor, (self._is_new,))
        return self._flag


def _either(first: bool, one: Any, other: Any) -> Any:
    return one if first else other


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors lie in memory alike, without gaps, and have no history."""
    kinds = [(t.shape, t.dtype, t.device, t.is_contiguous(), t.requires_grad) for t in (one, other)]
    return kinds[0] == kinds[1] and kinds[0][3:] == (True, False)


def _is_float(number: Any) -> bool:
    if is_host_number(number):
        return type(number.value) is float
    return type(number) is float or type(number) is ReadFloat


def _is_number(new: Any, kind: type) -> bool:
    """Whether a number that the step has appended is an integer, or a float."""
    if is_host_number(new):
        return type(new.value) is kind
    return type(new) in (kind, ReadFloat if kind is float else ReadInt)
