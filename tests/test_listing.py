"""`graphopt show` prints a graph that was saved, with all that was known of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import fx, nn
from typer.testing import CliRunner

import graphopt
from graphopt import cli
from graphopt.comm import get_all_comm_blocks, parameters_of
from graphopt.readable import graph_text
from graphopt.saved import load_graph, save_graph
from graphopt.testing import fake_ranks
from steps import mean_square


class Scaled(nn.Module):
    """Has a constant in its graph."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.factor = torch.tensor(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.linear(x) * self.factor
        return result


def step_of_ranks() -> fx.GraphModule:
    model = Scaled()
    with fake_ranks(2):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        captured = graphopt.capture(mean_square, model, optimizer, torch.randn(5, 4))
        module = graphopt.IterGraphModule(captured.graph_module)
        pipeline = "remove_copy_from_optimizer -> iter_move_grads_and_optimizers"
        graphopt.PassManager(pipeline).run(module)
    assert module.graph.late
    return module


def forward_alone() -> fx.GraphModule:
    return graphopt.capture(lambda m, x: m(x).tanh(), Scaled(), torch.ones(2, 4)).graph_module


GRAPHS = [step_of_ranks, forward_alone]


def test_a_loaded_graph_knows_what_its_collectives_send(tmp_path: Path) -> None:
    step = step_of_ranks()
    save_graph(step, tmp_path / "step.pt")
    loaded = load_graph(tmp_path / "step.pt")
    sent = [[parameters_of(gm, b) for b in get_all_comm_blocks(gm)] for gm in (step, loaded)]
    assert sent[0] == sent[1] == [("linear.bias",), ("linear.weight",)]


@pytest.mark.parametrize("make", GRAPHS)
def test_show(make: Callable[[], fx.GraphModule], tmp_path: Path) -> None:
    graph, path = make(), tmp_path / "step.pt"
    save_graph(graph, path)
    result = CliRunner().invoke(cli.app, ["show", str(path)])
    assert result.exit_code == 0, result.output
    assert graph_text(graph) in result.output
    assert ("collectives, predicted" in result.output) == bool(get_all_comm_blocks(graph))
    result = CliRunner().invoke(cli.app, ["show", str(path), "--phase", "forward"])
    assert result.output == graph_text(graph, phase="forward")
