"""Calls by which a step says something to the outside: `print`, a logger's messages, progress bars,
files, tables and boards. Each call of the step makes them, where the program does, as by
`graphopt.callback`.
"""

from __future__ import annotations

import builtins
import copy
import functools
import io
import logging
import sys
import types
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from graphopt.host import HostCall
from graphopt.ir.source import SourceLine
from graphopt.tracing.callback import record as record_call
from graphopt.tracing.computations import nest_of
from graphopt.tracing.later import Later
from graphopt.tracing.later_values import holds_unknown, is_later, refuse_keys
from graphopt.tracing.named_calls import Named
from graphopt.tracing.numbers import SYMBOLIC, refusal
from graphopt.tracing.outside.places import is_value
from graphopt.tracing.outside.record import Record
from graphopt.tracing.replace import original
from graphopt.tracing.shown_tensors import shown_within
from graphopt.tracing.source import current_user_line, is_installed, is_library_file

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
        return functools.partial(_say, record, callee)
    owner, name = _owner(callee, args), getattr(callee, "__name__", "")
    if _is_message(callee, owner, name) and not is_installed(line.file):
        at = functools.partial(_at, line.file, line.line, line.function, callee)
        return functools.partial(_say, record, at)
    if not _is_outlet(owner, name) or not record.is_outside(owner):
        return None
    if discarded:
        return functools.partial(_hand_on, record, callee)
    if isinstance(owner, io.TextIOBase) and name == "write":
        return functools.partial(_write, record, callee)
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


def _at(file: str, line: int, name: str, function: Any, /, *args: Any, **options: Any) -> None:
    """Call a function of `logging`, which looks for the line of its caller, from a line."""
    _caller(file, line, name)(function, args, options)


@functools.lru_cache(maxsize=256)
def _caller(file: str, line: int, name: str) -> Callable[..., None]:
    """A function that calls another one, with a name and a line of the program's."""

    def call(function: Any, args: Any, options: Any) -> None:
        function(*args, **options)

    code = call.__code__.replace(co_filename=file, co_firstlineno=max(line - 1, 1), co_name=name)
    return types.FunctionType(code, globals())


def _say(record: Record, function: Any, /, *args: Any, **options: Any) -> None:
    """Of what is said, the text: each argument is text here or becomes it in `function`."""
    shown = (_shown(record, arg) for arg in args)
    _hand_on(record, function, *shown, **options)


def _write(record: Record, function: Any, *args: Any) -> Any:
    """A file says how much it has written."""
    _hand_on(record, function, *args)
    return Later(len, args[-1:], is_number=True)


def _hand_on(record: Record, function: Any, /, *args: Any, **options: Any) -> None:
    hand_on(record, call_named, function, *args, **options)


def hand_on(record: Record, caller: Any, function: Any, /, *args: Any, **options: Any) -> HostCall:
    """Let each call of the step call a function, where the program does.

    Args:
        caller: calls it, given the function, names for its last arguments, and all arguments.

    Raises:
        CaptureError: the step has sent elsewhere what is shown.
    """
    if (sys.stdout, sys.stderr) != record.shown_on:
        raise refusal(
            "it shows something where it has put another file in place of sys.stdout or sys.stderr"
            ", and each call shows it when its graph has run",
            "make the text itself, text = f'loss {loss.item():.3f}'; or show it in a function that"
            " is called in every step, and redirects it: graphopt.callback(function, loss)",
        )
    given = [_given(record, arg) for arg in (*args, *options.values())]
    nests = [nest_of(arg) if holds_unknown(arg, of_host=True) else arg for arg in given]
    call = HostCall(functools.partial(caller, function, tuple(options)), nests)
    record_call(call)
    return call


def only_says(call: HostCall) -> bool:
    """Whether a call of a function on the host shows or writes a text, and no more."""
    return isinstance(call.fn, functools.partial) and call.fn.func is call_named


def call_named(function: Any, names: tuple[str, ...], *args: Any) -> None:
    """Call a function with names for its last arguments."""
    Named(function, names)(*found(args))


def found(args: Sequence[Any]) -> list[Any]:
    """Arguments with the containers that are found outside by then."""
    return [arg() if _is_itself(arg) else arg for arg in args]


class FileInTrace:
    """Stands for a file that each call opens; see `opened_files`."""

    of_calls: Any


def _given(record: Record, value: Any, within: bool = False) -> Any:
    """What a function gets for a value: a container outside as it finds it then."""
    if isinstance(value, FileInTrace):
        return value.of_calls
    if isinstance(value, types.GeneratorType):
        value = list(value)
    if record.laters.is_kept(value):
        return record.laters.items(value, current_user_line() or SourceLine("", 0, ""))
    if not isinstance(value, (list, tuple, dict, set, deque)) or is_value(value):
        return value
    if record.is_outside(value):
        if within and holds_unknown(value):
            raise refusal(
                "it shows a list or dictionary outside its arguments, into which it puts what the"
                " graph gives, within another one",
                "show it by itself",
            )
        if not within:
            return functools.partial(_itself, value)
        line = current_user_line() or SourceLine("", 0, "")
        record.contents(value, record.path(value, type(value).__name__), line)
        return value
    if type(value) is dict:
        refuse_keys(value)
        return {key: _given(record, each, True) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_given(record, each, True) for each in value)
    return value


def _itself(value: Any) -> Any:
    return value


def _is_itself(value: Any) -> bool:
    return isinstance(value, functools.partial) and value.func is _itself


def _without_functions(error: BaseException) -> Any:
    """What is shown of an exception, which holds the functions that it came through, and what is in
    them."""
    text = str(error)
    known = type(error).__init__ in (BaseException.__init__, Exception.__init__)
    return copy.copy(error) if known and not is_later(text) else text


def _shown(record: Record, value: Any) -> Any:
    """What is shown of a value, which its own code may say."""
    if is_value(value) or isinstance(value, SYMBOLIC) or is_later(value):
        return value
    if isinstance(value, torch.Tensor) or type(value) in (list, tuple, dict):
        return shown_within(value, record.is_outside)
    if isinstance(value, BaseException):
        return _without_functions(value)
    method: Any = type(value).__str__
    method = type(value).__repr__ if method is object.__str__ else method
    code = getattr(method, "__code__", None)
    if code is None or is_library_file(code.co_filename) or isinstance(value, logging.Logger):
        return value
    return str(value)
