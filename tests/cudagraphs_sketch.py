"""Graphs of fake CUDA tensors, drawn node by node."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from graphopt.lowering.cudagraphs.pieces import Pieces, find_pieces, gather_items
from graphopt.lowering.cudagraphs.recorder import Recordable
from sketch import Sketch

aten = torch.ops.aten

CUDA = torch.device("cuda:0")


class CudaSketch(Sketch):
    """A graph of fake tensors on the first CUDA device."""

    def input(
        self,
        name: str,
        *shape: int,
        dtype: torch.dtype = torch.float32,
        kind: str | None = "user_input",
        device: torch.device = CUDA,
    ) -> fx.Node:
        node = self.graph.placeholder(name)
        with self._mode:
            node.meta["val"] = torch.empty(shape, dtype=dtype, device=device)
        node.meta["kind"] = kind
        return node

    def call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        with self._mode:  # for operators that make a tensor
            return super().call(target, *args, **kwargs)

    def chain(self, value: fx.Node, length: int = 8, **meta: Any) -> fx.Node:
        """So many operators, one after another."""
        for _ in range(length):
            value = self.call(aten.sin.default, value)
            value.meta |= meta
        return value

    def raw(self, target: Any, args: tuple[Any, ...], val: Any, **kwargs: Any) -> fx.Node:
        """A call whose value cannot be computed here."""
        node = self.graph.call_function(target, args, kwargs)
        node.meta["val"] = val
        return node

    def found(
        self,
        results: Sequence[fx.Node],
        updates: Sequence[fx.Node] = (),
        carried: Sequence[fx.Node] = (),
        *,
        groups: bool = True,
    ) -> Pieces:
        self.graph.output((list(results), list(updates), list(carried)))
        gather_items(self.graph)
        recordable = Recordable("cuda", lambda name: groups)
        gm = fx.GraphModule({}, fx.Graph())
        gm.graph = self.graph  # whose constants need no values
        return find_pieces(gm, recordable, min_ops=4)


def targets(nodes: Sequence[fx.Node]) -> list[str]:
    return [str(node.target).removeprefix("aten.").partition(".")[0] for node in nodes]


def outside(found: Pieces) -> dict[str, str]:
    """Reason by operator."""
    names = targets(list(found.reasons))
    return dict(zip(names, found.reasons.values(), strict=True))


class NoRecorder:
    """For graphs that are cut and not run."""

    device_type = "cuda"

    def records_group(self, name: str) -> bool:
        return True

    def new_pool(self) -> Any:
        raise AssertionError("nothing is recorded")

    warm_up = record = new_pool
