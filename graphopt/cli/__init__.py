"""The `graphopt` command. Each command imports its implementation late, so that `--help` needs
no torch."""

from __future__ import annotations

from typing import Annotated

import typer

from graphopt.cli import bisect, demo, estimate, lower, optimize, passes, show, trace, view

app = typer.Typer(
    help="Captures a whole PyTorch training step as one graph and runs it bit for bit like eager.",
    epilog="`python -m graphopt` is the same command. Each command has --help with examples.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)


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
    """Options that all commands share."""


app.command(epilog=demo.EXAMPLES)(demo.demo)
app.command(epilog=estimate.EXAMPLES)(estimate.estimate)
app.command(epilog=passes.EXAMPLES)(passes.passes)
app.command(epilog=optimize.EXAMPLES)(optimize.optimize)
app.command(epilog=bisect.EXAMPLES, context_settings={"allow_interspersed_args": True})(
    bisect.bisect
)
app.command(epilog=show.EXAMPLES)(show.show)
app.command(epilog=view.EXAMPLES)(view.view)
app.command(epilog=trace.EXAMPLES)(trace.trace)
app.command(epilog=lower.EXAMPLES)(lower.lower)
