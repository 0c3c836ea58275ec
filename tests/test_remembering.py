"""What a capture answers from memory gives the graph that torch's own way gives."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import graphopt
from graphopt._compat import questions, storage_key
from graphopt._compat.remembering import remembered, written_as_it_is
from graphopt.tracing.functional import untouched
from graphopt.tracing.layouts import strides
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
        monkeypatch.setattr(untouched.Untouched, "stays", lambda self, node: False)
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
    questions.answer_to.cache_clear()
    yield
    questions.answer_to.cache_clear()


def _asked() -> int:
    return questions.answer_to.cache_info().misses


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
