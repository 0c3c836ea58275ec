"""Storages that may be views of one of several others, such as the result of `einsum`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import fx


class PossibleViews:
    """Owners of storage that may in truth be views of others, such as the result of `einsum`."""

    def __init__(self) -> None:
        self._sources: dict[fx.Node, list[fx.Node]] = {}
        self._views: dict[fx.Node, list[fx.Node]] = {}

    def __contains__(self, owner: fx.Node) -> bool:
        return owner in self._sources

    def __bool__(self) -> bool:
        return bool(self._sources)

    def add(self, owner: fx.Node, sources: Iterable[fx.Node]) -> None:
        """Registers a node that may share the storage of one of the owners `sources`."""
        found = self._sources[owner] = list(dict.fromkeys(sources))
        for source in found:
            self._views.setdefault(source, []).append(owner)

    def owners(self, owner: fx.Node) -> list[fx.Node]:
        """Returns all nodes that may own a storage; the owner itself if that is certain."""
        sources = self._sources.get(owner)
        if sources is None:
            return [owner]
        return list(dict.fromkeys(found for source in sources for found in self.owners(source)))

    def views_of(self, owner: fx.Node) -> Iterator[fx.Node]:
        """Yields the nodes that may be views of an owner."""
        for view in self._views.get(owner, ()):
            yield view
            yield from self.views_of(view)
