"""Differences between two evaluations: values, random draws, state, sent elements, aliases."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import fx

from graphopt.verify.dependency.signatures import signature_text
from graphopt.verify.differences.difference import Difference
from graphopt.verify.problems import Problem
from graphopt.verify.symbolic.evaluation_outcome import Evaluation
from graphopt.verify.values.arrangements import arranged_rows
from graphopt.verify.values.gathering import GATHERS, is_share
from graphopt.verify.values.terms import Terms, canonical


def differences(
    terms: Terms, old: Evaluation, new: Evaluation, *, sends: bool = True
) -> Iterator[Problem]:
    """Yields problems where two graphs leave different values or aliases, or (if `sends`) send
    other elements."""
    yield from value_problems(terms, old, new)
    if sends:
        yield from sent_problems(terms, old, new)
    yield from _of_aliases(old, new)
    yield from _of_separated(old, new)


def total_problems(old: Evaluation, new: Evaluation, *, sends: bool = True) -> Iterator[Problem]:
    """Yields problems with totals that other checks rely on: elements sent, and updates listed."""
    for (signature, dtype), count in old.amounts.items() if sends else ():
        left = new.amounts[signature, dtype]
        if left < count:
            text = f"{signature_text(signature)} sends {left} elements of {dtype}, before it was"
            yield Problem(f"{text} {count}", hint="other ranks join every collective")
    for name in sorted(old.listed - new.listed):
        message = f"the update of %{name} is not among the state updates in the output"
        yield Problem(message, (new.nodes["state", name],))


def error_problems(old: Evaluation, new: Evaluation) -> Iterator[Problem]:
    """Yields a problem for each new call that may raise and so end the step."""
    for key, node in new.may_raise.items():
        if key not in old.may_raise:
            message = f"%{node.name} raises an error for some values, which nothing did before"
            yield Problem(
                message, (node,), "compute from the same values what was computed from them before"
            )


def reorders_sums(old: Evaluation, new: Evaluation) -> bool:
    """True if elements are reduced at another offset of a bucket, which may change the order of a
    sum."""
    return old.places != new.places


def value_problems(
    terms: Terms, old: Evaluation, new: Evaluation, where: str = ""
) -> Iterator[Problem]:
    """Yields differences in values, draws and host calls, whatever is sent for them."""
    yield from _of_values(terms, old, new, where)
    if len(old.draws) != len(new.draws):
        yield Problem(
            f"{where}{len(new.draws)} operators draw random numbers, before it was {len(old.draws)}"
        )
    elif old.draws != new.draws:
        yield Problem(f"{where}random numbers are drawn by other calls, or in another order")
    remaining = iter(new.effects)
    if not all(effect in remaining for effect in old.effects):
        yield Problem(f"{where}calls on the host are missing, changed, or in another order")
    for effect in dict.fromkeys(new.effects):
        if effect not in old.effects and not effect[1].startswith("graphopt."):
            hint = "graphopt.host.insert_callback calls a function with values of every step"
            yield Problem(
                f"{where}{effect[1]} may end the step, which it could not before", (), hint
            )


def _of_values(terms: Terms, old: Evaluation, new: Evaluation, where: str) -> Iterator[Problem]:
    for kind, before, after in (
        ("result", old.results, new.results),
        ("carried", old.carried, new.carried),
    ):
        if len(before) != len(after):
            yield Problem(f"{where}{len(after)} {_KINDS[kind]}s, before it was {len(before)}")
            continue
        for index, (one, other) in enumerate(zip(before, after, strict=True)):
            if one is not other and canonical(one) != canonical(other):
                text = f"{where}{_KINDS[kind]} {index}"
                yield Difference(terms, old, new, (kind, index)).problem(text, one, other)
    for name in dict.fromkeys([*old.states, *new.states]):
        one, other = old.states.get(name), new.states.get(name)
        if one is None or other is None:
            verb = "is updated, before it was not" if one is None else "is not updated any more"
            node = new.nodes.get(("state", name)) or old.nodes.get(("state", name))
            yield Problem(f"{where}%{name} {verb}", () if node is None else (node,))
        elif one is not other and one != other:
            text = f"{where}the update of %{name}"
            yield Difference(terms, old, new, ("state", name)).problem(text, one, other)


def sent_problems(
    terms: Terms, old: Evaluation, new: Evaluation, where: str = ""
) -> Iterator[Problem]:
    """Yields elements that collectives send more or less often."""
    if all(_edges(old.sent, key) == _edges(new.sent, key) for key in {*old.sent, *new.sent}):
        return
    was_sent, is_sent = _unarranged(terms, old.sent), _unarranged(terms, new.sent)
    for key in dict.fromkeys([*was_sent, *is_sent]):
        before, after = _edges(was_sent, key), _edges(is_sent, key)
        if before == after:
            continue
        kind, term = key
        if kind[0] == GATHERS and is_share(terms, term, kind):
            continue  # to gather what was scattered completes a reduction
        node = new.origins.get(term) or old.origins.get(term)
        name = "what is sent" if node is None else f"%{node.name}"
        element, was, now = _first_change(before, after)
        yield Problem(
            f"{where}element {element} of {name} goes through {kind[0]} {now} times, before it was"
            f" {was}",
            () if node is None else (node,),
            hint="each element that was sent is sent once; comm.get_all_comm_blocks lists the"
            " collectives, and a collective that nobody needs has to go with its wait",
        )


def _edges(sent: Mapping[Any, Counter[int]], key: Any) -> dict[int, int]:
    return {place: count for place, count in sent.get(key, {}).items() if count}


def _unarranged(terms: Terms, sent: Mapping[Any, Counter[int]]) -> dict[Any, Counter[int]]:
    """Counts sent elements by the original terms instead of permuted or concatenated ones."""
    found: dict[Any, Counter[int]] = {}
    for kind, term in sent:
        pending = [(term, _edges(sent, (kind, term)))]
        while pending:
            part, edges = pending.pop()
            rows, count = arranged_rows(terms, part), edges.get(0, 0)
            segments = [segment for row in rows or () for segment in row]
            length = sum(segment.length for segment in segments)
            if not segments or edges != {0: count, length: -count}:
                found.setdefault((kind, part), Counter()).update(edges)
                continue
            for inner, start, size in segments:
                if not terms[inner].constant:
                    pending.append((inner, {start: count, start + size: -count}))
    return found


def _first_change(before: Mapping[int, int], after: Mapping[int, int]) -> tuple[int, int, int]:
    """Returns the first element whose send count changed: its position, the count before, and
    now."""
    was = now = 0
    for position in sorted({*before, *after}):
        was, now = was + before.get(position, 0), now + after.get(position, 0)
        if was != now:
            break
    return position, was, now


def _of_aliases(old: Evaluation, new: Evaluation) -> Iterator[Problem]:
    """Yields results that moved into the storage of state or of another result."""
    apart = {
        place
        for owner, places in old.aliases.items()
        if _is_apart(owner, places)
        for place in places
    }
    for owner, places in new.aliases.items():
        if _is_apart(owner, places):
            continue
        for kind, index in places:
            if (kind, index) in apart:
                yield Problem(
                    f"{_KINDS[kind]} {index} shares its storage with %{owner.name}, which others"
                    " read or write",
                    (new.nodes[kind, index],),
                )


def _of_separated(old: Evaluation, new: Evaluation) -> Iterator[Problem]:
    """Yields results that shared a storage and no longer do, since the program writes through
    them."""
    now: dict[Any, set[fx.Node]] = {}
    for owner, places in new.aliases.items():
        for place in places:
            now.setdefault(place, set()).add(owner)
    for places in old.aliases.values():
        shared = [place for place in places if place[0] == "result"]
        first = shared[0] if shared else None
        for other in shared[1:]:
            if first in now and other in now and now[first].isdisjoint(now[other]):
                whose = f"the storage of result {shared[0][1]} any more"
                text = f"result {other[1]} does not share {whose}"
                yield Problem(text, (new.nodes[other],))


def _is_apart(owner: fx.Node, places: Sequence[Any]) -> bool:
    return owner.op not in ("placeholder", "get_attr") and len(places) == 1


_KINDS = {"result": "result", "carried": "carried value", "state": "state"}
