"""What one rank does: `python -m graphopt.demo.worker FOLDER`, with RANK and WORLD_SIZE set."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.elastic.multiprocessing.errors import record

import graphopt
from graphopt.demo.compare import compare
from graphopt.demo.launch import RankTask, Reporter
from graphopt.demo.memory import peak_memory
from graphopt.demo.model import CharGPT, GPTSize, write
from graphopt.demo.replica import VARIANTS, TrainedModel, Variant, make_replica, train_step
from graphopt.demo.text import Text

BATCH = 16
ROUND = 6
"""Steps of one variant before the other's turn: steps overlap, and must not with the other's."""
ALONE_STEPS = 5
_TIMEOUT = timedelta(minutes=5)


@dataclass(frozen=True)
class DemoTask(RankTask):
    """What every rank of one start is to do.

    Attributes:
        alone: train this variant by itself and report its memory and its traffic;
            None trains both side by side.
        port: of a TCP rendezvous on this machine; None meets through a file.
    """

    steps: int
    device: str
    backend: str
    pipeline: str
    seed: int
    port: int | None = None
    alone: Variant | None = None


class Batches:
    """This rank's share of the data, without end."""

    def __init__(self, text: Text, seed: int, rank: int, device: torch.device) -> None:
        self.text = text
        self._device = device
        self._generator = torch.Generator().manual_seed(seed * 1000 + rank)

    def next(self) -> tuple[Tensor, Tensor]:
        """Inputs and targets on the device."""
        inputs, targets = self.text.batch(BATCH, GPTSize.length, self._generator)
        return inputs.to(self._device), targets.to(self._device)


@record
def main() -> None:
    """Do the task in the folder named on the command line."""
    folder = Path(sys.argv[1])
    reporter = Reporter(folder)
    task = DemoTask.load(folder)
    with _process_group(task, folder) as device:
        batches = Batches(Text(), task.seed, dist.get_rank(), device)
        if task.alone is None:
            _side_by_side(task, batches, device, reporter)
        else:
            _alone(task, task.alone, batches, device, reporter)


@contextmanager
def _process_group(task: DemoTask, folder: Path) -> Iterator[torch.device]:
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device(task.device)
    if device.type == "cuda":
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    store: dist.Store
    if task.port is None:
        store = dist.FileStore(str(folder / "rendezvous"), ranks)
    else:
        store = dist.TCPStore("127.0.0.1", task.port, ranks, is_master=rank == 0)
    dist.init_process_group(
        task.backend, store=store, rank=rank, world_size=ranks, timeout=_TIMEOUT
    )
    yield device
    dist.destroy_process_group()


def _side_by_side(
    task: DemoTask, batches: Batches, device: torch.device, reporter: Reporter
) -> None:
    alphabet = len(batches.text.alphabet)
    replicas = {
        variant: make_replica(variant, alphabet, task.steps, task.pipeline, task.seed, device)
        for variant in VARIANTS
    }
    reporter.send("start", parameters=sum(p.numel() for p in replicas["eager"].model.parameters()))
    for number, start in enumerate(range(0, task.steps, ROUND)):
        # Who goes first alternates, so that neither always finds the warmer cache.
        order = VARIANTS if number % 2 == 0 else VARIANTS[::-1]
        data = [batches.next() for _ in range(min(ROUND, task.steps - start))]
        losses: dict[Variant, list[float]] = {}
        seconds: dict[Variant, float] = {}
        for variant in order:
            dist.barrier()
            losses[variant], seconds[variant] = replicas[variant].train(data)
        for index in range(len(data)):
            loss = {variant: losses[variant][index] for variant in VARIANTS}
            reporter.send("step", loss=loss, seconds=seconds)
    reporter.send("compared", **_comparison(replicas))
    if dist.get_rank() == 0:
        reporter.send("sample", text=_sample(replicas["graphopt"], batches.text, task.seed))


def _comparison(replicas: dict[Variant, TrainedModel]) -> dict[str, Any]:
    eager, captured = (replicas[variant] for variant in VARIANTS)
    return asdict(compare((eager.model, eager.optimizer), (captured.model, captured.optimizer)))


def _sample(replica: TrainedModel, text: Text, seed: int) -> str:
    start = torch.tensor([text.alphabet.index(character) for character in "The "])
    return text.decode(write(replica.model, start, 120, torch.Generator().manual_seed(seed)))


def _alone(
    task: DemoTask, variant: Variant, batches: Batches, device: torch.device, reporter: Reporter
) -> None:
    # Everything is imported before the measurement, in both variants alike: code is not what the
    # training needs more or less memory for.
    from graphopt.demo.traffic import traffic_of_call, traffic_of_graph

    alphabet = len(batches.text.alphabet)
    _capture_something_small(batches, device)
    replicas: list[TrainedModel] = []

    def train() -> None:
        steps = ALONE_STEPS + 1
        replica = make_replica(variant, alphabet, steps, task.pipeline, task.seed, device)
        for _ in range(ALONE_STEPS):
            replica.train([batches.next()])
        replicas.append(replica)

    peak = peak_memory(train, device)
    (replica,) = replicas
    if isinstance(replica.step, graphopt.TrainStep):
        traffic = traffic_of_graph(replica.step.graph_module)
    else:
        traffic = traffic_of_call(lambda: replica.train([batches.next()]))
    reporter.send("alone", peak=peak, **asdict(traffic))


def _capture_something_small(batches: Batches, device: torch.device) -> None:
    size = GPTSize(len(batches.text.alphabet), width=8, heads=1, layers=1)
    model = CharGPT(size).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    step = graphopt.compile(train_step, pipeline="none", parallel=graphopt.Manual())
    step(model, optimizer, *batches.next())


if __name__ == "__main__":
    main()
