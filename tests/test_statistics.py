"""Running statistics that a kernel writes although its schema denies it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx, nn

from graphopt.graph_utils import get_outputs, is_operator
from graphopt.tracing.capture import capture
from graphopt.tracing.exactness.statistics import written_functionally

aten = torch.ops.aten


class CudnnNorm(nn.BatchNorm2d):
    """What `nn.BatchNorm2d` does on a GPU. Shape rules alone know it elsewhere."""

    def forward(self, x: Tensor) -> Tensor:
        found = torch.cudnn_batch_norm(
            x, self.weight, self.bias, self.running_mean, self.running_var, self.training, 0.1, 1e-5
        )
        return found[0]  # type: ignore[no-any-return]


def train(model: Any, average: Tensor, x: Tensor) -> Tensor:
    loss: Tensor = model(model(x)).square().mean()
    loss.backward()
    average.copy_(model.running_mean)
    return loss


def _captured(model: nn.Module) -> fx.GraphModule:
    return capture(train, model, torch.zeros(3), torch.randn(2, 3, 4, 4)).graph_module


def test_statistics_are_values_of_the_graph() -> None:
    graph = _captured(CudnnNorm(3)).graph
    norms = [n for n in graph.nodes if is_operator(n.target, "graphopt_inplace::cudnn_batch_norm")]
    first, second = norms
    assert not any(is_operator(n.target, "aten::cudnn_batch_norm") for n in graph.nodes)
    assert [node.op for node in first.args[3:5]] == ["placeholder", "placeholder"]
    # The second call goes on from what the first has made of them.
    assert [(node.args[0], node.args[1]) for node in second.args[3:5]] == [(first, 4), (first, 5)]
    updates = {copy.args[0]: copy.args[1] for copy in get_outputs(graph).updates}
    mean, average = first.args[3], next(n for n in updates if "average" in n.name)
    assert updates[mean].args == (second, 4)
    assert updates[average] is updates[mean]  # read after the update, and not before it


def test_nothing_is_updated_in_evaluation() -> None:
    graph = _captured(CudnnNorm(3).eval()).graph
    assert sum(is_operator(n.target, "aten::cudnn_batch_norm") for n in graph.nodes) == 2
    updated = [copy.args[0].name for copy in get_outputs(graph).updates]
    assert len(updated) == 1 and "average" in updated[0]


def test_without_statistics_the_kernel_stays() -> None:
    x = torch.randn(2, 3, 4, 4)
    arguments = (x, torch.ones(3), torch.zeros(3), None, None, True, 0.1, 1e-5)
    assert written_functionally(aten.cudnn_batch_norm.default, arguments, {}) is None
