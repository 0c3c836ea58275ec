"""A table of operators that write to their arguments, and of operators that take functions: what
graphopt captures of them, bit for bit, and what `torch.compile(backend="aot_eager")` takes.

    python tests/operators_beside_torch.py

graphopt captures the whole step of each; torch.compile is given the forward alone.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

import graphopt
import test_unsupported_features as functions
import test_writing_operators as writing
from graphopt.ir.bits import same_bits

OF_FUNCTIONS = ("cond", "while_loop", "scan", "flex_attention")
Trained = Callable[[Callable[[Any], Any], Callable[[Any], Any]], list[Tensor]]
"""From what compiles a step and what compiles its forward to what is left."""


def rows() -> dict[str, Trained]:
    """How each kind is trained."""
    found: dict[str, Trained] = {}
    for name, forward in writing.STEPS.items():
        found[name] = partial(_of_writing, forward)
    for name in OF_FUNCTIONS:
        found[name] = partial(_of_function, functions.REFUSED[name][0])
    return found


def _of_writing(forward: Any, step: Callable[[Any], Any], inner: Callable[[Any], Any]) -> Any:
    return writing._trained(inner(forward), step)


def _of_function(loss_of: Any, step: Callable[[Any], Any], inner: Callable[[Any], Any]) -> Any:
    return functions.run(inner(loss_of), step)


def outcome(trained: Trained, step: Callable[[Any], Any], inner: Callable[[Any], Any]) -> str:
    """`"equal"`, `"different"`, or what was raised."""
    expected = trained(_plain, _plain)
    try:
        found = trained(step, inner)
    except Exception as error:
        return type(error).__name__
    finally:
        torch.compiler.reset()
    return "equal" if all(map(same_bits, found, expected)) else "different"


def _plain(function: Any) -> Any:
    return function


def main() -> None:
    """Print the table, and of how many kinds each takes."""
    by_torch = partial(torch.compile, backend="aot_eager", fullgraph=True)
    table = [
        (name, outcome(each, graphopt.compile, _plain), outcome(each, _plain, by_torch))
        for name, each in rows().items()
    ]
    for line in [("", "graphopt", "aot_eager"), *table]:
        print("{:24} {:16} {}".format(*line))
    counts = [sum(row[column] == "equal" for row in table) for column in (1, 2)]
    print("{:24} {:16} {}".format(f"of {len(table)}", *map(str, counts)))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
