"""Options of `split_module` besides order and node names, as with torch's; and torch's users."""

from __future__ import annotations

from inspect import signature
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn
from torch._dynamo.backends import distributed as torch_ddp
from torch.fx.passes.split_module import split_module as torch_split_module
from torch.nn.parallel import DistributedDataParallel

from graphopt.partition import PartitionCycleError, split_module
from slices import examples
from test_partition_oracle import (
    assert_same,
    assert_same_submodules,
    calls,
    graphs,
    partitions,
    run,
)

OPTIONS = st.fixed_dictionaries(
    {
        "keep_original_node_name": st.booleans(),
        "keep_original_input_name": st.booleans(),
        "tuple_return": st.booleans(),
        "partition_affix": st.sampled_from([None, "pp", "", "a_1"]),
    }
)


@settings(max_examples=examples(30))
@given(st.data())
def test_every_combination_is_as_with_torch(data: st.DataObject) -> None:
    module = data.draw(graphs())
    assignment = data.draw(partitions(module.graph))
    options: dict[str, Any] = data.draw(OPTIONS)
    if any(n.target in ("*rest", "**named") for n in module.graph.nodes):
        options["keep_original_node_name"] = False  # a SyntaxError with torch's
    names: dict[str, str] = {}
    their_names: dict[str, str] = {}
    try:
        split = split_module(module, None, assignment.__getitem__, names, **options)
    except PartitionCycleError:
        return
    earlier = "tuple_return" not in signature(torch_split_module).parameters  # torch 2.11
    if earlier:
        assume(not options.pop("tuple_return"))
    theirs = torch_split_module(module, None, assignment.__getitem__, their_names, **options)
    assert_same(run(split), run(module))
    assert calls(split) == calls(theirs)
    assert names == their_names
    assert earlier or split.meta["partition_names"] == theirs.meta["partition_names"]
    assert_same_submodules(split, theirs)
    for node in split.graph.find_nodes(op="call_module"):
        (result,) = split.get_submodule(node.target).graph.find_nodes(op="output")[0].args
        several = isinstance(result, tuple)
        values = tuple(n.meta["val"] for n in result) if several else result.meta["val"]
        assert node.meta.get("val", ()) == values


class Net(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu() * self.scale
        return x


def test_names_of_partitions_are_those_of_the_last_split() -> None:
    module = fx.symbolic_trace(Net(4))
    once = split_module(module, None, lambda node: "mul" not in node.name, on_cycle="merge")
    assert once.meta["partition_names"] == {name for name, _ in once.named_children()}
    again = split_module(once, None, lambda node: 0, partition_affix="all")
    assert again.meta["partition_names"] == {"submod_all_0"}


def train(model: nn.Module, calls_of: Any) -> list[Tensor]:
    x = torch.randn(3, 16, generator=torch.Generator().manual_seed(0))
    calls_of(x).square().sum().backward()
    return [parameter.grad for parameter in model.parameters()]


def test_ddp_optimizer_of_torch_takes_ours(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """What `torch.compile` of a DistributedDataParallel does: a graph for each bucket."""
    seen: list[fx.GraphModule] = []

    def ours(*args: Any, **kwargs: Any) -> fx.GraphModule:
        seen.append(split_module(*args, **kwargs))
        return seen[-1]

    monkeypatch.setattr(dist, "_DEFAULT_FIRST_BUCKET_BYTES", 1000)
    monkeypatch.setattr(torch_ddp.fx.passes.split_module, "split_module", ours)
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        model = Net(16)
        expected = train(model, model)
        model.zero_grad()
        replica = DistributedDataParallel(model, bucket_cap_mb=0.001)
        found = train(model, torch.compile(replica, backend="aot_eager"))
    finally:
        dist.destroy_process_group()
        torch._dynamo.reset()
    assert len(seen) == 1
    assert len(seen[0].meta["partition_names"]) > 1
    assert all(map(torch.equal, found, expected))
