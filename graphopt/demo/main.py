"""Runs `graphopt demo`: a captured step, a refused pass, and a table of step times."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from torch import multiprocessing
from torch.multiprocessing.spawn import ProcessException

import graphopt
from graphopt.commands.errors import FAILED, reported
from graphopt.demo.report import cost_table, step_table
from graphopt.demo.showcase import show_graph_and_passes
from graphopt.demo.training import GRAPHOPT, DemoResults, DemoTask, train_rank, train_step
from graphopt.errors import GraphOptError

TURN = 4
"""Steps of one variant before the next one's turn."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class _StoppedError(BaseException):
    """A signal asks the demo to end."""


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
        The exit code: 0; 1 where, on at most two ranks, the variants differ; 128 and the signal's
        number after Ctrl-C and the like.

    Raises:
        typer.Exit: with 1 when a rank failed, with 2 for a request that cannot be met.
    """
    console = Console()
    with reported("demo"):
        chosen = _links(links) if ranks > 1 else (0.0,)
        threads = torch.get_num_threads()
        if "OMP_NUM_THREADS" not in os.environ:
            threads = max(1, threads // ranks)
        task = DemoTask(ranks, TURN, rounds, chosen, pipeline, seed, threads)
        _check(task)
    try:
        with reported("demo", FAILED), _stopped_by_signals():
            show_graph_and_passes(console)
            console.print(f"\n[bold]What it gains.[/bold] {escape(_setting(task))}\n")
            return _shown(_run(task, console), ranks, console)
    except _StoppedError as stop:
        number = signal.Signals(stop.args[0])
        Console(stderr=True).print(
            f"[bold red]graphopt demo:[/bold red] stopped by {number.name}; no rank is left"
        )
        return 128 + number


def _run(task: DemoTask, console: Console) -> DemoResults:
    """Trains on local ranks, and ends them all in whatever way this ends."""
    events: Any = multiprocessing.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory(prefix="graphopt-") as folder:
        context = multiprocessing.start_processes(
            train_rank, (task, folder, events), task.ranks, join=False, start_method="spawn"
        )
        results: list[DemoResults] = []
        try:
            done = False
            while not done:
                done = context.join(timeout=0.1)
                while not events.empty():
                    event = events.get()
                    if isinstance(event, DemoResults):
                        results.append(event)
                    else:
                        console.print(event)
        except ProcessException as error:
            raise GraphOptError(f"rank {error.error_index} failed: {error.msg.strip()}") from None
        finally:
            for process in context.processes:
                process.kill()
                process.join()
    return results[0]


@contextmanager
def _stopped_by_signals() -> Iterator[None]:
    def stop(number: int, frame: object) -> None:
        for each in _SIGNALS:  # a second Ctrl-C must not interrupt the ending of the ranks
            signal.signal(each, signal.SIG_IGN)
        raise _StoppedError(number)

    before = {number: signal.signal(number, stop) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _shown(results: DemoResults, ranks: int, console: Console) -> int:
    console.print()
    console.print(step_table(results))
    console.print(cost_table(results))
    if not results.differences[GRAPHOPT]:
        compared = "parameters, buffers and optimizer state of every rank"
        console.print(f"[green]Bit for bit the same: {compared}.[/green]")
        return 0
    console.print(f"[{'yellow' if ranks > 2 else 'red'}]Other bits.[/]")
    if ranks > 2:
        console.print(
            "More than two ranks sum a gradient in an order that depends on its place in a bucket,"
            " and DDP's buckets are not those of the graph: the last bits may differ."
        )
    return int(ranks <= 2)


def _setting(task: DemoTask) -> str:
    text = (
        f"A GPT of 3.2 million parameters, dropout and AdamW, on {task.ranks} local"
        f" rank{'s' * (task.ranks > 1)} ({task.threads}"
        f" thread{'s' * (task.threads > 1)} each; {os.cpu_count()} cores, torch"
        f" {torch.__version__}); turns of {task.turn} steps of one step function."
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
        raise GraphOptError(
            f"--links {text!r}: write different numbers from 0 to 100, as in 0,0.5,1"
        )
    return links


def _check(task: DemoTask) -> None:
    try:
        graphopt.compile(train_step, pipeline=task.pipeline)
    except graphopt.GraphOptError as error:
        raise GraphOptError(f"--pipeline: {error}") from error
