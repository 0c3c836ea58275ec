"""One part of `compute.py`, in a process of its own: `compute_worker.py TASK FILE`.

The task is JSON: the part, a model, and what else the part takes. The figures go to the file.
"""

from __future__ import annotations

import json
import logging
import math
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import torch
from compute_models import WORKLOADS, Batch, Workload, has_dropout
from compute_numerics import numerics
from compute_variants import EAGER, INDUCTOR, INDUCTOR_RANDOM, VARIANTS, Training
from spread import Figures
from step_memory import tensor_peak

import graphopt
from graphopt.lowering.compiler import Options
from graphopt.lowering.regions import mark_regions

WARM_UP_STEPS = 3
TURN_SECONDS = 0.12
"""A turn has as many steps as eager PyTorch does in this time, and at least two."""
MOST_STEPS = 20
OTHER_OPTIMIZERS = ("foreach", "loop")


def steps(task: Figures) -> Figures:
    """Seconds per step, of all variants in turns in this process; and what was lowered."""
    workload = WORKLOADS[task["model"]]
    data = batches(workload)
    trainings, failed = working_trainings(workload, [next(data) for _ in range(WARM_UP_STEPS)])
    turn = steps_per_turn(trainings[EAGER], data)
    seconds: dict[str, list[float]] = {name: [] for name in trainings}
    for number in range(task["rounds"]):
        given = [next(data) for _ in range(turn)]
        for name in turns(list(trainings), number):
            seconds[name].append(trainings[name].seconds(given))
    found = {"seconds": seconds, "failed": failed, "steps_per_turn": turn}
    return found | {"lowered": lowered(trainings[INDUCTOR].step)}


def working_trainings(
    workload: Workload, data: list[Batch]
) -> tuple[dict[str, Training], dict[str, str]]:
    """Every variant that can be compiled, after its first steps; the reasons of the others."""
    variants = {name: (name, "fused") for name in VARIANTS}
    if has_dropout(workload.build()):
        variants[INDUCTOR_RANDOM] = (INDUCTOR_RANDOM, "fused")
    variants |= {f"{INDUCTOR}, {kind}": (INDUCTOR, kind) for kind in OTHER_OPTIMIZERS}
    trainings, failed = {}, {}
    for name, (variant, optimizer) in variants.items():
        training = Training(workload, variant, optimizer)
        try:
            training.warm_up(data)
        except Exception as error:
            if not variant.startswith("torch.compile"):
                raise
            failed[name] = f"{type(error).__name__}: {error}".splitlines()[0]
        else:
            trainings[name] = training
    return trainings, failed


def steps_per_turn(eager: Training, data: Iterator[Batch]) -> int:
    """How many steps a turn has, of every variant alike."""
    seconds = eager.seconds([next(data) for _ in range(2)])
    return min(MOST_STEPS, max(2, math.ceil(TURN_SECONDS / seconds)))


def turns(names: list[str], number: int) -> list[str]:
    """The order in a round: each begins with another variant, every other one runs backwards."""
    start = number % len(names)
    return [*names[start:], *names[:start]][:: 1 if number % 2 == 0 else -1]


def lowered(step: graphopt.TrainStep) -> Figures:
    """How much of the steady graph is compiled.

    Counted are calls of ATen operators in forward, loss and backward, without free ones: views of
    what lies outside regions, and constants, which are computed wherever they are needed.
    """
    graph = step.graph_module.graph
    found = mark_regions(graph, min_ops=Options().min_ops)
    inside = set(chain.from_iterable(found.nodes))
    compute = [
        node
        for node in graph.nodes
        if isinstance(node.target, torch._ops.OpOverload)
        and node.target.namespace == "aten"
        and node.meta["phase"] in ("forward", "backward")
    ]
    counted = [node for node in compute if node not in found.free]
    kept = Counter(str(node.target) for node in counted if node not in inside)
    return {
        "nodes": len(counted),
        "lowered": len(counted) - kept.total(),
        "free": len(compute) - len(counted),
        "kept": dict(kept.most_common()),
        "regions": len(found.nodes),
        "fell_back": [str(region.failure) for region in step.lowered if region.failure],
    }


def start(task: Figures) -> Figures:
    """Seconds until the second step of a variant is done."""
    workload = WORKLOADS[task["model"]]
    data = batches(workload)
    training = Training(workload, task["variant"])
    return {"seconds": training.warm_up([next(data) for _ in range(2)])}


def memory(task: Figures) -> Figures:
    """Peak bytes of tensors of a variant, from building it to steady steps."""
    workload = WORKLOADS[task["model"]]
    data = batches(workload)

    def train() -> None:
        training = Training(workload, task["variant"])
        training.warm_up([next(data) for _ in range(WARM_UP_STEPS)])
        training.seconds([next(data) for _ in range(2)])

    return {"peak": tensor_peak(train)}


def batches(workload: Workload) -> Iterator[Batch]:
    """Random batches without end."""
    generator = torch.Generator().manual_seed(0)
    while True:
        yield workload.batch(generator)


PARTS = {"steps": steps, "start": start, "memory": memory, "numerics": numerics}


def main() -> None:
    """Do the task, write the figures."""
    task, path = json.loads(sys.argv[1]), Path(sys.argv[2])
    warnings.simplefilter("ignore")
    logging.getLogger("torch._dynamo").setLevel(logging.ERROR)
    path.write_text(json.dumps(PARTS[task["part"]](task)))


if __name__ == "__main__":
    main()
