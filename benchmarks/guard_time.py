"""Benchmark of the guard check: the time of a captured step's call before its graph runs.

    python benchmarks/guard_time.py
    python benchmarks/guard_time.py --parameters 150 1000 --values 0 300 --json guards.json

What the figures mean and how they are taken: benchmarks/README.md.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import product
from statistics import median
from types import SimpleNamespace
from typing import Any

import figures
import torch
from figures import Figures, spread, spread_text
from rich.table import Table
from torch import Tensor, nn
from torch.optim import Optimizer

import graphopt

WARM_UP_CALLS = 5


class TimedStep(graphopt.TrainStep):
    """Records the seconds of each call until the captured graph takes over: wall clock and CPU."""

    def __init__(self, step: Callable[..., Any]) -> None:
        super().__init__(step)
        self.seconds: list[float] = []
        self.cpu_seconds: list[float] = []
        self._run_graph = self._calls.run_graph
        vars(self._calls)["run_graph"] = self._noted

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._began = time.perf_counter(), time.process_time()
        return super().__call__(*args, **kwargs)

    def _noted(self, *args: Any) -> Any:
        wall, cpu = self._began
        self.cpu_seconds.append(time.process_time() - cpu)
        self.seconds.append(time.perf_counter() - wall)
        return self._run_graph(*args)


def tiny(parameters: int) -> nn.Module:
    """A model of many tiny layers, each with weight and bias."""
    return nn.Sequential(*(nn.Linear(2, 2) for _ in range(parameters // 2)))


def step_reading(values: int) -> Callable[..., Tensor]:
    """Makes a step that reads that many dictionary items, list items and attributes from
    outside."""
    third = values // 3
    items = {f"item {index}": 1.0 for index in range(third)}
    entries = [1.0] * third
    objects = [SimpleNamespace(weight=1.0) for _ in range(values - 2 * third)]

    def step(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
        scale = 1.0
        for index in range(third):
            scale *= items[f"item {index}"] * entries[index]
        for owner in objects:
            scale *= owner.weight
        loss: Tensor = model(x).square().mean() * scale
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def measure(parameters: int, values: int, calls: int) -> Figures:
    """Measures the milliseconds of each call after the first ones."""
    model = tiny(parameters)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    step = TimedStep(step_reading(values))
    for _ in range(WARM_UP_CALLS + calls):
        step(model, optimizer, torch.ones(1, 2))
    step.flush()
    milliseconds = [1e3 * seconds for seconds in step.seconds[WARM_UP_CALLS:]]
    return {
        "parameters": parameters,
        "values": values,
        "captures": len(step.captures),
        "milliseconds": milliseconds,
        "cpu_milliseconds": [1e3 * seconds for seconds in step.cpu_seconds[WARM_UP_CALLS:]],
        "spread": spread(milliseconds),
    }


def table(found: list[Figures]) -> Table:
    """The table of all steps."""
    columns = ("parameters", "values", "captures")
    return figures.table(
        [
            {column: row[column] for column in columns}
            | {
                "ms a call": spread_text(row["spread"]),
                "ms of CPU": median(row["cpu_milliseconds"]),
            }
            for row in found
        ]
    )


def main() -> None:
    """Runs the measurements that the command line asks for and prints them."""
    parser = figures.parser(__doc__)
    parser.add_argument("--parameters", type=int, nargs="+", default=[150, 1000])
    parser.add_argument("--values", type=int, nargs="+", default=[0, 300])
    parser.add_argument("--calls", type=int, default=200)
    options = parser.parse_args()
    steps = product(options.parameters, options.values)
    figures.tabulate(options, [[measure(*step, options.calls) for step in steps]], table)


if __name__ == "__main__":
    main()
