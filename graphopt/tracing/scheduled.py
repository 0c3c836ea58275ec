"""Settings that a scheduler changes within a step, which a trace knows nothing of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from graphopt.errors import CaptureError
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
    """Gives a setting of a parameter group of a scheduler's optimizer."""

    scheduler: Any
    group: int
    key: str

    def __call__(self) -> Any:
        return self.scheduler.optimizer.param_groups[self.group][self.key]


class ScheduledSetting:
    """What stands for a setting that a scheduler changes in this step: it can be kept and returned.

    Attributes:
        is_outdated: a scheduler has been stepped since; what it was then, nobody knows in the end.

    Args:
        key: of the parameter group.
        scheduler: the class of what changes it.
        read: gives it when the graph has run.
    """

    def __init__(self, key: str, scheduler: str, read: OfScheduler | OfGroup) -> None:
        self.__key, self.__scheduler, self.__read = key, scheduler, read
        self.is_outdated = False

    def read_later(self) -> OfScheduler | OfGroup:
        """What gives it when the graph has run."""
        if self.is_outdated:
            raise used(
                f"keeps {self.__key!r} of a parameter group, which is changed again,",
                self.__scheduler,
            )
        return self.__read

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self._used()

    def _used(self, *args: Any, **kwargs: Any) -> Any:
        raise used(f"uses {self.__key!r} of a parameter group", self.__scheduler)


for _operation in (
    *("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "floordiv", "rfloordiv"),
    *("mod", "rmod", "pow", "rpow", "neg", "pos", "abs", "float", "int", "index", "round", "bool"),
    *("lt", "le", "gt", "ge", "eq", "ne", "hash", "str", "repr", "format", "iter", "getitem"),
    *("len", "complex", "trunc", "floor", "ceil"),
):
    setattr(ScheduledSetting, f"__{_operation}__", ScheduledSetting._used)


def used(what: str, scheduler: str) -> CaptureError:
    """The refusal of a step that does something behind the step of a scheduler."""
    line = current_user_line()
    return CaptureError(
        f"it {what} behind the step of a {scheduler}, which is not traced",
        location=None if line is None else str(line),
        hint="step the scheduler last, and compute with its rates before, or outside the step",
    )
