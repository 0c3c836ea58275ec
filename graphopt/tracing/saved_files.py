"""Files that a step saves, copies and takes away: each call does so, where the program does, as by
`graphopt.callback`, and a graph holds for what the step asks about files before.

    if not os.path.exists(folder):                     the graph holds where it is not there
        os.makedirs(folder)                            a call on the host
    torch.save({"model": model.state_dict()}, path)    another one, which is given the tensors
"""

from __future__ import annotations

import builtins
import functools
import io
import os
import shutil
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePath
from types import FrameType
from typing import Any

import torch

from graphopt.errors import CaptureError
from graphopt.ir.source import SourceLine
from graphopt.tracing.later import argument
from graphopt.tracing.later_values import is_later
from graphopt.tracing.numbers import SYMBOLIC, refusal
from graphopt.tracing.opened_files import OpenedFiles
from graphopt.tracing.outside.places import OutsidePlace, is_value
from graphopt.tracing.outside.record import Record
from graphopt.tracing.reachable import reached_from
from graphopt.tracing.replace import replaced
from graphopt.tracing.said import call_named, found, hand_on
from graphopt.tracing.source import is_library_file

_ASKED = (os.path.exists, os.path.isfile, os.path.isdir)


def _mkdir(path: str, *args: Any, **options: Any) -> None:
    Path(path).mkdir(*args, **options)


def _unlink(path: str, *args: Any, **options: Any) -> None:
    Path(path).unlink(*args, **options)


_CHANGING = (
    *(shutil.copyfile, shutil.copy, shutil.copy2, shutil.move, shutil.rmtree, _mkdir, _unlink),
    *(os.makedirs, os.mkdir, os.remove, os.unlink, os.rename, os.replace),
)
_MAKING_FOLDERS = (os.makedirs, os.mkdir, _mkdir)
_OF_PATHS: dict[str, Callable[..., Any]] = {
    **dict(zip(("exists", "is_file", "is_dir"), _ASKED, strict=True)),
    "mkdir": _mkdir,
    "unlink": _unlink,
}
_DICTIONARIES = (dict, OrderedDict, defaultdict)
_HINT = "do it in graphopt.callback(function, …), or behind the step"


class SavedFiles:
    """Those of one trace.

    Args:
        is_worked_on: see `WholeCalls`.
    """

    def __init__(self, record: Record, is_worked_on: Callable[[Any], bool]) -> None:
        self._record, self._is_worked_on = record, is_worked_on
        self._changes = self._folders = self._asked = self._looks = False
        self._opened = OpenedFiles(record, self._note_change)
        self.finish = self._opened.finish

    def called(
        self, callee: Any, args: Sequence[Any], line: SourceLine, discarded: bool
    ) -> Callable[..., Any] | None:
        """What is called in place of a function that saves, changes or looks for a file; None for
        others."""
        if callee is torch.save:
            return self._save
        opened = self._opened.called(callee, args, line)
        if opened is not None:
            return opened
        if is_library_file(line.file):
            return None
        owner, function = getattr(callee, "__self__", None), _of_path(callee, args)
        if function is not None:
            other = self.called(function, args, line, discarded)
            return other if other is None or owner is None else functools.partial(other, owner)
        if any(callee is each for each in _ASKED):
            return functools.partial(self._exists, callee, line)
        if discarded and any(callee is each for each in _CHANGING):
            return functools.partial(self._change, callee)
        return None

    def _exists(self, function: Callable[..., bool], line: SourceLine, path: Any) -> bool:
        if self._changes or (self._folders and function is not os.path.isfile):
            raise refusal("it looks for a file behind a line that changes files", _HINT)
        if isinstance(path, int):
            return function(path)
        known = self._record.laters.exact(os.fspath(path))
        place = OutsidePlace("file", known, function)
        self._record.read(place, f"{function.__name__}({known!r})", line)
        return function(known)

    def _change(self, function: Callable[..., Any], *args: Any, **options: Any) -> None:
        self._note_change(function in _MAKING_FOLDERS)
        args = tuple(os.fspath(arg) if isinstance(arg, PurePath) else arg for arg in args)
        hand_on(self._record, _call, function, *args, **options)

    def _save(self, obj: Any, f: Any, *args: Any, **options: Any) -> None:
        self._note_change()
        opened = not isinstance(f, (str, PurePath))
        if opened and not self._record.is_outside(f):
            raise refusal("it saves into a file that it has opened itself", _HINT)
        parts = _SavedParts(self._record, self._is_worked_on)
        made = parts.of(obj)
        f = os.fspath(f) if isinstance(f, PurePath) else f
        given = (made, f, args, *parts.outside)
        hand_on(self._record, _saved, torch.save, *given, **options)

    def _note_change(self, folders: bool = False) -> None:
        """The step changes files, or makes folders alone."""
        self._folders |= folders
        self._changes |= not folders
        self._refuse()

    def _refuse(self) -> None:
        if (self._changes or self._folders) and self._asked:
            raise refusal("it changes files, and asks about files", _HINT)

    def _ask(self, frame: FrameType) -> None:
        """A frame asks about files: not where that is to find out whose frame it is."""
        if self._looks:
            return
        self._looks = True
        try:
            by_program = _is_asked_by_program(frame)
        finally:
            self._looks = False
        self._asked |= by_program
        self._refuse()

    @contextmanager
    def noticed(self) -> Iterator[None]:
        """While active, it is noticed when the step asks about files in other ways."""

        def noticing(function: Callable[..., Any]) -> Callable[..., Any]:
            def ask(*args: Any, **options: Any) -> Any:
                self._ask(sys._getframe(1))
                return function(*args, **options)

            return ask

        asking: list[tuple[Any, str]] = [(os, name) for name in _OF_FILES]
        asking += [(builtins, "open"), (io, "open")]
        with replaced(*((at, name, noticing(getattr(at, name))) for at, name in asking)):
            yield


def _of_path(callee: Any, args: Sequence[Any]) -> Callable[..., Any] | None:
    """The function that does what a method of a path does; None for others."""
    bound = getattr(callee, "__self__", None)
    path = args[0] if bound is None and args else bound
    name = getattr(callee, "__name__", "")
    if not isinstance(path, Path) or name not in _OF_PATHS:
        return None
    return _OF_PATHS[name] if getattr(callee, "__func__", callee) is getattr(Path, name) else None


_OF_FILES = ("stat", "lstat", "listdir", "scandir", "access")
_BETWEEN = frozenset({"genericpath", "posixpath", "ntpath", "os", "glob", "pathlib", "fnmatch"})


def _is_asked_by_program(frame: FrameType | None) -> bool:
    """Whether a line of the program's asks, by functions that do nothing else."""
    while frame is not None:
        module = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if module not in _BETWEEN:
            return not is_library_file(frame.f_code.co_filename)
        frame = frame.f_back
    return False


class _SavedParts:
    """Takes a value that is saved apart: what is in it comes from each call.

    Attributes:
        outside: objects and containers that each call finds.
    """

    def __init__(self, record: Record, is_worked_on: Callable[[Any], bool]) -> None:
        self._record, self._is_worked_on = record, is_worked_on
        self.outside: list[Any] = []
        self._seen: dict[int, int] = {}

    def of(self, value: Any) -> tuple[Any, ...]:
        """How a value is made, as nested tuples; see `_made`."""
        if isinstance(value, torch.Tensor):
            return self._numbered(value) or self._of_tensor(value)
        if isinstance(value, SYMBOLIC) or is_later(value):
            return "value", value
        if is_value(value) and type(value) is not tuple:
            return "value", value
        if self._record.is_outside(value):
            return self._of_outside(value)
        if type(value) in (list, tuple):
            return self._numbered(value) or (type(value).__name__, tuple(map(self.of, value)))
        if type(value) in _DICTIONARIES:
            return self._numbered(value) or self._of_dictionary(value)
        if type(value).__module__ == "numpy":
            return "value", argument(value)
        raise _cannot_save(f"a {type(value).__name__} that it makes")

    def _numbered(self, value: Any) -> tuple[Any, ...] | None:
        """One that is there twice is one in the file."""
        known = self._seen.get(id(value))
        if known is None:
            self._seen[id(value)] = len(self._seen)
            return None
        return "same", known

    def _of_tensor(self, value: torch.Tensor) -> tuple[Any, ...]:
        real = self._record.stands_for.get(id(value), value)
        kind = isinstance(real, torch.nn.Parameter)
        return "tensor", value.detach(), value.requires_grad, kind

    def _of_dictionary(self, value: Any) -> tuple[Any, ...]:
        keys = [self._record.laters.exact(each) for each in value]
        if not all(map(is_value, keys)):
            raise _cannot_save("a dictionary whose keys are objects")
        attributes = getattr(value, "__dict__", {})
        items = tuple(map(self.of, value.values()))
        factory = getattr(value, "default_factory", None)
        made = self.of(dict(attributes)) if attributes else ()
        return "dict", type(value), factory, tuple(keys), items, made

    def _of_outside(self, value: Any) -> tuple[Any, ...]:
        reach = reached_from(None, [value])
        if reach.is_trained or any(map(self._is_worked_on, reach.memories)):
            raise _cannot_save(f"a {type(value).__name__} that holds what it updates")
        self.outside.append(value)
        return "outside", len(self.outside) - 1


def _cannot_save(what: str) -> CaptureError:
    return refusal(
        f"it saves {what}",
        "save tensors, numbers, texts, and lists and dictionaries of these, such as"
        " model.state_dict(); or save behind the step",
    )


def _call(function: Any, names: tuple[str, ...], *args: Any) -> None:
    """Call a function that does more than show a text."""
    call_named(function, names, *args)


def _saved(function: Any, names: tuple[str, ...], made: Any, f: Any, rest: Any, *args: Any) -> None:
    """Save what a step has given."""
    count = len(args) - len(names)
    outside = found(args[:count])
    options = dict(zip(names, args[count:], strict=True))
    function(_made(made, outside, []), f, *rest, **options)


def _made(how: Any, outside: Sequence[Any], seen: list[Any]) -> Any:
    """A value as it is saved."""
    kind = how[0]
    if kind == "value":
        return how[1]
    if kind == "outside":
        return outside[how[1]]
    if kind == "same":
        return seen[how[1]]
    place = len(seen)
    seen.append(None)
    seen[place] = _new(how, outside, seen)
    return seen[place]


def _new(how: Any, outside: Sequence[Any], seen: list[Any]) -> Any:
    if how[0] == "tensor":
        _, tensor, needs_gradient, is_parameter = how
        if is_parameter:
            return torch.nn.Parameter(tensor, needs_gradient)
        return tensor.requires_grad_(needs_gradient)
    if how[0] in ("list", "tuple"):
        items = [_made(each, outside, seen) for each in how[1]]
        return items if how[0] == "list" else tuple(items)
    _, kind, factory, keys, values, attributes = how
    made = kind() if kind is not defaultdict else defaultdict(factory)
    for key, value in zip(keys, values, strict=True):
        made[key] = _made(value, outside, seen)
    if attributes:
        vars(made).update(_made(attributes, outside, seen))
    return made
