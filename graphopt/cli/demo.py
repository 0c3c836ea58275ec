"""Declares `graphopt demo`."""

from __future__ import annotations

from typing import Annotated

import typer

from graphopt.cli.options import not_empty

EXAMPLES = """
Examples:

    graphopt demo

    graphopt demo --ranks 1 --rounds 3

    graphopt demo --links 0,1 --pipeline auto
"""


def demo(
    ranks: Annotated[int, typer.Option(min=1, help="Processes to train with.")] = 2,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of four steps on each link.")] = 3,
    links: Annotated[
        str,
        typer.Option(
            help="Emulated links: the time that all gradients take, in multiples of the compute of"
            " a step; 0 is the loopback. Linux, several ranks."
        ),
    ] = "0,0.5,1,2",
    pipeline: Annotated[
        str, typer.Option(help="Passes that graphopt applies.", callback=not_empty)
    ] = "default",
    seed: Annotated[int, typer.Option(help="Seed of weights, data order and dropout.")] = 0,
) -> None:
    """Show a captured step, a pass that is refused, and what graphopt gains over DDP.

    A small GPT is trained on the CPU, on local ranks with one step function: by
    DistributedDataParallel with several bucket sizes and by graphopt, in turns, over loopback and
    over emulated slow links. On one or two ranks all parameters must agree bit for bit: otherwise
    the exit status is 1. `graphopt estimate train.py --measure` runs your own step, on GPUs too.
    """
    from graphopt.demo.main import run_demo

    status = run_demo(ranks=ranks, rounds=rounds, links=links, pipeline=pipeline, seed=seed)
    raise typer.Exit(status)
