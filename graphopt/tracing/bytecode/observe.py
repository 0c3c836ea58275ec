"""Observes the Python functions that a traced step runs, instruction by instruction.

User code is observed, that of models and of most libraries as well; torch, graphopt and most of the
standard library are not. Whoever traces, profiles or measures coverage goes on doing so: from 3.12
on `sys.monitoring` serves several tools; before, the tracing function found is called along.
"""

from __future__ import annotations

import gc
import importlib
import logging
import sys
import warnings
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from types import CodeType, FrameType, FunctionType
from typing import Any

from torch import nn

from graphopt import _compat
from graphopt._compat import frames
from graphopt._compat.own_tracing import OwnTracer, UntracedOperators
from graphopt._compat.threads import is_of_trace
from graphopt.errors import CaptureError
from graphopt.ir.source import SourceLine
from graphopt.ir.user_frames import frames as frames_around
from graphopt.ir.user_frames import is_library_file
from graphopt.tracing.bytecode.accesses import OutsideAccess, is_generated, is_observed, steps_of
from graphopt.tracing.bytecode.attributes import read_function, read_method
from graphopt.tracing.bytecode.functions import called_by_torch
from graphopt.tracing.bytecode.instructions import Instructions
from graphopt.tracing.functional.values import TracedValues
from graphopt.tracing.layouts import scratch
from graphopt.tracing.outside.record import OutsideRecord
from graphopt.tracing.refusals.calls import SubstitutedCalls, refuse_begun

_MODULE_CALL = _compat.module_call_code()
_COUNTING = frozenset({Counter.update.__code__, Counter.subtract.__code__})
"""Functions that read a number only to write what they make of it to where it was."""
_FORGETTING = frozenset(
    constant
    for kind in (weakref.WeakKeyDictionary, weakref.WeakValueDictionary, weakref.WeakSet)
    for constant in kind.__init__.__code__.co_consts
    if isinstance(constant, CodeType)
)
"""What weak containers run when an object ends, wherever the program is then."""


_APART = frozenset(
    {logging.Logger.handle.__code__, getattr(importlib, "_bootstrap")._find_and_load.__code__,  # noqa: B009
     getattr(warnings, "_showwarnmsg").__code__,  # noqa: B009
     scratch.called.__code__, TracedValues.computed.__code__}
)  # fmt: skip
"""Functions within which handlers, import hooks and kernels of operators run, as the trace runs:
what these do is not the step's."""


class Observer:
    """Passes the instructions of observed functions on to a record."""

    def __init__(
        self, record: OutsideRecord, modules: set[int], substitute: SubstitutedCalls
    ) -> None:
        self.record = record
        self._instructions = Instructions(record, substitute)
        self._modules = modules
        self._of_trace: tuple[type[Exception], ...] = (
            CaptureError,
            *_compat.data_dependent_errors(),
            *_compat.unsupported_operator_errors(),
        )
        self._met: Exception | None = None
        self._apart: FrameType | None = None
        of_others = (getattr(each, "__code__", None) for each in gc.callbacks)
        self._not_followed = _APART.union(filter(None, of_others))
        self.ignored: dict[int, CodeType] = {}
        """Functions of which the observer wants to know nothing more, by their identity: a hash of
        code goes through all of it."""

    def entered(self, frame: FrameType) -> dict[int, OutsideAccess] | None:
        """Handles the start of a function; returns its instructions to observe, or None."""
        code = frame.f_code
        if id(code) in self.ignored or code in _FORGETTING or self._is_apart(frame):
            return None
        if code in self._not_followed:
            self._apart = frame
            return None
        refuse_begun(frame, self.record.is_outside)
        if not is_observed(code.co_filename) or is_generated(code):
            self._entered_torch(frame, code)
            return None
        if code in _COUNTING:
            self._instructions.counts(frame)
            return None
        if _is_generic(code) and not _called_by_user(frame):
            return None
        self._function(frame)
        return steps_of(code)

    def before(self, frame: FrameType, step: OutsideAccess) -> None:
        """Handles an instruction that is about to run."""
        if self._is_apart(frame):
            return
        self._instructions.before(frame, step)

    def _is_apart(self, frame: FrameType) -> bool:
        """True if a function runs inside one whose work does not belong to the step."""
        if self._apart is None:
            return False
        if any(each is self._apart for each in frames_around(frame)):
            return True
        self._apart = None
        return False

    def raised(self, error: object) -> None:
        """Keeps the first exception of the trace that reaches a function, which may catch it."""
        if self._met is None and isinstance(error, self._of_trace):
            self._met = error

    @contextmanager
    def refusing(self) -> Iterator[None]:
        """While active, the trace's first exception is raised at the end even if the step caught
        it, since eager code would not raise it."""
        try:
            yield
        except Exception:
            if self._met is None:
                raise
        met, self._met = self._met, None
        if met is not None:
            raise met

    def _entered_torch(self, frame: FrameType, code: CodeType) -> None:
        if code is _MODULE_CALL:
            module = frame.f_locals.get("self")
            if isinstance(module, nn.Module) and id(module) not in self._modules:
                self._other_module(module)
        else:
            self.ignored[id(code)] = code
        called_by_torch(self.record, frame)

    def _other_module(self, module: nn.Module) -> None:
        """Guards all of a module that is not among the arguments."""
        if self.record.is_outside(module):
            path = self.record.path(module, type(module).__name__)
            for name, child in module.named_modules(prefix=path):
                self.record.modules.setdefault(id(child), (name, child))
                read_method(self.record, type(child), "forward", SourceLine.of(sys._getframe(2)))

    def _function(self, frame: FrameType) -> None:
        """Records the identity, defaults and origin of the function that starts."""
        function = frames.Operands(frame, -1).function
        line = SourceLine.of(frame)
        if isinstance(function, FunctionType):
            read_function(self.record, function, line)
        code = frame.f_code
        if code.co_argcount:
            self._method(frame.f_locals.get(code.co_varnames[0]), code, line)

    def _method(self, first: Any, code: CodeType, line: SourceLine) -> None:
        owner = first if isinstance(first, type) else type(first)
        for each in owner.__mro__:
            found = vars(each).get(code.co_name)
            found = getattr(found, "__func__", found)
            if getattr(found, "__code__", None) is code:
                read_method(self.record, owner, code.co_name, line)
                return


def _called_by_user(frame: FrameType) -> bool:
    """True if a library function runs on behalf of user code, not of torch."""
    caller = frame.f_back
    while caller is not None and _is_generic(caller.f_code):
        if not is_observed(caller.f_code.co_filename):
            return False
        caller = caller.f_back
    return caller is not None


def _is_generic(code: CodeType) -> bool:
    """True if a function acts for its caller: a library's, or one that a dataclass generated."""
    generated = code.co_filename.startswith("<str") and code.co_name.startswith("__")
    return generated or is_library_file(code.co_filename)


@contextmanager
def observed(observer: Observer) -> Iterator[None]:
    """While active, functions of the trace are observed: in this thread, and from Python 3.12 on in
    autograd's threads."""
    if not frames.can_read(sys._getframe()):
        yield
    elif sys.version_info >= (3, 12):
        with _monitored(observer):
            yield
    else:
        with _traced(observer):
            yield


# ---------------------------------------------------------------------------- before 3.12


class _FrameTracer:
    """The trace function of one frame: instructions go to the observer, all events to a former
    trace function."""

    __slots__ = ("_observer", "_other", "_other_opcodes", "_steps")

    def __init__(
        self, observer: Observer, steps: dict[int, OutsideAccess] | None, other: Any
    ) -> None:
        self._observer, self._steps, self._other = observer, steps or {}, other

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "opcode":
            step = self._steps.get(frame.f_lasti)
            if step is not None:
                self._observer.before(frame, step)
            return self
        if event == "exception":
            self._observer.raised(argument[1])
        if self._other is not None:
            self._other = self._other(frame, event, argument)
        return self


class _Tracer(OwnTracer):
    """The trace function of a thread (`sys.settrace`)."""

    def __init__(self, observer: Observer, other: Any) -> None:
        self._observer, self._other, self.alone = observer, other, other is None

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        other = None
        if self.alone and id(frame.f_code) in self._observer.ignored:
            return None
        if self._other is not None:
            other = self._other(frame, event, argument)
            if sys.gettrace() is not self:  # some install themselves whenever they are called
                sys.settrace(self)
        steps = self._observer.entered(frame)
        if not steps:
            return other
        if other is None:
            frame.f_trace_lines = False
        frame.f_trace_opcodes = True
        return _FrameTracer(self._observer, steps, other)


@contextmanager
def _traced(observer: Observer) -> Iterator[None]:
    before = sys.gettrace()
    tracer = _Tracer(observer, before)
    sys.settrace(tracer)
    try:
        with UntracedOperators() if tracer.alone else nullcontext():
            yield
    finally:
        sys.settrace(before)


# ---------------------------------------------------------------------------- from 3.12 on


@contextmanager
def _monitored(observer: Observer) -> Iterator[None]:
    monitoring: Any = getattr(sys, "monitoring")  # noqa: B009 - not in the oldest Python's stubs
    tool = next(each for each in (4, 3, 5, 0) if monitoring.get_tool(each) is None)
    monitoring.use_tool_id(tool, "graphopt")
    instruction, start = monitoring.events.INSTRUCTION, monitoring.events.PY_START
    looked_at: dict[CodeType, dict[int, OutsideAccess]] = {}

    def started(code: CodeType, offset: int) -> Any:
        if not is_of_trace():
            return None
        steps = observer.entered(sys._getframe(1))
        if steps and code not in looked_at:
            looked_at[code] = steps
            with suppress(ValueError):  # another thread's function, begun as the trace ended
                monitoring.set_local_events(tool, code, instruction)
        return monitoring.DISABLE if id(code) in observer.ignored else None

    def executed(code: CodeType, offset: int) -> None:
        if not is_of_trace():
            return
        step = looked_at[code].get(offset)
        if step is not None:
            observer.before(sys._getframe(1), step)

    def handled(code: CodeType, offset: int, error: BaseException) -> None:
        if code in looked_at and is_of_trace():
            observer.raised(error)

    caught = monitoring.events.EXCEPTION_HANDLED
    monitoring.register_callback(tool, start, started)
    monitoring.register_callback(tool, instruction, executed)
    monitoring.register_callback(tool, caught, handled)
    monitoring.set_events(tool, start | caught)
    monitoring.restart_events()
    try:
        yield
    finally:
        monitoring.set_events(tool, 0)
        for code in list(looked_at):  # another thread may be about to add one
            monitoring.set_local_events(tool, code, 0)
        for event in (start, instruction, caught):
            monitoring.register_callback(tool, event, None)  # it would live on with what it holds
        monitoring.free_tool_id(tool)
