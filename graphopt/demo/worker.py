"""The process of one rank: `python -m graphopt.demo.worker FOLDER`, with RANK and WORLD_SIZE
set."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from graphopt.demo.compare import compare
from graphopt.demo.launch import RankTask, Reporter
from graphopt.demo.pacing import pace_connections
from graphopt.demo.replica import (
    COMPUTE,
    DEFAULT_DDP,
    GRAPHOPT,
    VARIANTS,
    Batches,
    Training,
    make_training,
)
from graphopt.estimate.memory import peak_memory

WARM_UP_STEPS = 2
ALONE_STEPS = 3
_TIMEOUT = timedelta(minutes=5)


@dataclass(frozen=True)
class DemoTask(RankTask):
    """The task that every rank of the demo runs.

    Attributes:
        turn: steps of one variant before the next one's turn: steps of graphopt overlap.
        rounds: turns of each variant on each link.
        links: the time that all gradients take on a link, as a multiple of the compute of a step;
            0 is the machine's own loopback.
        alone: train this variant by itself and report its first call and its memory;
            None trains all variants in turns.
    """

    turn: int
    rounds: int
    links: tuple[float, ...]
    pipeline: str
    seed: int
    alone: str | None = None


@record
def main() -> None:
    """Runs the task in the folder that the command line names."""
    folder = Path(sys.argv[1])
    reporter = Reporter(folder)
    task = DemoTask.load(folder)
    with _process_group(reporter, folder):
        batches = Batches(task.seed, reporter.rank)
        if task.alone is None:
            _in_turns(task, batches, reporter)
        else:
            _alone(task, task.alone, batches, reporter)


@contextmanager
def _process_group(reporter: Reporter, folder: Path) -> Iterator[None]:
    rank, ranks = reporter.rank, reporter.ranks
    store = dist.FileStore(str(folder / "rendezvous"), ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=_TIMEOUT)
    yield
    dist.destroy_process_group()


def _in_turns(task: DemoTask, batches: Batches, reporter: Reporter) -> None:
    trainings = {name: make_training(name, task.pipeline, task.seed) for name in VARIANTS}
    parameters = list(trainings[COMPUTE].model.parameters())
    reporter.send("start", parameters=sum(p.numel() for p in parameters))
    data = [batches.next() for _ in range(WARM_UP_STEPS)]
    for training in trainings.values():
        training.train(data)
    compute: list[float] = []
    sent_bytes = sum(p.nbytes for p in parameters) * 2 * (reporter.ranks - 1) / reporter.ranks
    for link in task.links:
        for number in range(task.rounds):
            # Who goes first changes, so that nobody always finds the warmer cache.
            order = VARIANTS[number % len(VARIANTS) :] + VARIANTS[: number % len(VARIANTS)]
            if link and compute:
                pace_connections(sent_bytes / (link * _slowest(median(compute[-3:]))))
            data = [batches.next() for _ in range(task.turn)]
            seconds, losses = {}, {}
            for name in order:
                dist.barrier()
                found, seconds[name] = trainings[name].train(data)
                losses[name] = found[-1]
            compute.append(seconds[COMPUTE])
            reporter.send("turn", link=link, seconds=seconds, losses=losses)
        pace_connections(None)
    reporter.send("compared", **_comparison(trainings))


def _slowest(seconds: float) -> float:
    value = torch.tensor(seconds)
    dist.all_reduce(value, dist.ReduceOp.MAX)
    return value.item()


def _comparison(trainings: dict[str, Training]) -> dict[str, object]:
    one, other = trainings[DEFAULT_DDP], trainings[GRAPHOPT]
    return asdict(compare((one.model, one.optimizer), (other.model, other.optimizer)))


def _alone(task: DemoTask, variant: str, batches: Batches, reporter: Reporter) -> None:
    first: list[float] = []

    def train() -> None:
        training = make_training(variant, task.pipeline, task.seed)
        first.append(training.train([batches.next()])[1])
        for _ in range(ALONE_STEPS):
            training.train([batches.next()])

    peak = peak_memory(train, torch.device("cpu"))
    reporter.send("alone", peak=peak, first_call=first[0])


if __name__ == "__main__":
    main()
