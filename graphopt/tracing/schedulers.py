"""Learning rate schedulers that a step steps itself: called in every call, where the program does.

    loss.backward(); optimizer.step(); scheduler.step()
                                        └─ a call on the host, as by `graphopt.callback`

A scheduler is not traced: the rates that it sets are read before the next call runs, as those are
that it sets between two calls. An optimizer that steps behind it has those that a copy sets when
the call begins (`graphopt.tracing.foreseen`), or where there can be none reads them in each call
where it steps (`graphopt.host.settings`). Else they may be kept, shown and returned behind it,
which each call does with those that it finds; nobody may decide by them but where they are
foreseen, nor ask for anything else of the scheduler: while the step is traced, these are the values
of before.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from graphopt import _compat
from graphopt.errors import CaptureError
from graphopt.host import HostCall
from graphopt.host.settings import SettingReading
from graphopt.tracing.callback import record
from graphopt.tracing.draws.recorder import HostCalls
from graphopt.tracing.foreseen import Foreseen, SetInGroup, Stepped, given_to, is_foreseeable
from graphopt.tracing.host_numbers import is_host_number
from graphopt.tracing.last_rates import LastRate, is_rate, not_numbers
from graphopt.tracing.numbers import SYMBOLIC, noted
from graphopt.tracing.replace import replaced
from graphopt.tracing.scheduled import (
    EachOf,
    KeptSettings,
    OfGroup,
    OfKept,
    OfScheduler,
    Reader,
    ScheduledSetting,
    SettingFloat,
    is_scheduled,
    used,
)
from graphopt.tracing.source import current_location

_SCHEDULED = ("lr", "momentum", "betas", "weight_decay")
"""Settings of parameter groups that schedulers change; torch's own the rate alone, but for those
that cycle the momentum."""
_SETTING = ("step", "get_lr", "_get_closed_form_lr", "_update_lr")
"""Methods by which schedulers change settings."""

_READERS = ("get_last_lr", "get_lr")
_FREE = frozenset({"step", *_READERS})
"""What a step may ask a scheduler for behind its step."""


def _recording(step: Callable[..., Any], stepped: TracedSchedulers) -> Callable[..., None]:
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
        called = behind_optimizer if stepped.is_behind(vars(self)["optimizer"]) else step
        stepped.add(self, Stepped(self, step, bound.args[1:]))
        record(HostCall(MethodType(called, self), bound.args[1:]))

    return stepped_in_every_call


def _last_rates(
    read: Callable[[Any], list[Any]], stepped: TracedSchedulers, calls: HostCalls
) -> Callable[[Any], list[Any]]:
    @functools.wraps(read)
    def rates_of(self: Any) -> list[Any]:
        own = not read.__module__.startswith("torch.")  # the program's code, which is followed
        if stepped.has(self):
            return stepped.rates(self, read, calls_functions=own or "lr_lambdas" in vars(self))
        rates = read(self)
        if own or stepped.traces(self):
            return rates
        if not all(map(is_rate, rates)):
            raise not_numbers(self)
        if read.__name__ == "get_lr":
            stepped.refuse_set(self)
        elif any(isinstance(rate, SYMBOLIC) and not is_host_number(rate) for rate in rates):
            return rates
        return [calls.apply(LastRate(self, read), (index,)) for index in range(len(rates))]

    return rates_of


def _making(make: Callable[..., None], known: Set[int]) -> Callable[..., None]:
    """How a scheduler is made.

    Args:
        known: optimizers that the step has not made, by id.
    """

    @functools.wraps(make)
    def made(self: Any, optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        if id(optimizer) in known:
            raise CaptureError(
                f"it makes a {type(self).__name__}, which sets the rates of an optimizer from"
                " outside it and looks after its steps from then on",
                location=current_location(),
                hint="make the scheduler before the first call of the step",
            )
        make(self, optimizer, *args, **kwargs)

    return made


class _Hidden(NamedTuple):
    """A setting of a parameter group that a scheduler changes.

    Attributes:
        before: what the step finds there.
        read: gives what is there behind the scheduler's step.
        unknown: stands for what is there then.
        now: what is there while the step is traced: that, or what the step has set behind.
        steps: of schedulers, before it; None where what they set is not known before they do.
    """

    group: dict[str, Any]
    key: str
    before: Any
    read: OfGroup
    unknown: ScheduledSetting
    now: Any
    steps: tuple[Stepped, ...] | None

    @property
    def is_of_numbers(self) -> bool:
        parts = self.before if type(self.before) is tuple else (self.before,)
        return all(isinstance(part, (int, float)) for part in parts)


class TracedSchedulers:
    """The schedulers that a trace has stepped, and the settings that they will change.

    Args:
        optimizers: as the step finds them.
        calls: reads the rates that a scheduler has set last.
        mode: in which the trace computes.
        stepping: told of the optimizer of each scheduler that is stepped.
        made_here: whether the step has made an optimizer, whose schedulers are traced as any code.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        calls: HostCalls,
        mode: Any,
        stepping: Callable[[Optimizer], None],
        made_here: Callable[[Optimizer], bool],
    ) -> None:
        self._stepping, self._made_here = stepping, made_here
        self.name = ""
        self._calls, self._mode = calls, mode
        self._readings = self._times_kept = 0
        groups = chain.from_iterable(each.param_groups for each in optimizers)
        self._found = {id(group): dict(group) for group in groups}
        self._optimizers = set(map(id, optimizers))
        self._behind: set[int] = set()
        self._schedulers: dict[int, Any] = {}
        self._settings: list[_Hidden] = []
        self._given: list[ScheduledSetting] = []
        self._steps: tuple[Stepped, ...] | None = ()

    @contextmanager
    def active(self) -> Iterator[None]:
        """While active, stepping a scheduler records a call of it.

        Raises:
            CaptureError: the step uses what a scheduler has changed before, a rate is a tensor, or
                it makes a scheduler for an optimizer that it has not made.
        """
        classes = [c for c in _subclasses(LRScheduler) if "step" in vars(c)]
        # Set for the whole trace: what is observed of a step's objects includes their classes.
        LRScheduler.__getattribute__ = self._reader()  # type: ignore[method-assign]
        readers = [(c, n) for c in _subclasses(LRScheduler) for n in _READERS if n in vars(c)]
        with replaced(
            *((c, "step", _recording(vars(c)["step"], self)) for c in classes),
            *((c, name, _last_rates(vars(c)[name], self, self._calls)) for c, name in readers),
            (LRScheduler, "__init__", _making(LRScheduler.__init__, self._optimizers)),
        ):
            try:
                yield
            finally:
                del LRScheduler.__getattribute__
                changed = self._put_back()
        if changed:
            raise used(f"sets {changed!r} of a parameter group", self.name)

    @contextmanager
    def shown_to(self, optimizer: Optimizer) -> Iterator[None]:
        """While active, an optimizer has the settings that schedulers have set for it in this call
        as numbers of the graph.

        Raises:
            CaptureError: it changes one of them.
        """
        self._behind.add(id(optimizer))
        groups = {id(group) for group in optimizer.param_groups}
        self._note_sets(groups)
        shown = [
            (each, self._numbers(each) if each.now is each.unknown else each.now)
            for each in self._settings
            if id(each.group) in groups and each.is_of_numbers
        ]
        for each, number in shown:
            self._replace(each, each.now, number)
        yield
        for each, number in shown:
            self._replace(each, number, each.now)

    def _numbers(self, hidden: _Hidden) -> Any:
        """What stands for a setting, or for each of several, as numbers of the graph."""
        if type(hidden.before) is not tuple:
            return self._number(hidden, hidden.read, hidden.before)
        return tuple(
            self._number(hidden, replace(hidden.read, item=index), each)
            for index, each in enumerate(hidden.before)
        )

    def _number(self, hidden: _Hidden, read: OfGroup, before: Any) -> Any:
        known = self._known(hidden.steps, read)
        if known is not None:
            return known
        target = SettingReading(read, read.key, self._readings)
        self._readings += 1
        number = _compat.record_clock(self._mode, target, integer=False)
        return noted(SettingFloat(number, before, target.answers))

    def _known(self, steps: tuple[Stepped, ...] | None, read: OfGroup) -> Any:
        """The number that a setting is behind some steps; None where nobody knows it before."""
        foreseen = self._foreseen(steps, read)
        if foreseen is None:
            return None
        number = self._calls.apply(foreseen, given_to(steps or ()))
        record(HostCall(foreseen.check, (read.scheduler, number)))
        return number

    def _foreseen(self, steps: tuple[Stepped, ...] | None, read: OfGroup) -> Foreseen | None:
        """What gives a setting before the step runs; None where nothing can."""
        if steps is None:
            return None
        foreseen = Foreseen(steps, self._found, read.group, read.key, read.item)
        try:
            value = foreseen(*(each.value for each in given_to(steps)))
        except Exception:  # where the scheduler steps itself, it says what is wrong
            return None
        return foreseen if type(value) is float else None

    def finish(self) -> None:
        """The step is over: what it has set behind schedulers is set in each call."""
        self._note_sets({id(each.group) for each in self._settings})

    def _note_sets(self, groups: Collection[int]) -> None:
        """Set what the step has set in some parameter groups (by id) behind schedulers in each
        call."""
        for number, hidden in enumerate(self._settings):
            value = hidden.group.get(hidden.key)
            if id(hidden.group) in groups and value is not hidden.now:
                known = self._set(hidden.read, value)
                dict.__setitem__(hidden.group, hidden.key, known)
                self._settings[number] = hidden._replace(now=known)

    def _set(self, place: OfGroup, value: Any) -> Any:
        """Set a setting in each call. Returns the number, which each call knows before it runs.

        Raises:
            CaptureError: it knows none.
        """
        known = value.known() if is_scheduled(value) else value
        plain = type(known) in (int, float) or is_host_number(known)
        if not plain or place.item is not None or self._steps is None:
            raise used(f"sets {place.key!r} of a parameter group", self.name)
        setting = SetInGroup(place.group, place.key)
        self._keep_given(place.scheduler)
        self._steps = (*self._steps, Stepped(place.scheduler, setting, (known,)))
        record(HostCall(setting, (place.scheduler, known)))
        return known

    def _replace(self, hidden: _Hidden, found: Any, value: Any) -> None:
        if hidden.group.get(hidden.key) is not found:
            raise used(f"sets {hidden.key!r} of a parameter group", self.name)
        dict.__setitem__(hidden.group, hidden.key, value)

    def is_behind(self, optimizer: Optimizer) -> bool:
        """Whether an optimizer has stepped in this trace."""
        known = id(optimizer) in self._optimizers
        return id(optimizer) in self._behind if known else _compat.has_stepped(optimizer)

    def _kept(self, scheduler: Any, read: Callable[[], Sequence[Any]], count: int) -> list[OfKept]:
        """Settings that each call reads here, and not later."""
        kept = KeptSettings(self._times_kept, read)
        self._times_kept += 1
        record(HostCall(kept.keep, (scheduler,)))
        return [OfKept(scheduler, kept, item) for item in range(count)]

    def add(self, scheduler: Any, step: Stepped) -> None:
        """From now on neither a scheduler nor what it changes can be read."""
        self.name = type(scheduler).__name__
        foreseeable = self._steps is not None and is_foreseeable(scheduler, step.args)
        if not foreseeable:
            self._steps = None
        groups = vars(scheduler)["optimizer"].param_groups
        self._note_sets(set(map(id, groups)))
        self._note_first_sets(scheduler, groups)
        if self._steps is not None:
            self._steps = (*self._steps, step)
        self._keep_given(scheduler)
        self._add(scheduler)

    def _note_first_sets(self, scheduler: Any, groups: Sequence[dict[str, Any]]) -> None:
        """Set what the step has set before the first step of a scheduler in each call."""
        hidden = {(id(each.group), each.key) for each in self._settings}
        for index, group in enumerate(groups):
            for key in (key for key in _changed_by(scheduler) if key in group):
                found = self._found.get(id(group), group).get(key)
                if (id(group), key) not in hidden and group[key] is not found:
                    self._set(OfGroup(scheduler, index, key), group[key])

    def _keep_given(self, scheduler: Any) -> None:
        """Settings are about to change: those that the step has are read before."""
        given, self._given = self._given, []
        if given:
            reads = EachOf(tuple(setting.read_now() for setting in given))
            for setting, read in zip(given, self._kept(scheduler, reads, len(given)), strict=True):
                setting.was_kept(read)

    def _add(self, scheduler: Any) -> None:
        self.name = type(scheduler).__name__
        for index, group in enumerate(vars(scheduler)["optimizer"].param_groups):
            for key in (key for key in _changed_by(scheduler) if key in group):
                self._hide(group, key, OfGroup(scheduler, index, key))
        if id(scheduler) in self._schedulers:
            return
        self._schedulers[id(scheduler)] = scheduler
        self._stepping(vars(scheduler)["optimizer"])
        for value in vars(scheduler).values():
            for each in value if isinstance(value, (list, tuple)) else ():
                if isinstance(each, LRScheduler):  # those that this one steps in turn
                    self._add(each)

    def has(self, scheduler: Any) -> bool:
        """Whether a scheduler has been stepped in this trace."""
        return id(scheduler) in self._schedulers

    def traces(self, scheduler: Any) -> bool:
        """Whether a scheduler is traced as any other code."""
        optimizer = vars(scheduler)["optimizer"]
        return isinstance(optimizer, _compat.StandInOptimizer) or self._made_here(optimizer)

    def refuse_set(self, scheduler: Any) -> None:
        """Refuse a step that has set rates of which a scheduler computes others before it runs."""
        for group in vars(scheduler)["optimizer"].param_groups:
            found = self._found.get(id(group))
            if found is not None and group["lr"] is not found["lr"]:
                raise used("sets 'lr' of a parameter group", type(scheduler).__name__)

    def rates(
        self, scheduler: Any, read: Callable[[Any], list[Any]], calls_functions: bool
    ) -> list[ScheduledSetting]:
        """The rates that a scheduler will have set, by parameter group.

        Args:
            calls_functions: reading them calls functions of the program: where it does.
        """
        name, groups = type(scheduler).__name__, vars(scheduler)["optimizer"].param_groups
        rates: Sequence[Reader]
        if read.__name__ == "get_lr" and calls_functions:
            rates = self._kept(scheduler, MethodType(read, scheduler), len(groups))
        else:
            rates = [OfScheduler(scheduler, index, read) for index in range(len(groups))]
        floats = {
            id(each.group)
            for each in self._settings
            if each.key == "lr" and type(each.before) is float
        }
        last = read.__name__ == "get_last_lr" and read.__module__.startswith("torch.")
        last = last and not any(isinstance(each.step, SetInGroup) for each in self._steps or ())
        known = [
            partial(self._known, self._steps if last else None, OfGroup(scheduler, index, "lr"))
            for index in range(len(groups))
        ]
        given = [
            ScheduledSetting("lr", name, rate, is_float=id(group) in floats, known=each)
            for rate, group, each in zip(rates, groups, known, strict=True)
        ]
        self._given += given
        return given

    def _hide(self, group: dict[str, Any], key: str, read: OfGroup) -> None:
        value = group[key]
        for number, hidden in enumerate(self._settings):
            if hidden.group is group and hidden.key == key:  # changed once more
                if value is hidden.now:
                    fresh = self._unknown(key, read, hidden.before)
                    self._settings[number] = hidden._replace(
                        read=read, unknown=fresh, now=fresh, steps=self._steps
                    )
                    dict.__setitem__(group, key, fresh)
                return
        if isinstance(value, torch.Tensor):
            raise CaptureError(
                f"it steps a {self.name}, which changes {key!r} of a parameter group, a tensor",
                location=current_location(),
                hint="call scheduler.step() outside the step, after it",
            )
        before = self._found.get(id(group), group).get(key)
        unknown = self._unknown(key, read, before)
        self._settings.append(_Hidden(group, key, before, read, unknown, unknown, self._steps))
        dict.__setitem__(group, key, unknown)

    def _unknown(self, key: str, read: OfGroup, before: Any) -> ScheduledSetting:
        known = partial(self._known, self._steps, read)
        is_float = isinstance(before, float)
        unknown = ScheduledSetting(key, self.name, read, is_float=is_float, known=known)
        self._given.append(unknown)
        return unknown

    def _put_back(self) -> str | None:
        """Everything is as it was. Returns a setting that the step has set itself."""
        changed = None
        for each in self._settings:
            changed = changed if each.group.get(each.key) is each.now else each.key
            dict.__setitem__(each.group, each.key, each.before)
        self._found.clear()
        self._steps, self._given = (), []  # which hold numbers of the trace
        self._schedulers, self._settings = {}, []
        return changed

    def _reader(self) -> Callable[[Any, str], Any]:
        """How attributes of schedulers are read."""

        def read(scheduler: Any, name: str) -> Any:
            free = name in _FREE or name.startswith("__")
            if id(scheduler) in self._schedulers and not free:
                raise used(f"reads {name} of a scheduler", type(scheduler).__name__)
            return object.__getattribute__(scheduler, name)

        return read


def _changed_by(scheduler: Any) -> tuple[str, ...]:
    """The settings that a scheduler may change."""
    programs = (c for c in type(scheduler).__mro__ if not c.__module__.startswith("torch."))
    if any(name in vars(c) for c in programs for name in _SETTING):
        return _SCHEDULED
    return _SCHEDULED[: 3 if vars(scheduler).get("cycle_momentum") else 1]


def _subclasses(parent: type) -> set[type]:
    children: list[type] = parent.__subclasses__()
    return {parent}.union(*map(_subclasses, children))
