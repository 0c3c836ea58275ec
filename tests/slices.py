"""How much of a matrix of cases belongs to the normal run, and how much to `make test-all`."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import combinations
from random import Random
from typing import Any

_whole = True


def choose(whole: bool) -> None:
    """Before test modules are imported: whether this run is the whole."""
    global _whole
    _whole = whole


def examples(count: int) -> int:
    """Of so many cases that hypothesis makes in the whole run, how many it makes in this one."""
    return count if _whole else max(2, count // 4)


def spread(cases: Sequence[Mapping[str, Any]], count: int) -> set[int]:
    """Numbers of so many cases, each of which shows as many values of parameters as may be that
    none before it has shown; where several show as many, the one that stands nearest behind its
    share of the cases.

    Args:
        cases: by name, the values of each case's parameters.
    """
    if count >= len(cases):
        return set(range(len(cases)))
    values = [_together(case, 1) for case in cases]
    chosen: list[int] = []
    seen: set[Hashable] = set()
    for start in (share * len(cases) // count for share in range(count)):
        left = (number for number in range(len(cases)) if number not in chosen)
        new = {number: len(values[number] - seen) for number in left}
        best = max(new, key=lambda number: (new[number], -((number - start) % len(cases))))
        chosen.append(best)
        seen |= values[best]
    return set(chosen)


def sample(cases: Sequence[Mapping[str, Any]], count: int, seed: int) -> set[int]:
    """Numbers of so many cases, chosen as by `spread` out of an order that the seed gives."""
    order = list(range(len(cases)))
    Random(seed).shuffle(order)
    return {order[place] for place in spread([cases[number] for number in order], count)}


def covering(
    cases: Sequence[Mapping[str, Any]], together: int, seed: int, kept: Iterable[int] = ()
) -> set[int]:
    """Numbers of cases in which all values of any so many parameters occur together that do so in
    some case; which cases, where there is a choice, the seed says.

    Args:
        together: 1 for each value, 2 for each pair of values.
        kept: numbers of cases that belong to them in any event.
    """
    shown = [_together(case, together) for case in cases]
    chosen = set(kept)
    missing = set().union(*shown).difference(*(shown[number] for number in chosen))
    order = list(range(len(cases)))
    Random(seed).shuffle(order)
    while missing:
        best = max(order, key=lambda number: len(shown[number] & missing))
        chosen.add(best)
        missing -= shown[best]
    return chosen


def _together(case: Mapping[str, Any], count: int) -> set[Hashable]:
    """The values of a case's parameters, so many at a time."""
    return set(combinations([(name, _key(case[name])) for name in sorted(case)], count))


def _key(value: Any) -> Hashable:
    try:
        hash(value)
    except TypeError:
        return id(value)
    return value  # type: ignore[no-any-return]
