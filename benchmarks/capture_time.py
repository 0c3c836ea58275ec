"""CPU seconds of the first call by stage, and of `make_fx` alone on the same step as the floor.

    python benchmarks/capture_time.py
    python benchmarks/capture_time.py --layers 12 64 --json capture.json

What the figures mean and how they are taken: benchmarks/README.md.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import ranks
import torch
from functorch import make_fx
from rich.table import Table
from step_models import train_step
from torch import Tensor, nn

import graphopt
from graphopt.demo.model import CharGPT, GPTSize
from graphopt.stages import stages_for
from graphopt.tracing.call import Call

ALPHABET, LENGTH, WIDTH = 32, 8, 16
COLUMNS = ("layers", "nodes", "floor", "capture", "a_thousand", "passes", "derive", "executable")


def seconds_of(work: Callable[[], Any]) -> tuple[float, Any]:
    """Runs `work`; returns the process's CPU seconds and the result."""
    began = time.process_time()
    result = work()
    return time.process_time() - began, result


def arguments(layers: int) -> tuple[Any, ...]:
    """A GPT of narrow layers, its fused AdamW and a batch."""
    size = GPTSize(ALPHABET, length=LENGTH, width=WIDTH, heads=2, layers=layers)
    model = CharGPT(size)
    numbers = torch.randint(ALPHABET, (2, LENGTH + 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    return model, optimizer, numbers[:, :-1], numbers[:, 1:]


def floor(layers: int) -> Callable[[], int]:
    """Traces the step with plain `make_fx` on fake tensors, which gives no trainable graph;
    returns the number of nodes."""
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

    def trace() -> int:
        values = [parameter.detach() for parameter in stepped.param_groups[0]["params"]]
        traced = make_fx(step, tracing_mode="fake")(values, inputs, targets)
        return len(traced.graph.nodes)

    return trace


def measure(layers: int) -> dict[str, Any]:
    """Measures the CPU seconds of each stage of a step's first call."""
    row: dict[str, Any] = {"layers": layers}
    row["floor"], row["floor_nodes"] = seconds_of(floor(layers))
    given = arguments(layers)
    stages = stages_for()
    row["capture"], captured = seconds_of(lambda: graphopt.capture(train_step, *given))
    row["nodes"] = len(captured.graph_module.graph.nodes)
    call = Call(train_step, given, {}).using(captured.besides)
    assert call is not None
    row["passes"], step = seconds_of(lambda: stages.apply_passes(captured))
    row["derive"], _ = seconds_of(lambda: stages.derive(step))
    row["executable"], _ = seconds_of(lambda: stages.make_executable(step))
    row["a_thousand"] = 1e3 * row["capture"] / row["nodes"]
    return row


def table(found: dict[str, Any]) -> Table:
    """The table of all numbers of layers."""
    made = Table(*COLUMNS)
    for row in found["by layers"]:
        cells = (row[column] for column in COLUMNS)
        made.add_row(*(f"{x:.2f}" if isinstance(x, float) else str(x) for x in cells))
    return made


def main() -> None:
    """Runs the measurements that the command line asks for and prints them."""
    parser = ranks.parser(__doc__)
    parser.add_argument("--layers", type=int, nargs="+", default=[6, 36, 200, 400])
    options = parser.parse_args()
    torch.set_num_threads(1)
    measure(1)  # imports, and what is kept
    ranks.tabulate(options, [{"by layers": [measure(n) for n in options.layers]}], table)


if __name__ == "__main__":
    main()
