"""What has been seen to repeat: graphs of a step, and the instructions that traces went through.

A capture traces a step twice, to see that nothing outside decides the graph in a way that is not
seen. What the step may get from there, it gets by an instruction: it loads a variable, an
attribute, an item, or calls a function that may be no Python. Where each of those that a trace has
executed was executed by traces of the same step that have been repeated, another shape or another
branch is nothing new.

    graph 1   trace ── trace     {load model, call forward, …}
    graph 2   trace              of another shape: the same ones
    graph 3   trace ── trace     and `if log: record(loss)`
    graph 4   trace              of another shape, with `record`
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from graphopt.tracing.outside.accesses import OutsideAccess
from graphopt.tracing.trace import RawTrace

Executed = Mapping[int, OutsideAccess]
"""Instructions that may read or write outside, by id."""


class KnownGraph(Protocol):
    """A graph that has been seen to repeat: its fingerprint, and what its trace executed."""

    @property
    def fingerprint(self) -> str: ...

    @property
    def executed(self) -> Executed: ...


@dataclass(frozen=True)
class SettledTraces:
    """What traces of one step have been seen to repeat.

    Attributes:
        fingerprints: of graphs; see `compare.fingerprint`.
        executed: what traces of them went through.
    """

    fingerprints: frozenset[str] = frozenset()
    executed: Executed = field(default_factory=dict)

    @classmethod
    def by(cls, graphs: Iterable[KnownGraph]) -> SettledTraces:
        """What there is after some graphs."""
        executed: dict[int, OutsideAccess] = {}
        fingerprints = set()
        for graph in graphs:
            fingerprints.add(graph.fingerprint)
            executed.update(graph.executed)
        return cls(frozenset(fingerprints), executed)

    def has(self, mark: str, raw: RawTrace) -> bool:
        """Whether a trace need not be repeated.

        Args:
            mark: its fingerprint.
        """
        outside = raw.outside
        if outside.changed is not None or outside.unrepeated.first is not None:
            return False
        if mark in self.fingerprints:
            return True
        if raw.effects or not outside.executed:  # none: this interpreter is not looked into
            return False
        return outside.executed.keys() <= self.executed.keys()


NOTHING_SETTLED = SettledTraces()
