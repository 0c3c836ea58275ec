"""Real gloo ranks for tests: a pool of processes that runs one function after another."""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import frozen

COLLECTIVE_TIMEOUT = timedelta(seconds=40)
# How long the other ranks get to answer once one of them has failed.
GRACE_SECONDS = 15.0
# Imported once, by the process that ranks are forked from: it has one thread and no group.
PRELOADED = ["torch._dynamo", "torch._inductor.compile_fx", "graphopt.hooks", "graphopt.lowering"]
DUMP_SECONDS = 2.0
# DistributedDataParallel, the reference, searches for unused parameters also where a model has
# none, and is told not to broadcast buffers by the name that all supported versions know.
REFERENCE_WARNINGS = ("find_unused_parameters=True was specified", "`broadcast_buffers` is deprec")


class RankError(AssertionError):
    """A rank raised, died or hung. The message has the traceback of each rank concerned."""


class Pool:
    """`world_size` processes in one gloo group, whose collectives wait for `timeout`.

    The first `run` starts them, and they serve many; the fixtures `two_ranks`, `three_ranks` and
    `four_ranks` serve all tests of a process. After a failure other ranks may be stuck in a
    collective, so the processes are ended then and the next `run` starts new ones.
    """

    def __init__(self, world_size: int, timeout: timedelta = COLLECTIVE_TIMEOUT) -> None:
        self.world_size = world_size
        self._timeout = timeout
        self._processes: list[BaseProcess] = []
        self._connections: list[Connection] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = 120.0) -> list[Any]:
        """`function(rank, *args)` on every rank; the results in rank order.

        `function` is imported by name on the ranks. Raises RankError when a rank raises, dies, or
        has not answered after `timeout` seconds.
        """
        if not self._processes:
            self._start()
        for connection in self._connections:
            connection.send((function, args))
        results, failures = self._collect(time.monotonic() + timeout)
        if failures:
            self.close()
            raise RankError("\n".join(f"rank {r}: {text}" for r, text in sorted(failures.items())))
        return [results[rank] for rank in range(self.world_size)]

    def close(self) -> None:
        """End the processes."""
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.kill()
            process.join()
        self._processes, self._connections = [], []
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="gloo-")
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            args = (rank, self.world_size, self._folder.name, theirs, self._timeout)
            process = context.Process(target=_serve, args=args, daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)

    def _collect(self, deadline: float) -> tuple[dict[int, Any], dict[int, str]]:
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        pending = dict(enumerate(self._connections))
        while pending and (left := deadline - time.monotonic()) > 0:
            ready = wait(list(pending.values()), timeout=left)
            for rank in [r for r, connection in pending.items() if connection in ready]:
                succeeded, value = self._receive(rank, pending.pop(rank))
                (results if succeeded else failures)[rank] = value
                if not succeeded:
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        if pending:
            failures.update(self._stacks(list(pending)))
        return results, failures

    def _receive(self, rank: int, connection: Connection) -> tuple[bool, Any]:
        """What a rank answers, or how it died: its signal and the stacks of its threads then."""
        try:
            return connection.recv()
        except (EOFError, ConnectionError):
            assert self._folder is not None
            process = self._processes[rank]
            process.join(GRACE_SECONDS)
            stacks = _stack_file(self._folder.name, rank).read_text()
            return False, f"died without an answer, exit code {process.exitcode}\n{stacks}"

    def _stacks(self, ranks: list[int]) -> dict[int, str]:
        """Where the ranks that do not answer are stuck."""
        assert self._folder is not None
        for rank in ranks:
            os.kill(self._processes[rank].pid or 0, signal.SIGUSR1)
        files = {rank: _stack_file(self._folder.name, rank) for rank in ranks}
        deadline = time.monotonic() + DUMP_SECONDS
        while time.monotonic() < deadline and not all(f.stat().st_size for f in files.values()):
            time.sleep(0.05)
        time.sleep(0.2)  # they are written line by line
        return {rank: "no answer in time\n" + file.read_text() for rank, file in files.items()}


def _stack_file(folder: str, rank: int) -> Path:
    return Path(folder) / f"stack-{rank}.txt"


def _serve(
    rank: int, world_size: int, folder: str, connection: Connection, timeout: timedelta
) -> None:
    """What a rank does: run the functions that arrive until the other end is closed."""
    torch.set_num_threads(1)
    frozen.set_aside()
    gc.set_threshold(10_000)
    store = dist.FileStore(str(Path(folder) / "store"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
    with _stack_file(folder, rank).open("w") as stack:
        faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
        faulthandler.enable(file=stack, all_threads=True)
        while True:
            try:
                function, args = connection.recv()
            except EOFError:
                return
            connection.send(_call(function, rank, args))
            frozen.set_aside()


def _call(function: Callable[..., Any], rank: int, args: tuple[Any, ...]) -> tuple[bool, Any]:
    torch.manual_seed(0)  # whatever ran here before
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for message in REFERENCE_WARNINGS:
                warnings.filterwarnings("ignore", message=message)
            return True, function(rank, *args)
    except BaseException:
        return False, traceback.format_exc()


@contextmanager
def pool(world_size: int, timeout: timedelta = COLLECTIVE_TIMEOUT) -> Iterator[Pool]:
    """A pool that is closed at the end: for what leaves a group that serves nobody any more."""
    ranks = Pool(world_size, timeout)
    try:
        yield ranks
    finally:
        ranks.close()
