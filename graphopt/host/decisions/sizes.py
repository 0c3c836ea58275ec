"""Size assumptions: nodes that let a graph go on only if it holds for data-dependent sizes.

    chosen = x[mask]                    index      = aten.index(x, [mask])          # f32[s0, 4]
    loss = net(chosen).mean()    ==>    assumption = graphopt.assumption(index, w)  # s0 >= 2
                                        …

A graph is captured for the sizes that tensors have in one call, kept as symbols. It holds for the
answers that were given on the way (is it empty? is it as long as that one? does it divide by 4?).
Where a step needs plain numbers, it holds for these numbers alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx

from graphopt._compat.sizes import AnsweredQuestions, Place
from graphopt.host.decisions.assumptions import Answer, Assumption


class Sizes(tuple[int, ...]):
    """The data-dependent sizes that one operator has given: the outcome of a size assumption."""

    __slots__ = ()


class Relations:
    """The relations between data-dependent sizes that a graph relies on.

    Args:
        guards: what was asked about those that are symbols.

    Attributes:
        found: the sizes in the call that runs, or ran last, by the assumption.
    """

    def __init__(self, guards: AnsweredQuestions) -> None:
        self._guards = guards
        self._symbols: dict[int, Sequence[Any]] = {}
        self._plain: dict[int, Sizes] = {}
        self.found: dict[int, Sizes] = {}

    def add(
        self, index: int, answer: Sizes, places: Sequence[Place], symbols: Sequence[Any]
    ) -> None:
        """Adds the sizes of assumption `index`: a symbol each, or None for a plain number."""
        self._symbols[index], self._plain[index] = symbols, answer
        for place, symbol in zip(places, symbols, strict=True):
            if symbol is not None:
                self._guards.add(symbol, index, place[1] is not None)

    def hold(self, index: int, found: Mapping[int, Sizes]) -> bool:
        """True if the relations hold up to assumption `index`, given that the earlier ones do."""
        pairs = zip(found[index], self._plain[index], self._symbols[index], strict=True)
        if any(symbol is None and now != before for now, before, symbol in pairs):
            return False
        numbers = {
            symbol: number
            for i in self._symbols
            if i <= index
            for symbol, number in zip(self._symbols[i], found[i], strict=True)
        }
        return self._guards.hold(index, numbers)


class SizeAssumption(Assumption):
    """The target of a node that checks sizes against those at capture.

    Args:
        places: of the sizes, in the values that the node takes.
        relations: of all sizes of the graph.
        alone: ranks have sizes of their own.
    """

    def __init__(
        self,
        index: int,
        line: str,
        places: Sequence[Place],
        count: int,
        relations: Relations,
        alone: bool = False,
    ) -> None:
        super().__init__(index, line, alone)
        self.count = count
        self.relations = relations
        self._places = places

    def outcome(self, values: Sequence[Any]) -> Sizes:
        found = Sizes(
            int(values[which]) if dimension is None else values[which].shape[dimension]
            for which, dimension in self._places
        )
        self.relations.found[self.index] = found
        return found

    def holds(self, found: Answer) -> bool:
        return self.relations.hold(self.index, self.relations.found)


def found_before(graph: fx.Graph, index: int) -> dict[int, Sizes]:
    """The sizes that the last run of a graph found before assumption `index`."""
    relations = _relations(graph)
    if relations is None:
        return {}
    return {i: found for i, found in relations.found.items() if i < index}


def answered_alike(graph: fx.Graph, answers: Sequence[Answer], others: Sequence[Answer]) -> bool:
    """True if a graph that was captured for some outcomes of decisions holds for other calls."""
    if len(others) > len(answers):
        return False
    sized = any(isinstance(other, Sizes) for other in others)
    relations = _relations(graph) if sized else None
    found: dict[int, Sizes] = {}
    for index, (mine, other) in enumerate(zip(answers, others, strict=False)):
        if type(mine) is not type(other):
            return False
        if not isinstance(other, Sizes):
            if mine != other:
                return False
            continue
        found[index] = other
        if relations is None or not relations.hold(index, found):
            return False
    return True


def _relations(graph: fx.Graph) -> Relations | None:
    targets = (node.target for node in graph.nodes)
    return next((t.relations for t in targets if isinstance(t, SizeAssumption)), None)
