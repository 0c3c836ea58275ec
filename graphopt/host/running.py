"""The host callbacks of one running call of a captured step: what they may do, and their errors.

They may not look at what the step is updating (eager code has other values at that place than
memory does), nor communicate. What one of them raises ends the step

- at once, where updates of state come behind it in the program;
- when the step is over, where none do: eager code has updated everything by then;
- on several ranks where the ranks agree (`graphopt.host.votes`), so that no rank waits for another
  for ever.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import torch
from torch.fx.node import has_side_effect
from torch.overrides import TorchFunctionMode

from graphopt import _compat
from graphopt.errors import GraphOptError
from graphopt.host.context import while_set
from graphopt.host.held import containers_in, refuse_changed_containers
from graphopt.host.seen import refuse_changed, set_before

if TYPE_CHECKING:
    from graphopt.host import HostCall
    from graphopt.runtime.agreement.agreed import RankAgreement


class _NoState(TorchFunctionMode):
    """A mode that refuses operators on tensors over storages that the step updates."""

    def __init__(self, storages: frozenset[int]) -> None:
        super().__init__()
        self._storages = storages

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        func, kwargs = _compat.function_asked(func), kwargs or {}
        reads = not _compat.reads_metadata(func)
        if reads and any(map(self._is_state, _compat.tree_leaves((args, kwargs)))):
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
    """A mode that refuses collectives within a host callback."""

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


class CallbackRun:
    """Runs the host callbacks of one call of a captured step; see the module's docstring.

    Args:
        storages: finds the storages that the step updates, by `_compat.storage_key`.
        rank: this process's among several; None where it is alone.
        step: which call of the step it is, counted from 1.
        agreed: how ranks vote and ask one another in the call; None where they do not.
        given: positional and keyword arguments of the step.
    """

    def __init__(
        self,
        storages: Callable[[], frozenset[int]],
        rank: int | None,
        step: int,
        agreed: RankAgreement | None,
        given: Any,
    ) -> None:
        self._storages, self._rank, self._step = storages, rank, step
        self._agreed, self._given = agreed, given
        self._known: frozenset[int] | None = None
        self._failure: BaseException | None = None
        self._last = False
        self._goes_on = self._has_voted = False
        self._kept: list[tuple[torch.Tensor, torch.Tensor]] = []

    def call(self, host_call: HostCall, arguments: Sequence[Any]) -> None:
        """Runs one host callback with these arguments, unless an earlier one has failed."""
        if self._failure is not None:  # eager code would not have come here
            return
        try:
            self._call(host_call, arguments)
        except BaseException as error:
            if not host_call.last and self._agreed is None:
                raise
            self._failure, self._last = error, host_call.last

    def _call(self, host_call: HostCall, arguments: Sequence[Any]) -> None:
        before, fn = [each.place.now() for each in host_call.watched], host_call.fn
        if host_call.held:
            fn, arguments = host_call.held.prepared(fn, arguments, self._given)
        made = list(containers_in(host_call.made_anew(arguments)))
        with set_before(host_call.found), self._alone():
            fn(*arguments)
        refuse_changed_containers(made)
        refuse_changed(host_call.watched, before)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        if self._known is None:
            self._known = self._storages()
        with ExitStack() as stack:
            if self._rank is not None:
                stack.enter_context(_NoCollectives())  # type: ignore[no-untyped-call]
            stack.enter_context(_NoState(self._known))
            yield

    def used_anywhere(self, positions: Sequence[int]) -> tuple[int, ...] | None:
        """The given parameters that other ranks use in this call, as 0 or 1; None without ranks."""
        return None if self._agreed is None else self._agreed.unused.used_anywhere(positions)

    def all_go_on(self) -> None:
        """Waits until all ranks have a graph for this call's own decisions.

        Raises:
            SpmdMismatchError: one has none.
        """
        self._goes_on = True
        if self._agreed is not None and self._agreed.questions is not None:
            with self._put_back_on_error():
                self._agreed.questions.hear_all(self._step)

    def agree(self) -> None:
        """Raises a callback's error, from this rank or another, before state is updated."""
        if self._agreed is None:
            return
        self._has_voted = True
        failure = None if self._last else self._failure
        with self._put_back_on_error():
            self._agreed.votes.say(self._step, failure)
            if failure is not None:
                raise failure
            self._agreed.votes.hear()

    def keep(self, state: torch.Tensor) -> None:
        """Keeps the present value of state that is put back if the ranks end the step."""
        self._kept.append((state, state.clone()))

    @contextmanager
    def _put_back_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._put_back()
            raise

    def _put_back(self) -> None:
        with torch.no_grad():
            for state, former in reversed(self._kept):
                state.copy_(former)

    def hear(self) -> None:
        """Raises the error of another rank's callback at the end of the last call."""
        if self._agreed is not None:
            self._agreed.votes.hear()

    def say(self) -> None:
        """Votes on how this call ended on this rank, before its results are stored."""
        if self._agreed is not None and self._agreed.agreement.at_end:
            self._agreed.votes.say(self._step, self._failure)

    def say_failed(self, error: BaseException) -> None:
        """Tells the other ranks of an error after the last launch, so that they end the step at
        their next vote. Where they have none before its end, their call is over."""
        if self._agreed is None:
            return
        due, questions = self._agreed.agreement, self._agreed.questions
        if due.alone and not self._goes_on and questions is not None:
            self._put_back()
            with suppress(GraphOptError):  # the error is what counts
                questions.end(self._step)
            return
        before_updates = due.before_updates and not self._has_voted
        if before_updates or due.at_end:
            with suppress(GraphOptError):
                self._agreed.votes.say(self._step, error)
        if before_updates:
            self._put_back()
        else:
            self._agreed.unused.over()

    def end(self) -> None:
        """Raises the error of a callback at the end of the step."""
        if self._failure is not None:
            raise self._failure


_current: ContextVar[CallbackRun | None] = ContextVar("host_run", default=None)


@has_side_effect
def keep(state: torch.Tensor) -> None:
    """Keeps state that the running step is about to update before its votes. The target of a
    node."""
    run = _current.get()
    if run is not None:
        run.keep(state)


@has_side_effect
def agree() -> None:
    """Makes the ranks of the running step vote. The target of a node."""
    run = _current.get()
    if run is not None:
        run.agree()


@has_side_effect
def hear() -> None:
    """Learns how the last call ended on the other ranks. The target of a node."""
    run = _current.get()
    if run is not None:
        run.hear()


@has_side_effect
def all_go_on() -> None:
    """Waits until all ranks have a graph for their own decisions. The target of a node."""
    run = _current.get()
    if run is not None:
        run.all_go_on()


def current_run() -> CallbackRun | None:
    """The `CallbackRun` of the step that this thread runs; None if a graph runs by itself."""
    return _current.get()


def running(run: CallbackRun) -> AbstractContextManager[None]:
    """While active, host callbacks of a graph belong to `run`."""
    return while_set(_current, run)
