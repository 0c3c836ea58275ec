"""Runs a function in a forked copy of this process, which may crash or hang harmlessly."""

from __future__ import annotations

import faulthandler
import os
import signal
import warnings
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
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
    reader, writer = Pipe(duplex=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # other threads are not copied: the function needs none
        child = os.fork()
    if child == 0:
        _run(function, writer)
    writer.close()
    in_time = False
    found: list[Result] = []
    try:
        in_time = reader.poll(seconds)
        if in_time:
            found.append(reader.recv())
    except (EOFError, OSError):  # it has sent nothing, or not all
        pass
    finally:
        reader.close()
        if not in_time:
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
    if not in_time:
        raise EndedError(f"it took more than {seconds:.0f} s")
    if os.WIFSIGNALED(status):
        name = signal.Signals(os.WTERMSIG(status)).name
        raise EndedError(f"an operator brought the process to an end ({name})", by_signal=True)
    if not found:
        raise EndedError("it raised an exception")
    return found[0]


def _run(function: Callable[[], object], writer: Connection) -> NoReturn:
    try:
        silent = os.open(os.devnull, os.O_WRONLY)
        faulthandler.disable()
        os.dup2(silent, 1)
        os.dup2(silent, 2)
        torch.set_num_threads(1)  # those of a pool are not copied either
        writer.send(function())
    finally:
        os._exit(0)
