"""Collectives in flight: the storages that they still read, and the constants that they send."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

from graphopt.ir.metadata import fake_value
from graphopt.ir.operators import nodes_in, operator_of
from graphopt.ir.views import launch_of
from graphopt.verify.values.terms import Segment, TensorValue, Terms, elements_of


class CollectivesInFlight:
    """The storages that collectives read until their waits.

    Args:
        owners: node -> the nodes that may own its storage.
    """

    def __init__(self, owners: Callable[[fx.Node], list[fx.Node]]) -> None:
        self._owners = owners
        self._open: dict[fx.Node, tuple[set[fx.Node], int]] = {}
        self._readers: dict[fx.Node, list[fx.Node]] = {}

    def launched(self, launch: fx.Node) -> None:
        """Records the launch of a collective."""
        if operator_of(launch).reads_until_wait:
            held = fake_value(launch)
            waits = len(held) if isinstance(held, (list, tuple)) else 1
            sent = nodes_in(launch.args[0])
            self._open[launch] = {owner for node in sent for owner in self._owners(node)}, waits
            for owner in self._open[launch][0]:
                self._readers.setdefault(owner, []).append(launch)

    def waited(self, wait: fx.Node) -> None:
        """Records the wait for a collective, or for one of its results."""
        launch = launch_of(wait)
        if launch is None or launch not in self._open:
            return
        owners, waits = self._open.pop(launch)
        if waits > 1:
            self._open[launch] = owners, waits - 1
            return
        for owner in owners:
            self._readers[owner].remove(launch)

    def reader_of(self, node: fx.Node) -> fx.Node | None:
        """Returns a collective that still reads the storage of a node, or None."""
        owners = self._owners(node) if self._open else []
        return next((reader for owner in owners for reader in self._readers.get(owner, ())), None)


def mark_sent_constants(terms: Terms, sent: Any, place: tuple[int, ...]) -> Any:
    """Marks the constants in a sent value as this collective's own, since other ranks send their
    own values in their place.

    Args:
        place: the number of the collective, equal on all ranks.
    """
    if isinstance(sent, tuple):
        return tuple(mark_sent_constants(terms, v, (*place, i)) for i, v in enumerate(sent))
    if not isinstance(sent, TensorValue):
        return sent
    found, offset = [], 0
    for segment in sent.segments:
        if terms[segment.term].constant:
            key = ("sent constant", place, elements_of(segment.term), segment.start - offset)
            segment = Segment(terms.make(key, constant=True), offset, segment.length)
        found.append(segment)
        offset += segment.length
    return TensorValue(tuple(found), sent.shape, sent.stride, sent.dtype, sent.device)
