"""Largest difference between a captured step and eager DDP, per model and optimizer, by ranks.

    python benchmarks/exactness.py --ranks 1 2 3 --steps 20
    python benchmarks/exactness.py --ranks 2 --pipeline default

Every model of `tests/zoo.py` runs with AdamW, and every optimizer with a GPT (tied embeddings,
dropout). Parameters, buffers, gradients, optimizer state and losses are compared after each step;
the number is the largest difference of any element in any step, 0 where all bits are the same.

With `--pipeline` (a pipeline, or a name such as "small buckets" from `tests/scenario.py`) passes
rewrite the graph, and each training is a scenario in place of `--steps` equal steps: work is left
in flight over several steps, with flushes, a checkpoint, a batch of another size, accumulation and
a learning rate schedule in between.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from rich.console import Console
from rich.table import Table

from gloo import Pool, RankError, pool
from scenario import NO_ACCUMULATION, PIPELINES, Scenario
from twins import SEED, Twins, world
from zoo import MODELS, OPTIMIZERS

CASES = [
    *((model, "adamw-foreach") for model in MODELS),
    *(("gpt", optimizer) for optimizer in OPTIMIZERS if optimizer != "adamw-foreach"),
]


def largest_gap(rank: int, ranks: int, steps: int, model: str, optimizer: str) -> float:
    """Train both twins on this rank's batches; the largest difference seen."""
    twins = Twins(
        lambda: world(model=model, optimizer=optimizer),
        ddp=ranks > 1,
        seed=SEED + rank,
        exact=False,
    )
    for step in range(steps):
        twins.step(*MODELS[model].batch(1000 * rank + step))
    twins.finish()
    return twins.largest_gap


def gap_of_scenario(rank: int, model: str, optimizer: str, pipeline: str) -> float:
    """The same for a scenario under a pipeline."""
    scenario = Scenario(rank, model, optimizer, pipeline=pipeline, exact=False)
    scenario.run(accumulates=model not in NO_ACCUMULATION)
    return scenario.twins.largest_gap


def measure(processes: Pool, ranks: int, steps: int, pipeline: str | None) -> dict[str, float]:
    """The largest difference on any rank, per case; nan where DDP itself raises, as it does for
    reentrant checkpoints."""
    found = {}
    for model, optimizer in CASES:
        try:
            if pipeline is None:
                gaps = processes.run(largest_gap, ranks, steps, model, optimizer, timeout=300.0)
            else:
                gaps = processes.run(gap_of_scenario, model, optimizer, pipeline, timeout=300.0)
        except RankError as error:
            if "Expected to mark a variable ready only once" not in str(error):
                raise
            gaps = [float("nan")]
        found[f"{model}, {optimizer}"] = max(gaps)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--pipeline", help="see above")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = {}
    for ranks in options.ranks:
        with pool(ranks) as processes:
            pipeline = PIPELINES.get(options.pipeline, options.pipeline)
            found[ranks] = measure(processes, ranks, options.steps, pipeline)

    table = Table("model, optimizer", *(f"{ranks} rank(s)" for ranks in options.ranks))
    for model, optimizer in CASES:
        case = f"{model}, {optimizer}"
        table.add_row(case, *(f"{found[ranks][case]:.2g}" for ranks in options.ranks))
    Console().print(table)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
