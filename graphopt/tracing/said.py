"""Calls by which a step says something to the outside: `print`, a logger's messages, progress bars,
files, tables and boards. Each call of the step makes them, where the program does, as by
`graphopt.callback`.
"""

from __future__ import annotations

import builtins
import functools
import io
import logging
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch

from graphopt import _compat
from graphopt.host import HostCall
from graphopt.ir.source import SourceLine
from graphopt.tracing.callback import record as record_call
from graphopt.tracing.later import Later, Named, is_later, nest_of
from graphopt.tracing.numbers import SYMBOLIC, refusal
from graphopt.tracing.outside.places import is_value
from graphopt.tracing.outside.record import Record
from graphopt.tracing.replace import original
from graphopt.tracing.source import is_installed, is_library_file

_PRINT = builtins.print
_MESSAGES = frozenset(
    {"debug", "info", "warning", "warn", "error", "exception", "critical", "fatal", "log"}
)
_OF_BARS = frozenset(
    {"set_postfix", "set_postfix_str", "set_description", "set_description_str", "update", "write",
     "refresh", "display"}
)  # fmt: skip
_OF_FILES = frozenset({"write", "writelines", "flush"})
_OF_TABLES = frozenset({"writerow", "writerows"})


def saying(
    record: Record, callee: Any, args: Sequence[Any], line: SourceLine, discarded: bool
) -> Callable[..., Any] | None:
    """What is called in place of a function that only says something; None for other functions.

    Args:
        args: positional values, the object of a method first.
        discarded: nothing uses the result.
    """
    if is_library_file(line.file):
        return None
    callee = original(callee)
    if callee is _PRINT:
        return functools.partial(_say, callee)
    owner, name = _owner(callee, args), getattr(callee, "__name__", "")
    if _is_message(callee, owner, name) and not is_installed(line.file):
        return functools.partial(_say, _At(callee, line))
    if not _is_outlet(owner, name) or not record.is_outside(owner):
        return None
    if discarded:
        return functools.partial(_hand_on, callee)
    if isinstance(owner, io.TextIOBase) and name == "write":
        return functools.partial(_write, callee)
    return None


def _owner(callee: Any, args: Sequence[Any]) -> Any:
    owner = getattr(callee, "__self__", None)
    if owner is not None and not isinstance(owner, types.ModuleType):
        return owner
    return args[0] if args else None


def _is_message(callee: Any, owner: Any, name: str) -> bool:
    """Whether a callee writes a message to a log."""
    function = getattr(callee, "__func__", callee)
    return name in _MESSAGES and getattr(function, "__module__", None) == "logging"


def _is_outlet(owner: Any, name: str) -> bool:
    """Whether an object's method of this name says something and gives nothing."""
    if isinstance(owner, io.IOBase):
        return name in _OF_FILES
    kinds = owner.__mro__ if isinstance(owner, type) else type(owner).__mro__
    homes = {(kind.__module__.partition(".")[0], kind.__name__) for kind in kinds}
    packages = {package for package, _ in homes}
    if packages & {"_csv", "csv"}:
        return name in _OF_TABLES
    if "tqdm" in packages:
        return name in _OF_BARS
    if any(kind == "SummaryWriter" for _, kind in homes):
        return name.startswith("add_") or name == "flush"
    return "wandb" in packages and name == "log"


class _At:
    """Calls a function of `logging`, which looks for the line of its caller, from a line."""

    def __init__(self, function: Any, line: SourceLine) -> None:
        self.function, self.line = function, line
        self.__name__ = getattr(function, "__name__", "log")

    def __call__(self, *args: Any, **options: Any) -> None:
        _called_at(self.line)(self.function, args, options)

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and bool(vars(other) == vars(self))

    def __hash__(self) -> int:
        return hash(self.line)


@functools.lru_cache(maxsize=256)
def _called_at(line: SourceLine) -> Callable[..., None]:
    """A function that calls another one, with a name and a line of the program's."""

    def call(function: Any, args: Any, options: Any) -> None:
        function(*args, **options)

    name = line.function or "call"
    code = call.__code__.replace(
        co_filename=line.file, co_firstlineno=max(line.line - 1, 1), co_name=name
    )
    return types.FunctionType(code, globals())


def _say(function: Any, *args: Any, **options: Any) -> None:
    """Of what is said, the text: each argument is text here or becomes it in `function`."""
    _hand_on(function, *map(_shown, args), **options)


def _write(function: Any, *args: Any) -> Any:
    """A file says how much it has written."""
    _hand_on(function, *args)
    return Later(len, args[-1:], is_number=True)


def _hand_on(function: Any, *args: Any, **options: Any) -> None:
    if options:
        function, args = Named(function, tuple(options)), (*args, *options.values())
    args = tuple(list(each) if isinstance(each, types.GeneratorType) else each for each in args)
    record_call(HostCall(function, [nest_of(arg) for arg in args]))


def _shown(value: Any) -> Any:
    """What is shown of a value, which its own code may say."""
    if is_value(value) or isinstance(value, SYMBOLIC) or is_later(value):
        return value
    if isinstance(value, torch.Tensor):
        if value.requires_grad:
            raise refusal(
                "it shows a tensor with its gradient function, which the tensors of a graph have"
                " not",
                "show its value: loss.item() or loss.detach()",
            )
        return value
    if type(value) in (list, tuple, dict):
        return _compat.tree_map(_shown, value)
    method = type(value).__str__
    method = type(value).__repr__ if method is object.__str__ else method
    code = getattr(method, "__code__", None)
    if code is None or is_library_file(code.co_filename) or isinstance(value, logging.Logger):
        return value
    return str(value)
