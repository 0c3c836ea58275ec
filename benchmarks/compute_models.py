"""What `compute.py` trains: five models sized for two cores, their batches and their losses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from step_models import MODELS, batch
from torch import Tensor, nn
from torch.nn import functional as F

Batch = tuple[Tensor, ...]
Loss = Callable[..., Tensor]
VOCABULARY, LENGTH = 2048, 64


@dataclass(frozen=True)
class Workload:
    """A model in training.

    Attributes:
        sizes: of the model and its batches, for readers.
        build: makes the model, in training mode.
        batch: random data for one step.
        loss: of a model and a batch.
    """

    sizes: str
    build: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], Batch]
    loss: Loss


def classification(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy of logits against classes."""
    return F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())


def next_token(model: nn.Module, numbers: Tensor) -> Tensor:
    """A Hugging Face language model computes its own loss."""
    loss: Tensor = model(input_ids=numbers, labels=numbers).loss
    return loss


def gpt2() -> nn.Module:
    """GPT-2 small (width 768, 12 heads, dropout) with fewer layers, tokens and positions."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=2,
        vocab_size=VOCABULARY,
        n_positions=LENGTH,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    model = GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"  # or it logs what it takes, which torch.compile cannot trace
    return model.train()


def llama() -> nn.Module:
    """Rotary positions, RMSNorm, SwiGLU, grouped-query attention; no dropout."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
        max_position_embeddings=LENGTH,
        use_cache=False,
    )
    return LlamaForCausalLM(config).train()


def _of_step_models(name: str, sizes: str) -> Workload:
    return Workload(sizes, MODELS[name], lambda generator: batch(name, generator), classification)


def _of_hugging_face(build: Callable[[], nn.Module], sequences: int, sizes: str) -> Workload:
    def numbers(generator: torch.Generator) -> Batch:
        return (torch.randint(VOCABULARY, (sequences, LENGTH), generator=generator),)

    data = f"vocabulary {VOCABULARY}, batch {sequences} x {LENGTH}"
    return Workload(f"{sizes}, {data}", build, numbers, next_token)


WORKLOADS: dict[str, Workload] = {
    "mlp": _of_step_models("mlp", "8 layers of width 512, GELU, batch 256"),
    "gpt": _of_step_models("gpt", "4 layers of width 256, dropout, vocabulary 100, batch 8 x 64"),
    "convnet": _of_step_models(
        "convnet", "4 convolutions of 32 to 256 channels, BatchNorm, batch 32 x 3 x 32 x 32"
    ),
    "gpt2": _of_hugging_face(gpt2, 2, "Hugging Face GPT-2: 2 layers of width 768, dropout"),
    "llama": _of_hugging_face(llama, 8, "Hugging Face Llama: 2 layers of width 256"),
}
HUGGING_FACE = ("gpt2", "llama")

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "fused": {"fused": True},
    "foreach": {"foreach": True},
    "loop": {"foreach": False, "fused": False},
}
"""Implementations of AdamW."""


def has_dropout(model: nn.Module) -> bool:
    """Whether a model draws random numbers in training."""
    return any(isinstance(module, nn.Dropout) and module.p > 0 for module in model.modules())


def without_dropout(model: nn.Module) -> nn.Module:
    """The model, whose dropout does nothing from now on."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model
