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
from graphopt.verify.dependency.matching import End, NodeMatching, Sink, correspondence_by_name
from graphopt.verify.dependency.segments import Sources, union
from graphopt.verify.dependency.sent_elements import less_sent
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
    problems = list(structure.topology(new))
    if problems:
        return DependencyReport(problems)
    if correspondence is None:
        correspondence = correspondence_by_name(old, new)
    was, now = MemoryOrder(old), MemoryOrder(new)
    matching = NodeMatching(was, now, correspondence)
    same = matching.same
    return DependencyReport(
        [
            *structure.interface(old, new),
            *structure.late_nodes(new),
            *structure.waits(old, now, same),
            *(less_sent(old, new, same, same_dtypes=same_dtypes) if same_communication else ()),
            *structure.state(was, now, same),
            *structure.write_order(was, new, same),
            *structure.randomness(old, new, same),
            *structure.host_calls(old, new, same),
            *structure.updates_around_calls(was, now, same),
            *(
                Problem(f"{_end_name(end)} is a constant that it was not, or none any more")
                for end in matching.constants
            ),
            *_lost(was, now, matching, kinds=same_communication),
        ]
    )


def _lost(
    before: MemoryOrder, after: MemoryOrder, matching: NodeMatching, *, kinds: bool
) -> list[Problem]:
    """Returns a problem for each source that a sink of the graph before needed and no longer
    needs."""
    if not matching.sinks:
        return []
    anchors = matching.anchors
    numbers: dict[fx.Node, int] = {}

    def number(old: fx.Node) -> int:
        return numbers.setdefault(old, len(numbers))

    old = GraphSources(before, set(anchors.values()), number, cut=True, kinds=kinds)
    new = GraphSources(after, anchors, lambda n: number(anchors[n]), cut=True, kinds=kinds)
    lost: dict[Sink, Sources] = {}
    for sink in matching.sinks:
        sources = missing(sink.sources(old, sink.before), sink.sources(new, sink.after))
        if sources:
            lost[sink] = sources
    if not lost:
        return []
    # Nearly always what a sink needs reaches it without passing another anchor; only the rest is
    # looked for in the whole graph.
    wanted = union(lost.values()).values()
    looked_for = {
        node: numbers[was]
        for node, was in anchors.items()
        if was in numbers and any(bits >> numbers[was] & 1 for bits in wanted)
    }
    whole = GraphSources(after, looked_for, looked_for.__getitem__, cut=False, kinds=kinds)
    nodes = {number: node for node, number in looked_for.items()}
    found = (
        (sink, list(_named(missing(sources, sink.sources(whole, sink.after)), nodes)))
        for sink, sources in lost.items()
    )
    return [_problem(sink, sources, matching.same) for sink, sources in found if sources]


def _problem(sink: Sink, lost: list[_LostSource], same: Mapping[fx.Node, fx.Node]) -> Problem:
    reader = sink.after.node
    dropped = None if sink.end is not None else _dropped(reader, sink.before.node, same)
    if dropped is not None:
        return dropped
    lost = sorted(lost, key=lambda found: found.node, reverse=True)
    source, collectives = lost[0]
    subject = f"%{reader.name}" if sink.end is None else _end_name(sink.end)
    through = " and ".join(map(signature_text, sorted(collectives)))
    if sink.end is None and source > reader:
        message = f"{subject} stands before %{source.name} now, which it needs"
    elif through:
        message = f"{subject} does not get %{source.name} through {through} any more"
    else:
        message = f"{subject} does not depend on %{source.name} any more"
    sources = tuple(dict.fromkeys(node for node, _ in lost[:_NAMED]))
    if len(sources) > 1:
        message += ", nor on others" if len(lost) > _NAMED else ", nor on the other(s) below"
    return Problem(message, (reader, *(node for node in sources if node is not reader)))


def _dropped(reader: fx.Node, before: fx.Node, same: Mapping[fx.Node, fx.Node]) -> Problem | None:
    """Returns the problem of a node that reads fewer values than before, naming those it
    misses."""
    new_of = {old: new for new, old in same.items()}
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
