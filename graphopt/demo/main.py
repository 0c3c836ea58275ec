"""Runs `graphopt demo`: a captured step, a refused pass, and a table of step times."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.markup import escape
from torch.distributed.elastic.multiprocessing import SignalException

import graphopt
from graphopt.demo import DemoError
from graphopt.demo.launch import Event, loopback, run_ranks, threads_per_rank
from graphopt.demo.replica import DEFAULT_DDP, GRAPHOPT, train_step
from graphopt.demo.report import ProgressView, Results, cost_table, difference_text, step_table
from graphopt.demo.showcase import show_graph_and_passes
from graphopt.demo.worker import DemoTask

TURN = 4
"""Steps of one variant before the next one's turn."""
_WORKER = ("-m", "graphopt.demo.worker")


def run_demo(ranks: int, rounds: int, links: str, pipeline: str, seed: int) -> int:
    """Shows a graph and a refused pass, then trains in turns with DDP and graphopt and prints
    tables.

    Args:
        ranks: processes, each a data-parallel rank on this machine.
        rounds: turns of each variant on each link.
        links: numbers separated by commas: the time that all gradients take on a link, as multiples
            of the compute of a step; 0 is the machine's own loopback.
        pipeline: the pipeline of `graphopt.compile`.
        seed: the seed of the weights, the data and the dropout.

    Returns:
        The exit code: 0; 1 when a rank failed or, on at most two ranks, the variants differ;
        2 for a request that cannot be met; 130 after Ctrl-C.
    """
    console, errors = Console(), Console(stderr=True)
    try:
        chosen = _links(links) if ranks > 1 else (0.0,)
        task = DemoTask(TURN, rounds, chosen, pipeline, seed)
        _check(task, ranks)
        show_graph_and_passes(console)
        return _measure(task, ranks, console)
    except DemoError as error:
        errors.print(f"[bold red]graphopt demo:[/bold red] {escape(str(error))}", soft_wrap=True)
        return error.exit_code
    except KeyboardInterrupt:
        return _interrupted(signal.SIGINT, errors)
    except SignalException as stop:
        return _interrupted(stop.sigval, errors)


def _measure(task: DemoTask, ranks: int, console: Console) -> int:
    results = Results()
    console.print(f"\n[bold]What it gains.[/bold] {escape(_setting(task, ranks))}\n")
    with ProgressView(console, task.rounds * len(task.links)) as view:

        def on_event(rank: int, event: Event) -> None:
            results.record(rank, event)
            if rank == 0:
                view.show(event)

        _run(task, ranks, on_event)
    with console.status("DDP and graphopt alone, to measure first call and memory"):
        for variant in (DEFAULT_DDP, GRAPHOPT):
            alone = replace(task, alone=variant)
            _run(alone, ranks, partial(results.alone[variant].__setitem__))
    console.print()
    console.print(step_table(results, ranks))
    console.print(cost_table(results))
    return _verdict(results, ranks, console)


def _run(task: DemoTask, ranks: int, on_event: Callable[[int, Event], None]) -> None:
    with tempfile.TemporaryDirectory(prefix="graphopt-") as name:
        task.save(Path(name))
        run_ranks(_WORKER, ranks, Path(name), on_event, environment=loopback())


def _verdict(results: Results, ranks: int, console: Console) -> int:
    colour = "green" if not results.differing else "yellow" if ranks > 2 else "red"
    console.print(f"[{colour}]{escape(difference_text(results))}[/{colour}]")
    if colour == "yellow":
        console.print(
            "More than two ranks sum a gradient in an order that depends on its place in a bucket,"
            " and DDP's buckets are not those of the graph: the last bits may differ."
        )
    return int(colour == "red")


def _setting(task: DemoTask, ranks: int) -> str:
    threads = threads_per_rank(ranks)
    text = (
        f"A GPT of 3.2 million parameters, dropout and AdamW, on {ranks} local"
        f" rank{'s' * (ranks > 1)} ({threads}"
        f" thread{'s' * (threads > 1)} each; {os.cpu_count()} cores, torch {torch.__version__});"
        f" turns of {task.turn} steps of one step function."
    )
    if any(task.links):
        text += (
            " Links are emulated: sockets are paced so that all gradients take so many times the"
            " compute of a step."
        )
    return text


def _links(text: str) -> tuple[float, ...]:
    try:
        links = tuple(float(part) for part in text.split(","))
    except ValueError:
        links = (-1.0,)
    if min(links) < 0 or max(links) > 100 or len(set(links)) < len(links):
        raise DemoError(
            f"--links {text!r}: write different numbers from 0 to 100, as in 0,0.5,1", exit_code=2
        )
    return links


def _check(task: DemoTask, ranks: int) -> None:
    if ranks < 1 or task.rounds < 1:
        raise DemoError("--ranks and --rounds must be at least 1", exit_code=2)
    try:
        graphopt.compile(train_step, pipeline=task.pipeline)
    except graphopt.GraphOptError as error:
        raise DemoError(f"--pipeline: {error}", exit_code=2) from error


def _interrupted(number: signal.Signals, errors: Console) -> int:
    errors.print(f"[bold red]graphopt demo:[/bold red] stopped by {number.name}; no rank is left")
    return 128 + number
