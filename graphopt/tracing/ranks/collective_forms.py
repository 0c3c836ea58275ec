"""Functional forms of `torch.distributed`'s collectives, with the same results.

There are five functional collectives. The others are made of them: a scatter is a broadcast of all
parts, a gather an all-gather that one rank keeps, a reduction to one rank an all-reduce, and lists
of tensors are one tensor, cut.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from graphopt import _compat
from graphopt.errors import CaptureError
from graphopt.ir.user_frames import current_location


class TracedWork:
    """The result of an asynchronous collective in a trace; `wait()` writes the received tensor.

    Args:
        destinations: the tensors that the parts of the result are written to, in order.
    """

    def __init__(self, destinations: Sequence[torch.Tensor], launched: torch.Tensor | None) -> None:
        self._destinations, self._launched = destinations, launched

    def wait(self, timeout: Any = None) -> bool:
        if self._launched is None:
            return True
        result = torch.ops._c10d_functional.wait_tensor(self._launched)
        sizes = [destination.numel() for destination in self._destinations]
        parts = [result] if len(sizes) == 1 else result.reshape(-1)[: sum(sizes)].split(sizes)
        with torch.no_grad():
            for destination, part in zip(self._destinations, parts, strict=True):
                destination.copy_(part.reshape(destination.shape))
        return True


def all_reduce(
    tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
) -> Any:
    return _finish([tensor], _reduced(tensor, op, _compat.group_or_default(group)), async_op)


def all_reduce_coalesced(
    tensors: list[torch.Tensor],
    op: Any = dist.ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
) -> Any:
    launched = _reduced(_joined(tensors), op, _compat.group_or_default(group))
    return _finish(tensors, launched, async_op)


def reduce(
    tensor: torch.Tensor,
    dst: int | None = None,
    op: Any = dist.ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> Any:
    """Traces `dist.reduce`; unlike in eager code, the tensor of other ranks than `dst` is
    unchanged."""
    process_group = _compat.group_or_default(group)
    root = _root(process_group, dst, group_dst)
    launched = _reduced(tensor, op, process_group)
    return _finish([tensor] if process_group.rank() == root else [], launched, async_op)


def broadcast(
    tensor: torch.Tensor,
    src: int | None = None,
    group: Any = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> Any:
    process_group = _compat.group_or_default(group)
    root = _root(process_group, src, group_src)
    return _finish([tensor], _sent_to_all(tensor, root, process_group), async_op)


def scatter(
    tensor: torch.Tensor,
    scatter_list: list[torch.Tensor] | None = None,
    src: int | None = None,
    group: Any = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> Any:
    process_group = _compat.group_or_default(group)
    root, ranks = _root(process_group, src, group_src), process_group.size()
    given = scatter_list if process_group.rank() == root else None
    if given is None:
        given = [torch.zeros_like(tensor)] * ranks
    _check_alike("scatter", given, tensor, ranks)
    everything = _sent_to_all(_joined(given), root, process_group)
    parts = [torch.empty_like(tensor) for _ in range(ranks)]
    parts[process_group.rank()] = tensor
    return _finish(parts, everything, async_op)


def all_gather_into_tensor(
    output_tensor: torch.Tensor,
    input_tensor: torch.Tensor,
    group: Any = None,
    async_op: bool = False,
) -> Any:
    process_group = _compat.group_or_default(group)
    return _finish([output_tensor], _gathered(input_tensor, process_group), async_op)


def all_gather(
    tensor_list: list[torch.Tensor], tensor: torch.Tensor, group: Any = None, async_op: bool = False
) -> Any:
    process_group = _compat.group_or_default(group)
    _check_alike("all_gather", tensor_list, tensor, process_group.size())
    return _finish(tensor_list, _gathered(tensor.reshape(-1), process_group), async_op)


def gather(
    tensor: torch.Tensor,
    gather_list: list[torch.Tensor] | None = None,
    dst: int | None = None,
    group: Any = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> Any:
    process_group = _compat.group_or_default(group)
    keeps = process_group.rank() == _root(process_group, dst, group_dst)
    kept = (gather_list or []) if keeps else []
    if keeps:
        _check_alike("gather", kept, tensor, process_group.size())
    return _finish(kept, _gathered(tensor.reshape(-1), process_group), async_op)


def reduce_scatter_tensor(
    output: torch.Tensor,
    input: torch.Tensor,
    op: Any = dist.ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
) -> Any:
    process_group = _compat.group_or_default(group)
    return _finish([output], _reduced_parts(input, op, process_group), async_op)


def reduce_scatter(
    output: torch.Tensor,
    input_list: list[torch.Tensor],
    op: Any = dist.ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
) -> Any:
    process_group = _compat.group_or_default(group)
    _check_alike("reduce_scatter", input_list, output, process_group.size())
    return _finish([output], _reduced_parts(_joined(input_list), op, process_group), async_op)


def all_to_all_single(
    output: torch.Tensor,
    input: torch.Tensor,
    output_split_sizes: list[int] | None = None,
    input_split_sizes: list[int] | None = None,
    group: Any = None,
    async_op: bool = False,
) -> Any:
    process_group = _compat.group_or_default(group)
    received = output_split_sizes or _equal_parts(output, process_group)
    sent = input_split_sizes or _equal_parts(input, process_group)
    return _finish([output], _exchanged(input, received, sent, process_group), async_op)


def all_to_all(
    output_tensor_list: list[torch.Tensor],
    input_tensor_list: list[torch.Tensor],
    group: Any = None,
    async_op: bool = False,
) -> Any:
    received = [tensor.numel() for tensor in output_tensor_list]
    sent = [tensor.numel() for tensor in input_tensor_list]
    everything, process_group = _joined(input_tensor_list), _compat.group_or_default(group)
    launched = _exchanged(everything, received, sent, process_group)
    return _finish(output_tensor_list, launched, async_op)


def barrier(group: Any = None, async_op: bool = False, device_ids: Any = None) -> Any:
    """Traces `dist.barrier` as no operation, since other ranks see only a graph's collectives."""
    return TracedWork([], None) if async_op else None


FORMS: dict[str, Callable[..., Any]] = {
    form.__name__: form
    for form in (
        *(all_reduce, all_reduce_coalesced, reduce, broadcast, scatter, barrier),
        *(all_gather_into_tensor, all_gather, gather, reduce_scatter_tensor, reduce_scatter),
        *(all_to_all_single, all_to_all),
    )
}
"""By the name of a function of `torch.distributed`, what stands for it."""


def _reduced(tensor: torch.Tensor, op: Any, group: dist.ProcessGroup) -> torch.Tensor:
    return _launch("all_reduce", tensor, _name(op), group.group_name)


def _sent_to_all(tensor: torch.Tensor, root: int, group: dist.ProcessGroup) -> torch.Tensor:
    return _launch("broadcast", tensor, root, group.group_name)


def _gathered(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    return _launch("all_gather_into_tensor", tensor, group.size(), group.group_name)


def _reduced_parts(tensor: torch.Tensor, op: Any, group: dist.ProcessGroup) -> torch.Tensor:
    return _launch("reduce_scatter_tensor", tensor, _name(op), group.size(), group.group_name)


def _exchanged(
    tensor: torch.Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup
) -> torch.Tensor:
    return _launch("all_to_all_single", tensor, received, sent, group.group_name)


def _equal_parts(tensor: torch.Tensor, group: dist.ProcessGroup) -> list[int]:
    return [tensor.shape[0] // group.size()] * group.size()


def _launch(name: str, tensor: torch.Tensor, *options: Any) -> torch.Tensor:
    """Launches a functional collective; forgets known values of its argument, which tracers
    would compute with."""
    _compat.forget_constant(_compat.current_tracer(), tensor)
    launched: torch.Tensor = getattr(torch.ops._c10d_functional, name)(tensor, *options)
    return launched


def _joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def _finish(
    destinations: Sequence[torch.Tensor], launched: torch.Tensor, async_op: bool
) -> TracedWork | None:
    work = TracedWork(destinations, launched)
    if async_op:
        return work
    work.wait()
    return None


def _root(group: dist.ProcessGroup, rank: int | None, group_rank: int | None) -> int:
    """The rank in the group of the collective's root."""
    return dist.get_group_rank(group, rank or 0) if group_rank is None else group_rank


def _check_alike(
    name: str, tensors: Sequence[torch.Tensor], like: torch.Tensor, ranks: int
) -> None:
    if len(tensors) != ranks:
        raise ValueError(f"{name} is given {len(tensors)} tensors for {ranks} ranks")
    if any(each.shape != like.shape or each.dtype != like.dtype for each in tensors):
        raise CaptureError(
            f"it calls torch.distributed.{name} with tensors of different shapes or dtypes, which"
            " has no functional form",
            location=current_location(),
            hint="let all ranks give tensors of one shape, padded to the longest",
        )


def _name(op: Any) -> str:
    """The name of a `ReduceOp` in functional collectives."""
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
        location=current_location(),
        hint="use SUM, AVG, PRODUCT, MIN or MAX",
    )
