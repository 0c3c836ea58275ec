"""Snapshots of very many objects, compared at once before each call of a step.

    what there was                      how it is compared with what is there
    ─────────────────────────────────   ────────────────────────────────────────────────────────────
    all that is in dictionaries, empty  by words of the objects' memory, all in one call
    containers, closure variables, …    (`known_words.py`): versions, sizes, references
    whole lists, dictionaries that vary as one flat list (`conditions.py`)
    items, attributes, classes          one by one, without a Python function for any of them
    shapes, dtypes, … of tensors        by the C++ code that torch.compile has for that

Objects are compared by identity: no `__eq__` of the program's is called, `1` is not `True`, and
`0.0` is not `-0.0`. That an equal value stands in a place is for a guard to find out, which looks
at its own things one by one where something here differs.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Sized
from contextlib import suppress
from itertools import chain
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import nn

from graphopt import _compat
from graphopt._compat.identity import identities
from graphopt._compat.memory_words import (
    content_word,
    function_word,
    hook_words,
    size_word,
    version_word,
)
from graphopt.guards.snapshots.conditions import CHECKS, READS, Check, Referred, all_found
from graphopt.guards.snapshots.known_words import KnownWords
from graphopt.guards.values import is_plain, kinds_of

Container = dict[Any, Any] | list[Any]

Body = tuple[type, dict[str, Any]] | None


class StateSnapshot:
    """A snapshot of values at many places, for comparison with the present ones.

    Keeps alive the containers, and what `has` is told of, until it is told to `forget`. All
    conditions are added before `holds` is asked for the first time.
    """

    def __init__(self) -> None:
        self._joined: StateSnapshot | None = None
        self._rows: dict[str, list[_Row]] = {kind: [] for kind in (*READS, *CHECKS)}
        self._words: KnownWords | None = None
        self._all: list[Check] = []
        self._rest: list[Check] = []

    @classmethod
    def joined(cls, parts: Iterable[StateSnapshot]) -> StateSnapshot:
        """Joins several snapshots into one, which is forgotten as soon as one of them is."""
        new = cls()
        for part in parts:
            part._joined = new
            for kind, rows in part._rows.items():
                new._rows[kind] += rows
        return new

    def forget(self) -> None:
        """Drops all references; from then on `holds` is False."""
        self._words, self._all, self._rest = None, [], []
        for rows in self._rows.values():
            rows.clear()
        self.also(lambda: False)
        if self._joined is not None:
            self._joined.forget()

    def holds(self) -> bool:
        """True if all conditions hold."""
        try:
            words = self._words or self._compile()  # which are kept while they are read
            now = words.now()
            if words.are(now):
                return all(check() for check in self._rest)
            if not all(check() for check in self._all):
                return False
            if words.note(now):
                self._rest = self._checks(words)
        except (
            KeyError,
            IndexError,
            AttributeError,
            ValueError,
        ):  # something is no longer where it was
            return False
        return True

    def _compile(self) -> KnownWords:
        rows = [row for rows in self._rows.values() for row in rows]
        words = KnownWords((address for _, of, _ in rows for address in of), rows)
        self._all, self._rest = self._checks(), self._checks(words)
        self._words = words
        return words

    def _checks(self, words: KnownWords | None = None) -> list[Check]:
        """Returns the checks of all conditions, or of those that `words` do not tell of."""
        reads, found = [], []
        for kind, rows in self._rows.items():
            left = [facts for facts, of, _ in rows if words is None or not (of and words.tell(of))]
            columns = map(list, zip(*left, strict=True))
            if left and kind in READS:
                reads.append(READS[kind](*columns))
            elif left:
                found.append(CHECKS[kind](*columns))
        return [all_found(reads), *found]

    def _add(
        self, kind: str, *facts: Any, words: Iterable[int | None] = (), kept: Any = None
    ) -> None:
        """Adds a condition.

        Args:
            facts: what it is about.
            words: the addresses of words that are the same as long as it holds.
            kept: an object that these words are in, or that they refer to, to keep alive.
        """
        found = tuple(word for word in words if word is not None)
        self._rows[kind].append((facts, found, kept))

    def has(self, container: Any, key: Any, value: object) -> None:
        """Adds a condition: `value`, or what it refers to, is at `key`."""
        words = [version_word(container)]
        self._add("item", container, key, value, words=words)
        self._lives(value, words)

    def has_object(self, container: Container, key: Any, value: object) -> None:
        """Adds a condition: `value` is at `key`. It is kept alive only if it is plain or not weakly
        referable."""
        if not is_plain(value):
            with suppress(TypeError):
                value = Referred(weakref.ref(value))
        self.has(container, key, value)

    def _lives(self, value: object, words: Iterable[int | None] = ()) -> None:
        """Adds a condition: what `value` refers to is still there."""
        if isinstance(value, Referred):
            self._add("alive", value.get, words=words)

    def has_key(self, container: Any, key: Any, there: bool) -> None:
        """Adds a condition: `key` is present, or absent."""
        self._add("key", container, key, there, words=[version_word(container)])

    def has_class(self, holder: Callable[[], Any], kind: type) -> None:
        """Adds a condition: the object that `holder` returns has exactly this class."""
        self._add("class", holder, kind)

    def has_attribute_of(self, owner: object, name: str, value: object) -> None:
        """Adds a condition: an object without weak references, such as a closure variable, has
        `value`, or what it refers to, as an attribute."""
        self._add("attribute of", owner, name, value, words=[content_word(owner)])
        self._lives(value)

    def has_attribute(self, holder: Callable[[], Any], name: str, value: object) -> None:
        """Adds a condition: the object that `holder` returns has `value`, or what it refers to, as
        an attribute."""
        now = value.get() if isinstance(value, Referred) else value
        words, kept = _words_of_function(holder(), name, now)
        self._add("attribute", holder, name, value, words=words, kept=kept)
        self._lives(value, words)

    def also(self, check: Callable[[], bool]) -> None:
        """Adds a custom condition."""
        self._add("check", check)

    def has_objects(self, table: dict[Any, Any]) -> None:
        """Adds conditions: the table has these keys, and `has_object` of each."""
        self.has_keys(table)
        for key, value in table.items():
            self.has_object(table, key, value)

    def has_items(self, container: Container) -> None:
        """Adds a condition: the container has exactly its present items."""
        if isinstance(container, defaultdict):
            self.has_attribute_of(container, "default_factory", container.default_factory)
        if not container:
            self._has_none(container)
            return
        self.has_size(container)
        if isinstance(container, dict):
            contents = tuple(dict.keys(container)), tuple(dict.values(container))
            self._add("contents", container, *contents, words=[version_word(container)])
        else:
            self._add("items", container, tuple(list.__iter__(container)))

    def has_size(self, container: Sized) -> None:
        """Adds a condition: the container has its present length."""
        self.has_length(container, len(container))

    def has_length(self, container: Sized, length: int) -> None:
        """Adds a condition: the container has this length."""
        word = version_word(container) or size_word(container)
        self._add("length", container, length, words=[word])

    def has_keys(self, table: dict[Any, Any]) -> None:
        """Adds a condition: the table has its present keys, with any values, which are not kept
        alive."""
        if not table:
            self._has_none(table)
            return
        self._add("keys", table, tuple(table), words=[version_word(table)])

    def has_modules(self, table: dict[str, Any]) -> None:
        """Adds a condition: the table has exactly its present modules, which are not kept alive."""
        self.has_keys(table)
        bodies = _bodies(table)
        if _are_collected(table, bodies):
            self._add("modules", table, bodies)
        else:
            self.also(lambda: identities(_bodies(table)) == identities(bodies))

    def has_kind(self, tensor: torch.Tensor) -> None:
        """Adds a condition: the tensor has its present kind and gradient hooks."""
        self._add("kind", tensor, *(column[0] for column in kinds_of([tensor])))
        self._add("hooks", tensor, _compat.hooks_of(tensor), words=hook_words(tensor))

    def _has_none(self, container: Container) -> None:
        """Adds a condition: there is nothing in the container."""
        self._add("empty", container, words=[size_word(container)])


_Row = tuple[tuple[Any, ...], tuple[int, ...], Any]
"""The facts of a condition, the addresses of the words that tell that it holds, and an object to
keep alive."""


def _words_of_function(
    function: Any, name: str, value: object
) -> tuple[list[int | None], tuple[Any, ...] | None]:
    """Returns the words that tell of a function's attribute, and what to keep alive for them.

    None of a function that may refer to a model.
    """
    word = function_word(function, name)
    if word is None or not _is_code(function):
        return [], None
    return [word], (function, value)


_NESTED_FUNCTIONS = 8
"""How many functions around one another are looked into, such as those of decorators."""


def _is_code(value: object, left: int = _NESTED_FUNCTIONS) -> bool:
    """True if a value keeps nothing alive but functions and classes of modules, and plain
    values."""
    if not isinstance(value, FunctionType):
        of_module = isinstance(value, type) and "<locals>" not in value.__qualname__
        return of_module or is_plain(value) or isinstance(value, CodeType)
    module = sys.modules.get(value.__globals__.get("__name__", ""))
    if module is None or vars(module) is not value.__globals__ or not left:
        return False
    parts = [value.__defaults__, *(value.__kwdefaults__ or {}).values(), *vars(value).values()]
    cells = value.__closure__ or ()
    contents = gc.get_referents(*cells)
    if len(contents) < len(cells):  # an empty one may come to hold anything
        return False
    return all(_is_code(part, left - 1) for part in (*parts, *contents))


def _bodies(table: dict[str, Any]) -> list[Any]:
    """Returns the `__dict__` and the class of each module (or None) in a dictionary, which identify
    it without keeping it alive."""
    bodies = ((getattr(each, "__dict__", None), type(each)) for each in table.values())
    return list(chain.from_iterable(bodies))


def _are_collected(table: dict[str, Any], bodies: list[Any]) -> bool:
    """True if `gc.get_referents` finds this of the modules, and nothing else."""
    found = gc.get_referents(*table.values())
    return identities(found) == identities(bodies) and all(body is not None for body in bodies)


def body_of(module: nn.Module | None) -> Body:
    """Returns a module's class and `__dict__`, which identify it without keeping it alive."""
    return None if module is None else (type(module), vars(module))


def is_body(module: nn.Module | None, body: Body) -> bool:
    """True if a module has this class and this `__dict__` object."""
    if module is None or body is None:
        return module is None and body is None
    return type(module) is body[0] and vars(module) is body[1]
