"""Comparison of whole dictionaries and lists with their former contents, all at once in C.

    gc.get_referents(a, b, c)     all objects in three containers, as one flat list
    identities(objects)           which objects these are, as bytes that are compared as such

No method of a class of the program's is called, and objects are compared by identity alone.
"""

from __future__ import annotations

import gc
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator
from itertools import chain
from operator import attrgetter
from typing import Any, NamedTuple

from graphopt._compat.identity import identities

Container = dict[Any, Any] | list[Any]

_PLAIN = frozenset({dict, OrderedDict, defaultdict, list})
_ATTRIBUTES = attrgetter("__dict__")


class NotedContainer(NamedTuple):
    """A container with its recorded contents.

    Attributes:
        size: how many items it had.
        names: the keys of a dictionary whose keys are all texts; empty for other containers.
        objects: the values of such a dictionary; keys and values in turn, or the items, of others.
    """

    container: Container
    size: int
    names: list[str]
    objects: list[Any]

    @classmethod
    def of(cls, container: Container) -> NotedContainer:
        """Records the present contents of a container."""
        if not isinstance(container, dict):
            items = list.copy(container)
            return cls(container, len(items), [], items)
        keys, values = list(dict.keys(container)), list(dict.values(container))
        if all(type(key) is str for key in keys):
            return cls(container, len(keys), keys, values)
        return cls(container, len(keys), [], list(chain.from_iterable(dict.items(container))))

    def holds(self) -> bool:
        """True if the contents are unchanged."""
        _, size, names, objects = NotedContainer.of(self.container)
        same = identities(objects) == identities(self.objects)
        return same and size == self.size and names == self.names

    def as_collected(self) -> NotedContainer | None:
        """Returns the record in the order of `gc.get_referents`. None if that finds other objects,
        as it may in an object's `__dict__`."""
        if type(self.container) not in _PLAIN:
            return None
        found = gc.get_referents(self.container)
        made_by = [self.container.default_factory] if type(self.container) is defaultdict else []
        now, known = identities(found), map(identities, self._orders(made_by))
        return self._replace(objects=found) if now in known else None

    def _orders(self, before: list[Any]) -> Iterator[list[Any]]:
        """Yields the objects in the orders in which `gc.get_referents` may find them."""
        yield [*before, *self.objects]
        if isinstance(self.container, list):
            yield self.objects[::-1]
        elif not self.names:
            pairs = zip(self.objects[1::2], self.objects[::2], strict=True)
            yield [*before, *chain.from_iterable(pairs)]


class WholeContainers:
    """Many containers with their recorded contents, which it keeps alive."""

    def __init__(self, noted: Iterable[NotedContainer]) -> None:
        collected: list[NotedContainer] = []
        tables: list[NotedContainer] = []
        self._others: list[NotedContainer] = []
        for each in noted:
            found = each.as_collected()
            if found is not None:
                collected.append(found)
            elif type(each.container) is dict and each.names:
                tables.append(each)
            else:
                self._others.append(each)
        flat = [*collected, *tables]
        self._collected = [each.container for each in collected]
        self._tables: list[Any] = [each.container for each in tables]
        self._sized = [each.container for each in flat]
        self._sizes = [each.size for each in flat]
        self._named = [each.container for each in flat if each.names]
        self._names = [name for each in flat for name in each.names]
        self._objects = [value for each in flat for value in each.objects]
        self._identities = identities(self._objects)

    def hold(self) -> bool:
        """True if the contents of all containers are unchanged."""
        objects = gc.get_referents(*self._collected)
        if self._tables:
            objects += chain.from_iterable(map(dict.values, self._tables))
        return (
            identities(objects) == self._identities
            and list(map(len, self._sized)) == self._sizes
            and list(chain.from_iterable(self._named)) == self._names
            and all(each.holds() for each in self._others)
        )


class NotedModules(NamedTuple):
    """A dictionary of modules (or None) with each module's class and `__dict__`."""

    table: dict[str, Any]
    names: list[str]
    classes: list[type]
    attributes: list[Any]

    @classmethod
    def of(cls, table: dict[str, Any]) -> NotedModules:
        """Records the present contents of a dictionary, without keeping its modules alive."""
        modules = list(table.values())
        attributes = [getattr(module, "__dict__", None) for module in modules]
        return cls(table, list(table), list(map(type, modules)), attributes)

    def holds(self) -> bool:
        """True if the dictionary has the same modules."""
        _, names, classes, attributes = NotedModules.of(self.table)
        same = identities(classes) == identities(self.classes) and names == self.names
        return same and identities(attributes) == identities(self.attributes)


class WholeModules:
    """Many dictionaries of modules with their recorded contents."""

    def __init__(self, noted: Iterable[NotedModules]) -> None:
        noted = list(noted)
        self._others = [each for each in noted if None in each.attributes]
        noted = [each for each in noted if None not in each.attributes]
        self._tables = [each.table for each in noted]
        self._sizes = [len(each.names) for each in noted]
        self._names = [name for each in noted for name in each.names]
        self._kept = [[*each.classes, *each.attributes] for each in noted]
        self._classes = identities(kind for each in noted for kind in each.classes)
        self._attributes = identities(value for each in noted for value in each.attributes)

    def hold(self) -> bool:
        """True if all dictionaries have the same modules."""
        modules = list(chain.from_iterable(map(dict.values, self._tables)))
        return (
            list(map(len, self._tables)) == self._sizes
            and list(chain.from_iterable(self._tables)) == self._names
            and identities(map(type, modules)) == self._classes
            and identities(map(_ATTRIBUTES, modules)) == self._attributes
            and all(each.holds() for each in self._others)
        )
