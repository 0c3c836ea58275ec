"""Symbolic values of scattered reductions, exchanges and gathers.

The graph's rank is unknown: it is any rank of a group. So an element of a `reduce_scatter_tensor`
is a choice by rank among the elements of the reduction. An `all_gather_into_tensor` is a
concatenation by rank of what the ranks send. The k-th rank's share of a reduction that was
scattered over the group is the k-th part of the reduction, so that gathering the shares gives the
`all_reduce`. An `all_to_all_single` of equal parts gives, from each rank of the group, its part for
this rank.
"""

from __future__ import annotations

from typing import Any

import torch

from graphopt.verify.values.arrangements import Row, arranged_alike, rows_of
from graphopt.verify.values.elementwise import ComputedElement, each, reduced
from graphopt.verify.values.terms import Segment, TensorValue, Terms, elements_of, tensor_value

SCATTERS = "reduce_scatter_tensor"
GATHERS = "all_gather_into_tensor"
EXCHANGES = "all_to_all_single"

_SHARE, _MEANT = "this rank's", "meant for this rank"
_MOST = 1024
"""The most ranks of a group, since each of them is an operand."""


def parts(kind: tuple[Any, ...], sent: TensorValue) -> int | None:
    """Returns the number of ranks, or None if the sent tensor does not divide into so many
    parts."""
    size = dict(kind[1][1:]).get("group_size")
    if not isinstance(size, int) or not 0 < size <= _MOST or "out" in dict(kind[1][1:]):
        return None
    return size if sent.is_static else None


def even_exchange(kind: tuple[Any, ...]) -> tuple[Any, ...]:
    """Removes the part size from the key of an even exchange, so that bucketing does not change
    it."""
    options = dict(kind[1][1:]) if kind[0] == EXCHANGES else {}
    received, given = options.get("output_split_sizes"), options.get("input_split_sizes")
    if not received or received != given or len(set(received[1:])) != 1:
        return kind
    group = ("group_name", options["group_name"])
    return EXCHANGES, ("dict", ("group_size", len(received) - 1), group)


def as_reduction(kind: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns the `all_reduce` of which a reduce-scatter or all-gather is one half."""
    if kind[0] != SCATTERS:
        return kind
    return "all_reduce", tuple(entry for entry in kind[1] if entry[0] != "group_size")


def scattered(
    terms: Terms, kind: tuple[Any, ...], size: int, sent: TensorValue, fake: torch.Tensor
) -> TensorValue:
    """Returns this rank's part of a reduction."""
    rows = rows_of(terms, reduced(terms, as_reduction(kind), sent, fake).segments, size)
    computed = _chosen_by_rank(_SHARE, kind, size, sent)
    return tensor_value(each(terms, computed, rows) if size > 1 else rows[0], fake)


def exchanged(
    terms: Terms, kind: tuple[Any, ...], size: int, sent: TensorValue, fake: torch.Tensor
) -> TensorValue:
    """Returns the parts that all ranks send to this one, concatenated by rank."""
    computed = _chosen_by_rank(_MEANT, kind, size, sent)
    ours = each(terms, computed, rows_of(terms, sent.segments, size))
    how = (_MEANT, _group(kind), str(sent.dtype))
    found = _of_ranks(terms, kind, size, how, ours)
    return tensor_value(terms.segments(segment for row in found for segment in row), fake)


def gathered(
    terms: Terms, kind: tuple[Any, ...], size: int, sent: TensorValue, fake: torch.Tensor
) -> TensorValue:
    """Returns the values that all ranks send, concatenated by rank."""
    if size == 1:
        return tensor_value(sent.segments, fake)
    how = (_group(kind), str(sent.dtype))
    rows = _of_ranks(terms, kind, size, how, sent.segments)
    return tensor_value(terms.segments(segment for row in rows for segment in row), fake)


def _of_ranks(
    terms: Terms, kind: tuple[Any, ...], size: int, how: tuple[str, ...], row: Row
) -> list[list[Segment]]:
    """Returns for each rank the elements that it sends where this rank sends `row`."""
    found: list[list[Segment]] = [[] for _ in range(size)]
    for run in row:
        arranged = arranged_alike(terms, [run])
        if is_share(terms, run.term, kind):
            for rank, ours in enumerate(found):
                ours.append(_share_of(terms, run, rank))
        elif arranged is None:
            held = elements_of(run.term)
            for rank, ours in enumerate(found):
                term = terms.make(("sent by rank", rank, *how, held))
                ours.append(Segment(term, run.start, run.length))
        else:
            groups, rebuild = arranged
            parts = [_of_ranks(terms, kind, size, how, part) for (part,) in groups]
            for rank, ours in enumerate(found):
                whole = rebuild([tuple(part[rank]) for part in parts])
                ours += terms.part(whole, run.start, run.length)
    return found


def is_share(terms: Terms, term: int, kind: tuple[Any, ...]) -> bool:
    """True if a term is this rank's share of a reduction over the ranks that gather it."""
    key = terms[term].key
    if key[:3] != ("each", _SHARE, _group(kind)):
        return False
    return len(key) == 3 + (dict(kind[1][1:]).get("group_size") or 0)


def _share_of(terms: Terms, run: Segment, rank: int) -> Segment:
    """Returns the share of the `rank`-th rank of a reduction of which `run` is this rank's
    share."""
    _, (_, term, _, *place) = terms[run.term].key[3 + rank]
    start = 0 if terms[term].uniform else run.start + sum(place)
    return Segment(term, start, run.length)


def _chosen_by_rank(
    name: str, kind: tuple[Any, ...], size: int, sent: TensorValue
) -> ComputedElement:
    """Returns the choice of one of `size` elements of the dtype of `sent`, by rank."""
    operands = {str(rank): sent for rank in range(size)}
    return ComputedElement(name, operands, _group(kind), commutes=False)


def _group(kind: tuple[Any, ...]) -> str:
    return str(dict(kind[1][1:])["group_name"])
