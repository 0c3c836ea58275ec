"""CPU seconds of the first call by stage, and of `make_fx` alone on the same step as the floor.

    python benchmarks/capture_time.py
    python benchmarks/capture_time.py --layers 12 64 --json capture.json

What the figures mean and how they are taken: benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from functorch import make_fx
from rich.console import Console
from rich.table import Table
from step_models import train_step
from torch import Tensor, nn

import graphopt
from graphopt.demo.model import CharGPT, GPTSize
from graphopt.stages import stages_for
from graphopt.tracing.call import Call

ALPHABET, LENGTH, WIDTH = 32, 8, 16

OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
    "foreach": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, foreach=True),
    "fused": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, fused=True),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
}


def seconds_of(work: Callable[[], Any]) -> tuple[float, Any]:
    """Runs `work`; returns the process's CPU seconds and the result."""
    began = time.process_time()
    result = work()
    return time.process_time() - began, result


def arguments(layers: int, optimizer: str) -> tuple[Any, ...]:
    """A GPT of narrow layers, its optimizer and a batch."""
    size = GPTSize(ALPHABET, length=LENGTH, width=WIDTH, heads=2, layers=layers)
    model = CharGPT(size)
    numbers = torch.randint(ALPHABET, (2, LENGTH + 1))
    parameters = list(model.parameters())
    return model, OPTIMIZERS[optimizer](parameters), numbers[:, :-1], numbers[:, 1:]


def floor(layers: int, optimizer: str) -> Callable[[], int]:
    """Traces the step with plain `make_fx` on fake tensors, which gives no trainable graph;
    returns the number of nodes."""
    model, stepped, inputs, targets = arguments(layers, optimizer)
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


def measure(layers: int, optimizer: str, *, with_floor: bool) -> dict[str, Any]:
    """Measures the CPU seconds of each stage of a step's first call."""
    row: dict[str, Any] = {"layers": layers, "optimizer": optimizer}
    if with_floor:
        row["floor"], row["floor_nodes"] = seconds_of(floor(layers, optimizer))
    given = arguments(layers, optimizer)
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


def parse() -> argparse.Namespace:
    """Parses the command line options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, nargs="+", default=[6, 36, 200, 400])
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="fused")
    parser.add_argument("--no-floor", action="store_true", help="leave `make_fx` alone out")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every measurement there")
    return parser.parse_args()


def main() -> None:
    """Runs the measurements that the command line asks for and prints them."""
    options = parse()
    torch.set_num_threads(1)
    measure(1, options.optimizer, with_floor=not options.no_floor)  # imports, and what is kept
    columns = ("layers", "nodes", "floor", "capture", "a_thousand", "passes", "derive")
    table = Table(*columns, "executable")
    found = []
    for layers in options.layers:
        row = measure(layers, options.optimizer, with_floor=not options.no_floor)
        found.append(row)
        cells = (row.get(column, "") for column in (*columns, "executable"))
        table.add_row(*(f"{x:.2f}" if isinstance(x, float) else str(x) for x in cells))
        print(row, flush=True)
    Console().print(table)
    if options.json:
        options.json.write_text(json.dumps({"torch": torch.__version__, "rows": found}, indent=2))


if __name__ == "__main__":
    main()
