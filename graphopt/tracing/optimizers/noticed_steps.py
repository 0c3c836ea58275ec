"""Detection of optimizer steps in a trace: their order, and the nodes that they make."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import SGD, Optimizer

from graphopt import _compat
from graphopt._compat.backward import is_in_backward
from graphopt.errors import CaptureError
from graphopt.ir.user_frames import current_location, user_line_of
from graphopt.tracing.functional.tagging import Tagger
from graphopt.tracing.optimizers.watched_state import WatchedState, note_other_beginning, watched


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
        settings = _of_momenta(optimizer)

        def run(*args: Any, **kwargs: Any) -> Any:
            if averages and is_in_backward():
                raise _in_backward(optimizer)
            stepped.append(index)
            before(optimizer)
            unwatched = watched([optimizer.state], on=False)
            with tagger.during("optimizer"), _branches_explained(optimizer), unwatched:
                result = step(*args, **kwargs)
                if not _momenta_become_gradients(optimizer, settings):
                    note_other_beginning(optimizer.state)
                return result

        return run

    for index, optimizer in enumerate(optimizers):
        vars(optimizer)["step"] = noticed(index, optimizer)
    return stepped


def _of_momenta(optimizer: Optimizer) -> list[int]:
    """The settings by which `SGD` adds gradients to momenta, by id."""
    if type(optimizer) is not SGD:
        return []
    groups, keys = optimizer.param_groups, ("momentum", "dampening")
    return [id(group[key]) for group in groups for key in keys]


def _momenta_become_gradients(optimizer: Any, settings: list[int]) -> bool:
    """True if momenta of negative zeros have become what `SGD` makes in its first step: the
    gradients, where these lie in memory as parameters and momenta do.

    Args:
        settings: those of momenta when the step began.
    """
    if type(optimizer) is not SGD or not isinstance(optimizer.state, WatchedState):
        return True
    if _of_momenta(optimizer) != settings:
        return False
    with _compat.without_modes():
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        momenta = [(p, optimizer.state.get(p, {}).get("momentum_buffer")) for p in parameters]
        return all(
            _layout(p) == _layout(p.grad) == _layout(momentum)
            for p, momentum in momenta
            if momentum is not None and p.grad is not None
        )


def _layout(tensor: Any) -> tuple[Any, ...]:
    strides = tensor.stride() if tensor.layout is torch.strided else None
    return tensor.shape, tensor.dtype, tensor.device, strides


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
            location=line,
            hint="use an optimizer that computes with tensors, such as AdamW, Adam, SGD, Adagrad,"
            " RMSprop, NAdam, RAdam, Adamax, Adadelta or Rprop",
        ) from error
