"""A check that a rewritten graph keeps every dependency of the original graph.

    g0 ─ all_reduce ─ wait ─ adamw          g0 ─ cat ─ all_reduce ─ wait ─ split ─ adamw
                                     ──>    g1 ─┘                            └──── adamw
    g1 ─ all_reduce ─ wait ─ adamw

Nodes that both graphs have are *anchors*. What a pass took out or put in lies between anchors and
is read element by element (`graphopt.verify.dependency.sources`); a value that went through a
collective from one anchor to another must still go through it. So of both steps above remains the
same: each update needs its own gradient, reduced.

This is no proof that the same values are computed: an operator may have been replaced by another
one with the same inputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import NamedTuple

from torch import fx

from graphopt.graph_utils.nodes import graph_of
from graphopt.ir.accesses import MemoryOrder
from graphopt.verify.checks import structure
from graphopt.verify.dependency import sent_elements
from graphopt.verify.dependency.matching import End, NodeMatching, Sink, correspondence_by_name
from graphopt.verify.dependency.segments import Sources, union
from graphopt.verify.dependency.signatures import Signature, signature_text
from graphopt.verify.dependency.sources import GraphSources, missing
from graphopt.verify.problems import DependencyReport, Problem

_NAMED = 3
"""The number of lost sources that are named for one reader."""


def check_dependencies(
    before: fx.GraphModule | fx.Graph,
    after: fx.GraphModule | fx.Graph,
    *,
    correspondence: Mapping[fx.Node, fx.Node] | None = None,
    same_dtypes: bool = True,
    same_communication: bool = True,
) -> DependencyReport:
    """Checks that `after` keeps every dependency of `before`.

    Checked are: values, through views and updates in place; the order of random numbers; that
    every collective is sent in full, has one wait, and is read after it; state updates and outputs.
    The order in which collectives are launched is free.

    Near-linear in the number of nodes. Changes nothing. What `graphopt.executable.finalize` makes
    of a graph is compared by `check_finalized` instead.

    Args:
        before: the graph that a pass was given, or a copy of it.
        after: what the pass made of it.
        correspondence: node of `after` -> node of `before`; None: nodes of one name correspond.
        same_dtypes: whether collectives have to send what they sent in the same dtype; not so after
            a pass that changes numerics, such as one that compresses gradients.
        same_communication: whether collectives have to send as much as before, and to be of the
            same kinds.

    >>> print(graphopt.verify.check_dependencies(gm, gm))
    the graph keeps every dependency
    """
    old, new = graph_of(before), graph_of(after)
    if correspondence is None:
        correspondence = correspondence_by_name(old, new)
    same = CommunicationKept(same_dtypes, same_communication)
    return compare_dependencies(old, new, correspondence, same)


class CommunicationKept(NamedTuple):
    """Properties of a graph's collectives that a pass must keep.

    Attributes:
        dtypes: collectives must keep their dtypes.
        amounts: they must send as many elements, through the same kinds of collectives.
    """

    dtypes: bool = True
    amounts: bool = True


_ALL = CommunicationKept()


def compare_dependencies(
    before: fx.Graph,
    after: fx.Graph,
    correspondence: Mapping[fx.Node, fx.Node],
    same: CommunicationKept = _ALL,
) -> DependencyReport:
    """Checks one pair of graphs as `check_dependencies` does."""
    problems = list(structure.topology(after))
    if problems:
        return DependencyReport(problems)
    known = before, MemoryOrder(before)
    comparison = _Comparison(known, (after, MemoryOrder(after)), correspondence, same)
    return DependencyReport(comparison.problems())


class _Comparison:
    """Two graphs, their effects on memory, and the correspondence between their nodes."""

    def __init__(
        self,
        before: tuple[fx.Graph, MemoryOrder],
        after: tuple[fx.Graph, MemoryOrder],
        correspondence: Mapping[fx.Node, fx.Node],
        communication: CommunicationKept,
    ) -> None:
        self._before, self._after = before, after
        self._communication = communication
        self._matching = NodeMatching(self._before, self._after, correspondence)
        self._position = {node: index for index, node in enumerate(after[0].nodes)}

    def problems(self) -> list[Problem]:
        same, kept = self._matching.same, self._communication
        (before, _), (after, memory) = self._before, self._after
        fewer = sent_elements.less_sent(before, after, same, same_dtypes=kept.dtypes)
        return [
            *structure.interface(before, after),
            *structure.late_nodes(after),
            *structure.waits(before, after, memory, same),
            *(fewer if kept.amounts else ()),
            *structure.state(self._before, self._after, same),
            *structure.write_order(self._before[1], after, same),
            *structure.randomness(before, after, same),
            *structure.host_calls(before, after, same),
            *structure.updates_around_calls(self._before, self._after, same),
            *(
                Problem(f"{_end_name(end)} is a constant that it was not, or none any more")
                for end in self._matching.constants
            ),
            *self.lost(),
        ]

    @property
    def same(self) -> Mapping[fx.Node, fx.Node]:
        """Maps nodes of the graph after to the nodes before that do the same."""
        return self._matching.same

    def lost(self) -> list[Problem]:
        """Returns a problem for each source that a sink of the graph before needed and no longer
        needs."""
        sinks = self._matching.sinks
        if not sinks:
            return []
        anchors, kinds = self._matching.anchors, self._communication.amounts
        numbers: dict[fx.Node, int] = {}

        def number(old: fx.Node) -> int:
            return numbers.setdefault(old, len(numbers))

        def number_after(new: fx.Node) -> int:
            return number(anchors[new])

        before = self._matching.anchors_before
        old = GraphSources(*self._before, before, number, cut=True, kinds=kinds)
        new = GraphSources(*self._after, anchors, number_after, cut=True, kinds=kinds)
        found = [
            (sink, missing(sink.sources_before(old), sink.sources_after(new))) for sink in sinks
        ]
        lost = {sink: sources for sink, sources in found if sources}
        if not lost:
            return []
        # Nearly always what a sink needs reaches it without passing another anchor; only the rest
        # is looked for in the whole graph.
        wanted = union(lost.values()).values()
        looked_for = {
            node: numbers[was]
            for node, was in anchors.items()
            if was in numbers and any(bits >> numbers[was] & 1 for bits in wanted)
        }
        whole = GraphSources(
            *self._after, looked_for, looked_for.__getitem__, cut=False, kinds=kinds
        )
        found = [
            (sink, missing(wanted, sink.sources_after(whole))) for sink, wanted in lost.items()
        ]
        nodes = {number: node for node, number in looked_for.items()}
        return [
            self._problem(sink, list(_named(sources, nodes))) for sink, sources in found if sources
        ]

    def _dropped(self, sink: Sink) -> Problem | None:
        """Returns the problem of a node that reads fewer values than before, naming those it
        misses."""
        reader, before = sink.after.node, sink.before.node
        new_of = {old: new for new, old in self.same.items()}
        now = reader.all_input_nodes
        missing = [node for node in before.all_input_nodes if new_of.get(node) not in now]
        if not missing or len(now) >= len(before.all_input_nodes):
            return None
        names = ", ".join(f"%{node.name}" for node in missing[:_NAMED])
        message = (
            f"%{reader.name} read {len(before.all_input_nodes)} values, and reads {len(now)} now:"
            f" {names} {'is' if len(missing) == 1 else 'are'} missing"
        )
        return Problem(message, (reader, *missing[:_NAMED]))

    def _problem(self, sink: Sink, lost: list[_LostSource]) -> Problem:
        reader = sink.after.node
        dropped = None if sink.end is not None else self._dropped(sink)
        if dropped is not None:
            return dropped
        lost = sorted(lost, key=lambda found: self._position[found.node], reverse=True)
        source, collectives = lost[0]
        subject = f"%{reader.name}" if sink.end is None else _end_name(sink.end)
        through = " and ".join(map(signature_text, sorted(collectives)))
        if sink.end is None and self._position[source] > self._position[reader]:
            message = f"{subject} stands before %{source.name} now, which it needs"
        elif through:
            message = f"{subject} does not get %{source.name} through {through} any more"
        else:
            message = f"{subject} does not depend on %{source.name} any more"
        sources = tuple(dict.fromkeys(node for node, _ in lost[:_NAMED]))
        if len(sources) > 1:
            message += ", nor on others" if len(lost) > _NAMED else ", nor on the other(s) below"
        return Problem(message, (reader, *(node for node in sources if node is not reader)))


class _LostSource(NamedTuple):
    """A source that a sink has lost, and the collectives that it came through."""

    node: fx.Node
    through: frozenset[Signature]


def _named(lost: Sources, nodes: Mapping[int, fx.Node]) -> Iterator[_LostSource]:
    """Yields some of the lost sources for each set of collectives."""
    for through, bits in lost.items():
        found = (node for number, node in nodes.items() if bits >> number & 1)
        yield from (_LostSource(node, through) for node in islice(found, _NAMED))


def _end_name(end: End) -> str:
    kind, slot = end
    if isinstance(slot, fx.Node):
        return f"the update of %{slot.name}"
    return f"{'result' if kind == 'result' else 'carried value'} {slot} of the step"
