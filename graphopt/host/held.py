"""What a function that a step calls on the host holds of the step's own: as it was at the call.

    for i in range(3):
        graphopt.callback(lambda: log(i))       i is 2 when the graph runs, and was 0, 1 and 2
    graphopt.callback(history.append, 5)        history, an argument, is another list in each call

Variables and containers that the step makes are made again for each call of the function. What the
function changes in them would be lost, and is an error; those among the step's arguments are the
ones of the call.
"""

from __future__ import annotations

import functools
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import BuiltinMethodType, CellType, FunctionType, MethodType
from typing import Any

from graphopt.errors import GraphOptError

_CONTAINERS = (list, dict, set, deque, OrderedDict, defaultdict)
_NESTS = (*_CONTAINERS, tuple)


def _nothing(value: object) -> bool:
    return False


def _none(value: object) -> None:
    return None


class Given:
    """A list or dictionary among the arguments of the step: where it is among those of a call."""

    def __init__(self, path: Sequence[Any]) -> None:
        self.path = tuple(path)

    def made(self, given: Any) -> Any:
        """That of a call with the arguments `given`."""
        for key in self.path:
            given = given[key]
        return given


class FoundObject:
    """An object outside the step, in whose place there may be another one in each call.

    Attributes:
        find: gives that of a call; None: it is the same one in each.
    """

    def __init__(self, value: Any) -> None:
        self.value = value
        self.find: Callable[[], Any] | None = None

    def now(self) -> Any:
        """That of the call."""
        return self.value if self.find is None else self.find()


class HeldByFunction:
    """What a function holds: cells with their contents, default arguments, containers, and objects.

    Args:
        is_outside: whether an object was there before the step: each call needs this very one.
        given: the containers among the arguments of the trace, by id.
        find: says which objects may be others in each call; None of other values.
    """

    def __init__(
        self,
        is_outside: Callable[[Any], bool],
        given: Mapping[int, Given],
        find: Callable[[Any], FoundObject | None],
    ) -> None:
        self._is_outside, self._given, self._find = is_outside, given, find
        self.found: dict[int, FoundObject] = {}
        self.defaults: list[tuple[FunctionType, tuple[Any, ...], dict[str, Any]]] = []
        self.cells: dict[int, tuple[CellType, Any]] = {}
        self.of_trace: dict[int, Given] = {}
        self._seen: set[int] = set()
        self.copies: dict[int, tuple[Any, Any]] = {}

    def add(self, value: Any) -> None:
        """The function is this one, or is given it."""
        if id(value) in self._seen or id(value) in self.found:
            return
        found = self._find(value)
        if found is not None:
            self.found[id(value)] = found
            return
        if self._is_outside(value):
            return
        self._seen.add(id(value))
        if id(value) in self._given:
            self.of_trace[id(value)] = self._given[id(value)]
            self.copies[id(value)] = (value, None)
        elif type(value) in _NESTS:
            self.copies[id(value)] = (value, self._copied(value))
            for each in value.values() if isinstance(value, dict) else value:
                self.add(each)
                if isinstance(value, set):
                    self._is_outside(each)
        else:
            self._add_parts(value)

    def _add_parts(self, value: Any) -> None:
        if isinstance(value, FunctionType):
            for cell in value.__closure__ or ():
                self._add_cell(cell)
            defaults, named = value.__defaults__ or (), value.__kwdefaults__ or {}
            if defaults or named:
                self.defaults.append((value, defaults, named))
            for each in (*defaults, *named.values()):
                self.add(each)
        elif isinstance(value, functools.partial):
            for part in (value.func, *value.args, *value.keywords.values()):
                self.add(part)
        elif isinstance(value, (BuiltinMethodType, MethodType)):
            self.add(value.__self__)
            if isinstance(value, MethodType):
                self.add(value.__func__)

    def _add_cell(self, cell: CellType) -> None:
        if self._is_outside(cell) or id(cell) in self.cells:
            return
        try:
            content = cell.cell_contents
        except ValueError:  # nothing has been assigned yet
            return
        self.cells[id(cell)] = (cell, content)
        self.add(content)

    def _copied(self, value: Any) -> Any:
        return value if type(value) is tuple else value.copy()

    def finish(self) -> None:
        """Everything has been added; the trace is let go."""
        self._is_outside, self._given, self._find = _nothing, {}, _none
        self._seen.clear()

    def __bool__(self) -> bool:
        return bool(self.cells or self.copies or self.found)

    def contents(self) -> list[Any]:
        """What is in the cells, and the containers."""
        return [*(each for _, each in self.cells.values()), *(v for v, _ in self.copies.values())]

    # ------------------------------------------------------------------ a call

    def prepared(self, fn: Any, arguments: Sequence[Any], given: Any) -> Prepared:
        """The function and its arguments for one call."""
        return Prepared(self, given, fn, arguments)


class Prepared:
    """One call of a function with what it holds made anew."""

    def __init__(self, held: HeldByFunction, given: Any, fn: Any, arguments: Sequence[Any]) -> None:
        self._copies, self._of_trace, self._given = held.copies, held.of_trace, given
        self._found = held.found
        self._made: dict[int, tuple[Any, Any]] = {}
        self._cells = [(cell, self.now(content)) for cell, content in held.cells.values()]
        for cell, content in self._cells:
            cell.cell_contents = content
        for function, defaults, named in held.defaults:
            function.__defaults__ = tuple(map(self.now, defaults))
            function.__kwdefaults__ = {name: self.now(each) for name, each in named.items()}
        self.fn = self.now(fn)
        self.arguments = [self.now(each) for each in arguments]

    def now(self, value: Any) -> Any:
        """What stands in this call for something that the function holds."""
        if id(value) in self._made:
            return self._made[id(value)][0]
        if id(value) in self._found:
            return self._found[id(value)].now()
        if id(value) in self._of_trace:
            return self._of_trace[id(value)].made(self._given)
        if isinstance(value, MethodType) and id(value.__self__) in self._found:
            return MethodType(value.__func__, self.now(value.__self__))
        if isinstance(value, BuiltinMethodType) and id(value.__self__) in self._copies:
            return getattr(self.now(value.__self__), value.__name__)
        if isinstance(value, functools.partial):
            named = {name: self.now(each) for name, each in value.keywords.items()}
            return functools.partial(self.now(value.func), *map(self.now, value.args), **named)
        if id(value) not in self._copies:
            return value
        return self._anew(value, self._copies[id(value)][1])

    def _anew(self, value: Any, content: Any) -> Any:
        if type(content) is tuple:
            return tuple(map(self.now, content))
        made = content.copy()
        self._made[id(value)] = (made, None)
        if isinstance(made, dict):
            for key, each in made.items():
                made[key] = self.now(each)
        elif not isinstance(made, set):
            for index, each in enumerate(made):
                made[index] = self.now(each)
        self._made[id(value)] = (made, made.copy())
        return made

    def refuse_changed(self) -> None:
        """Refuse a function that has changed what the step has made.

        Raises:
            GraphOptError: it has; the step would not see it.
        """
        if any(cell.cell_contents is not content for cell, content in self._cells):
            raise _changes("a variable")

    @property
    def containers(self) -> list[tuple[Any, Any]]:
        """What was made, each with a copy."""
        return list(self._made.values())


def containers_in(value: Any) -> Iterator[tuple[Any, Any]]:
    """The containers of a nest, each with a copy of it."""
    if type(value) not in _NESTS:
        return
    if type(value) is not tuple:
        yield value, value.copy()
    for each in value.values() if isinstance(value, dict) else value:
        yield from containers_in(each)


def refuse_changed_containers(made: Sequence[tuple[Any, Any]]) -> None:
    """Refuse a function that has changed containers which were made for it.

    Args:
        made: each with a copy from before the call.

    Raises:
        GraphOptError: it has; the step would not see it.
    """
    if not all(holds_same(container, before) for container, before in made):
        raise _changes("a list or dictionary")


def _changes(what: str) -> GraphOptError:
    return GraphOptError(
        f"a function that the step calls on the host (graphopt.callback) changes {what} that the"
        " step has made or was given, which the captured step would not see\n"
        "  hint:  keep it outside the step, or let the step itself compute it"
    )


def holds_same(one: Any, other: Any) -> bool:
    """Whether two containers of a kind hold the same objects."""
    if len(one) != len(other) or isinstance(one, set):
        return len(one) == len(other) and bool(one == other)
    if isinstance(one, dict):
        return all(a is b for a, b in zip(one, other, strict=True)) and all(
            one[key] is other[key] for key in one
        )
    return all(a is b for a, b in zip(one, other, strict=True))
