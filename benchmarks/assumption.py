"""What a decision by value costs: where it goes as captured, and where it goes the other way.

    python benchmarks/assumption.py
    python benchmarks/assumption.py --model mlp --decision norm --ranks 3

What the figures mean and how they are taken: benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import ranks
import torch
import torch.distributed as dist
from ranks import WARM_UP_STEPS
from rich.console import Console
from rich.table import Table
from spread import Figures, Row, show_spread, spread
from step_models import MODELS, OPTIMIZERS, batch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import graphopt
from graphopt.demo.compare import compare
from graphopt.demo.launch import Event, Reporter
from graphopt.demo.replica import RandomState

CALLS = ("as captured", "otherwise", "the next one")
"""The calls of a turn of a step that decides: the second finds a value that is not finite."""


def loss_of(model: nn.Module, inputs: Tensor, targets: Tensor, weight: Tensor) -> Tensor:
    return F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten()) * weight


def updated(optimizer: Optimizer, loss: Tensor) -> Tensor:
    """Use the gradients, and drop them."""
    optimizer.step()
    optimizer.zero_grad()
    return loss


def plain(
    model: nn.Module, optimizer: Optimizer, inputs: Tensor, targets: Tensor, weight: Tensor
) -> Tensor:
    """A step that decides nothing."""
    loss = loss_of(model, inputs, targets, weight)
    loss.backward()
    return updated(optimizer, loss)


def by_loss(
    model: nn.Module, optimizer: Optimizer, inputs: Tensor, targets: Tensor, weight: Tensor
) -> Tensor:
    """Skips the backward and the update."""
    loss = loss_of(model, inputs, targets, weight)
    if not torch.isfinite(loss):
        return loss
    loss.backward()
    return updated(optimizer, loss)


def plain_norm(
    model: nn.Module, optimizer: Optimizer, inputs: Tensor, targets: Tensor, weight: Tensor
) -> Tensor:
    """A step that clips and decides nothing."""
    loss = loss_of(model, inputs, targets, weight)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    return updated(optimizer, loss)


def by_norm(
    model: nn.Module, optimizer: Optimizer, inputs: Tensor, targets: Tensor, weight: Tensor
) -> Tensor:
    """Skips the update alone; all ranks have the norm of the averaged gradients alike."""
    loss = loss_of(model, inputs, targets, weight)
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    if torch.isfinite(norm):
        optimizer.step()
    optimizer.zero_grad()
    return loss


DECISIONS: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    "loss": (plain, by_loss),
    "norm": (plain_norm, by_norm),
}


class Training:
    """A model in training, with its own random numbers.

    Args:
        compiled: by graphopt; else eagerly.
        decides: by value in each call.
    """

    def __init__(self, task: Figures, compiled: bool, decides: bool) -> None:
        torch.manual_seed(0)
        self.model = MODELS[task["model"]]()
        kind, options = OPTIMIZERS["adamw"]
        self.optimizer = kind(self.model.parameters(), **options)
        self.trained = self.model
        self.step: Callable[..., Tensor] = DECISIONS[task["decision"]][decides]
        if compiled:
            self.step = graphopt.compile(self.step)
        elif dist.is_initialized():
            self.trained = DistributedDataParallel(self.model, gradient_as_bucket_view=True)
        self.random = RandomState(1, torch.device("cpu"))

    def seconds(self, given: tuple[Tensor, Tensor], weight: float) -> float:
        """CPU seconds of one call, until nothing is in flight."""
        self.random.restore()
        factor = torch.tensor(weight)
        start = time.process_time()
        self.step(self.trained, self.optimizer, *given, factor)
        if isinstance(self.step, graphopt.TrainStep):
            self.step.flush()
        seconds = time.process_time() - start
        self.random.save()
        return seconds


# -------------------------------------------------------------------------------- on each rank


def work(task: Figures, folder: Path) -> None:
    """What a process does: turns of all variants."""
    reporter = Reporter(folder)
    with ranks.process_group(folder, reporter):
        reporter.send("turns", **turns(task))


def turns(task: Figures) -> Figures:
    """Eager and graphopt, with and without the decision, in turns on the same batches."""
    variants = [(compiled, decides) for compiled in (False, True) for decides in (False, True)]
    trainings = {variant: Training(task, *variant) for variant in variants}
    rank = dist.get_rank() if dist.is_initialized() else 0
    generator = torch.Generator().manual_seed(rank)
    seconds: dict[str, list[list[float]]] = {name_of(*variant): [] for variant in variants}
    for number in range(WARM_UP_STEPS + task["turns"]):
        given = [batch(task["model"], generator) for _ in CALLS]
        alone = not dist.is_initialized()
        bad = float("nan") if alone or rank == 1 else 1.0
        for variant in variants[number % 4 :] + variants[: number % 4]:
            if dist.is_initialized():
                dist.barrier()
            weights = (1.0, bad, 1.0) if variant[1] else (1.0, 1.0, 1.0)
            training = trainings[variant]
            pairs = zip(given, weights, strict=True)
            seconds[name_of(*variant)].append([training.seconds(*pair) for pair in pairs])
    eager, captured = trainings[False, True], trainings[True, True]
    same = compare((eager.model, eager.optimizer), (captured.model, captured.optimizer))
    assert isinstance(captured.step, graphopt.TrainStep)
    return {
        "seconds": seconds,
        "captures": len(captured.step.captures),
        "differing_tensors": len(same.differing),
    }


def name_of(compiled: bool, decides: bool) -> str:
    return f"{'graphopt' if compiled else 'eager'}{', decides' if decides else ''}"


# --------------------------------------------------------------------------------- measurements


def figures_of(results: list[Event]) -> Figures:
    """CPU seconds of all ranks together, and ratios to a step of the same turn without decision."""
    seconds = {
        name: [
            [sum(call) for call in zip(*turn, strict=True)]
            for turn in zip(*(r["seconds"][name] for r in results), strict=True)
        ][WARM_UP_STEPS:]
        for name in results[0]["seconds"]
    }
    ratios = {
        who: {
            call: spread([turn[i] / median(before) for turn, before in pairs])
            for i, call in enumerate(CALLS)
        }
        for who in ("eager", "graphopt")
        for pairs in [list(zip(seconds[f"{who}, decides"], seconds[who], strict=True))]
    }
    return {
        "seconds": seconds,
        "ratios": ratios,
        "captures": [result["captures"] for result in results],
        "differing_tensors": sum(result["differing_tensors"] for result in results),
    }


def rows_of(figures: Figures, turns: int) -> list[Row]:
    """The figures as a table's rows."""
    rows = [
        (f"{who}: {call}", show_spread(figures["ratios"][who][call], turns))
        for call in CALLS
        for who in ("eager", "graphopt")
    ]
    for who in ("eager", "graphopt"):
        whole = median(median(turn) for turn in figures["seconds"][who])
        rows.append((f"a step that decides nothing, {who}", f"{1e3 * whole:.2f} ms CPU"))
    rows.append(("graphs", ", ".join(map(str, figures["captures"]))))
    rows.append(("tensors that differ from eager's", str(figures["differing_tensors"])))
    return rows


# -------------------------------------------------------------------------------- command line


def parse() -> argparse.Namespace:
    """The options."""
    parser = ranks.parser(__doc__)
    parser.add_argument("--ranks", type=int, default=1, help="several: with --decision norm")
    parser.add_argument("--model", choices=MODELS, default="gpt")
    parser.add_argument("--decision", choices=DECISIONS, default="loss", help="what decides")
    parser.add_argument("--turns", type=int, default=20, help="of three calls each, at least 2")
    options = parser.parse_args()
    if options.ranks > 1 and options.decision == "loss":
        parser.error(
            "--decision loss skips the backward on the rank whose loss is not finite, where the"
            " others wait for it: with several ranks give --decision norm"
        )
    return options


def main() -> None:
    """Measure what the command line asks for and print it."""
    options = parse()
    if ranks.works(options, work):
        return
    task = {name: getattr(options, name) for name in ("model", "decision", "turns")}
    with ranks.failures_shown():
        figures = figures_of(ranks.run_work(__file__, task, options.ranks))
    title = f"{options.model}, decides by the {options.decision}, ranks: {options.ranks}"
    table = Table("", "CPU time, a step that decides nothing: 1", title=title)
    for row in rows_of(figures, options.turns):
        table.add_row(*row)
    Console().print(table)
    if options.json:
        options.json.write_text(json.dumps({"torch": torch.__version__, title: figures}, indent=2))


if __name__ == "__main__":
    main()
