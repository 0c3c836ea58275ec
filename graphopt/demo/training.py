"""The training that the demo measures on each of its ranks, over links of several speeds."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from graphopt.demo.model import CharGPT, GPTSize
from graphopt.estimate.measure import COMPUTE, MeasuredVariants, compared, prepared, take_turns
from graphopt.estimate.pacing import pace_connections
from graphopt.estimate.target import StepCalls

ALPHABET, BATCH = 97, 16
BUCKETS_MB = (25.0, 1.0, 0.5)
"""DistributedDataParallel's default bucket size, and smaller ones."""
GRAPHOPT = "graphopt"
_TIMEOUT = timedelta(minutes=5)


@dataclass(frozen=True)
class DemoTask:
    """The task of all ranks of the demo.

    Attributes:
        turn: steps of one variant before the next one's turn: steps of graphopt overlap.
        rounds: turns of each variant on each link.
        links: the time that all gradients take on a link, as a multiple of the compute of a step;
            0 is the machine's own loopback.
        threads: for each rank.
    """

    ranks: int
    turn: int
    rounds: int
    links: tuple[float, ...]
    pipeline: str
    seed: int
    threads: int


@dataclass(frozen=True)
class DemoResults:
    """The results of the demo, for the slowest or most different rank; by variant.

    Attributes:
        seconds: of a step, one for each turn, by link.
        losses: the loss of rank 0 after the last step.
        differences: of all state, to DistributedDataParallel with its default bucket size.
    """

    seconds: dict[float, dict[str, list[float]]]
    first_call: dict[str, float]
    peak_bytes: dict[str, int]
    losses: dict[str, float]
    differences: dict[str, float]


def train_step(model: nn.Module, optimizer: Optimizer, inputs: Tensor, targets: Tensor) -> Tensor:
    """The training step in plain PyTorch, the same for all variants."""
    loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def batches(seed: int, rank: int) -> Iterator[tuple[Tensor, Tensor]]:
    """An endless iterator over a rank's inputs and next-token targets, both int64 of shape (batch,
    length): each sequence counts up by its own stride."""
    generator = torch.Generator().manual_seed(seed * 1000 + rank)
    while True:
        start, stride = torch.randint(ALPHABET, (2, BATCH, 1), generator=generator)
        sequence = (start + stride * torch.arange(GPTSize.length + 1)) % ALPHABET
        yield sequence[:, :-1].contiguous(), sequence[:, 1:].contiguous()


def train_rank(rank: int, task: DemoTask, folder: str, events: SimpleQueue[Any]) -> None:
    """Runs one rank; rank 0 sends texts about its progress, then the `DemoResults`.

    Args:
        folder: an empty one, for the rendezvous.
    """
    torch.set_num_threads(task.threads)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", _loopback())
    store = dist.FileStore(str(Path(folder) / "rendezvous"), task.ranks)
    options: dict[str, Any] = {"rank": rank, "world_size": task.ranks, "timeout": _TIMEOUT}
    dist.init_process_group("gloo", store=store, **options)
    results = _measured(task, rank, events)
    if rank == 0:
        events.put(results)
    dist.barrier()
    dist.destroy_process_group()


def _measured(task: DemoTask, rank: int, events: SimpleQueue[Any]) -> DemoResults:
    def say(text: str) -> None:
        if rank == 0:
            events.put(text)

    torch.manual_seed(task.seed)
    model = CharGPT(GPTSize(ALPHABET))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), fused=True)
    drawn = batches(task.seed, rank)
    given = tuple(next(drawn) for _ in range(64))
    calls = StepCalls(train_step, (model, optimizer), given)
    torch.manual_seed(1 + task.seed * 1000 + rank)  # each rank has a dropout of its own
    say("first steps: capturing the training step as a graph")
    pipelines = {GRAPHOPT: task.pipeline}
    made = prepared(calls, buckets_mb=BUCKETS_MB, pipelines=pipelines, inductor=False)
    sent = sum(p.nbytes for p in model.parameters()) * 2 * (task.ranks - 1) / task.ranks
    take_turns(made, calls, task.turn, 0)  # says how long the first link's compute takes
    seconds = {}
    for link in task.links:
        say(f"training in turns: {link_text(link)}")
        for number in range(task.rounds):
            if link:
                pace_connections(sent / (link * median(made[COMPUTE].seconds[-3:])))
            take_turns(made, calls, task.turn, number)
        seconds[link] = {name: made[name].seconds[-task.rounds :] for name in made}
    pace_connections(None)
    return _results(compared(made), seconds)


def _results(found: MeasuredVariants, seconds: dict[float, dict[str, list[float]]]) -> DemoResults:
    variants = found.variants
    return DemoResults(
        seconds,
        {name: variant.first_call for name, variant in variants.items()},
        {name: variant.peak_bytes for name, variant in variants.items()},
        {n: v.result.item() for n, v in variants.items() if v.result is not None},
        found.differences,
    )


def link_text(link: float) -> str:
    """The name of a link for tables."""
    return "loopback" if not link else f"link {link:g} x compute"


def _loopback() -> str:
    """The loopback interface; gloo would look up the host's name, which may not resolve."""
    return next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
