"""Process groups: their names and ranks, fake groups, and helper groups."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist


def _forget_default_group() -> None:
    """Imports `torch.distributed.nn` so that its default arguments do not hold the current default
    group.

    torch.compile's tracer imports them too, and where a script has made its group before, they
    would keep it when it is destroyed: its threads would still run while Python ends, and every now
    and then they abort the process then (seen in torch 2.13). None stands for the default group.
    """
    import torch.distributed.nn.functional as functions

    for function in vars(functions).values():
        if defaults := getattr(function, "__defaults__", None):
            function.__defaults__ = tuple(
                None if isinstance(value, dist.ProcessGroup) else value for value in defaults
            )


if dist.is_available():
    _forget_default_group()


def default_store() -> dist.Store:
    """The store of the default process group, which all its ranks share."""
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()


def gloo_channel(group: dist.ProcessGroup, name: str) -> Any:
    """A gloo connection among the ranks of a group, for CPU tensors; a collective call.

    `new_group` counts the groups that a rank belongs to for the name under which the ranks find
    each other: where some belong to one more, they would wait for each other for ever.

    Args:
        name: a name that nothing else of these ranks has, the same on all of them.
    """
    timeout = group._get_backend(device_of(group)).options._timeout
    store = dist.PrefixStore(f"graphopt/{name}", default_store())
    return dist.ProcessGroupGloo(store, group.rank(), group.size(), timeout=timeout)


def companion_group(group: dist.ProcessGroup, purpose: str) -> dist.ProcessGroup:
    """A second process group of the same ranks, for collectives that must not wait for those of
    `group`; a collective call.

    `new_group` counts groups for their names; see `gloo_channel`.

    Args:
        group: with all ranks.
        purpose: a purpose that no other companion of this group has, the same on all ranks.
    """
    from torch.distributed import distributed_c10d as c10d

    ranks = dist.get_process_group_ranks(group)
    made, _ = c10d._new_process_group_helper(
        *(group.size(), group.rank(), ranks, c10d._world.pg_map[group][0], default_store()),
        f"{group.group_name} {purpose}",  # type: ignore[arg-type, unused-ignore]
        timeout=group._get_backend(device_of(group)).options._timeout,
    )
    c10d._world.pg_group_ranks[made] = {rank: index for index, rank in enumerate(ranks)}
    return cast(dist.ProcessGroup, made)


def maximum(channel: Any, tensor: torch.Tensor) -> None:
    """Takes the elementwise maximum over all ranks of a `gloo_channel`, in place."""
    options: Any = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp.MAX
    channel.allreduce([tensor], options).wait()


def group_or_default(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    if group is not None:
        return group
    from torch.distributed.distributed_c10d import _get_default_group

    return _get_default_group()


def group_named(name: str) -> dist.ProcessGroup | None:
    """The process group of that name, or None if it no longer exists."""
    from torch.distributed.distributed_c10d import _resolve_process_group

    try:
        return _resolve_process_group(name)  # type: ignore[arg-type, no-any-return, unused-ignore]
    except (KeyError, RuntimeError, ValueError):
        return None


def device_of(group: dist.ProcessGroup) -> torch.device:
    """The device for small tensors that a group sends: the CPU if possible."""
    kinds = group._device_types
    if not kinds or torch.device("cpu") in kinds:
        return torch.device("cpu")
    return torch.device(kinds[0].type, torch.accelerator.current_device_index())


def ranks_of_group(name: str) -> list[int] | None:
    """The ranks of the process group of that name, or None if it does not exist."""
    group = group_named(name)
    return None if group is None else dist.get_process_group_ranks(group)


def group_of_ranks(ranks: list[int]) -> dist.ProcessGroup | None:
    """The oldest process group of exactly these ranks in order, or None."""
    from torch.distributed.distributed_c10d import _world

    wanted = {rank: index for index, rank in enumerate(ranks)}
    of_these = (group for group, has in _world.pg_group_ranks.items() if has == wanted)
    return next((group for group in of_these if isinstance(group, dist.ProcessGroup)), None)


def name_group(group: dist.ProcessGroup, name: str) -> None:
    """Registers a second name for a process group."""
    from torch._C._distributed_c10d import _register_process_group

    _register_process_group(name, group)  # type: ignore[arg-type, unused-ignore]


def start_fake_group(count: int) -> None:
    """Makes a default process group of `count` ranks that has only rank 0 and communicates
    nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group(FAKE_BACKEND, store=FakeStore(), rank=0, world_size=count)


FAKE_BACKEND = "fake"


def fake_world_size() -> int | None:
    """The number of ranks of the group made by `start_fake_group`, or None."""
    if not dist.is_available() or not dist.is_initialized():
        return None
    return dist.get_world_size() if dist.get_backend() == FAKE_BACKEND else None


def in_process_group() -> bool:
    """True if there is a default process group."""
    return dist.is_available() and dist.is_initialized()


def rank_among_several() -> int | None:
    """This process's rank in the default process group, or None if it is alone."""
    if not in_process_group() or dist.get_world_size() == 1:
        return None
    return dist.get_rank()
