"""Detection of optimizer steps in a trace: their order, and the nodes that they make."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch.optim import Optimizer

from graphopt import _compat
from graphopt._compat.backward import is_in_backward
from graphopt.errors import CaptureError
from graphopt.ir.user_frames import current_location, user_line_of
from graphopt.tracing.functional.tagging import Tagger
from graphopt.tracing.optimizers.watched_state import watched


def notice_steps(
    optimizers: Sequence[Optimizer],
    tagger: Tagger,
    before: Callable[[Optimizer], None],
    averages: bool,
) -> list[int]:
    """Wraps optimizers so that each step is recorded and its nodes get the optimizer phase. Undone
    by `preserved`.

    Args:
        before: called with the optimizer that is about to step.
        averages: gradients are averaged over the ranks.

    Returns:
        The positions of the optimizers that have stepped, as they do.
    """
    stepped: list[int] = []

    def noticed(index: int, optimizer: Optimizer) -> Callable[..., Any]:
        step = optimizer.step

        def run(*args: Any, **kwargs: Any) -> Any:
            if averages and is_in_backward():
                raise _in_backward(optimizer)
            stepped.append(index)
            before(optimizer)
            unwatched = watched([optimizer.state], on=False)
            with tagger.during("optimizer"), _branches_explained(optimizer), unwatched:
                return step(*args, **kwargs)

        return run

    for index, optimizer in enumerate(optimizers):
        vars(optimizer)["step"] = noticed(index, optimizer)
    return stepped


def _in_backward(optimizer: Optimizer) -> CaptureError:
    return CaptureError(
        f"{type(optimizer).__name__}.step() runs within the backward, where gradients are not"
        " averaged over the ranks yet",
        location=current_location(),
        hint="call it after loss.backward()",
    )


@contextmanager
def _branches_explained(optimizer: Optimizer) -> Iterator[None]:
    """While active, an optimizer whose own code branches on tensor values is refused by name."""
    try:
        yield
    except _compat.data_dependent_errors() as error:
        line = user_line_of(error)
        raise CaptureError(
            f"{type(optimizer).__name__}.step() takes the values of tensors for plain numbers",
            location=None if line is None else str(line),
            hint="use an optimizer that computes with tensors, such as AdamW, Adam, SGD, Adagrad,"
            " RMSprop, NAdam, RAdam, Adamax, Adadelta or Rprop",
        ) from error
