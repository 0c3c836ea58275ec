"""Values that are one, and values that look alike: constants that are sent, parts of permutations,
what is no graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import graphopt
from edit_tools import with_arg
from graphopt.graph_utils import find_nodes, is_operator
from graphopt.verify import check_equivalence
from graphopt.verify.equivalence import Proof
from graphopt.verify.stage_checks import StageProof

aten = torch.ops.aten
c10d = torch.ops._c10d_functional


def captured(function: Callable[..., Any], *tensors: Tensor) -> fx.GraphModule:
    def step(model: nn.Module, *given: Tensor) -> Any:
        return function(*given)

    return graphopt.capture(step, nn.Identity(), *tensors).graph_module


def nodes(gm: fx.GraphModule, *names: str) -> list[fx.Node]:
    return find_nodes(gm.graph, lambda n: is_operator(n.target, *(f"aten::{x}" for x in names)))


def call(graph: fx.Graph, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    return graphopt.graph_utils.call_function_with_meta(graph, target, args, kwargs)


# ------------------------------------------------------------------------ constants that are sent


def sent(make: Callable[[fx.Graph, fx.Node], list[fx.Node]], *, swapped: bool) -> fx.Graph:
    """What two collectives give of constants."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    with torch._subclasses.FakeTensorMode():
        x.meta["val"] = torch.randn(8)
    launches = [call(graph, c10d.all_reduce.default, n, "sum", "g") for n in make(graph, x)]
    waits = [call(graph, c10d.wait_tensor.default, launch) for launch in launches]
    graph.output((waits[::-1] if swapped else waits, [], []))
    return graph


def made_alike(graph: fx.Graph, x: fx.Node) -> list[fx.Node]:
    return [call(graph, aten.zeros_like.default, x) for _ in range(2)]


def of_two(graph: fx.Graph, x: fx.Node) -> list[fx.Node]:
    """Each the sum of two constants."""
    zeros = [call(graph, aten.zeros.default, [8]) for _ in range(4)]
    return [call(graph, aten.add.Tensor, *zeros[i : i + 2]) for i in (0, 2)]


def of_a_product(graph: fx.Graph, x: fx.Node) -> list[fx.Node]:
    """Computed by an operator without a rule."""
    zeros = [call(graph, aten.zeros.default, [4, 4]) for _ in range(2)]
    return [call(graph, aten.mm.default, zero, zero) for zero in zeros]


def joined(graph: fx.Graph, x: fx.Node) -> list[fx.Node]:
    """Of which a part is a sum of two constants."""
    found = []
    for _ in range(2):
        rows = []
        for _ in range(2):
            zeros = call(graph, aten.zeros.default, [8])
            rows.append(call(graph, aten.cat.default, [x, zeros]))
        found.append(call(graph, aten.add.Tensor, *rows))
    return found


@pytest.mark.parametrize("make", [made_alike, of_two, of_a_product, joined])
def test_constants_that_are_sent_are_told_apart(make: Any) -> None:
    """What other ranks send there is theirs."""
    assert check_equivalence(sent(make, swapped=False), sent(make, swapped=False)).ok
    assert not check_equivalence(sent(make, swapped=False), sent(make, swapped=True)).ok


# ---------------------------------------------------------------------------- parts of permutations


def turned(x: Tensor) -> Tensor:
    return x.t().clone(memory_format=torch.contiguous_format)


IN_PARTS: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    "negated twice": (
        lambda x, y: turned(x).sigmoid(),
        lambda x, y: torch.cat([-(-turned(x))[:2], -(-turned(x))[2:]]).sigmoid(),
    ),
    "a product": (
        lambda x, y: (turned(x) * turned(y)).sigmoid(),
        lambda x, y: torch.cat(
            [turned(x)[:2] * turned(y)[:2], turned(x)[2:] * turned(y)[2:]]
        ).sigmoid(),
    ),
    "turned afterwards": (
        lambda x, y: turned(x * y)[1:].sigmoid(),
        lambda x, y: (turned(x)[1:] * turned(y)[1:]).sigmoid(),
    ),
}


@pytest.mark.parametrize("name", IN_PARTS)
def test_elementwise_on_parts_of_what_is_permuted(name: str) -> None:
    whole, parts = (captured(f, torch.randn(4, 6), torch.randn(4, 6)) for f in IN_PARTS[name])
    assert check_equivalence(whole, parts).ok


def test_other_parts_of_what_is_permuted() -> None:
    tensors = torch.randn(4, 6), torch.randn(4, 6)
    one = captured(lambda x, y: turned(x)[:2] * turned(y)[:2], *tensors)
    for function in (
        lambda x, y: turned(x)[:2] * turned(y)[1:3],
        lambda x, y: turned(x)[1:3] * turned(y)[1:3],
        lambda x, y: turned(x * y)[1:3],
        lambda x, y: turned(x)[:2] * y.reshape(6, 4)[:2],
    ):
        assert not check_equivalence(one, captured(function, *tensors)).ok


def test_a_functional_copy_has_the_layout_of_what_it_replaces() -> None:
    """Of memory with gaps it is another one than of memory without: kernels that read it give
    other bits."""

    def step(x: Tensor, dense: bool) -> Tensor:
        gaps = x.new_empty_strided((4, 6), (8, 1))
        return aten.copy.default(gaps.clone() if dense else gaps, x).sigmoid()

    one, same, other = (
        captured(lambda x, dense=dense: step(x, dense), torch.randn(4, 6))
        for dense in (False, False, True)
    )
    assert check_equivalence(one, same).ok
    assert not check_equivalence(one, other).ok


# ------------------------------------------------------------------------------- what is no graph


@pytest.mark.parametrize(("name", "arguments"), [("permute", ([5],)), ("sum", ([7],))])
def test_arguments_that_do_not_fit(name: str, arguments: tuple[Any, ...]) -> None:
    def of(x: Tensor) -> Tensor:
        return (x.permute(1, 0) + 1).sum(1).view(2, 3) * 2

    before, after = (captured(of, torch.randn(4, 6)) for _ in range(2))
    node = nodes(after, name)[0]
    node.args = (node.args[0], *arguments)
    assert not check_equivalence(before, after).ok


def test_a_list_that_is_read_as_a_tensor() -> None:
    before, after = (
        captured(lambda x: x.split(2)[0].sigmoid() + 1, torch.randn(4)) for _ in range(2)
    )
    (node,) = nodes(after, "sigmoid")
    with_arg(node, 0, node.args[0].args[0])
    assert not check_equivalence(before, after).ok


def with_constant(value: Tensor) -> fx.GraphModule:
    root = nn.Module()
    root.register_buffer("constant", value)
    graph = fx.Graph()
    node = graph.get_attr("constant")
    with torch._subclasses.FakeTensorMode():
        node.meta["val"] = torch.randn(value.shape)
    graph.output(([call(graph, aten.neg.default, node)], [], []))
    return fx.GraphModule(root, graph)


def test_a_constant_that_a_stage_exchanges() -> None:
    """Bits are compared: 0.0 is not -0.0."""
    before = with_constant(torch.zeros(3))
    for value, same in ((torch.zeros(3), True), (-torch.zeros(3), False), (torch.ones(3), False)):
        problems = StageProof(Proof()).problems("main", before.graph, with_constant(value))
        assert (not problems) is same
        assert check_equivalence(before, with_constant(value)).ok is same


# --------------------------------------------------------- what is read from a storage as it lies


def windows(make: Callable[[Tensor], Tensor]) -> fx.GraphModule:
    """Of what `make` makes of a matrix, places of its storage, and those behind a first row."""

    def read(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        made = make((x @ w).sin())
        return made.as_strided((3, 4), (5, 1)) * 2, made[1:].as_strided((4,), (2,)) * 2

    return captured(read, torch.randn(4, 8), torch.randn(8, 6))


READ_ALIKE = {
    "as it is": lambda y: y + 1,
    "another shape before": lambda y: y.view(6, 4).add(1).view(4, 6),
    "flat": lambda y: (y.view(-1) + 1).view(4, 6),
    "with a dimension of one": lambda y: (y.view(4, 1, 6) + 1).view(4, 6),
    "in place": lambda y: y.view(2, 12).add_(1).view(4, 6),
}
READ_OTHERWISE = {
    "transposed": lambda y: (y.t().contiguous() + 1).view(4, 6),
    "transposed in memory": lambda y: (y.t().contiguous() + 1).t(),
    "rows first": lambda y: torch.cat([y[2:], y[:2]]) + 1,
    "with a gap": lambda y: (torch.cat([y, y], 1) + 1)[:, :6],
}


@pytest.mark.parametrize("name", READ_ALIKE)
def test_a_storage_in_one_row_has_no_shape(name: str) -> None:
    """`as_strided` counts from the begin of a storage, whatever shape what lies there had."""
    assert check_equivalence(windows(READ_ALIKE["as it is"]), windows(READ_ALIKE[name])).ok


@pytest.mark.parametrize("name", READ_OTHERWISE)
def test_a_storage_that_lies_otherwise_is_another(name: str) -> None:
    before, after = windows(READ_ALIKE["as it is"]), windows(READ_OTHERWISE[name])
    assert not check_equivalence(before, after).ok


def test_windows_of_a_product_are_finalized() -> None:
    def step(model: nn.Module, optimizer: Any, x: Tensor) -> Tensor:
        optimizer.zero_grad()
        projected = model(x) / 2.0  # into the memory of a product of matrices, of another shape
        seen = projected.view(2, 2, 4, 6).as_strided((2, 3, 4, 6), (48, 12, 6, 1))
        loss = (torch.dropout(seen, 0.5, True) * 2).square().sum()
        loss.backward()
        optimizer.step()
        return loss

    found = []
    for run in (step, graphopt.compile(step)):
        torch.manual_seed(0)
        model = nn.Linear(5, 6)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = [run(model, optimizer, torch.randn(4, 8, 5)[:2]) for _ in range(3)]
        found.append([*losses, *(p.detach() for p in model.parameters())])
    assert all(map(torch.equal, *found))
