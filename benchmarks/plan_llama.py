"""Plans a sharded step of Llama 3 with 8 billion parameters, without weights or devices.

    python benchmarks/plan_llama.py
    python benchmarks/plan_llama.py --layers 8 --ranks 512 --stages 3 --inductor 0

For each number of ranks and stage, in a process of its own that believes in an H100: seconds of CPU
for capture, expansion, passes and proofs; then simulated seconds of a step after the default
pipeline, beside the larger of its compute and its communication ("bound"), and the bytes that it
holds.
All tables take some minutes of CPU; each is printed when it is done.

With stage 3 the scheduler of Inductor orders the same captured graph, with the same costs, in the
memory that the default pipeline takes, or that the captured graph does, if it is done within
`--inductor` seconds of CPU.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import figures
import torch
from figures import Figures, seconds_of
from rich.table import Table
from torch import Tensor, fx

import graphopt
from graphopt.testing import pretended


def step(model: Any, optimizer: Any, words: Tensor, following: Tensor) -> Tensor:
    """Runs one training step."""
    loss: Tensor = model(words, following)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def planned(options: Figures) -> Figures:
    """Captures, parallelizes and schedules one step; returns its figures."""
    from graphopt.iter_graph.graph import copy_graph
    from graphopt.parallel.parallelize import parallelize
    from graphopt.stages.pipelines import default_pipeline
    from graphopt.tracing.call import Call
    from graphopt.tracing.capture import capture_call, communication_for
    from graphopt.verify.equivalence import Proof
    from graphopt.verify.sharding.marker_meaning import sharing_problems

    call, kind = Call(step, _arguments(options), {}), graphopt.ZeRO(stage=options["stage"])
    seconds: dict[str, float] = {}
    seconds["capture"], captured = seconds_of(
        lambda: capture_call(call, communication_for(kind), lasts=True)
    )
    gm = captured.graph_module
    given, _ = copy_graph(gm.graph)
    seconds["expand"], _ = seconds_of(lambda: parallelize(gm, kind))
    seconds["proof"], problems = seconds_of(
        lambda: list(sharing_problems(kind.meaning, given, gm, Proof()))
    )
    assert not problems, problems
    expanded = fx.GraphModule(gm, copy_graph(gm.graph)[0])
    module = graphopt.IterGraphModule(gm)
    passes = graphopt.PassManager(default_pipeline())
    seconds["passes, proven"], _ = seconds_of(lambda: passes.run(module))
    found = {"nodes": len(expanded.graph.nodes), "seconds": seconds}
    found |= {"given": _simulated(expanded), "default": _simulated(module)}
    if options["limit"] and options["stage"] == 3:
        held = max(0, found["default"]["peak"] - found["given"]["peak"])
        found["inductor"] = _by_inductor(expanded, held, options["limit"])
    return found


def _arguments(options: Figures) -> tuple[Any, ...]:
    sys.path.insert(0, str(Path(__file__).parent))
    from llama_model import Llama, Sizes

    sizes = Sizes(layers=options["layers"], checkpointed=options["checkpointed"])
    with torch.device("cuda"):
        model = Llama(sizes).to(torch.bfloat16)
        words = torch.zeros(options["batch"], options["length"], dtype=torch.long)
    return model, torch.optim.AdamW(model.parameters(), fused=True), words, words


def _simulated(gm: fx.GraphModule) -> Figures:
    step = graphopt.simulate(gm)
    return {
        "seconds": step.step_seconds,
        "compute": step.compute_seconds,
        "communication": step.comm_seconds,
        "bound": step.bound_seconds,
        "peak": step.peak_bytes,
        "collectives": len(step.collectives),
    }


def _too_long(*_: object) -> None:
    raise TimeoutError("not done in time")


def _by_inductor(gm: fx.GraphModule, held: int, limit: float) -> Figures | str:
    """The order that Inductor's scheduler finds within a memory limit."""
    from torch._inductor.fx_passes import overlap_scheduling
    from torch.utils import _runtime_estimation

    from graphopt.cost import default_cost_model
    from graphopt.graph_utils import is_collective

    costs = default_cost_model(gm.graph)

    def milliseconds(node: fx.Node, _: int | None = None) -> float:
        if is_collective(node):
            return 1e3 * costs.transfer(node).seconds
        return 1e3 * costs.compute_seconds(node)

    # Which it asks before the costs that it is given, and triton asks nvidia-smi.
    _runtime_estimation.get_gpu_dram_gbps = lambda: 3350
    _runtime_estimation.get_device_tflops = lambda dtype: 989
    signal.signal(signal.SIGPROF, _too_long)
    signal.setitimer(signal.ITIMER_PROF, limit)
    try:
        ordered = overlap_scheduling.schedule_overlap_bucketing(
            gm,
            collective_bucketing=True,
            compute_estimator="analytical",
            custom_runtime_estimation=milliseconds,
            max_memory_increase_gb=held / 2**30,
            max_memory_increase_ratio=None,
        )
    except Exception as error:  # private code, given a graph that it was not written for
        return f"{type(error).__name__}: {str(error).splitlines()[0][:100]}"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return _simulated(ordered)


def table(found: Figures) -> Table:
    """The table of figures."""
    rows = []
    for name in ("given", "default", "inductor"):
        row = found.get(name)
        if isinstance(row, str):
            rows.append({"": f"{name}: {row}"})
        elif row:
            names = {"step ms": "seconds", "compute": "compute", "sending": "communication"}
            rows.append(
                {"": name}
                | {column: f"{1e3 * row[key]:.0f}" for column, key in names.items()}
                | {"/ bound": f"{row['seconds'] / row['bound']:.3f}"}
                | {"peak GiB": f"{row['peak'] / 2**30:.1f}", "collectives": row["collectives"]}
            )
    seconds = (f"{name} {taken:.1f}" for name, taken in found["seconds"].items())
    title = f"{found['ranks']} ranks, stage {found['stage']}, {found['nodes']} nodes"
    return figures.table(rows, title=title, caption=f"seconds of CPU: {', '.join(seconds)}")


def planned_rows(given: argparse.Namespace) -> Iterator[Figures]:
    """Plans a step for each number of ranks and stage."""
    for ranks, stage in product(given.ranks, given.stages):
        options = {name: getattr(given, name) for name in ("layers", "batch", "length")}
        options |= {
            "checkpointed": not given.no_checkpoints,
            "ranks": ranks,
            "stage": stage,
            "limit": given.inductor,
        }
        yield options | pretended("cuda:90", ranks=ranks).run(planned, options)


def main() -> None:
    """Plans, prints tables and writes a file."""
    parser = figures.parser(__doc__)
    parser.add_argument("--ranks", nargs="+", type=int, default=[64, 512])
    parser.add_argument("--stages", nargs="+", type=int, choices=[1, 3], default=[1, 3])
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--batch", type=int, default=1, help="of each rank")
    parser.add_argument("--length", type=int, default=8192, help="words of each example")
    parser.add_argument("--no-checkpoints", action="store_true", help="keep all activations")
    parser.add_argument("--inductor", type=float, default=120, help="seconds for its scheduler")
    given = parser.parse_args()
    figures.tabulate(given, planned_rows(given), table)


if __name__ == "__main__":
    main()
