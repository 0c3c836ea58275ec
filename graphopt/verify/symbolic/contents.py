"""Contents of a graph's storages during evaluation: in-place updates, seen through all aliases.

A node owns its storage or is an alias of another node: a view, the result of an in-place update, a
wait. A read through an alias gives the owner's present value, taken through the chain of views
between both. A write through a view replaces those elements of the owner.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from operator import itemgetter
from typing import Any

from torch import fx

from graphopt.ir.metadata import fake_value
from graphopt.verify.symbolic.evaluation_outcome import NotDecidedError
from graphopt.verify.symbolic.possible_views import PossibleViews
from graphopt.verify.values.axioms import permuted_back
from graphopt.verify.values.terms import (
    PendingResult,
    Segment,
    TensorValue,
    Terms,
    canonical,
    layout_of,
    storage_layout_of,
    whole,
)

View = Callable[[fx.Node, Any], Any]
"""(view node, value of its first argument) -> value of the view."""


class CannotWriteError(Exception):
    """An update of elements whose positions cannot be told apart from others."""


class StorageContents:
    """The current symbolic values of nodes, which change when their storage is updated.

    Args:
        view: (view node, value of its first argument) -> value of the view.

    Attributes:
        current: the values of nodes, except those overwritten through another node since they were
            last read.
        written: the owners whose storage was updated, in order.
        possible: nodes that may or may not share the storage of another one.
    """

    def __init__(self, terms: Terms, view: View) -> None:
        self._terms, self._view = terms, view
        self.current: dict[fx.Node, Any] = {}
        self._base: dict[fx.Node, fx.Node] = {}
        self._same: set[fx.Node] = set()
        self._owner: dict[fx.Node, fx.Node] = {}
        self._aliases: dict[fx.Node, list[fx.Node]] = {}
        self.written: dict[fx.Node, None] = {}
        self._taken: set[fx.Node] = set()
        self.possible = PossibleViews()

    def add(self, node: fx.Node, value: Any, base: fx.Node | None, *, same: bool = False) -> None:
        """Registers a node with its value, as an owner of storage or as an alias.

        Args:
            base: the node whose storage it shares, or None if it has its own.
            same: True if it is `base` itself under another name, not a view of it.
        """
        self.current[node] = value
        if base is None:
            return
        owner = self._owner[node] = self._owner.get(base, base)
        self._base[node] = base
        self._aliases.setdefault(owner, []).append(node)
        if same:
            self._same.add(node)

    def may_share(self, node: fx.Node, sources: Sequence[fx.Node]) -> None:
        """Records that an owner of storage may in truth be a view of one of `sources`."""
        self.possible.add(node, map(self.owner, sources))

    def owners(self, node: fx.Node) -> list[fx.Node]:
        """Returns all nodes that may own a node's storage; nearly always `owner` alone."""
        return self.possible.owners(self.owner(node))

    def has(self, node: fx.Node) -> bool:
        return node in self.current or node in self._base

    def owner(self, node: fx.Node) -> fx.Node:
        """Returns the node whose storage a node shares; itself if it has its own."""
        return self._owner.get(node, node)

    def is_alias(self, node: fx.Node) -> bool:
        """True if a node shares the storage of an earlier node."""
        return node in self._base

    def overlap(self, one: fx.Node, other: fx.Node) -> bool:
        """True if two nodes may have an element of memory in common."""
        owner = self.owner(one)
        if owner is not self.owner(other):
            return False
        places = self._places(owner)
        runs = [self._runs(node, owner, places) for node in (one, other)]
        if runs[0] is None or runs[1] is None:
            return True
        return any(
            a.start < b.start + b.length and b.start < a.start + a.length
            for a in runs[0]
            for b in runs[1]
        )

    def _runs(
        self, node: fx.Node, owner: fx.Node, places: TensorValue
    ) -> tuple[Segment, ...] | None:
        """Returns the ranges of its owner's storage that a node covers. None if they are not
        known."""
        part = self._through(node, owner, places)
        if isinstance(part, TensorValue):
            part, _ = permuted_back(self._terms, part, part) or (part, part)
        term = places.segments[0].term if places.segments else -1
        if not isinstance(part, TensorValue) or any(s.term != term for s in part.segments):
            return None
        return part.segments

    def place(self, node: fx.Node) -> Any:
        """Returns the positions of a node's elements within its owner's storage."""
        owner = self.owner(node)
        return self._through(node, owner, self._places(owner))

    def read(self, node: fx.Node) -> Any:
        """Returns the current value of a node.

        Raises:
            NotDecidedError: an update may have changed it, or its storage was taken.
        """
        if node in self.current:
            return self.current[node]
        base = self._base.get(node)
        if base is None and node in self._taken:
            raise NotDecidedError(
                "an earlier operator has used its storage as scratch memory", node
            )
        if base is None:
            raise NotDecidedError("it may share the storage of a tensor that was updated", node)
        value = self.read(base)
        if node not in self._same:
            value = self._view(node, value)
        self.current[node] = value
        self._aliases[self._owner[node]].append(node)
        return value

    def write(self, node: fx.Node, value: TensorValue) -> None:
        """Overwrites the elements that a node covers with a value.

        Raises:
            CannotWriteError: it is a view whose elements are no range of those of its owner.
            NotDecidedError: it may be a view of one of several nodes, or its storage was taken.
        """
        while node in self._same:
            node = self._base[node]
        owner = self._owner.get(node, node)
        if owner in self.possible:
            raise NotDecidedError("it may share the storage of one of several arguments", owner)
        if owner in self._taken:
            raise NotDecidedError(
                "an earlier operator has used its storage as scratch memory", node
            )
        held = value if owner is node else self._with_part(owner, node, value)
        self.written[owner] = None
        self._forget_aliases(owner)
        for view in self.possible.views_of(owner):
            self.current.pop(view, None)
            self._forget_aliases(view)
        self.current[owner] = held
        if owner is not node:
            self.current[node] = value
            self._aliases[owner].append(node)

    def take(self, node: fx.Node) -> None:
        """Forbids all further reads and writes of a node's storage, under any alias."""
        for owner in self.owners(node):
            for each in (owner, *self.possible.views_of(owner)):
                self._taken.add(each)
                self.current.pop(each, None)
                self._forget_aliases(each)
            self.written.pop(owner, None)

    def _forget_aliases(self, owner: fx.Node) -> None:
        aliases = self._aliases.get(owner)
        if aliases:
            for alias in aliases:
                self.current.pop(alias, None)
            aliases.clear()

    def _with_part(self, owner: fx.Node, node: fx.Node, value: TensorValue) -> TensorValue:
        held = self.current[owner]
        if isinstance(held, PendingResult):  # waited for by now, or it could not be read
            held = held.value
        if not isinstance(held, TensorValue):
            raise CannotWriteError(f"it updates a part of %{owner.name}")
        places = self._places(owner)
        part = self._through(node, owner, places)
        segments = self._with_range(places, held, part, value)
        if segments is not None:
            return TensorValue(segments, *layout_of(fake_value(owner)))
        if _may_overlap(value):
            raise CannotWriteError(f"it updates a part of %{owner.name}")
        key = ("written", canonical(held), canonical(part), canonical(value))
        return whole(self._terms.make(key), fake_value(owner))

    def _places(self, owner: fx.Node) -> TensorValue:
        """Returns a symbolic index tensor: the position of each element within its storage."""
        layout = storage_layout_of(fake_value(owner))
        return whole(self._terms.make(("places", *map(str, layout))), fake_value(owner))

    def _with_range(
        self, places: TensorValue, held: TensorValue, part: Any, value: TensorValue
    ) -> tuple[Segment, ...] | None:
        """Returns the elements of `held` after `value` overwrote `part`. None if `part` is not
        ranges."""
        if not held.is_static or not value.is_static or not places.segments:
            return None
        part, value = permuted_back(self._terms, part, value) or (part, value)
        term = places.segments[0].term
        if not isinstance(part, TensorValue) or any(s.term != term for s in part.segments):
            return None
        if sum(s.length for s in part.segments) != sum(s.length for s in value.segments):
            return None
        offsets = accumulate((s.length for s in part.segments), initial=0)
        rows: list[Segment] = []
        end = 0
        for (_, start, length), offset in sorted(zip(part.segments, offsets, strict=False)):
            if start < end:
                return None
            rows += self._terms.part(held.segments, end, start - end)
            rows += self._terms.part(value.segments, offset, length)
            end = start + length
        rows += self._terms.part(held.segments, end, sum(s.length for s in held.segments) - end)
        return self._terms.segments(rows)

    def _through(self, node: fx.Node, owner: fx.Node, value: Any) -> Any:
        """Applies the chain of views between an owner and a node to a value of the owner."""
        chain = []
        while node is not owner:
            chain.append(node)
            node = self._base[node]
        for view in reversed(chain):
            value = value if view in self._same else self._view(view, value)
        return value


def _may_overlap(value: TensorValue) -> bool:
    """True if two elements of a tensor may share one address, so that a write to one changes
    both."""
    steps = [(s, n) for s, n in zip(value.stride, value.shape, strict=True) if n != 1]
    if not all(isinstance(stride, int) for stride, _ in steps):
        return True
    reach: int | None = 0
    for stride, size in sorted(steps, key=itemgetter(0)):
        if reach is None or stride <= reach:
            return True
        reach = reach + (size - 1) * stride if isinstance(size, int) else None
    return False


def with_layout(value: Any, like: Any) -> Any:
    """Returns the same elements under the shape, strides, dtype and device of `like`."""
    if not isinstance(value, TensorValue):
        return value
    layout = layout_of(like)
    if (value.shape, value.stride, value.dtype, value.device) == layout:
        return value
    return TensorValue(value.segments, *layout)
