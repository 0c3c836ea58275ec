"""Compares `graphopt estimate` with measured steps: GPT-2 and ResNet-50 on two emulated hosts.

    python benchmarks/predicted.py
    python benchmarks/predicted.py --models resnet50 --ratios 1 --pixels 64 --json predicted.json

What the figures mean and how they are taken: benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import copy
import gc
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import fmean

import ranks
import torch
import torch.distributed as dist
from emulated_link import set_rate
from rich.table import Table
from spread import Figures
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import graphopt
from graphopt.demo.launch import Reporter
from graphopt.estimate.predict import captured_for_ranks, compute_costs, network_named, predict
from graphopt.estimate.target import StepCalls

HOSTS = 2
COMPUTE, DDP, OURS = "compute alone", "DDP, 25 MB", "graphopt, default"
UNSHAPED = 4e10
"""Bit/s of a link that holds nothing back."""


def language_step(model: nn.Module, optimizer: Optimizer, tokens: Tensor) -> Tensor:
    """A training step on the loss of each next token."""
    loss: Tensor = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def image_step(model: nn.Module, optimizer: Optimizer, images: Tensor, classes: Tensor) -> Tensor:
    """A training step on the classification loss."""
    loss: Tensor = model(pixel_values=images, labels=classes).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def gpt2(task: Figures) -> StepCalls:
    """GPT-2 small (124 million parameters), one short text, AdamW."""
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(n_layer=task["layers"]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    tokens = torch.randint(50257, (1, task["tokens"]))
    return StepCalls(language_step, (model, optimizer), ((tokens,),))


def resnet50(task: Figures) -> StepCalls:
    """ResNet-50 (26 million parameters), few small images, SGD with momentum."""
    from transformers import ResNetConfig, ResNetForImageClassification

    model = ResNetForImageClassification(ResNetConfig(num_labels=1000))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    pixels = torch.randn(task["images"], 3, task["pixels"], task["pixels"])
    classes = torch.randint(1000, (task["images"],))
    return StepCalls(image_step, (model, optimizer), ((pixels, classes),))


MODELS: dict[str, Callable[[Figures], StepCalls]] = {"gpt2": gpt2, "resnet50": resnet50}


# -------------------------------------------------------------------------------- on each host


class Training:
    """A training step that runs repeatedly.

    Args:
        calls: whose model is trained; all but *compute alone* train a copy.
    """

    def __init__(self, calls: StepCalls, name: str) -> None:
        model, optimizer = calls.arguments if name == COMPUTE else copy.deepcopy(calls.arguments)
        if name == DDP:
            model = DistributedDataParallel(model, gradient_as_bucket_view=True)
        self._step = graphopt.compile(calls.function) if name == OURS else calls.function
        self._args = (model, optimizer, *calls.batches[0])
        self._take(ranks.WARM_UP_STEPS)

    def seconds(self, steps: int) -> float:
        """The mean seconds of consecutive steps, after one untimed: late work is part of each."""
        dist.barrier()
        self._take(1)
        start = time.perf_counter()
        self._take(steps)
        taken = torch.tensor((time.perf_counter() - start) / steps, dtype=torch.float64)
        if isinstance(self._step, graphopt.TrainStep):
            self._step.flush()
        dist.all_reduce(taken, dist.ReduceOp.MAX)
        return taken.item()

    def _take(self, steps: int) -> None:
        for _ in range(steps):
            self._step(*self._args)


def work(task: Figures, folder: Path) -> None:
    """Estimates on both hosts at once, as the command does, then trains over each link."""
    reporter = Reporter(folder)
    torch.manual_seed(0)
    calls = MODELS[task["model"]](task)
    bits = 8 * 2 * (HOSTS - 1) / HOSTS * sum(p.nbytes for p in calls.arguments[0].parameters())
    gm = captured_for_ranks(calls)
    meet(folder, reporter)
    costs = compute_costs(gm)
    gc.collect()
    with ranks.process_group(folder, reporter):
        made = {name: Training(calls, name) for name in (COMPUTE, DDP, OURS)}
        alone = made[COMPUTE].seconds(task["turn"])
        for ratio in task["ratios"]:
            rate = bits / (ratio * alone)
            set_rate(rate)
            (found,) = predict(gm, costs, network_named(f"{rate / 1e6:.3f}mbit"), [HOSTS])
            predicted = {COMPUTE: found.compute, DDP: found.ddp[25.0], OURS: found.ours}
            turns = [
                {name: training.seconds(task["turn"]) for name, training in made.items()}
                for _ in range(task["rounds"])
            ]
            measured = {name: fmean(turn[name] for turn in turns) for name in made}
            if reporter.rank == 0:
                reporter.send(
                    "link", ratio=ratio, rate=rate, predicted=predicted, measured=measured
                )


def meet(folder: Path, reporter: Reporter) -> None:
    """Waits for the other host without a process group, which an estimate does not have."""
    store = dist.FileStore(str(folder / "meeting"), reporter.ranks)
    store.set(str(reporter.rank), "")
    store.wait([str(rank) for rank in range(reporter.ranks)])


# ------------------------------------------------------------------------------------ launching


def measure(options: argparse.Namespace) -> Iterator[Figures]:
    """Measures one row for each model and link."""
    sizes = ("layers", "tokens", "images", "pixels", "ratios", "rounds", "turn")
    task: Figures = {name: getattr(options, name) for name in sizes}
    for model in options.models:
        here = task | {"model": model}
        for event in ranks.run_work(__file__, here, HOSTS, UNSHAPED):
            yield {"model": model, **event}


def table(row: Figures) -> Table:
    """The table of predicted over measured seconds of one model on one link."""
    made = Table(
        *("step", "predicted, ms", "measured, ms", "ratio"),
        title=f"{row['model']}, two hosts, {row['rate'] / 1e6:.0f} Mbit/s, communication / compute"
        f" set to {row['ratio']:g}",
    )
    for name, measured in row["measured"].items():
        predicted = row["predicted"][name]
        seconds = (f"{1e3 * predicted:.0f}", f"{1e3 * measured:.0f}")
        made.add_row(name, *seconds, f"{predicted / measured:.2f}")
    return made


def main() -> None:
    """Measures, prints a table and writes files."""
    parser = ranks.parser(__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    help_ = "communication / compute that the link is set for"
    parser.add_argument("--ratios", nargs="+", type=float, default=[0.5, 1.0, 2.0], help=help_)
    parser.add_argument("--layers", type=int, default=12, help="of GPT-2")
    parser.add_argument("--tokens", type=int, default=128, help="of the text that GPT-2 reads")
    parser.add_argument("--images", type=int, default=4, help="that ResNet-50 sees")
    parser.add_argument("--pixels", type=int, default=112, help="along an edge of an image")
    parser.add_argument("--rounds", type=int, default=2, help="turns of each variant and link")
    parser.add_argument("--turn", type=int, default=2, help="steps of a turn")
    options = parser.parse_args()
    if ranks.works(options, work):
        return
    ranks.tabulate(options, measure(options), table)


if __name__ == "__main__":
    main()
