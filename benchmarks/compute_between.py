"""Which compute a step's collectives need, and which needs them: sums of seconds that hold for any
order of the step in which nothing is recomputed before the loss is there.

Activations that are recomputed for the backward need nothing that the loss gives, and could be made
in the forward; but who recomputes does so because they could not be held until then.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from torch import fx

from graphopt.graph_utils import written
from graphopt.ir.metadata import phase_of
from graphopt.schedule import Program

Bits = NDArray[np.uint8]


class ComputeBetween:
    """The seconds of compute that must lie before, behind and between the collectives of a step.

    Attributes:
        seconds: of the nodes that compute.
        needing, needed: for each of these and each message, True if it needs the message's result,
            or the message's launch needs it.
        before: for each message, the seconds of what its launch needs.
        behind: for each message, the seconds of what needs its result.
        between: for each two messages, of what needs the first, and the second needs.
        follows: for each two messages, True if the second needs the first.
    """

    def __init__(self, program: Program) -> None:
        count = len(program.messages)
        forward = _reached_from(program, _Forward(program))
        backward = _reached_from(program, _Backward(program))
        nodes = [node for node in program.order if node in program.seconds]
        self.seconds = np.asarray([program.seconds[node] for node in nodes])
        self.needing = _unpacked([forward[node] for node in nodes], count)
        self.needed = _unpacked([backward[node] for node in nodes], count)
        self.before = self.seconds @ self.needed
        self.behind = self.seconds @ self.needing
        self.between = np.zeros((count, count))
        for begin in range(0, len(nodes), 1024):
            part = slice(begin, begin + 1024)
            needing = self.needing[part] * self.seconds[part, None]
            self.between += needing.T @ self.needed[part].astype(np.float64)
        launches = [forward[message.launch] for message in program.messages]
        self.follows = _unpacked(launches, count).T


def _unpacked(rows: list[Bits], count: int) -> NDArray[np.bool_]:
    """Returns rows of bits as a matrix with `count` columns."""
    if not rows:
        return np.zeros((0, count), dtype=bool)
    return np.unpackbits(np.stack(rows), axis=1)[:, :count].astype(bool)


def _reached_from(program: Program, way: _Forward | _Backward) -> dict[fx.Node, Bits]:
    """Returns for each node a row of bits that says which messages reach it; nodes with the same
    row share it."""
    empty: Bits = np.zeros((len(program.messages) + 7) // 8, dtype=np.uint8)
    rows: dict[fx.Node, Bits] = {}
    for node in way.order:
        row = empty
        for source in way.sources(node):
            found = rows.get(source, empty)
            if found is not empty:
                row = found if row is empty else row | found
        started = way.started(node)
        if started is not None:
            row = row.copy()
            row[started // 8] |= 128 >> (started % 8)
        rows[node] = row
        way.passed_on(node, row, rows)
    return rows


class _Forward:
    """Traversal from messages to the nodes that need them."""

    def __init__(self, program: Program) -> None:
        self.order = program.order
        self._program = program
        self._states = _states_written_late(program)
        loss, behind = _behind_loss(program)
        self._loss = {node: [loss] for node in behind if loss is not None}

    def sources(self, node: fx.Node) -> list[fx.Node]:
        late = self._program.late
        if node not in late:
            return [*node.all_input_nodes, *self._loss.get(node, ())]
        # What a late node needs of others was computed in the iteration before.
        return [s for s in node.all_input_nodes if s in late or s.op == "placeholder"]

    def started(self, node: fx.Node) -> int | None:
        message = self._program.waited.get(node)
        return None if message is None else message.index

    def passed_on(self, node: fx.Node, row: Bits, rows: dict[fx.Node, Bits]) -> None:
        for state in self._states.get(node, ()):
            rows[state] = rows[state] | row


class _Backward:
    """Traversal from messages to the nodes that they need."""

    def __init__(self, program: Program) -> None:
        self.order = program.order[::-1]
        self._program = program
        self._states = _states_written_late(program)
        self._loss, self._behind = _behind_loss(program)

    def sources(self, node: fx.Node) -> list[fx.Node]:
        late = self._program.late
        behind = self._behind if node is self._loss else ()
        users = [user for user in node.users if node in late or user not in late]
        reads = [user for state in self._states.get(node, ()) for user in state.users]
        return [*users, *behind, *(user for user in reads if user not in late)]

    def started(self, node: fx.Node) -> int | None:
        message = self._program.launched.get(node)
        return None if message is None else message.index

    def passed_on(self, node: fx.Node, row: Bits, rows: dict[fx.Node, Bits]) -> None:
        """Does nothing: `sources` already includes the readers of a state."""


def _states_written_late(program: Program) -> dict[fx.Node, list[fx.Node]]:
    """Maps late nodes to the inputs of the step that they update."""
    return {node: written(node) for node in program.order if node in program.late and written(node)}


def _behind_loss(program: Program) -> tuple[fx.Node | None, list[fx.Node]]:
    """Returns the last node of the forward that the backward reads, and the backward behind it."""
    order = [node for node in program.order if node not in program.late]
    for place in range(len(order) - 1, -1, -1):
        node = order[place]
        read = any(phase_of(user) == "backward" for user in node.users)
        if read and node.op == "call_function" and phase_of(node) == "forward":
            return node, [each for each in order[place + 1 :] if phase_of(each) == "backward"]
    return None, []
