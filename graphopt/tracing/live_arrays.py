"""Arrays of numpy's outside a step into which it writes what only the graph knows, and lists and
dictionaries into which it writes at places that only the graph knows.

    confusion[t, p] += 1        each call does so, where the program does, as `graphopt.callback`
    totals += counts
    np.add.at(table, index, 1)
    sums[int(t * 10)] += loss   of a list or a dictionary

What the step reads of such an array behind that is computed when the graph has run, and is refused
where the array changes once more.
"""

from __future__ import annotations

import functools
import operator
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import FrameType
from typing import Any, NoReturn

import torch

from graphopt.errors import CaptureError
from graphopt.host import HostCall
from graphopt.ir.source import SourceLine
from graphopt.tracing.array_parts import changing_first, copied_item, without_ranges
from graphopt.tracing.arrays import LiveItems, Method, is_array
from graphopt.tracing.callback import record as record_call
from graphopt.tracing.computations import nest_of, numbers_in
from graphopt.tracing.host_numbers import is_host_number
from graphopt.tracing.later import Later, argument, as_later
from graphopt.tracing.later_values import holds_unknown
from graphopt.tracing.nests import leaves_in
from graphopt.tracing.numbers import refusal
from graphopt.tracing.outside.places import OutsidePlace
from graphopt.tracing.outside.record import Record
from graphopt.tracing.own_containers import OwnContainers
from graphopt.tracing.shared_memory import MemoryOutside
from graphopt.tracing.source import current_user_line

_IN_PLACE = {
    f"{sign}=": getattr(operator, f"i{name}")
    for sign, name in (
        *(("+", "add"), ("-", "sub"), ("*", "mul"), ("/", "truediv"), ("//", "floordiv")),
        *(("%", "mod"), ("**", "pow"), ("&", "and"), ("|", "or"), ("^", "xor")),
    )
}


class LiveArrays:
    """The arrays of one trace.

    Args:
        carry: takes note of a place in which each call is to find its array, before its graph runs,
            and says whether this is new.
    """

    def __init__(self, record: Record, carry: Callable[[str, OutsidePlace], bool]) -> None:
        self._record, self._carry = record, carry
        self._written: dict[int, Any] = {}
        self._memories: dict[int, MemoryOutside] = {}
        self._put = OwnContainers()
        self._lines: dict[int, SourceLine] = {}

    def is_array(self, value: Any) -> bool:
        """Whether a value is an array outside the step."""
        numpy = sys.modules.get("numpy")
        return numpy is not None and type(value) is numpy.ndarray and self._record.is_outside(value)

    def is_written(self, value: Any) -> bool:
        """Whether each call writes to an array by itself."""
        return id(value) in self._written

    def written(self) -> list[Any]:
        """The arrays that each call writes to."""
        return list(self._written.values())

    def read(self, array: Any) -> Later:
        """What stands for an array that each call writes to."""
        found = Later(LiveItems(array), ())
        found.memories.add(self._memories.setdefault(id(array), MemoryOutside()))
        return found

    def _is_used_otherwise(self, table: Any) -> bool:
        used = {id(read.place.holder) for read in self._record.reads.values()}
        containers = [table, *(row for row in _rows(table) if type(row) in _ROWS)]
        return any(id(each) in used or self._record.is_changed(each) for each in containers)

    def refuse_written(self, container: Any) -> None:
        """Refuse a step that decides by what is in a container to which each call writes."""
        if self.is_written(container):
            path = self._record.path(container, type(container).__name__)
            raise refusal(
                f"it decides by {path} behind a line that changes it by what the graph gives",
                "decide before it, or in the next call",
            )

    def item(self, array: Any, key: Any) -> Any:
        """What stands for an item which the step only changes: `array[key] += …`."""
        return Later(operator.getitem, (Later(LiveItems(array), ()), key), is_changed=True)

    def is_table(self, value: Any, key: Any) -> bool:
        """Whether a value is a list or a dictionary outside the step of which only the graph knows
        which item a key selects; or one to which each call writes by itself."""
        if type(value) not in _TABLES or not self._record.is_outside(value):
            return False
        if self.is_written(value):
            return True
        if isinstance(value, dict) and any(isinstance(e, torch.Tensor) for e in leaves_in(key)):
            return False  # a tensor is a key by its identity
        return type(key) is not slice and _is_found_by_graph(key)

    def item_of_table(self, table: Any, key: Any, fed: bool) -> Any:
        """What stands for an item of such a table."""
        return self.item(table, argument(key)) if fed else self.read(table)[argument(key)]

    def row_method(self, row: Any, name: str) -> Callable[..., None] | None:
        """What is called as a method that changes a row of such a table; None of other values."""
        found = _row(row)
        if found is None:
            return None
        table, key = found

        def method(*args: Any) -> None:
            line = current_user_line() or SourceLine("", 0, "")
            self.write(functools.partial(_call_in_row, name), table, (key, *args), line)

        method.of_later = True  # type: ignore[attr-defined]
        return method

    def row_item(self, row: Any, key: Any) -> Later | None:
        """What stands for an item of such a row which the step only changes; None of other
        values."""
        if _row(row) is None:
            return None
        return Later(operator.getitem, (row, argument(key)), is_changed=True)

    def row_setter(self, row: Any, line: SourceLine) -> Any:
        """What stands for such a row where an instruction writes an item; None: itself."""
        found = _row(row)
        return None if found is None else _Sets(self, found[0], line, found[1])

    def setter(self, array: Any, key: Any, value: Any, line: SourceLine) -> Any:
        """What stands for an array, or a table, where an instruction writes an item; None:
        itself."""
        if self.is_table(array, key):
            return _Sets(self, array, line)
        if not self.is_array(array):
            return None
        if not (holds_unknown((key, value)) or self.is_written(array)):
            return None
        return _Sets(self, array, line)

    def made(
        self, array: Any, like: object, values: Sequence[Any], frame: FrameType, stacked: int = 1
    ) -> Any:
        """What stands from now on, in the variable that alone has it, for an array that the step
        has made, where it is changed by what only the graph knows; None: itself.

        Args:
            like: held as the array is, but for a variable of the function that changes it, and its
                stack.
            values: that it is changed by.
            frame: of that function.
            stacked: how often the array is on the stack.
        """
        if not is_array(array) or self._record.is_outside(array):
            return None
        leaves = [leaf for value in values for leaf in _with_bounds(value)]
        if not holds_unknown(leaves):
            return None
        variables = frame.f_locals
        names = [name for name, other in variables.items() if other is array]
        in_variables = 1 + int(sys.version_info < (3, 13))  # which has no snapshot of them
        held = sys.getrefcount(array) - sys.getrefcount(like)
        if len(names) != 1 or held > stacked + in_variables or _is_part(array):
            return _HeldElsewhere()
        variables[names[0]] = found = array_of(array)
        return found

    def changer(self, array: Any, sign: str, value: Any, line: SourceLine) -> Any:
        """What stands for an array that an operator changes in place; None: itself."""
        if not self.is_array(array) or sign not in _IN_PLACE:
            return None
        if not (holds_unknown(value) or self.is_written(array)):
            return None
        return _Changes(self, array, _IN_PLACE[sign], line)

    def called(
        self, callee: Any, args: Sequence[Any], line: SourceLine
    ) -> Callable[..., Any] | None:
        """What is called in place of `numpy.add.at`, `numpy.copyto` and the like."""
        changing, given = changing_first(callee, args)
        if not given:
            return None
        first, array = len(args) - len(given), given[0]
        if type(array) is Later:
            return lambda *found: _changed(found[first], changing, *found[first + 1 :])
        unknown = self.is_array(array) and holds_unknown(given[1:])
        if not (unknown or self.is_written(array)):
            return None
        return lambda *found: self.write(changing, found[first], found[first + 1 :], line)

    def write(self, function: Any, array: Any, args: Sequence[Any], line: SourceLine) -> None:
        """Each call calls a function that writes to an array."""
        record = self._record
        path = record.path(array, "an array")
        record.needed_lists |= {id(array)} & record.number_lists
        self._put.add(args)
        table = type(array) in _TABLES
        key = args[0] if function is operator.setitem else None
        used = self._is_used_otherwise(array) if table else record.has_written_item(array, key)
        if used and id(array) not in self._written:  # which each call would write behind that
            raise refusal(
                f"it reads or changes {path} and then changes it by what the graph gives",
                "do all of that in a function whose result nobody uses",
            )
        if id(array) in record.contents_read:
            places = [each for each in record.places_of(array) if each.may_carry]
            if sum(self._carry(path, each) for each in places):
                return  # it is traced again
            raise refusal(
                f"it reads {path} and then changes it by what the graph gives",
                "read it behind that, or do it in graphopt.callback(function, …)",
            )
        record.pin(array)
        self._written[id(array)] = array
        self._lines.setdefault(id(array), line)
        # A list whose numbers are inputs of the graph is none that each call makes anew.
        record_call(HostCall(functools.partial(function, array), self._nests(args)))
        if id(array) in self._memories:
            self._memories.pop(id(array)).is_written = True

    def finish(self) -> None:
        """Refuse a step that has changed a list or a dictionary otherwise as well, or read it in a
        way that is not done again in each call."""
        tables = [each for each in self._written.values() if type(each) in _TABLES]
        if not self._put.are_alone():
            raise refusal(
                "it puts a list or dictionary that it makes into one outside its arguments, at a"
                " place that only the graph knows, and changes or keeps it elsewhere as well",
                "put a copy there: table[key] = list(values)",
            )
        for table in filter(self._is_used_otherwise, tables):
            raise CaptureError(
                f"it changes {self._record.path(table, 'a list')} by what the graph gives, and"
                " changes or reads it in another way as well",
                location=str(self._lines[id(table)]),
                hint="do all of that in a function whose result nobody uses",
            )

    def _nests(self, args: Sequence[Any]) -> list[Any]:
        return [nest_of(argument(each)) for each in args]


_TABLES = frozenset({list, dict, OrderedDict, defaultdict, Counter})


_ROWS = frozenset({*_TABLES, set, deque})


def _rows(table: Any) -> Iterable[Any]:
    return table.values() if isinstance(table, dict) else table


def _row(value: Any) -> tuple[Any, Any] | None:
    """The table and the key of which a value is an item that is a list, dictionary or set; None of
    other values."""
    if type(value) is not Later or value.made_by[0] is not operator.getitem:
        return None
    of, key = value.made_by[1]
    items = of.made_by[0] if type(of) is Later else None
    table = items.container if isinstance(items, LiveItems) else None
    if type(table) not in _TABLES or not all(type(row) in _ROWS for row in _rows(table)):
        return None
    if not table and not (isinstance(table, defaultdict) and table.default_factory in _ROWS):
        return None
    return table, key


def _call_in_row(name: str, table: Any, key: Any, *args: Any) -> None:
    getattr(table[key], name)(*args)


def _set_in_row(table: Any, key: Any, inner: Any, value: Any) -> None:
    table[key][inner] = value


def _is_found_by_graph(key: Any) -> bool:
    """Whether only the graph knows what a key is."""
    found = [as_later(each) for each in leaves_in(key)]
    return holds_unknown([each for each in found if type(each) is not Later]) or any(
        type(each) is Later and not all(map(is_host_number, numbers_in(each))) for each in found
    )


def _changed(array: Later, function: Callable[..., Any], *args: Any) -> None:
    array.changes(function, *args)


def _with_bounds(value: Any) -> Iterator[Any]:
    """A key or a value, and what is in it."""
    for leaf in leaves_in(value):
        yield from (leaf.start, leaf.stop, leaf.step) if type(leaf) is slice else (leaf,)


def _is_part(array: Any) -> bool:
    return array.base is not None and sys.getrefcount(array.base) > 2


class FedItems:
    """Gives items of an array that an operator changes in place, and that go back there."""

    def __init__(self, array: Any) -> None:
        self._array = array

    def __getitem__(self, key: Any) -> Later:
        return Later(copied_item, (self._array, without_ranges(key)), is_changed=True)


def array_of(value: Any) -> Later:
    """What stands for an array that the step has made, which it changes from here on."""
    found = Later(Method("copy"), (argument(value),))
    found.dimensions = value.ndim
    return found


class _HeldElsewhere:
    """Is changed in place of an array that the step holds elsewhere as well."""

    def _refuse(self, *args: Any) -> NoReturn:
        raise refusal(
            "it changes an array by what only the graph knows, and holds the array, or a part of"
            " it, elsewhere as well",
            "change it in the function that makes it, before anything else has it",
        )

    __setitem__ = __iadd__ = __isub__ = __imul__ = __itruediv__ = __ifloordiv__ = _refuse
    __imod__ = __ipow__ = __iand__ = __ior__ = __ixor__ = __imatmul__ = _refuse


class _Sets:
    """Takes items in place of an array, a table, or a row of one.

    Args:
        row: the key of that row, where it is one.
    """

    def __init__(self, arrays: LiveArrays, array: Any, line: SourceLine, *row: Any) -> None:
        self._arrays, self._array, self._line, self._row = arrays, array, line, row

    def __setitem__(self, key: Any, value: Any) -> None:
        setter = _set_in_row if self._row else operator.setitem
        self._arrays.write(setter, self._array, (*self._row, key, value), self._line)


class _Changes:
    """Is changed in place of an array."""

    def __init__(
        self, arrays: LiveArrays, array: Any, function: Callable[..., Any], line: SourceLine
    ) -> None:
        self._arrays, self._array, self._line = arrays, array, line
        self._function = function

    def _change(self, value: Any) -> Any:
        self._arrays.write(self._function, self._array, (value,), self._line)
        return self._array

    __iadd__ = __isub__ = __imul__ = __itruediv__ = __ifloordiv__ = _change
    __imod__ = __ipow__ = __iand__ = __ior__ = __ixor__ = _change
