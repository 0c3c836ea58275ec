"""CPU seconds of the first call by stage, and of `make_fx` alone on the same step as the floor.

    python benchmarks/capture_time.py
    python benchmarks/capture_time.py --layers 12 64 --json capture.json

What the figures mean and how they are taken: benchmarks/README.md.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import figures
import torch
from figures import Figures, seconds_of, table
from functorch import make_fx
from step_models import train_step
from torch import Tensor, nn

import graphopt
from graphopt.demo.model import CharGPT, GPTSize
from graphopt.stages import stages_for

ALPHABET, LENGTH, WIDTH = 32, 8, 16


def arguments(layers: int) -> tuple[Any, ...]:
    """A GPT of narrow layers, its fused AdamW and a batch."""
    size = GPTSize(ALPHABET, length=LENGTH, width=WIDTH, heads=2, layers=layers)
    model = CharGPT(size)
    numbers = torch.randint(ALPHABET, (2, LENGTH + 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    return model, optimizer, numbers[:, :-1], numbers[:, 1:]


def floor(layers: int) -> Callable[[], Any]:
    """A trace of the step by plain `make_fx` on fake tensors, which gives no trainable graph."""
    model, stepped, inputs, targets = arguments(layers)
    names = [name for name, _ in model.named_parameters()]

    def step(values: list[Tensor], inputs: Tensor, targets: Tensor) -> list[Tensor]:
        leaves = [value.detach().requires_grad_() for value in values]
        given = dict(zip(names, leaves, strict=True))
        logits = torch.func.functional_call(model, given, (inputs,), tie_weights=True)
        loss = nn.functional.cross_entropy(logits.flatten(0, -2), targets.flatten())
        gradients = torch.autograd.grad(loss, leaves)
        torch._fused_adamw_(
            *(leaves, list(gradients), [x * 0 for x in leaves], [x * 0 for x in leaves]),
            *([], [torch.ones(()) for _ in leaves]),
            lr=1e-3,
            beta1=0.9,
            beta2=0.99,
            weight_decay=0.01,
            eps=1e-8,
            amsgrad=False,
            maximize=False,
        )
        return leaves

    values = [parameter.detach() for parameter in stepped.param_groups[0]["params"]]
    return lambda: make_fx(step, tracing_mode="fake")(values, inputs, targets)


def measure(layers: int) -> Figures:
    """Measures the CPU seconds of each stage of a step's first call."""
    given, stages = arguments(layers), stages_for()
    alone, _ = seconds_of(floor(layers))
    capture, captured = seconds_of(lambda: graphopt.capture(train_step, *given))
    nodes = len(captured.graph_module.graph.nodes)
    row = {"layers": layers, "nodes": nodes, "floor": alone, "capture": capture}
    row["a thousand"] = 1e3 * capture / nodes
    row["passes"], step = seconds_of(lambda: stages.apply_passes(captured))
    row["derive"], _ = seconds_of(lambda: stages.derive(step))
    row["executable"], _ = seconds_of(lambda: stages.make_executable(step))
    return row


def main() -> None:
    """Runs the measurements that the command line asks for and prints them."""
    parser = figures.parser(__doc__)
    parser.add_argument("--layers", type=int, nargs="+", default=[6, 36, 200, 400])
    options = parser.parse_args()
    torch.set_num_threads(1)
    measure(1)  # imports, and what is kept
    figures.tabulate(options, [[measure(layers) for layers in options.layers]], table)


if __name__ == "__main__":
    main()
