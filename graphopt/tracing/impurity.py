"""Effects outside the graph: found while a step is traced, refused with the line that has them."""

from __future__ import annotations

import builtins
import random
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_pre_hook

from graphopt.errors import CaptureError
from graphopt.tracing.replace import replaced
from graphopt.tracing.source import SourceLine, current_user_line, is_library_file

_WRITING = frozenset("wax+")


@contextmanager
def no_output() -> Iterator[None]:
    """While active, `print` and files opened for writing by this thread are refused.

    A captured step would print once, at capture, and never again.
    """
    thread = threading.get_ident()
    real_print, real_open = builtins.print, builtins.open

    def refuse(what: str) -> None:
        raise CaptureError(
            f"the step {what}, which would happen at capture only",
            location=str(current_user_line()),
            hint="return what is to be shown from the step and write it outside",
        )

    def checked_print(*args: Any, **kwargs: Any) -> None:
        if threading.get_ident() == thread:
            refuse("prints")
        real_print(*args, **kwargs)

    def checked_open(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == thread and _WRITING & set(mode):
            refuse("writes to a file")
        return real_open(file, mode, *args, **kwargs)

    with replaced((builtins, "print", checked_print), (builtins, "open", checked_open)):
        yield


@contextmanager
def no_schedulers() -> Iterator[None]:
    """While active, stepping a learning rate scheduler is refused."""

    def refuse(self: Any, *args: Any, **kwargs: Any) -> None:
        raise CaptureError(
            f"it steps a {type(self).__name__}, which would happen at capture only",
            location=str(current_user_line()),
            hint="call scheduler.step() outside the step, after it",
        )

    classes = [c for c in _subclasses(LRScheduler) if "step" in vars(c)]
    with replaced(*((c, "step", refuse) for c in classes)):
        yield


@contextmanager
def no_other_optimizers(known: list[Optimizer]) -> Iterator[None]:
    """While active, stepping an optimizer that is not among `known` is refused."""

    def check(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not any(optimizer is other for other in known):
            raise CaptureError(
                f"it steps a {type(optimizer).__name__} that is not among its arguments",
                location=str(current_user_line()),
                hint="pass the optimizer to the step: step(model, optimizer, batch)",
            )

    handle = register_optimizer_step_pre_hook(check)
    try:
        yield
    finally:
        handle.remove()


def _subclasses(parent: type) -> set[type]:
    return {parent}.union(*(_subclasses(child) for child in parent.__subclasses__()))


def line_that_draws(module: str, run: Callable[[], object]) -> SourceLine | None:
    """The user's line at which `run` draws from Python's or numpy's global generator.

    Only called when it is known that it does: profiling every call is slow.
    """
    owners = _generators(module)
    found: list[SourceLine] = []

    def watch(frame: FrameType, event: str, argument: Any) -> None:
        if event != "c_call" or found:
            return
        if not any(getattr(argument, "__self__", None) is owner for owner in owners):
            return
        current: FrameType | None = frame
        while current is not None:
            if not is_library_file(current.f_code.co_filename):
                code = current.f_code
                found.append(SourceLine(code.co_filename, current.f_lineno, code.co_name))
                return
            current = current.f_back

    previous = sys.getprofile()
    sys.setprofile(watch)
    try:
        run()
    finally:
        sys.setprofile(previous)
    return found[0] if found else None


def _generators(module: str) -> list[object]:
    if module == "random":
        return [getattr(random.random, "__self__", None)]
    return [getattr(sys.modules["numpy"].random.rand, "__self__", None)]
