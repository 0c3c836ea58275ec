"""Starts local ranks, follows the events that they report, and ends them all on failure.

The processes are those of `torch.distributed.elastic.multiprocessing`, which torchrun uses too.
A rank writes its events as lines of JSON; what it prints goes to a log that is shown when it fails.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.distributed.elastic.multiprocessing import (
    DefaultLogsSpecs,
    ProcessFailure,
    RunProcsResult,
    Std,
    start_processes,
)

from graphopt.demo import DemoError

Event = dict[str, Any]
_Task = TypeVar("_Task", bound="RankTask")

_POLL_SECONDS = 0.05
_GRACE_SECONDS = 3
_LINES_BEFORE, _LINES_OF_STACKS = 8, 60
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


class RankFailedError(DemoError):
    """A rank ended with an exception, an exit code or a signal."""


@dataclass(frozen=True)
class RankTask:
    """The task that all ranks run; a subclass describes it in fields that JSON can hold."""

    def save(self, folder: Path) -> None:
        """Writes the task to the file that `load` reads on each rank."""
        (folder / "task.json").write_text(json.dumps(asdict(self)))

    @classmethod
    def load(cls: type[_Task], folder: Path) -> _Task:
        """Reads the task that `save` wrote."""
        return cls(**json.loads((folder / "task.json").read_text()))


def run_ranks(
    arguments: Sequence[str],
    ranks: int,
    folder: Path,
    on_event: Callable[[int, Event], None],
    *,
    prefixes: Sequence[Sequence[str]] | None = None,
    environment: Mapping[str, str] | None = None,
) -> None:
    """Runs `python *arguments folder` on every rank until all have ended.

    Args:
        folder: an existing, empty folder for logs, events and the rendezvous.
        on_event: called in this process with each rank's events, in the rank's order.
        prefixes: per rank, a command that is to run the rank's own; all of one program.
        environment: added to this process's environment.

    Raises:
        RankFailedError: a rank failed; the others have been ended.
    """
    commands = [
        [*(prefixes[rank] if prefixes else ()), sys.executable, *arguments, str(folder)]
        for rank in range(ranks)
    ]
    with ExitStack() as stack:
        events = [
            stack.enter_context(_EventReader(_event_file(folder, rank))) for rank in range(ranks)
        ]
        stack.enter_context(_own_signal_handlers())
        stack.enter_context(_quiet(logging.getLogger("torch.distributed.elastic")))
        context = start_processes(
            "graphopt",
            commands[0][0],
            {rank: tuple(command[1:]) for rank, command in enumerate(commands)},
            {rank: _environment(rank, ranks, environment or {}) for rank in range(ranks)},
            DefaultLogsSpecs(log_dir=str(folder / "logs"), redirects=Std.ALL),
        )
        try:
            result = None
            while result is None:
                time.sleep(_POLL_SECONDS)
                result = context.wait(timeout=0)
                for rank, reader in enumerate(events):
                    for event in reader.read():
                        on_event(rank, event)
        finally:
            _ignore_signals()
            context.close(signal.SIGTERM, timeout=_GRACE_SECONDS)
    if result.is_failed():
        raise RankFailedError(_describe(result))


class Reporter:
    """The connection of a rank to its launcher: sends events, and ends the rank if the launcher
    is gone."""

    def __init__(self, folder: Path) -> None:
        self.rank = int(os.environ["RANK"])
        self.ranks = int(os.environ["WORLD_SIZE"])
        self._file = _event_file(folder, self.rank).open("a", buffering=1)
        launcher = int(os.environ["GRAPHOPT_LAUNCHER"])
        threading.Thread(target=_end_with, args=(launcher,), daemon=True).start()

    def send(self, kind: str, **values: Any) -> None:
        """Sends one event, whose values JSON can hold."""
        self._file.write(json.dumps({"kind": kind, **values}) + "\n")


def threads_per_rank(ranks: int) -> int:
    """The number of threads for each rank: OMP_NUM_THREADS, or an equal share of the cores."""
    if "OMP_NUM_THREADS" in os.environ:
        return torch.get_num_threads()
    return max(1, torch.get_num_threads() // ranks)


class _EventReader:
    def __init__(self, path: Path) -> None:
        path.touch()
        self._file = path.open()
        self._rest = ""

    def __enter__(self) -> _EventReader:
        return self

    def __exit__(self, *exc: object) -> None:
        self._file.close()

    def read(self) -> Iterator[Event]:
        *lines, self._rest = (self._rest + self._file.read()).split("\n")
        yield from map(json.loads, lines)


def _event_file(folder: Path, rank: int) -> Path:
    return folder / f"events-{rank}.jsonl"


def _end_with(launcher: int) -> None:
    # A launcher that was killed outright can end nobody, so every rank looks for itself.
    while os.getppid() == launcher:
        time.sleep(0.5)
    os._exit(1)


def _environment(rank: int, ranks: int, added: Mapping[str, str]) -> dict[str, str]:
    return {
        "OMP_NUM_THREADS": str(threads_per_rank(ranks)),
        "LOCAL_WORLD_SIZE": str(ranks),
        **added,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "GRAPHOPT_LAUNCHER": str(os.getpid()),
    }


@contextmanager
def _own_signal_handlers() -> Iterator[None]:
    # start_processes installs handlers that raise SignalException, and leaves them in place.
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _ignore_signals() -> None:
    # A second Ctrl-C must not interrupt the ending of the ranks.
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)


@contextmanager
def _quiet(logger: logging.Logger) -> Iterator[None]:
    # It logs every failure in its own words; `_describe` has the one message.
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(level)


def _describe(result: RunProcsResult) -> str:
    failure = _root_cause(list(result.failures.values()))
    rank = failure.local_rank
    printed = Path(result.stderrs[rank]).read_text(errors="replace").rstrip().splitlines()
    last = [f"  {line}" for line in printed[-5:]]
    if failure.exitcode < 0:
        killed = f"rank {rank} was killed by {failure.signal_name()} (process {failure.pid})"
        return "\n".join([killed, *(_around_crash(printed) or last)])
    recorded = failure.error_file_data["message"]
    if isinstance(recorded, dict):
        trace = recorded["extraInfo"]["py_callstack"].rstrip().splitlines()
        return "\n".join([f"rank {rank} failed: {recorded['message']}", *_last_frames(trace)])
    return "\n".join([f"rank {rank} ended with exit code {failure.exitcode}", *last])


def _around_crash(printed: Sequence[str]) -> list[str]:
    """The last output of a rank that a signal ended, and its threads' stacks if torch's `record`
    has enabled faulthandler; else empty."""
    fatal = [n for n, line in enumerate(printed) if line.startswith("Fatal Python error")]
    if not fatal:
        return []
    stacks = takewhile(lambda line: not line.startswith("Extension modules"), printed[fatal[0] :])
    before = printed[max(0, fatal[0] - _LINES_BEFORE) : fatal[0]]
    return [f"  {line}" for line in (*before, *list(stacks)[:_LINES_OF_STACKS])]


def _root_cause(failures: list[ProcessFailure]) -> ProcessFailure:
    """The rank failure that caused the others.

    The peers of a lost rank fail on their connection to it, and SIGTERM is how the rest are ended.
    """
    killed = [f for f in failures if f.exitcode < 0 and f.exitcode != -signal.SIGTERM]
    if killed:
        return killed[0]
    raised = [f for f in failures if f.exitcode > 0]
    return min(raised, key=lambda failure: failure.timestamp) if raised else failures[0]


def _last_frames(trace: list[str]) -> Iterator[str]:
    """The last two frames of a traceback, as text without the exception's own message."""
    starts = [index for index, line in enumerate(trace) if line.startswith('  File "')]
    return takewhile(lambda line: line.startswith("  "), trace[starts[-2:][0] :])


def loopback() -> dict[str, str]:
    """Environment variables by which gloo uses the loopback interface; it would look up the
    host's name, which many machines cannot resolve."""
    if "GLOO_SOCKET_IFNAME" in os.environ:
        return {}
    names = [name for _, name in socket.if_nameindex()]
    return {"GLOO_SOCKET_IFNAME": next(name for name in names if name.startswith("lo"))}
