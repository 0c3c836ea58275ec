"""A simulated step as text: one row for each collective."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from graphopt.readable.columns import aligned, first_of, readable_bytes
from graphopt.schedule.pictures import NAMES_SHOWN, reader_text

if TYPE_CHECKING:
    from graphopt.schedule.timeline import CollectiveSlot, Timeline

_HEADS = ("launch", "sends", "time", "distance", "exposed", "waited for by", "parameters")


def collectives_text(step: Timeline) -> str:
    """Formats a table of a step's collectives: bytes, predicted time, nodes from launch to wait,
    exposed time, the reader that forces the wait, and whose values are sent. Empty without
    collectives.

    >>> from graphopt.schedule import collectives_text
    >>> text = collectives_text(graphopt.simulate(gm, world_size=2))
    >>> text.splitlines()[1].split()[:2]
    ['launch', 'sends']
    """
    if not step.collectives:
        return ""
    lines = aligned([_HEADS, *(tuple(_cells(slot)) for slot in step.collectives)])
    return "\n".join([f"collectives, predicted: {step}", *lines]) + "\n"


def _cells(slot: CollectiveSlot) -> Iterator[str]:
    message = slot.message
    yield f"%{message.launch.name}"
    yield readable_bytes(message.nbytes)
    yield f"{1e3 * message.transfer.seconds:.3f} ms"
    yield "" if slot.distance is None else str(slot.distance)
    yield f"{1e3 * slot.exposed:.3f} ms"
    yield reader_text(slot)
    yield first_of(message.parameters, NAMES_SHOWN)
