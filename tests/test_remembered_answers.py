"""What a capture answers from memory, or without dispatch, is what torch's own way gives."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import graphopt
from graphopt import _compat
from graphopt._compat import operator_results, storage_key
from graphopt._compat.cached_tracing import remembered, written_as_it_is
from graphopt.errors import VerificationError
from graphopt.graph_utils import call_function_with_meta, evaluate
from graphopt.tracing.functional.whole_writes import WholeWrites
from graphopt.tracing.layouts import strides
from graphopt.verify.values.call_terms import entries, fresh, named
from graphopt.verify.values.terms import Segment, Terms
from zoo import MODELS, OPTIMIZERS, train_step

aten = torch.ops.aten


def _said(value: Any) -> Any:
    if isinstance(value, fx.Node):
        return value.name
    if isinstance(value, (list, tuple)):
        return [type(value).__name__, *map(_said, value)]
    return repr(value)


def _kinds(value: Any, storages: dict[int, int]) -> Any:
    """Sizes, strides and the like, and which tensors lie in one storage."""
    if isinstance(value, (list, tuple)):
        return [_kinds(item, storages) for item in value]
    if not isinstance(value, Tensor):
        return type(value).__name__
    place = storages.setdefault(storage_key(value), len(storages))
    sizes = (value.shape, value.stride(), value.storage_offset(), value.untyped_storage().nbytes())
    return (value.dtype, value.device, *sizes, value.requires_grad, place)


def _described(graph: fx.Graph) -> list[Any]:
    storages: dict[int, int] = {}
    tags = ("source", "phase", "nn_module_stack")
    return [
        (
            *(node.op, str(node.target), node.name, _said(node.args)),
            {name: _said(value) for name, value in node.kwargs.items()},
            _kinds(node.meta.get("val"), storages),
            [str(node.meta.get(tag)) for tag in tags],
        )
        for node in graph.nodes
    ]


@pytest.fixture
def torchs_own_way(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    def turn_on() -> None:
        for module in ("step_run", "functional.functionalization"):
            monkeypatch.setattr(f"graphopt.tracing.{module}.remembered", nullcontext)
        monkeypatch.setattr(WholeWrites, "copied", lambda self, node: False)
        monkeypatch.setattr(strides, "known", lambda *args: None)

    return turn_on


def written_through_views(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    """Values that are written to, before and after views of them are made and read."""
    hidden = model(x).clone()
    first, last = hidden[:, ::2], hidden[:, 1::2]
    last.mul_(2)
    early = hidden.t()
    kept = (hidden * 3).t()
    hidden[0].add_(1)
    loss = (early - kept).mean() + first.relu_().sum() + hidden.var() + y.sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def several_results(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    """Operators that give several results, random ones, and lists."""
    hidden = nn.functional.dropout(model(x), 0.3)
    values, places = hidden.topk(2, dim=-1)
    low, high = torch.aminmax(hidden)
    parts = torch.stack(hidden.unbind(0)).chunk(2)
    norm = torch._foreach_norm(list(model.parameters()))
    loss = values.sum() + places.sum() + low * high + parts[0].logsumexp(-1).sum() + sum(norm)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


CASES: dict[str, tuple[str, str, Any]] = {
    **{name: (name, "adamw-loop", train_step) for name in MODELS},
    **{name: ("mlp", name, train_step) for name in OPTIMIZERS if not name.startswith("adamw")},
    "views": ("mlp", "sgd-momentum-foreach", written_through_views),
    "several": ("mlp", "adam-fused", several_results),
}


@pytest.mark.parametrize("name", CASES)
def test_the_graphs_are_those_of_torch(name: str, torchs_own_way: Callable[[], None]) -> None:
    model_name, optimizer_name, step = CASES[name]

    def graph() -> list[Any]:
        torch.manual_seed(0)
        model = MODELS[model_name].make()
        optimizer = OPTIMIZERS[optimizer_name](model.parameters())
        x, y = MODELS[model_name].batch(0)
        return _described(graphopt.capture(step, model, optimizer, x, y).graph_module.graph)

    graph()  # from here on, everything is known
    known = graph()
    torchs_own_way()
    assert known == graph()


@pytest.fixture
def forgotten() -> Iterator[None]:
    operator_results.known_results.cache_clear()
    yield
    operator_results.known_results.cache_clear()


def _asked() -> int:
    return operator_results.known_results.cache_info().misses


def _loss(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) / 3).sum()


@pytest.mark.usefixtures("forgotten")
def test_equal_layers_and_later_traces_are_not_asked_again() -> None:
    deep, x = nn.Sequential(*[nn.Linear(5, 5) for _ in range(9)]), torch.randn(2, 5)
    graphopt.capture(_loss, deep[:2], x)
    once = _asked()
    assert once
    graphopt.capture(_loss, deep, x)
    assert _asked() == once
    graphopt.capture(_loss, deep, torch.randn(3, 5))
    assert once < _asked() <= 2 * once


@pytest.mark.usefixtures("forgotten")
def test_settings_of_torch_are_part_of_the_question() -> None:
    def quotient(model: nn.Module, x: Tensor) -> Tensor:
        return x / 2

    def kind() -> torch.dtype:
        captured = graphopt.capture(quotient, nn.Identity(), torch.ones(2, dtype=torch.int64))
        division = list(captured.graph_module.graph.nodes)[-2]
        value: Tensor = division.meta["val"]
        return value.dtype

    assert kind() is torch.float32
    torch.set_default_dtype(torch.float64)
    try:
        assert kind() is torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    assert kind() is torch.float32


PATTERNS = ((0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 1, 1), (0, 1, 2))
"""Which of three arguments are one tensor."""

WRITES: dict[str, Callable[..., Any]] = {
    "copy_": lambda a, b, c: a.copy_(b),
    "mul_": lambda a, b, c: a.mul_(b),
    "lerp_": lambda a, b, c: a.lerp_(b, c),
    "addcmul_": lambda a, b, c: a.addcmul_(b, c),
    "addmm_": lambda a, b, c: a.addmm_(b, c),
    "masked_fill_": lambda a, b, c: a.masked_fill_(b > c, 2),
    "a list": lambda a, b, c: torch._foreach_addcmul_([a], [b], [c]),
    "out": lambda a, b, c: torch.add(b, c, out=a),
}


@pytest.mark.usefixtures("forgotten")
@pytest.mark.parametrize("taught", PATTERNS, ids=str)
@pytest.mark.parametrize("name", WRITES)
def test_a_tensor_that_is_given_twice_is_another_question(
    name: str, taught: tuple[int, ...]
) -> None:
    def step(xs: list[Tensor], pattern: tuple[int, ...]) -> list[Tensor]:
        held = [x * 1 for x in xs]
        given = [held[position] for position in pattern]
        result = WRITES[name](*given)
        if isinstance(result, Tensor):
            result.add_(1)
        return [held[position] * 3 for position in range(3)]

    xs = [torch.rand(2, 2) for _ in range(3)]
    for pattern in (taught, *PATTERNS):
        captured = graphopt.compile(step, pipeline="none")(xs, pattern)
        assert all(map(torch.equal, captured, step(xs, pattern))), pattern


def test_nothing_is_remembered_outside_a_trace() -> None:
    from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode, get_proxy_mode, make_fx

    def run(x: Tensor) -> Tensor:
        with remembered():
            assert type(get_proxy_mode()) is not ProxyTorchDispatchMode
            y = x.sin()
        assert type(get_proxy_mode()) is ProxyTorchDispatchMode
        return y.sin()

    make_fx(run, tracing_mode="fake")(torch.ones(2))


@pytest.mark.parametrize(
    ("operator", "expected"),
    [
        (aten.add.Tensor, True),
        (aten.view.default, True),
        (aten.native_layer_norm.default, True),
        (aten.add_.Tensor, False),
        (aten.polygamma_.default, False),  # which functionalization has no kernel for
        (aten.native_batch_norm.default, False),
        (aten._fused_adamw_.default, False),
        (aten._local_scalar_dense.default, False),
        (aten.matmul.default, False),
        (torch.ops._c10d_functional.all_reduce.default, False),
    ],
)
def test_which_operators_are_functional_already(operator: Any, expected: bool) -> None:
    assert written_as_it_is(operator) is expected


VIEW, SPLIT = aten.view.default, aten.split_with_sizes.default


def graph_of(real: Tensor, *, inside: bool = False) -> tuple[fx.Graph, fx.Node]:
    graph = fx.Graph()
    node = graph.placeholder("x")
    fake = FakeTensorMode(shape_env=ShapeEnv()).from_tensor(real, static_shapes=True)
    node.meta["val"] = fake[2:] if inside else fake
    return graph, node


def facts(value: Any) -> list[Any]:
    tensors: list[Tensor] = [value] if isinstance(value, Tensor) else list(value)
    return [
        (
            type(t), t.shape, t.stride(), t.storage_offset(), t.dtype, t.device, t.requires_grad,
            t.is_conj(), t.is_neg(), t.fake_mode, _compat.storage_key(t),
        )  # type: ignore[attr-defined]
        for t in tensors
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("target", "sizes"),
    [(VIEW, [4, 3]), (VIEW, [2, -1]), (VIEW, [12]), (SPLIT, [5, 0, 7]), (SPLIT, [12])],
    ids=str,
)
@pytest.mark.parametrize("inside", [False, True], ids=["whole", "inside"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.complex64])
@pytest.mark.parametrize("conj", [False, True], ids=["plain", "conj"])
def test_views_are_those_of_the_mode(
    target: Any, sizes: list[int], inside: bool, dtype: torch.dtype, conj: bool
) -> None:
    real = torch.zeros(14 if inside else 12, dtype=dtype)
    if dtype.is_floating_point:
        real.requires_grad_()
    graph, node = graph_of(real.conj() if conj else real, inside=inside)
    new = call_function_with_meta(graph, target, (node, sizes))
    held = new.meta["val"]
    assert facts(held) == facts(evaluate(target, (node, sizes), {}))
    assert all(t is not node.meta["val"] for t in ([held] if isinstance(held, Tensor) else held))


@pytest.mark.parametrize(
    ("target", "args"),
    [(VIEW, ([5, 3],)), (SPLIT, ([5, 5],)), (VIEW, ()), (VIEW, (12.0,)), (SPLIT, ([12], 4))],
    ids=str,
)
def test_arguments_that_do_not_fit_are_refused(target: Any, args: tuple[Any, ...]) -> None:
    graph, node = graph_of(torch.zeros(12))
    with pytest.raises(VerificationError, match="does not take these arguments"):
        call_function_with_meta(graph, target, (node, *args))
    assert [n.op for n in graph.nodes] == ["placeholder"]


def test_the_mode_decides_where_sizes_are_symbolic() -> None:
    graph, node = graph_of(torch.zeros(12))
    mode = FakeTensorMode(shape_env=ShapeEnv())
    node.meta["val"] = mode.from_tensor(torch.zeros(7), static_shapes=False)
    new = call_function_with_meta(graph, VIEW, (node, [-1, 1]))
    assert isinstance(new.meta["val"].shape[0], torch.SymInt)


@pytest.mark.parametrize(
    "real",
    [
        torch.zeros(3, 4),
        torch.zeros(3, 4, requires_grad=True),
        torch.nn.Parameter(torch.zeros(3, 4).t()),
        torch.zeros(6, dtype=torch.complex64).conj(),
        torch.zeros(0, 2),
        torch.zeros(4)[1::2],
        torch.zeros(3, 3).to_sparse(),
    ],
    ids=["plain", "leaf", "parameter", "conj", "empty", "inside", "sparse"],
)
@pytest.mark.parametrize("active", [False, True], ids=["outside its mode", "in its mode"])
def test_what_is_detached_is_what_the_mode_detaches(real: Tensor, active: bool) -> None:
    mode = FakeTensorMode(shape_env=ShapeEnv())
    fake = mode.from_tensor(real, static_shapes=True)
    with mode if active else nullcontext():
        ours, theirs = _compat.detached(fake), fake.detach()
    if real.is_sparse:
        assert ours.is_sparse and ours.shape == theirs.shape
    else:
        assert facts(ours) == facts(theirs)
        assert ours is not fake and ours.is_leaf


def test_what_is_detached_keeps_a_value_that_is_known() -> None:
    with FakeTensorMode(shape_env=ShapeEnv()):
        known = torch.tensor(2.5)
        assert _compat.detached(known).item() == 2.5


_EXP = torch.ops.aten._foreach_exp.default


_DECAY = torch.ops.aten._foreach_lerp.Scalar


def test_parts_of_a_row_are_those_that_are_taken_one_by_one() -> None:
    random.seed(5)
    for _ in range(200):
        terms = Terms()
        made = [terms.make(("input", n), uniform=n % 3 == 0) for n in range(4)]
        row = [
            Segment(random.choice(made), random.randrange(9), random.randrange(1, 9))
            for _ in range(random.randrange(1, 9))
        ]
        length = sum(segment.length for segment in row)
        cuts = sorted(random.choices(range(length + 3), k=random.randrange(6)))
        lengths = [end - start for start, end in zip([0, *cuts], [*cuts, length], strict=True)]
        lengths = [max(0, n) for n in lengths]
        starts = [sum(lengths[:index]) for index in range(len(lengths))]
        one_by_one = [terms.part(row, s, n) for s, n in zip(starts, lengths, strict=True)]
        assert terms.parts(row, lengths) == one_by_one


def _of(
    terms: Terms, target: object, fakes: list[torch.Tensor], *args: object
) -> tuple[object, ...]:
    found = entries(terms, target, named(target, args, {}), fakes)
    assert isinstance(found, tuple)
    return found


def test_an_entry_goes_by_what_it_is_given_and_not_by_its_place() -> None:
    terms, fakes = Terms(), [torch.ones(2, 3), torch.ones(2, 3)]
    x, y = (fresh(terms, ("input", name), torch.ones(2, 3)) for name in "xy")
    first, second = _of(terms, _EXP, fakes, (x, y))
    assert first != second
    assert _of(terms, _EXP, fakes, (y, x)) == (second, first)
    assert _of(terms, _EXP, fakes[:1], (y,)) == (second,)


def test_an_entry_has_the_layout_that_its_metadata_has_now() -> None:
    terms, plain, turned = Terms(), torch.ones(2, 3), torch.ones(3, 2).t()
    x = fresh(terms, ("input", "x"), plain)
    for fake in (plain, turned, plain):
        (found,) = _of(terms, _EXP, [fake], (x,))
        assert found.stride == fake.stride()


def test_numbers_that_all_entries_have_are_told_apart() -> None:
    terms, fakes = Terms(), [torch.ones(2, 3)]
    x, y = (fresh(terms, ("input", name), torch.ones(2, 3)) for name in "xy")
    weights = (0.0, -0.0, 1, 1.0, True, 0.5)
    found = [_of(terms, _DECAY, fakes, (x,), (y,), weight) for weight in weights]
    assert len(set(found)) == len(weights)
    assert [_of(terms, _DECAY, fakes, (x,), (y,), weight) for weight in weights] == found
