"""Random graphs and random partitions: `split_module` against torch's, and against the whole graph.

Both are given the same graph and the same partition of each node. Where torch's splits, ours gives
the same submodules, and the same calls of them; in which order is compared with a plain definition.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn
from torch.fx.passes.split_module import split_module as torch_split_module

from graphopt.errors import PartitionError
from graphopt.partition import PartitionCycleError, split_module
from slices import examples

Draw = st.DataObject
KEYS = ("val", "example_value")


class Root(nn.Module):
    """What graphs call and read."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))
        self.inner = nn.Module()
        self.inner.scale = nn.Parameter(torch.randn(4))
        self.inner.linear = nn.Linear(4, 4)
        self.inner.register_buffer("shift", torch.randn(4))
        self.act = nn.Sequential(nn.Tanh(), nn.Sigmoid())
        self.unused = nn.Linear(3, 3)


class RandomGraph:
    """Draws calls of all kinds on what is there already."""

    def __init__(self, draw: Callable[[st.SearchStrategy[Any]], Any]) -> None:
        self.draw = draw
        self.graph = fx.Graph()
        self.pool = [self.graph.placeholder("x"), self.graph.placeholder("y")]
        z: Any = 1
        if draw(st.booleans()):
            z = self.graph.placeholder("z", default_value=0.5)
        if draw(st.booleans()):
            rest = self.graph.placeholder("*rest")
            self.pool.append(self.graph.call_function(operator.getitem, (rest, 0)))
        if draw(st.booleans()):
            named = self.graph.placeholder("**named")
            self.pool.append(self.graph.call_function(operator.getitem, (named, "w")))
        self.pool.append(self.graph.call_function(torch.mul, (self.pool[0], z)))

    def value(self) -> fx.Node:
        # Mostly of the last few, for graphs with depth.
        return self.draw(st.sampled_from(self.pool[-4:] + self.pool))

    def add_call(self) -> None:
        x, y = self.value(), self.value()
        call = self.graph.call_function
        kind = self.draw(st.integers(0, 9))
        if kind == 0:
            self.pool.append(call(torch.sin, (x,)))
        elif kind == 1:
            self.pool.append(call(operator.add, (x, y)))
        elif kind == 2:
            self.pool.append(call(torch.add, (x, y), {"alpha": 2}))
        elif kind == 3:
            self.pool.append(self.graph.call_method("mul", (x, y)))
        elif kind == 4:
            path = self.draw(st.sampled_from(["inner.linear", "act.0", "act.1", "act"]))
            stacked = call(torch.stack, ([x, y],))
            summed = call(torch.sum, (stacked,), {"dim": 0})
            whole = call(torch.add, (summed, self.graph.get_attr("inner.shift")))
            self.pool.append(self.graph.call_module(path, (whole,)))
        elif kind == 5:
            path = self.draw(st.sampled_from(["weight", "inner.scale"]))
            self.pool.append(call(torch.mul, (x, self.graph.get_attr(path))))
        elif kind == 6:
            halves = call(torch.split, (call(torch.add, (x, self.graph.get_attr("weight"))), 2))
            items = [call(operator.getitem, (halves, i)) for i in (0, 1)]
            self.pool.append(call(torch.cat, ([items[1], items[0]],)))
        elif kind == 7:
            whole = call(torch.add, (x, self.graph.get_attr("weight")))
            largest = self.graph.call_method("max", (whole,), {"dim": 0})
            self.pool.append(call(torch.add, (call(operator.getitem, (largest, 0)), x)))
        elif kind == 8:
            call(torch.cos, (y,))  # nobody reads it
        else:
            self.pool.append(call(torch.where, (call(operator.gt, (x, 0.1)), x, y)))

    def finish(self) -> fx.GraphModule:
        x, y = self.value(), self.value()
        self.graph.output({"a": x, "b": (y, 3), "c": [self.pool[0], None]})
        for node in self.graph.nodes:
            node.meta = {"val": f"value of {node.name}", "note": [node.name]}
        return fx.GraphModule(Root(), self.graph)


@st.composite
def graphs(draw: Any) -> fx.GraphModule:
    torch.manual_seed(0)
    random = RandomGraph(draw)
    for _ in range(draw(st.integers(0, 12))):
        random.add_call()
    return random.finish()


@st.composite
def partitions(draw: Any, graph: fx.Graph) -> dict[fx.Node, int]:
    """Numbers that mostly grow, so that many graphs can be split, with holes and exceptions."""
    number, found = 0, {}
    for node in graph.nodes:
        number += draw(st.sampled_from([0, 0, 0, 0, 1, 2]))
        found[node] = max(0, number - draw(st.sampled_from([0] * 12 + [1, 3])))
    return found


def run(module: nn.Module) -> list[Any]:
    generator = torch.Generator().manual_seed(1)
    x, y, r, w = (torch.randn(4, generator=generator) for _ in range(4))
    placeholders = {n.target for n in module.graph.nodes if n.op == "placeholder"}
    z = (torch.ones(4),) if "z" in placeholders and "*rest" in placeholders else ()
    rest = (r,) if "*rest" in placeholders else ()
    named = {"w": w} if "**named" in placeholders else {}
    result = module(x, y, *z, *rest, **named)
    return [result["a"], result["b"][0], result["b"][1], *result["c"]]


def assert_same(a: list[Any], b: list[Any]) -> None:
    assert len(a) == len(b)
    for left, right in zip(a, b, strict=True):
        same = torch.equal(left, right) if isinstance(left, Tensor) else left == right
        assert same


def lines(graph: fx.Graph) -> list[str]:
    """All there is to say about each node."""
    return [
        f"{n.op} {n.name} {n.target} {n.args} {n.kwargs} {n.type} {n.meta}" for n in graph.nodes
    ]


def untouched(module: fx.GraphModule) -> list[str]:
    return [*lines(module.graph), str(sorted(name for name, _ in module.named_modules()))]


def calls(module: fx.GraphModule) -> dict[str, list[Any]]:
    """For each submodule its arguments, as (submodule, place among its outputs) or a target."""
    sources: dict[fx.Node, Any] = {}
    found: dict[str, list[Any]] = {}
    for node in module.graph.nodes:
        if node.op == "call_module":
            found[str(node.target)] = [sources[a] for a in node.args]
            sources[node] = (node.target,)
        elif node.op == "call_function":
            assert node.target is operator.getitem
            sources[node] = (*sources[node.args[0]], node.args[1])
        elif node.op == "output":
            found["output"] = [str(fx.node.map_arg(node.args, lambda n: str(sources[n])))]
        else:
            sources[node] = node.target
    return found


def first_come_first_served(
    module: fx.GraphModule, assignment: dict[fx.Node, int]
) -> list[str] | None:
    """The documented order, from its definition."""
    order: list[int] = list(dict.fromkeys(i for n, i in assignment.items() if "call" in n.op))
    needs: dict[int, set[int]] = {i: set() for i in order}
    for node, number in assignment.items():
        for source in node.all_input_nodes if "call" in node.op else ():
            if "call" in source.op and assignment[source] != number:
                needs[number].add(assignment[source])
    done: list[int] = []
    while len(done) < len(order):
        ready = [i for i in order if i not in done and needs[i] <= set(done)]
        if not ready:
            return None
        done.append(ready[0])
    return [f"submod_{i}" for i in done]


def submodules_called(module: fx.GraphModule) -> list[str]:
    return [str(n.target) for n in module.graph.nodes if n.op == "call_module"]


def assert_same_submodules(ours: fx.GraphModule, theirs: fx.GraphModule) -> None:
    for name in submodules_called(theirs):
        mine, other = ours.get_submodule(name), theirs.get_submodule(name)
        assert lines(mine.graph) == lines(other.graph)
        assert dict(mine.named_parameters()).keys() == dict(other.named_parameters()).keys()


@settings(max_examples=examples(30))
@given(st.data())
def test_in_order_of_dependencies(data: Draw) -> None:
    module = data.draw(graphs())
    assignment = data.draw(partitions(module.graph))
    before = untouched(module)
    expected = first_come_first_served(module, assignment)
    names: dict[str, str] = {}
    if expected is None:
        with pytest.raises(RuntimeError, match="cycle exists between partitions"):
            torch_split_module(module, None, assignment.__getitem__)
        with pytest.raises(PartitionCycleError):
            split_module(module, None, assignment.__getitem__)
        merged = split_module(module, None, assignment.__getitem__, names, on_cycle="merge")
        assert_same(run(merged), run(module))
        for name, old in names.items():
            assert merged.get_submodule(name) is module.get_submodule(old)
        return
    split = split_module(module, None, assignment.__getitem__, names)
    assert untouched(module) == before
    assert_same(run(split), run(module))
    assert submodules_called(split) == expected
    their_names: dict[str, str] = {}
    theirs = torch_split_module(module, None, assignment.__getitem__, their_names)
    assert names == their_names
    assert calls(split) == calls(theirs)
    assert_same_submodules(split, theirs)
    assert split.state_dict().keys() == theirs.state_dict().keys()
    for name, old in names.items():
        assert split.get_submodule(name) is module.get_submodule(old)


@settings(max_examples=examples(30))
@given(st.data())
def test_in_original_order(data: Draw) -> None:
    module = data.draw(graphs())
    assignment = data.draw(partitions(module.graph))
    expected = first_come_first_served(module, assignment)
    in_graph = [f"submod_{i}" for n, i in assignment.items() if "call" in n.op]
    if expected != list(dict.fromkeys(in_graph)):
        with pytest.raises(PartitionError):
            split_module(module, None, assignment.__getitem__, keep_original_order=True)
        return
    split = split_module(module, None, assignment.__getitem__, keep_original_order=True)
    assert_same(run(split), run(module))
    theirs = torch_split_module(module, None, assignment.__getitem__, keep_original_order=True)
    # Not by name: theirs numbers the reads of one attribute anew.
    assert [(n.op, n.target) for n in split.graph.nodes] == [
        (n.op, n.target) for n in theirs.graph.nodes
    ]
    assert calls(split) == calls(theirs)
    assert_same_submodules(split, theirs)


@settings(max_examples=examples(40))
@given(st.data())
def test_names_and_metadata(data: Draw) -> None:
    module = data.draw(graphs())
    assignment = data.draw(partitions(module.graph))
    split = split_module(
        module, None, assignment.__getitem__, keep_original_node_name=True, on_cycle="merge"
    )
    assert_same(run(split), run(module))
    originals = {n.name: n for n in module.graph.nodes}
    seen = set()
    for name in submodules_called(split):
        for node in split.get_submodule(name).graph.nodes:
            if node.op != "output":
                assert node.meta == originals[node.name].meta
                assert node.meta is not originals[node.name].meta
            if node.op.startswith("call"):
                seen.add(node.name)
    assert seen == {n.name for n in module.graph.nodes if n.op.startswith("call")}
    for node in split.graph.nodes:
        if node.op == "call_module":
            (result,) = split.get_submodule(node.target).graph.find_nodes(op="output")[0].args
            several = isinstance(result, tuple)
            values = tuple(n.meta["val"] for n in result) if several else result.meta["val"]
            assert node.meta.get("val", ()) == values
        elif node.op == "call_function":
            submodule = split.get_submodule(node.args[0].target)
            (result,) = submodule.graph.find_nodes(op="output")[0].args
            assert node.meta == result[node.args[1]].meta
        else:
            assert node.meta == originals[node.name].meta
