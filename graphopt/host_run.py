"""One call of a captured step, as the functions of the program's that it calls see it.

They may not look at what the step is updating (eager code has other values at that place than
memory does), nor communicate. What one of them raises ends the step

- at once, where updates of state come behind it in the program;
- when the step is over, where none do: eager code has updated everything by then;
- on several ranks where the ranks agree (`graphopt.host_votes`), so that no rank waits for another
  for ever.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from torch.fx.node import has_side_effect
from torch.overrides import TorchFunctionMode

from graphopt import _compat
from graphopt.errors import GraphOptError

_METADATA = frozenset(
    {"dim", "element_size", "get_device", "is_complex", "is_floating_point", "ndimension", "numel"}
    | {"nelement", "size", "stride", "storage_offset", "is_contiguous"}
)
_PROPERTIES = ("shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_leaf")
_READABLE = frozenset(getattr(torch.Tensor, name).__get__ for name in _PROPERTIES)


class Votes(Protocol):
    """How ranks agree; see `graphopt.host_votes`."""

    def cast(self) -> None:
        """Say that all is well, and wait for the others to say so."""

    def give_up(self, error: BaseException) -> None:
        """Tell the others why this rank does not come."""


class _NoState(TorchFunctionMode):
    """Refuses to compute with tensors over certain storages."""

    def __init__(self, storages: frozenset[int]) -> None:
        super().__init__()
        self._storages = storages

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        metadata = func in _READABLE or getattr(func, "__name__", "") in _METADATA
        if not metadata and any(map(self._is_state, _compat.tree_leaves((args, kwargs)))):
            raise GraphOptError(
                "a function called by graphopt.callback uses a parameter, buffer, gradient or"
                " optimizer state of the step, whose memory does not hold what it does at this"
                " place of the program\n"
                "  hint:  give it the tensor: graphopt.callback(function, model.weight); it gets a"
                " copy of what eager code would see"
            )
        return func(*args, **kwargs)

    def _is_state(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor) and _compat.storage_key(value) in self._storages


class _NoCollectives(_compat.TorchDispatchMode):
    """Refuses to communicate."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace in ("c10d", "_c10d_functional", "_c10d_functional_autograd"):
            raise GraphOptError(
                f"a function called by graphopt.callback communicates ({func}), in the middle of"
                " a step whose collectives all ranks launch in one order\n"
                "  hint:  communicate in the step, and give the function the result"
            )
        return func(*args, **(kwargs or {}))


class HostRun:
    """See the module's docstring.

    Args:
        storages: finds the storages that the step updates, by `_compat.storage_key`.
        votes: how ranks agree that nothing was raised; None where they do not.
        rank: this process's among several; None where it is alone.
    """

    def __init__(
        self,
        storages: Callable[[], frozenset[int]],
        votes: Votes | None,
        rank: int | None,
    ) -> None:
        self._storages, self._votes, self._rank = storages, votes, rank
        self._known: frozenset[int] | None = None
        self._failure: BaseException | None = None
        self._last = False

    def call(self, fn: Callable[..., Any], arguments: Sequence[Any], last: bool) -> None:
        """Call a function. `last`: no update of state follows it in the program."""
        if self._failure is not None:  # eager code would not have come here
            return
        try:
            with self._alone():
                fn(*arguments)
        except BaseException as error:
            if not last and self._votes is None:
                raise
            self._failure, self._last = error, last

    @contextmanager
    def _alone(self) -> Iterator[None]:
        if self._known is None:
            self._known = self._storages()
        with ExitStack() as stack:
            if self._rank is not None:
                stack.enter_context(_NoCollectives())  # type: ignore[no-untyped-call]
            stack.enter_context(_NoState(self._known))
            yield

    def agree(self) -> None:
        """Raise what a function has raised here or on another rank, before state is updated."""
        if self._votes is None:
            return
        if self._failure is None or self._last:
            self._votes.cast()
        else:
            self._raise()

    def end(self) -> None:
        """Raise what a function has raised: the step is over."""
        if self._failure is not None:
            self._raise()

    def _raise(self) -> None:
        failure, self._failure = self._failure, None
        assert failure is not None
        if self._votes is not None:
            self._votes.give_up(failure)
        raise failure


_current: ContextVar[HostRun | None] = ContextVar("host_run", default=None)


@has_side_effect
def agree() -> None:
    """Let the ranks of the running step agree. The target of a node."""
    run = _current.get()
    if run is not None:
        run.agree()


def current_run() -> HostRun | None:
    """The step that this thread runs; None where a graph runs on its own."""
    return _current.get()


@contextmanager
def running(run: HostRun) -> Iterator[None]:
    """While active, functions that a graph calls belong to `run`."""
    token = _current.set(run)
    try:
        yield
    finally:
        _current.reset(token)
