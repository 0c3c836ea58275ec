"""Collectives that a step calls itself (`graphopt.Manual`), as functional collectives.

`torch.distributed.all_reduce(t)` changes `t` behind the back of a tracer. While a step is traced it
launches the functional collective instead, and writes what that gives into `t`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist

from graphopt import _compat
from graphopt.errors import CaptureError
from graphopt.tracing.replace import replaced
from graphopt.tracing.source import current_user_line

_UNSUPPORTED = (
    "all_gather_object",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "batch_isend_irecv",
    "broadcast_object_list",
    "gather",
    "gather_object",
    "irecv",
    "isend",
    "monitored_barrier",
    "recv",
    "reduce",
    "reduce_scatter",
    "scatter",
    "scatter_object_list",
    "send",
)


class TracedWork:
    """What an asynchronous collective returns: `wait()` writes the result.

    Args:
        destinations: what the parts of the result are written to, in order.
    """

    def __init__(self, destinations: Sequence[torch.Tensor], launched: torch.Tensor) -> None:
        self._destinations, self._launched = destinations, launched

    def wait(self, timeout: Any = None) -> bool:
        """Write what was communicated to where the program wants it. Returns that it is there."""
        result = torch.ops._c10d_functional.wait_tensor(self._launched)
        parts = [result] if len(self._destinations) == 1 else self._parts(result)
        with torch.no_grad():
            for destination, part in zip(self._destinations, parts, strict=True):
                destination.copy_(part.view(destination.shape))
        return True

    def _parts(self, result: torch.Tensor) -> Sequence[torch.Tensor]:
        return result.view(len(self._destinations), -1).unbind()


def functional_collectives() -> AbstractContextManager[None]:
    """While active, in-place collectives of `torch.distributed` are functional ones; those without
    a functional form are refused."""
    return replaced(
        *((dist, name, function) for name, function in _SUPPORTED.items()),
        *((dist, name, _refusal(name)) for name in _UNSUPPORTED),
    )


def _all_reduce(
    tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
) -> Any:
    named = _compat.group_or_default(group).group_name
    launched = torch.ops._c10d_functional.all_reduce(tensor, _name(op), named)
    return _finish(tensor, launched, async_op)


def _broadcast(
    tensor: torch.Tensor,
    src: int | None = None,
    group: Any = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> Any:
    process_group = _compat.group_or_default(group)
    root = dist.get_group_rank(process_group, src or 0) if group_src is None else group_src
    launched = torch.ops._c10d_functional.broadcast(tensor, root, process_group.group_name)
    return _finish(tensor, launched, async_op)


def _all_gather_into_tensor(
    output_tensor: torch.Tensor,
    input_tensor: torch.Tensor,
    group: Any = None,
    async_op: bool = False,
) -> Any:
    process_group = _compat.group_or_default(group)
    launched = torch.ops._c10d_functional.all_gather_into_tensor(
        input_tensor, process_group.size(), process_group.group_name
    )
    return _finish(output_tensor, launched, async_op)


def _all_gather(
    tensor_list: list[torch.Tensor],
    tensor: torch.Tensor,
    group: Any = None,
    async_op: bool = False,
) -> Any:
    """All are gathered into one tensor, of which each of the list is given its part."""
    process_group = _compat.group_or_default(group)
    if len(tensor_list) != process_group.size():
        raise ValueError(
            f"all_gather is given {len(tensor_list)} tensors for {process_group.size()} ranks"
        )
    if any(each.shape != tensor.shape or each.dtype != tensor.dtype for each in tensor_list):
        raise CaptureError(
            "it calls torch.distributed.all_gather with tensors of different shapes or dtypes,"
            " which has no functional form",
            location=str(current_user_line()),
            hint="let all ranks give tensors of one shape, padded to the longest",
        )
    launched = torch.ops._c10d_functional.all_gather_into_tensor(
        tensor.reshape(-1), process_group.size(), process_group.group_name
    )
    return _finished(TracedWork(tensor_list, launched), async_op)


def _reduce_scatter_tensor(
    output: torch.Tensor,
    input: torch.Tensor,
    op: Any = dist.ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
) -> Any:
    process_group = _compat.group_or_default(group)
    launched = torch.ops._c10d_functional.reduce_scatter_tensor(
        input, _name(op), process_group.size(), process_group.group_name
    )
    return _finish(output, launched, async_op)


_SUPPORTED: dict[str, Callable[..., Any]] = {
    "all_reduce": _all_reduce,
    "broadcast": _broadcast,
    "all_gather": _all_gather,
    "all_gather_into_tensor": _all_gather_into_tensor,
    "reduce_scatter_tensor": _reduce_scatter_tensor,
}
"""By the name of a function of `torch.distributed`, what stands for it."""


def _finish(destination: torch.Tensor, launched: torch.Tensor, async_op: bool) -> Any:
    return _finished(TracedWork([destination], launched), async_op)


def _finished(work: TracedWork, async_op: bool) -> Any:
    if async_op:
        return work
    work.wait()
    return None


def _refusal(name: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise CaptureError(
            f"it calls torch.distributed.{name}, which has no functional form",
            location=str(current_user_line()),
            hint="call it outside the step, or use all_reduce, broadcast, all_gather,"
            " all_gather_into_tensor or reduce_scatter_tensor",
        )

    return refuse


def _name(op: Any) -> str:
    """The name that functional collectives have for a `ReduceOp`."""
    names = {
        dist.ReduceOp.SUM: "sum",
        dist.ReduceOp.AVG: "avg",
        dist.ReduceOp.PRODUCT: "product",
        dist.ReduceOp.MIN: "min",
        dist.ReduceOp.MAX: "max",
    }
    for known, name in names.items():
        if op == known:
            return name
    raise CaptureError(
        f"it reduces with {op}, which has no functional form",
        location=str(current_user_line()),
        hint="use SUM, AVG, PRODUCT, MIN or MAX",
    )
