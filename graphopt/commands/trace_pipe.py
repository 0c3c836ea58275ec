"""The pipe that `graphopt trace` draws, made by the user's `module_or_file.py:function`."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from graphopt.commands.imports import imported
from graphopt.errors import GraphOptError
from graphopt.pipelining import Pipe
from graphopt.runtime.places import place


class PipeSource:
    """A user's function that makes a pipe, the same one each time.

    Attributes:
        text: the name as the command line has it.
        any_stages: true if the function takes the number of stages.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self._function = _load(text)
        self.any_stages = bool(inspect.signature(self._function).parameters)

    def make(self, stages: int | None) -> Pipe:
        """Makes a pipe of that many stages, or of as many as the function chooses.

        Raises:
            GraphOptError: the function fails, or returns something else.
        """
        torch.manual_seed(0)
        try:
            pipe = self._function(stages) if self.any_stages else self._function()
        except GraphOptError:
            raise
        except (Exception, SystemExit) as error:
            raise GraphOptError(f"{self.text}: {type(error).__name__}: {error}") from error
        if not isinstance(pipe, Pipe):
            raise GraphOptError(
                f"{self.text} returned {_described(pipe)}; it is to return a Pipe, as"
                " graphopt.pipelining.pipeline does"
            )
        if stages is not None and pipe.num_stages != stages:
            raise GraphOptError(
                f"{self.text} returned a pipe of {pipe.num_stages} stages; {stages} are asked for"
            )
        return pipe


def _load(text: str) -> Callable[..., Any]:
    module_name, colon, function_name = text.rpartition(":")
    if not colon or not module_name or not function_name:
        raise GraphOptError(
            f"{text!r} names no function; write module:function or file.py:function"
        )
    module = _import(module_name)
    function = getattr(module, function_name, None)
    if not callable(function):
        functions = inspect.getmembers(module, inspect.isfunction)
        own = [n for n, f in functions if f.__module__ == module.__name__]
        raise GraphOptError(
            f"{module_name} has no function {function_name}; it has: {', '.join(own) or 'none'}"
        )
    found: Callable[..., Any] = function
    return found


def _import(name: str) -> ModuleType:
    path = place(name)
    if path.suffix == ".py":
        if not path.is_file():
            raise GraphOptError(f"there is no file {name}")
        # As `python file.py` would, so that it finds its neighbours.
        sys.path.insert(0, str(path.resolve().parent))
    try:
        return imported(name)
    except (Exception, SystemExit) as error:
        raise GraphOptError(
            f"{name} cannot be imported: {type(error).__name__}: {error}"
        ) from error


def _described(value: object) -> str:
    return "None" if value is None else f"a {type(value).__name__}"
