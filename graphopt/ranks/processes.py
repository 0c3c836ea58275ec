"""Identities of the ranks' processes, and a test that they still run.

Only a process of the same machine and the same process namespace can be asked about. Of any other
nothing is known, and it counts as running.
"""

from __future__ import annotations

import json
import logging
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch.distributed as dist

from graphopt import _compat

if TYPE_CHECKING:
    from graphopt.parallel import OverRanks

logger = logging.getLogger("graphopt")

# Ranks of one machine follow each other; those further away are on others.
_NEIGHBOURS = 16
_ENDED = ("Z", "X")  # a killed process is a zombie until its parent has asked for its exit status


@dataclass(frozen=True)
class Process:
    """The identity of one process on one machine.

    Attributes:
        machine: equal for processes that see each other in ``/proc``.
        pid: its number there.
        started: the process's start, in clock ticks since the machine's: process numbers are used
            again.
    """

    machine: str
    pid: int
    started: int

    @classmethod
    def current(cls) -> Process:
        """The identity of this process."""
        machine, pid = _machine(), os.getpid()
        return cls(machine, pid, (_look_up(pid) or ("", 0))[1])

    @property
    def ended(self) -> bool:
        """True if the process is known to have ended."""
        if not self.machine or self.machine != _machine():
            return False
        found = _look_up(self.pid)
        return found is None or found[1] != self.started or found[0] in _ENDED


_known: WeakKeyDictionary[dist.ProcessGroup, dict[int, Process]] = WeakKeyDictionary()


def register(store: dist.Store, group: dist.ProcessGroup) -> None:
    """Tells the other ranks of a group the identity of this process."""
    store.set(_key(group, group.rank()), json.dumps(asdict(Process.current())))


def announce(parallel: OverRanks | None) -> None:
    """Registers this process with the ranks that run the same graph, early so that its end is
    noticed early.

    Args:
        parallel: None: all ranks do.
    """
    if not dist.is_available() or not dist.is_initialized():
        return
    group = _compat.group_or_default(None) if parallel is None else parallel.everyone
    try:
        register(_compat.default_store(), group)
    except (RuntimeError, ValueError) as error:
        logger.debug("the process of this rank is not announced: %s", error)


def is_registered(store: dist.Store, group: dist.ProcessGroup, rank: int) -> bool:
    return store.check([_key(group, rank)])


def learn(store: dist.Store, group: dist.ProcessGroup) -> None:
    """Looks up the processes of the neighbouring ranks, if they are registered."""
    known = _known.setdefault(group, {})
    for rank in _near(group):
        restarted = rank not in known or known[rank].ended
        if restarted and is_registered(store, group, rank):
            known[rank] = Process(**json.loads(store.get(_key(group, rank))))


def ended_ranks(group: dist.ProcessGroup) -> list[int]:
    """The ranks of a group whose processes are known to have ended."""
    return sorted(rank for rank, process in _known.get(group, {}).items() if process.ended)


def _near(group: dist.ProcessGroup) -> list[int]:
    mine = group.rank()
    near = range(max(0, mine - _NEIGHBOURS), min(group.size(), mine + _NEIGHBOURS + 1))
    return [rank for rank in near if rank != mine]


def _key(group: dist.ProcessGroup, rank: int) -> str:
    return f"graphopt/{group.group_name}/process/{rank}"


def _machine() -> str:
    """The identity of this machine, from ``/proc``; empty without it."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _look_up(pid: int) -> tuple[str, int] | None:
    """State and start time of the process of that number, or None if none exists."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # the name before may hold anything
    return fields[0], int(fields[19])
