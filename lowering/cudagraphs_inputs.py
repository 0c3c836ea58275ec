"""How a recording reads its inputs, which it finds at fixed addresses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import torch

from graphopt._compat import cuda
from graphopt.errors import LoweringError
from graphopt.lowering.compiler import Kind, kind_of
from graphopt.lowering.cudagraphs_pieces import Way

_CHANGES_BEFORE_COPYING = 2


class Input(NamedTuple):
    """One input of a piece.

    Attributes:
        name: for messages.
        way: how the piece gets it.
        written: the piece updates it, so that it cannot be copied.
    """

    name: str
    way: Way
    written: bool = False


Values: TypeAlias = list[Any]


class PieceInputs:
    """The inputs of one piece, and what its recording relies on.

    Args:
        inputs: in the order of the arguments.
        device: of the piece.
    """

    def __init__(self, inputs: Sequence[Input], device: torch.device) -> None:
        self._inputs = list(inputs)
        self._device = device
        self._buffers: dict[int, torch.Tensor] = {}
        self._addresses: list[int | None] = [None] * len(self._inputs)
        self._numbers: dict[int, Any] = {}
        self._changes: Counter[int] = Counter()
        self._sort()

    def _sort(self) -> None:
        by_way: dict[Way, list[int]] = {way: [] for way in Way}
        for index, each in enumerate(self._inputs):
            by_way[each.way].append(index)
        self._static, self._copied = by_way[Way.STATIC], by_way[Way.COPIED]
        self._scalars, self._guarded = by_way[Way.SCALAR], by_way[Way.NUMBER]

    @property
    def copied(self) -> set[int]:
        """Positions of tensors that are read in buffers."""
        return set(self._copied)

    def bind(self, values: Sequence[Any]) -> Values:
        """What the piece is to be run with, in order to be recorded.

        Buffers are filled. Addresses and numbers are remembered.

        Raises:
            LoweringError: a tensor cannot be read at a fixed address.
        """
        bound = list(values)
        for index in self._static:
            self._refuse_other_device(index, values[index])
            self._addresses[index] = values[index].data_ptr()
        for index in self._guarded:
            self._numbers[index] = values[index]
        for index in (*self._copied, *self._scalars):
            bound[index] = self._buffer(index, values[index])
        self.load(values)
        return bound

    def load(self, values: Sequence[Any]) -> None:
        """Copy into the buffers what a replay is to read."""
        for index in self._copied:
            _copy_into(self._buffers[index], values[index])
        for index in self._scalars:
            # The number goes along with the kernel: nothing waits, and it may change at once.
            self._buffers[index].fill_(values[index].item())

    def changed(self, values: Sequence[Any]) -> list[str]:
        """Inputs that are not what the recording reads, by name; empty if it may be replayed.

        An input whose address changes again and again is copied from then on.
        """
        indices = [i for i in self._guarded if values[i] != self._numbers[i]]
        indices += [i for i in self._copied if not _fits(self._buffers[i], values[i])]
        if not cuda.same_addresses(values, self._addresses, self._static):
            indices += [i for i in self._static if values[i].data_ptr() != self._addresses[i]]
        self._note(indices)
        return [self._inputs[index].name for index in indices]

    def is_buffer(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies in one of the buffers, which the next replay overwrites."""
        storage = tensor.untyped_storage().data_ptr()
        return any(
            buffer.untyped_storage().data_ptr() == storage for buffer in self._buffers.values()
        )

    def kinds(self, bound: Values) -> tuple[Kind, ...]:
        """What compiled code in the piece depends on."""
        return tuple(kind_of(value) for value in bound if isinstance(value, torch.Tensor))

    def _note(self, indices: Sequence[int]) -> None:
        for index in indices:
            each = self._inputs[index]
            self._changes[index] += 1
            often = self._changes[index] >= _CHANGES_BEFORE_COPYING
            if often and each.way is Way.STATIC and not each.written:
                self._inputs[index] = each._replace(way=Way.COPIED)
        self._sort()

    def _buffer(self, index: int, value: torch.Tensor) -> torch.Tensor:
        scalar = self._inputs[index].way is Way.SCALAR
        if not scalar:
            self._refuse_other_device(index, value)
        known = self._buffers.get(index)
        if known is not None and (scalar or _fits(known, value)):
            return known
        if scalar:  # fused optimizers take a learning rate on the device in float32
            buffer = torch.zeros((), dtype=torch.float32, device=self._device)
        elif _overlaps(value):
            raise LoweringError(f"elements of %{self._inputs[index].name} share memory")
        else:
            buffer = same_layout(value)
        self._buffers[index] = buffer
        return buffer

    def _refuse_other_device(self, index: int, value: torch.Tensor) -> None:
        if value.device != self._device and (value.device.type != "cpu" or value.dim() > 0):
            name = self._inputs[index].name
            raise LoweringError(f"%{name} is on {value.device}, not on {self._device}")


def same_layout(value: torch.Tensor) -> torch.Tensor:
    """A new tensor of the shape, strides, dtype and device of another."""
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


def copy_of(value: Any) -> Any:
    """A copy of a tensor, in storage of its own; anything else as it is."""
    if not isinstance(value, torch.Tensor):
        return value
    copied = same_layout(value)
    _copy_into(copied, value)
    return copied


def _fits(buffer: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether a buffer can hold a value, whose strides may be others."""
    if buffer.shape != value.shape or buffer.dtype != value.dtype:
        return False
    return all(value.stride(dimension) == 0 for dimension in _expanded(buffer))


def _copy_into(buffer: torch.Tensor, value: torch.Tensor) -> None:
    expanded = _expanded(buffer)
    _first(buffer, expanded).copy_(_first(value, expanded))


def _expanded(value: torch.Tensor) -> list[int]:
    """Dimensions along which all elements are one."""
    pairs = enumerate(zip(value.shape, value.stride(), strict=True))
    return [dimension for dimension, (size, stride) in pairs if stride == 0 and size > 1]


def _first(value: torch.Tensor, dimensions: Sequence[int]) -> torch.Tensor:
    for dimension in dimensions:
        value = value.narrow(dimension, 0, 1)
    return value


def _overlaps(value: torch.Tensor) -> bool:
    """Whether two indices, not along expanded dimensions, may name one element."""
    reach = 0
    for stride, size in sorted(zip(value.stride(), value.shape, strict=True)):
        if size <= 1 or stride == 0:
            continue
        if stride <= reach:
            return True
        reach += (size - 1) * stride
    return False
