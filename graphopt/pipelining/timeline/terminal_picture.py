"""A pipeline timeline as characters for a terminal, and its figures as a line of text."""

from __future__ import annotations

from graphopt.pipelining.timeline.slots import ScheduleTimes, Slot

_COLUMNS = 96


def terminal_picture(times: ScheduleTimes) -> str:
    """A line of characters for each rank: letters for what it runs, dots where it is idle.

    Microbatches take turns in capitals and small letters, so that neighbours can be told apart.
    """
    columns = _columns(times)
    lines = [summary(times)]
    for figures, slots in zip(times.ranks, times.by_rank, strict=True):
        row = _row(slots, times.start, times.step_seconds, columns)
        share = f"{figures.bubble_share:6.1%}"
        lines.append(f"  rank {figures.rank:<2} |{row}| {share} idle")
    lines.append("  F forward, B backward, I input gradients, W weight gradients")
    return "\n".join(lines)


def summary(times: ScheduleTimes) -> str:
    """The schedule's figures in one line: ranks, microbatches, step time and bubble share."""
    return (
        f"{times.schedule}, predicted: {times.num_ranks} ranks, {times.microbatches}"
        f" microbatches, step {seconds_text(times.step_seconds)}, bubble share"
        f" {percent(times.bubble_share)}"
    )


def percent(share: float) -> str:
    """A share as text, such as `27.3 %`."""
    return f"{100 * share:.1f} %"


def seconds_text(seconds: float) -> str:
    """A duration as text with four digits, in s, ms or µs."""
    for unit, factor in (("s", 1.0), ("ms", 1e3)):
        if not seconds or seconds * factor >= 1:
            return f"{seconds * factor:.4g} {unit}"
    return f"{seconds * 1e6:.4g} µs"


def _columns(times: ScheduleTimes) -> int:
    """The picture's width in characters: one for each of the shortest slots, if they fit."""
    shortest = min((slot.seconds for slot in times.slots if slot.seconds), default=0.0)
    if not shortest:
        return 1
    return max(1, min(_COLUMNS, round(times.step_seconds / shortest)))


def _row(slots: tuple[Slot, ...], start: float, step: float, columns: int) -> str:
    row = ["."] * columns
    for slot in slots:
        first, last = (round((t - start) / step * columns) if step else 0 for t in slot[-2:])
        letter = slot.kind if slot.microbatch % 2 == 0 else slot.kind.lower()
        row[first:last] = letter * (last - first)
    return "".join(row)
