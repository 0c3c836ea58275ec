"""What comes before the first step: importing graphopt and capturing."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from statistics import median

import torch
from rich.console import Console
from spread import Figures, Row, show_spread, spread
from step_models import GPT_ALPHABET, GPT_LENGTH, gpt, train_step
from torch import Tensor, nn
from torch.optim import Optimizer

import graphopt

IMPORT_RUNS = 7
# graphopt imports its parts when they are first asked for; every program asks for `compile`.
IMPORTS = {
    "torch": "import torch",
    "torch and graphopt": "import torch, graphopt; graphopt.compile",
}


def measure_captures(layers: int, console: Console) -> tuple[Figures, list[Row]]:
    """Capture time and graph size of a character GPT and of GPT-2 small."""
    figures: Figures = {}
    with console.status(f"capturing a GPT of {layers} layers"):
        numbers = torch.randint(GPT_ALPHABET, (8, GPT_LENGTH))
        figures[f"GPT, {layers} layers"] = capture_figures(
            train_step, gpt(layers), (numbers, numbers)
        )
    try:
        from transformers import GPT2Config, GPT2LMHeadModel
    except ImportError:
        console.print("GPT-2 small left out: pip install transformers")
    else:
        with console.status("capturing GPT-2 small"):
            model = GPT2LMHeadModel(GPT2Config()).train()
            numbers = torch.randint(50257, (1, 64))
            figures["GPT-2 small"] = capture_figures(language_step, model, (numbers,))
    rows = [
        (f"{name}, {kind}", f"{found['seconds']:.2f} s, {found['nodes']} nodes")
        for name, kinds in figures.items()
        for kind, found in kinds.items()
    ]
    return figures, rows


def language_step(model: nn.Module, optimizer: Optimizer, numbers: Tensor) -> Tensor:
    """A step of a Hugging Face language model."""
    loss: Tensor = model(input_ids=numbers, labels=numbers).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def capture_figures(
    step: Callable[..., Tensor], model: nn.Module, inputs: tuple[Tensor, ...]
) -> Figures:
    """The first step, which makes the optimizer's state, and the steady one after it."""
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    figures = {"first step": one_capture(step, model, optimizer, inputs)}
    step(model, optimizer, *inputs)
    figures["steady step"] = one_capture(step, model, optimizer, inputs)
    return figures


def one_capture(
    step: Callable[..., Tensor], model: nn.Module, optimizer: Optimizer, inputs: tuple[Tensor, ...]
) -> Figures:
    """Seconds and nodes of one call of `graphopt.capture`."""
    start = time.perf_counter()
    captured = graphopt.capture(step, model, optimizer, *inputs)
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "nodes": len(captured.graph_module.graph.nodes)}


def measure_imports(console: Console) -> tuple[Figures, list[Row]]:
    """Seconds that graphopt adds to `import torch`, each in fresh interpreters."""
    seconds: dict[str, list[float]] = {name: [] for name in IMPORTS}
    for number in range(-1, IMPORT_RUNS):  # the first pair only fills the file cache
        for name in list(IMPORTS)[:: 1 if number % 2 == 0 else -1]:
            with console.status(f"import {name}"):
                found = import_seconds(IMPORTS[name])
            if number >= 0:
                seconds[name].append(found)
    added = [both - torch for torch, both in zip(*seconds.values(), strict=True)]
    figures = {"seconds": seconds, "added": spread(added)}
    rows = [(f"import {name} (median)", f"{median(seconds[name]):.3f} s") for name in IMPORTS]
    return figures, [*rows, ("added, paired", show_spread(figures["added"], IMPORT_RUNS, " s"))]


def import_seconds(statement: str) -> float:
    """Of one statement in a fresh interpreter, without the interpreter's own start."""
    code = f"import time; s = time.perf_counter(); {statement}; print(time.perf_counter() - s)"
    return float(subprocess.check_output([sys.executable, "-c", code], text=True))
