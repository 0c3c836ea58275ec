"""Learning rate schedulers that a step steps itself: called in every call, where the program does.

    loss.backward(); optimizer.step(); scheduler.step()
                                        └─ a call on the host, as by `graphopt.callback`

A scheduler is not traced: the rates that it sets are read before the next call runs, as those are
that it sets between two calls. Within the step, behind it, they may be kept, shown and returned,
which each call does with those that it finds; nobody may decide by them, nor ask for anything else
of the scheduler: while the step is traced, these are the values of before.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from graphopt import _compat
from graphopt.errors import CaptureError
from graphopt.host import HostCall
from graphopt.tracing.callback import record
from graphopt.tracing.draws.recorder import HostCalls
from graphopt.tracing.host_numbers import is_host_number
from graphopt.tracing.numbers import SYMBOLIC
from graphopt.tracing.replace import replaced
from graphopt.tracing.scheduled import OfGroup, OfScheduler, ScheduledSetting, used
from graphopt.tracing.source import current_user_line

_SCHEDULED = ("lr", "momentum", "betas")
"""Settings of parameter groups that schedulers change."""

_READERS = ("get_last_lr", "get_lr")
_FREE = frozenset({"step", *_READERS})
"""What a step may ask a scheduler for behind its step."""


@contextmanager
def traced_schedulers(
    groups: Iterable[dict[str, Any]],
    calls: HostCalls,
    stepping: Callable[[Optimizer], None],
    made_here: Callable[[Optimizer], bool],
) -> Iterator[None]:
    """While active, stepping a scheduler records a call of it.

    Args:
        groups: of the optimizers, as the step finds them.
        calls: reads the rates that it has set last.
        stepping: told of the optimizer of each scheduler that is stepped.
        made_here: whether the step has made an optimizer, whose schedulers are traced as any code.

    Raises:
        CaptureError: the step uses what a scheduler has changed before, or a rate is a tensor.
    """
    stepped = _Stepped(groups, stepping, made_here)
    classes = [c for c in _subclasses(LRScheduler) if "step" in vars(c)]
    # Set for the whole trace: what is observed of a step's objects includes their classes.
    LRScheduler.__getattribute__ = stepped.read  # type: ignore[method-assign]
    readers = [(c, n) for c in _subclasses(LRScheduler) for n in _READERS if n in vars(c)]
    with replaced(
        *((c, "step", _recording(vars(c)["step"], stepped)) for c in classes),
        *((c, name, _last_rates(vars(c)[name], stepped, calls)) for c, name in readers),
    ):
        try:
            yield
        finally:
            del LRScheduler.__getattribute__
            changed = stepped.put_back()
    if changed:
        raise used(f"sets {changed!r} of a parameter group", stepped.name)


def _recording(step: Callable[..., Any], stepped: _Stepped) -> Callable[..., None]:
    signature = inspect.signature(step)

    @functools.wraps(step)
    def behind_optimizer(self: Any, *args: Any) -> None:
        _compat.mark_stepped(self.optimizer)
        step(self, *args)

    def stepped_in_every_call(self: Any, *args: Any, **kwargs: Any) -> None:
        if stepped.traces(self):
            step(self, *args, **kwargs)
            return
        bound = signature.bind(self, *args, **kwargs)
        called = behind_optimizer if _compat.has_stepped(vars(self)["optimizer"]) else step
        stepped.add(self)
        record(HostCall(MethodType(called, self), bound.args[1:]))

    return stepped_in_every_call


class LastRate:
    """Reads one of the rates that a scheduler has set last, when a call begins.

    Args:
        scheduler: whose rates.
        read: its `get_last_lr`, or `get_lr`.
    """

    def __init__(self, scheduler: Any, read: Callable[[Any], list[Any]]) -> None:
        self._scheduler, self._read = scheduler, read

    def __call__(self, index: int) -> Any:
        rate = self._read(self._scheduler)[index]
        return rate.value if is_host_number(rate) else rate  # while the step is traced

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, LastRate):
            return False
        return other._scheduler is self._scheduler and other._read is self._read

    def __hash__(self) -> int:
        return id(self._scheduler)


def _last_rates(
    read: Callable[[Any], list[Any]], stepped: _Stepped, calls: HostCalls
) -> Callable[[Any], list[Any]]:
    @functools.wraps(read)
    def rates_of(self: Any) -> list[Any]:
        own = not read.__module__.startswith("torch.")  # the program's code, which is followed
        if stepped.has(self):
            if read.__name__ == "get_lr" and (own or "lr_lambdas" in vars(self)):
                raise used("reads get_lr of a scheduler", stepped.name)  # which calls its functions
            return stepped.rates(self, read)
        rates = read(self)
        if stepped.traces(self):
            return rates
        kinds = (float, *SYMBOLIC) if read.__name__ == "get_lr" else float
        if own or not all(isinstance(rate, kinds) for rate in rates):
            return rates
        if read.__name__ == "get_lr":
            stepped.refuse_set(self)
        return [calls.apply(LastRate(self, read), (index,)) for index in range(len(rates))]

    return rates_of


class _Stepped:
    """The schedulers that a trace has stepped, and the settings that they will change.

    Args:
        groups, stepping, made_here: see `traced_schedulers`.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        stepping: Callable[[Optimizer], None],
        made_here: Callable[[Optimizer], bool],
    ) -> None:
        self._stepping, self._made_here = stepping, made_here
        self.name = ""
        self._found = {id(group): dict(group) for group in groups}
        self._schedulers: dict[int, Any] = {}
        self._settings: list[tuple[dict[str, Any], str, Any, ScheduledSetting]] = []
        self._given: list[ScheduledSetting] = []
        self.read = self._reader()

    def add(self, scheduler: Any) -> None:
        """From now on neither a scheduler nor what it changes can be read."""
        for setting in self._given:
            setting.outdate()
        self._given.clear()
        self.name = type(scheduler).__name__
        for index, group in enumerate(vars(scheduler)["optimizer"].param_groups):
            for key in (key for key in _SCHEDULED if key in group):
                self._hide(group, key, OfGroup(scheduler, index, key))
        if id(scheduler) in self._schedulers:
            return
        self._schedulers[id(scheduler)] = scheduler
        self._stepping(vars(scheduler)["optimizer"])
        for value in vars(scheduler).values():
            for each in value if isinstance(value, (list, tuple)) else ():
                if isinstance(each, LRScheduler):  # those that this one steps in turn
                    self.add(each)

    def has(self, scheduler: Any) -> bool:
        """Whether a scheduler has been stepped in this trace."""
        return id(scheduler) in self._schedulers

    def traces(self, scheduler: Any) -> bool:
        """Whether a scheduler is traced as any other code."""
        return self._made_here(vars(scheduler)["optimizer"])

    def refuse_set(self, scheduler: Any) -> None:
        """Refuse a step that has set rates of which a scheduler computes others before it runs."""
        for group in vars(scheduler)["optimizer"].param_groups:
            found = self._found.get(id(group))
            if found is not None and group["lr"] is not found["lr"]:
                raise used("sets 'lr' of a parameter group", type(scheduler).__name__)

    def rates(self, scheduler: Any, read: Callable[[Any], list[Any]]) -> list[ScheduledSetting]:
        """The rates that a scheduler will have set, by parameter group."""
        name, groups = type(scheduler).__name__, vars(scheduler)["optimizer"].param_groups
        rates = [OfScheduler(scheduler, index, read) for index in range(len(groups))]
        floats = {id(g) for g, key, was, _ in self._settings if key == "lr" and type(was) is float}
        given = [
            ScheduledSetting("lr", name, rate, is_float=id(group) in floats)
            for rate, group in zip(rates, groups, strict=True)
        ]
        self._given += given
        return given

    def _hide(self, group: dict[str, Any], key: str, read: OfGroup) -> None:
        value = group[key]
        for number, (of, name, before, unknown) in enumerate(self._settings):
            if of is group and name == key:  # changed once more
                if value is unknown:
                    fresh = self._unknown(key, read, before)
                    self._settings[number] = (group, key, before, fresh)
                    dict.__setitem__(group, key, fresh)
                return
        if isinstance(value, torch.Tensor):
            raise CaptureError(
                f"it steps a {self.name}, which changes {key!r} of a parameter group, a tensor",
                location=str(current_user_line()),
                hint="call scheduler.step() outside the step, after it",
            )
        if self._found.get(id(group), group).get(key) is not value:
            raise CaptureError(
                f"it sets {key!r} of a parameter group before the step of a {self.name}, which is"
                " not traced and would not see it",
                location=str(current_user_line()),
                hint="set it in the scheduler, or outside the step",
            )
        unknown = self._unknown(key, read, value)
        self._settings.append((group, key, value, unknown))
        dict.__setitem__(group, key, unknown)

    def _unknown(self, key: str, read: OfGroup, before: Any) -> ScheduledSetting:
        unknown = ScheduledSetting(key, self.name, read, is_float=isinstance(before, float))
        self._given.append(unknown)
        return unknown

    def put_back(self) -> str | None:
        """Everything is as it was. Returns a setting that the step has set itself."""
        changed = None
        for group, key, value, unknown in self._settings:
            changed = changed if group.get(key) is unknown else key
            dict.__setitem__(group, key, value)
        self._found, self._schedulers, self._settings = {}, {}, []
        return changed

    def _reader(self) -> Callable[[Any, str], Any]:
        """How attributes of schedulers are read."""

        def read(scheduler: Any, name: str) -> Any:
            free = name in _FREE or name.startswith("__")
            if id(scheduler) in self._schedulers and not free:
                raise used(f"reads {name} of a scheduler", type(scheduler).__name__)
            return object.__getattribute__(scheduler, name)

        return read


def _subclasses(parent: type) -> set[type]:
    children: list[type] = parent.__subclasses__()
    return {parent}.union(*map(_subclasses, children))
