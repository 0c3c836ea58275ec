"""The simulator's account of memory, against that of Inductor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

import graphopt
from graphopt.parallel import OverRanks
from graphopt.schedule.program import step_peak_bytes
from graphopt.testing import fake_ranks
from zero_cases import VOCABULARY, Language

memory = pytest.importorskip("torch._inductor.fx_passes.memory_estimator")


class Checkpointed(Language):
    """Computes all of its forward again in the backward."""

    def forward(self, words: Tensor) -> Tensor:
        found: Tensor = checkpoint(super().forward, words, use_reentrant=False)
        return found


def step(model: Any, optimizer: Any, words: Tensor) -> Tensor:
    loss = nn.functional.cross_entropy(model(words), words)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def captured(kind: OverRanks, model: nn.Module) -> fx.GraphModule:
    """With activations larger than what the optimizer makes: Inductor counts values that nobody
    reads, such as the gradients that a functional optimizer gives back."""
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    words = torch.zeros(1024, dtype=torch.long) % VOCABULARY
    return graphopt.capture(step, model, optimizer, words, parallel=kind).graph_module


CASES: dict[str, Callable[[], fx.GraphModule]] = {
    "averaged": lambda: captured(graphopt.DataParallel(), Language(layers=2, width=256)),
    "stage 1": lambda: captured(graphopt.ZeRO(stage=1), Language(layers=2, width=256)),
    "stage 3": lambda: captured(graphopt.ZeRO(stage=3), Language(layers=2, width=256)),
    "stage 3, checkpointed": lambda: captured(graphopt.ZeRO(stage=3), Checkpointed(2, width=256)),
}
PIPELINES = {
    "given": "",
    "fused": "comm_fusion_with_concat -> fuse_exchanges -> schedule_comm_wait",
    "overlapped": "schedule_overlap(device='h100', network='infiniband')",
}


@pytest.mark.covering(2)
@pytest.mark.parametrize("pipeline", PIPELINES)
@pytest.mark.parametrize("case", CASES)
def test_as_inductor_counts(case: str, pipeline: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within two percent, in the order of the graph."""
    monkeypatch.setattr(memory, "device_filter", lambda device: True)
    with fake_ranks(2):
        gm = CASES[case]()
        if PIPELINES[pipeline]:
            graphopt.PassManager(PIPELINES[pipeline]).run(gm)
    inputs = ("placeholder", "get_attr")
    profile = memory.build_memory_profile(gm.graph, lambda node: node.op not in inputs)
    assert step_peak_bytes(gm.graph) == pytest.approx(max(profile) - profile[0], rel=0.02)
