"""Runs `graphopt estimate`."""

from __future__ import annotations

import torch.distributed as dist
from rich.console import Console

from graphopt.commands.errors import reported
from graphopt.estimate.measure import measure, process_group
from graphopt.estimate.predict import captured_for_ranks, compute_costs, network_named, predict
from graphopt.estimate.tables import (
    measurement_advice,
    measurement_table,
    prediction_advice,
    prediction_table,
)
from graphopt.estimate.target import find_step


def run_estimate(target: str, network: str, ranks: list[int]) -> None:
    """Prints the predicted step time for each number of ranks."""
    console = Console()
    with reported("estimate"):
        link = network_named(network)
        calls = find_step(target)
        with Console(stderr=True).status("capturing the step, measuring its operators"):
            gm = captured_for_ranks(calls)
            costs = compute_costs(gm)
            predictions = list(predict(gm, costs, link, ranks))
    console.print(prediction_table(predictions, link.name))
    console.print(prediction_advice(predictions))


def run_measurement(target: str, rounds: int, turn: int, inductor: bool, paced: str | None) -> None:
    """Prints the measured step time, in turns with eager or DistributedDataParallel."""
    console = Console()
    with reported("estimate"), process_group():
        calls = find_step(target)
        rate = None if paced is None else network_named(paced).bytes_per_second
        found = measure(calls, rounds=rounds, turn=turn, inductor=inductor, paced=rate)
        if not dist.is_initialized() or dist.get_rank() == 0:
            console.print(measurement_table(found))
            console.print(measurement_advice(found))
