"""A small GPT in two pipeline stages, trained with 1F1B. Needs no GPU:

torchrun --nproc-per-node 2 examples/pipeline.py

Two such pipelines side by side, each with half of the data, their stages compiled:

torchrun --nproc-per-node 4 examples/pipeline.py --replicas 2
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import Schedule1F1B
from torch.nn import functional as F

from graphopt import DataParallel
from graphopt.pipelining import Pipe, balanced, pipeline, reduce_replicated_gradients

VOCABULARY, WIDTH, CONTEXT = 64, 32, 16
ROWS, MICROBATCHES = 4, 4


class GPT(nn.Module):
    """The token embedding is the head as well: a parameter of the first and the last stage."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
            )
            for _ in range(layers)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT, device=tokens.device)
        x = self.tokens(tokens) + self.positions.weight
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return self.head(x)


def next_token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Counting from random starts: the next token is the last one plus one."""
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(VOCABULARY, (ROWS * MICROBATCHES, 1), generator=generator)
    sequence = (starts + torch.arange(CONTEXT + 1)) % VOCABULARY
    return sequence[:, :-1], sequence[:, 1:]


def make_pipe(stages: int) -> Pipe:
    """The model in stages."""
    torch.manual_seed(0)  # all ranks make the same model, and keep their stage of it
    return pipeline(GPT(), (batch(0)[0][:ROWS],), split_policy=balanced(stages))


def groups(replicas: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """The ranks of this rank's pipeline, and those that hold the same stage."""
    ranks = torch.arange(dist.get_world_size()).view(replicas, -1)
    pipelines, _ = dist.new_subgroups_by_enumeration(ranks.tolist())
    same_stage, _ = dist.new_subgroups_by_enumeration(ranks.T.tolist())
    return pipelines, same_stage


def main(steps: int, replicas: int) -> None:
    dist.init_process_group("gloo")
    stages = dist.get_world_size() // replicas
    replica, rank = divmod(dist.get_rank(), stages)
    along, across = groups(replicas)
    stage = make_pipe(stages).build_stage(rank, "cpu", along)
    if replicas > 1:
        stage.compile(parallel=DataParallel(across))

    optimizer = torch.optim.AdamW(stage.submod.parameters(), lr=3e-3)
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=next_token_loss)
    for step in range(steps):
        tokens, targets = batch(step * replicas + replica)
        losses: list[Tensor] = []
        if stage.is_first:
            schedule.step(tokens)
        elif stage.is_last:
            schedule.step(target=targets, losses=losses)
        else:
            schedule.step()
        reduce_replicated_gradients(stage)
        optimizer.step()
        optimizer.zero_grad()
        if losses and replica == 0 and step % 10 == 0:
            print(f"step {step:3}  loss {torch.stack(losses).mean():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=51)
    parser.add_argument("--replicas", type=int, default=1, help="pipelines side by side")
    options = parser.parse_args()
    main(options.steps, options.replicas)
