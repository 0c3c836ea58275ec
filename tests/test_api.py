"""The public names: each is described with an example that runs; the pages about them are whole."""

from __future__ import annotations

import doctest
import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx, nn

import graphopt
from graphopt import comm, graph_utils, optim
from graphopt.testing import fake_ranks

ROOT = Path(__file__).resolve().parent.parent
HELPERS = (ROOT / "docs" / "helpers.md").read_text()
FIXTURE = re.compile(r"\bgm\b")
ELSEWHERE = {
    "comm": "CommBlock get_all_comm_blocks get_comm_block parameters_of replace_collective"
    " updates_of wait_of",
    "cost": "CostModel",
    "graph_utils": "call_function_with_meta find_all_descendants find_nodes get_output get_outputs"
    " move_after move_before",
    "hooks": "InductorPass backend inductor_pass inductor_passes",
    "optim": "AdamArgs ForeachAddBlock FusedAdamBlock FusedOptimizerBlock"
    " get_all_fused_optimizer_blocks get_fused_optimizer_block gradients_of split_fused_optimizer",
    "partition": "Partition partition_graph split_module",
    "pipelining": "LossReducer LossWrapper MultiUseParameterConfig Pipe PipeInfo PipeSequential"
    " Reducer Replicated SplitPoint TensorChunkSpec TrivialLossWrapper annotate_split_points"
    " balanced merge_chunks pipe_split pipeline split_args_kwargs_into_chunks stage_backward",
    "saved": "load_graph save_graph",
    "schedule": "Timeline",
    "testing": "FakeRanks StepUnderTest check_pass fake_ranks",
    "verify": "DependencyReport EquivalenceReport check_captured check_dependencies"
    " check_equivalence dependency_graph",
    "viewing": "dot_text view_page",
}
"""Names besides `graphopt.__all__` whose examples are run, by module. Those that compile, measure
or need several processes have tests of their own only."""


def captured_step() -> fx.GraphModule:
    """What examples call `gm`: a training step of a linear layer, on two ranks."""
    model = nn.Linear(4, 2)
    optimizer = torch.optim.Adam(model.parameters(), fused=True)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
        loss = model(x).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    with fake_ranks(2):
        parallel = graphopt.DataParallel()
        return graphopt.capture(
            step, model, optimizer, torch.ones(3, 4), parallel=parallel
        ).graph_module


def example_of(name: str, value: Any) -> doctest.DocTest | None:
    """The example of one name: in its docstring, or that of its class."""
    source = value if hasattr(value, "__qualname__") else type(value)
    module = importlib.import_module(source.__module__)
    found = doctest.DocTestFinder(recurse=False).find(source, name, module, globs={})
    return found[0] if found and found[0].examples else None


def public() -> Iterator[tuple[str, Any]]:
    yield from ((f"graphopt.{name}", getattr(graphopt, name)) for name in graphopt.__all__)
    for folder, names in ELSEWHERE.items():
        module = importlib.import_module(f"graphopt.{folder}")
        yield from ((f"graphopt.{folder}.{name}", getattr(module, name)) for name in names.split())


@pytest.mark.parametrize("name", [name for name, _ in public()])
def test_example(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GRAPHOPT_DUMP", "")  # what an example sets is taken back
    monkeypatch.delenv("GRAPHOPT_DUMP")
    example = example_of(name, dict(public())[name])
    assert example is not None, f"{name} has no example"
    example.globs.update(graphopt=graphopt, torch=torch)
    if FIXTURE.search("".join(line.source for line in example.examples)):
        example.globs["gm"] = captured_step()
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    runner.run(example, out=sys.stderr.write)
    assert runner.failures == 0


def test_page_of_helpers() -> None:
    """docs/helpers.md has every helper of passes, and nothing that is not there."""
    sections = dict(re.findall(r"^## `(graphopt\.\w+)`.*?$(.*?)(?=^## |\Z)", HELPERS, re.M | re.S))
    for module in (graph_utils, comm, optim):
        named = re.findall(r"^\| `(\w+)", sections[module.__name__], re.M)
        assert sorted(named) == sorted(module.__all__), module.__name__
