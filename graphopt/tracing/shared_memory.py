"""Arrays in the memory of tensors, which a step makes by `tensor.numpy()`.

array = s.numpy()       what is in it is taken here
mean = array.mean()     eager code finds the same
s.add_(1)               and other values from here on: no use of the array may follow
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import torch
from torch import fx

from graphopt import _compat
from graphopt.errors import CaptureError
from graphopt.ir.metadata import source_line, storages_of
from graphopt.ir.operators import written
from graphopt.ir.source import SourceLine
from graphopt.tracing.numbers import refusal


class SharedMemory:
    """The memory of one tensor, in which an array lies.

    Args:
        graph: of the trace, so far.
        begun: the array is made here; else it was there before the step.

    Attributes:
        is_written: the step updates it where it does not use the array any more.
    """

    reaches_all = False

    def __init__(self, tensor: torch.Tensor, graph: fx.Graph, *, begun: bool = True) -> None:
        self._tensor = tensor
        self._graph: fx.Graph | None = graph
        self._key = _compat.storage_key(tensor)
        self._used = _last(graph)
        self._begun = self._used if begun else None
        self._line: SourceLine | None = None
        self.is_written = False

    def as_tensor(self) -> torch.Tensor | None:
        """A tensor over it; None where the tensor has got another one."""
        is_there = _compat.storage_key(self._tensor) == self._key
        return self._tensor.detach() if is_there else None

    def is_used(self) -> None:
        """The step uses the array here."""
        if self._graph is not None:
            self._used = _last(self._graph)

    def finish(self, places: dict[fx.Node, int], writes: Sequence[fx.Node]) -> None:
        """The step is over.

        Args:
            places: of all nodes of the graph.
            writes: nodes that update tensors.

        Raises:
            CaptureError: it has updated the tensor, and used the array behind that.
        """
        behind = [node for node in writes if places[node] > self._place(places)]
        own = [node for node in behind if any(self._key in storages_of(n) for n in written(node))]
        self._graph = None
        if own:
            self.is_written, self._line = True, source_line(own[0])
            if places[own[0]] <= places.get(self._used, len(places)):
                self.refuse()

    def _place(self, places: dict[fx.Node, int]) -> int:
        """Where the array is made."""
        return -1 if self._begun is None else places.get(self._begun, -1)

    def refuse(self) -> NoReturn:
        """Refuse a step that uses the array where the tensor has been updated."""
        raise CaptureError(
            "it updates a tensor in place in whose memory an array lies that it uses afterwards",
            location=None if self._line is None else str(self._line),
            hint="convert it once more where it is used; or a copy, which keeps the values:"
            " tensor.clone().numpy()",
        )


class OwnMemory:
    """The memory of an array that nothing else is made of, but views of it.

    Attributes:
        is_written: the step has changed the array since; no view that it has taken before may be
            used any more.
        is_exported: a tensor of the graph stands for the array, or for a view, and does not change.
        reaches_all: all that is made of it is made anew where it is used.
    """

    reaches_all = False

    def __init__(self) -> None:
        self.is_written = self.is_exported = False

    def is_used(self) -> None:
        """The step uses a view here."""
        if self.is_written:
            self.refuse()

    def refuse(self) -> NoReturn:
        """Refuse a step that uses a view where the array has been changed."""
        raise refusal(
            "it uses a part of an array behind a line that changes the array",
            "take a copy of the part, or take it behind that line",
        )


class MemoryOutside(OwnMemory):
    """That of an array, list or dictionary outside the step, as it is between two changes that each
    call makes when its graph has run."""

    reaches_all = True

    def refuse(self) -> NoReturn:
        """Refuse a step that uses what it has read behind the next change."""
        raise refusal(
            "it uses what it has read outside its arguments behind a line that changes it by what"
            " the graph gives",
            "read it again, or do all of that in a function whose result nobody uses",
        )


def refuse_written(memories: Sequence[SharedMemory], graph: fx.Graph) -> None:
    """Refuse a step that uses arrays in the memory of tensors that it has updated since."""
    if not memories:
        return
    places = {node: place for place, node in enumerate(graph.nodes)}
    writes = [node for node in places if node.op == "call_function" and written(node)]
    for each in memories:
        each.finish(places, writes)


def _last(graph: fx.Graph) -> fx.Node:
    found: fx.Node = next(iter(reversed(graph.nodes)))
    return found
