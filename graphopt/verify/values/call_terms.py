"""Symbolic values of operator calls: arguments by name, entries of lists, unknown results."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache, lru_cache
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from graphopt import _compat
from graphopt.ir.entries import list_positions
from graphopt.verify.values.elementwise import BY_ELEMENT, elementwise
from graphopt.verify.values.elementwise_runs import evaluate_entry_runs
from graphopt.verify.values.terms import (
    PendingResult,
    ScalarValue,
    Segment,
    TensorValue,
    Terms,
    canonical,
    elements,
    whole,
)


def entries(terms: Terms, target: Any, arguments: dict[str, Any], fake: Any) -> Any:
    """Evaluates a list operator entry by entry. None where its entries depend on one another."""
    names = list(arguments)
    given = {name: arguments[name] for name in map(names.__getitem__, list_positions(target))}
    lists = {name: value for name, value in given.items() if isinstance(value, tuple)}
    length = len(next(iter(lists.values()), ()))
    if any(value and len(value) != length for value in lists.values()):
        return None
    shared = [value for name, value in arguments.items() if name not in lists]
    if any(isinstance(v, TensorValue) and not _is_one_element(v) for v in shared):
        return None
    several = isinstance(fake, tuple) or (bool(fake) and isinstance(fake[0], (list, tuple)))
    columns = list(fake) if several else [fake]
    said = {name: canonical(value) for name, value in arguments.items() if name not in lists}
    alone = {
        name: [v if type(v) is TensorValue else canonical(v) for v in value]
        for name, value in lists.items()
        if value
    }
    alike = (str(target), *said.items(), *(("lists", name) for name in alone), *map(bool, columns))
    known = terms.entries.setdefault(alike, {})
    rows = []
    for index, one in enumerate(zip(*alone.values(), strict=True)):
        fakes = tuple([column[index] for column in columns if column])
        found = known.get(one)
        if found is None or not all(map(operator.is_, found[0], fakes)):
            given = dict.fromkeys(lists) | said | dict(zip(alone, one, strict=True))
            row = _entry(terms, target, arguments, (lists, given), index, columns)
            found = known[one] = (fakes, row)
        rows.append(found[1])
    results = tuple(
        tuple([row[number] for row in rows]) if column else ()
        for number, column in enumerate(columns)
    )
    return results if several else results[0]


def _is_one_element(value: TensorValue) -> bool:
    return value.is_static and elements(value.shape) == 1


def _entry(
    terms: Terms,
    target: Any,
    arguments: dict[str, Any],
    given: tuple[dict[str, Any], dict[str, Any]],
    index: int,
    columns: Sequence[Any],
) -> list[Any]:
    """Returns the values of one entry of a list operator, one for each list of results. `given`:
    the lists by name, and all arguments as parts of a key."""
    lists, said = given
    if terms.whole_cuts:
        values = {n: lists[n][index] if lists.get(n) else v for n, v in arguments.items()}
        fakes = [column[index] if column else None for column in columns]
        found = evaluate_entry_runs(terms, target, values, fakes)
        if found is not None:
            return found
    one = ((name, said[name]) for name in arguments)
    if len(columns) == 1 and columns[0][index].device.type == "cpu":
        values = {n: lists[n][index] if n in lists else v for n, v in arguments.items()}
        value = _single_call_value(terms, target, values, columns[0][index])
        if value is not None:
            return [value]
    key = ("entry", str(target), ("dict", *one))
    return [
        fresh(terms, (*key, number), column[index]) if column else None
        for number, column in enumerate(columns)
    ]


def _single_call_value(
    terms: Terms, target: Any, values: dict[str, Any], fake: torch.Tensor
) -> Any:
    """Returns the value of one entry as a call of the operator for single tensors. None where the
    two are not known to give the same bits."""
    known = called(target)
    if known is None:
        return None
    renamed = {known.names.get(name, name): value for name, value in values.items()}
    if _compat.operator_name(known.operator) in BY_ELEMENT:
        found = elementwise(terms, known.operator, renamed, fake)
        if found is not None:
            return found
    if not known.is_call:
        return None
    return fresh(terms, ("call", target_name(known.operator), canonical(renamed)), fake)


class CalledForEntry(NamedTuple):
    """The operator for single tensors that a list operator equals for each entry, on CPUs.

    Attributes:
        operator: the operator for single tensors.
        names: list operator's argument name -> single operator's argument name, where they differ.
        is_call: True if the list operator really calls it; otherwise it only computes the same for
            each element.
    """

    operator: _compat.OpOverload
    names: Mapping[str, str] = MappingProxyType({})
    is_call: bool = True


aten = torch.ops.aten

CALLED = {
    aten._foreach_add.List: CalledForEntry(aten.add.Tensor),
    aten._foreach_sub.List: CalledForEntry(aten.sub.Tensor),
    aten._foreach_lerp.Scalar: CalledForEntry(aten.lerp.Scalar, {"tensors1": "end"}),
    aten._foreach_lerp.ScalarList: CalledForEntry(aten.lerp.Scalar, {"tensors1": "end"}),
    aten._foreach_addcmul.Scalar: CalledForEntry(aten.addcmul.default),
    aten._foreach_addcmul.ScalarList: CalledForEntry(aten.addcmul.default, {"scalars": "value"}),
    aten._foreach_addcdiv.Scalar: CalledForEntry(aten.addcdiv.default),
    aten._foreach_addcdiv.ScalarList: CalledForEntry(aten.addcdiv.default, {"scalars": "value"}),
    aten._foreach_maximum.List: CalledForEntry(aten.maximum.default),
    aten._foreach_minimum.List: CalledForEntry(aten.minimum.default),
}
"""List operators that equal a call of another operator for each entry."""


@cache
def called(target: Any) -> CalledForEntry | None:
    """Returns the operator for single tensors that gives the bits of a list operator's entries, or
    None."""
    if target in CALLED:
        return CALLED[target]
    name = _compat.operator_name(target).replace("_foreach_", "")
    if name == _compat.operator_name(target) or name not in BY_ELEMENT:
        return None
    packet = getattr(torch.ops.aten, name.removeprefix("aten::"))
    operator_of_one = getattr(packet, packet.overloads()[0])
    return CalledForEntry(operator_of_one, {"scalar": "other", "scalars": "other"}, False)


def fresh(terms: Terms, key: tuple[Any, ...], fake: Any, *, even_empty: bool = False) -> Any:
    """Returns an unknown value that is equal only to values with the same key.

    Args:
        even_empty: give tensors without elements a term, too: that they are empty depends on
            values, and the host reads it.
    """
    if isinstance(fake, torch.Tensor):
        value = whole(terms.make(key), fake)
        if even_empty and not value.segments:
            return replace(value, segments=(Segment(terms.make(key), 0, 0),))
        return value
    if isinstance(fake, (list, tuple)):
        return tuple(
            fresh(terms, (*key, index), entry, even_empty=even_empty)
            for index, entry in enumerate(fake)
        )
    return ScalarValue(terms.make(key))


def has_empty(value: Any) -> bool:
    """True if a value is, or contains, a tensor without elements."""
    if isinstance(value, tuple):
        return any(map(has_empty, value))
    return isinstance(value, TensorValue) and not value.segments


def terms_in(value: Any) -> list[int]:
    """Returns all terms that a symbolic value consists of."""
    if isinstance(value, PendingResult):
        return terms_in(value.value)
    if isinstance(value, TensorValue):
        return [segment.term for segment in value.segments]
    if isinstance(value, ScalarValue):
        return [value.term]
    if isinstance(value, tuple):
        return [term for entry in value for term in terms_in(entry)]
    return []


def target_name(target: Any) -> str:
    """Returns the name of a call's target within keys. Targets without a name go by their
    identity."""
    if isinstance(target, _compat.OpOverload):
        return str(target)
    module = getattr(target, "__module__", "")
    name = getattr(target, "__qualname__", None) or getattr(target, "__name__", None)
    return f"{module}.{name}" if name and "<" not in name else f"{module}.{name} {id(target)}"


def named(target: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """Returns the arguments of a call by name with defaults filled in; by position for Python
    functions."""
    if not isinstance(target, _compat.OpOverload):
        return {**{str(index): value for index, value in enumerate(args)}, **kwargs}
    found = {}
    for index, (name, default) in enumerate(parameters(target)):
        found[name] = args[index] if index < len(args) else kwargs.get(name, default)
    return found


@lru_cache(maxsize=4096)
def parameters(target: Any) -> tuple[tuple[str, Any], ...]:
    """Returns the names and defaults of an operator's arguments."""
    return tuple(
        (argument.name, tuple(default) if isinstance(default, list) else default)
        for argument in _compat.schema_of(target).arguments
        for default in [argument.default_value]
    )
