"""`buffer[step % 10]`: one of several lists, which a number of the call selects.

    row = self.buffer[int(state["step"] % 10)]
    if state["step"] == row[0]: …            what is there when the call begins, before the graph
    else: row[0] = state["step"]             put there after the call

Which list it is, is found out in every call. Two selections in one step are known to be of one
list, or of two, by a condition.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

from graphopt.tracing.draws.arguments import Known
from graphopt.tracing.draws.items import LiveItems
from graphopt.tracing.draws.recorder import HostCalls
from graphopt.tracing.host_numbers import is_host_number
from graphopt.tracing.number_expressions import Application

_FEW = 100


def are_rows(container: Any, key: Any) -> bool:
    """Whether a container is a list of lists of numbers, and a number of the call selects one."""
    if type(container) is not list or not is_host_number(key) or type(key.value) is not int:
        return False
    return 0 < len(container) <= _FEW and all(map(_is_row, container))


def _is_row(value: Any) -> bool:
    if type(value) is not list or len(value) > _FEW:
        return False
    return all(item is None or type(item) in (int, float) for item in value)


class Row:
    """Stands for the list selected.

    Args:
        calls: makes what is computed before the graph runs.
        container: the list of lists.
        key: which of them.

    Attributes:
        written: what the step has put there, by position.
    """

    def __init__(self, calls: HostCalls, container: list[Any], key: Any) -> None:
        self._calls, self.container, self.key = calls, container, key
        self._items: dict[int, Any] = {}
        self.written: dict[int, Any] = {}

    def __len__(self) -> int:
        size = len(self.container[self.key.value])
        size_in_call = Application(len, (self._given(),))
        return int(self._calls.by_value(size_in_call, size))

    def __getitem__(self, position: int) -> Any:
        position = self._position(position)
        if position in self.written:
            return self.written[position]
        if position not in self._items:
            self._items[position] = self._calls.item(self._known(), position)
        return self._items[position]

    def __setitem__(self, position: int, value: Any) -> None:
        self.written[self._position(position)] = value

    def __iter__(self) -> Iterator[Any]:
        return (self[position] for position in range(len(self)))

    def _position(self, position: Any) -> int:
        return range(len(self))[operator.index(position)]

    def _given(self) -> Application:
        rows = Application(LiveItems(self.container), ())
        return Application(operator.getitem, (rows, self.key.expression))

    def _known(self) -> Known:
        return Known(self._given(), self.container[self.key.value])


class Rows:
    """Stands for a list of lists where an instruction takes one out of it.

    Args:
        calls: makes what is computed before the graph runs.
        container: the list of lists.
    """

    def __init__(self, calls: HostCalls, container: list[Any]) -> None:
        self._calls, self.container = calls, container
        self.selected: list[Row] = []

    def __getitem__(self, key: Any) -> Row:
        len(self.container[key.value])  # raises as the step does
        for row in self.selected:
            if row.key is key or bool(row.key == key):
                return row
        self.selected.append(Row(self._calls, self.container, key))
        return self.selected[-1]

    def __call__(self, container: Any, key: Any) -> Row:
        return self[key]


class AllRows:
    """The lists of lists from which one step has selected.

    Args:
        calls: makes what is computed before the graph runs.
    """

    def __init__(self, calls: HostCalls) -> None:
        self._calls = calls
        self._found: dict[int, Rows] = {}

    def of(self, container: list[Any]) -> Rows:
        """What stands for a list of lists."""
        return self._found.setdefault(id(container), Rows(self._calls, container))

    def take(self, is_used: Callable[[Any], bool], pin: Callable[[Any], None]) -> list[Row]:
        """What has been selected, which nothing here holds from then on. The step is over.

        Args:
            is_used: whether the step has read a list otherwise.
            pin: takes note that the step uses a list by its identity.

        Raises:
            CaptureError: a list that was written to was read otherwise.
        """
        found, self._found = self._found, {}
        taken = []
        for rows in found.values():
            written = any(row.written for row in rows.selected)
            if written and any(map(is_used, (rows.container, *rows.container))):
                raise self._calls.refused(
                    "it writes to one of several lists, which a number selects that is another one"
                    " in each call, and reads these lists in another way as well",
                    "select by that number alone, or keep them in a tensor",
                )
            pin(rows.container)
            taken += rows.selected
        return taken
