"""The running graphs of a step, and their continuation where an assumption fails.

    call ─▶ first graph ─ assumption fails ─▶ ResumePoint
        its other branch is known ─▶ ResumedCall ─▶ the rest
        it is not                 ─▶ the other graph from the beginning, and learn

What the first graph has computed before the assumption stays (`ResumePoint`), until it is known
whether the other branch goes on from there. It does so from the second time on: the first time its
graph runs from the beginning, and what is left of it is found out afterwards.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch

from graphopt import _compat
from graphopt.branches.continuation import (
    Beginning,
    Continuation,
    NotSharedError,
    StoppedGraph,
    continuation_of,
    from_the_beginning,
)
from graphopt.branches.drawn_generators import DrawnStates
from graphopt.branches.handing import handing_out, launched_before, launched_by
from graphopt.branches.sent_collectives import SentBefore
from graphopt.host.decisions.assumptions import assumption_number
from graphopt.ir.bits import same_bits
from graphopt.iter_graph import IterGraphModule
from graphopt.runtime.memory import collector_paused

logger = logging.getLogger("graphopt")

MakeReady = Callable[[IterGraphModule], None]

MOST = 16
"""Graphs that go on from one graph, or from another one that does."""


class Branch:
    """A graph of a step that runs from the beginning of a call.

    Args:
        module: after all stages.
        begins: what a call has done when it begins.

    Attributes:
        module: hands out, where one of its assumptions fails, what the graphs take that go on.
    """

    def __init__(self, module: IterGraphModule, begins: Beginning = from_the_beginning) -> None:
        self.module, self._begins = module, begins
        self._family: WeakSet[ResumedBranch] = WeakSet()
        self._onward: WeakKeyDictionary[Branch, dict[int, ResumedBranch | None]] = (
            WeakKeyDictionary()
        )

    def run(self, flat: Sequence[Any], there: list[Any], leave: bool) -> Any:
        """Runs the graph of the branch on the inputs of a call.

        Args:
            flat: one value per input of the step.
            there: the values that have been computed before the graph runs.
            leave: late work may be left in flight.
        """
        return self.module.forward(*flat, last_iter=not leave)

    def onward(self, index: int, other: Branch) -> ResumedBranch | None:
        """The graph that continues in another branch after assumption `index` fails, if known."""
        return self._onward.get(other, {}).get(index)

    def learn(self, index: int, other: Branch, make_ready: MakeReady) -> None:
        """Builds the graph that continues in another branch after assumption `index` fails.

        Args:
            make_ready: the stages behind the passes.
        """
        known = self._onward.setdefault(other, {})
        if index in known or len(self._family) >= MOST:
            return
        known[index] = None
        try:
            with collector_paused():
                known[index] = self._found(index, other, make_ready)
        except NotSharedError as error:
            logger.info("where a decision goes another way, nothing is shared: %s", error)
        except Exception:  # the other branch begins from the beginning, as before
            logger.warning("where a decision goes another way, nothing is shared", exc_info=True)

    def _found(self, index: int, other: Branch, make_ready: MakeReady) -> ResumedBranch:
        graph = self.module.graph
        node = assumption_number(graph, index)
        assert node is not None, "it has failed"
        rest = continuation_of(StoppedGraph(graph, self._begins, node), other.module)
        handing, positions = handing_out(self.module, node, rest.taken)
        make_ready(handing)
        launched = launched_before(handing.first_executable, node.target, rest.drawn)
        make_ready(rest.module)
        launched += ["then", *launched_by(rest.module.first_executable)]
        handing.meta.update(self.module.meta)
        self.module = handing
        logger.info("another branch goes on from %d values: %s", len(positions), node.target)
        found = ResumedBranch(rest, positions, launched)
        found._family = self._family
        self._family.add(found)
        return found


class ResumedBranch(Branch):
    """A graph that continues a call in another branch, from values already computed.

    Args:
        rest: the continuation: the graph that is left.
        positions: of the values that it takes, among those that the failed graph hands out.
        launched: the collectives that have been launched, and those that it launches.

    Attributes:
        plan: a number that is the same on ranks where these are.
    """

    def __init__(
        self, rest: Continuation, positions: Sequence[int], launched: Sequence[str]
    ) -> None:
        super().__init__(rest.module, rest.begins)
        self.positions, self._same = positions, rest.same
        digest = hashlib.sha256(repr(list(launched)).encode()).digest()
        self.plan = 1 + int.from_bytes(digest[:7], "big")

    def run(self, flat: Sequence[Any], there: list[Any], leave: bool) -> Any:
        return self.module.go_on(flat, there)

    def fits(self, before: Sequence[Any], flat: Sequence[Any]) -> bool:
        """True if the inputs that both graphs must share are the same."""
        return all(_is_same(before[i], flat[j]) for i, j in self._same)


def _is_same(one: Any, other: Any) -> bool:
    """True if two inputs are the same tensor, or equal numbers."""
    if one is other:
        return True
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return False
    if one.layout is not torch.strided or other.layout is not torch.strided:
        return False
    if _layout(one) != _layout(other):
        return False
    if one.data_ptr() == other.data_ptr():
        return _compat.storage_key(one) == _compat.storage_key(other)
    return one.dim() == 0 and one.device.type == "cpu" and same_bits(one, other)


def _layout(value: torch.Tensor) -> tuple[Any, ...]:
    return value.shape, value.stride(), value.dtype, value.device


@dataclass
class ResumePoint:
    """The values that a call has computed before an assumption failed.

    Attributes:
        branch: the branch that ran.
        index: the index of the assumption.
        flat: its inputs.
        handed_out: the values that it has computed.
        drawn: the generators from which it has drawn, as they were then.
        sent: the results of its collectives, where other ranks have gone on.
    """

    branch: Branch
    index: int
    flat: list[Any]
    handed_out: Sequence[Any]
    drawn: DrawnStates
    sent: SentBefore = field(default_factory=dict)


@dataclass
class ResumedCall:
    """A call that continues from values of another graph.

    Attributes:
        branch: the branch that continues.
        there: the values that it continues from; taken out when it runs.
        left: by the other graph.
    """

    branch: ResumedBranch
    there: list[Any]
    left: ResumePoint
