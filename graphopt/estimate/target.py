"""Lookup of the training step that a command line names, with its arguments."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import cycle, islice
from pathlib import Path
from typing import Any
from unittest.mock import patch

from graphopt.commands.imports import imported
from graphopt.errors import GraphOptError
from graphopt.parallel import Parallel
from graphopt.step import TrainStep

_KEPT_BATCHES = 8


@dataclass(frozen=True)
class StepCalls:
    """A step function with the arguments of the calls that a script makes.

    Attributes:
        function: the step as the user wrote it, without `graphopt.compile`.
        arguments: the arguments of every call: models, optimizers and the like.
        batches: the arguments that follow them, others in each call.
        keywords: the keyword arguments of every call.
        parallel: the kind of parallelism that the user gave `graphopt.compile`; None if none.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    batches: tuple[tuple[Any, ...], ...]
    keywords: dict[str, Any] = field(default_factory=dict)
    parallel: Parallel | None = None

    def next_batches(self, count: int, start: int = 0) -> list[tuple[Any, ...]]:
        """The batches of `count` calls, repeated when they are used up."""
        return list(islice(cycle(self.batches), start, start + count))


def find_step(target: str) -> StepCalls:
    """Finds the step of ``train.py``, or of ``train.py:train_step``.

    A file alone is run as a script until it first calls a step that `graphopt.compile` made. With a
    name, the file is imported, and its function ``make()`` returns ``(arguments, batches)``: what
    every call is given first, and an iterable of what each call is given on top.

    Raises:
        GraphOptError: there is no such file or step, or `make` returns something else.
    """
    path, _, name = target.partition(":")
    if not Path(path).is_file():
        raise GraphOptError(f"{path}: no such file; write train.py or train.py:train_step")
    return _made(path, name) if name else _called_by_script(path)


class _StepCalled(BaseException):
    """Ends a script at its first call of a compiled step; `except Exception` does not catch it."""

    def __init__(self, step: TrainStep, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        super().__init__()
        function = step.__wrapped__  # type: ignore[attr-defined]
        self.calls = StepCalls(function, args, ((),), keywords, step.parallel)


def _called_by_script(path: str) -> StepCalls:
    def stop(step: TrainStep, *args: Any, **keywords: Any) -> None:
        raise _StepCalled(step, args, keywords)

    folder = str(Path(path).resolve().parent)
    with patch.object(TrainStep, "__call__", stop), patch.object(sys, "argv", [path]):
        sys.path.insert(0, folder)
        try:
            runpy.run_path(path, run_name="__main__")
        except _StepCalled as found:
            return found.calls
        finally:
            sys.path.remove(folder)
    raise GraphOptError(
        f"{path} called no step that graphopt.compile made: decorate its step, or name it as"
        f" {path}:train_step and give the file a function make() -> (arguments, batches)"
    )


def _made(path: str, name: str) -> StepCalls:
    module = imported(path)
    step, make = (getattr(module, attribute, None) for attribute in (name, "make"))
    if not callable(step) or not callable(make):
        missing = name if not callable(step) else "make"
        raise GraphOptError(
            f"{path} has no function {missing!r}: it needs {name}(*arguments, *batch), and"
            " make() -> (arguments, batches)"
        )
    function = step.__wrapped__ if isinstance(step, TrainStep) else step  # type: ignore[attr-defined]
    made = make()
    if not isinstance(made, tuple) or len(made) != 2 or not isinstance(made[0], (tuple, list)):
        raise GraphOptError(
            f"{path}:make() returned {type(made).__name__}: it returns (arguments, batches), such"
            " as ((model, optimizer), loader)"
        )
    arguments, batches = made
    kept = tuple(
        tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)
        for batch in islice(batches, _KEPT_BATCHES)
    )
    if not kept:
        raise GraphOptError(f"{path}:make() returned no batches: at least one is needed")
    parallel = step.parallel if isinstance(step, TrainStep) else None
    return StepCalls(function, tuple(arguments), kept, parallel=parallel)
