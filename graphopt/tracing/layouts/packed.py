"""Packed sequences, whose lengths torch's kernels read as plain numbers.

    pack_padded_sequence(x, lengths)    ==>    assumption(lengths)      # [5, 3, 2] in this call
                                               rows of each step, one after another

The lengths of the call that is captured are an assumption of the graph; other lengths are another
graph. Packing and padding are done by the operators that torch's own kernels call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from graphopt import _compat
from graphopt.tracing.exactness import recurrent

_PACK, _PAD = "_pack_padded_sequence", "_pad_packed_sequence"


class Packing:
    """The known lengths of one trace's packed sequences.

    Args:
        values: gives the integers that a tensor holds in this call, which the graph assumes.
    """

    def __init__(self, values: Callable[[torch.Tensor], tuple[int, ...]]) -> None:
        self._values = values
        self._known: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def takes(self, function: Any, args: Sequence[Any]) -> bool:
        """True if a torch function reads sequence lengths."""
        name = getattr(function, "__name__", "")
        if name in recurrent.KERNELS:  # the packed form has the sizes of its batches second
            return len(args) > 2 and isinstance(args[1], torch.Tensor) and args[1].dim() == 1
        return name in (_PACK, _PAD)

    def call(self, function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Calls a torch function that reads sequence lengths.

        Raises:
            CaptureError: the lengths cannot be known.
        """
        name = function.__name__
        if name == _PACK:
            return self._packed(*args, **kwargs)
        if name == _PAD:
            return self._padded(*args, **kwargs)
        data, sizes, others = args[0], self._real(args[1]), args[2:]
        if name == "lstm" and recurrent.takes_as_padded(data, sizes.tolist(), others[0]):
            return _of_equal_lengths(function, data, len(sizes), others, kwargs)
        return function(data, sizes, *others, **kwargs)

    def _packed(self, x: torch.Tensor, lengths: torch.Tensor, batch_first: bool) -> Any:
        known = self._values(lengths)
        _check_lengths(known, x, batch_first)
        sizes = [sum(length > step for length in known) for step in range(max(known))]
        rows = x.transpose(0, 1) if batch_first else x
        data = _PackRows.apply(rows, sizes)
        return data, self._tensor(sizes)

    def _padded(
        self,
        data: torch.Tensor,
        batch_sizes: torch.Tensor,
        batch_first: bool,
        padding_value: float,
        total_length: int = -1,
    ) -> Any:
        sizes = self._real(batch_sizes).tolist()
        steps = max(total_length, len(sizes))
        if 0 < total_length < len(sizes):
            raise ValueError(
                "Expected total_length to be at least the length of the longest sequence in input,"
                f" but got total_length={total_length} and max sequence length being {len(sizes)}"
            )
        shape = (steps, sizes[0], *data.shape[1:])
        output = torch.full(shape, padding_value, dtype=data.dtype, device=data.device)
        begin = offset = 0
        for step in range(1, len(sizes) + 1):
            if step < len(sizes) and sizes[step] == sizes[begin]:
                continue
            rows, size = (step - begin) * sizes[begin], sizes[begin]
            part = data[offset : offset + rows].view(step - begin, size, *data.shape[1:])
            output[begin:step, :size].copy_(part)
            begin, offset = step, offset + rows
        lengths = [sum(size > row for size in sizes) for row in range(sizes[0])]
        return (output.transpose(0, 1) if batch_first else output), torch.tensor(
            lengths, device="cpu"
        )

    def _tensor(self, sizes: list[int]) -> torch.Tensor:
        with _compat.without_modes():
            real = torch.tensor(sizes, device="cpu")
        traced = torch.tensor(sizes, device="cpu")
        self._known[id(traced)] = (traced, real)
        return traced

    def _real(self, batch_sizes: torch.Tensor) -> torch.Tensor:
        """Returns batch sizes as a real tensor, whose memory a kernel can read."""
        known = self._known.get(id(batch_sizes))
        if known is not None:
            return known[1]
        values = self._values(batch_sizes)
        with _compat.without_modes():
            return torch.tensor(values, device="cpu")


def _of_equal_lengths(
    function: Any, data: torch.Tensor, steps: int, others: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    """Runs a recurrent layer on packed sequences of one length as on unpacked ones, as torch's
    kernel does."""
    batch = data.shape[0] // steps
    padded, (given, *others) = data.reshape(steps, batch, data.shape[1]), others
    begun = [each.view(each.shape[0], batch, each.shape[2]) for each in given]  # plain sizes
    output, *states = function(padded, begun, *others, False, **kwargs)
    return output.reshape(data.shape[0], output.shape[2]), *states


def _check_lengths(lengths: Sequence[int], x: torch.Tensor, batch_first: bool) -> None:
    """Makes the checks of torch's kernel."""
    batch, steps = (x.shape[0], x.shape[1]) if batch_first else (x.shape[1], x.shape[0])
    if len(lengths) != batch:
        raise RuntimeError(
            f"Expected `len(lengths)` to be equal to batch_size, but got {len(lengths)}"
            f" (batch_size={batch})"
        )
    if min(lengths) < 1 or max(lengths) > steps:
        raise RuntimeError(
            "Length of all samples has to be greater than 0, and at most that of the padded input:"
            f" {list(lengths)}"
        )
    if list(lengths) != sorted(lengths, reverse=True):
        raise RuntimeError(
            "`lengths` array must be sorted in decreasing order when `enforce_sorted` is True. You"
            " can pass `enforce_sorted=False` to pack_padded_sequence and/or pack_sequence"
        )


class _PackRows(torch.autograd.Function):
    """An autograd function that concatenates the first rows of each step; gradients are copied
    back, not summed."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, sizes: list[int]) -> torch.Tensor:
        ctx.sizes, ctx.shape = sizes, x.shape
        return torch.cat([x[step, :size] for step, size in enumerate(sizes)])

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        result, offset = gradient.new_zeros(ctx.shape), 0
        for step, size in enumerate(ctx.sizes):
            result[step, :size].copy_(gradient[offset : offset + size])
            offset += size
        return result, None
