"""Shared code of benchmarks on several ranks: options, launching, turns, and figures of turns.

options = parser(…).parse_args()         results = run_work(__file__, task, options.ranks)
if not works(options, turns):     and    └─ starts each rank as `script --work TASK FOLDER`
    …                                       └─ works(options, turns) calls turns(task)
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
from rich.console import Console
from rich.table import Table
from spread import Figures

WARM_UP_STEPS = 3
ROUND = 6
"""Steps of one variant before the next one's turn: steps overlap, and must not with another's."""


def parser(doc: str | None) -> argparse.ArgumentParser:
    """A parser with the options of all these benchmarks, described by the first line of `doc`."""
    made = argparse.ArgumentParser(description=doc.splitlines()[0] if doc else None)
    made.add_argument("--work", nargs=2, metavar=("TASK", "FOLDER"), help=argparse.SUPPRESS)
    made.add_argument("--json", type=Path, metavar="FILE", help="write the figures as well")
    return made


def works(options: argparse.Namespace, work: Callable[[Figures], Figures]) -> bool:
    """Runs this rank's work in a group of all ranks if the process is a rank; returns True then."""
    if not options.work:
        return False
    task, folder = options.work
    with process_group(Path(folder)):
        found = work(json.loads(task))
        (Path(folder) / f"result-{dist.get_rank()}").write_text(json.dumps(found))
    return True


def tabulate(
    options: argparse.Namespace, rows: Iterable[Figures], table: Callable[[Figures], Table]
) -> None:
    """Prints a table for each row of figures, and writes all rows where `--json` says."""
    found = []
    for row in rows:
        Console(width=max(150, Console().width)).print(table(row))
        found.append(row)
    if options.json:
        options.json.write_text(json.dumps({"torch": torch.__version__, "rows": found}, indent=2))


def run_work(script: str, task: Figures, ranks: int, hosts: bool = False) -> list[Figures]:
    """Runs `script --work` with a task on fresh ranks; returns what each has found.

    Args:
        hosts: each rank is a host of its own.

    Raises:
        SystemExit: with what a rank printed last that ended with an exception, exit code or signal.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="graphopt-")))
        command = [sys.executable, script, "--work", json.dumps(task), str(folder)]
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
            "GLOO_SOCKET_IFNAME": "lo",
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": "1" if hosts else str(ranks),
        }
        processes = []
        for rank in range(ranks):
            log = stack.enter_context((folder / f"log-{rank}").open("w"))
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            process = subprocess.Popen(command, env=environment | own, stdout=log, stderr=log)
            stack.callback(process.wait)
            stack.callback(process.kill)
            processes.append(process)
        while (codes := [process.poll() for process in processes]).count(None) and not any(codes):
            time.sleep(0.1)
        for rank, code in enumerate(codes):
            if code:
                printed = (folder / f"log-{rank}").read_text(errors="replace").splitlines()
                last = "\n".join(f"  {line}" for line in printed[-20:])
                sys.exit(f"rank {rank} ended with exit code {code}\n{last}")
        return [json.loads((folder / f"result-{rank}").read_text()) for rank in range(ranks)]


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


@contextmanager
def process_group(folder: Path) -> Iterator[None]:
    """A gloo group of all ranks, with a timeout of five minutes since links may be slow. No rank
    leaves while another communicates, or while what has sent through the group waits to be
    collected."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.FileStore(str(folder / "rendezvous"), ranks)
    timeout = timedelta(minutes=5)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timeout)
    yield
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()


def in_turns(
    names: Sequence[str],
    seconds: Callable[[str, Any], float],
    given: Callable[[], Any],
    rounds: int,
    length: int = ROUND,
    first: int = 0,
) -> dict[str, list[float]]:
    """Times each variant in each round, in an order that rotates.

    Args:
        seconds: runs a variant on what several steps are given.
        given: makes what one step is given; in a round all variants get the same.
        rounds: without the first, which warm up with a single step.
        first: so many of the variants begin every round, in this order.
    """
    found: dict[str, list[float]] = {name: [] for name in names}
    for number in range(WARM_UP_STEPS + rounds):
        steps = [given() for _ in range(length if number >= WARM_UP_STEPS else 1)]
        turn = first + number % (len(names) - first)
        for name in (*names[:first], *names[turn:], *names[first:turn]):
            dist.barrier()
            found[name].append(seconds(name, steps))
    return found


def slowest(results: Sequence[Figures]) -> dict[str, list[float]]:
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
