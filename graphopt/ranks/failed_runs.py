"""Errors of a call in which the graph of a captured step failed.

Costs nothing where nothing fails: the node that ran is found from the traceback.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch import fx

from graphopt import _compat
from graphopt.comm import kind_of
from graphopt.errors import CollectiveError
from graphopt.graph_utils import find_nodes, is_collective, is_wait
from graphopt.host.running import CallbackRun, agree, all_go_on, hear
from graphopt.ir.metadata import late_group, sent_names
from graphopt.ir.operators import argument
from graphopt.iter_graph import IterGraphModule
from graphopt.ranks.failure_reports import learn_causes, mark_unusable, tell
from graphopt.readable.columns import first_of

_NAMES_SHOWN = 4


def group_names(graph: fx.Graph) -> tuple[str, ...]:
    """The names of the process groups that a graph communicates in."""
    launches = find_nodes(graph, is_collective)
    return tuple(dict.fromkeys(str(argument(node, "group_name")) for node in launches))


def explained(
    module: IterGraphModule, error: BaseException, step: int, host: CallbackRun | None = None
) -> CollectiveError | None:
    """The error to raise for an error of a run, or None for that error itself.

    The other ranks are told, and where this rank has left the step between two collectives its
    groups are marked as unusable.

    Args:
        step: which call of the step it was, counted from 1.
        host: how functions of the program's ran in it.
    """
    node = module.failed_at(error)
    if node is not None and isinstance(error, Exception) and (is_collective(node) or is_wait(node)):
        return _collective_failed(module, node, error, step)
    for name in group_names(module.graph):
        group = _compat.group_named(name)
        if group is None:
            continue
        tell(group, step, error)
        if node is not None and _is_between_launches(node):
            mark_unusable(group, f"rank {group.rank()} left step {step}: {_first_line(error)}")
    if host is not None and node is not None and _is_behind_launches(node):
        host.say_failed(error)
    return None


@contextmanager
def sending_explained(
    group: dist.ProcessGroup, step: int, collective: str, what: str = ""
) -> Iterator[None]:
    """While active, a communication failure outside a graph becomes a `CollectiveError`.

    Args:
        step: which call of the step it is, counted from 1.
        collective: such as ``"broadcast"``.
        what: what is sent, in words; none: the ranks agree whether they go on.
    """
    try:
        yield
    except RuntimeError as error:
        failed = f"{collective} of {what}" if what else f"agreement of the ranks in step {step}"
        reason = f"{failed} failed{_in(group, group.group_name)}: {_first_line(error)}"
        raise _failure(reason, group, step, collective) from error


def _collective_failed(
    module: IterGraphModule, node: fx.Node, error: Exception, step: int
) -> CollectiveError:
    launch = _launch_of(module, node)
    if late_group(node) is not None:  # late work is the work of the step before
        step -= 1
    kind = "a collective" if launch is None else kind_of(launch).removesuffix("_")
    name = None if launch is None else str(argument(launch, "group_name"))
    group = None if name is None else _compat.group_named(name)
    sent = sent_names(node)
    text = f"step {step}: {kind}{_of(sent)} failed{_in(group, name)}: {_first_line(error)}"
    return _failure(text, group, step, None if launch is None else kind, sent)


def _failure(
    text: str,
    group: dist.ProcessGroup | None,
    step: int,
    collective: str | None,
    sent: tuple[str, ...] = (),
) -> CollectiveError:
    """The error for a failed collective, naming failed ranks if any are known."""
    said, ended = ({}, []) if group is None else learn_causes(group, step)
    text += "".join(f"\n  rank {rank} said:  {reason}" for rank, reason in said.items())
    text += "".join(f"\n  rank {rank}:  its process has ended" for rank in ended)
    if group is not None:
        mark_unusable(group, f"{collective or 'a collective'} failed in step {step}")
    return CollectiveError(
        text,
        step=step,
        collective=collective,
        group=None if group is None else group.group_name,
        parameters=sent,
        ranks=tuple(sorted({*said, *ended})),
        hint="look at the output of the other ranks; to go on, make the group anew on all ranks"
        " and load a checkpoint",
    )


def _launch_of(module: IterGraphModule, node: fx.Node) -> fx.Node | None:
    """The launch of a collective that a node launches or waits for; of late work, that in the
    step's graph."""
    if is_collective(node):
        return node
    sources = list(node.all_input_nodes)
    for source in sources:  # grows while it is read
        if is_collective(source):
            return source
        sources += source.all_input_nodes if source.op == "call_function" else ()
        if len(sources) > _NAMES_SHOWN:
            break
    for original in find_nodes(module.graph, is_wait):
        if original.name == node.name and original is not node:
            return _launch_of(module, original)
    return None


def _is_between_launches(node: fx.Node) -> bool:
    """True if collectives are launched before a node, and by it or after it."""
    if is_collective(node):
        return True
    launches = find_nodes(node.graph, is_collective)
    return any(launch < node for launch in launches) and any(node < launch for launch in launches)


def _is_behind_launches(node: fx.Node) -> bool:
    """True if a node follows all collectives and makes no agreement of ranks itself."""
    if node.target in (agree, all_go_on, hear):
        return False
    return all(launch < node for launch in find_nodes(node.graph, is_collective))


def _of(names: tuple[str, ...]) -> str:
    return f" of {first_of(names, _NAMES_SHOWN)}" if names else ""


def _in(group: dist.ProcessGroup | None, name: str | None) -> str:
    if group is None:
        return "" if name is None else f" in group {name!r}"
    return f" on rank {group.rank()} of the {group.size()} in group {name!r}"


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
