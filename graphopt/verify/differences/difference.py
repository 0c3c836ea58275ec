"""A report of where two values begin to differ: the smallest slices of both graphs, side by
side."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import fx

from graphopt.ir.metadata import source_line
from graphopt.verify.differences.moved_elements import (
    MovedElements,
    first_difference,
    moved_elements,
)
from graphopt.verify.problems import Problem
from graphopt.verify.symbolic.evaluation_outcome import Evaluation
from graphopt.verify.values.axioms import RULES
from graphopt.verify.values.terms import ScalarValue, Segment, TensorValue, Terms

HINT = (
    "if the pass is right, a rule is missing: declare changes_numerics=True for the pass, or check"
    " dependencies alone with verify='dependencies'"
)
_MOVED_HINT = (
    "the elements are the same in another order, or some are taken twice: look at where slices"
    " begin and at the order in which they are joined"
)
_LAYOUT = ("shape", "dtype", "device", "stride")


class Difference:
    """One output whose value differs between two graphs.

    Args:
        terms: in which both graphs were evaluated.
        old, new: what they leave.
        place: kind and number of the output, as in `Evaluation.nodes`.
    """

    def __init__(
        self, terms: Terms, old: Evaluation, new: Evaluation, place: tuple[str, Any]
    ) -> None:
        self._terms, self._old, self._new, self._place = terms, old, new, place

    def problem(self, what: str, one: Any, other: Any) -> Problem:
        """Builds the report: the output, the first differing nodes on the way to it, and the
        nearest rule.

        Args:
            what: the output, in words.
            one, other: its values before and after.
        """
        message, first, second, hint = self._smallest(one, other)
        nodes = [self._new.origins.get(second), self._old.origins.get(first)]
        nodes.append(self._new.nodes.get(self._place))
        shown = tuple(dict.fromkeys(node for node in nodes if isinstance(node, fx.Node)))
        lines = [f"{what} is not what it was: {message}", *self._slices(first, second)]
        hint = hint or self._nearest_rule(first, second) + HINT
        return Problem("\n".join(lines), shown, hint=hint)

    def _smallest(self, one: Any, other: Any) -> tuple[str, int, int, str]:
        """Descends two values to their first difference. Returns (description, term before, term
        after, hint); the hint is empty where the usual one fits."""
        message, first, second = "another value", -1, -1
        while True:
            pair = first_pair(one, other)
            if pair is None:
                moved, gets = moved_elements(one, other), "it holds"
                message = _layouts(one, other) or message
                break
            first, second = pair
            keys = self._terms[first].key, self._terms[second].key
            message, gets = _message(*keys), f"{operator_of(keys[1])} gets"
            inner = _inner(*keys)
            if inner is None:
                moved = moved_elements(*keys)
                break
            one, other = inner
        if moved is None:
            return message, first, second, ""
        return f"{gets} {self._moved(moved)}", first, second, _MOVED_HINT

    def _moved(self, moved: MovedElements) -> str:
        node = self._old.origins.get(moved.term) or self._new.origins.get(moved.term)
        name = operator_of(self._terms[moved.term].key) if node is None else f"%{node.name}"
        return (
            f"element {moved.now} of {name} where element {moved.was} was (element"
            f" {moved.place} of the argument)"
        )

    def _slices(self, first: int, second: int) -> Iterator[str]:
        """Yields the smallest differing part of each graph as text, with the user's source line."""
        if first < 0 or second < 0:
            return
        settings = _settings(self._terms[first].key, self._terms[second].key)
        for word, term, of in (("before", first, self._old), ("after", second, self._new)):
            node = of.origins.get(term)
            source = None if node is None else source_line(node)
            end = "" if source is None else f"   ({source})"
            yield f"  {word + ':':<10} {self._text(term, of, settings[word])}{end}"

    def _text(self, term: int, of: Evaluation, settings: Mapping[str, str]) -> str:
        key = self._terms[term].key
        parts = [self._part(part, of) for part in _parts(key)]
        parts += [f"{name}={value}" for name, value in settings.items() if value not in parts]
        return f"{operator_of(key)}({', '.join(parts)})" if parts else operator_of(key)

    def _part(self, part: Any, of: Evaluation) -> str:
        if not isinstance(part, int):
            return str(part)
        node = of.origins.get(part)
        return operator_of(self._terms[part].key) if node is None else f"%{node.name}"

    def _nearest_rule(self, first: int, second: int) -> str:
        """Returns the text of the rule that covers both operators, though not this case."""
        for term in (second, first):
            key = self._terms[term].key if term >= 0 else ("",)
            name = operator_of(key).replace(".", "::", 1).partition(".")[0]
            if key[0] == "call" and name in RULES:
                axiom = RULES[name]
                return f"the rule {axiom.name!r} does not hold here ({axiom.why}); "
        return ""


def _message(one: Sequence[Any], other: Sequence[Any]) -> str:
    if one[:2] != other[:2]:
        return f"{operator_of(other)} in place of {operator_of(one)}"
    settings = _settings(one, other)
    gets = ", ".join(
        f"{name}={now}, before it was {settings['before'].get(name)}"
        for name, now in settings["after"].items()
    )
    return f"{operator_of(one)} gets {gets or 'other arguments'}"


def _settings(one: Any, other: Any) -> dict[str, dict[str, str]]:
    """Returns the constant arguments in which two calls of one operator differ, before and
    after."""
    was, now = _named_constants(one), _named_constants(other)
    names = [name for name in now if name in was and now[name] != was[name]]
    return {
        "before": {name: was[name] for name in names},
        "after": {name: now[name] for name in names},
    }


def _named_constants(key: Any) -> dict[str, str]:
    """Returns the plain values among a call's arguments, as text by name."""
    if not isinstance(key, tuple) or key[:1] not in (("call",), ("each",)):
        return {}
    given = key[2][1:] if len(key) > 2 and key[2][:1] == ("dict",) else key[2:]
    pairs = (entry for entry in given if isinstance(entry, tuple) and len(entry) == 2)
    found = {name: _constant(value) for name, value in pairs if isinstance(name, str)}
    return {name: text for name, text in found.items() if text is not None}


def _constant(value: Any) -> str | None:
    """Returns a plain value of a key as Python source, or None for anything else."""
    if value is None or isinstance(value, (bool, int)):
        return repr(value)
    if not isinstance(value, tuple) or len(value) != 2:
        return None
    kind, content = value
    if kind == "float":
        return repr(float.fromhex(content))
    return repr(content) if kind in ("bool", "str") else None


def operator_of(key: Sequence[Any]) -> str:
    """Returns the name of the operator that makes a term."""
    if not key:
        return ""
    if key[0] in ("call", "entry", "each"):
        return str(key[1])
    return f"%{key[1]}" if key[0] == "input" else str(key[0])


def _parts(key: Any) -> Iterator[Any]:
    """Yields the terms (numbers) and constants (text) that a key contains."""
    if isinstance(key, TensorValue):
        yield from dict.fromkeys(segment.term for segment in key.segments)
    elif isinstance(key, (ScalarValue, Segment)):
        yield key.term
    elif isinstance(key, tuple):
        if key[:1] == ("elements",):
            yield key[1]
        elif key[:1] in (("float",), ("bool",)):
            yield str(float.fromhex(key[1])) if key[0] == "float" else str(key[1])
        else:
            for entry in key:
                yield from _parts(entry)
    elif isinstance(key, int):
        yield str(key)


def _inner(one: Any, other: Any) -> tuple[Any, Any] | None:
    """Returns the one argument in which two otherwise equal calls differ, before and after, or
    None."""
    if not isinstance(one, tuple) or not isinstance(other, tuple) or len(one) != len(other):
        return None
    if one[:1] != other[:1] or (
        one[:1] in (("call",), ("each",), ("entry",)) and one[1] != other[1]
    ):
        return None
    for a, b in zip(one, other, strict=True):
        if a == b:
            continue
        if first_pair(a, b) is not None:
            return a, b
        inner = _inner(a, b)
        if inner is not None:
            return inner
    return None


def first_pair(one: Any, other: Any) -> tuple[int, int] | None:
    """Returns the first differing terms of two values, or None."""
    if isinstance(one, Segment) and isinstance(other, Segment):
        return None if one.term == other.term else (one.term, other.term)
    if isinstance(one, TensorValue) and isinstance(other, TensorValue):
        elements = first_difference(one.segments, other.segments)
        return None if elements is None else first_pair(*elements[1:])
    if isinstance(one, ScalarValue) and isinstance(other, ScalarValue):
        return None if one == other else (one.term, other.term)
    if not isinstance(one, tuple) or not isinstance(other, tuple):
        return None
    if one[:1] == other[:1] == ("elements",):
        return None if one[1] == other[1] else (one[1], other[1])
    for a, b in zip(one, other, strict=False):
        found = first_pair(a, b)
        if found is not None:
            return found
    return None


def _layouts(one: Any, other: Any) -> str | None:
    if not isinstance(one, TensorValue) or not isinstance(other, TensorValue):
        return None
    for name in _LAYOUT:
        a, b = getattr(one, name), getattr(other, name)
        if a != b:
            return f"{name} {b}, before it was {a}"
    return None
