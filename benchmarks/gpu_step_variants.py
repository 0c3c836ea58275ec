"""The variants of a GPT-2 training step that `gpu_step.py` compares, and clocks for them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import graphopt

EAGER = "eager"
COMPILED = ("compile", "compile reduce-overhead", "compile max-autotune")
GRAPHOPT = (
    "graphopt none",
    "graphopt default",
    "graphopt inductor",
    "graphopt inductor+cudagraphs",
)
VARIANTS = (EAGER, *COMPILED, *GRAPHOPT)


@dataclass(frozen=True)
class Task:
    """The training task: model, batch, dtype and device.

    Attributes:
        tiny: a model of two narrow layers instead of GPT-2 with 124 million parameters.
        bf16: "autocast", or "weights" for weights in bfloat16.
    """

    device: str
    batch: int
    length: int
    dropout: float
    bf16: str
    tiny: bool = False

    def model(self) -> nn.Module:
        """Makes GPT-2 with the same random weights each time."""
        from transformers import GPT2Config, GPT2LMHeadModel

        size = {"n_layer": 2, "n_embd": 64, "n_head": 2, "vocab_size": 512} if self.tiny else {}
        rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), self.dropout)
        torch.manual_seed(0)
        config = GPT2Config(use_cache=False, attn_implementation="sdpa", **size, **rates)
        model: nn.Module = GPT2LMHeadModel(config).to(self.device)
        return model.bfloat16() if self.bf16 == "weights" else model

    def tokens(self, generator: torch.Generator) -> Tensor:
        """Draws a batch of random tokens."""
        most = 512 if self.tiny else 50257
        shape = (self.batch, self.length)
        return torch.randint(most, shape, generator=generator).to(self.device)

    def step(self) -> Callable[..., Tensor]:
        """Runs forward, loss, backward and update."""
        device, autocast = self.device, self.bf16 == "autocast"

        def train_step(
            model: nn.Module, optimizer: torch.optim.Optimizer, tokens: Tensor
        ) -> Tensor:
            with torch.autocast(device, torch.bfloat16, enabled=autocast):
                loss: Tensor = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        return train_step


class Training:
    """The training of one variant, with fused AdamW."""

    def __init__(self, variant: str, task: Task) -> None:
        self.variant, self.task = variant, task
        self.model = task.model()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.step = task.step()
        self.trained = self.model
        if variant.startswith("compile"):
            mode = variant.partition(" ")[2] or "default"
            self.trained = torch.compile(self.model, mode=mode)  # type: ignore[assignment]
        elif variant != EAGER:
            self.step = graphopt.compile(self.step, **options_of(variant, task))

    def run(self, batches: list[Tensor]) -> None:
        """Runs one step for each batch, and completes all work."""
        for tokens in batches:
            torch.compiler.cudagraph_mark_step_begin()
            self.step(self.trained, self.optimizer, tokens)
        if isinstance(self.step, graphopt.TrainStep):
            self.step.flush()


def options_of(variant: str, task: Task) -> dict[str, Any]:
    """The options of `graphopt.compile` for a variant. Random operators are lowered, as in
    `torch.compile`, so that both may fuse them."""
    name = variant.partition(" ")[2]
    if name in ("none", "default"):
        return {"pipeline": name}
    from graphopt.lowering.compiler import Options

    graphs = name.endswith("cudagraphs")
    return {"lower": Options(cudagraphs=graphs, random=task.dropout > 0)}


# ----------------------------------------------------------------------------------- clocks


def synchronize(device: str) -> None:
    """Waits until the device has completed all work."""
    if device == "cuda":
        torch.cuda.synchronize()


def seconds_of(device: str, work: Callable[[], None]) -> float:
    """The seconds of some work, from an idle device to its end, by the device's clock if it has
    one."""
    synchronize(device)
    if device != "cuda":
        start = time.perf_counter()
        work()
        return time.perf_counter() - start
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3
