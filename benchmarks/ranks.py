"""What the benchmarks on several ranks share: options, launching, turns, and figures of turns.

options = parse(parser)                      events = run_work(__file__, task, options.ranks)
if options.work:                      and    └─ starts each rank as `script --work TASK FOLDER`
    work(*task_of(options))
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from emulated_link import SlowLink, parse_rate
from spread import Figures

from graphopt.demo import DemoError
from graphopt.demo.launch import Event, Reporter, run_ranks

WARM_UP_STEPS = 3
ROUND = 6
"""Steps of one variant before the next one's turn: steps overlap, and must not with another's."""


def parser(doc: str | None) -> argparse.ArgumentParser:
    """Options that all of these benchmarks have; the first line of `doc` describes them."""
    made = argparse.ArgumentParser(description=doc.splitlines()[0] if doc else None)
    made.add_argument("--work", nargs=2, metavar=("TASK", "FOLDER"), help=argparse.SUPPRESS)
    made.add_argument("--json", type=Path, metavar="FILE", help="write the figures as well")
    return made


def training_parser(doc: str | None, models: Iterable[str]) -> argparse.ArgumentParser:
    """`parser`, with the options of trainings that take turns."""
    made = parser(doc)
    made.add_argument("--ranks", type=int, default=2)
    made.add_argument("--link", metavar="RATE", help="emulate a slow link, such as 200mbit")
    made.add_argument("--model", choices=models, default="gpt")
    made.add_argument("--rounds", type=int, default=12, help="turns of six steps, at least 2")
    return made


def run_trainings(script: str, options: argparse.Namespace, **task: Any) -> dict[str, list[float]]:
    """`slowest` of what ranks report that run `script --work`, with options and a task."""
    task |= {"model": options.model, "rounds": options.rounds}
    with failures_shown():
        rate = parse_rate(options.link) if options.link else None
        return slowest(run_work(script, task, options.ranks, rate))


def works(options: argparse.Namespace, work: Callable[[Figures, Path], None]) -> bool:
    """Whether this process is a rank, whose work is done then."""
    if not options.work:
        return False
    task, folder = options.work
    work(json.loads(task), Path(folder))
    return True


@contextmanager
def failures_shown() -> Iterator[None]:
    """While active, a rank that fails ends the program with its message."""
    try:
        yield
    except DemoError as error:
        sys.exit(str(error))


def run_work(
    script: str,
    task: Figures,
    ranks: int,
    rate: float | None = None,
    *,
    one_thread: bool = True,
    on_event: Callable[[int, Event], None] | None = None,
) -> list[Event]:
    """Run `script --work` with a task in fresh processes; all that they report.

    Args:
        rate: in bit/s, of a link between emulated hosts, one for each rank; None: no such link.
        one_thread: for each rank, unless OMP_NUM_THREADS says otherwise.
        on_event: called with a rank and what it has just reported.
    """
    events: list[Event] = []

    def note(rank: int, event: Event) -> None:
        events.append(event)
        if on_event is not None:
            on_event(rank, event)

    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="graphopt-")))
        threads = os.environ.get("OMP_NUM_THREADS", "1" if one_thread else None)
        environment = {} if threads is None else {"OMP_NUM_THREADS": threads}
        prefixes = None
        if rate is not None:
            link = stack.enter_context(SlowLink(round(rate), ranks))
            prefixes, environment = link.prefixes, environment | link.environment
        command = [script, "--work", json.dumps(task)]
        run_ranks(command, ranks, folder, note, prefixes=prefixes, environment=environment)
    return events


@contextmanager
def process_group(folder: Path, reporter: Reporter) -> Iterator[None]:
    """A gloo group of all ranks; none for a single process. A rank that waits for another for five
    minutes fails: a link may have gone."""
    if reporter.ranks == 1:
        yield
        return
    rank, ranks = reporter.rank, reporter.ranks
    store = dist.FileStore(str(folder / "rendezvous"), ranks)
    timeout = timedelta(minutes=5)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timeout)
    yield
    dist.destroy_process_group()


def in_turns(
    names: Sequence[str],
    seconds: Callable[[str, Any], float],
    given: Callable[[], Any],
    rounds: int,
    length: int = ROUND,
    first: int = 0,
) -> dict[str, list[float]]:
    """What each variant takes in each round; who begins changes.

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


def slowest(results: Sequence[Event]) -> dict[str, list[float]]:
    """Seconds by variant: of each turn the slowest rank counts. Warm-up is left out."""
    return {
        name: [max(turn) for turn in zip(*(r["seconds"][name] for r in results), strict=True)][
            WARM_UP_STEPS:
        ]
        for name in results[0]["seconds"]
    }


def paired(times: Sequence[float], others: Sequence[float]) -> list[float]:
    """Ratios of each round."""
    return [a / b for a, b in zip(times, others, strict=True)]
