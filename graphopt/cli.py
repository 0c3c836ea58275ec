"""The `graphopt` command. Commands import what they run, so that `--help` needs no torch."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

DEMO_EXAMPLES = """
Examples:

    graphopt demo

    graphopt demo --ranks 1 --steps 20

    graphopt demo --link 200mbit

    graphopt demo --device cuda --ranks 2
"""

PASSES_EXAMPLES = """
Examples:

    graphopt passes

    graphopt passes --json

    graphopt passes --import my_passes.py
"""

OPTIMIZE_EXAMPLES = """
Examples:

    graphopt optimize step.pt --pipeline default --out optimized.pt

    graphopt optimize step.pt --pipeline "comm_fusion_with_concat(bucket_size_mb=5)" --dump dumps

    graphopt optimize graphopt-repro/01.pt --pipeline schedule_comm_wait

    graphopt optimize step.pt --import my_passes.py --pipeline my_pass

A graph is saved by `graphopt.saved.save_graph(train_step.graph_module, "step.pt")`.
"""

BISECT_EXAMPLES = """
Examples:

    graphopt bisect step.pt --pipeline "my_pass -> comm_fusion_with_concat" --import my_passes.py

    graphopt bisect step.pt --pipeline default --out before.pt

    graphopt bisect --pipeline default -- torchrun --nproc-per-node 2 train.py

The command behind `--` runs with GRAPHOPT_STOP_AFTER=n, and says by its exit status whether it is
as it should be. Its steps have to use the pipeline that is named.
"""

SHOW_EXAMPLES = """
Examples:

    graphopt show step.pt

    graphopt show step.pt --phase communication

    graphopt show step.pt --diff optimized.pt
"""

VIEW_EXAMPLES = """
Examples:

    graphopt view step.pt

    graphopt view optimized.pt --dumps dumps -o step.html

    graphopt view trace.json

    graphopt view step.pt --dot
"""

LOWER_EXAMPLES = """
Examples:

    graphopt lower step.pt --target cuda:90 --out kernels

    graphopt lower step.pt --target cuda:80 --min-ops 3 --out kernels

A graph is saved by `graphopt.saved.save_graph(train_step.graph_module, "step.pt")`.
"""

TRACE_EXAMPLES = """
Examples:

    graphopt trace --ranks 4 --microbatches 8

    graphopt trace --schedule zbv --stages 4 --forward 1 --backward 2 --transfer 0.1

    graphopt trace --schedule 1f1b --forward 1,1,2,1 --backward 2,2,4,2 --out pictures

    graphopt trace my_model.py:make_pipe --ranks 2 --measure --out pictures

make_pipe(stages) returns what graphopt.pipelining.pipeline makes, with so many stages. It may also
take nothing.
"""

app = typer.Typer(
    help="Captures a whole PyTorch training step as one graph and runs it bit for bit like eager.",
    epilog="`python -m graphopt` is the same command. Each command has --help with examples.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)


class Device(str, Enum):
    """Where ranks compute."""

    cpu = "cpu"
    cuda = "cuda"


class Backend(str, Enum):
    """What carries collectives."""

    gloo = "gloo"
    nccl = "nccl"


class Phase(str, Enum):
    """Parts of a training step."""

    forward = "forward"
    backward = "backward"
    communication = "communication"
    optimizer = "optimizer"


class Verify(str, Enum):
    """How much of each pass is checked."""

    off = "off"
    dependencies = "dependencies"
    equivalence = "equivalence"


GraphFile = Annotated[
    Path, typer.Argument(help="A graph saved by graphopt.saved.save_graph.", metavar="FILE")
]

Imports = Annotated[
    list[str] | None,
    typer.Option(
        "--import",
        help="Import passes from a file (my_passes.py) or a module first. May be repeated.",
        metavar="MODULE",
    ),
]


def _not_empty(pipeline: str | None) -> str | None:
    if pipeline is not None and not pipeline.strip():
        raise typer.BadParameter("names no pass; `none` applies none, `default` the usual ones")
    return pipeline


def _print_version(wanted: bool) -> None:
    if not wanted:
        return
    from graphopt import __version__

    typer.echo(f"graphopt {__version__}")
    raise typer.Exit()


@app.callback()
def main(
    show_version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """What all commands share."""


@app.command(epilog=DEMO_EXAMPLES)
def demo(
    ranks: Annotated[int, typer.Option(min=1, help="Processes to train with.")] = 2,
    steps: Annotated[int, typer.Option(min=1, help="Training steps.")] = 60,
    device: Annotated[Device, typer.Option(help="Where to train.")] = Device.cpu,
    backend: Annotated[
        Backend | None,
        typer.Option(help="Communication backend. Default: gloo on cpu, nccl on cuda."),
    ] = None,
    pipeline: Annotated[
        str, typer.Option(help="Passes that graphopt applies.", callback=_not_empty)
    ] = "default",
    link: Annotated[
        str | None,
        typer.Option(
            help="Emulate a slow link between ranks, for example 200mbit. Linux, needs iproute2."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of weights, data order and dropout.")] = 0,
) -> None:
    """Train a small GPT twice on local ranks, with eager DDP and with graphopt, and compare.

    Both train the same model on the same text with the same step function, in turns, so that
    their timings can be compared and, on one or two ranks, their parameters must agree bit for
    bit: otherwise the exit status is 1.
    """
    chosen = backend or (Backend.nccl if device is Device.cuda else Backend.gloo)
    if chosen is Backend.nccl and device is Device.cpu:
        raise typer.BadParameter(
            "nccl moves GPU memory only; add --device cuda, or use gloo", param_hint="--backend"
        )
    from graphopt.demo.main import run_demo

    status = run_demo(
        ranks=ranks,
        steps=steps,
        device=device.value,
        backend=chosen.value,
        pipeline=pipeline,
        link=link,
        seed=seed,
    )
    raise typer.Exit(status)


@app.command(epilog=PASSES_EXAMPLES)
def passes(
    modules: Imports = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """List all passes: what each does, its options, what it needs, whether it keeps all bits."""
    from graphopt.commands.passes import run_passes

    run_passes(modules or [], as_json)


@app.command(epilog=OPTIMIZE_EXAMPLES)
def optimize(
    file: GraphFile,
    pipeline: Annotated[
        str | None,
        typer.Option(
            help="Passes to apply: `name(option=value) -> name`, `default` or `none`.",
            callback=_not_empty,
        ),
    ] = None,
    stages: Annotated[
        str | None,
        typer.Option(
            help="In place of passes, stages of the compiler: `lower -> finalize`.",
            callback=_not_empty,
        ),
    ] = None,
    modules: Imports = None,
    out: Annotated[Path | None, typer.Option(help="Save the resulting graph here.")] = None,
    dump: Annotated[
        Path | None, typer.Option(help="Write the graph and its changes after each pass here.")
    ] = None,
    disable: Annotated[
        list[str] | None, typer.Option(help="Leave out a pass of this name. May be repeated.")
    ] = None,
    stop_after: Annotated[
        int | None, typer.Option(min=0, help="Stop after so many passes.")
    ] = None,
    verify: Annotated[Verify | None, typer.Option(help="How much of each pass is checked.")] = None,
) -> None:
    """Apply passes to a saved graph and print what each one did.

    The exit status is 1 when a pass fails or is refused, and 2 when the file or the pipeline cannot
    be used.
    """
    level = None if verify is None else verify.value
    if (pipeline is None) == (stages is None):
        raise typer.BadParameter("give either --pipeline or --stages")
    if stages is not None:
        from graphopt.commands.stages import run_stages

        run_stages(file, stages, out=out, dump=dump, verify=level)
        return
    from graphopt.commands.optimize import run_optimize

    assert pipeline is not None
    run_optimize(
        file,
        pipeline,
        modules=modules or [],
        out=out,
        dump=dump,
        disable=disable or [],
        stop_after=stop_after,
        verify=level,
    )


@app.command(epilog=BISECT_EXAMPLES, context_settings={"allow_interspersed_args": True})
def bisect(
    pipeline: Annotated[
        str,
        typer.Option(
            help="The passes among which one is to blame: as of `optimize`.", callback=_not_empty
        ),
    ],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            help="A graph saved by graphopt.saved.save_graph; or, behind `--`, a command.",
            metavar="FILE | -- COMMAND ...",
            show_default=False,
        ),
    ] = None,
    modules: Imports = None,
    out: Annotated[
        Path | None, typer.Option(help="Save the graph before the pass to blame here.")
    ] = None,
) -> None:
    """Find the first pass after which a graph computes something else, or a command fails.

    A saved graph is compared with what passes make of it: no ranks, model or GPU are needed.

    The exit status is 0 also where a pass is found, 1 when a pass raises on the way, and 2 when the
    file or the pipeline cannot be used.
    """
    from graphopt.commands.bisect import run_bisect

    given = arguments or []
    is_graph = len(given) == 1 and given[0].endswith(".pt")
    run_bisect(
        pipeline,
        file=Path(given[0]) if is_graph else None,
        modules=modules or [],
        command=[] if is_graph else given,
        out=out,
    )


@app.command(epilog=SHOW_EXAMPLES)
def show(
    file: GraphFile,
    phase: Annotated[Phase | None, typer.Option(help="Show this part of the step only.")] = None,
    diff: Annotated[
        Path | None, typer.Option(help="Show how the graph in this file differs.", metavar="OTHER")
    ] = None,
) -> None:
    """Print a saved graph, or the difference between two, in colour on a terminal.

    Rows are grouped by phase and marked where collectives are launched and waited for, state is
    updated, and nodes run one iteration late. Below, for each collective: bytes, parameters, who
    waits for it and how long it takes, by presets (graphopt.cost), which know neither your device
    nor your link.
    """
    if phase is not None and diff is not None:
        raise typer.BadParameter("--phase does not go with --diff", param_hint="--phase")
    from graphopt.commands.show import run_show

    run_show(file, None if phase is None else phase.value, diff)


@app.command(epilog=VIEW_EXAMPLES)
def view(
    file: Annotated[
        Path,
        typer.Argument(
            help="A graph saved by graphopt.saved.save_graph, or a trace (FILE.json).",
            metavar="FILE",
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Write here. Default: FILE.html.", show_default=False),
    ] = None,
    dumps: Annotated[
        Path | None,
        typer.Option(
            help="Show what passes changed by the files in this folder of `optimize --dump`, in"
            " place of what the graph's records keep of it."
        ),
    ] = None,
    dot: Annotated[bool, typer.Option("--dot", help="Write FILE.dot, for Graphviz.")] = False,
) -> None:
    """Write one page of HTML that shows a step: phases, modules, collectives, passes, timeline.

    The page needs nothing else, and draws only what is in view. Of a trace in the trace event
    format, as `trace --out` and `Timeline.save_chrome_trace` write, it shows the timeline.
    """
    if dot and (dumps is not None or file.suffix == ".json"):
        raise typer.BadParameter("shows a graph alone", param_hint="--dot")
    from graphopt.commands.view import run_view

    run_view(file, out, dumps, dot=dot)


@app.command(epilog=TRACE_EXAMPLES)
def trace(
    pipe: Annotated[
        str | None,
        typer.Argument(
            help="A function that makes a Pipe: module:function or file.py:function.",
            metavar="FUNCTION",
            show_default=False,
        ),
    ] = None,
    schedule: Annotated[
        str,
        typer.Option(
            help="gpipe, 1f1b, interleaved, looped-bfs, zero-bubble, zbv, dualpipev; all for all"
            " of them; or a file that torch's schedules wrote (FILE.csv)."
        ),
    ] = "all",
    microbatches: Annotated[int, typer.Option(min=1, help="Microbatches of a step.")] = 8,
    ranks: Annotated[
        int | None, typer.Option(min=1, help="Processes. Default: as the stages need, or 4.")
    ] = None,
    stages: Annotated[
        int | None,
        typer.Option(min=1, help="Stages of all ranks. Default: one or two on each rank."),
    ] = None,
    forward: Annotated[
        str | None,
        typer.Option(
            help="Seconds of a microbatch's forward on one rank, for all of its stages; or of each"
            " stage, separated by commas. Default: 1.",
            show_default=False,
        ),
    ] = None,
    backward: Annotated[
        str | None, typer.Option(help="The same of the backward. Default: 2.", show_default=False)
    ] = None,
    transfer: Annotated[
        float, typer.Option(min=0.0, help="Seconds until another rank has what is sent to it.")
    ] = 0.0,
    measure: Annotated[
        bool, typer.Option("--measure", help="Also run the pipe on local gloo ranks.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Write NAME.html and Chrome traces (NAME.predicted.json) here.", metavar="DIR"
        ),
    ] = None,
) -> None:
    """Show when each stage of a pipeline runs, and how long ranks are idle (the bubble share).

    Predicted from how long stages take, in the order in which torch's schedules run them. Stages of
    a pipe are measured one by one in this process; without a pipe, their seconds are given.

    The exit status is 1 when a rank fails, and 2 when the schedule or the pipe cannot be used.
    """
    from graphopt.commands.trace import Request, run_trace

    run_trace(
        Request(
            pipe=pipe,
            schedule=schedule,
            microbatches=microbatches,
            ranks=ranks,
            stages=stages,
            forward=_seconds(forward, "--forward"),
            backward=_seconds(backward, "--backward"),
            transfer=transfer,
            measure=measure,
            out=out,
        )
    )


def _seconds(text: str | None, option: str) -> tuple[float, ...] | None:
    if text is None:
        return None
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise typer.BadParameter(
            f"{text!r} is not a number, nor numbers separated by commas", param_hint=option
        ) from error


@app.command(epilog=LOWER_EXAMPLES)
def lower(
    file: GraphFile,
    out: Annotated[
        Path,
        typer.Option(
            help="Write NAME.py, NAME.ptx, NAME.cubin and kernels.json here.", metavar="DIR"
        ),
    ],
    target: Annotated[
        str, typer.Option(help="cuda: and a compute capability, such as cuda:80 or cuda:100.")
    ] = "cuda:90",
    min_ops: Annotated[
        int, typer.Option(min=1, help="Leave out regions with fewer operators.")
    ] = 10,
) -> None:
    """Compile a saved graph to Triton kernels for a GPU that need not be there.

    The graph may be one of a CPU. Prints what each kernel takes of the GPU: registers per thread,
    shared memory per block, and bytes spilled per thread.

    The exit status is 1 when a region or a kernel cannot be compiled, and 2 when the file or the
    target cannot be used, or Triton is not installed.
    """
    from graphopt.commands.lower import run_lower

    run_lower(file, target, out, min_ops)
