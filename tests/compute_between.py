"""Which compute a step's collectives need, and which needs them: sums of seconds that hold for any
order of the step in which nothing is recomputed before the loss is there.

Activations that are recomputed for the backward need nothing that the loss gives, and could be made
in the forward; but who recomputes does so because they could not be held until then.
"""

from __future__ import annotations

from functools import reduce
from operator import or_

import numpy as np
from numpy.typing import NDArray
from torch import fx

from graphopt.graph_utils import written
from graphopt.ir.metadata import phase_of
from graphopt.schedule import Program

States = dict[fx.Node, list[fx.Node]]
Bits = int
"""A set of messages: bit `n` says if message `n` is in it."""


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
        states = {n: written(n) for n in program.order if n in program.late and written(n)}
        forward, backward = _needed_messages(program, states), _needing_messages(program, states)
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
    """Returns sets of messages as a matrix with `count` columns."""
    size = (count + 7) // 8
    packed = np.frombuffer(b"".join(row.to_bytes(size, "little") for row in rows), dtype=np.uint8)
    bits = np.unpackbits(packed.reshape(len(rows), size), axis=1, bitorder="little")
    return bits[:, :count].astype(bool)


def _needed_messages(program: Program, states: States) -> dict[fx.Node, Bits]:
    """Returns for each node the messages whose results it needs.

    Args:
        states: for each late node, the inputs of the step that it updates.
    """
    loss, behind = _behind_loss(program)
    late, after_loss = program.late, set(behind)
    rows: dict[fx.Node, Bits] = {}
    for node in program.order:
        sources = node.all_input_nodes
        if node in late:  # what it needs of others was computed in the iteration before
            sources = [s for s in sources if s in late or s.op == "placeholder"]
        elif loss and node in after_loss:
            sources = [*sources, loss]
        row = _union(rows, sources)
        if node in program.waited:
            row |= 1 << program.waited[node].index
        rows[node] = row
        for state in states.get(node, ()):
            rows[state] |= row
    return rows


def _needing_messages(program: Program, states: States) -> dict[fx.Node, Bits]:
    """Returns for each node the messages whose launches need it."""
    loss, behind = _behind_loss(program)
    late = program.late
    rows: dict[fx.Node, Bits] = {}
    for node in reversed(program.order):
        users = [user for user in node.users if node in late or user not in late]
        reads = [user for state in states.get(node, ()) for user in state.users]
        users += [user for user in reads if user not in late]
        row = _union(rows, [*users, *(behind if node is loss else ())])
        if node in program.launched:
            row |= 1 << program.launched[node].index
        rows[node] = row
    return rows


def _union(rows: dict[fx.Node, Bits], nodes: list[fx.Node]) -> Bits:
    """Returns the messages of all these nodes."""
    return reduce(or_, (rows.get(node, 0) for node in nodes), 0)


def _behind_loss(program: Program) -> tuple[fx.Node | None, list[fx.Node]]:
    """Returns the last node of the forward that the backward reads, and the backward behind it."""
    order = [node for node in program.order if node not in program.late]
    for place in range(len(order) - 1, -1, -1):
        node = order[place]
        read = any(phase_of(user) == "backward" for user in node.users)
        if read and node.op == "call_function" and phase_of(node) == "forward":
            return node, [each for each in order[place + 1 :] if phase_of(each) == "backward"]
    return None, []
