"""A small Llama under `ZeRO`, planned for ranks and devices that are not there."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import graphopt
from graphopt.saved import save_graph
from graphopt.stages.pipelines import default_pipeline

Figures = dict[str, Any]


def train(model: Any, optimizer: Any, words: Tensor, following: Tensor) -> Tensor:
    loss: Tensor = model(words, following)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def planned(stage: int, path: str) -> Figures:
    """Capture, expand, pass and prove a step; save it, and return its figures before and after."""
    sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
    from llama_model import Llama, Sizes

    sizes = Sizes(layers=3, width=512, hidden=1024, heads=8, key_heads=4, words=4096)
    with torch.device("cuda"):
        model: Any = Llama(sizes).to(torch.bfloat16)
        words = torch.zeros(1, 2048, dtype=torch.long)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    arguments = (model, optimizer, words, words)
    captured = graphopt.capture(train, *arguments, parallel=graphopt.ZeRO(stage=stage))
    before = graphopt.simulate(captured.graph_module)
    gm = graphopt.IterGraphModule(captured.graph_module)
    graphopt.PassManager(default_pipeline(), verify="equivalence").run(gm)
    after = graphopt.simulate(gm)
    save_graph(gm, path)
    return {
        "seconds": (before.step_seconds, after.step_seconds),
        "collectives": (len(before.collectives), len(after.collectives)),
        "peak": (before.peak_bytes, after.peak_bytes),
    }
