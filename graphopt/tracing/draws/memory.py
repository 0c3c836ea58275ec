"""Whose memory the arrays lie in that the host's part of a step works with."""

from __future__ import annotations

import operator
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from graphopt import _compat


class OfTensors:
    """A function that looks at tensors of the model; one that looks at the same is the same.

    Args:
        tensors: that the step may write to.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.tensors = tensors

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self) or len(other.tensors) != len(self.tensors):
            return False
        return all(map(operator.is_, self.tensors, other.tensors))

    def __hash__(self) -> int:
        return hash(tuple(map(id, self.tensors)))


class ArrayMemory:
    """The arrays of one trace that were there before, and tensors in the memory of arrays."""

    def __init__(self) -> None:
        self._outside: list[Any] = []
        self._changed: list[Any] = []
        self._lent: list[Any] = []
        self._tensors: list[torch.Tensor] = []

    def add_outside(self, array: Any) -> None:
        """An array was there before the step."""
        self._outside.append(array)

    def write(self, array: Any) -> None:
        """The graph writes to an array that was there before."""
        self._changed.append(array)

    def is_changed(self, values: Iterable[Any]) -> bool:
        """Whether one of these values is an array in whose memory the graph writes, which runs when
        all is computed that is known before."""
        return _any_meet(values, self._changed)

    def lend(self, array: Any, stand_in: torch.Tensor) -> None:
        """A tensor lies in the memory of an array."""
        self._lent.append(array)
        self._tensors.append(stand_in)

    def is_lent(self, array: Any) -> bool:
        """Whether a tensor lies in the memory of an array."""
        return any(meet(array, each) for each in self._lent)

    def meets_outside(self, arrays: Iterable[Any]) -> bool:
        """Whether one of these arrays lies in the memory of one that was there before."""
        return any(meet(one, other) for one in arrays for other in self._outside)

    def is_written(self, values: Iterable[Any] | None = None) -> bool:
        """Whether one of the tensors has been updated in place.

        Args:
            values: where one of these is an array in its memory; None: wherever it lies.
        """
        written = [self._lent[number] for number in self._written()]
        if values is None:
            return bool(written)
        return _any_meet(values, written)

    def is_read_by_others(self) -> bool:
        """Whether somebody else may read what is written to one of the tensors."""
        return any(
            self.meets_outside([self._lent[number]])
            or any(meet(self._lent[number], other) for other in self._others(number))
            for number in self._written()
        )

    def _written(self) -> list[int]:
        return [n for n, tensor in enumerate(self._tensors) if _compat.may_be_written(tensor)]

    def _others(self, number: int) -> list[Any]:
        return [*self._lent[:number], *self._lent[number + 1 :]]


def _any_meet(values: Iterable[Any], arrays: Sequence[Any]) -> bool:
    """Whether one of these values is an array that lies in the memory of one of some arrays."""
    own = [each for each in values if hasattr(each, "__array_interface__")]
    return any(meet(one, other) for one in own for other in arrays)


def meet(one: Any, other: Any) -> bool:
    """Whether two arrays may lie in one memory."""
    return bool(sys.modules["numpy"].may_share_memory(one, other))
