"""Runs a function in a forked copy of this process, which may crash or hang harmlessly."""

from __future__ import annotations

import faulthandler
import os
import pickle
import select
import signal
import time
import warnings
from collections.abc import Callable
from typing import NoReturn, TypeVar

import torch

Result = TypeVar("Result")


class EndedError(Exception):
    """The forked process ended without a result.

    Attributes:
        by_signal: a signal ended it, as one does where memory is written that is not its own.
    """

    def __init__(self, how: str, *, by_signal: bool = False) -> None:
        super().__init__(how)
        self.by_signal = by_signal


def run_in_fork(function: Callable[[], Result], seconds: float) -> Result:
    """Runs a function in a forked process on one thread, and returns its result. Side effects are
    lost.

    Args:
        function: without CUDA, which a copy cannot use.
        seconds: after which the copy is ended.

    Raises:
        EndedError: it raised an exception, was killed by a signal, or took too long.
    """
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # other threads are not copied: the function needs none
        child = os.fork()
    if child == 0:
        _run(function, writer)
    os.close(writer)
    written = None
    try:
        written = _read(reader, time.monotonic() + seconds)
    finally:
        os.close(reader)
        if written is None:
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
    if written is None:
        raise EndedError(f"it took more than {seconds:.0f} s")
    if os.WIFSIGNALED(status):
        name = signal.Signals(os.WTERMSIG(status)).name
        raise EndedError(f"an operator brought the process to an end ({name})", by_signal=True)
    if not written:
        raise EndedError("it raised an exception")
    result: Result = pickle.loads(written)
    return result


def _run(function: Callable[[], object], writer: int) -> NoReturn:
    try:
        silent = os.open(os.devnull, os.O_WRONLY)
        faulthandler.disable()
        os.dup2(silent, 1)
        os.dup2(silent, 2)
        torch.set_num_threads(1)  # those of a pool are not copied either
        with os.fdopen(writer, "wb") as pipe:
            pipe.write(pickle.dumps(function()))
    finally:
        os._exit(0)


def _read(reader: int, end: float) -> bytes | None:
    """Reads a pipe to its end; None if that takes longer than allowed."""
    found = b""
    while True:
        ready, _, _ = select.select([reader], [], [], max(0.0, end - time.monotonic()))
        if not ready:
            return None
        part = os.read(reader, 1 << 16)
        if not part:
            return found
        found += part
