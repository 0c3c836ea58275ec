"""Small graphs drawn node by node, with fresh metadata."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx

from graphopt import _compat
from graphopt.comm import get_all_comm_blocks
from graphopt.graph_utils import call_function_with_meta, is_operator
from graphopt.passes import comm_fusion_with_concat
from graphopt.testing import check_pass

c10d = torch.ops._c10d_functional


class Sketch:
    """A graph that grows at its end. Inputs come first."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self._mode = _compat.new_fake_mode()

    def input(
        self, name: str, *shape: int, dtype: torch.dtype = torch.float32, kind: str | None = None
    ) -> fx.Node:
        node = self.graph.placeholder(name)
        with self._mode:
            node.meta["val"] = torch.empty(shape, dtype=dtype)
        if kind is not None:
            node.meta["kind"] = kind
        return node

    def call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        node = call_function_with_meta(self.graph, target, args, kwargs)
        node.meta["phase"] = "forward"
        return node

    def all_reduce(self, value: fx.Node, operation: str = "sum", group: str = "0") -> fx.Node:
        return self.call(c10d.all_reduce.default, value, operation, group)

    def wait(self, launch: fx.Node) -> fx.Node:
        return self.call(c10d.wait_tensor.default, launch)

    def average(self, gradient: fx.Node, factor: float = 0.5) -> fx.Node:
        """The launch for a gradient, scaled as the capture does it."""
        return self.all_reduce(self.call(torch.ops.aten.mul.Tensor, gradient, factor))

    def step(
        self,
        results: Sequence[fx.Node],
        updates: Sequence[fx.Node] = (),
        carried: Sequence[fx.Node] = (),
    ) -> fx.GraphModule:
        self.graph.output((list(results), list(updates), list(carried)))
        return fx.GraphModule(torch.nn.Module(), self.graph)


def targets(graph_module: fx.GraphModule) -> list[str]:
    """Names of the operators that a graph calls, in order."""
    called = [node.target for node in graph_module.graph.nodes if node.op == "call_function"]
    return [str(target.__name__).partition(".")[0] for target in called]


def values_for(graph_module: fx.GraphModule) -> list[Tensor]:
    """Random values for the inputs of a graph."""
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(node.meta["val"].shape, generator=generator).to(node.meta["val"].dtype)
        for node in graph_module.graph.nodes
        if node.op == "placeholder"
    ]


def gradients(*shapes: tuple[int, ...], **options: Any) -> fx.GraphModule:
    """A step that averages one gradient for each shape and reads all of them at its end."""
    s = Sketch()
    inputs = [s.input(f"g{i}", *shape, **options) for i, shape in enumerate(shapes)]
    launches = [s.average(s.call(torch.ops.aten.neg.default, x)) for x in inputs]
    return s.step([s.call(torch.ops.aten.exp.default, s.wait(launch)) for launch in launches])


def bucket_sizes(graph_module: fx.GraphModule) -> list[int]:
    """Members of each all-reduce, in launch order."""
    sizes = []
    for block in get_all_comm_blocks(graph_module, "all_reduce"):
        splits = [n for n in block.tail if is_operator(n.target, "aten::split_with_sizes")]
        sizes.append(len(splits[0].users) if splits else 1)
    return sizes


def fused(
    graph_module: fx.GraphModule, values: Sequence[Tensor] | None = None, **options: Any
) -> fx.GraphModule:
    """Fuse all-reduces, after `check_pass` has compared results and verified the pass."""
    inputs = values_for(graph_module) if values is None else values
    check_pass(graph_module, inputs, comm_fusion_with_concat, may_change_nothing=True, **options)
    options.pop("changes", None)
    comm_fusion_with_concat(graph_module, **options)
    return graph_module


def skip_without_sends_to_itself() -> None:
    """Where a rank has several stages, torch 2.11's schedules send to it, which gloo refuses."""
    if torch.__version__ < "2.12":
        pytest.skip("torch 2.11 runs no several stages on one gloo rank")


@contextmanager
def one_rank() -> Iterator[None]:
    """A gloo group of this process alone, named "0": collectives run, and give what they got."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
