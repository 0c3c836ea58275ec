"""Partitions that autocast, inference-mode and grad-mode regions cross."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn
from torch.amp.autocast_mode import _enter_autocast, _exit_autocast
from torch.autograd.grad_mode import _enter_inference_mode, _exit_inference_mode

import graphopt
from graphopt.partition import split_module
from slices import examples

GRAD = {"0": False, "1": True}


def product(x: Tensor, w: Tensor) -> Tensor:
    """Rounded where autocast is on, and float32 all the same. A clone is no inference tensor."""
    return torch.matmul(x.clone(), w).float()


def program(signs: str) -> fx.GraphModule:
    """A chain of products, `.`, and what is between them.

    `A` and `a` enter and exit autocast, `I` and `i` inference mode; `0` and `1` set grad mode.
    """
    graph = fx.Graph()
    value, weight = graph.placeholder("x"), graph.get_attr("w")
    entered: list[fx.Node] = []
    enters = {
        "A": (_enter_autocast, ("cpu", torch.bfloat16, True, None)),
        "I": (_enter_inference_mode, (True,)),
    }
    exits = {"a": _exit_autocast, "i": _exit_inference_mode}
    for sign in signs:
        if sign in enters:
            entered.append(graph.call_function(*enters[sign]))
        elif sign in exits:
            graph.call_function(exits[sign], (entered.pop(),))
        elif sign in GRAD:
            graph.call_function(torch._C._set_grad_enabled, (GRAD[sign],))
        else:
            value = graph.call_function(product, (value, weight))
    graph.output(value)
    for node in graph.nodes:
        node.meta["note"] = node.name
    return fx.GraphModule({"w": nn.Parameter(torch.randn(3, 3))}, graph)


def split_at(module: fx.GraphModule, *starts: int) -> fx.GraphModule:
    """Partitions that begin at the calls so numbered."""
    calls = [n for n in module.graph.nodes if n.op.startswith("call")]
    numbers = {n: sum(i >= start for start in starts) for i, n in enumerate(calls)}
    return split_module(module, None, numbers.__getitem__)


def signs(module: fx.GraphModule) -> str:
    """The program of a submodule."""
    written = {
        _enter_autocast: "A",
        _exit_autocast: "a",
        _enter_inference_mode: "I",
        _exit_inference_mode: "i",
        product: ".",
    }
    found = ""
    for node in module.graph.nodes:
        if node.op == "call_function":
            found += written.get(node.target) or str(int(node.args[0]))
    return found


def programs(split: fx.GraphModule) -> list[str]:
    called = split.graph.find_nodes(op="call_module")
    return [signs(split.get_submodule(str(node.target))) for node in called]


@pytest.mark.parametrize(
    ("whole", "starts", "parts"),
    [
        (".A..a.", [2], [".Aa", "A..a."]),
        (".A..a.", [3], [".A.a", "A.a."]),
        (".A..a.", [2, 3, 4], [".Aa", "A.a", "A.a", "Aa."]),
        ("A.A..a.a", [2, 3, 5], ["A.a", "AAaa", "AA..aa", "AAa.a"]),
        (".A.a..", [5], [".A.a.", "."]),
        ("A.I.i.a", [4], ["A.I.ia", "AIi.a"]),
        # The end of inference mode restores the grad mode from before it.
        ("0I1.i.1", [3], ["0I1i1", "0I1.i.1"]),
        ("I0.i.", [3], ["I0.i", "I0i."]),
        # Grad mode is left as the whole graph leaves it.
        (".0..1.", [3], [".0.1", "0.1."]),
        (".0.1..", [5], [".0.1.", "1."]),
        (".0..", [3], [".0.", "0."]),
        ("0.1.0.1.", [1, 3, 5], ["01", "0.1", "1.01", "0.1."]),
        (".0.A.1.a.", [3, 5, 6], [".0.1", "0A.a1", "0A1a", "A1.a."]),
        # A region that never ends is left open, once.
        (".A..", [2], [".A", ".."]),
        (".A..", [3], [".A.", "."]),
    ],
)
def test_each_partition_has_its_own(whole: str, starts: list[int], parts: list[str]) -> None:
    module = program(whole)
    split = split_at(module, *starts)
    assert programs(split) == parts
    for node in split.graph.find_nodes(op="call_module"):
        child = split.get_submodule(str(node.target))
        kinds = [n.op for n in child.graph.nodes]
        assert "placeholder" not in kinds[kinds.index("call_function") :]
        inputs = {n.name for n in child.graph.find_nodes(op="placeholder")}
        assert all(name in ("x", "w") or name.startswith("product") for name in inputs)
        # What is repeated has the metadata of what it repeats.
        names = {n.name: n for n in module.graph.nodes}
        assert all(n.target is names[n.meta["note"]].target for n in child.graph.nodes
                   if n.op == "call_function")  # fmt: skip


def observed(module: nn.Module) -> tuple[Any, ...]:
    """The result, its dtype and whether it has a history, and the modes afterwards."""
    grad_mode = torch.is_grad_enabled()
    try:
        result = module(torch.randn(3, 3, generator=torch.Generator().manual_seed(0)))
        after = (
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.is_autocast_enabled("cpu"),
        )
    finally:
        torch.set_grad_enabled(grad_mode)
    return (result.tolist(), result.dtype, result.requires_grad, result.is_inference(), after)


@st.composite
def nested(draw: Any, depth: int = 3) -> str:
    text = ""
    for _ in range(draw(st.integers(1, 3))):
        kind = draw(st.sampled_from(["..", ".", "A", "0", "I"] if depth else ["."]))
        if kind == "A":
            text += f"A{draw(nested(depth - 1))}a"
        elif kind == "0":
            text += f"0{draw(nested(depth - 1))}1"
        elif kind == "I":
            text += f"I{draw(nested(depth - 1))}i"
        else:
            text += kind
    return text


@settings(max_examples=examples(25))
@given(st.data())
def test_results_and_modes_are_those_of_the_whole(data: st.DataObject) -> None:
    text = data.draw(nested())
    module = program(text)
    starts = data.draw(st.lists(st.integers(0, len(text)), max_size=4))
    split = split_at(module, *starts)
    assert observed(split) == observed(module)
    before = observed(nn.Identity())[-1]
    for node in split.graph.find_nodes(op="call_module"):
        child = split.get_submodule(str(node.target))
        inputs = [torch.ones(3, 3) for _ in child.graph.find_nodes(op="placeholder")]
        child(*inputs)  # alone, it leaves everything as it was
        assert observed(nn.Identity())[-1] == before


def test_of_a_model_that_dynamo_captures() -> None:
    captured: list[fx.GraphModule] = []

    def backend(module: fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        captured.append(module)
        return module.forward

    def f(x: Tensor, w: Tensor) -> Tensor:
        a = x @ w
        with torch.autocast("cpu", torch.bfloat16):
            b = x @ w
            with torch.no_grad():
                c = b @ b.t()
            d = b @ c
        return a + d.float()

    x, w = torch.randn(3, 3), torch.randn(3, 3, requires_grad=True)
    torch._dynamo.reset()
    expected = torch.compile(f, backend=backend, fullgraph=True)(x, w)
    (module,) = captured
    calls = [n for n in module.graph.nodes if n.op.startswith("call")]
    inputs = [w if n.target == "L_w_" else x for n in module.graph.find_nodes(op="placeholder")]
    for size in (1, 2, 3, 5):
        split = split_module(module, None, lambda node, size=size: calls.index(node) // size)
        (found,) = split(*inputs)
        assert torch.equal(found, expected) and torch.is_grad_enabled()
        (ours,) = torch.autograd.grad(found.sum(), w)
        (theirs,) = torch.autograd.grad(expected.sum(), w, retain_graph=True)
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ([1, 0, 0], "must not decrease .* %product is in 0, after nodes in 1"),
        ([0, 1, 0], "must not decrease .* %_exit_autocast is in 0, after nodes in 1"),
        (["b", "a", "b"], "must not decrease .* %_exit_autocast is in b, after nodes in a"),
        ([10, 9, 9], "%product is in 9, after nodes in 10"),
    ],
)
def test_numbers_must_not_decrease(numbers: list[Any], message: str) -> None:
    module = program("A.a")
    given = iter(numbers)
    with pytest.raises(graphopt.PartitionError, match=message):
        split_module(module, None, lambda node: next(given))


def test_names_that_are_no_numbers() -> None:
    given = iter(["b", "a", "a"])
    assert programs(split_module(program("A.a"), None, lambda n: next(given))) == ["Aa", "A.a"]
