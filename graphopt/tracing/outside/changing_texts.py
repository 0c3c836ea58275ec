"""Texts outside a step that its program changes between calls, and that the step only shows.

    progress.prefix = f"Epoch: [{epoch}]"       between two calls
    print(progress.prefix + batch)              in the step: the graph holds for any prefix

The instruction that loads such a text finds a piece of text in the place, which stands for what is
there in each call (`tracing.laters`); everything else finds the text itself, for which the graph
holds alone then, and so it does where something has to know what the piece stands for.
"""

from __future__ import annotations

import dis
import functools
import inspect
import types
from collections.abc import Callable, Iterable
from types import CellType, CodeType, FrameType
from typing import Any, NamedTuple

from torch import nn

from graphopt import _compat
from graphopt._compat.classes import is_made_by_statement
from graphopt.errors import CaptureError
from graphopt.tracing.outside.callees import Instruction
from graphopt.tracing.outside.places import (
    FollowedPlace,
    OutsidePlace,
    Read,
    attributes_of,
    is_plain_text,
)
from graphopt.tracing.running_trace import has_piece
from graphopt.tracing.source import is_library_file, is_own_file

_MODULE_CALLS = _compat.module_call_codes()
_CALLED_BY = ("step_run.py", "said.py")
"""Files of graphopt that call the step, and methods by which its objects say what they are."""
_TAKING_TEXTS = (str, repr, format, print, getattr, next, len, bool)
_GOING_THROUGH = (list, tuple, next)


class TextOutside:
    """Gives the text that is in a place when a call begins.

    Attributes:
        followed: the place, in the object that each call finds.
        holds: the graph holds for this text alone.
    """

    def __init__(self, place: OutsidePlace, text: str) -> None:
        self.followed, self.text, self.holds = FollowedPlace(place), text, False
        self.__name__ = "text"

    def take(self) -> None:
        """A call begins."""
        self.text = self.followed.now()

    def __call__(self) -> str:
        return self.text

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TextOutside):
            return False
        mine, its = self.followed.place, other.followed.place
        if (mine.identity, self.holds) != (its.identity, other.holds):
            return False
        return self.text == other.text if self.holds else True

    def __hash__(self) -> int:
        return hash(TextOutside)


class _ShownText(NamedTuple):
    """A text for which a piece stands.

    Attributes:
        read: the place with the text itself, as it is guarded where the graph holds for it alone.
    """

    read: Read
    given: TextOutside
    piece: str


class ChangingTexts:
    """Those of one trace.

    Args:
        record: of the step.
        places: where there are such texts.
        piece: makes what stands for one.

    Attributes:
        taken_apart: code that is not observed may have taken a piece for a text.
    """

    def __init__(
        self,
        record: Any,
        places: Iterable[OutsidePlace] = (),
        piece: Callable[[TextOutside], str] = TextOutside.__call__,
    ) -> None:
        self._record, self._piece = record, piece
        self._places = {place.identity for place in places}
        self._shown: dict[Any, _ShownText] = {}
        self._put: list[tuple[OutsidePlace, str]] = []
        self._calls: dict[int, tuple[int, Any]] = {}
        self.taken_apart = False

    def __bool__(self) -> bool:
        """Whether pieces have stood for any."""
        return bool(self._shown)

    # ------------------------------------------------------------------ instructions

    def looked_for(self, at: Instruction) -> OutsidePlace | None:
        """The place that an instruction loads, where a piece may stand for the text there; not
        where the graph holds for it already."""
        if not self._places or at.step.feeding is not None:
            return None
        place = _loaded(at)
        if place is None or place.identity not in self._places:
            return None
        return None if place.identity in self._record.reads else place

    def show(self, place: OutsidePlace, frame: FrameType) -> None:
        """Let an instruction find a piece in the place that it loads, which the record has read."""
        record, identity = self._record, place.identity
        read = record.reads.get(identity)
        if read is None or not is_plain_text(read.value) or record.has_changed(place):
            return
        if not self._is_seen(frame):
            return
        del record.reads[identity]
        if identity not in self._shown:
            given = TextOutside(read.place, read.value)
            self._shown[identity] = _ShownText(read, given, self._piece(given))
            kind = OutsidePlace("text", place.holder, place.key)
            record.reads[kind.identity] = read._replace(place=kind, value=True)
        self._put.append((place, read.value))
        place.write(self._shown[identity].piece)

    def put_back(self) -> None:
        """An instruction is over."""
        while self._put:
            place, text = self._put.pop()
            place.write(text)

    def calls(self, at: Instruction, callee: Any) -> None:
        """An instruction calls a function."""
        if self._places:
            self._calls[id(at.frame)] = at.step.offset, callee

    def _is_seen(self, frame: FrameType) -> bool:
        """Whether what functions make of a text goes to such as are looked at, and to no others:
        these may sort by it, or remember it."""
        caller = frame.f_back
        while caller is not None:
            code, file = caller.f_code, caller.f_code.co_filename
            if is_own_file(file):
                return file.endswith(_CALLED_BY)
            library = is_library_file(file) or file.startswith("<str")
            if code not in _MODULE_CALLS and (library or not self._hands_on(caller, frame.f_code)):
                return False
            frame, caller = caller, caller.f_back
        return False

    def _hands_on(self, caller: FrameType, code: CodeType) -> bool:
        """Whether a function gets itself what one that it calls gives."""
        at = _position(caller)
        place, callee = self._calls.get(id(caller), (-1, None))
        generates = bool(code.co_flags & inspect.CO_GENERATOR)
        if place != at:
            loads = dis.opname[caller.f_code.co_code[at]].startswith("LOAD")
            return generates or loads or code.co_name.startswith("__")
        while isinstance(callee, (types.MethodType, functools.partial)):
            callee = callee.__func__ if isinstance(callee, types.MethodType) else callee.func
        if generates and (_is_one_of(callee, _GOING_THROUGH) or _joins(callee)):
            return True
        kind = callee if isinstance(callee, type) else type(callee)
        return bool(
            isinstance(callee, (types.FunctionType, nn.Module))
            or (is_made_by_statement(kind) and not _is_in_c(kind, callee))
            or _is_one_of(callee, _TAKING_TEXTS)
        )

    # ------------------------------------------------------------------ where it has to be known

    def note_taken_apart(self) -> None:
        """C code may look at texts in which there are pieces, and take them for texts."""
        self.taken_apart |= bool(self._shown)

    def refuse_taken_apart(self) -> None:
        """Refuse a trace in which that may have been so; texts are constants of the next one."""
        reads = self._record.reads.values() if self._shown else ()
        if self.taken_apart or any(_holds_piece(read.value) for read in reads):
            raise CaptureError("it gives a text to code that is not followed")

    def holds_for(self, given: TextOutside) -> str:
        """The graph holds for a text alone. Returns that."""
        given.holds = True
        for identity, shown in self._shown.items():
            if shown.given is given:
                self._record.reads.setdefault(identity, shown.read)
        return given.text

    def written(self, place: OutsidePlace) -> None:
        """The step puts something into a place."""
        if place.identity in self._shown:
            self.holds_for(self._shown[place.identity].given)

    def changes(self, container: Any) -> None:
        """The step adds to a container, or takes from it."""
        for shown in self._shown.values():
            if shown.read.place.holder is container:
                self.holds_for(shown.given)

    def finish(self) -> None:
        """The step is over: for a text in whose place there is another one by now, it holds."""
        self.put_back()
        for shown in self._shown.values():
            if shown.read.place.now() is not shown.read.value:
                self.holds_for(shown.given)
        self._calls.clear()
        self._piece = TextOutside.__call__  # what makes pieces holds values of the trace

    def any(self) -> list[tuple[Read, TextOutside]]:
        """The places in which there may be any text, and what gives it."""
        reads = self._record.reads
        return [(each.read, each.given) for key, each in self._shown.items() if key not in reads]


def _holds_piece(value: Any) -> bool:
    """Whether a value is a text in which a piece stands for another one, or contains such."""
    if isinstance(value, (tuple, frozenset)):
        return any(map(_holds_piece, value))
    return has_piece(value)


def _loaded(at: Instruction) -> OutsidePlace | None:
    """The item or the variable that an instruction loads."""
    handler, name = at.step.handler, at.step.name
    if handler in ("_global", "_name"):
        return OutsidePlace("item", at.frame.f_globals, name)
    if handler == "_cell":
        cell = at.variable(at.step.argument)
        return OutsidePlace("cell", cell) if isinstance(cell, CellType) else None
    if handler == "_attribute":
        table = attributes_of(at.top(1))
        return None if table is None else OutsidePlace("item", table, name)
    if handler == "_item" and type(at.top(1)) is str:
        return OutsidePlace("item", at.top(2), at.top(1))
    return None


def _position(frame: FrameType) -> int:
    """Where the instruction stands that a frame is executing: not at its caches."""
    code, at = frame.f_code.co_code, frame.f_lasti
    while at > 0 and dis.opname[code[at]] == "CACHE":
        at -= 2
    return at


def _is_one_of(callee: Any, functions: tuple[Any, ...]) -> bool:
    return any(callee is each for each in functions)


def _joins(callee: Any) -> bool:
    bound = getattr(callee, "__self__", None)
    return isinstance(bound, str) and getattr(callee, "__name__", "") == "join"


def _is_in_c(kind: type, callee: Any) -> bool:
    """Whether a call of an object, or of a class, runs C code first."""
    name = "__init__" if callee is kind else "__call__"
    return not isinstance(inspect.getattr_static(kind, name, None), types.FunctionType)
