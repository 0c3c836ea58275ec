"""Shared code of benchmarks on several ranks: launching, turns, and figures of turns.

options = parser(…).parse_args()             results = run_work(__file__, task, options.ranks)
if not works(options, turns):         and    └─ starts each rank as `script --work TASK FOLDER`
    …                                           └─ works(options, turns) calls turns(task)
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
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import figures
import torch.distributed as dist
from emulated_link import LinkError, SlowLink
from figures import Figures

WARM_UP_STEPS = 3


def parser(doc: str | None) -> argparse.ArgumentParser:
    """A parser with the options of all benchmarks on ranks."""
    made = figures.parser(doc)
    made.add_argument("--work", nargs=2, metavar=("TASK", "FOLDER"), help=argparse.SUPPRESS)
    made.add_argument("--ranks", type=int, default=2, help="emulated hosts")
    return made


def works(options: argparse.Namespace, work: Callable[[Figures], Figures]) -> bool:
    """Runs this rank's work in a group of all ranks if the process is a rank; returns True then."""
    if not options.work:
        return False
    task, folder = json.loads(options.work[0]), Path(options.work[1])
    with process_group(folder):
        (folder / f"result-{dist.get_rank()}").write_text(json.dumps(work(task)))
    return True


@contextmanager
def process_group(folder: Path) -> Iterator[None]:
    """A gloo group of all ranks, with a timeout of five minutes since a link may fail. No rank
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


def run_work(script: str, task: Figures, ranks: int, rate: float | None = None) -> list[Figures]:
    """Runs `script --work` with a task on fresh ranks; returns what each of them has found.

    Args:
        rate: in bit/s, of a link between emulated hosts, one for each rank; None: no such link.

    Raises:
        SystemExit: a rank ended with an exception, an exit code or a signal, or there can be no
            link.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="graphopt-")))
        environment = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
        environment |= {"GLOO_SOCKET_IFNAME": "lo"}
        prefixes: list[list[str]] = [[] for _ in range(ranks)]
        if rate is not None:
            try:
                link = stack.enter_context(SlowLink(round(rate), ranks))
            except LinkError as error:
                sys.exit(str(error))
            prefixes, environment = link.prefixes, environment | link.environment
        command = [sys.executable, script, "--work", json.dumps(task), str(folder)]
        processes = []
        for rank, prefix in enumerate(prefixes):
            log = stack.enter_context((folder / f"log-{rank}").open("w"))
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            process = subprocess.Popen(
                [*prefix, *command],
                env={"OMP_NUM_THREADS": "1", **os.environ, **environment, **own},
                stdout=log,
                stderr=log,
            )
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


def in_turns(
    names: Sequence[str],
    seconds: Callable[[str, Any], float],
    given: Callable[[], Any],
    rounds: int,
    length: int,
    first: int = 0,
) -> dict[str, list[float]]:
    """Times each variant in each round, in an order that rotates.

    Args:
        seconds: runs a variant on what several steps are given.
        given: makes what one step is given; in a round all variants get the same.
        rounds: without the first, which warm up with a single step.
        length: steps of one variant before the next one's turn: steps overlap, and must not with
            another's.
        first: so many of the variants begin every round, in this order.
    """
    found: dict[str, list[float]] = {name: [] for name in names}
    for number in range(WARM_UP_STEPS + rounds):
        steps = [given() for _ in range(length if number >= WARM_UP_STEPS else 1)]
        turn = first + number % (len(names) - first)
        for name in (*names[:first], *names[turn:], *names[first:turn]):
            dist.barrier()
            print(name, flush=True)  # shown where the rank dies of it
            found[name].append(seconds(name, steps))
    return found


def slowest(results: Sequence[Figures]) -> dict[str, list[float]]:
    """The seconds by variant: those of the slowest rank in each turn, without warm-up."""
    return {
        name: list(map(max, *(result["seconds"][name][WARM_UP_STEPS:] for result in results)))
        for name in results[0]["seconds"]
    }


def paired(times: Sequence[float], others: Sequence[float]) -> list[float]:
    """The ratios of two variants' seconds in each round."""
    return [a / b for a, b in zip(times, others, strict=True)]
