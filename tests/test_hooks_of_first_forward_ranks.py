"""Hooks that a model has installed in its first forward, on two ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphopt
from gloo import Pool
from steps import with_hidden_states
from twins import assert_same

pytestmark = pytest.mark.hf


def model_with_hooks() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 48, "hidden_size": 32, "intermediate_size": 48}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, **sizes, **heads)).train()
    with torch.no_grad():
        model(torch.zeros(1, 2, dtype=torch.long), output_hidden_states=True)
    return model


def train(rank: int, pipeline: str | None) -> tuple[list[Any], dict[str, Tensor], list[int]]:
    """Losses, parameters, and how many hooks each module has; DistributedDataParallel for None."""
    model = model_with_hooks()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)  # one capture
    given: nn.Module = model
    step: Any = with_hidden_states
    if pipeline is None:
        given = nn.parallel.DistributedDataParallel(model)
    else:
        step = graphopt.compile(step, pipeline=pipeline)
    losses = []
    for number in range(3):
        generator = torch.Generator().manual_seed(2 * number + rank)
        losses.append(step(given, optimizer, torch.randint(48, (2, 8), generator=generator)))
    hooks = [len(module._forward_hooks) for module in model.modules()]
    return losses, {name: p.detach() for name, p in model.named_parameters()}, hooks


def against_ddp(rank: int) -> tuple[int, int]:
    expected = train(rank, None)
    assert_same(train(rank, "default"), expected, "default")
    return max(expected[2]), expected[0][0][1]


def test_hidden_states(two_ranks: Pool) -> None:
    pytest.importorskip("transformers")
    assert two_ranks.run(against_ddp) == [(1, 3)] * 2
