"""The gradient of a cross entropy as compiled regions compute it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.nn import functional as F

from graphopt import _compat
from graphopt._compat import inductor
from graphopt.lowering import LoweredSubgraph
from graphopt.lowering.prepare import PreparedRegion

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


def sums_of_rows(graph: fx.GraphModule) -> int:
    sums = (node for node in graph.graph.nodes if node.target is aten.sum.dim_IntList)
    return sum(node.args[0].meta["val"].shape == (ROWS, CLASSES) for node in sums)


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
    assert sums_of_rows(rewritten) == 1
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
    assert sums_of_rows(rewritten) == 2
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
