"""`graphopt demo`: train a small GPT with eager DDP and with graphopt, and show both."""

from __future__ import annotations

import os
import signal
import socket
import tempfile
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.markup import escape
from torch.distributed.elastic.multiprocessing import SignalException

import graphopt
from graphopt.demo import DemoError
from graphopt.demo.launch import Event, loopback, run_ranks, threads_per_rank
from graphopt.demo.link import SlowLink, parse_rate
from graphopt.demo.replica import VARIANTS, Variant, train_step
from graphopt.demo.report import ProgressView, Results, comparison_table, difference_text
from graphopt.demo.worker import DemoTask

_WORKER = ("-m", "graphopt.demo.worker")


def run_demo(
    ranks: int, steps: int, device: str, backend: str, pipeline: str, link: str | None, seed: int
) -> int:
    """Train both variants on local ranks and print a table.

    Args:
        ranks: processes, each a data-parallel rank on this machine.
        device: "cpu" or "cuda".
        backend: "gloo" or "nccl".
        pipeline: what `graphopt.compile` is given.
        link: rate of an emulated slow link between the ranks, such as "200mbit".
        seed: of the weights, the data and the dropout.

    Returns:
        The exit code: 0; 1 when a rank failed or, on at most two ranks, the variants differ;
        2 for a request that cannot be met; 130 after Ctrl-C.
    """
    console, errors = Console(), Console(stderr=True)
    try:
        rate = parse_rate(link) if link is not None else None
        task = DemoTask(steps, device, backend, pipeline, seed, port=_chosen_port(rate))
        _check(task, ranks, rate)
        return _run(task, ranks, rate, console)
    except DemoError as error:
        errors.print(f"[bold red]graphopt demo:[/bold red] {escape(str(error))}", soft_wrap=True)
        return error.exit_code
    except KeyboardInterrupt:
        return _interrupted(signal.SIGINT, errors)
    except SignalException as stop:
        return _interrupted(stop.sigval, errors)


def _run(task: DemoTask, ranks: int, rate: int | None, console: Console) -> int:
    console.print(_setting(task, ranks, rate))
    results = Results()
    _train(task, ranks, rate, results, console)
    with console.status("each variant alone, to measure its memory and its communication"):
        for variant in VARIANTS:
            _measure_alone(task, variant, ranks, results)
    console.print(comparison_table(results, ranks))
    console.print(f"The trained model writes: {escape(' '.join(results.sample.split()))}")
    return _verdict(results, ranks, console)


def _train(
    task: DemoTask, ranks: int, rate: int | None, results: Results, console: Console
) -> None:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="graphopt-")))
        link = stack.enter_context(SlowLink(rate, ranks)) if rate is not None else None
        view = stack.enter_context(ProgressView(console, task.steps))

        def on_event(rank: int, event: Event) -> None:
            results.record(rank, event)
            if rank == 0:
                view.show(event)

        task.save(folder)
        prefixes = link.prefixes if link is not None else None
        environment = link.environment if link is not None else loopback()
        run_ranks(_WORKER, ranks, folder, on_event, prefixes=prefixes, environment=environment)


def _measure_alone(task: DemoTask, variant: Variant, ranks: int, results: Results) -> None:
    def on_event(rank: int, event: Event) -> None:
        results.alone[variant][rank] = event

    with tempfile.TemporaryDirectory(prefix="graphopt-") as name:
        replace(task, alone=variant, port=None).save(Path(name))
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


def _setting(task: DemoTask, ranks: int, rate: int | None) -> str:
    threads = threads_per_rank(ranks)
    lines = [
        f"A character GPT on {ranks} local rank{'s' * (ranks > 1)} ({task.device}, {task.backend},"
        f" {threads} thread{'s' * (threads > 1)} each), {task.steps} steps",
        "of one step function: eager DistributedDataParallel and"
        f" graphopt.compile(pipeline={task.pipeline!r}).",
    ]
    if rate is not None:
        lines.append(f"Emulated link: each rank sends at most {rate / 1e6:g} Mbit/s.")
    return escape("\n".join(lines))


def _check(task: DemoTask, ranks: int, rate: int | None) -> None:
    if ranks < 1 or task.steps < 1:
        raise DemoError("--ranks and --steps must be at least 1", exit_code=2)
    if task.device not in ("cpu", "cuda") or task.backend not in ("gloo", "nccl"):
        raise DemoError("--device is cpu or cuda, --backend is gloo or nccl", exit_code=2)
    if task.device == "cuda" and not torch.cuda.is_available():
        raise DemoError("--device cuda: torch sees no CUDA device; use --device cpu", exit_code=2)
    if task.backend == "nccl":
        _check_nccl(ranks, task.device, rate)
    if rate is not None and ranks < 2:
        raise DemoError("--link needs at least two ranks: use --ranks 2", exit_code=2)
    try:
        graphopt.compile(train_step, pipeline=task.pipeline)
    except graphopt.GraphOptError as error:
        raise DemoError(f"--pipeline: {error}", exit_code=2) from error


def _check_nccl(ranks: int, device: str, rate: int | None) -> None:
    if device != "cuda" or not dist.is_nccl_available():
        raise DemoError("--backend nccl needs --device cuda; on CPU use gloo", exit_code=2)
    if ranks > torch.cuda.device_count():
        raise DemoError(
            f"--backend nccl needs a GPU for each of {ranks} ranks, and torch sees"
            f" {torch.cuda.device_count()}: use --backend gloo, or fewer --ranks",
            exit_code=2,
        )
    if rate is not None:
        raise DemoError(
            "--link slows down sockets, which nccl does not use on one machine: use gloo",
            exit_code=2,
        )


def _chosen_port(rate: int | None) -> int | None:
    """MASTER_PORT, if it is set. Without it ranks meet through a file, as on the emulated link."""
    text = os.environ.get("MASTER_PORT")
    if not text or rate is not None:
        return None
    if not text.isdigit() or not 0 < int(text) < 2**16:
        raise DemoError(
            f"MASTER_PORT={text!r} is not a port; unset it: none is needed", exit_code=2
        )
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", int(text)))
        except OSError as error:
            raise DemoError(
                f"port {text} (from MASTER_PORT) cannot be used: {error.strerror};"
                " unset MASTER_PORT, since the demo needs no port, or choose a free one",
                exit_code=2,
            ) from error
    return int(text)


def _interrupted(number: signal.Signals, errors: Console) -> int:
    errors.print(f"[bold red]graphopt demo:[/bold red] stopped by {number.name}; no rank is left")
    return 128 + number
