"""`CudaGraphPiece`: a part of a graph that is recorded once and then replayed.

A recording finds its inputs at fixed addresses: `PieceInputs` says how they get there.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import fx, nn

from graphopt._compat import cuda
from graphopt.errors import LoweringError
from graphopt.ir.inplace import uninitialised_like
from graphopt.lowering.compiler import InputKind, kind_of
from graphopt.lowering.cudagraphs.pieces import InputTransfer
from graphopt.lowering.cudagraphs.recorder import CudaRecorder
from graphopt.readable.columns import first_of

_CHANGES_BEFORE_COPYING = 2


class PieceInput(NamedTuple):
    """One input of a piece: its name, and the way in which the recording gets it.

    Attributes:
        name: for messages.
        way: the way in which the piece gets the input.
        written: the piece updates it, so that it cannot be copied.
    """

    name: str
    way: InputTransfer
    written: bool = False


Values: TypeAlias = list[Any]


class PieceInputs:
    """The inputs of a piece, and the addresses and numbers that its recording relies on.

    Args:
        inputs: the inputs, in the order of the arguments.
        device: the device of the piece.
    """

    def __init__(self, inputs: Sequence[PieceInput], device: torch.device) -> None:
        self._inputs = list(inputs)
        self._device = device
        self._buffers: dict[int, torch.Tensor] = {}
        self._addresses: list[int | None] = [None] * len(self._inputs)
        self._numbers: dict[int, Any] = {}
        self._changes: Counter[int] = Counter()
        self._sort()

    def _sort(self) -> None:
        by_way: dict[InputTransfer, list[int]] = {way: [] for way in InputTransfer}
        for index, each in enumerate(self._inputs):
            by_way[each.way].append(index)
        self._static, self._copied = by_way[InputTransfer.STATIC], by_way[InputTransfer.COPIED]
        self._scalars, self._guarded = by_way[InputTransfer.SCALAR], by_way[InputTransfer.NUMBER]

    @property
    def copied(self) -> set[int]:
        """The positions of tensors that are copied into buffers."""
        return set(self._copied)

    def bind(self, values: Sequence[Any]) -> Values:
        """Binds the inputs that the piece is recorded with.

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
        """Copies the inputs of a replay into the buffers."""
        for index in self._copied:
            _copy_into(self._buffers[index], values[index])
        for index in self._scalars:
            # The number goes along with the kernel: nothing waits, and it may change at once.
            self._buffers[index].fill_(values[index].item())

    def changed(self, values: Sequence[Any]) -> list[str]:
        """The names of inputs that differ from what was recorded; empty if the piece may be
        replayed.

        An input whose address changes again and again is copied from then on.
        """
        indices = [i for i in self._guarded if values[i] != self._numbers[i]]
        indices += [i for i in self._copied if not _fits(self._buffers[i], values[i])]
        if not cuda.same_addresses(values, self._addresses, self._static):
            indices += [i for i in self._static if values[i].data_ptr() != self._addresses[i]]
        self._note(indices)
        return [self._inputs[index].name for index in indices]

    def is_buffer(self, value: Any) -> bool:
        """True if a tensor lies in a buffer, which the next replay overwrites."""
        if not isinstance(value, torch.Tensor):
            return False
        storage = value.untyped_storage().data_ptr()
        return any(
            buffer.untyped_storage().data_ptr() == storage for buffer in self._buffers.values()
        )

    def kinds(self, bound: Values) -> tuple[InputKind, ...]:
        """The kinds of the inputs, which compiled code in the piece depends on."""
        return tuple(kind_of(value) for value in bound if isinstance(value, torch.Tensor))

    def _note(self, indices: Sequence[int]) -> None:
        for index in indices:
            each = self._inputs[index]
            self._changes[index] += 1
            often = self._changes[index] >= _CHANGES_BEFORE_COPYING
            if often and each.way is InputTransfer.STATIC and not each.written:
                self._inputs[index] = each._replace(way=InputTransfer.COPIED)
        self._sort()

    def _buffer(self, index: int, value: torch.Tensor) -> torch.Tensor:
        scalar = self._inputs[index].way is InputTransfer.SCALAR
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
            buffer = uninitialised_like(value)
        self._buffers[index] = buffer
        return buffer

    def _refuse_other_device(self, index: int, value: torch.Tensor) -> None:
        if value.device != self._device and (value.device.type != "cpu" or value.dim() > 0):
            name = self._inputs[index].name
            raise LoweringError(f"%{name} is on {value.device}, not on {self._device}")


def copy_of(value: Any) -> Any:
    """A copy of a tensor in its own storage; other values unchanged."""
    if not isinstance(value, torch.Tensor):
        return value
    copied = uninitialised_like(value)
    _copy_into(copied, value)
    return copied


def _fits(buffer: torch.Tensor, value: torch.Tensor) -> bool:
    """True if a buffer can hold a value, which may have other strides."""
    if buffer.shape != value.shape or buffer.dtype != value.dtype:
        return False
    return all(value.stride(dimension) == 0 for dimension in _expanded(buffer))


def _copy_into(buffer: torch.Tensor, value: torch.Tensor) -> None:
    expanded = _expanded(buffer)
    _first(buffer, expanded).copy_(_first(value, expanded))


def _expanded(value: torch.Tensor) -> list[int]:
    """The dimensions of a tensor that are expanded: all elements along one are the same."""
    pairs = enumerate(zip(value.shape, value.stride(), strict=True))
    return [dimension for dimension, (size, stride) in pairs if stride == 0 and size > 1]


def _first(value: torch.Tensor, dimensions: Sequence[int]) -> torch.Tensor:
    for dimension in dimensions:
        value = value.narrow(dimension, 0, 1)
    return value


def _overlaps(value: torch.Tensor) -> bool:
    """True if two indices name one element, other than along expanded dimensions."""
    reach = 0
    for stride, size in sorted(zip(value.stride(), value.shape, strict=True)):
        if size <= 1 or stride == 0:
            continue
        if stride <= reach:
            return True
        reach += (size - 1) * stride
    return False


logger = logging.getLogger("graphopt")

_MOST_RECORDINGS = 8


class Pools:
    """The memory pools for the recordings of one graph's pieces.

    Pieces that are recorded in the order in which they run share a pool: what one of them frees,
    the next may use. A piece that is recorded again gets a pool of its own, for memory that is free
    now may be in use when the piece runs.

    Args:
        new_pool: makes a pool.
    """

    def __init__(self, new_pool: Callable[[], Any]) -> None:
        self._new_pool = new_pool
        self._shared: Any = None
        self._last = -1

    def of(self, position: int) -> Any:
        """The pool for the piece at that position of the running order."""
        if position <= self._last:
            return self._new_pool()
        if self._shared is None:
            self._shared = self._new_pool()
        self._last = position
        return self._shared


class CudaGraphPiece(nn.Module):
    """A piece of a graph that runs as a CUDA graph.

    Its first call runs it operator by operator, where regions are compiled and kernels are chosen.
    The second records it, and from then on it is replayed. Where an input that has to be the same
    tensor in each call is another one, it is recorded again, at most 8 times; from then on, and
    where recording fails, it runs operator by operator.

    Args:
        body: takes the inputs and returns a list.
        name: for messages.
        inputs: the inputs, with the way in which the piece gets each.
        leaving: for each result, whether it is needed after the next replay may have begun.
        position: the number of pieces of its graph that run before it.
        device: the device that it runs on.
        pools: memory of the graph's pieces.
        recorder: records.

    Attributes:
        graph_module: `body`.
        failure: the reason why it runs operator by operator, None while it does not.
    """

    def __init__(
        self,
        body: fx.GraphModule,
        name: str,
        inputs: Sequence[PieceInput],
        leaving: Sequence[bool],
        *,
        position: int,
        device: torch.device,
        pools: Pools,
        recorder: CudaRecorder,
    ) -> None:
        super().__init__()
        self.graph_module = body
        self.failure: str | None = None
        self._name = name
        self._inputs = PieceInputs(inputs, device)
        self._leaving = list(leaving)
        self._position, self._device = position, device
        self._pools, self._recorder = pools, recorder
        self._recordings = 0
        self._warm: tuple[InputKind, ...] | None = None
        self._recorded: tuple[torch.cuda.CUDAGraph, Values] | None = None

    @property
    def leaving(self) -> list[bool]:
        """A flag for each result: True if a copy of it is handed out."""
        return list(self._leaving)

    @property
    def copied(self) -> set[int]:
        """The positions of inputs that replays read from copies."""
        return self._inputs.copied

    @property
    def is_recorded(self) -> bool:
        """True if the next call replays, as long as its inputs are at the same addresses."""
        return self._recorded is not None

    def forward(self, *values: Any) -> Values:
        """Runs the piece: replays its recording, or records it.

        Args:
            *values: its inputs.

        Returns:
            Its results. Those that are not leaving are overwritten by the next call.
        """
        if self.failure is not None:
            return self._run(values)
        if self._recorded is not None:
            changed = self._inputs.changed(values)
            if not changed:
                self._inputs.load(values)
                return self._replay()
            self._forget(changed)
            if self.failure is not None:
                return self._run(values)
        try:
            bound = self._inputs.bind(values)
        except LoweringError as error:
            self._give_up(str(error))
            return self._run(values)
        kinds = self._inputs.kinds(bound)
        if kinds != self._warm:
            self._warm = kinds
            return self._own(self._recorder.warm_up(self._device, lambda: self._run(bound)))
        return self._record(values, bound)

    def _run(self, values: Sequence[Any]) -> Values:
        results: Values = self.graph_module(*values)
        return results

    def _record(self, values: Sequence[Any], bound: Values) -> Values:
        noting = _LocatingInterpreter(self.graph_module)
        pool = self._pools.of(self._position)
        try:
            self._recorded = self._recorder.record(self._device, lambda: noting.run(*bound), pool)
        except Exception as error:
            message = str(error).strip().partition("\n")[0]
            self._give_up(f"{noting.place}: {type(error).__name__}: {message}")
            return self._run(values)
        self._recordings += 1
        for index, result in enumerate(self._recorded[1]):
            self._leaving[index] |= self._inputs.is_buffer(result)
        logger.info("%s is recorded", self._name)
        return self._replay()

    def _replay(self) -> Values:
        assert self._recorded is not None
        recording, results = self._recorded
        recording.replay()
        return [
            copy_of(result) if leaving else result
            for result, leaving in zip(results, self._leaving, strict=True)
        ]

    def _own(self, results: Values) -> Values:
        """Copies results that lie in buffers, which the next call overwrites."""
        return [copy_of(each) if self._inputs.is_buffer(each) else each for each in results]

    def _forget(self, changed: list[str]) -> None:
        self._recorded = self._warm = None
        names = first_of(changed, 3)
        if self._recordings >= _MOST_RECORDINGS:
            self._give_up(f"it was recorded {self._recordings} times, and {names} changed again")
        else:
            logger.info("%s will be recorded again: %s changed", self._name, names)

    def _give_up(self, reason: str) -> None:
        self.failure = reason
        logger.warning("%s runs operator by operator: %s", self._name, reason)


class _LocatingInterpreter(fx.Interpreter):
    """Runs a graph and remembers the current node for error messages."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.extra_traceback = False
        self.place = "it begins"

    def run_node(self, n: fx.Node) -> Any:
        if n.op not in ("placeholder", "get_attr", "output"):
            self.place = f"%{n.name} = {n.target}"
        return super().run_node(n)
