"""Graph listings as columns of plain text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from graphopt.readable.listing import Listing, ListingRow

_TEXT_WIDTH = 64
_SHAPE_WIDTH = 16


def listing_text(listing: Listing, *, bytes: bool = True, places: bool = True) -> str:
    """The text of a listing: a summary, then a row per node under headings of phases, without
    collectives' costs."""
    lines = [*listing.summary, ""]
    for title, rows in listing.sections:
        lines.append(heading(title))
        lines += [line(row, bytes=bytes, places=places) for row in rows]
    return "\n".join(lines) + "\n"


def heading(title: str) -> str:
    """The heading line above a part of a listing."""
    return f"── {title} ──"


def line(row: ListingRow, *, bytes: bool, places: bool) -> str:
    """A listing row as one line of text."""
    return "".join(text for _, text in cells(row, bytes=bytes, places=places)).rstrip()


def cells(row: ListingRow, *, bytes: bool, places: bool) -> Iterator[tuple[str, str]]:
    """The columns of a listing row, padded, with their names."""
    yield "marks", f"{row.marks:<3}"
    yield "text", f"{row.text:<{_TEXT_WIDTH}}  "
    yield "shape", f"{row.shape:<{_SHAPE_WIDTH}}  "
    if bytes:
        yield "size", f"{'' if row.size is None else readable_bytes(row.size):>10}  "
    if row.note:
        yield "note", f"{row.note}  "
    if places:
        yield "place", row.place


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """The rows of a table as lines, each column as wide as its widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def first_of(names: Sequence[str], shown: int) -> str:
    """The first names and the number of further ones, as in ``a, b and 3 more``."""
    more = len(names) - shown
    return ", ".join(names[:shown]) + (f" and {more} more" if more > 0 else "")


def readable_bytes(count: int) -> str:
    """A number of bytes as text: ``512 B``, ``1.5 KiB``, ``3.0 MiB``.

    >>> from graphopt.readable import readable_bytes
    >>> readable_bytes(3 << 20)
    '3.0 MiB'
    """
    if count < 1024:
        return f"{count} B"
    amount, unit = float(count), "B"
    for unit in ("KiB", "MiB", "GiB", "TiB"):  # noqa: B007
        amount /= 1024
        if amount < 1024:
            break
    return f"{amount:.1f} {unit}"
