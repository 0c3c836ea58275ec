"""Detection of optimizer steps in a trace: their order, and the nodes that they make."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch.optim import ASGD, SGD, Optimizer, Rprop

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
        settings = _of_beginning(optimizer)

        def run(*args: Any, **kwargs: Any) -> Any:
            if averages and is_in_backward():
                raise _in_backward(optimizer)
            stepped.append(index)
            before(optimizer)
            as_found = _are_same(_of_beginning(optimizer), settings)
            unwatched = watched([optimizer.state], on=False)
            with tagger.during("optimizer"), _branches_explained(optimizer), unwatched:
                result = step(*args, **kwargs)
                as_found &= _are_same(_of_beginning(optimizer), settings)
                if not as_found or not _momenta_become_gradients(optimizer):
                    note_other_beginning(optimizer.state)
                return result

        return run

    for index, optimizer in enumerate(optimizers):
        vars(optimizer)["step"] = noticed(index, optimizer)
    return stepped


_OF_BEGINNING = ("momentum", "centered", "amsgrad", "capturable", "fused")
_OF_BEGINNING_TOO: dict[type, tuple[str, ...]] = {
    SGD: ("dampening",),
    Rprop: ("lr",),
    ASGD: ("lr",),
}


Settings: TypeAlias = list[tuple[Callable[[], Any], int]]
"""Settings of an optimizer, with the counts of writes to tensors."""


def _of_beginning(optimizer: Optimizer) -> Settings:
    """The settings that decide which state torch's optimizers make and what it holds. What the
    trace has made is not kept alive."""
    keys = (*_OF_BEGINNING, *_OF_BEGINNING_TOO.get(type(optimizer), ()))
    values = [group.get(key) for group in optimizer.param_groups for key in keys]
    with _compat.without_modes():
        return [(_reference(value), _count_writes(value)) for value in values]


def _reference(value: Any) -> Callable[[], Any]:
    made = isinstance(value, (torch.Tensor, torch.SymFloat))
    return weakref.ref(value) if made else lambda: value


def _count_writes(value: Any) -> int:
    return _compat.version_of(value) if isinstance(value, torch.Tensor) else 0


def _are_same(ours: Settings, theirs: Settings) -> bool:
    if len(ours) != len(theirs):
        return False
    pairs = zip(ours, theirs, strict=True)
    return all(a() is b() and n == m for (a, n), (b, m) in pairs)


def _momenta_become_gradients(optimizer: Any) -> bool:
    """True if momenta of negative zeros have become what `SGD` makes in its first step: the
    gradients, where these lie in memory as parameters and momenta do."""
    if type(optimizer) is not SGD or not isinstance(optimizer.state, WatchedState):
        return True
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
