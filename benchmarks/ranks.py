"""Shared code of benchmarks on several ranks: options, launching, turns, and figures of turns.

options = parse(parser)                      events = run_work(__file__, task, options.ranks)
if options.work:                      and    └─ starts each rank as `script --work TASK FOLDER`
    work(*task_of(options))
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from emulated_link import LinkError, SlowLink
from rich.console import Console
from rich.table import Table
from spread import Figures

Event = dict[str, Any]

WARM_UP_STEPS = 3
ROUND = 6
"""Steps of one variant before the next one's turn: steps overlap, and must not with another's."""


class RankFailedError(Exception):
    """A rank ended with an exception, an exit code or a signal."""


def parser(doc: str | None) -> argparse.ArgumentParser:
    """A parser with the options of all these benchmarks, described by the first line of `doc`."""
    made = argparse.ArgumentParser(description=doc.splitlines()[0] if doc else None)
    made.add_argument("--work", nargs=2, metavar=("TASK", "FOLDER"), help=argparse.SUPPRESS)
    made.add_argument("--json", type=Path, metavar="FILE", help="write the figures as well")
    return made


def works(options: argparse.Namespace, work: Callable[[Figures, Path], None]) -> bool:
    """Runs this rank's work if the process is a rank; returns True then."""
    if not options.work:
        return False
    task, folder = options.work
    work(json.loads(task), Path(folder))
    return True


@contextmanager
def failures_shown() -> Iterator[None]:
    """While active, a failed rank ends the program with its message."""
    try:
        yield
    except (LinkError, RankFailedError) as error:
        sys.exit(str(error))


def tabulate(
    options: argparse.Namespace, rows: Iterable[Figures], table: Callable[[Figures], Table]
) -> None:
    """Prints a table for each row of figures, and writes all rows where `--json` says."""
    found = []
    with failures_shown():
        for row in rows:
            Console(width=max(150, Console().width)).print(table(row))
            found.append(row)
    if options.json:
        options.json.write_text(json.dumps({"torch": torch.__version__, "rows": found}, indent=2))


def run_work(
    script: str, task: Figures, ranks: int, rate: float | None = None, late: list[str] | None = None
) -> list[Event]:
    """Runs `script --work` with a task on fresh ranks; returns all that they report.

    Args:
        rate: in bit/s, of a link between emulated hosts, one for each rank; None: no such link.
        late: takes the names of what a rank gave up because it took too long.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="graphopt-")))
        environment = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
        prefixes: list[list[str]] = [[] for _ in range(ranks)]
        if rate is not None:
            link = stack.enter_context(SlowLink(round(rate), ranks))
            prefixes, environment = link.prefixes, environment | link.environment
        else:
            environment["GLOO_SOCKET_IFNAME"] = "lo"
        command = [sys.executable, script, "--work", json.dumps(task), str(folder)]
        processes = []
        for rank, prefix in enumerate(prefixes):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
            log = stack.enter_context((folder / f"log-{rank}").open("w"))
            process = subprocess.Popen(
                [*prefix, *command],
                env={**os.environ, "LOCAL_WORLD_SIZE": str(ranks), **environment, **own},
                stdout=log,
                stderr=log,
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
            processes.append(process)
        while (codes := [process.poll() for process in processes]).count(None) and not any(codes):
            time.sleep(0.1)
        events = [event for rank in range(ranks) for event in _events(folder, rank)]
        if late is not None:
            late += [event["name"] for event in events if event["kind"] == "late"]
        for rank, code in enumerate(codes):
            if code:
                printed = (folder / f"log-{rank}").read_text(errors="replace").splitlines()
                last = "\n".join(f"  {line}" for line in printed[-20:])
                raise RankFailedError(f"rank {rank} ended with exit code {code}\n{last}")
    return [event for event in events if event["kind"] != "late"]


def _events(folder: Path, rank: int) -> list[Event]:
    path = folder / f"events-{rank}"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


class Reporter:
    """The connection of a rank to the process that has started it."""

    def __init__(self, folder: Path) -> None:
        self.rank, self.ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self._path = folder / f"events-{self.rank}"

    def send(self, kind: str, **values: Any) -> None:
        """Sends one event, whose values JSON can hold."""
        with self._path.open("a") as file:
            file.write(json.dumps({"kind": kind, **values}) + "\n")


class RandomState:
    """The random generator state of one replica, so that replicas in a process draw alike."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.save()

    def save(self) -> None:
        """Saves the state of the random generator."""
        self._state = torch.get_rng_state()

    def restore(self) -> None:
        """Restores the saved state of the random generator."""
        torch.set_rng_state(self._state)


def said(what: str) -> None:
    """Say on a rank what it does now: shown where the rank dies of it."""
    print(what, file=sys.stderr, flush=True)


@contextmanager
def process_group(folder: Path, reporter: Reporter) -> Iterator[None]:
    """A gloo group of all ranks, with a timeout of five minutes since a link may fail; none for
    one process. No rank leaves while another communicates, or while what has sent through the group
    waits to be collected."""
    if reporter.ranks == 1:
        yield
        return
    rank, ranks = reporter.rank, reporter.ranks
    store = dist.FileStore(str(folder / "rendezvous"), ranks)
    timeout = timedelta(minutes=5)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timeout)
    yield
    gc.collect()
    said("all is measured")
    dist.barrier()
    dist.destroy_process_group()


def in_turns(
    names: Sequence[str],
    seconds: Callable[[str, Any], float],
    given: Callable[[], Any],
    rounds: int,
    length: int = ROUND,
    first: int = 0,
    enough: Callable[[], bool] = lambda: False,
) -> dict[str, list[float]]:
    """Times each variant in each round, in an order that rotates.

    Args:
        seconds: runs a variant on what several steps are given.
        given: makes what one step is given; in a round all variants get the same.
        rounds: without the first, which warm up with a single step.
        first: so many of the variants begin every round, in this order.
        enough: asked after each round, and answered alike on all ranks: whether to end early.
    """
    found: dict[str, list[float]] = {name: [] for name in names}
    for number in range(WARM_UP_STEPS + rounds):
        steps = [given() for _ in range(length if number >= WARM_UP_STEPS else 1)]
        turn = first + number % (len(names) - first)
        for name in (*names[:first], *names[turn:], *names[first:turn]):
            dist.barrier()
            found[name].append(seconds(name, steps))
        if number > WARM_UP_STEPS and enough():
            break
    return found


def slowest(results: Sequence[Event]) -> dict[str, list[float]]:
    """The seconds by variant: those of the slowest rank in each turn, without warm-up."""
    return {
        name: [max(turn) for turn in zip(*(r["seconds"][name] for r in results), strict=True)][
            WARM_UP_STEPS:
        ]
        for name in results[0]["seconds"]
    }


def paired(times: Sequence[float], others: Sequence[float]) -> list[float]:
    """The ratios of two variants' seconds in each round."""
    return [a / b for a, b in zip(times, others, strict=True)]
