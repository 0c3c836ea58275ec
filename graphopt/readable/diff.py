"""Unified diffs of graphs and texts, in nearly linear time.

Nearly every line of a graph's text begins with a name of its own, so the lines that occur once in
both texts are matched, the longest sequence of them in the same order is kept (Bram Cohen's
patience diff), and what lies between is searched again. A node that moved is one line removed and
one added.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import TypeAlias, TypeVar

from torch import fx

from graphopt.readable.plain_text import compact_text

_CONTEXT = 3

Match = tuple[int, int]
Run = tuple[int, int, int]
"""Where equal lines begin in the old and in the new sequence, and how many there are."""
Line = TypeVar("Line", bound=Hashable)
ChangedLine: TypeAlias = tuple[str, Line | None]
"""What stands before a line of a difference, and the line; a heading and None."""


def graph_diff(
    before: fx.GraphModule | fx.Graph | str,
    after: fx.GraphModule | fx.Graph | str,
    names: tuple[str, str] = ("before", "after"),
) -> str:
    """The unified diff of two graphs; empty if they are equal.

    Args:
        before, after: graphs, or their `compact_text`, which stays as it is when a graph changes.
        names: the names of the two graphs in the first lines.

    >>> from graphopt.readable import compact_text, graph_diff
    >>> before = compact_text(gm)
    >>> graphopt.PassManager("comm_fusion_with_concat").run(gm)[0].changes
    2
    >>> print(graph_diff(before, gm, ("separate", "fused")).splitlines()[0])
    --- separate
    """
    return text_diff(_text(before), _text(after), names)


def text_diff(before: str, after: str, names: tuple[str, str]) -> str:
    """The unified diff of two texts; empty if they are equal.

    >>> from graphopt.readable import text_diff
    >>> print(text_diff("old", "new", ("before", "after")), end="")
    --- before
    +++ after
    @@ -1,1 +1,1 @@
    -old
    +new
    """
    changes = sequence_changes(before.splitlines(), after.splitlines())
    return written_out(changes, str, names)


def sequence_changes(old: Sequence[Line], new: Sequence[Line]) -> list[ChangedLine[Line]]:
    """The changed lines between two sequences; empty if they are equal.

    Args:
        old, new: lines, or whatever is equal where the lines are.
    """
    changes = list(_changes(_runs(old, new), len(old), len(new)))
    return [line for hunk in _hunks(changes) for line in _hunk_lines(hunk, old, new)]


def written_out(
    lines: Sequence[ChangedLine[Line]], text: Callable[[Line], str], names: tuple[str, str]
) -> str:
    """Changed lines in the format of a unified diff.

    Args:
        text: a line.
        names: the names of the two sequences in the first lines.
    """
    if not lines:
        return ""
    heads = [f"--- {names[0]}", f"+++ {names[1]}"]
    rest = [mark if line is None else f"{mark}{text(line)}" for mark, line in lines]
    return "\n".join([*heads, *rest]) + "\n"


def _text(graph: fx.GraphModule | fx.Graph | str) -> str:
    return graph if isinstance(graph, str) else compact_text(graph)


def _runs(old: Sequence[Line], new: Sequence[Line]) -> list[Run]:
    """The pairs of equal lines, increasing in both sequences."""
    found: list[Run] = []
    pending = [(0, len(old), 0, len(new))]
    while pending:
        a, a_end, b, b_end = pending.pop()
        start = a
        while a < a_end and b < b_end and (old[a] is new[b] or old[a] == new[b]):
            a, b = a + 1, b + 1
        found.append((start, b - (a - start), a - start))
        end = a_end
        while a < a_end and b < b_end and old[a_end - 1] == new[b_end - 1]:
            a_end, b_end = a_end - 1, b_end - 1
        found.append((a_end, b_end, end - a_end))
        anchors = _anchors(old, new, (a, a_end, b, b_end))
        if not anchors:
            continue
        starts = [(a, b), *((i + 1, j + 1) for i, j in anchors)]
        ends = [*anchors, (a_end, b_end)]
        found += [(i, j, 1) for i, j in anchors]
        pending += [
            (i, i_end, j, j_end)
            for (i, j), (i_end, j_end) in zip(starts, ends, strict=True)
            if i < i_end and j < j_end
        ]
    return sorted(run for run in found if run[2])


def _anchors(
    old: Sequence[Line], new: Sequence[Line], window: tuple[int, int, int, int]
) -> list[Match]:
    """The lines that occur once in each part: the longest sequence in the same order."""
    a, a_end, b, b_end = window
    old_counts, new_counts = Counter(old[a:a_end]), Counter(new[b:b_end])
    where = {new[j]: j for j in range(b, b_end) if new_counts[new[j]] == 1}
    once = (i for i in range(a, a_end) if old_counts[old[i]] == 1 and old[i] in where)
    return _longest_increasing([(i, where[old[i]]) for i in once])


def _longest_increasing(pairs: list[Match]) -> list[Match]:
    """The longest subsequence of `pairs` whose second numbers increase."""
    tails: list[int] = []
    last: list[int] = []
    previous: list[int | None] = []
    for index, (_, j) in enumerate(pairs):
        place = bisect_left(tails, j)
        previous.append(last[place - 1] if place else None)
        tails[place : place + 1] = [j]
        last[place : place + 1] = [index]
    chosen: list[Match] = []
    current = last[-1] if last else None
    while current is not None:
        chosen.append(pairs[current])
        current = previous[current]
    return chosen[::-1]


Change = tuple[int, int, int, int]
"""Lines `[a, a_end)` of the old text became `[b, b_end)` of the new one."""


def _changes(equal: list[Run], old: int, new: int) -> Iterator[Change]:
    a = b = 0
    for i, j, length in [*equal, (old, new, 0)]:
        if i > a or j > b:
            yield a, i, b, j
        a, b = i + length, j + length


def _hunks(changes: list[Change]) -> Iterator[list[Change]]:
    """Groups of changes that are close to one another."""
    hunk: list[Change] = []
    for change in changes:
        if hunk and change[0] - hunk[-1][1] > 2 * _CONTEXT:
            yield hunk
            hunk = []
        hunk.append(change)
    if hunk:
        yield hunk


def _hunk_lines(
    hunk: list[Change], old: Sequence[Line], new: Sequence[Line]
) -> Iterator[ChangedLine[Line]]:
    before = min(_CONTEXT, hunk[0][0])
    after = min(_CONTEXT, len(old) - hunk[-1][1])
    a, a_end = hunk[0][0] - before, hunk[-1][1] + after
    b, b_end = hunk[0][2] - before, hunk[-1][3] + after
    yield f"@@ -{_range(a, a_end)} +{_range(b, b_end)} @@", None
    for i, i_end, j, j_end in hunk:
        yield from ((" ", line) for line in old[a:i])
        yield from (("-", line) for line in old[i:i_end])
        yield from (("+", line) for line in new[j:j_end])
        a = i_end
    yield from ((" ", line) for line in old[a:a_end])


def _range(start: int, end: int) -> str:
    count = end - start
    return f"{start + 1 if count else start},{count}"
