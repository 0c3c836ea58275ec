"""Structural checks of a rewritten graph: order, random numbers, collectives, state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import zip_longest
from operator import attrgetter
from typing import Any

from torch import fx

from graphopt.graph_utils import get_output, get_outputs
from graphopt.host import is_host_call
from graphopt.ir.accesses import MemoryOrder
from graphopt.ir.entries import Entry
from graphopt.ir.metadata import known_value
from graphopt.ir.operators import calls_of, draws, operator_of
from graphopt.ir.placement import placement_of
from graphopt.iter_graph import IterGraph
from graphopt.verify.problems import Problem

Same = Mapping[fx.Node, fx.Node]


def topology(graph: fx.Graph) -> Iterator[Problem]:
    """Yields each node that precedes a node whose value it reads."""
    seen: set[fx.Node] = set()
    for node in graph.nodes:
        for source in node.all_input_nodes:
            if source not in seen:
                yield Problem(
                    f"%{node.name} reads %{source.name} before the value exists",
                    (node, source),
                    "insert the new reader after all of its inputs",
                )
        seen.add(node)


def _other_placements(old: Sequence[fx.Node], new: Sequence[fx.Node]) -> Iterator[Problem]:
    """Yields each input whose placement on the ranks changed."""
    for node, was in zip(new, old, strict=True):
        if placement_of(node) != placement_of(was):
            kinds = f"{placement_of(node)}, before it was {placement_of(was)}"
            yield Problem(f"the placement of %{node.name} is {kinds}", (node,))


def interface(before: fx.Graph, after: fx.Graph) -> Iterator[Problem]:
    """Yields changes of a graph's inputs or of its number of results."""
    old, new = (g.find_nodes(op="placeholder") for g in (before, after))
    if [node.target for node in old] != [node.target for node in new]:
        yield Problem("the placeholders are not those of the graph before, in the same order")
    else:
        yield from _other_placements(old, new)
    was, now = get_outputs(before), get_outputs(after)
    for what, one, other in (
        ("result", was.results, now.results),
        ("carried value", was.carried, now.carried),
    ):
        if len(one) != len(other):
            added = tuple(v for v in other[len(one) :] if isinstance(v, fx.Node))
            yield Problem(
                f"the step returned {len(one)} {what}{'s' * (len(one) != 1)}, now {len(other)}",
                added[:1] or (get_output(after),),
                "what a step returns is fixed; graphopt.host.insert_callback gives values of every"
                " step to a function",
            )


def late_nodes(graph: fx.Graph) -> Iterator[Problem]:
    """Yields each node of this iteration that reads a value of the next one."""
    late = graph.late if isinstance(graph, IterGraph) else {}
    for node in late:
        for user in node.users:
            if user not in late and user.op != "output":
                yield Problem(
                    f"%{user.name} reads %{node.name}, which runs one iteration later",
                    (user, node),
                    "move the reader to the next iteration as well, or leave both",
                )


def randomness(before: fx.Graph, after: fx.Graph, same: Same) -> Iterator[Problem]:
    """Yields the first change in the sequence of random draws."""
    old, new = ([n for n in g.nodes if draws(n)] for g in (before, after))
    kept = {same[node] for node in new if node in same}
    for was, now in zip_longest(old, new):
        if was is None:
            yield Problem(f"%{now.name} draws random numbers that were not drawn before", (now,))
        elif now is None:
            yield Problem(f"the random numbers of %{was.name} are not drawn any more", (was,))
        elif same.get(now) is not was and (now in same or was in kept or was.target != now.target):
            yield Problem(
                f"%{now.name} draws random numbers where %{was.name} drew them before",
                (now, was),
                "keep the order of random nodes, and neither add nor remove one",
            )
        else:
            continue
        return


def host_calls(before: fx.Graph, after: fx.Graph, same: Same) -> Iterator[Problem]:
    """Yields changes in the sequence or the arguments of the program's host calls; passes may add
    others."""
    old = [node for node in before.nodes if is_host_call(node)]
    targets = {node.target for node in old}
    new = [node for node in after.nodes if is_host_call(node)]
    yield from _repeated(new)
    kept = [node for node in new if node in same or node.target in targets]
    for number, call in enumerate(kept[: len(old)]):
        was = old[number]
        if same.get(call) is not was:
            yield Problem(
                f"%{call.name} calls a function where %{was.name} called one before",
                (call, was),
                "keep the order of callbacks, and remove none",
            )
            return
        yield from _other_values(call, old[number], same)
    for was in old[len(kept) :]:
        yield Problem(f"the function of %{was.name} is not called any more", (was,))


def _repeated(calls: list[fx.Node]) -> Iterator[Problem]:
    seen: dict[object, fx.Node] = {}
    for node in calls:
        first = seen.setdefault(node.target, node)
        if first is not node:
            yield Problem(f"%{node.name} calls the function of %{first.name} again", (node, first))


def updates_around_calls(before: MemoryOrder, after: MemoryOrder, same: Same) -> Iterator[Problem]:
    """Yields state updates that moved across a host call that may raise. A call that no update
    follows may be passed, since its error is raised after the step."""
    kept = set(same.values())
    was = _calls_before_updates(before, lambda call: call in kept)
    now = _calls_before_updates(after, lambda call: call in same)
    late = set(after.graph.late) if isinstance(after.graph, IterGraph) else set()
    for target, (update, calls) in now.items():
        if target not in was or update in late:
            continue
        passed = {same[call] for call in calls} ^ set(was[target][1])
        wrong = [call for call in passed if not getattr(call.target, "last", False)]
        if wrong:
            yield Problem(
                f"the update %{update.name} passes %{wrong[0].name}, which ends the step if it"
                " raises",
                (update, wrong[0]),
                "keep updates of state on their side of callbacks",
            )


def _calls_before_updates(
    memory: MemoryOrder, counts: Callable[[fx.Node], bool]
) -> dict[Any, tuple[fx.Node, list[fx.Node]]]:
    """Maps each updated placeholder to its last update and the calls before that."""
    updates = {write.node: node.target for node, write in memory.final.items()}
    found: dict[Any, tuple[fx.Node, list[fx.Node]]] = {}
    calls: list[fx.Node] = []
    for node in memory.graph.nodes:
        if is_host_call(node) and counts(node):
            calls = [*calls, node]
        elif node in updates:
            found[updates[node]] = node, calls
    return found


def _other_values(now: fx.Node, was: fx.Node, same: Same) -> Iterator[Problem]:
    """Yields host-call arguments that were replaced by other values of the step."""
    kept = set(same.values())
    if len(now.args) != len(was.args) or now.kwargs != was.kwargs:
        yield Problem(f"%{now.name} gives its function other arguments than before", (now, was))
        return
    for new, old in zip(now.args, was.args, strict=True):
        if isinstance(new, fx.Node) and isinstance(old, fx.Node):
            if same.get(new, old) is not old and old in kept:
                yield Problem(f"%{now.name} gives its function %{new.name} for %{old.name}", (now,))
        elif new != old:
            yield Problem(f"%{now.name} gives its function {new} for {old}", (now,))


def waits(before: fx.Graph, after: MemoryOrder, same: Same) -> Iterator[Problem]:
    """Yields collectives without one wait per result, and readers before the wait. A result that
    was carried to the next iteration without a wait may still be."""
    left, still = _pending_outputs(before), _pending_outputs(after.graph)
    for launch in calls_of(after.graph, attrgetter("collective")):
        if same.get(launch) not in left or launch not in still:
            yield from _waits_of(launch)
    for reader, sources in after.implicit.items():
        for source, write in sources.items():
            if operator_of(write.node).collective:
                yield Problem(
                    f"%{reader.name} reads %{source.name} while %{write.node.name} is under way",
                    (reader, write.node),
                    "read the result of the wait",
                )


def _pending_outputs(graph: fx.Graph) -> set[fx.Node]:
    """Returns the collectives whose results leave a graph without a wait."""
    carried = (node for node in get_outputs(graph).carried if isinstance(node, fx.Node))
    return {node for node in carried if operator_of(node).collective}


def waits_of_launches(graph: fx.Graph) -> Iterator[Problem]:
    """Checks each collective's waits as `waits` does, but not reads of storage that is updated in
    place."""
    for launch in calls_of(graph, attrgetter("collective")):
        yield from _waits_of(launch)


def _waits_of(launch: fx.Node) -> Iterator[Problem]:
    found: dict[Any, list[fx.Node]] = {result: [] for result in _results(launch)}
    pending: list[tuple[fx.Node, Any]] = [(launch, None)]
    while pending:
        node, result = pending.pop()
        for user in node.users:
            traits = operator_of(user)
            if traits.wait:
                found.setdefault(result, []).append(user)
            elif traits.item and node is launch:
                pending.append((user, user.args[1]))
            elif traits.may_alias and not traits.writes:
                pending.append((user, result))
            else:
                yield Problem(
                    f"%{user.name} reads the result of %{launch.name} before its wait",
                    (user, launch),
                    "read the result of the wait",
                )
    if None in found and not found[None] and len(found) > 1:
        del found[None]
    for result, ending in found.items():
        if len(ending) != 1:
            which = "" if result is None else f" for result {result}"
            yield Problem(
                f"the collective %{launch.name} has {len(ending)} waits{which}; it needs one",
                (launch, *ending),
                "end each collective with one wait_tensor of its result;"
                " graphopt.comm.replace_collective takes one out with its wait",
            )


def _results(launch: fx.Node) -> list[int | None]:
    value = known_value(launch)
    return list(range(len(value))) if isinstance(value, (list, tuple)) else [None]


def state(before: MemoryOrder, after: MemoryOrder, same: Same) -> Iterator[Problem]:
    """Yields placeholders that are no longer updated or listed, or newly updated, and stale
    reads."""
    was = {node.target: (node, write.node) for node, write in before.final.items()}
    now = {node.target: (node, write.node) for node, write in after.final.items()}
    listed = [set(get_outputs(memory.graph).updates) for memory in (before, after)]
    for target, (placeholder, update) in was.items():
        if target not in now:
            yield Problem(f"%{placeholder.name} is not updated any more", (update,))
        elif update in listed[0] and now[target][1] not in listed[1]:
            yield Problem(
                f"the update of %{placeholder.name} is not among the state updates in the output",
                (now[target][1],),
            )
    for target, (placeholder, update) in now.items():
        if target not in was:
            yield Problem(f"%{placeholder.name} is updated, which it was not before", (update,))
    yield from _stale_reads(before, after, same)


def write_order(before: MemoryOrder, after: fx.Graph, same: Same) -> Iterator[Problem]:
    """Yields writes to one storage that changed their order."""
    now = {old: new for new, old in same.items()}
    position = {node: index for index, node in enumerate(after.nodes)}
    for first, second, kind in before.hazards:
        if kind != "WAW" or first not in now or second not in now:
            continue
        if position[now[first]] > position[now[second]]:
            yield Problem(
                f"%{first.name} and %{second.name} write one storage, now in the other order",
                (now[second], now[first]),
            )


def _stale_reads(before: MemoryOrder, after: MemoryOrder, same: Same) -> Iterator[Problem]:
    """Yields reads of overwritten values that the graph before did not make."""
    for reader, sources in after.implicit.items():
        old = same.get(reader)
        expected = {} if old is None else before.implicit.get(old, {})
        for source, write in sources.items():
            was = expected.get(same.get(source, source))
            if operator_of(write.node).collective or _is_same_write(was, write, same):
                continue
            verb = "still sends" if operator_of(reader).wait else "reads"
            done = f"%{write.node.name} has overwritten it"
            instead = "" if was is None else f", and not what %{was.node.name} wrote there"
            yield Problem(
                f"%{reader.name} {verb} %{source.name} after {done}{instead}",
                (reader, write.node),
                "read the result of the update, or read before it",
            )


def _is_same_write(old: Entry | None, new: Entry, same: Same) -> bool:
    return old is not None and same.get(new.node) is old.node and new.item == old.item
