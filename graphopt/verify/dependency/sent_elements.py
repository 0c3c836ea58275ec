"""A check that collectives send as many elements as before, with the same dtype and reduction."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from operator import attrgetter

from torch import fx

from graphopt.ir.operators import calls_of
from graphopt.verify.dependency.segments import size_of
from graphopt.verify.dependency.signatures import (
    Signature,
    sent_tensors,
    signature_of,
    signature_text,
)
from graphopt.verify.problems import Problem

Same = Mapping[fx.Node, fx.Node]


def less_sent(
    before: fx.Graph, after: fx.Graph, same: Same, *, same_dtypes: bool
) -> Iterator[Problem]:
    """Yields a problem for each kind of collective that sends fewer elements than before; more is
    padding."""
    old, new = _totals(before, same_dtypes), _totals(after, same_dtypes)
    for key, (count, launches) in old.items():
        left = new[key][0] if key in new else 0
        if left >= count:
            continue
        kept = set(same.values())
        gone = tuple(launch for launch in launches if launch not in kept)
        message = f"{signature_text(key[0])} sends {left} elements{key[1]}, before it was {count}"
        hint = "other ranks join every collective: fuse or split them, but keep all that they send"
        other = _other_attribute(key, old, new)
        if other is not None:
            instead, more, what = other
            message = _changed(what, key, instead, (count - left, more))
            hint = _ATTRIBUTE_HINTS.get(what, hint)
            gone += tuple(n for n in new[instead][1] if same.get(n) not in old.get(key, (0, []))[1])
        yield Problem(message, gone[:3], hint)


_Key = tuple[Signature, str]
_Totals = dict[_Key, tuple[int, list[fx.Node]]]

_ATTRIBUTE_HINTS = {
    "the dtype": "a pass declared with changes_numerics=True may send another dtype, and convert"
    " what it receives back",
    "the reduction": "scale before or after the collective in place of another reduction, and"
    " declare changes_numerics=True",
    "the group": "all ranks of a group join its collectives: keep the group",
}


def _changed(what: str, key: _Key, instead: _Key, elements: tuple[int, int]) -> str:
    """Describes an attribute of sent elements that changed. `elements`: how many fewer have the old
    one, and how many more the new one."""
    fewer, more = elements
    now, was = (f"{signature_text(signature)}{dtype}" for signature, dtype in (instead, key))
    found = f"{what} of {min(fewer, more)} elements that are sent changed: {now} now, before it was"
    found += f" {was}"
    return found + (f"; {fewer - more} more are not sent at all" if fewer > more else "")


def _other_attribute(key: _Key, old: _Totals, new: _Totals) -> tuple[_Key, int, str] | None:
    """Returns (kind, additional elements, attribute) of collectives that differ from `key` in one
    attribute and send more than before, or None."""
    for other, (count, _) in new.items():
        more = count - old.get(other, (0, []))[0]
        what = _attribute_between(key, other)
        if more > 0 and what is not None:
            return other, more, what
    return None


def _attribute_between(key: _Key, other: _Key) -> str | None:
    """Returns the one attribute in which two kinds of collectives differ, or None if there are
    several."""
    (old, old_dtype), (new, new_dtype) = key, other
    found = ["the dtype"] if old_dtype != new_dtype else []
    if old[0] != new[0]:
        found.append("the kind of collective")
    elif old[1:-1] != new[1:-1]:
        found.append("the reduction" if old[0] != "broadcast" else "the source")
    if old[-1] != new[-1]:
        found.append("the group")
    return found[0] if len(found) == 1 else None


def _totals(graph: fx.Graph, by_dtype: bool) -> _Totals:
    found: _Totals = {}
    for node in calls_of(graph, attrgetter("collective")):
        for tensor in sent_tensors(node):
            key = signature_of(node), f" of {tensor.dtype}" if by_dtype else ""
            count, launches = found.get(key, (0, []))
            found[key] = count + (size_of(tensor) or 0), [*launches, node]
    return found
