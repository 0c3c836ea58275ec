"""Items of a list or a queue outside a step that numbers of the call select, such as the batch that
is drawn from a replay memory.

    batch = random.sample(memory, 32)       drawn and found before each call's graph runs
    states = torch.cat([each.state for each in batch])     inputs of the graph

The list may hold other items in each call. What the step has appended itself is among what may be
drawn: where an item may be one of these, the graph has both, and chooses.
"""

from __future__ import annotations

import copy
import itertools
import operator
import random
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from graphopt import _compat
from graphopt.ir.source import SourceLine
from graphopt.tracing.draws.arguments import Known, is_known
from graphopt.tracing.draws.choices import Choice
from graphopt.tracing.draws.generators import Drawing, drawing_of
from graphopt.tracing.draws.item_kinds import is_item, is_nest, kind_of, rebuilt
from graphopt.tracing.draws.live import is_array
from graphopt.tracing.draws.memory import OfTensors
from graphopt.tracing.draws.populations import Asks, Population
from graphopt.tracing.draws.recorder import HostCalls
from graphopt.tracing.host_numbers import is_host_number
from graphopt.tracing.number_expressions import Application
from graphopt.tracing.outside.record import Record
from graphopt.tracing.source import current_user_line
from graphopt.tracing.told import MadeAnew, told

_DRAWING = frozenset({"sample", "choice", "choices"})
_LOOKED_AT = 1000
"""Items of a long list that are looked at before one is drawn."""


class Picks:
    """The lists of one trace of which items are found in each call.

    Args:
        calls: makes what is computed before the graph runs.
        record: of what the step does outside its arguments.
        tensors: of the model, and others outside that the step works on.
    """

    def __init__(
        self, calls: HostCalls, record: Record, tensors: Sequence[torch.Tensor] = ()
    ) -> None:
        self._calls, self._record, self._tensors_of_model = calls, record, tensors
        self._storages: Known | None = None
        self._populations: list[Population] = []
        self._made: list[tuple[Any, Any]] = []
        self._tensors: list[torch.Tensor] = []
        self._stored: list[StoredItem] = []
        self._line: SourceLine | None = None
        self._replaced: dict[tuple[int, int], Any] = {}

    def draws(self, callee: Any, args: Sequence[Any]) -> Sequence[Any] | None:
        """What else a call is given that draws items of such a list; None: it draws none."""
        drawing = drawing_of(callee, args)
        if drawing is None or self.drawer(drawing, args) is None:
            return None
        return args[1:] if drawing.bound else args[2:]

    def takes(self, container: Any) -> bool:
        """Whether the items of a list are found in each call."""
        if type(container) not in (list, deque) or not self._calls.is_outside(container):
            return False
        rest, bound = self._record.rest(container), getattr(container, "maxlen", None)
        if rest is None or _are_numbers(container):
            return False
        before, taken, added = rest
        if bound is not None and taken != max(0, len(before) + len(added) - bound):
            return False
        return bool(before) and all(map(is_item, itertools.islice(before, _LOOKED_AT)))

    def drawer(self, drawing: Drawing, args: Sequence[Any]) -> Callable[..., Any] | None:
        """What is called in place of a function that draws items; None: another."""
        given = args if drawing.bound else args[1:]
        of_python = type(drawing.generator) is random.Random and drawing.name in _DRAWING
        if not (of_python and given and self.takes(given[0])):
            return None

        def draw(*args: Any, **options: Any) -> Any:
            args = args if drawing.bound else args[1:]
            return self._draw(drawing, *args, *options.values(), names=tuple(options))

        return draw

    def _draw(self, drawing: Drawing, container: Any, *others: Any, names: Sequence[str]) -> Any:
        calls, population = self._calls, self._population(container)
        names = [name for name in names if name not in ("population", "seq")]
        given = (calls.found(Asks(population, "positions"), ()), *others)
        drawn = calls.drawn(drawing, given, names)
        if drawing.name == "choice":
            return self._at(population, drawn)
        count = len(drawn.plain)
        calls.by_value(Application(len, (drawn.expression,)), count)
        each = [calls.found(operator.getitem, (drawn, index)) for index in range(count)]
        return [self._at(population, position) for position in each]

    def item(self, container: Any, key: Any) -> Any:
        """The item of a list at a position that is known before the graph runs."""
        return self._at(self._population(container), _known(key))

    def setter(self, container: Any, key: Any) -> StoringItems | None:
        """What stands for a list where an instruction puts an item at a position that is another in
        each call; None: itself."""
        if type(container) is not list or not is_position(key) or not self.takes(container):
            return None
        rest = self._record.rest(container)
        return StoringItems(self, container) if rest is not None and rest[1] == 0 else None

    def store(self, container: list[Any], key: Any, value: Any) -> None:
        """The step puts an item there."""
        population, position = self._population(container), _known(key)
        _, _, added = self._record.rest(container) or ([], 0, [])
        new = -1
        if added:  # it is one of those that it has appended, or not, in each call
            which = self._calls.found(Asks(population, "new"), (position,))
            new = self._calls.by_value(which.expression, which.plain)
        if new >= 0:
            self._replaced[id(container), new] = value
        self._stored.append(StoredItem(container, key, position, value, len(added)))

    def take_stored(self, made: MadeAnew) -> list[StoredItem]:
        """What the step has put at positions, to be put there by each call. The step is over.

        Args:
            made: what each call makes anew, by id; see `told`.

        Raises:
            CaptureError: it reads such a list in another way as well, or puts there what it makes.
        """
        taken, self._stored = self._stored, []
        self._replaced.clear()
        for each in taken:
            path, rest = (
                self._record.path(each.container, "a list"),
                self._record.rest(each.container),
            )
            moved = rest is None or rest[1] > 0 or len(rest[2]) != each.added
            if moved or self._record.is_read_otherwise(each.container):
                raise self._calls.refused(
                    f"it puts an item into {path} by a number that is another one in each call, and"
                    " reads or changes the list in another way as well",
                    "select items by such numbers alone, or change the list outside the step",
                    each.line,
                )
            recipe = told(self._record, each.value, made)
            if recipe is None:
                raise self._calls.refused(
                    f"it puts a {type(each.value).__name__} that it makes into {path}",
                    "put a tensor, a number, or a tuple of these there",
                    each.line,
                )
            each.written = {None: recipe}
        return taken

    def _population(self, container: Any) -> Population:
        rest = self._record.rest(container)
        assert rest is not None
        before, taken, added = rest
        self._record.pin(container)
        taken = 0 if getattr(container, "maxlen", None) is not None else taken
        same = before is container
        found = Population(container, taken, len(added), None if same else before)
        self._populations.append(found)
        return found

    def _at(self, population: Population, position: Known) -> Any:
        calls, (_, _, added) = self._calls, self._record.rest(population.container) or ((), 0, [])
        self._line = self._line or current_user_line()
        found = calls.found(Asks(population, "item"), (position,))
        if not is_item(found.plain):
            raise calls.refused(
                f"it takes a {type(found.plain).__name__} out of a list by a number that is another"
                " one in each call",
                "keep tensors, numbers, arrays, and tuples of these in the list; or take it out"
                " outside the step, and pass it",
            )
        calls.by_value(Application(kind_of, (found.expression,)), kind_of(found.plain))
        item = self._part(found)
        if added:
            which = calls.found(Asks(population, "new"), (position,))
        for index, new in enumerate(added):
            new = self._replaced.get((id(population.container), index), new)
            item = Choice(calls, calls.found(operator.eq, (which, index))).of(new, item)
        for stored in self._stored:
            if stored.container is population.container:
                same = calls.found(Asks(population, "same"), (position, stored.position))
                item = Choice(calls, same).of(stored.value, item)
        return item

    def _part(self, found: Known) -> Any:
        """What stands for an item, or a part of one."""
        calls, value = self._calls, found.plain
        if is_nest(value):
            made = rebuilt(
                value, lambda key, _: self._part(calls.found(operator.getitem, (found, key)))
            )
            if not isinstance(value, tuple):
                self._made.append((made, copy.copy(made)))
            return made
        if isinstance(value, torch.Tensor):
            if self._storages is None:
                self._storages = calls.found(_StoragesOf(self._tensors_of_model), ())
            with _compat.without_modes():
                shared = _compat.storage_key(value) in self._storages.plain
            if shared:
                raise calls.refused(
                    "it takes a tensor out of a list, by a number that is another one in each call,"
                    " that lies in the memory of a tensor of the model",
                    "put a copy into the list: tensor.clone()",
                )
            self._tensors.append(calls.tensor(_copied, (found, self._storages)))
            return self._tensors[-1]
        if is_array(value):
            calls.memory.add_outside(value)
        return calls.given(found)

    def finish(self, arguments: Iterable[torch.Tensor]) -> None:
        """The step is over.

        Args:
            arguments: what stands for the tensors among its arguments, which may be items, too.

        Raises:
            CaptureError: it has changed what stands for an item.
        """
        for each in self._populations:
            each.before = None
        made, self._made = self._made, []
        tensors, self._tensors = self._tensors, []
        written = any(map(_compat.may_be_written, [*tensors, *(arguments if tensors else ())]))
        line, self._line = self._line, None
        if written or any(not same_items(one, other) for one, other in made):
            raise self._calls.refused(
                "it changes in place what it takes out of a list by a number that is another one in"
                " each call, or a tensor that may be there",
                "change a copy, as tensor.clone(); or do it outside the step",
                line,
            )


class PickingItems:
    """Stands for a list where an instruction takes an item out of it, and for `operator.getitem`
    where that is called."""

    def __init__(self, picks: Picks, container: Any) -> None:
        self._picks, self._container = picks, container

    def __getitem__(self, key: Any) -> Any:
        return self._picks.item(self._container, key)

    def __call__(self, container: Any, key: Any) -> Any:
        return self[key]


class StoringItems:
    """Stands for a list where an instruction puts an item into it."""

    def __init__(self, picks: Picks, container: list[Any]) -> None:
        self._picks, self._container = picks, container

    def __setitem__(self, key: Any, value: Any) -> None:
        self._picks.store(self._container, key, value)


class StoredItem:
    """What a step has put into a list at a position that is another one in each call.

    Attributes:
        key: the position, as a number of the graph.
        position: the same before the graph runs.
        added: how many items the step has appended by then.
        line: that puts it there.
        written: how each call makes the value, as of `Row`.
    """

    def __init__(
        self, container: list[Any], key: Any, position: Known, value: Any, added: int
    ) -> None:
        self.container, self.key, self.position, self.value = container, key, position, value
        self.added, self.line = added, current_user_line()
        self.written: dict[Any, Any] = {}


def is_position(key: Any) -> bool:
    """Whether a key is an integer that is known before the graph runs."""
    if is_host_number(key):
        return type(key.value) is int
    return is_known(key) and key.is_scalar and key.plain.dtype.kind in "iu"


def _known(key: Any) -> Known:
    return key if is_known(key) else Known(key.expression, key.value)


def _are_numbers(container: Any) -> bool:
    return all(type(each) in (int, float) for each in container)


class _StoragesOf(OfTensors):
    """Gives the storages of tensors."""

    __name__ = "the storages of the model"

    def __call__(self) -> frozenset[int]:
        return frozenset(map(_compat.storage_key, self.tensors))


def _copied(tensor: torch.Tensor, storages: frozenset[int]) -> torch.Tensor:
    """A tensor of a list, which may hold it twice.

    Raises:
        ValueError: the step may write to it.
    """
    if _compat.storage_key(tensor) in storages:
        raise ValueError("a tensor in a list lies in the memory of a tensor of the model")
    return tensor.clone()


def same_items(one: Any, other: Any) -> bool:
    """Whether two lists or dictionaries hold the same objects."""
    if type(one) is dict:
        return list(one) == list(other) and all(map(operator.is_, one.values(), other.values()))
    return len(one) == len(other) and all(map(operator.is_, one, other))
