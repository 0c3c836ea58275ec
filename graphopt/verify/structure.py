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
    """Every node stands after what it reads."""
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
    """The ranks hold each input as before."""
    for node, was in zip(new, old, strict=True):
        if placement_of(node) != placement_of(was):
            kinds = f"{placement_of(node)}, before it was {placement_of(was)}"
            yield Problem(f"the placement of %{node.name} is {kinds}", (node,))


def interface(before: fx.Graph, after: fx.Graph) -> Iterator[Problem]:
    """The graph takes the same inputs and returns as much as before."""
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
    """Nothing of this iteration reads what is computed in the next."""
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
    """The same random numbers are drawn, in the same order."""
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
    """Every function of the program is called once, in the same order, with the same values. A pass
    may call others in between."""
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


def updates_around_calls(
    before: tuple[fx.Graph, MemoryOrder], after: tuple[fx.Graph, MemoryOrder], same: Same
) -> Iterator[Problem]:
    """An update of state does not pass a call, which ends the step where it raises. It may pass one
    that no update follows: what that raises is raised when the step is over."""
    kept = set(same.values())
    was = _calls_before_updates(*before, lambda call: call in kept)
    now = _calls_before_updates(*after, lambda call: call in same)
    late = set(after[0].late) if isinstance(after[0], IterGraph) else set()
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
    graph: fx.Graph, memory: MemoryOrder, counts: Callable[[fx.Node], bool]
) -> dict[Any, tuple[fx.Node, list[fx.Node]]]:
    """By placeholder that is updated: its last update, and the calls that stand before that."""
    updates = {write.node: node.target for node, write in memory.final.items()}
    found: dict[Any, tuple[fx.Node, list[fx.Node]]] = {}
    calls: list[fx.Node] = []
    for node in graph.nodes:
        if is_host_call(node) and counts(node):
            calls = [*calls, node]
        elif node in updates:
            found[updates[node]] = node, calls
    return found


def _other_values(now: fx.Node, was: fx.Node, same: Same) -> Iterator[Problem]:
    """A value may be computed anew, but not be that of another argument."""
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


def waits(before: fx.Graph, after: fx.Graph, memory: MemoryOrder, same: Same) -> Iterator[Problem]:
    """Every collective has one wait for each of its results, and nobody reads a result before. One
    that the graph before left under way, for the next iteration to wait for, may still be so."""
    left, still = _left_under_way(before), _left_under_way(after)
    for launch in calls_of(after, attrgetter("collective")):
        if same.get(launch) not in left or launch not in still:
            yield from _waits_of(launch)
    for reader, sources in memory.implicit.items():
        for source, write in sources.items():
            if operator_of(write.node).collective:
                yield Problem(
                    f"%{reader.name} reads %{source.name} while %{write.node.name} is under way",
                    (reader, write.node),
                    "read the result of the wait",
                )


def _left_under_way(graph: fx.Graph) -> set[fx.Node]:
    """The collectives whose results a graph hands out without a wait."""
    carried = (node for node in get_outputs(graph).carried if isinstance(node, fx.Node))
    return {node for node in carried if operator_of(node).collective}


def waits_of_launches(graph: fx.Graph) -> Iterator[Problem]:
    """As `waits`, but for reads of what is updated in place."""
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


def state(
    before: tuple[fx.Graph, MemoryOrder], after: tuple[fx.Graph, MemoryOrder], same: Same
) -> Iterator[Problem]:
    """The same placeholders are updated, the output lists it, and nobody reads them afterwards."""
    was = {node.target: (node, write.node) for node, write in before[1].final.items()}
    now = {node.target: (node, write.node) for node, write in after[1].final.items()}
    listed = set(get_outputs(before[0]).updates), set(get_outputs(after[0]).updates)
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
    yield from _stale_reads(before[1], after[1], same)


def write_order(before: MemoryOrder, after: fx.Graph, same: Same) -> Iterator[Problem]:
    """Writes to one storage keep their order."""
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
    """Reads of what has been overwritten, unless the graph before read it so, too."""
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
