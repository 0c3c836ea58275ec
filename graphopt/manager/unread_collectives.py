"""A check for collectives that a pass leaves running though nobody reads their results.

    %launch = all_reduce(%g)                   %launch = all_reduce(%g)
    %wait   = wait_tensor(%launch)     ==>     %wait   = wait_tensor(%launch)      nobody reads it
    %add    = add(%w, %wait)                   %new    = wait_tensor(all_reduce(half(%g)))
                                               %add    = add(%w, float(%new))

Dead-code elimination keeps collectives, since other ranks join them: so the gradient is sent twice.
"""

from __future__ import annotations

from torch import fx

from graphopt import _compat
from graphopt.graph_utils import is_collective, is_needed, is_wait, may_alias
from graphopt.manager.snapshot import Snapshot
from graphopt.verify import Problem

_HINT = (
    "graphopt.comm.replace_collective(gm, block, new_output) lets readers read something else, and"
    " takes the old launch and its wait out"
)


def newly_unread(graph: fx.Graph, before: Snapshot) -> Problem | None:
    """Returns the problem of a wait that nobody reads, if there are more of them than before, or
    None.

    A step may have some of its own: gradients of parameters that no optimizer has are averaged.
    """
    unread = _unread_waits(graph)
    if not unread:
        return None
    allowed = _unread_waits(before.graph)
    kept = {before.copies[wait] for wait in unread if wait in before.copies}
    new = [wait for wait in unread if before.copies.get(wait) not in allowed]
    if len(new) <= len(allowed - kept):
        return None
    wait = min(new)
    chain = _launches_of(wait)
    launch = next((n for n in chain if is_collective(n)), wait)
    early = _reader_without_wait(chain)
    if early is not None:
        return Problem(
            f"%{early.name} reads %{launch.name} without waiting for it: nobody reads the wait"
            f" %{wait.name}",
            (early, launch, wait),
            f"let %{early.name} read %{wait.name}",
        )
    what = "which still runs" if wait in before.copies else "which it put in"
    return Problem(
        f"nobody reads the result of the collective %{launch.name}, {what}", (launch, wait), _HINT
    )


def _unread_waits(graph: fx.Graph) -> set[fx.Node]:
    """Returns the waits on which no result or effect of the step depends."""
    read: set[fx.Node] = set()
    unread: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if node in read:
            read.update(_compat.inputs_of(node))
            continue
        if is_wait(node):
            unread.add(node)
        if node.op == "output" or is_needed(node):
            read.update(_compat.inputs_of(node))
    return unread


def _reader_without_wait(chain: list[fx.Node]) -> fx.Node | None:
    """Returns the first node that reads a collective's result before its wait, or None."""
    under_way = [node for node in chain if not is_wait(node)]
    readers = (user for node in under_way for user in node.users if user not in chain)
    return min((n for n in readers if not is_wait(n) and not may_alias(n)), default=None)


def _launches_of(wait: fx.Node) -> list[fx.Node]:
    """Returns the nodes between a wait and its launch, nearest first, the launch included."""
    found = [wait]
    for node in found:
        if not is_collective(node):
            found += node.all_input_nodes[:1]
    return found
