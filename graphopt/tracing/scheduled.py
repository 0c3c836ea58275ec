"""Settings that a scheduler changes within a step, which a trace knows nothing of."""

from __future__ import annotations

import builtins
import operator
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import BuiltinFunctionType
from typing import Any, NoReturn

import torch

from graphopt.errors import CaptureError, GraphOptError
from graphopt.tracing.number_functions import MATH, ROUNDING
from graphopt.tracing.numbers import COMPARISONS, ReadFloat
from graphopt.tracing.replace import original
from graphopt.tracing.running_trace import current_trace
from graphopt.tracing.source import current_user_line


@dataclass(frozen=True)
class OfScheduler:
    """Gives the rate of a parameter group that a scheduler says it has set last.

    Attributes:
        rates: its `get_last_lr`.
    """

    scheduler: Any
    group: int
    rates: Callable[[Any], list[Any]]

    def __call__(self) -> Any:
        return self.rates(self.scheduler)[self.group]


@dataclass(frozen=True)
class OfGroup:
    """Gives a setting of a parameter group of a scheduler's optimizer.

    Attributes:
        item: which part of a tuple.
    """

    scheduler: Any
    group: int
    key: str
    item: int | None = None

    def __call__(self) -> Any:
        found = self.scheduler.optimizer.param_groups[self.group][self.key]
        return found if self.item is None else found[self.item]


class KeptSettings:
    """Settings as they are at a place of the program, which a call on the host reads there.

    Args:
        index: which such call of the step it is, in the order of the program.
        read: gives them.
    """

    def __init__(self, index: int, read: Callable[[], Sequence[Any]]) -> None:
        self.index, self._read = index, read
        self.values: Sequence[Any] = ()

    def keep(self, scheduler: Any) -> None:
        """Read them now, as the functions of a scheduler find the program."""
        self.values = ()
        self.values = self._read()

    def repeats(self, other: KeptSettings) -> bool:
        """Whether another trace of the same step has read the same there."""
        return self.index == other.index and self._read == other._read

    def __eq__(self, other: object) -> bool:
        return isinstance(other, KeptSettings) and self.repeats(other)

    def __hash__(self) -> int:
        return self.index


@dataclass(frozen=True)
class EachOf:
    """Gives what several functions give."""

    reads: tuple[Reader, ...]

    def __call__(self) -> list[Any]:
        return [read() for read in self.reads]


@dataclass(frozen=True)
class OfKept:
    """Gives one of such settings."""

    scheduler: Any
    kept: KeptSettings
    item: int

    def __call__(self) -> Any:
        values = self.kept.values  # none where reading them has raised, and so will the step
        return values[self.item] if values else None


@dataclass(frozen=True)
class OfSettings:
    """Gives what a function of such settings, and of numbers, gives.

    Attributes:
        scheduler: one of those that change them.
    """

    scheduler: Any
    function: Callable[..., Any]
    args: tuple[Any, ...]

    def __call__(self) -> Any:
        given = [arg() if isinstance(arg, _READERS) else arg for arg in self.args]
        return self.function(*given)


@dataclass(frozen=True)
class AsFloat:
    """Gives a setting of which the step has asked whether it is a float, and been told so.

    Attributes:
        key: of the parameter group.
    """

    scheduler: Any
    read: Callable[[], Any]
    key: str

    def __call__(self) -> Any:
        value = self.read()
        if not isinstance(value, float):
            raise GraphOptError(
                f"the step has asked whether {self.key!r} of a parameter group is a float, which it"
                f" was when the step was captured; a {type(self.scheduler).__name__} has made it a"
                f" {type(value).__name__}"
            )
        return value


Reader = OfScheduler | OfGroup | OfKept | OfSettings | AsFloat
_READERS = (OfScheduler, OfGroup, OfKept, OfSettings, AsFloat)


class ScheduledSetting:
    """What stands for a setting that a scheduler changes in this step, or for a number that is
    computed from such: it can be computed with, kept, shown and returned, when the graph has run.

    Args:
        key: of the parameter group.
        scheduler: the class of what changes it.
        read: gives it when the graph has run.
        of: what it is computed from, if it is: settings and numbers.
        is_float: it is a float where the step finds it.
        known: gives the number that each call knows before it runs; None where it knows none.
    """

    def __init__(
        self,
        key: str,
        scheduler: str,
        read: Reader,
        of: tuple[Any, ...] = (),
        is_float: bool = False,
        known: Callable[[], Any] | None = None,
    ) -> None:
        self.__key, self.__scheduler, self.__read, self.__of = key, scheduler, read, of
        self.__known = known
        self.__is_float, self.__asked, self.__was_kept = is_float, False, False

    def is_instance(self, kinds: Any) -> bool:
        """`isinstance(rate, float)` in a step gets the answer that it gets for the number."""
        if not self.__is_float:
            self._used()
        self.__asked = True
        return isinstance(0.0, kinds)

    def was_kept(self, read: OfKept) -> None:
        """A scheduler is stepped again; what it was then is read before."""
        self.__read, self.__was_kept = read, True

    def read_now(self) -> Reader:
        """What gives it as long as no scheduler is stepped again."""
        return self.__read

    def read_later(self) -> Reader:
        """What gives it when the graph has run, or where it is said."""
        read = self.__read
        if isinstance(read, OfSettings):
            args = tuple(arg.read_later() if is_scheduled(arg) else arg for arg in self.__of)
            read = OfSettings(read.scheduler, read.function, args)
        return AsFloat(read.scheduler, read, self.__key) if self.__asked else read

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self._used()

    def refuse_asked(self) -> NoReturn:
        """The step decides by it, or by what Python computes of it."""
        self._decides()

    @property
    def is_float(self) -> bool:
        """Whether it is a float where the step finds it."""
        return self.__is_float

    def __str__(self) -> str:
        return self.__text(str)

    def __repr__(self) -> str:
        return self.__text(repr)

    def __format__(self, spec: str) -> str:
        return self.__text(format, spec)

    def __text(self, function: Callable[..., str], *args: str) -> str:
        return current_trace().text_of(function, (self, *args))

    def _used(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise used(f"uses {self.__key!r} of a parameter group", self.__scheduler)

    def known(self) -> Any:
        """The number that each call knows before it runs; None where it knows none."""
        read = self.__read
        if not isinstance(read, OfSettings):
            return None if self.__known is None or self.__was_kept else self.__known()
        given = [arg.known() if is_scheduled(arg) else arg for arg in self.__of]
        return None if any(each is None for each in given) else read.function(*given)

    def decided(self, ask: Callable[..., Any], *args: Any) -> Any:
        """The answer to a question for the number; the graph holds for that alone."""
        given = [self.known(), *(arg.known() if is_scheduled(arg) else arg for arg in args)]
        if any(each is None for each in given):
            self._decides()
        return ask(*given)

    def _decides(self, *args: Any) -> NoReturn:
        raise used(f"decides by {self.__key!r} of a parameter group", self.__scheduler)

    def _later(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """The same where others are numbers that only the graph or Python knows then."""
        value = current_trace().number_of(function, args)
        if value is None:
            self._used()
        return value

    def computed(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """`function(*args)` of settings, of which this is one, and numbers."""
        settings = tuple(arg for arg in args if is_scheduled(arg))
        if not all(is_scheduled(arg) or type(arg) in _PLAIN for arg in args):
            return self._later(function, args)
        if function is float and self.__is_float:
            return self
        read = OfSettings(self.__read.scheduler, function, ())
        floats = function in _GIVING_FLOATS and all(each.__is_float for each in settings)
        return ScheduledSetting(self.__key, self.__scheduler, read, args, floats)


class SettingFloat(ReadFloat):
    """A setting that a scheduler has changed before an optimizer steps, as that finds it: a number
    of the graph.

    Args:
        symbolic: what stands for it in the graph.
        before: what the step found there.
        answers: where it is noted what is answered to comparisons; looked at in each call.
    """

    def __init__(self, symbolic: torch.SymFloat, before: Any, answers: list[Any]) -> None:
        of_node: Any = super().__init__  # which one version of torch gives types, and one does not
        of_node(symbolic.node)
        self.before, self.answers = before, answers

    def __bool__(self) -> bool:
        return bool(self != 0)


def _as_before(compare: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """A comparison that is answered for the setting that the step found."""
    otherwise = getattr(ReadFloat, f"__{compare.__name__}__")

    def method(self: SettingFloat, other: Any) -> Any:
        if type(other) not in (int, float):
            return otherwise(self, other)
        answer = bool(compare(self.before, other))
        self.answers.append((compare, other, answer))
        return answer

    return method


for _compare in COMPARISONS:
    setattr(SettingFloat, f"__{_compare.__name__}__", _as_before(_compare))
SettingFloat.__hash__ = ReadFloat.__hash__  # type: ignore[method-assign]

_PLAIN = (int, float, bool)
_COMPENSATES = sys.version_info >= (3, 12)
"""Whether `sum` adds floats otherwise than one by one."""
_OPERATORS = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")
_COMPARED = ("lt", "le", "gt", "ge", "eq", "ne")
_GIVING_FLOATS = frozenset(
    {operator.add, operator.sub, operator.mul, operator.truediv, operator.neg, operator.abs, float}
)
"""What gives a float wherever one of its arguments is one."""


def is_scheduled(value: object) -> bool:
    """Whether a value stands for a setting that a scheduler changes in this step."""
    return type(value) is ScheduledSetting


def computing(callee: Any, args: Sequence[Any]) -> Callable[..., Any] | None:
    """What is called in place of a function that is given such a setting; None where that is the
    function itself."""
    callee = original(callee)
    if callee is sum and _COMPENSATES and args and isinstance(args[0], Iterator):
        return _sum_of_iterator
    setting = next(filter(is_scheduled, _among(args)), None)
    if setting is None:
        return None
    if callee is isinstance:
        return ScheduledSetting.is_instance if is_scheduled(args[0]) else None
    if type(callee) not in (type, BuiltinFunctionType) or callee not in _FUNCTIONS:
        return None

    def compute(*given: Any, **options: Any) -> Any:
        if options:
            setting._used()
        return setting.computed(_FUNCTIONS[callee], tuple(_among(given)))

    return compute


def _sum_of_iterator(values: Iterator[Any], *start: Any, **options: Any) -> Any:
    """`sum` of what is found out by taking it."""
    listed = list(values)
    return (computing(sum, (listed,)) or sum)(listed, *start, **options)


def _sum(*values: Any) -> Any:
    return sum(values)


def _largest(*values: Any) -> Any:
    return max(values)


def _smallest(*values: Any) -> Any:
    return min(values)


def _among(args: Sequence[Any]) -> Sequence[Any]:
    """What a function of several numbers, or of a list of them, is given."""
    listed = len(args) == 1 and type(args[0]) in (list, tuple)
    return args[0] if listed else args


def _forward(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, *others: self.computed(function, (self, *others))


def _reflected(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, other: self.computed(function, (other, self))


_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    **{each: each for each in (builtins.float, builtins.int, *MATH, *ROUNDING)},
    abs: operator.abs,
    sum: _sum,
    max: _largest,
    min: _smallest,
}
"""Functions of numbers that cannot be told what to do with other objects, each with one of several
numbers."""

for _name in _OPERATORS:
    setattr(ScheduledSetting, f"__{_name}__", _forward(getattr(operator, _name)))
    setattr(ScheduledSetting, f"__r{_name}__", _reflected(getattr(operator, _name)))
for _name, _function in (("neg", operator.neg), ("pos", operator.pos), ("abs", operator.abs),
                         ("round", builtins.round)):  # fmt: skip
    setattr(ScheduledSetting, f"__{_name}__", _forward(_function))
for _operation in (
    *("float", "int", "index", "hash"),
    *("iter", "getitem", "len", "complex", "trunc", "floor", "ceil", "divmod", "array"),
):
    setattr(ScheduledSetting, f"__{_operation}__", ScheduledSetting._used)


def _decision(ask: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, *others: self.decided(ask, *others)


for _operation, _ask in (("bool", bool), *((n, getattr(operator, n)) for n in _COMPARED)):
    setattr(ScheduledSetting, f"__{_operation}__", _decision(_ask))


def used(what: str, scheduler: str) -> CaptureError:
    """The refusal of a step that does something behind the step of a scheduler."""
    line = current_user_line()
    return CaptureError(
        f"it {what} behind the step of a {scheduler}, which is not traced",
        location=None if line is None else str(line),
        hint="step the scheduler last, and use its rates before, or outside the step; behind it"
        " they may be computed with, kept, shown and returned, but not decided by",
    )
