"""Tiny Hugging Face models with random weights, divided and trained."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import pipelining as torch_pipelining

import gloo
from graphopt.pipelining import (
    MultiUseParameterConfig,
    Pipe,
    SplitPoint,
    balanced,
    pipeline,
    reduce_replicated_gradients,
)

transformers = pytest.importorskip("transformers", reason="needs the extra 'bench'")

pytestmark = pytest.mark.hf

VOCABULARY = 48
MICROBATCHES = 3
BEGINNING, END = SplitPoint.BEGINNING, SplitPoint.END


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=16,
        n_embd=16,
        n_layer=3,
        n_head=2,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    return transformers.GPT2LMHeadModel(config)


def bert() -> nn.Module:
    config = transformers.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        num_hidden_layers=3,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=16,
    )
    return transformers.BertForMaskedLM(config)


MODELS: dict[str, tuple[Callable[[], nn.Module], dict[str, SplitPoint]]] = {
    "gpt2": (gpt2, {"transformer.h.1": END, "lm_head": BEGINNING}),
    "bert": (bert, {"bert.encoder.layer.1": BEGINNING, "cls": BEGINNING}),
}


def batch(microbatches: int = 1) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(VOCABULARY, (2 * microbatches, 8), generator=generator)
    mask = torch.ones_like(ids)
    mask[:, 6:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids}


@pytest.mark.parametrize("sharing", MultiUseParameterConfig)
@pytest.mark.parametrize("name", list(MODELS))
def test_a_divided_model_is_the_model(name: str, sharing: MultiUseParameterConfig) -> None:
    make, points = MODELS[name]
    model = make()
    reference = copy.deepcopy(model)
    inputs = batch()
    pipe = pipeline(model, (), inputs, split_spec=points, multi_use_param_spec=sharing)
    assert pipe.num_stages == 3
    torch.manual_seed(1)
    output = pipe(**inputs)
    torch.manual_seed(1)
    expected = reference(**inputs)
    assert type(output) is type(expected)
    assert torch.equal(output.loss, expected.loss)
    assert torch.equal(output.logits, expected.logits)
    expected.loss.backward()
    for key, parameter in reference.named_parameters():
        torch.testing.assert_close(model.get_parameter(key).grad, parameter.grad)
    names = {key for i in range(3) for key in pipe.get_stage_module(i).state_dict()}
    assert names == set(model.state_dict())


def test_a_balanced_division() -> None:
    model = gpt2().eval()
    pipe = pipeline(model, (), batch(), split_policy=balanced(3))
    assert torch.equal(pipe(**batch()).logits, model(**batch()).logits)


# ---------------------------------------------------------------------------- on two ranks


def divided(name: str) -> tuple[nn.Module, Pipe]:
    torch.manual_seed(0)
    model = MODELS[name][0]().eval()
    return model, pipeline(model, (), batch(), split_policy=balanced(2))


def train_rank(rank: int, name: str) -> dict[str, Any]:
    _, pipe = divided(name)
    stage = pipe.build_stage(rank, "cpu")
    schedule = torch_pipelining.Schedule1F1B(stage, MICROBATCHES, loss_fn=pipe.loss_fn)
    inputs = batch(MICROBATCHES)
    if rank == 0:
        schedule.step(**inputs)
    else:
        schedule.step(target=inputs["labels"])
    reduce_replicated_gradients(stage)
    named = stage.submod.named_parameters(remove_duplicate=False)
    return {key: parameter.grad for key, parameter in named}


@pytest.mark.parametrize("name", list(MODELS))
def test_two_ranks_have_the_gradients_of_one_process(two_ranks: gloo.Pool, name: str) -> None:
    results = two_ranks.run(train_rank, name)
    reference, _ = divided(name)
    for index in range(MICROBATCHES):
        rows = slice(2 * index, 2 * index + 2)
        inputs = {key: value[rows] for key, value in batch(MICROBATCHES).items()}
        (reference(**inputs).loss / MICROBATCHES).backward()
    expected = dict(reference.named_parameters(remove_duplicate=False))
    assert {key for result in results for key in result} == set(expected)
    for result in results:
        for key, gradient in result.items():
            torch.testing.assert_close(gradient, expected[key].grad)
