"""Tiny Hugging Face models with random weights: a captured step against the eager one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from graphopt.tracing.effects import decisions
from twins import Twins, World

transformers = pytest.importorskip("transformers", reason="needs the extra 'bench'")

pytestmark = pytest.mark.hf

STEPS = 4
VOCABULARY = 48
TEXT = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 1}
HEADS = {"num_attention_heads": 2, "intermediate_size": 32}


def gpt2() -> nn.Module:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=VOCABULARY, n_positions=16, n_embd=16, n_layer=1, n_head=2
        )
    )


def llama() -> nn.Module:
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**TEXT, **HEADS, num_key_value_heads=1, max_position_embeddings=16)
    )


def llama_with_checkpointing() -> nn.Module:
    model = llama()
    # Renamed in the course of transformers 5.
    new, old = "activation_checkpointing_enable", "gradient_checkpointing_enable"
    getattr(model, new if new in dir(model) else old)()
    return model


def bert() -> nn.Module:
    return transformers.BertForMaskedLM(
        transformers.BertConfig(**TEXT, **HEADS, max_position_embeddings=16)
    )


def t5() -> nn.Module:
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            vocab_size=VOCABULARY,
            d_model=16,
            d_kv=8,
            d_ff=32,
            num_layers=1,
            num_heads=2,
            decoder_start_token_id=0,
        )
    )


def vit() -> nn.Module:
    return transformers.ViTForImageClassification(
        transformers.ViTConfig(
            hidden_size=16, num_hidden_layers=1, **HEADS, image_size=16, patch_size=4, num_labels=4
        )
    )


def text_batch(i: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(i)
    tokens = torch.randint(1, VOCABULARY, (3, 12), generator=generator)
    mask = torch.ones_like(tokens)
    mask[1, 8:] = 0
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens.clone()}


def text_without_padding(i: int) -> dict[str, Tensor]:
    batch = text_batch(i)
    return {**batch, "attention_mask": torch.ones_like(batch["attention_mask"])}


def image_batch(i: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(i)
    return {
        "pixel_values": torch.randn(3, 3, 16, 16, generator=generator),
        "labels": torch.randint(4, (3,), generator=generator),
    }


def train_step(model: nn.Module, optimizer: Optimizer, batch: dict[str, Tensor]) -> Tensor:
    loss = model(**batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def model_output_step(model: nn.Module, optimizer: Optimizer, batch: dict[str, Tensor]) -> Any:
    output = model(**batch)
    output.loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return output


def build(make: Callable[[], nn.Module], step: Callable[..., Any] = train_step) -> World:
    model = make().train()
    return World(step, [model], [torch.optim.AdamW(model.parameters(), lr=1e-3)])


@pytest.mark.parametrize(
    ("make", "batch"),
    [
        (gpt2, text_batch),
        (llama, text_batch),
        (llama_with_checkpointing, text_batch),
        (bert, text_batch),
        (t5, text_batch),
        (llama, text_without_padding),
        (llama_with_checkpointing, text_without_padding),
        (bert, text_without_padding),
    ],
    ids=lambda function: function.__name__.removeprefix("text_"),
)
def test_huggingface_model(
    make: Callable[[], nn.Module], batch: Callable[[int], dict[str, Tensor]]
) -> None:
    twins = Twins(lambda: build(make))
    for i in range(STEPS):
        twins.step(batch(i))
    twins.finish(captures=1)


def test_padding_is_a_decision() -> None:
    """Without padding, attention is left to the kernel, which repeats keys in a way of its own."""
    twins = Twins(lambda: build(llama))
    for i in range(2 * STEPS):
        twins.step(text_batch(i) if i % 3 == 1 else text_without_padding(i))
    twins.finish(captures=2)


def test_a_step_whose_decisions_cannot_be_followed(
    caplog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are more than a graph may have: the model finds out that it is traced, and computes up
    to rounding."""
    monkeypatch.setattr(decisions, "LIMIT", 1)

    def deciding(model: nn.Module, optimizer: Optimizer, batch: dict[str, Tensor]) -> Tensor:
        if batch["input_ids"].min() < 0:
            raise ValueError("no such token")
        return train_step(model, optimizer, batch)

    twins = Twins(lambda: build(llama, deciding), exact=False)
    with caplog.at_level("WARNING", logger="graphopt"):
        for i in range(STEPS):
            twins.step(text_without_padding(i))
    twins.finish(captures=1)
    assert twins.largest_gap < 1e-6
    assert "compute as they do when they are traced" in caplog.text


def test_model_output_as_return_value() -> None:
    """The output of a Hugging Face model is a pytree of its own kind, and stays one."""
    twins = Twins(lambda: build(vit, model_output_step))
    for i in range(3):
        output = twins.step(image_batch(i))
    twins.finish(captures=2)  # the first call puts `problem_type` into the configuration
    assert torch.equal(output.loss, output["loss"])
