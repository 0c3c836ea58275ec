"""A training step of GPT-2 in bfloat16, to measure on one device:

graphopt estimate benchmarks/gpt2_step.py:train_step --measure
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

WORDS = 50257


def train_step(model: nn.Module, optimizer: Optimizer, tokens: Tensor) -> Tensor:
    """A step on the loss of each next token, under autocast."""
    with torch.autocast(tokens.device.type, torch.bfloat16):
        loss: Tensor = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def make() -> tuple[tuple[Any, ...], list[Tensor]]:
    """GPT-2 with 124 million parameters and fused AdamW, and batches: eight sequences of 1,024
    tokens on a GPU, one of 128 on the CPU."""
    from transformers import GPT2Config, GPT2LMHeadModel

    cuda = torch.cuda.is_available()
    device, shape = ("cuda", (8, 1024)) if cuda else ("cpu", (1, 128))
    rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    config = GPT2Config(use_cache=False, attn_implementation="sdpa", **rates)
    model = GPT2LMHeadModel(config).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    return (model, optimizer), [torch.randint(WORDS, shape, device=device) for _ in range(4)]
