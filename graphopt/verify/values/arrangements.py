"""Symbolic element positions after a permutation, a column slice, or a concatenation by columns.

    permuted   x[i, j] at [j, i]                 transposes, permutations
    beside     of each row some columns          slices and splits of inner dimensions, and what is
               of x, then some of y, …           put together along them

Rows hold elements in row-major order, so that a shape only says where dimensions end. Dimensions of
size 1 are dropped, adjacent ones merged, and two permutations composed where their dimensions have
common factors. Elementwise operators commute with all rearrangements here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, pairwise
from math import prod
from operator import mul
from typing import NamedTuple

from graphopt.verify.values.terms import Segment, Terms

Row = tuple[Segment, ...]
"""Elements in row-major order."""


class Columns(NamedTuple):
    """Columns `start` to `end` of a matrix whose rows have `width` elements."""

    base: Row
    width: int
    start: int
    end: int


def permuted(terms: Terms, base: Row, shape: Sequence[int], order: Sequence[int]) -> Row:
    """Returns the elements of a tensor of this shape after `permute(order)`, in row-major order."""
    shape, order = _simplest(shape, order)
    if len(order) < 2 or not base or _one_number(terms, base) is not None:
        return base
    inner = permutation_of(terms, base)
    if inner is not None:
        composed = _composed(inner[1], inner[2], shape, order)
        if composed is not None:
            return permuted(terms, inner[0], *composed)
    return (Segment(terms.make(("permute", base, shape, order)), 0, prod(shape)),)


def permutation_of(terms: Terms, row: Row) -> tuple[Row, tuple[int, ...], tuple[int, ...]] | None:
    """Returns (elements, shape, order) of the permutation that made a whole row, or None."""
    key = terms[row[0].term].key if len(row) == 1 else ("",)
    if key[0] != "permute" or row[0][1:] != (0, prod(key[2])):
        return None
    return key[1], key[2], key[3]


def _simplest(
    shape: Sequence[int], order: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Simplifies a permutation: drops dimensions of size 1 and merges those that stay adjacent."""
    kept = [dim for dim, size in enumerate(shape) if size != 1]
    runs: list[list[int]] = []
    for dim in (dim for dim in order if shape[dim] != 1):
        if runs and kept.index(runs[-1][-1]) + 1 == kept.index(dim):
            runs[-1].append(dim)
        else:
            runs.append([dim])
    before = sorted(runs)
    sizes = tuple(prod(shape[dim] for dim in run) for run in before)
    return sizes, tuple(before.index(run) for run in runs)


def _composed(
    first: Sequence[int], order: Sequence[int], shape: Sequence[int], then: Sequence[int]
) -> tuple[list[int], list[int]] | None:
    """Composes the permutation (`first`, `order`) with a second one (`shape`, `then`) of its
    result. None if the two shapes have no common factors."""
    between = [first[dim] for dim in order]
    ends = sorted({*_ends(between), *_ends(shape)}, reverse=True)
    if any(outer % inner for outer, inner in pairwise(ends)):
        return None
    sizes = [outer // inner for outer, inner in pairwise(ends)]
    given, read = _parts(between, ends), _parts(shape, ends)
    axes = [part for dim in range(len(first)) for part in given[order.index(dim)]]
    net = [axes.index(part) for dim in then for part in read[dim]]
    return [sizes[part] for part in axes], net


def _ends(shape: Sequence[int]) -> list[int]:
    """Returns the elements per step of each dimension, innermost first, and the total number."""
    return list(accumulate(reversed(shape), mul, initial=1))


def _parts(shape: Sequence[int], ends: Sequence[int]) -> list[range]:
    """Splits each dimension of a shape into the common factors that `ends` delimit, by their
    numbers."""
    steps = list(reversed(_ends(shape)))
    return [range(ends.index(outer), ends.index(inner)) for outer, inner in pairwise(steps)]


def columns(terms: Terms, row: Row, height: int, start: int, end: int) -> Row:
    """Returns columns `start` to `end` of a row of elements read as a matrix of `height` rows."""
    found, place = [], 0
    for piece in _pieces(terms, row, height):
        low = max(start - place, 0) + piece.start
        high = min(end - place + piece.start, piece.end)
        if low < high:
            found.append(piece._replace(start=low, end=high))
        place += piece.end - piece.start
    return _joined(terms, height, found)


def beside(terms: Terms, rows: Iterable[Row], height: int) -> Row:
    """Concatenates matrices of `height` rows, each given as a row of elements, by columns."""
    return _joined(terms, height, [p for row in rows if row for p in _pieces(terms, row, height)])


def rows_of(terms: Terms, row: Row, height: int) -> list[Row]:
    """Splits a row of elements, read as a matrix of `height` rows, into these rows."""
    pieces = _pieces(terms, row, height)
    return [
        terms.segments(s for piece in pieces for s in _row(terms, piece, index))
        for index in range(height)
    ]


def _row(terms: Terms, piece: Columns, index: int) -> Row:
    start = index * piece.width + piece.start
    return terms.part(piece.base, start, piece.end - piece.start)


def _pieces(terms: Terms, row: Row, height: int) -> Sequence[Columns]:
    length = sum(segment.length for segment in row)
    key = terms[row[0].term].key if len(row) == 1 else ("",)
    if key[0] == "beside" and key[1] == height and row[0][1:] == (0, length):
        pieces: Sequence[Columns] = key[2]
        if length == height * sum(piece.end - piece.start for piece in pieces):
            return pieces
    return (Columns(row, length // height, 0, length // height),)


def _joined(terms: Terms, height: int, pieces: Iterable[Columns]) -> Row:
    found: list[Columns] = []
    for piece in pieces:
        number = _one_number(terms, piece.base)
        if number is not None:  # whichever columns these are
            width = piece.end - piece.start
            piece = Columns((Segment(number, 0, height * width),), width, 0, width)
        last = found[-1] if found else None
        if last is None or not _continues(terms, last, piece):
            found.append(piece)
        elif number is None:
            found[-1] = last._replace(end=piece.end)
        else:
            width = last.width + piece.width
            found[-1] = Columns((Segment(number, 0, height * width),), width, 0, width)
    if not found:
        return ()
    if len(found) == 1 and (found[0].start, found[0].end) == (0, found[0].width):
        return found[0].base
    if all(len(piece.base) >= height for piece in found):  # such as what was gathered, by ranks
        rows = (_row(terms, piece, index) for index in range(height) for piece in found)
        return terms.segments(segment for row in rows for segment in row)
    length = height * sum(piece.end - piece.start for piece in found)
    return (Segment(terms.make(("beside", height, tuple(found))), 0, length),)


def _continues(terms: Terms, last: Columns, piece: Columns) -> bool:
    number = _one_number(terms, piece.base)
    if number is not None:
        return number == _one_number(terms, last.base)
    return last[:2] == piece[:2] and last.end == piece.start


def _one_number(terms: Terms, row: Row) -> int | None:
    """Returns the term of a row whose elements are all one number, or None."""
    return row[0].term if len(row) == 1 and terms[row[0].term].uniform else None


Arranged = tuple[list[list[Row]], Callable[[list[Row]], Row]]
"""For each rearranged part, its elements in all operands; and the function that rearranges such
parts."""


def arranged_alike(terms: Terms, runs: Sequence[Segment]) -> Arranged | None:
    """Returns the parts and the rebuilding function of operands that were all rearranged in one
    way, or None."""
    keys = [terms[run.term].key for run in runs]
    kind = keys[0][0]
    if kind not in ("permute", "beside") or any(run.start != runs[0].start for run in runs):
        return None
    if any(key[0] != kind for key in keys):
        return None
    if kind == "permute":
        shape, order = keys[0][2:]
        if any(key[2:] != (shape, order) for key in keys):
            return None
        return [[key[1] for key in keys]], lambda parts: permuted(terms, parts[0], shape, order)
    height, pieces = keys[0][1:]
    taken = [piece[1:] for piece in pieces]
    if any(key[1] != height or [p[1:] for p in key[2]] != taken for key in keys):
        return None
    groups = [[key[2][index].base for key in keys] for index in range(len(taken))]
    return groups, lambda parts: _joined(
        terms, height, [Columns(part, *where) for part, where in zip(parts, taken, strict=True)]
    )


def arranged_rows(terms: Terms, term: int) -> list[Row] | None:
    """Returns the rows of elements that a rearrangement term is made of. None if it rearranges
    nothing or drops elements."""
    key = terms[term].key
    if key[0] == "permute":
        return [key[1]]
    if key[0] != "beside" or any((p.start, p.end) != (0, p.width) for p in key[2]):
        return None
    return [piece.base for piece in key[2]]
