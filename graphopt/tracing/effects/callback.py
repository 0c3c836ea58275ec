"""`graphopt.callback`: calls a user's function on the host from a captured step."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import CodeType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import fx

from graphopt import _compat
from graphopt.errors import CaptureError
from graphopt.host import HostCall, insert_call
from graphopt.host.counts import TimesReached, place_of
from graphopt.host.functions import traced_in
from graphopt.host.seen import current_view
from graphopt.ir.user_frames import current_location, is_around_step
from graphopt.tracing.interception.replaced_functions import original
from graphopt.tracing.scalars.host_numbers import scalar_of_numpy


def callback(fn: Callable[..., Any], *tensors: Any, every: int = 1) -> None:
    """Calls `fn(*tensors)` in every step: the way to log, print or save from a captured step.

    In a step that graphopt captures, the call is a node of the graph. It runs in each step, in the
    order of the program, with the values of that step, and no pass removes or moves it across
    another. In eager code it is a plain call of `fn`, now. In a pass, with nodes of its graph in
    place of tensors, the call is put into the graph, as by `graphopt.host.insert_callback`.

    `fn` gets copies of the tensors, without autograd history: they are its own, to keep or to
    change. It is not traced, so it may do what it likes (`.item()`, `print`, append to a list),
    except use collectives of `torch.distributed` or read what the step updates: parameters,
    buffers, gradients and optimizer state. Give it what it needs of them as arguments.

    Args:
        fn: called with the arguments that follow. What it returns is ignored. An exception in it
            ends the step, as in eager code.
        *tensors: tensors, numbers read from tensors by ``.item()`` (it gets the real number), and
            pytrees of them with constants. Any other object is handed on as it is.
        every: call `fn` only at the n-th, 2n-th, 3n-th, … time that the program comes by. Each
            place counts for itself: a call of `callback`, and where the function or module that
            it stands in is called. A loop comes by several times in a step.

    Raises:
        TypeError, ValueError: `fn` is not callable, or `every` is not a whole number of at least 1.
            While a step is captured, as the cause of a `CaptureError`.

    >>> import torch, graphopt
    >>> losses = []
    >>> def train_step(model, optimizer, x, y):
    ...     loss = torch.nn.functional.mse_loss(model(x), y)
    ...     graphopt.callback(lambda value: losses.append(value.item()), loss)
    ...     loss.backward()
    ...     optimizer.step()
    ...     optimizer.zero_grad()
    >>> step = graphopt.compile(train_step)
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> for _ in range(3):
    ...     step(model, optimizer, torch.ones(4, 2), torch.ones(4, 1))
    >>> len(losses)
    3
    """
    if _compat.is_recording():
        _refuse_traced(fn)
        place = place_of(sys._getframe(1), is_around_step)
        record(HostCall(original(fn), tensors, every, place))
        return
    call = HostCall(fn, tensors, every)
    graphs = {value.graph for value in call.values if isinstance(value, fx.Node)}
    if len(graphs) > 1:
        raise ValueError("graphopt.callback is given nodes of several graphs")
    if graphs:
        insert_call(graphs.pop(), call)
        return
    if every > 1:
        call.place = place_of(sys._getframe(1))
        call.counts = _counts.setdefault(call.place[-1][0], TimesReached())
    call(*call.take_values())


def record(call: HostCall) -> None:
    """Records a host call as a node of the running trace."""
    view = current_view()
    if view is not None:
        view.note(call)
    call(*map(_detached, call.take_values()))


_counts: WeakKeyDictionary[CodeType, TimesReached] = WeakKeyDictionary()
"""The counts of callbacks in eager code, kept as long as the calling code: it knows the code that
is called, and lives no longer."""


def _refuse_traced(fn: Callable[..., Any]) -> None:
    for value in traced_in(fn):
        what = f"a tensor of shape {list(value.shape)}" if _compat.is_fake(value) else "a number"
        raise CaptureError(
            f"the function given to graphopt.callback uses {what} of the step that it is not given",
            location=current_location(),
            hint="pass it: graphopt.callback(lambda loss: history.append(loss), loss)",
        )


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else scalar_of_numpy(value)
