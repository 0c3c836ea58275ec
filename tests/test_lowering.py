"""Compiled regions: results, guards, what happens when compiling fails, caches."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.optim import Optimizer

import graphopt
from graphopt import _compat
from graphopt.lowering import LoweredSubgraph, Options, partial_lower
from zoo import MODELS, OPTIMIZERS, train_step

aten = torch.ops.aten


def traced(fn: Any, *args: Tensor) -> fx.GraphModule:
    return _compat.make_fx(fn)(*args)


def pointwise(x: Tensor) -> Tensor:
    for _ in range(6):
        x = x.sin() + 1
    return x


def lowered(*, dtype: torch.dtype = torch.float32, **options: Any) -> fx.GraphModule:
    return partial_lower(traced(pointwise, torch.ones(8, 3, dtype=dtype)), **options)


def region_of(gm: fx.GraphModule) -> LoweredSubgraph:
    (region,) = (m for m in gm.modules() if isinstance(m, LoweredSubgraph))
    return region


def test_a_region_is_a_tagged_submodule() -> None:
    texts: list[str] = []

    def dumper(text: str) -> str:
        texts.append(text)
        return "dumps/0.txt"

    gm = lowered(dumper=dumper)
    (call,) = (node for node in gm.graph.nodes if node.op == "call_module")
    assert (call.target, call.kwargs) == ("subgraph_0", {"tag": "dumps/0.txt"})
    assert len(texts) == 1
    assert "aten.sin.default" in texts[0]
    x = torch.randn(8, 3)
    with torch.profiler.profile() as profile:
        torch.testing.assert_close(gm(x), pointwise(x))
    assert "dumps/0.txt" in {event.key for event in profile.key_averages()}
    assert region_of(gm).is_compiled


def test_a_dumper_that_raises(caplog: pytest.LogCaptureFixture) -> None:
    def dumper(text: str) -> str:
        raise OSError("disk full")

    gm = lowered(dumper=dumper)
    (call,) = (node for node in gm.graph.nodes if node.op == "call_module")
    assert call.kwargs == {"tag": "subgraph_0"}
    assert "the dumper failed for subgraph_0: OSError: disk full" in caplog.text


@pytest.mark.parametrize(
    "x",
    [
        torch.randn(8, 3, dtype=torch.float64),
        torch.randn(3, 8).t(),
        torch.randn(8, 6)[:, ::2],
        torch.randn(8, 3).expand(8, 3),
    ],
    ids=["dtype", "transposed", "strided", "same"],
)
def test_other_inputs_are_not_read_wrongly(x: Tensor) -> None:
    gm = lowered()
    first = torch.randn(8, 3)
    torch.testing.assert_close(gm(first), pointwise(first))
    result = gm(x)
    assert result.dtype == x.dtype
    torch.testing.assert_close(result, pointwise(x))
    torch.testing.assert_close(gm(first), pointwise(first))


def test_a_region_that_fails_to_compile_runs_eagerly(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from torch._inductor import config, lowering

    def refuse(*args: Any) -> None:
        raise NotImplementedError("no rule")

    gm = lowered()
    x = torch.randn(8, 3)
    with config.patch(force_disable_caches=True), monkeypatch.context() as patch:
        patch.setitem(lowering.lowerings, aten.sin.default, refuse)
        for _ in range(2):
            assert torch.equal(gm(x), pointwise(x))
    assert caplog.text.count("runs operator by operator") == 1
    assert "aten.sin.default" in caplog.text
    assert isinstance(region_of(gm).failure, graphopt.LoweringError)


def test_no_compiler(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    from torch._inductor import config

    def other(x: Tensor) -> Tensor:
        for _ in range(7):
            x = x.cos() * 3
        return x

    with config.patch({"cpp.cxx": ("no-such-compiler",), "force_disable_caches": True}):
        gm = partial_lower(traced(other, torch.ones(5, 3)))
        x = torch.randn(5, 3)
        assert torch.equal(gm(x), other(x))
    assert "there is no working C++ compiler" in caplog.text
    assert "install one" in caplog.text


def test_results_have_storage_of_their_own() -> None:
    def twice(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = pointwise(x)
        return y, y.clone(), y.t()

    gm = partial_lower(traced(twice, torch.ones(8, 3)))
    x = torch.randn(8, 3)
    first, second, view = gm(x)
    assert first.data_ptr() != second.data_ptr()
    assert first.data_ptr() == view.data_ptr()
    first.zero_()
    torch.testing.assert_close(second, pointwise(x))


def test_compiling_draws_no_random_numbers() -> None:
    gm, x = lowered(), torch.randn(8, 3)
    torch.manual_seed(0)
    random.seed(0)
    expected = torch.rand(3), random.random()
    torch.manual_seed(0)
    random.seed(0)
    gm(x)
    assert region_of(gm).is_compiled
    assert torch.equal(torch.rand(3), expected[0])
    assert random.random() == expected[1]


def train(
    model: str,
    optimizer: str = "adamw-fused",
    *,
    lower: Any,
    dtype: torch.dtype = torch.float32,
    steps: int = 3,
) -> tuple[graphopt.TrainStep, list[Tensor], list[Tensor]]:
    """The step, its losses, and the parameters after all steps."""
    torch.manual_seed(0)
    case = MODELS[model]
    built = case.make().to(dtype)
    state = OPTIMIZERS[optimizer](built.parameters())
    step = graphopt.compile(train_step, lower=lower)
    losses = []
    for seed in range(steps):
        inputs, targets = case.batch(seed)
        inputs = inputs.to(dtype) if inputs.is_floating_point() else inputs
        losses.append(step(built, state, inputs, targets))
    return step, losses, [parameter.detach().clone() for parameter in built.parameters()]


@pytest.mark.parametrize("model", ["gpt", "convnet"])
def test_a_step_is_as_exact_as_eager(model: str, caplog: pytest.LogCaptureFixture) -> None:
    """The error against float64 is that of rounding, and dropout draws what eager draws."""
    _, exact, _ = train(model, lower=None, dtype=torch.float64, steps=2)
    _, eager, _ = train(model, lower=None, steps=2)
    _, compiled, _ = train(model, lower="inductor", steps=2)
    for wanted, plain, got in zip(exact, eager, compiled, strict=True):
        bound = 4 * (plain.double() - wanted).abs() + 1e-5 * wanted.abs()
        assert (got.double() - wanted).abs() <= bound
    assert "runs operator by operator" not in caplog.text


@pytest.mark.parametrize("optimizer", ["adamw-foreach", "adamw-loop", "sgd-momentum-loop"])
def test_an_optimizer_is_in_the_region_that_computes_its_gradients(optimizer: str) -> None:
    """Also where Python computes numbers from the steps that it counts."""
    torch.manual_seed(0)
    model = MODELS["mlp"].make()
    opt = OPTIMIZERS[optimizer](model.parameters())
    step = graphopt.compile(train_step, lower="inductor")
    for index in range(3):
        step(model, opt, *MODELS["mlp"].batch(index))
    assert len(step.lowered) == 1


def test_unknown_ways_to_lower() -> None:
    with pytest.raises(graphopt.LoweringError, match="there is no lower='triton'"):
        graphopt.compile(train_step, lower="triton")


SELECTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "items": lambda x, mask: (x[mask] * 2).sin().sum(),
    "items set": lambda x, mask: _set(x, mask),
    "items counted down": lambda x, mask: _counted_down(x, mask),
    "places": lambda x, mask: x.view(-1)[mask.view(-1).nonzero().squeeze(1)].cos().sum(),
    "selected": lambda x, mask: torch.masked_select(x, mask).exp().sum(),
    "distinct": lambda x, mask: torch.unique(x.detach().round()).sin().sum() * x.sum(),
    "where": lambda x, mask: x[torch.where(mask)].sin().sum(),
}


def _set(x: Tensor, mask: Tensor) -> Tensor:
    y = x.sin()
    y[mask] = y[mask] * 2 + 1
    return y.cos().sum()


def _counted_down(x: Tensor, mask: Tensor) -> Tensor:
    indices = (x.detach() > 0).long() + 1
    indices[mask] -= 1
    return (x * indices).sin().sum()


@pytest.mark.parametrize("name", SELECTIONS)
def test_selections_by_value_are_not_in_compiled_code(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Also in a graph that holds for one number of them, one among others."""
    select = SELECTIONS[name]

    def step(model: nn.Module, optimizer: Optimizer, x: Tensor, mask: Tensor) -> Tensor:
        loss = select(model(x).tanh() + x, mask).exp()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    found = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        run = graphopt.compile(step, lower="inductor") if compiled else step
        for count in (1, 3, 1, 4):
            x = torch.randn(4, 4)
            mask = torch.arange(16).view(4, 4) < count
            found.append(run(model, optimizer, x, mask))
        found.append(model.weight.detach().clone())
    for eager, lowered in zip(found[: len(found) // 2], found[len(found) // 2 :], strict=True):
        torch.testing.assert_close(lowered, eager)
    assert "runs operator by operator" not in caplog.text


def alpha_first(x: Tensor, y: Tensor) -> Tensor:
    return (x * 2).add(x @ y, alpha=0.5).sin()


def alpha_second(x: Tensor, y: Tensor) -> Tensor:
    return (x @ y).sub(x * 2, alpha=0.25).sin()


def state_read_after(x: Tensor, y: Tensor) -> Tensor:
    x.copy_(x.sin())
    return x.view(-1).cos() + y.view(-1)


def filled_in(x: Tensor, y: Tensor) -> Tensor:
    z = torch.zeros(4, 4)
    z[0] = x[0] * 2
    return z.sin() + y


def whole_list(x: Tensor, y: Tensor) -> Tensor:
    return torch.cat(torch._foreach_add([x.sin(), y.sin()], 1)).cos()


@pytest.mark.parametrize(
    "function",
    [alpha_first, alpha_second, state_read_after, filled_in, whole_list],
    ids=lambda function: str(function.__name__),
)
def test_what_compilers_get_wrong(function: Callable[[Tensor, Tensor], Tensor]) -> None:
    gm = traced(function, torch.ones(4, 4), torch.ones(4, 4))
    partial_lower(gm, min_ops=1)
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.rand(4, 4, generator=generator) for _ in range(2))
    expected = function(x.clone(), y.clone())
    torch.testing.assert_close(gm(x.clone(), y.clone()), expected)


def test_negative_views_are_read_with_their_sign() -> None:
    gm = lowered()
    x = torch.randn(8, 3, dtype=torch.complex64).conj().imag
    assert x.is_neg()
    torch.testing.assert_close(gm(x), pointwise(x))


def test_lowering_twice_keeps_the_first_regions() -> None:
    gm = lowered()
    region = region_of(gm)
    (item,) = next(iter(reversed(gm.graph.nodes))).args
    with gm.graph.inserting_before(next(iter(reversed(gm.graph.nodes)))):
        for _ in range(2):
            item = gm.graph.call_function(aten.cos.default, (item,))
            item.meta["val"] = item.args[0].meta["val"]
    next(iter(reversed(gm.graph.nodes))).args = (item,)
    partial_lower(gm, min_ops=2)
    assert gm.subgraph_0 is region
    x = torch.randn(8, 3)
    torch.testing.assert_close(gm(x), pointwise(x).cos().cos())


def test_updates_are_seen_by_autograd() -> None:
    """As in eager: a backward through weights that have been updated is refused."""
    torch.manual_seed(0)
    case = MODELS["mlp"]
    model = case.make()
    optimizer = OPTIMIZERS["sgd-momentum-foreach"](model.parameters())
    step = graphopt.compile(train_step, lower=Options(min_ops=1))
    for index in range(2):
        inputs, targets = case.batch(index)
        step(model, optimizer, inputs, targets)
    value = model(inputs).pow(2).sum()
    step(model, optimizer, inputs, targets)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        value.backward()


def test_another_default_dtype_is_other_code() -> None:
    def halved(
        model: nn.Module, optimizer: Optimizer, inputs: Tensor, targets: Tensor, numbers: Tensor
    ) -> Tensor:
        train_step(model, optimizer, inputs, targets)
        return numbers / 2

    model = MODELS["mlp"].make()
    optimizer = OPTIMIZERS["sgd-fused"](model.parameters())
    step = graphopt.compile(halved, lower=Options(min_ops=1))
    inputs, targets = MODELS["mlp"].batch(0)
    numbers = torch.arange(4)
    found = []
    for dtype in (torch.float32, torch.float64, torch.float32):
        torch.set_default_dtype(dtype)
        try:
            found.append(step(model, optimizer, inputs, targets, numbers).dtype)
        finally:
            torch.set_default_dtype(torch.float32)
    assert found == [torch.float32, torch.float64, torch.float32]
