"""The check that all ranks are about to run the same plan of collectives.

Everything goes through meetings of the ranks (`graphopt.ranks.meeting`): a rank that plans other
communication, or that could not capture its step, becomes an error on every rank in place of a
hang.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence, Set
from itertools import zip_longest
from operator import attrgetter

import torch
import torch.distributed as dist
from torch import fx

from graphopt import _compat
from graphopt.errors import SpmdMismatchError
from graphopt.graph_utils import is_collective
from graphopt.host.decisions.assumptions import Assumption
from graphopt.ir.metadata import fake_value, known_value, source_line
from graphopt.ir.operators import calls_of
from graphopt.ranks.meeting import Channel, Meeting

_UNIFORM = "a decision by a value that all ranks have alike"
_TAKE_THE_DECISION = (
    "let all ranks ask for the value, whatever they make of the answer: `if loss < best and rank =="
    " 0`, not `if rank == 0 and loss < best`"
)
DECIDE_ALIKE = (
    "decide there by a value that all ranks have alike (torch.distributed.all_reduce(value) before"
    " the branch), or go backward on both ways (`loss = loss * 0` in place of a return)"
)
"""A hint where ranks communicate otherwise on their way from a decision on."""

_BUILD_ALIKE = "all ranks have to build the same model and take the same branches"

FREEZE = (
    f"{_BUILD_ALIKE}; a module that one rank keeps for itself, such as an average of the weights,"
    " has to be frozen: module.requires_grad_(False)"
)
"""A hint where ranks have other tensors."""


def collective_plan(graph: fx.Graph, ranks: Set[int]) -> list[str]:
    """The plan of a graph: one line per collective, in launch order (operator, options, dtype,
    shape, group), and per uniform decision.

    Args:
        ranks: those that compare their plans. A group that not all of them are in, as one of
            several in which others work on the same layers, has another name on each.
    """
    plan: list[str] = []
    of_some: dict[str, str] = {}
    for node in graph.nodes:
        if is_collective(node):
            name = str(node.args[-1])
            of_group = _compat.ranks_of_group(name)
            if of_group is not None and not ranks <= set(of_group):
                number = len(of_some) + 1
                name = of_some.setdefault(name, f"group {number} of {len(of_group)} ranks")
            plain = [str(arg) for arg in node.args[1:-1] if not isinstance(arg, fx.Node)]
            options = ", ".join([*plain, name])
            values = _compat.tree_leaves(fake_value(node))  # of several tensors where it takes such
            given = ", ".join(f"{value.dtype}{list(value.shape)}" for value in values)
            plan.append(f"{node.target}({given}, {options})")
    decided = [node.target for node in graph.nodes if isinstance(node.target, Assumption)]
    return [*plan, *(_UNIFORM for each in decided if not each.alone)]


def plan_lines(graph: fx.Graph) -> list[str]:
    """The user's source line for each line of `collective_plan`; empty if unknown."""
    nodes = [node for node in graph.nodes if is_collective(node)]
    decided = [node for node in graph.nodes if isinstance(node.target, Assumption)]
    nodes += [node for node in decided if not node.target.alone]
    return ["" if source_line(node) is None else str(source_line(node)) for node in nodes]


def launches_digest(graph: fx.Graph) -> str:
    """A digest that is equal for graphs with the same collectives in the same order."""
    plan = [
        (str(node.target), [launch_part(arg) for arg in node.args])
        for node in calls_of(graph, attrgetter("collective"))
    ]
    return hashlib.sha256(repr(plan).encode()).hexdigest()[:16]


def launch_part(argument: object) -> object:
    """The text of one argument of a collective, for comparison between ranks."""
    if isinstance(argument, (list, tuple)):
        return [launch_part(entry) for entry in argument]
    if not isinstance(argument, fx.Node):
        return str(argument)
    value = known_value(argument)
    return [str(value.dtype), list(value.shape)] if isinstance(value, torch.Tensor) else "?"


def check_same_plans(
    plans: Sequence[Sequence[tuple[str, Sequence[str]]]],
    histories: Sequence[Sequence[Sequence[str]]],
    decided: Sequence[Sequence[Sequence[str]]],
    lines: Sequence[Sequence[Sequence[str]]],
) -> None:
    """Compares the ranks' plans by `check_same`, and names the decision or pass that made them
    differ.

    Args:
        plans: of each rank, the name of each graph that runs and its `collective_plan`.
        histories: of each rank, pairs of the name of a stage or pass and `launches_digest` of what
            it has left; the first is that of the capture.
        decided: of each rank, pairs of the line and the outcome of each decision by value.
        lines: of each rank, the `plan_lines` of each graph.
    """
    try:
        check_same("graphs", [[name for name, _ in theirs] for theirs in plans])
        for graphs, places in zip(zip(*plans, strict=True), zip(*lines, strict=True), strict=True):
            check_same("collectives", [plan for _, plan in graphs], lines=places)
    except SpmdMismatchError as error:
        parted = _parted(decided)
        if parted:
            text = str(error).partition("\n  hint:")[0]
            raise SpmdMismatchError(f"{text}\n{parted}\n  hint:  {DECIDE_ALIKE}") from None
        raise SpmdMismatchError(f"{error}{_differing_pass(histories)}") from None


def _parted(decided: Sequence[Sequence[Sequence[str]]]) -> str:
    """The first decision that a rank took differently from rank 0; empty without one."""
    for rank, theirs in enumerate(decided):
        for (line, answer), (first_line, first) in zip(theirs, decided[0], strict=False):
            if line != first_line:
                break
            if answer != first:
                return f"  from:  {line}\n  decided:  {first} on rank 0, {answer} on rank {rank}"
    return ""


def _differing_pass(histories: Sequence[Sequence[Sequence[str]]]) -> str:
    for rank, history in enumerate(histories):
        for index, ((name, digest), (first_name, first)) in enumerate(
            zip(history, histories[0], strict=False)
        ):
            if name != first_name:
                return (
                    f"\n  pass:    rank {rank} applied {name!r} where rank 0 applied {first_name!r}"
                )
            if digest != first:
                return (
                    "" if not index else f"\n  pass:    {name!r} did not do the same on all ranks"
                )
    return ""


def check_spmd(
    graph_module: fx.GraphModule, group: dist.ProcessGroup | None = None, timeout: float = 30.0
) -> None:
    """Check that all ranks of a group are about to run the same collectives in the same order.

    Every rank has to call it. It talks through the group's store, not with collectives.

    Args:
        graph_module: this rank's graph, in the captured dialect.
        group: None is the default group.
        timeout: seconds to wait for the other ranks.

    Raises:
        SpmdMismatchError: naming the rank and the first difference, or the ranks that did not come.

    >>> import torch.distributed as dist
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> model = torch.nn.Linear(2, 2)
    >>> captured = graphopt.capture(lambda m, x: m(x), model, torch.ones(2, 2))
    >>> graphopt.verify.check_spmd(captured.graph_module)
    >>> dist.destroy_process_group()
    """
    found = _compat.group_or_default(group)
    ranks = frozenset(dist.get_process_group_ranks(found))
    with Meeting(Channel(found, "check_spmd", timeout)) as meeting:
        graph = graph_module.graph
        mine = {"plan": collective_plan(graph, ranks), "lines": plan_lines(graph)}
        everyone = meeting.exchange(mine)
        plans, lines = ([theirs[said] for theirs in everyone] for said in ("plan", "lines"))
        check_same("collectives", plans, lines=lines)


def check_same(
    what: str,
    everyone: Sequence[Sequence[str]],
    hint: str = _BUILD_ALIKE,
    *,
    lines: Sequence[Sequence[str]] | None = None,
) -> None:
    """Raises `SpmdMismatchError` naming the first rank and entry that differ from rank 0's.

    Args:
        what: what the entries are.
        everyone: the entries of each rank.
        lines: the user's line for each of them.
    """
    for rank, theirs in enumerate(everyone):
        pairs = zip_longest(everyone[0], theirs, fillvalue="nothing")
        for index, (expected, found) in enumerate(pairs):
            if expected == found:
                continue
            places = [lines[each][index : index + 1] if lines else () for each in (0, rank)]
            first, second = (
                "".join(f"\n           from: {line}" for line in place if line) for place in places
            )
            decides = _UNIFORM in (expected, found)
            raise SpmdMismatchError(
                f"rank {rank} has other {what} than rank 0, first at number {index}:\n"
                f"  rank 0:  {expected}{first}\n  rank {rank}:  {found}{second}\n"
                f"  hint:  {_TAKE_THE_DECISION if decides else hint}"
            )


def merged_order(everyone: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """The union of all ranks' names: rank 0's order, then what each next rank adds."""
    return tuple(dict.fromkeys(name for names in everyone for name in names))
