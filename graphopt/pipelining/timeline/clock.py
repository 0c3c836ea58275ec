"""A common clock of all ranks: events of a device, and the offsets between hosts."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

_ROUND_TRIPS = 20


class DeviceMarks(Protocol):
    """Notes moments on a device, and tells them as seconds of this host's clock afterwards."""

    def mark(self) -> Any:
        """A mark of now."""

    def seconds(self, mark: Any) -> float:
        """Time at which a mark was reached, on the clock of the host."""


class HostMarks:
    """For devices that are done when an operator returns."""

    def mark(self) -> float:
        return time.monotonic()

    def seconds(self, mark: float) -> float:
        return mark


class CudaMarks:
    """Events on the current stream: when the device gets there, not when Python does."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        torch.cuda.synchronize(device)
        self._base = self.mark()
        self._base.synchronize()
        self._base_seconds = time.monotonic()

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def seconds(self, mark: torch.cuda.Event) -> float:
        mark.synchronize()
        return self._base_seconds + float(self._base.elapsed_time(mark)) / 1e3


def marks_for(device: torch.device) -> DeviceMarks:
    """The marks of a device: events of its streams, or times of the host."""
    return CudaMarks(device) if device.type == "cuda" else HostMarks()


def clock_offsets(
    group: dist.ProcessGroup | None,
    *,
    now: Callable[[], float] = time.monotonic,
    host: str | None = None,
) -> list[float]:
    """Seconds that each rank's clock is ahead of the clock of the group's rank 0. Collective.

    Ranks on one host share its monotonic clock: nothing is measured then. Otherwise rank 0 asks
    each rank for its time, and of several answers takes the one that came soonest, as of the middle
    of its round trip (Cristian, Probabilistic clock synchronization, 1989): wrong by at most half
    of that round trip.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    hosts: list[Any] = [None] * size
    dist.all_gather_object(hosts, host or _host(), group)
    if len(set(hosts)) == 1:
        return [0.0] * size
    offsets = [0.0] * size
    for other in range(1, size):
        if rank == 0:
            offsets[other] = min(_ask(other, group, now) for _ in range(_ROUND_TRIPS))[1]
        elif rank == other:
            for _ in range(_ROUND_TRIPS):
                _answer(group, now)
    dist.broadcast_object_list(offsets, group=group, group_src=0)
    return offsets


def _ask(
    other: int, group: dist.ProcessGroup | None, now: Callable[[], float]
) -> tuple[float, float]:
    """The round trip, and how far the other clock is ahead."""
    answer: list[Any] = [None]
    sent = now()
    dist.send_object_list([None], group=group, group_dst=other)
    dist.recv_object_list(answer, group=group, group_src=other)
    received = now()
    return received - sent, answer[0] - (sent + received) / 2


def _answer(group: dist.ProcessGroup | None, now: Callable[[], float]) -> None:
    dist.recv_object_list([None], group=group, group_src=0)
    dist.send_object_list([now()], group=group, group_dst=0)


def _host() -> str:
    """A text that differs between hosts; on Linux containers of one kernel share its clock."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text() if boot.exists() else platform.node()
