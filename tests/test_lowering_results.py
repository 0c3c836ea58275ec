"""What compiled regions compute: losses, sums by index, late work on ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.nn import functional as F

import graphopt
from gloo import Pool
from graphopt import _compat
from graphopt._compat import inductor
from graphopt.graph_utils import is_collective, is_wait
from graphopt.iter_graph.derive import Derivation, plan
from graphopt.lowering import LoweredSubgraph, Options, partial_lower
from graphopt.lowering.extract import RegionCut
from graphopt.lowering.prepare import PreparedRegion
from graphopt.lowering.regions import MARK
from zoo import MODELS, OPTIMIZERS, train_step

aten = torch.ops.aten


ROWS, CLASSES = 6, 5


def gradient_graph(logits: Tensor, targets: Tensor, **options: Any) -> fx.GraphModule:
    def gradient(logits: Tensor, targets: Tensor, weight: Tensor) -> list[Tensor]:
        given = dict(options)
        if given.pop("weighted", False):
            given["weight"] = weight
        leaf = logits.detach().requires_grad_()
        loss = F.cross_entropy(leaf, targets, **given)
        return [loss.detach(), *torch.autograd.grad(loss.sum(), leaf)]

    return _compat.make_fx(gradient)(logits, targets, torch.rand(CLASSES, dtype=logits.dtype))


def prepared(graph: fx.GraphModule, *inputs: Tensor) -> fx.GraphModule:
    mode = _compat.new_fake_mode()
    return inductor.decompose(graph, [mode.from_tensor(x) for x in inputs], PreparedRegion)


CASES: dict[str, dict[str, Any]] = {
    "mean": {},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "weighted": {"weighted": True},
    "weighted none": {"weighted": True, "reduction": "none"},
    "ignored": {"ignore_index": 2},
    "weighted ignored": {"weighted": True, "ignore_index": 2},
}


@pytest.mark.parametrize("case", CASES)
def test_the_gradient_is_that_of_eager(case: str) -> None:
    torch.manual_seed(0)
    logits = torch.randn(ROWS, CLASSES, dtype=torch.float64) * 3
    targets = torch.randint(CLASSES, (ROWS,))
    targets[0] = 2
    weight = torch.rand(CLASSES, dtype=torch.float64)
    graph = gradient_graph(logits, targets, **CASES[case])
    rewritten = prepared(graph, logits, targets, weight)
    # The one sum over classes is that of the forward.
    wanted = graph(logits, targets, weight)
    got = rewritten(logits, targets, weight)
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30])
def test_logits_out_of_range(value: float) -> None:
    logits, targets = torch.randn(ROWS, CLASSES), torch.arange(ROWS) % CLASSES
    logits[1, 3] = value
    graph = gradient_graph(logits, targets)
    wanted = graph(logits, targets, torch.ones(CLASSES))
    got = prepared(graph, logits, targets, torch.ones(CLASSES))(
        logits, targets, torch.ones(CLASSES)
    )
    torch.testing.assert_close(got, wanted, equal_nan=True)


def test_nothing_counts() -> None:
    """The mean over no rows at all is not a number, in eager mode as here."""
    logits, targets = torch.randn(ROWS, CLASSES), torch.full((ROWS,), -100)
    inputs = (logits, targets, torch.ones(CLASSES))
    graph = gradient_graph(logits, targets)
    torch.testing.assert_close(prepared(graph, *inputs)(*inputs), graph(*inputs), equal_nan=True)


def test_other_gradients_of_log_softmax_stay() -> None:
    def gradient(x: Tensor, seed: Tensor) -> list[Tensor]:
        leaf = x.detach().requires_grad_()
        return list(torch.autograd.grad(F.log_softmax(leaf, 1), leaf, seed))

    inputs = (torch.randn(ROWS, CLASSES), torch.randn(ROWS, CLASSES))
    graph = _compat.make_fx(gradient)(*inputs)
    rewritten = prepared(graph, *inputs)
    torch.testing.assert_close(rewritten(*inputs), graph(*inputs))


def test_compiled_in_low_precision() -> None:
    logits, targets = torch.randn(ROWS, CLASSES).bfloat16(), torch.arange(ROWS) % CLASSES
    inputs = (logits, targets, torch.ones(CLASSES).bfloat16())
    graph = gradient_graph(logits, targets)
    got = LoweredSubgraph(graph, "region")(*inputs)
    # Torch 2.11 believes in a sum of weights in float32, where its kernel gives one in bfloat16.
    as_kernels = torch.__version__ >= "2.12"
    torch.testing.assert_close(
        list(got), graph(*inputs), rtol=2e-2, atol=1e-2, check_dtype=as_kernels
    )


ROWS_OF_LOWERING_ORDER, ROW, ADDED = 7, 64, 4096


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(4)  # they take turns where there are fewer cores
    yield
    torch.set_num_threads(before)


def embedding(values: Tensor, indices: Tensor) -> Tensor:
    zeros = values.new_zeros(ROWS_OF_LOWERING_ORDER, ROW, requires_grad=True)
    looked_up = F.embedding(indices, zeros)
    return torch.autograd.grad((looked_up * values.sin()).sum(), zeros)[0]


def padded_embedding(values: Tensor, indices: Tensor) -> Tensor:
    zeros = values.new_zeros(ROWS_OF_LOWERING_ORDER, ROW, requires_grad=True)
    looked_up = F.embedding(indices, zeros, padding_idx=3, scale_grad_by_freq=True)
    return torch.autograd.grad((looked_up * values.sin()).sum(), zeros)[0]


def index_add(values: Tensor, indices: Tensor) -> Tensor:
    return values.new_zeros(ROWS_OF_LOWERING_ORDER, ROW).index_add(
        0, indices, values.sin(), alpha=0.5
    )


def index_mean(values: Tensor, indices: Tensor) -> Tensor:
    return values.new_ones(ROWS_OF_LOWERING_ORDER, ROW).index_reduce(
        0, indices, values.sin(), "mean"
    )


def index_put(values: Tensor, indices: Tensor) -> Tensor:
    # So small that ATen adds in order.
    few = values[:256].sin()
    return values.new_zeros(ROWS_OF_LOWERING_ORDER, ROW).index_put(
        (indices[:256],), few, accumulate=True
    )


def selected(values: Tensor, indices: Tensor) -> Tensor:
    zeros = values.new_zeros(ROWS_OF_LOWERING_ORDER, ROW, requires_grad=True)
    return torch.autograd.grad((zeros.index_select(0, indices) * values.sin()).sum(), zeros)[0]


def gathered(values: Tensor, indices: Tensor) -> Tensor:
    zeros = values.new_zeros(ROWS_OF_LOWERING_ORDER, ROW, requires_grad=True)
    taken = zeros.gather(0, indices[:, None].expand(-1, ROW))
    return torch.autograd.grad((taken * values.sin()).sum(), zeros)[0]


def scattered(values: Tensor, indices: Tensor) -> Tensor:
    places = indices[:, None].expand(-1, ROW)
    return values.new_zeros(ROWS_OF_LOWERING_ORDER, ROW).scatter_reduce(
        0, places, values.sin(), "sum"
    )


def windows(values: Tensor, indices: Tensor) -> Tensor:
    flat = values.new_zeros(ADDED + 8, requires_grad=True)
    seen = flat.unfold(0, 9, 1)[:ADDED]
    return torch.autograd.grad((seen * values[:, :9].sin()).sum(), flat)[0]


def folded(values: Tensor, indices: Tensor) -> Tensor:
    columns = values.sin().reshape(1, 64, 64 * 64)
    return F.fold(columns, output_size=(67, 67), kernel_size=4)


FUNCTIONS = [
    *(embedding, padded_embedding, index_add, index_mean, index_put, selected, gathered),
    *(scattered, windows, folded),
]


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: str(function.__name__))
def test_adds_in_one_order(function: Callable[[Tensor, Tensor], Tensor]) -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(ADDED, ROW, generator=generator)
    indices = torch.randint(ROWS_OF_LOWERING_ORDER, (ADDED,), generator=generator)
    gm = partial_lower(_compat.make_fx(function)(values, indices), min_ops=1)
    first = gm(values, indices)
    for _ in range(40):
        assert torch.equal(gm(values, indices), first)
    assert any(isinstance(m, LoweredSubgraph) and m.is_compiled for m in gm.modules())
    torch.testing.assert_close(first, function(values, indices), rtol=1e-4, atol=1e-4)


PIPELINE = "comm_fusion_with_concat(bucket_size_mb=0.001) -> schedule_comm_wait"


def trained(rank: int, pipeline: str, optimizer_name: str, lower: Any) -> Any:
    torch.manual_seed(rank)
    model = MODELS["mlp"].make()
    optimizer = OPTIMIZERS[optimizer_name](model.parameters())
    step = graphopt.compile(train_step, pipeline=pipeline, lower=lower and Options(min_ops=3))
    losses = []
    for index in range(6):
        torch.manual_seed(10 * index + rank)
        losses.append(float(step(model, optimizer, *MODELS["mlp"].batch(2 * index + rank))))
        if index == 3:
            step.flush()
    parameters = [parameter.detach().clone() for parameter in model.parameters()]
    return losses, parameters, step, model


def train_both(rank: int, pipeline: str, optimizer: str) -> dict[str, Any]:
    losses, parameters, *_ = trained(rank, pipeline, optimizer, None)
    lowered_losses, lowered_parameters, step, _model = trained(
        rank, pipeline, optimizer, "inductor"
    )
    torch.testing.assert_close(lowered_losses, losses, rtol=2e-4, atol=1e-5)
    torch.testing.assert_close(lowered_parameters, parameters, rtol=1e-4, atol=1e-5)
    assert step.lowered
    assert all(region.is_compiled for region in step.lowered)
    module = step.graph_module
    shared = set(region_names(module.setup_gm)) & set(region_names(module.main_gm))
    return {
        "late": len(module.graph.late),
        "parameters": lowered_parameters,
        "shared": len(shared),
        "hidden": check_hidden(module),
    }


def region_names(derived: fx.GraphModule) -> list[str]:
    return [region.text() for region in RegionCut(derived.graph).regions]


def check_hidden(module: graphopt.IterGraphModule) -> int:
    """Between each launch and its wait runs at least what ran there before; returns how much."""
    checked = 0
    for derive in ("setup", "main"):
        graph = getattr(Derivation(module.graph, plan(module.graph)), derive)()
        before = {node: index for index, node in enumerate(graph.nodes)}
        after = {node: index for index, node in enumerate(RegionCut(graph).ordered)}
        calls = [n for n in before if n.op == "call_function" and not n.meta[MARK].free]
        for launch in filter(is_collective, calls):
            (wait,) = filter(is_wait, launch.users) if any(map(is_wait, launch.users)) else (None,)
            end = len(before) if wait is None else before[wait]
            after_end = len(after) if wait is None else after[wait]
            hidden = {n for n in calls if before[launch] < before[n] < end}
            now = {n for n in calls if after[launch] < after[n] < after_end}
            assert hidden <= now
            checked += len(hidden)
    return checked


@pytest.mark.parametrize(
    ("pipeline", "optimizer"),
    [("default", "sgd-momentum-foreach"), (PIPELINE, "sgd-momentum-fused")],
)
def test_training(two_ranks: Pool, pipeline: str, optimizer: str) -> None:
    first, second = two_ranks.run(train_both, pipeline, optimizer, timeout=280)
    assert all(map(torch.equal, first["parameters"], second["parameters"]))
    assert (first["late"] > 0) == (pipeline == "default")
    assert first["shared"] > 0
    assert first["hidden"] > 0
