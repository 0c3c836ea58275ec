"""Kernels that index what they are given without a look at its size are not run with other sizes.

Each of these calls ends the process, or reads what is not its own, when torch runs it.
"""

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Node

import graphopt
from graphopt.errors import CaptureError
from graphopt.graph_utils import evaluate

aten = torch.ops.aten
ALL = [True, True, True]


def batch_norm(x: Tensor, *statistics: Tensor | None, train: bool = True) -> Tensor:
    weight = torch.ones(x.shape[1])
    found = aten.native_batch_norm_backward(x, x, weight, *statistics, train, 1e-5, ALL)
    return found[0]


def batch_norm_of_any_backend(x: Tensor, mean: Tensor | None, variance: Tensor | None) -> Tensor:
    ones, kept = torch.ones(x.shape[1]), torch.empty(0, dtype=torch.uint8)
    return aten.batch_norm_backward(x, x, ones, ones, ones, mean, variance, True, 1e-5, ALL, kept)[
        0
    ]


def layer_norm(x: Tensor, mean: Tensor, deviation: Tensor) -> Tensor:
    ones = torch.ones(x.shape[-1])
    return aten.native_layer_norm_backward(x, x, [x.shape[-1]], mean, deviation, ones, ones, ALL)[0]


def log_softmax(x: Tensor, output: Tensor) -> Tensor:
    return aten._log_softmax_backward_data(x, output, 1, torch.float32)


X = torch.rand(6, 4, 5)
CHANNELS, FEW, NONE = torch.ones(4), torch.ones(1), torch.empty(0)
PLACES = torch.ones(6, 4, 1)
WRONG = {
    "no mean of the batch": (batch_norm, (CHANNELS, CHANNELS, None, CHANNELS)),
    "no deviation of the batch": (batch_norm, (CHANNELS, CHANNELS, CHANNELS, None)),
    "an empty mean": (batch_norm, (None, None, NONE, CHANNELS)),
    "too few deviations": (batch_norm, (None, None, CHANNELS, FEW)),
    "no mean, any backend": (batch_norm_of_any_backend, (None, CHANNELS)),
    "few variances, any backend": (batch_norm_of_any_backend, (CHANNELS, FEW)),
    "empty mean of a layer": (layer_norm, (NONE, PLACES)),
    "few deviations of a layer": (layer_norm, (PLACES, CHANNELS)),
    "another output": (log_softmax, (torch.rand(6, 4),)),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_step_with_such_a_call_is_refused(name: str) -> None:
    call, given = WRONG[name]
    with pytest.raises(CaptureError, match=r"of the \d+ numbers that are read"):
        graphopt.capture(lambda x: call(x, *given), X)


def test_running_statistics_are_read_in_evaluation_alone() -> None:
    def step(model: nn.Module, mean: Tensor | None) -> Tensor:
        return batch_norm(model.weight[None, :, :], mean, mean, None, None, train=False)

    model = nn.Linear(5, 4)
    assert torch.equal(graphopt.compile(step)(model, CHANNELS), step(model, CHANNELS))
    with pytest.raises(CaptureError, match="running_mean has none of the 4 numbers"):
        graphopt.capture(step, model, None)


def test_an_edited_graph_is_evaluated_without_the_kernel() -> None:
    model = nn.Sequential(nn.Conv1d(4, 3, 1), nn.BatchNorm1d(3))

    def step(x: Tensor) -> Tensor:
        loss = model(x).square().sum()
        loss.backward()
        return loss.detach()

    graph = graphopt.capture(step, X).graph_module.graph
    [node] = graph.find_nodes(op="call_function", target=aten.native_batch_norm_backward.default)
    for index, given in enumerate(node.args):
        if index > 4 and isinstance(given, Node):
            args = [None if at == index else arg for at, arg in enumerate(node.args)]
            with pytest.raises(RuntimeError, match="has none of the 3 numbers"):
                evaluate(node.target, args, node.kwargs)
