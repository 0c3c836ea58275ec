"""`graphopt demo`."""

from __future__ import annotations

from typing import Annotated

import typer

from graphopt.cli.options import Backend, DeviceOption, not_empty

EXAMPLES = """
Examples:

    graphopt demo

    graphopt demo --ranks 1 --steps 20

    graphopt demo --link 200mbit

    graphopt demo --device cuda --ranks 2
"""


def demo(
    ranks: Annotated[int, typer.Option(min=1, help="Processes to train with.")] = 2,
    steps: Annotated[int, typer.Option(min=1, help="Training steps.")] = 60,
    device: Annotated[DeviceOption, typer.Option(help="Where to train.")] = DeviceOption.cpu,
    backend: Annotated[
        Backend | None,
        typer.Option(help="Communication backend. Default: gloo on cpu, nccl on cuda."),
    ] = None,
    pipeline: Annotated[
        str, typer.Option(help="Passes that graphopt applies.", callback=not_empty)
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
    chosen = backend or (Backend.nccl if device is DeviceOption.cuda else Backend.gloo)
    if chosen is Backend.nccl and device is DeviceOption.cpu:
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
