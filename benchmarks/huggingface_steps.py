"""Benchmark of tiny Hugging Face models: a captured step beside the eager one.

    python benchmarks/huggingface_steps.py
    python benchmarks/huggingface_steps.py --models phi3 opt --calls 50 --json steps.json

What the figures mean and how they are taken: benchmarks/README.md.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import figures
import torch
import transformers
from figures import Figures
from guard_time import WARM_UP_CALLS, TimedStep
from rich.table import Table
from torch import Tensor, nn
from torch.optim import Optimizer

VOCABULARY = 128
LENGTH = 32
TEXT = {"vocab_size": VOCABULARY, "hidden_size": 64, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "intermediate_size": 128}
GROUPED = {**TEXT, **HEADS, "num_key_value_heads": 2}
OPT = {"num_attention_heads": 4, "ffn_dim": 128, "word_embed_proj_dim": 64}
IMAGES = {"hidden_size": 64, "num_hidden_layers": 2, "image_size": 32, "patch_size": 8}
DECODER = {"hidden_size": 64, "num_hidden_layers": 1}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "phi3": ("Phi3ForCausalLM", {**TEXT, **HEADS, "pad_token_id": 0}),
    "gpt_neox": ("GPTNeoXForCausalLM", {**TEXT, **HEADS}),
    "opt": ("OPTForCausalLM", {**TEXT, **OPT}),
    "qwen2": ("Qwen2ForCausalLM", GROUPED),
    "qwen3": ("Qwen3ForCausalLM", {**GROUPED, "head_dim": 16}),
    "electra": ("ElectraForMaskedLM", {**TEXT, **HEADS, "embedding_size": 32}),
    "vit_mae": (
        "ViTMAEForPreTraining",
        {**IMAGES, **HEADS} | {f"decoder_{name}": size for name, size in (DECODER | HEADS).items()},
    ),
    "llama": ("LlamaForCausalLM", GROUPED),
    "bert": ("BertForMaskedLM", {**TEXT, **HEADS}),
    "gpt2": (
        "GPT2LMHeadModel",
        {"vocab_size": VOCABULARY, "n_embd": 64, "n_layer": 2, "n_head": 4},
    ),
}


def model_of(name: str) -> nn.Module:
    """Makes a model of two layers with the same random weights in each call."""
    torch.manual_seed(0)
    kind, settings = MODELS[name]
    made = getattr(transformers, kind)
    model: nn.Module = made(made.config_class(**settings))
    return model.train()


def batch_of(name: str) -> dict[str, Tensor]:
    """Makes a batch of images or of texts."""
    if name == "vit_mae":
        return {"pixel_values": torch.randn(4, 3, 32, 32)}
    tokens = torch.randint(1, VOCABULARY, (4, LENGTH))
    return {"input_ids": tokens, "labels": tokens.clone()}


def train_step(model: nn.Module, optimizer: Optimizer, batch: dict[str, Tensor]) -> Tensor:
    """The step, in plain PyTorch."""
    loss: Tensor = model(**batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def measure(name: str, calls: int, fused: bool) -> Figures:
    """Measures both steps in turns: CPU milliseconds of each call after the first ones."""
    captured = TimedStep(train_step)
    variants: list[tuple[str, Callable[..., Tensor], nn.Module, Optimizer]] = []
    for label, step in (("eager", train_step), ("captured", captured)):
        model = model_of(name)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused or None)
        variants.append((label, step, model, optimizer))
    milliseconds: dict[str, list[float]] = {"eager": [], "captured": []}
    for _ in range(WARM_UP_CALLS + calls):
        batch = batch_of(name)
        for label, step, model, optimizer in variants:
            began = time.process_time()
            step(model, optimizer, batch)
            milliseconds[label].append(1e3 * (time.process_time() - began))
    captured.flush()
    kept = {label: values[WARM_UP_CALLS:] for label, values in milliseconds.items()}
    return {
        "model": name,
        "parameters": sum(1 for _ in variants[0][2].parameters()),
        "captures": len(captured.captures),
        "milliseconds": kept,
        "guards": [1e3 * seconds for seconds in captured.cpu_seconds[WARM_UP_CALLS:]],
        "ratio": median(kept["captured"]) / median(kept["eager"]),
        "ratio of minima": min(kept["captured"]) / min(kept["eager"]),
    }


def table(found: list[Figures]) -> Table:
    """The table of all models."""
    ratios = [row["ratio"] for row in found]
    return figures.table(
        [
            {column: row[column] for column in ("model", "parameters", "captures")}
            | {f"{label} ms": median(times) for label, times in row["milliseconds"].items()}
            | {"guards ms": median(row["guards"])}
            | {column: row[column] for column in ("ratio", "ratio of minima")}
            for row in found
        ],
        caption=f"ratios: median {median(ratios):.2f}, largest {max(ratios):.2f}",
    )


def main() -> None:
    """Runs the measurements that the command line asks for and prints them."""
    parser = figures.parser(__doc__)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--calls", type=int, default=200)
    parser.add_argument("--fused", action="store_true", help="AdamW(fused=True)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = [measure(name, options.calls, options.fused) for name in options.models]
    figures.tabulate(options, [rows], table)


if __name__ == "__main__":
    main()
