"""In which order partitions run, with which options, and with sizes that are not known."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from inspect import signature
from typing import Any

import networkx as nx
import pytest
import torch
import torch.distributed as dist
from functorch import make_fx
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn
from torch._dynamo.backends import distributed as torch_ddp
from torch.fx.passes.split_module import split_module as torch_split_module
from torch.nn.parallel import DistributedDataParallel

import graphopt
from graphopt.partition import PartitionCycleError, partition_graph, split_module
from partitions import by_name
from slices import examples
from test_partition_oracle import (
    assert_same,
    assert_same_submodules,
    calls,
    graphs,
    partitions,
    run,
)


def order(module: fx.GraphModule) -> list[str]:
    return [str(node.target) for node in module.graph.find_nodes(op="call_module")]


def independent(count: int) -> fx.GraphModule:
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output(tuple(graph.call_function(torch.sin, (x,)) for _ in range(count)))
    return fx.GraphModule({}, graph)


def crossing() -> fx.GraphModule:
    """The first partition reads what the second computes."""

    def f(x: Tensor) -> Tensor:
        return x.sin() + x.cos()

    return fx.symbolic_trace(f)


LATER = by_name(sin="early", cos="late", add="early")


# ------------------------------------------------------------------------- the order


def test_first_appearance_first() -> None:
    module = independent(5)
    split = split_module(module, None, lambda node: node.name)
    assert order(split) == ["submod_sin", *(f"submod_sin_{i}" for i in range(1, 5))]


def test_dependencies_come_before_appearance() -> None:
    split = split_module(crossing(), None, LATER)
    assert order(split) == ["submod_late", "submod_early"]
    x = torch.randn(3)
    assert torch.equal(split(x), crossing()(x))


def test_original_order_is_refused_where_it_cannot_be() -> None:
    with pytest.raises(graphopt.PartitionError) as caught:
        split_module(crossing(), None, LATER, keep_original_order=True)
    assert str(caught.value) == (
        "the original order of partitions cannot be kept: early comes before late\n"
        "  late -> early:  %add reads %cos\n"
        "  hint:  leave keep_original_order out to have them ordered by what they read"
    )


# ------------------------------------------------------------------------- cycles


def cyclic() -> fx.GraphModule:
    def f(x: Tensor) -> Tensor:
        a = x + 1
        b = a * 2
        c = b.sin()
        return a - c

    return fx.symbolic_trace(f)


THREE = by_name(add=0, mul=1, sin=2, sub=0)


def test_cycle_is_printed_with_an_edge_for_each_step() -> None:
    with pytest.raises(graphopt.PartitionError) as caught:
        split_module(cyclic(), None, THREE)
    assert str(caught.value) == (
        "partitions depend on each other: 0 -> 1 -> 2 -> 0\n"
        "  0 -> 1:  %mul reads %add\n"
        "  1 -> 2:  %sin reads %mul\n"
        "  2 -> 0:  %sub reads %sin\n"
        '  hint:  give these nodes one partition, or pass on_cycle="merge"'
    )
    assert isinstance(caught.value, PartitionCycleError)
    assert caught.value.cycle == ["0", "1", "2"]


def test_the_users_line_is_shown() -> None:
    model = nn.Linear(2, 2)

    def step(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).sin().cos()

    module = graphopt.capture(step, model, torch.randn(2)).graph_module
    with pytest.raises(PartitionCycleError, match=r"from:  .*\.py:\d+  return model\(x\).sin"):
        split_module(module, None, lambda node: node.name == "sin")


def test_the_shortest_cycle_is_shown() -> None:
    def f(x: Tensor) -> Tensor:
        a = x.sin()
        b = a.cos()
        c = b.tan()
        return (c + a) * b

    module = fx.symbolic_trace(f)
    with pytest.raises(PartitionCycleError) as caught:
        split_module(module, None, by_name(sin=0, cos=1, tan=2, add=3, mul=0))
    assert caught.value.cycle == ["0", "1"]


def test_cycles_merge() -> None:
    def f(x: Tensor) -> Tensor:
        a = x.exp()
        b = a + 1
        c = b * 2
        return (b - c).tanh()

    module = fx.symbolic_trace(f)
    names = {"exp": "in", "add": "p", "mul": "q", "sub": "p", "tanh": "out"}
    split = split_module(module, None, lambda n: names[n.name], on_cycle="merge")
    assert order(split) == ["submod_in", "submod_p", "submod_out"]
    assert [n.name for n in split.submod_p.graph.nodes][1:-1] == ["add", "mul", "sub"]
    x = torch.randn(3)
    assert torch.equal(split(x), module(x))


def test_independent_cycles_merge_apart() -> None:
    def f(x: Tensor, y: Tensor) -> Any:
        a, b = x.sin(), y.cos()
        return a + a.exp(), b + b.tan()

    module = fx.symbolic_trace(f)
    split = split_module(
        module, None, by_name(sin=0, cos=1, exp=2, add=0, tan=3, add_1=1), on_cycle="merge"
    )
    assert order(split) == ["submod_0", "submod_1"]


def test_many_partitions_in_a_row() -> None:
    graph = fx.Graph()
    value = graph.placeholder("x")
    for _ in range(3000):
        value = graph.call_function(torch.sin, (value,))
    graph.output(value)
    module = fx.GraphModule({}, graph)
    number = {node: index for index, node in enumerate(graph.nodes)}
    with pytest.raises(PartitionCycleError) as caught:
        split_module(module, None, lambda node: number[node] % 2999)
    assert len(caught.value.cycle) == 2999


# ------------------------------------------------------------------------- the view


def test_view_of_partitions() -> None:
    view = partition_graph(crossing(), LATER)
    assert isinstance(view, nx.DiGraph)
    assert list(view) == ["early", "late"]
    assert list(view.edges) == [("late", "early")]
    edge = view.edges["late", "early"]
    assert edge["reason"] == "%add reads %cos"
    assert [node.name for node in edge["values"]] == ["cos"]
    early, late = (view.nodes[name]["partition"] for name in view)
    assert [node.name for node in early.nodes] == ["sin", "add"]
    assert [node.name for node in early.inputs] == ["x", "cos"]
    assert [node.name for node in early.outputs] == ["add"]
    assert (early.dependencies, early.dependents) == (["late"], [])
    assert (late.dependencies, late.dependents) == ([], ["early"])
    assert late.submod_name == "submod_late"


def test_view_of_a_cycle() -> None:
    view = partition_graph(cyclic(), THREE)
    assert [sorted(cycle) for cycle in nx.simple_cycles(view)] == [["0", "1", "2"]]


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


@pytest.fixture(autouse=True)
def _nothing_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def captured_by_dynamo(f: Callable[..., Any], *inputs: Tensor) -> fx.GraphModule:
    found: list[fx.GraphModule] = []

    def backend(module: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        found.append(module)
        return module.forward

    torch.compile(f, backend=backend, dynamic=True, fullgraph=True)(*inputs)
    return found[0]


def inputs_of(split: fx.GraphModule) -> dict[str, list[str]]:
    called = (str(n.target) for n in split.graph.find_nodes(op="call_module"))
    return {
        name: [n.name for n in split.get_submodule(name).graph.find_nodes(op="placeholder")]
        for name in called
    }


def arguments(module: fx.GraphModule, tensors: dict[str, Tensor]) -> list[Any]:
    """Tensors by name, and the sizes that they have where the graph takes sizes as well."""
    placeholders = {n.name: n for n in module.graph.find_nodes(op="placeholder")}
    sizes = {
        str(symbol): size
        for name, tensor in tensors.items()
        for symbol, size in zip(
            placeholders[name].meta["example_value"].shape, tensor.shape, strict=True
        )
    }
    return [
        tensors[name] if name in tensors else sizes[str(node.meta["example_value"])]
        for name, node in placeholders.items()
    ]


def reshaping(x: Tensor, y: Tensor) -> Tensor:
    flat = x.sin().view(x.shape[0] * x.shape[1])
    added = flat + y.sum()
    return added.reshape(x.shape[0], -1) * 2


def test_placeholders_that_are_sizes_go_with_the_tensor() -> None:
    module = captured_by_dynamo(reshaping, torch.randn(3, 4), torch.randn(5))
    sizes = {n.name for n in module.graph.find_nodes(op="placeholder") if n.name.startswith("s")}
    split = split_module(module, None, lambda node: node.name, keep_original_order=True)
    theirs = torch_split_module(module, None, lambda node: node.name, keep_original_order=True)
    assert inputs_of(split) == inputs_of(theirs)
    first, *_ = inputs_of(split).values()
    assert first[0] == "l_x_" and len(sizes & {*first}) == 2
    given = arguments(module, {"l_x_": torch.randn(6, 2), "l_y_": torch.randn(7)})
    (found,), (expected,) = split(*given), module(*given)
    assert torch.equal(found, expected)


def test_sizes_computed_elsewhere() -> None:
    module = make_fx(reshaping, tracing_mode="symbolic")(torch.randn(3, 4), torch.randn(5))
    names = [n.name for n in module.graph.nodes if n.op == "call_function"]
    assert names[:5] == ["sin", "sym_size_int", "sym_size_int_1", "mul", "view"]
    split = split_module(module, None, lambda node: int(names.index(node.name) > 4))
    # `view` has s0 * s1 elements: s1 is in the shape of no other input.
    assert inputs_of(split)["submod_1"] == ["y_1", "view", "sym_size_int", "sym_size_int_1"]
    x, y = torch.randn(6, 2), torch.randn(7)
    assert torch.equal(split(x, y), module(x, y))
    assert torch.equal(split(x, y), reshaping(x, y))


def test_sizes_that_a_shape_shows_are_not_passed() -> None:
    def f(x: Tensor) -> Tensor:
        return x.sin().view(x.shape[0], -1).cos()

    module = make_fx(f, tracing_mode="symbolic")(torch.randn(3, 4))
    split = split_module(module, None, lambda node: node.name == "cos")
    assert inputs_of(split)["submod_True"] == ["view"]


def test_sizes_computed_later_are_not_passed() -> None:
    def f(x: Tensor) -> Tensor:
        flat = x.reshape(-1).sin()
        return flat.cos() * x.shape[1]

    module = make_fx(f, tracing_mode="symbolic")(torch.randn(3, 4))
    size, cos = (n for n in module.graph.nodes if n.name in ("sym_size_int", "cos"))
    cos.append(size)
    split = split_module(module, None, lambda node: node.name)
    x = torch.randn(2, 5)
    assert torch.equal(split(x), f(x))


@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_sizes_that_depend_on_data() -> None:
    def f(x: Tensor) -> Tensor:
        found = torch.nonzero(x)
        return (found * 2).sum(0) + found.shape[0]

    module = captured_by_dynamo(f, torch.randn(3, 4))
    with pytest.raises(RuntimeError, match="cycle exists between partitions"):
        torch_split_module(module, None, lambda node: node.name)
    split = split_module(module, None, lambda node: node.name)
    x = torch.tensor([[1.0, 0.0], [0.0, 2.0], [3.0, 0.0]])
    assert torch.equal(split(*arguments(module, {"l_x_": x}))[0], f(x))
