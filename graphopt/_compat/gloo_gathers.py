"""All-gathers on gloo that do not end the process.

Gloo has two threads for a group, and each writes the name of the operation that it starts into one
string of the group, without a lock (`ProcessGroupGloo::runLoop`, torch 2.11 to 2.15). Short names
are stored in the string itself. "ALLGATHER_COALESCED", as which the functional collectives launch
every all-gather, has more than the 15 characters that fit, so two threads may free the same memory:
two ranks with thirty gathers in flight die in less than a minute. `ProcessGroup._allgather_base`
has a short name, as all other collectives of a graph have.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PythonCallbackWork, _register_work

from graphopt._compat.fakes import is_fake
from graphopt._compat.process_groups import group_named

_c10d: Any = torch.ops._c10d_functional
_GATHER: Any = _c10d.all_gather_into_tensor.default
_GATHER_LIST: Any = _c10d.all_gather_into_tensor_coalesced.default


def gather(tensor: torch.Tensor, group_size: int, group_name: str) -> torch.Tensor:
    """Launches an all-gather, as `_c10d_functional.all_gather_into_tensor` does.

    Args:
        tensor: what this rank sends, contiguous.
        group_size: the number of ranks.
        group_name: the name of the process group.

    Returns:
        The tensors of all ranks, along dimension 0. To be waited for.
    """
    group = _on_gloo(group_name, tensor)
    if group is None:
        launched: torch.Tensor = _GATHER._op(tensor, group_size, group_name)
        return launched
    gathered = _gathered(tensor, group_size)
    _register_work(gathered, group._allgather_base(gathered, tensor))
    return gathered


def gather_list(
    tensors: Sequence[torch.Tensor], group_size: int, group_name: str
) -> list[torch.Tensor]:
    """Launches an all-gather of a list as one message, as
    `_c10d_functional.all_gather_into_tensor_coalesced` does.

    Args:
        tensors: what this rank sends, contiguous.
        group_size: the number of ranks.
        group_name: the name of the process group.

    Returns:
        For each tensor those of all ranks, along dimension 0. Each is to be waited for.
    """
    one_type = len({(each.dtype, each.device) for each in tensors}) == 1
    if not one_type or _on_gloo(group_name, tensors[0]) is None:
        launched: list[torch.Tensor] = _GATHER_LIST._op(tensors, group_size, group_name)
        return launched
    received = gather(torch.cat([each.reshape(-1) for each in tensors]), group_size, group_name)
    gathered = [_gathered(each, group_size) for each in tensors]
    work = PythonCallbackWork(_Division(received, gathered, group_size))
    for each in gathered:
        _register_work(each, work)
    return gathered


LAUNCHES: Mapping[Any, Callable[..., Any]] = {_GATHER: gather, _GATHER_LIST: gather_list}
"""The functions that launch collectives in place of their operators."""


def _gathered(tensor: torch.Tensor, group_size: int) -> torch.Tensor:
    """An empty tensor for those of all ranks."""
    return tensor.new_empty((tensor.shape[0] * group_size, *tensor.shape[1:]))


def _on_gloo(group_name: str, tensor: torch.Tensor) -> dist.ProcessGroup | None:
    """The group, if it sends a tensor through gloo."""
    group = group_named(group_name)
    if group is None or tensor.device.type != "cpu" or is_fake(tensor):
        return None
    backend: Any = group._get_backend(tensor.device)
    return group if backend.name() == "gloo" else None


class _Division:
    """The pending division of one gathered tensor among those of a list: the first wait for one of
    them does it. If that wait fails, all do."""

    def __init__(
        self, received: torch.Tensor, gathered: Sequence[torch.Tensor], group_size: int
    ) -> None:
        self._gathered, self._group_size = tuple(gathered), group_size
        self._received: torch.Tensor | None = received
        self._failure: BaseException | None = None

    def __call__(self, timeout: timedelta) -> bool:
        if self._failure is not None:
            raise self._failure
        received, self._received = self._received, None
        if received is None:
            return True
        try:
            rows = _c10d.wait_tensor(received).view(self._group_size, -1)
        except BaseException as error:
            self._failure = error
            raise
        lengths = [each.numel() // self._group_size for each in self._gathered]
        for each, part in zip(self._gathered, rows.split(lengths, 1), strict=True):
            each.view(self._group_size, -1).copy_(part)
        self._gathered = ()
        return True
