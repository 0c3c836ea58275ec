"""Sizes that are not known: what partitions have to be given of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from functorch import make_fx
from torch import Tensor, fx
from torch.fx.passes.split_module import split_module as torch_split_module

from graphopt.partition import split_module


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
