"""Communication blocks: a collective, its wait, and the views that lead to its readers."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from operator import attrgetter

import torch
import torch.distributed as dist
from torch import fx

from graphopt import _compat
from graphopt.errors import VerificationError
from graphopt.graph_utils import COLLECTIVE_NAMESPACE, is_collective, is_wait, tensors_in
from graphopt.ir.metadata import fake_value, known_value, sent_names, source_line
from graphopt.ir.operators import argument, calls_of
from graphopt.ir.views import is_only_view, view_tail
from graphopt.iter_graph import IterGraph

MAX_WAIT_DISTANCE = 5
"""The most nodes between a launch and its wait, such as the item of a coalesced collective."""


@dataclass
class CommBlock:
    """One collective with its wait and the views around them.

    Attributes:
        shape: of the tensor sent; None where a coalesced collective sends several.
        node_list: the launch, the nodes up to its waits, the waits and the views after them, in
            graph order.
        inputs: nodes that hold what is sent.
        wait_nodes: one wait, or one for each tensor of a coalesced collective.
        comm_node: the launch.
        outputs: waits and views that nodes outside the block read, in graph order.

    >>> block = graphopt.comm.get_all_comm_blocks(gm, "all_reduce")[0]
    >>> block.comm_node, block.wait_nodes, block.shape
    (all_reduce, [wait_tensor], torch.Size([2]))
    """

    shape: torch.Size | None
    node_list: list[fx.Node]
    inputs: list[fx.Node]
    wait_nodes: list[fx.Node]
    comm_node: fx.Node
    outputs: list[fx.Node]

    @property
    def kind(self) -> str:
        """The name of the collective, such as ``"all_reduce"``."""
        return kind_of(self.comm_node)

    @property
    def group(self) -> str:
        """The name of the process group."""
        name: str = argument(self.comm_node, "group_name")
        return name

    @property
    def group_size(self) -> int:
        """The number of ranks in the process group.

        Raises:
            VerificationError: the collective does not say so, and there is no such group here.
        """
        said = argument(self.comm_node, "group_size")
        if said is not None:
            return int(said)
        ranks = _compat.ranks_of_group(self.group) if dist.is_initialized() else None
        if ranks is None:
            raise VerificationError(
                f"there is no process group {self.group!r} here, whose size is asked for\n"
                f"{located(self.comm_node)}\n"
                "  hint:  run under torchrun, or in graphopt.testing.fake_ranks(n)"
            )
        return len(ranks)

    @property
    def reduce_op(self) -> str | None:
        """``"sum"``, ``"avg"``, ...; None for collectives that do not reduce."""
        operation: str | None = argument(self.comm_node, "reduce_op")
        return operation

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the tensor that is sent (the first of several)."""
        return self._sent()[0].dtype

    @property
    def device(self) -> torch.device:
        """The device of the tensor that is sent (the first of several)."""
        return self._sent()[0].device

    @property
    def nbytes(self) -> int:
        """The number of bytes that one rank sends."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self._sent())

    @property
    def tail(self) -> list[fx.Node]:
        """The waits and the views after them, in graph order."""
        return sorted(node for wait in self.wait_nodes for node in view_tail(wait))

    @property
    def users(self) -> list[fx.Node]:
        """Nodes outside the block that read its outputs, in graph order."""
        inside = set(self.node_list)
        found = {user for node in self.outputs for user in node.users if user not in inside}
        return sorted(found)

    def _sent(self) -> list[torch.Tensor]:
        return list(tensors_in([fake_value(node) for node in self.inputs]))


def get_comm_block(node: fx.Node) -> CommBlock:
    """Returns the block of one collective.

    Args:
        node: the launch, a call of an operator of ``_c10d_functional``.

    Raises:
        VerificationError: `node` is not a collective, or no wait for it is near.

    >>> launch = next(n for n in gm.graph.nodes if graphopt.graph_utils.is_collective(n))
    >>> graphopt.comm.get_comm_block(launch).comm_node is launch
    True
    """
    if not is_collective(node):
        raise VerificationError(f"not the launch of a collective\n{located(node)}")
    before, waits = _up_to_waits(node)
    if not waits:
        raise VerificationError(
            f"collective %{node.name} has no wait: nothing says when its result may be read\n"
            f"{located(node)}\n"
            "  hint:  read the result through torch.ops._c10d_functional.wait_tensor"
        )
    nodes = sorted({*before, *(tail for wait in waits for tail in view_tail(wait))})
    inside = set(nodes)
    inputs = node.all_input_nodes
    first = known_value(inputs[0]) if len(inputs) == 1 else None
    return CommBlock(
        shape=first.shape if isinstance(first, torch.Tensor) else None,
        node_list=nodes,
        inputs=inputs,
        wait_nodes=waits,
        comm_node=node,
        outputs=[
            member
            for member in nodes
            if member not in before and any(user not in inside for user in member.users)
        ],
    )


def get_all_comm_blocks(
    graph_module: fx.GraphModule, kinds: str | Collection[str] | None = None
) -> list[CommBlock]:
    """Returns the blocks of all collectives, or of some kinds, in launch order.

    Args:
        kinds: such as ``"all_reduce"`` or ``("all_reduce", "broadcast")``; None for all.

    Raises:
        VerificationError: a collective has no wait.

    >>> [block.shape for block in graphopt.comm.get_all_comm_blocks(gm, "all_reduce")]
    [torch.Size([2]), torch.Size([2, 4])]
    """
    wanted = (kinds,) if isinstance(kinds, str) else kinds
    return [
        get_comm_block(node)
        for node in calls_of(graph_module.graph, attrgetter("collective"))
        if wanted is None or kind_of(node) in wanted
    ]


def kind_of(node: fx.Node) -> str:
    """Returns the name of the operator that a launch calls, without namespace and overload.

    >>> from graphopt.comm import get_all_comm_blocks, kind_of
    >>> [kind_of(block.comm_node) for block in get_all_comm_blocks(gm)]
    ['all_reduce', 'all_reduce']
    """
    name: str = _compat.operator_name(node.target)
    return name.removeprefix(f"{COLLECTIVE_NAMESPACE}::")


def wait_of(launch: fx.Node) -> fx.Node:
    """Returns the wait of a collective that has one result.

    Raises:
        VerificationError: `launch` is not a collective, or has no wait or several.

    >>> block = graphopt.comm.get_all_comm_blocks(gm, "all_reduce")[0]
    >>> graphopt.comm.wait_of(block.comm_node)
    wait_tensor
    """
    waits = get_comm_block(launch).wait_nodes
    if len(waits) != 1:
        raise VerificationError(
            f"collective %{launch.name} has {len(waits)} waits\n{located(launch)}\n"
            "  hint:  get_comm_block(launch).wait_nodes has all of them"
        )
    return waits[0]


def parameters_of(gm: fx.GraphModule, block: CommBlock) -> tuple[str, ...]:
    """Returns the names of the parameters or buffers that a collective of data parallelism is for;
    empty for the step's own collectives.

    >>> blocks = graphopt.comm.get_all_comm_blocks(gm, "all_reduce")
    >>> [graphopt.comm.parameters_of(gm, block) for block in blocks]
    [('bias',), ('weight',)]
    """
    return sent_names(block.comm_node)


def late_nodes(graph_module: fx.GraphModule | fx.Graph) -> Mapping[fx.Node, fx.Node]:
    """Returns the nodes that run one iteration late, with their destinations; empty for plain
    graphs.

    Args:
        graph_module: the graph module, or its graph.

    Raises:
        TypeError: it is neither.

    >>> from graphopt.comm import late_nodes
    >>> len(late_nodes(gm))
    0
    """
    found = graph_module.graph if isinstance(graph_module, fx.GraphModule) else graph_module
    if not isinstance(found, fx.Graph):
        raise TypeError(f"late_nodes takes a graph module, not {type(found).__name__}")
    return found.late if isinstance(found, IterGraph) else {}


def located(node: fx.Node) -> str:
    """Formats a node with the user's source line, for error messages.

    >>> from graphopt.comm import get_all_comm_blocks, located
    >>> "all_reduce" in located(get_all_comm_blocks(gm)[0].comm_node)
    True
    """
    source = source_line(node)
    return f"  > {node.format_node()}" + (f"\n  from:  {source}" if source is not None else "")


def _up_to_waits(launch: fx.Node) -> tuple[set[fx.Node], list[fx.Node]]:
    """Returns the launch with the views that lead to its waits, and the waits."""
    before, waits = {launch}, []
    frontier = [launch]
    for _ in range(MAX_WAIT_DISTANCE):
        users = [user for node in frontier for user in node.users]
        waits += [user for user in users if is_wait(user)]
        frontier = [u for u in users if not is_wait(u) and is_only_view(u, u.all_input_nodes[0])]
        before.update(frontier)
    return before, sorted(set(waits))
