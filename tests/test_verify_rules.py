"""Rules of the proof that are about elements and arrangements are true."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from itertools import product
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

import graphopt
from graphopt.graph_utils import call_function_with_meta
from graphopt.verify.symbolic.evaluation import evaluate_graph
from graphopt.verify.values.elementwise import BY_ELEMENT, elementwise
from graphopt.verify.values.terms import TensorValue, Terms, whole
from replica_runs import same_bits

aten = torch.ops.aten


FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


WHOLE = [torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool]


SPECIAL = torch.tensor([0.0, -0.0, torch.nan, torch.inf, -torch.inf, 1.0, -1.0, 257.0, 2049.0])


LENGTH = 37


NUMBERS = (3, 0.1, -0.0, True, 257, 1e10)


def drawn(dtype: torch.dtype, seed: int) -> Tensor:
    """Numbers of many sizes, special ones among them."""
    draw = torch.Generator().manual_seed(seed)
    if not dtype.is_floating_point:
        high = 2 if dtype == torch.bool else min(torch.iinfo(dtype).max, 5000)
        return torch.randint(0, high, (LENGTH,), generator=draw).to(dtype)
    powers = torch.randint(-3, 6, (LENGTH,), generator=draw).double()
    found = torch.randn(LENGTH, generator=draw, dtype=torch.float64) * 10**powers
    places = torch.randperm(LENGTH, generator=draw)[: LENGTH // 2]
    found[places] = SPECIAL[torch.randint(0, len(SPECIAL), places.shape, generator=draw)].double()
    return found.to(dtype)


def overload(name: str) -> Any:
    packet = getattr(aten, name.removeprefix("aten::"))
    first = next(o for o in ("Tensor", "self", "default") if o in packet.overloads())
    return getattr(packet, first)


def cases(name: str) -> Iterator[tuple[Any, list[Any]]]:
    """Calls with tensors of all kinds, and with numbers, that the operator takes."""
    target = overload(name)
    count = len([a for a in target._schema.arguments if "Tensor" in str(a.type)])
    kinds = FLOATS + WHOLE
    if name == "aten::where":
        rows: list[list[Any]] = [[torch.bool, *pair] for pair in product(kinds, repeat=2)]
    else:
        rows = [list(row) for row in product(kinds, repeat=count)]
        rows += [[kind, number] for kind in kinds for number in NUMBERS if count == 2]
    for row in rows:
        args = [drawn(k, i) if isinstance(k, torch.dtype) else k for i, k in enumerate(row)]
        try:
            target(*args)
        except (RuntimeError, TypeError):
            continue
        yield target, args


def is_covered(target: Any, args: list[Any]) -> bool:
    """Whether the rule speaks of a call."""
    terms, names = Terms(), [a.name for a in target._schema.arguments]
    values = [
        whole(terms.make(("input", i)), a) if isinstance(a, Tensor) else a
        for i, a in enumerate(args)
    ]
    given = dict(zip(names, values, strict=False))
    return isinstance(elementwise(terms, target, given, target(*args)), TensorValue)


def each(args: list[Any], change: Callable[[Tensor], Tensor]) -> list[Any]:
    return [change(arg) if isinstance(arg, Tensor) else arg for arg in args]


def strided(tensor: Tensor) -> Tensor:
    return torch.stack([tensor, tensor], 1)[:, 0]


@pytest.mark.parametrize("name", BY_ELEMENT)
def test_an_element_wherever_it_stands(name: str) -> None:
    covered = 0
    for target, args in cases(name):
        if not is_covered(target, args):
            continue
        covered += 1
        expected = target(*args)
        for start, end in ((0, 1), (5, 6), (36, 37), (1, 37), (3, 20), (30, 37)):
            part = target(*each(args, lambda t, run=slice(start, end): t[run]))  # type: ignore[misc]
            assert same_bits(part, expected[start:end]), (target, args)
        assert same_bits(target(*each(args, strided)), expected), (target, args)
        if len(args) == 2 and _may_change_places(target, args):
            assert same_bits(target(*reversed(args)), expected), (target, args)
    assert covered


def _may_change_places(target: Any, args: list[Any]) -> bool:
    """Whether the rule takes a call for the same with its operands exchanged."""
    if not all(isinstance(arg, Tensor) for arg in args) or args[0].dtype != args[1].dtype:
        return False
    terms, fake = Terms(), target(*args)
    one, other = (whole(terms.make(("input", i)), arg) for i, arg in enumerate(args))
    names = [a.name for a in target._schema.arguments][:2]
    found = [
        elementwise(terms, target, dict(zip(names, pair, strict=True)), fake)
        for pair in ((one, other), (other, one))
    ]
    return bool(found[0] == found[1])


@pytest.mark.parametrize("name", ["add", "sub", "mul", "div"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_a_list_calls_the_operator_of_each_entry(name: str, dtype: torch.dtype) -> None:
    x, y = drawn(dtype, 0), drawn(dtype, 1)
    listed, alone = getattr(torch, f"_foreach_{name}"), getattr(torch, name)
    for given, number in (([y], y), (0.1, 0.1), ([0.3], 0.3)):
        assert same_bits(listed([x], given)[0], alone(x, number))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_halves_and_whole_numbers_are_not_covered(dtype: torch.dtype) -> None:
    args = [drawn(dtype, 0), drawn(torch.int64, 1)]
    assert not is_covered(aten.mul.Tensor, args) and not is_covered(aten.div.Tensor, args)
    x, y = torch.full((4,), 1.5, dtype=torch.float16), torch.full((4,), 2049)
    assert (x * y)[0] != x[0] * y[0]


SHAPES = [
    (2, 3, 4),
    (4, 6),
    (6, 4),
    (24,),
    (2, 12),
    (1, 2, 3, 4),
    (3, 1, 8),
    (2, 2, 2, 3),
    (4, 3, 2),
]


def permuted(draw: Random, call: Any, x: fx.Node, _: fx.Node) -> fx.Node:
    dims = list(range(x.meta["val"].dim()))
    draw.shuffle(dims)
    return call(aten.permute.default, x, dims)


def reshaped(draw: Random, call: Any, x: fx.Node, _: fx.Node) -> fx.Node:
    count = x.meta["val"].numel()
    shapes = [[-1, 1], [1, -1], [-1], *([k, -1] for k in (2, 3, 4) if count % k == 0)]
    shapes += [list(shape) for shape in SHAPES if count == 24]
    return call(aten.reshape.default, x, draw.choice(shapes))


def sliced(draw: Random, call: Any, x: fx.Node, _: fx.Node) -> fx.Node:
    dim = draw.randrange(x.meta["val"].dim())
    low = draw.randrange(x.meta["val"].shape[dim])
    high = draw.randrange(low, x.meta["val"].shape[dim]) + 1
    return call(aten.slice.Tensor, x, dim, low, high)


def selected(draw: Random, call: Any, x: fx.Node, _: fx.Node) -> fx.Node:
    if x.meta["val"].dim() < 2:
        return x
    dim = draw.randrange(-x.meta["val"].dim(), x.meta["val"].dim())
    return call(aten.select.int, x, dim, draw.randrange(x.meta["val"].shape[dim]))


def divided(draw: Random, call: Any, x: fx.Node, _: fx.Node) -> fx.Node:
    dim = draw.randrange(x.meta["val"].dim())
    parts = call(aten.split.Tensor, x, draw.randrange(1, x.meta["val"].shape[dim] + 1), dim)
    items = [call(operator.getitem, parts, i) for i in range(len(parts.meta["val"]))]
    return call(aten.cat.default, items, dim) if draw.random() < 0.5 else draw.choice(items)


def joined(draw: Random, call: Any, x: fx.Node, y: fx.Node) -> fx.Node:
    if (x.meta["val"].shape, x.meta["val"].dtype) != (y.meta["val"].shape, y.meta["val"].dtype):
        y = x
    if draw.random() < 0.5:
        return call(aten.stack.default, [x, y], draw.randrange(x.meta["val"].dim() + 1))
    return call(aten.cat.default, [x, y], draw.randrange(x.meta["val"].dim()))


def added(draw: Random, call: Any, x: fx.Node, y: fx.Node) -> fx.Node:
    same = x.meta["val"].shape == y.meta["val"].shape
    return call(aten.add.Tensor, x, y if same else 1.5)


def cast(draw: Random, call: Any, x: fx.Node, _: fx.Node) -> fx.Node:
    return call(aten._to_copy.default, x, dtype=draw.choice([torch.float64, torch.bfloat16]))


def of_zeros(draw: Random, call: Any, x: fx.Node, _: fx.Node) -> fx.Node:
    return call(draw.choice([aten.zeros_like.default, aten.ones_like.default]), x)


STEPS = [permuted, permuted, reshaped, reshaped, sliced, selected, divided, joined, added, cast]


def random_graph(draw: Random) -> fx.Graph:
    graph = fx.Graph()
    with FakeTensorMode():
        pool = []
        for name in "xy":
            node = graph.placeholder(name)
            node.meta["val"] = torch.empty(2, 3, 4)
            pool.append(node)

    def call(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return call_function_with_meta(graph, target, args, kwargs)

    for _ in range(90):
        x, y = draw.choice(pool), draw.choice(pool)
        new = draw.choice([*STEPS, of_zeros])(draw, call, x, y)
        if new.meta["val"].numel() <= 96:
            pool.append(new)
    graph.output(([], [], []))
    return graph


@pytest.mark.parametrize("seed", range(12))
def test_equal_terms_are_equal_elements(seed: int) -> None:
    graph = random_graph(Random(seed))
    inputs = [torch.randn(2, 3, 4), torch.randn(2, 3, 4)]
    run = fx.Interpreter(fx.GraphModule({}, graph), garbage_collect_values=False)
    run.run(*inputs)
    found: dict[Any, Tensor] = {}
    met = 0
    for node, value in evaluate_graph(graph, Terms()).made:
        if isinstance(value, TensorValue):
            elements = run.env[node].reshape(-1)
            first = found.setdefault((value.segments, value.dtype), elements)
            met += first is not elements
            assert torch.equal(first, elements), node.format_node()
    assert met > 5


PAIRS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "chunk as slice": (lambda x, y: x.chunk(3, -1)[1] * 2, lambda x, y: x[..., 4:8] * 2),
    "chunk as narrow": (lambda x, y: x.chunk(3, -1)[1] * 2, lambda x, y: x.narrow(-1, 4, 4) * 2),
    "chunk as select": (
        lambda x, y: x.chunk(3, -1)[1] * 2,
        lambda x, y: x.view(2, 4, 3, 4).select(2, 1) * 2,
    ),
    "select as slice": (lambda x, y: x.select(1, 2) * 2, lambda x, y: x[:, 2:3].squeeze(1) * 2),
    "unbind as select": (lambda x, y: x.unbind(1)[1] * 2, lambda x, y: x.select(1, 1) * 2),
    "slices of slices": (lambda x, y: x[..., 2:9][..., 1:4] * 2, lambda x, y: x[..., 3:6] * 2),
    "a slice of parts joined": (
        lambda x, y: torch.cat([x, y], -1)[..., 12:] * 2,
        lambda x, y: y * 2,
    ),
    "parts joined again": (lambda x, y: torch.cat(x.split(5, -1), -1) * 2, lambda x, y: x * 2),
    "stack as cat": (
        lambda x, y: torch.stack([x, y], 1) * 2,
        lambda x, y: torch.cat([x.unsqueeze(1), y.unsqueeze(1)], 1) * 2,
    ),
    "views and transposes": (
        lambda x, y: x.view(2, 48).t() * 2,
        lambda x, y: x.permute(1, 2, 0).reshape(48, 2) * 2,
    ),
    "transposed around a dimension of one": (
        lambda x, y: x.transpose(1, 2).unsqueeze(1).transpose(2, 3).squeeze(1) * 2,
        lambda x, y: x * 2,
    ),
    "a sum through a slice": (
        lambda x, y: (x + y)[..., 3:] * 2,
        lambda x, y: (x[..., 3:] + y[..., 3:]) * 2,
    ),
    "a sum through parts joined": (
        lambda x, y: torch.cat([x, y], -1) + torch.cat([y, x], -1),
        lambda x, y: torch.cat([x + y, y + x], -1),
    ),
    "a cast through a transpose": (
        lambda x, y: x.transpose(1, 2).half() * 2,
        lambda x, y: x.half().transpose(1, 2) * 2,
    ),
    "a cast of ones": (
        lambda x, y: x + torch.ones(2, 4, 12, dtype=torch.int64).float(),
        lambda x, y: x + torch.ones(2, 4, 12),
    ),
}


def graph_of(function: Callable[..., Any], tensors: tuple[Tensor, ...]) -> fx.GraphModule:
    def step(_: torch.nn.Module, x: Tensor, y: Tensor) -> Any:
        return function(x, y)

    return graphopt.capture(step, torch.nn.Identity(), *tensors).graph_module


@pytest.mark.parametrize("name", PAIRS)
def test_one_way_for_another(name: str) -> None:
    tensors = torch.randn(2, 4, 12), torch.randn(2, 4, 12)
    before, after = (graph_of(function, tensors) for function in PAIRS[name])
    assert torch.equal(before(*tensors)[0][0], after(*tensors)[0][0])
    report = graphopt.verify.check_equivalence(before, after)
    assert report.ok, str(report)


def shifted_often(x: Tensor, _: Tensor) -> Tensor:
    """Rows and columns are shifted in turn, so that each arrangement is one of the one before."""
    for _ in range(20):
        x = torch.cat([x[:, 1:], x[:, :1]], 1)
        x = torch.cat([x[..., 1:], x[..., :1]], -1) * 2
        x = x.to(torch.float64 if x.dtype == torch.float32 else torch.float32)
    return x


def test_arrangements_of_arrangements_are_gone_through_once() -> None:
    tensors = torch.randn(2, 4, 12), torch.randn(2, 4, 12)
    gm = graph_of(shifted_often, tensors)
    terms = Terms()
    evaluate_graph(gm, terms)
    assert 0 < len(terms.rearranged) < len(gm.graph.nodes) ** 2
    assert graphopt.verify.check_equivalence(gm, gm).ok


OTHERS: list[Callable[..., Any]] = [
    lambda x, y: x[..., 4:8] * 2,
    lambda x, y: x[..., 3:7] * 2,
    lambda x, y: y[..., 4:8] * 2,
    lambda x, y: torch.cat([x, y], -1)[..., 10:14] * 2,
    lambda x, y: x.view(2, 12, 4)[:, 1:5] * 2,
    lambda x, y: x[..., 4:8].transpose(1, 2).contiguous() * 2,
]


def test_other_columns_differ() -> None:
    tensors = torch.randn(2, 4, 12), torch.randn(2, 4, 12)
    graphs = [graph_of(function, tensors) for function in OTHERS]
    for i, before in enumerate(graphs):
        for j, after in enumerate(graphs):
            assert graphopt.verify.check_equivalence(before, after).ok == (i == j)
