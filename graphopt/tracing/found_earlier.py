"""What functions on the host find outside, of what the call that is captured changes behind them.

    graphopt.callback(lambda: print(self.rows))      prints [9.0]
    if self.rows: self.rows.pop()                    which the first call alone does

What such a call alone changes is done before its graph runs (`leftovers`). A function that the step
has called by then finds in this call what it found there in the trace.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from graphopt.errors import GraphOptError
from graphopt.guards.values import same_constant
from graphopt.tracing import contents
from graphopt.tracing.contents import ObjectKind
from graphopt.tracing.later_values import holds_unknown
from graphopt.tracing.outside.places import MISSING

_UNKNOWN: Any = object()
_Parts = frozenset[int]
_WHOLE: _Parts = frozenset({0})


@dataclass(frozen=True)
class EarlierContent:
    """What an object outside held when a function was called, of what has changed behind the call.

    Attributes:
        content: of all of the object.
        parts: what of it has changed: ids of keys, or positions of names; 0 of others.
    """

    kind: ObjectKind
    holder: Any
    content: Any
    parts: _Parts

    @property
    def name(self) -> str:
        """How a message calls the object."""
        if not isinstance(self.holder, contents.Names):
            return f"a {type(self.holder).__name__}"
        return ", ".join(self.holder.names[position] for position in sorted(self.parts))

    @property
    def is_unknown(self) -> bool:
        """Whether only the graph knows some of it."""
        values = _by_part(self.kind, self.content)
        return any(_has_unknown(values[part]) for part in self.parts & values.keys())

    @contextmanager
    def present(self) -> Iterator[None]:
        """While active, the object holds it.

        Raises:
            GraphOptError: the program has changed it by the end.
        """
        kind, holder = self.kind, self.holder
        left = kind.read(holder)
        kind.write(holder, _mixed(kind, self.parts, self.content, left))
        try:
            yield
            if not kind.same(holder, _mixed(kind, self.parts, self.content, kind.read(holder))):
                raise GraphOptError(
                    f"a function that the step calls on the host changes {self.name}, which the"
                    " first call of the step changes behind it\n"
                    "  hint:  change it in the function, or in the step, but not in both"
                )
        finally:
            kind.write(holder, _mixed(kind, self.parts, left, kind.read(holder)))


def known_content(kind: ObjectKind, holder: Any) -> Any:
    """What an object holds, without what only the graph knows."""
    content = kind.read(holder)
    if kind is contents.TABLE:
        return content[0], list(map(_known, content[1]))
    return list(map(_known, content)) if type(content) is list else _known(content)


def _known(value: Any) -> Any:
    return _UNKNOWN if holds_unknown(value, of_host=True) else value


def _has_unknown(value: Any) -> bool:
    return value is _UNKNOWN or (type(value) is list and any(each is _UNKNOWN for each in value))


def differing(kind: ObjectKind, one: Any, other: Any) -> _Parts:
    """Which parts of two contents of an object differ, which do."""
    if kind not in (contents.TABLE, contents.NAMES):
        return _WHOLE
    ours, theirs = _by_part(kind, one), _by_part(kind, other)
    return frozenset(
        part
        for part in ours.keys() | theirs.keys()
        if not same_constant(ours.get(part, MISSING), theirs.get(part, MISSING))
    )


def only(kind: ObjectKind, content: Any, parts: _Parts) -> Any:
    """What an object holds, without the values of other parts."""
    if kind is contents.TABLE:
        keys, values = content
        pairs = zip(keys, values, strict=True)
        return keys, [value if id(key) in parts else None for key, value in pairs]
    if kind is contents.NAMES:
        return [value if place in parts else None for place, value in enumerate(content)]
    return content


def _by_part(kind: ObjectKind, content: Any) -> dict[int, Any]:
    if kind is contents.TABLE:
        return dict(zip(map(id, content[0]), content[1], strict=True))
    return dict(enumerate(content if kind is contents.NAMES else (content,)))


def _mixed(kind: ObjectKind, parts: _Parts, wanted: Any, now: Any) -> Any:
    """What an object holds now, with some parts of what it is wanted to hold."""
    if kind is contents.NAMES:
        pairs = zip(wanted, now, strict=True)
        return [each if place in parts else there for place, (each, there) in enumerate(pairs)]
    if kind is not contents.TABLE:
        return wanted
    there = dict(zip(map(id, now[0]), zip(*now, strict=True), strict=True))
    chosen = {
        id(key): (key, value) if id(key) in parts else there[id(key)]
        for key, value in zip(*wanted, strict=True)
        if id(key) in parts or id(key) in there
    }
    others = there.keys() - parts - chosen.keys()
    ordered = [*chosen.values(), *(pair for key, pair in there.items() if key in others)]
    return [key for key, _ in ordered], [value for _, value in ordered]
