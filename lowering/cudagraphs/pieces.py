"""Divides an executable graph into pieces, each of which is recorded as one CUDA graph.

A piece is a run of nodes in graph order. A node that cannot be recorded ends it. So does a change
of the device, or of the late group (`graphopt.iter_graph.derived_programs`), whose bookkeeping is
inserted between the nodes afterwards. Views compute nothing: they end no piece, and whoever needs
one makes it from the tensor that it is a view of.

Each piece then becomes a graph of its own, and one call in the graph that it is cut from.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import fx, nn

from graphopt.graph_utils import is_collective, is_wait, tensors_in
from graphopt.ir.effects import Effects
from graphopt.ir.entries import list_call
from graphopt.ir.metadata import fake_value, is_state, known_value, late_group
from graphopt.ir.operators import is_item, is_list_operator, written
from graphopt.ir.outlining import (
    NodeCopies,
    OutlinedPart,
    describe_call,
    give_items,
    leaving,
    splice,
)
from graphopt.ir.views import base_of, is_pure_view, is_update, may_be_view, outer_bases
from graphopt.lowering.boxed import box_calls
from graphopt.lowering.cudagraphs.recorder import Recordable, is_number, takes_numbers
from graphopt.lowering.subgraph import LoweredSubgraph

_BYTES_PER_OPERATOR = 2**18
"""What may be copied to spare the launch of an operator. Copying takes the device's time. Launching
takes the CPU's, for which a device with much to do does not wait."""


class InputTransfer(enum.Enum):
    """The way in which a piece gets an input: in place, by a copy, or as a number.

    STATIC: a tensor that has the same address in each call. COPIED: a tensor that is copied into
    one. SCALAR: a number in a tensor on the CPU, written into a tensor of the device. NUMBER: a
    Python number, which is part of the recording.
    """

    STATIC = "static"
    COPIED = "copied"
    SCALAR = "scalar"
    NUMBER = "number"


@dataclass
class Piece:
    """A run of nodes that is recorded as one CUDA graph.

    Attributes:
        nodes: the nodes in graph order, views among them included.
        inputs: the values needed from outside, and how the piece gets them.
        written: inputs that they update.
        leaving: nodes of it whose tensors are needed after the next replay may have begun.
        group: the late group, None outside all groups.
        device: the device that they run on.
    """

    nodes: list[fx.Node]
    device: torch.device
    group: int | None
    inputs: dict[fx.Node, InputTransfer] = field(default_factory=dict)
    written: set[fx.Node] = field(default_factory=set)
    leaving: set[fx.Node] = field(default_factory=set)


@dataclass
class Pieces:
    """The pieces of a graph that are recorded, and why the other nodes are not.

    Attributes:
        pieces: the pieces in graph order.
        reasons: for each node that computes and is not recorded, why.
    """

    pieces: list[Piece]
    reasons: dict[fx.Node, str]


def find_pieces(gm: fx.GraphModule, recordable: Recordable, min_ops: int) -> Pieces:
    """Finds the pieces of a graph that can be recorded.

    Args:
        gm: a graph in the executable dialect, in which the items of a node's results follow it
            (`gather_items`).
        recordable: decides about single nodes.
        min_ops: a piece has at least so many operators, and more where inputs are copied.
    """
    computing = filter(_computes, gm.graph.nodes)
    against = ((node, recordable.reason_against(node, _called(gm, node))) for node in computing)
    reasons = {node: reason for node, reason in against if reason is not None}
    while True:
        scan = _PieceScan(gm, recordable, min_ops, dict(reasons))
        found = scan.run()
        crossing = {node for piece in found.pieces for node in _crossing(piece)}
        if not crossing:
            return found
        reasons |= dict.fromkeys(crossing, "its collective begins and ends in different places")


def gather_items(graph: fx.Graph) -> None:
    """Moves the `getitem` nodes of a node with several results directly behind it."""
    for node in list(graph.nodes):
        last = node
        for user in list(node.users):
            if is_item(user) and user.args[0] is node:
                last.append(user)
                last = user


def _called(gm: fx.GraphModule, node: fx.Node) -> nn.Module | None:
    return gm.get_submodule(str(node.target)) if node.op == "call_module" else None


def _computes(node: fx.Node) -> bool:
    if node.op in ("placeholder", "get_attr", "output"):
        return False
    return not is_item(node) and not is_pure_view(node)


def _crossing(piece: Piece) -> Iterator[fx.Node]:
    """Yields collectives whose launch and wait are not both in the piece."""
    inside = set(piece.nodes)
    for node in piece.nodes:
        if is_wait(node):
            launch = node.all_input_nodes[0]
            launch = launch.all_input_nodes[0] if is_item(launch) else launch
            if launch not in inside:
                yield node
        elif is_collective(node):
            results = [user for user in node.users if is_item(user)] or [node]
            waits = [user for result in results for user in result.users if is_wait(user)]
            if not waits or not inside.issuperset(waits):
                yield node


class _PieceScan:
    """One walk over a graph that collects nodes into a piece until something ends it."""

    def __init__(
        self, gm: fx.GraphModule, recordable: Recordable, min_ops: int, reasons: dict[fx.Node, str]
    ) -> None:
        self._gm, self._recordable, self._min_ops = gm, recordable, min_ops
        self._found = Pieces([], reasons)
        self._effects = Effects(gm.graph)
        self._static: set[fx.Node] = set()
        self._run: list[fx.Node] = []
        self._inside: set[fx.Node] = set()
        self._device: torch.device | None = None
        self._numbered = False

    def run(self) -> Pieces:
        for node in self._gm.graph.nodes:
            self._visit(node)
        self._close()
        return self._found

    def _visit(self, node: fx.Node) -> None:
        if node.op in ("placeholder", "get_attr", "output"):
            return
        if not _computes(node):
            if self._run and late_group(node) != late_group(self._run[0]):
                self._close()
            if is_pure_view(node) or set(node.all_input_nodes) <= self._inside:
                self._add(node)
            return
        if node in self._found.reasons:
            self._close()
            return
        device, numbered = self._recordable.device_of(node), takes_numbers(node)
        if self._run and not self._continues(node, device, numbered):
            self._close()
        if not self._may_update(node):
            self._close()
            self._found.reasons[node] = "it updates a tensor that has no fixed address"
            return
        self._device = self._device or device
        self._numbered = self._numbered or numbered
        self._add(node)

    def _continues(self, node: fx.Node, device: torch.device | None, numbered: bool) -> bool:
        """True if a node can join the current piece.

        A number that changes calls for a new recording. So that it is a short one, nodes that take
        numbers begin a piece, of optimizer operators alone.
        """
        if late_group(node) != late_group(self._run[0]):
            return False
        if self._device is not None and device is not None and device != self._device:
            return False
        if self._numbered:
            return is_list_operator(node)
        return not numbered

    def _may_update(self, node: fx.Node) -> bool:
        """True if the tensor that a node updates is at a fixed address."""
        for target in written(node):
            base = base_of(target)
            if may_be_view(base):
                return False
            if base not in self._inside and self._way(base) is not InputTransfer.STATIC:
                return False
        return True

    def _add(self, node: fx.Node) -> None:
        self._run.append(node)
        self._inside.add(node)

    def _close(self) -> None:
        run, device = self._run, self._device
        self._run, self._inside, self._device, self._numbered = [], set(), None, False
        computing = [node for node in run if _computes(node)]
        if not computing or device is None:
            return
        piece = Piece(run, device, late_group(computing[0]))
        self._fill(piece, computing)
        copies = sum(itertools.starmap(_copying, piece.inputs.items()))
        if sum(map(self._operators, computing)) < self._min_ops + copies:
            reason = "its piece has too few operators for the inputs that would be copied"
            self._found.reasons.update(dict.fromkeys(computing, reason))
            return
        self._static.update(node for node in run if node not in piece.leaving)
        self._found.pieces.append(piece)

    def _fill(self, piece: Piece, computing: list[fx.Node]) -> None:
        inside = set(piece.nodes)
        for node in computing:
            for source in node.all_input_nodes:
                for base in outer_bases(source, inside):
                    piece.inputs.setdefault(base, self._way(base))
            piece.written.update(base_of(target) for target in written(node))
        piece.written &= piece.inputs.keys()
        for node in piece.nodes:
            leaves = self._effects.leaves_the_graph(node) or self._effects.is_in_flight(node)
            if leaves or may_be_view(node):
                piece.leaving.add(node)

    def _way(self, base: fx.Node) -> InputTransfer:
        value = known_value(base)
        if is_number(value):
            return InputTransfer.NUMBER
        if base.op == "get_attr" or base in self._static:
            return InputTransfer.STATIC
        if isinstance(value, torch.Tensor) and value.device.type != self._recordable.device_type:
            return InputTransfer.SCALAR
        return InputTransfer.STATIC if is_state(base) else InputTransfer.COPIED

    def _operators(self, node: fx.Node) -> int:
        """The number of operators that a node runs: compiled ones, or those of its list."""
        if node.op == "call_module":
            module = _called(self._gm, node)
            assert isinstance(module, LoweredSubgraph)
            return sum(inner.op == "call_function" for inner in module.graph_module.graph.nodes)
        call = list_call(node) if is_list_operator(node) else None
        return call.count if call else 1


def _copying(node: fx.Node, way: InputTransfer) -> int:
    """The number of operators that a recording must save to pay for copying an input."""
    if way not in (InputTransfer.COPIED, InputTransfer.SCALAR):
        return 0
    return 1 + sum(tensor.nbytes for tensor in tensors_in(fake_value(node))) // _BYTES_PER_OPERATOR


class PieceBody(OutlinedPart):
    """A piece as a separate graph that takes the piece's inputs in their order.

    Attributes:
        piece: the piece that the graph is made from.
        name: of the submodule that runs it.
    """

    def __init__(self, piece: Piece, name: str) -> None:
        super().__init__(piece.nodes, _inside)
        self.piece, self.name = piece, name
        for node in piece.inputs:
            self.take(node)
        self.fill(without=is_pure_view)
        self.returning(leaving(piece.nodes))

    def module(self, gm: fx.GraphModule) -> fx.GraphModule:
        """The piece as a module; it shares submodules with `gm`, which it is cut from."""
        return box_calls(fx.GraphModule(gm, self.graph))


def _inside(body: OutlinedPart, copies: NodeCopies, node: fx.Node) -> fx.Node:
    """The node in a piece that stands for one outside: a view, or the tensor before an update."""
    if not is_pure_view(node) and is_update(node):
        updated: fx.Node = copies(node.all_input_nodes[0])
        return updated
    assert is_pure_view(node), f"%{node.name} is no input of its piece"
    return copies.copy(node)


def with_calls(source: fx.Graph, bodies: list[PieceBody]) -> fx.Graph:
    """Copies a graph, with one call in place of each piece."""

    def call(copies: NodeCopies, body: OutlinedPart) -> None:
        assert isinstance(body, PieceBody)
        called = copies.graph.call_module(body.name, tuple(map(copies, body.inputs)))
        # Running code marks where a late group begins to update state.
        describe_call(called, body, body.piece.written)
        give_items(copies, body, called)
        inside = set(body.nodes)
        for node in body.nodes:  # here, so that views stand in the late group of their piece
            if any(user not in inside for user in node.users):
                copies(node)

    members = {node for body in bodies for node in body.nodes}
    graph = splice(source, source.nodes, bodies, call, partial(_outside, members))
    for node in reversed(graph.nodes):
        if not node.users and is_pure_view(node):
            graph.erase_node(node)
    return graph


def _outside(members: set[fx.Node], copies: NodeCopies, node: fx.Node) -> Any:
    """The node that gives, outside of a piece, a value that the piece does not return."""
    if node in members and (is_update(node) or is_wait(node)):
        return copies(node.all_input_nodes[0])
    assert node not in members or is_pure_view(node), f"%{node.name} is not returned by its piece"
    return copies.copy(node)
