"""Declares `graphopt estimate`."""

from __future__ import annotations

from typing import Annotated

import typer

EXAMPLES = """
Examples:

    graphopt estimate train.py

    graphopt estimate train.py:train_step --network infiniband --ranks 8,64,512

    graphopt estimate train.py:train_step --network 600mbit --ranks 2

    graphopt estimate train.py --measure

    torchrun --nproc-per-node 2 -m graphopt estimate train.py:train_step --measure

    torchrun --nproc-per-node 2 -m graphopt estimate train.py --measure --paced 600mbit

A script alone is run until it first calls a step that graphopt.compile made. With a name, the file
has a function `make() -> (arguments, batches)`: `train_step(*arguments, *batch)` is one call.

A step with parallel=graphopt.ZeRO(…) is measured as such, beside DDP and FSDP2. Each variant trains
a copy of the model; where memory would run out, further ones are left out, and that is said.
"""


def estimate(
    target: Annotated[
        str, typer.Argument(help="train.py, or train.py:train_step.", show_default=False)
    ],
    network: Annotated[
        str,
        typer.Option(help="nvlink, infiniband, ethernet, loopback, or a rate: 600mbit, 25gbit."),
    ] = "ethernet",
    ranks: Annotated[
        str, typer.Option(help="Numbers of ranks to predict, separated by commas.")
    ] = "2,8,64,512",
    measure: Annotated[
        bool, typer.Option("--measure", help="Run the step here instead, in turns, all variants.")
    ] = False,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each variant, with --measure.")] = 8,
    turn: Annotated[int, typer.Option(min=1, help="Steps of a turn, with --measure.")] = 4,
    inductor: Annotated[
        bool,
        typer.Option(
            help="Also measure the graph compiled by Inductor; on one device beside torch.compile."
        ),
    ] = True,
    paced: Annotated[
        str | None,
        typer.Option(
            help="With --measure on CPU ranks of one machine: hold each of their connections to"
            " this rate, such as 600mbit.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Say what your own training step would gain over DistributedDataParallel, or over eager.

    Predicted from its captured graph: operators measured here (or by data sheet, for devices that
    are not there), collectives by the network. With --measure the step runs for real, on one device
    or, under torchrun, on several; memory is that of one step, and exposed is what a step takes
    longer than compute alone.

    The exit status is 2 when the step cannot be found or captured.
    """
    if measure:
        from graphopt.estimate.main import run_measurement

        run_measurement(target, rounds, turn, inductor, paced)
        return
    counts = [part.strip() for part in ranks.split(",")]
    if not all(part.isdecimal() and int(part) > 1 for part in counts):
        raise typer.BadParameter(
            f"{ranks!r}: write numbers above 1, as in 2,8,64", param_hint="--ranks"
        )
    from graphopt.estimate.main import run_estimate

    run_estimate(target, network, [int(part) for part in counts])
