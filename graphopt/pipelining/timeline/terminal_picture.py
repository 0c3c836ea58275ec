"""A schedule in characters, and its figures in words."""

from __future__ import annotations

from graphopt.pipelining.timeline.slots import ScheduleTimes, Slot

_COLUMNS = 96


def terminal_picture(times: ScheduleTimes) -> str:
    """A line of letters for each rank: what it runs at that time, a dot where it is idle.

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
    """`1f1b, predicted: 4 ranks, 8 microbatches, step 33 s, bubble share 27.3 %`."""
    return (
        f"{times.schedule}, predicted: {times.num_ranks} ranks, {times.microbatches}"
        f" microbatches, step {seconds_text(times.step_seconds)}, bubble share"
        f" {percent(times.bubble_share)}"
    )


def percent(share: float) -> str:
    """`27.3 %`."""
    return f"{100 * share:.1f} %"


def seconds_text(seconds: float) -> str:
    """Seconds with four digits, in s, ms or µs."""
    for unit, factor in (("s", 1.0), ("ms", 1e3)):
        if not seconds or seconds * factor >= 1:
            return f"{seconds * factor:.4g} {unit}"
    return f"{seconds * 1e6:.4g} µs"


def _columns(times: ScheduleTimes) -> int:
    """One for each of the shortest slots, where that many fit."""
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
