"""Programs for the simulator, written as text.

c3        3 seconds of compute, after all compute before it and what was waited for
L0=7      launch of message 0, which travels 7 seconds; L0=1+6: 1 second of latency, then 6
L0=7@tp   in the group "tp"
W0        wait for message 0
W0~       wait for message 0 of the iteration before
"""

from __future__ import annotations

import operator
from collections.abc import Mapping

import torch
from torch import fx

from graphopt.cost import Transfer
from graphopt.schedule import Message, Program

c10d = torch.ops._c10d_functional


class _Writer:
    """The nodes of one program."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.order: list[fx.Node] = []
        self.late: set[fx.Node] = set()
        self.seconds: dict[fx.Node, float] = {}
        self.launches: dict[str, tuple[fx.Node, Transfer]] = {}
        self.waits: dict[str, fx.Node] = {}
        self._state = self.graph.placeholder("x")
        self._needed = [self._state]

    def compute(self, seconds: float) -> None:
        node = self.graph.call_function(operator.add, tuple(self._needed))
        self._needed = [node]
        self.seconds[node] = seconds
        self.order.append(node)

    def launch(self, name: str, transfer: Transfer, group: str) -> None:
        node = self.graph.call_function(c10d.all_reduce.default, (self._needed[0], "sum", group))
        self.launches[name] = node, transfer
        self.order.append(node)

    def wait(self, name: str, late: bool) -> None:
        node = self.graph.call_function(c10d.wait_tensor.default, ())
        self.waits[name] = node
        self.order.append(node)
        if not late:
            self._needed.append(node)
            return
        with self.graph.inserting_before(next(iter(self.graph.nodes))):
            state = self.graph.placeholder(f"s{name}")
        update = self.graph.call_function(torch.ops.aten.copy_.default, (state, node))
        self.order.append(update)
        self.late |= {node, update}
        self._needed.append(state)


def program(text: str, links: Mapping[str, tuple[str, ...]] | None = None) -> Program:
    """The program that a text describes; see the docstring of the module."""
    writer = _Writer()
    for word in text.split():
        if word[0] == "c":
            writer.compute(float(word[1:]))
        elif word[0] == "L":
            name, _, described = word[1:].partition("=")
            times, _, group = described.partition("@")
            latency, _, transfer = times.rpartition("+")
            group = group or "dp"
            taken = (links or {}).get(group, ("network",))
            writer.launch(name, Transfer(float(latency or 0), float(transfer), taken), group)
        else:
            writer.wait(word[1:].removesuffix("~"), word.endswith("~"))
    for name, wait in writer.waits.items():
        wait.args = (writer.launches[name][0],)
    messages = []
    for name, (launch, transfer) in writer.launches.items():
        waits = tuple(filter(None, [writer.waits.get(name)]))
        lag = int(any(wait in writer.late for wait in waits))
        reader = next((user for wait in waits for user in wait.users), None)
        messages.append(Message(len(messages), launch, transfer, 1, lag, waits, reader))
    inputs = [node for node in writer.graph.nodes if node.op == "placeholder"]
    return Program([*inputs, *writer.order], frozenset(writer.late), writer.seconds, messages)
