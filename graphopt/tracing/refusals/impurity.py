"""Detection and refusal of a step's effects on optimizers and numbers outside the graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch.optim import Optimizer

from graphopt import _compat
from graphopt.errors import CaptureError
from graphopt.ir.user_frames import current_location, current_user_line
from graphopt.tracing.rollback.contents import containers_kept


@contextmanager
def no_other_optimizers(
    known: list[Optimizer],
    find: Callable[[Optimizer], bool],
    made_here: Callable[[Optimizer], bool],
) -> Iterator[None]:
    """While active, steps of unknown optimizers do nothing if these may become inputs of a new
    trace, and are refused otherwise.

    Args:
        find: takes note of another one. Returns whether it may become one of them.
        made_here: whether the step has made one itself, whose code is traced as any other.
    """
    idle: dict[Optimizer, AbstractContextManager[None]] = {}

    def before(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if any(optimizer is other for other in known) or made_here(optimizer):
            return
        if not find(optimizer):
            raise CaptureError(
                f"it steps a {type(optimizer).__name__} that is not among its arguments",
                location=current_location(),
                hint="pass the optimizer to the step: step(model, optimizer, batch)",
            )
        if optimizer not in idle:
            idle[optimizer] = _idle(optimizer)
            idle[optimizer].__enter__()

    def after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if optimizer in idle:
            idle.pop(optimizer).__exit__(None, None, None)

    try:
        with _compat.hooks_around_steps(before, after):
            yield
    finally:
        for each in idle.values():  # whose step has raised
            each.__exit__(None, None, None)


@contextmanager
def _idle(optimizer: Optimizer) -> Iterator[None]:
    """While active, an optimizer has no parameters, so that its steps do nothing."""
    tables = [vars(optimizer), *optimizer.param_groups, optimizer.state]
    with containers_kept([*tables, *optimizer.state.values()]):
        for group in optimizer.param_groups:
            group["params"] = []
        yield


def taken_for_a_number() -> CaptureError:
    """Builds the error for a traced number that becomes a plain number."""
    return CaptureError(
        "a number that an optimizer's settings or counts decide (such as its learning rate) is"
        " taken for a plain number, which would happen at capture only",
        location=current_user_line(),
        hint="let a function do it that is called in every step, graphopt.callback(print, rate), or"
        " do it outside the step; to compute with it, take it as it is, without float() or int()",
    )
