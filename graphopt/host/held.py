"""Objects of the step that a host callback's function and arguments hold.

    graphopt.callback(history.append, 5)        history, an argument, is another list in each call
    for i in range(3):
        graphopt.callback(lambda: log(i))       i is 2 when the graph runs, and was 0, 1 and 2

Lists and dictionaries among the step's arguments are the ones of the call, and variables of the
step are as they were when it called the function. Other containers that the step makes are to be
given as arguments, of which each call of the function gets its own.
"""

from __future__ import annotations

import functools
import gc
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import getitem
from types import BuiltinMethodType, CellType, FunctionType
from typing import Any

from graphopt._compat.frames import stored_cells
from graphopt._compat.identity import identities
from graphopt.errors import CaptureError, GraphOptError
from graphopt.host.functions import is_constant, parts_of
from graphopt.ir.user_frames import current_location

_CONTAINERS = (list, dict, set, deque, OrderedDict, defaultdict)
_NESTS = (*_CONTAINERS, tuple)


class HeldByFunction:
    """The step's own objects that a callback holds: closure variables with their values, and
    containers among the step's arguments.

    Args:
        is_outside: whether an object was there before the step: each call needs this very one.
        given: the containers among the arguments of the trace, by id, with their paths.

    Attributes:
        of_trace: those of them that it holds.
    """

    def __init__(
        self, is_outside: Callable[[Any], bool], given: Mapping[int, tuple[Any, Sequence[Any]]]
    ) -> None:
        self._is_outside, self._given = is_outside, given
        self.of_trace: dict[int, tuple[Any, Sequence[Any]]] = {}
        self._cells: dict[int, tuple[CellType, Any]] = {}
        self._seen: dict[int, Any] = {}

    def add(self, value: Any) -> None:
        """Records a callback's function, or a value that it is given or holds.

        Raises:
            CaptureError: it holds an object that the step has made, or sets one of its variables.
        """
        if id(value) in self._seen:
            return
        self._seen[id(value)] = value
        if id(value) in self._given:
            self.of_trace[id(value)] = self._given[id(value)]
        elif self._is_outside(value) or is_constant(value):
            return
        elif isinstance(value, FunctionType):
            self._add_function(value)
        else:
            parts = parts_of(value)
            if parts is None:
                raise _refusal(f"holds a {type(value).__name__} that the step has made")
            for part in parts:
                self.add(part)

    def _add_function(self, function: FunctionType) -> None:
        """Records what a function that the step has made holds."""
        code = function.__code__
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            if self._is_outside(cell):
                continue
            if name in stored_cells(code):
                raise _refusal(f"sets the variable {name} of the step")
            for content in gc.get_referents(cell):  # none where nothing has been assigned yet
                self._cells[id(cell)] = cell, content
                self.add(content)
        for each in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            if id(each) in self._given:
                raise _refusal("has an argument of the step as a default")
            self.add(each)

    def finish(self) -> None:
        """Drops references to the trace after everything has been added."""
        self._is_outside, self._given = bool, {}
        self._seen.clear()

    def __bool__(self) -> bool:
        return bool(self._cells or self.of_trace)

    def prepared(
        self, fn: Any, arguments: Sequence[Any], given: Any
    ) -> tuple[Callable[..., Any], list[Any]]:
        """The function and its arguments for one call of the step with the arguments `given`."""
        for cell, content in self._cells.values():
            cell.cell_contents = self._now(content, given)
        return self._now(fn, given), [self._now(each, given) for each in arguments]

    def _now(self, value: Any, given: Any) -> Any:
        """The object of this call that replaces one that the function holds."""
        if id(value) in self.of_trace:
            return functools.reduce(getitem, self.of_trace[id(value)][1], given)
        if isinstance(value, BuiltinMethodType) and id(value.__self__) in self.of_trace:
            return getattr(self._now(value.__self__, given), value.__name__)
        if isinstance(value, functools.partial):
            named = {name: self._now(each, given) for name, each in value.keywords.items()}
            parts = (self._now(each, given) for each in value.args)
            return functools.partial(self._now(value.func, given), *parts, **named)
        if type(value) is tuple:
            return tuple(self._now(each, given) for each in value)
        return value


def _refusal(what: str) -> CaptureError:
    return CaptureError(
        f"the function given to graphopt.callback {what}, which would be that of the capture in"
        " every call",
        location=current_location(),
        hint="give it what it needs as an argument, graphopt.callback(function, value); and let the"
        " step itself compute what it uses later",
    )


def containers_in(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yields the containers in a nested value, each with a shallow copy."""
    if type(value) not in _NESTS:
        return
    if type(value) is not tuple:
        yield value, value.copy()
    for each in value.values() if isinstance(value, dict) else value:
        yield from containers_in(each)


def refuse_changed_containers(made: Sequence[tuple[Any, Any]]) -> None:
    """Raises if a callback has changed containers that were created for it.

    Args:
        made: each with a copy from before the call.

    Raises:
        GraphOptError: it has; the step would not see it.
    """
    if not all(_holds_same(container, before) for container, before in made):
        raise GraphOptError(
            "a function that the step calls on the host (graphopt.callback) changes a list or"
            " dictionary that the step has made, which the captured step would not see\n"
            "  hint:  keep it outside the step, or let the step itself compute it"
        )


def _holds_same(one: Any, other: Any) -> bool:
    """True if two containers of one kind hold the same objects, or two sets equal ones."""
    if isinstance(one, set):
        return bool(one == other)
    if isinstance(one, dict):
        one, other = ([*each, *each.values()] for each in (one, other))
    return identities(one) == identities(other)
