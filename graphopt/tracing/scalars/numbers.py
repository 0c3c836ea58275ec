"""Traced numbers that a step reads from tensors, by `.item()` and the like.

Numbers whose values are known before a call are more than that: `host_numbers`.
"""

from __future__ import annotations

import functools
import operator
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import torch

from graphopt import _compat
from graphopt._compat.own_tracing import untraced
from graphopt.errors import CaptureError
from graphopt.host.context import while_set
from graphopt.ir.user_frames import current_location, is_torch_file
from graphopt.tracing.scalars.functions import (
    GIVING_INTEGERS,
    is_numpy_float,
    numpy_float64,
    of_numpy,
)

if TYPE_CHECKING:
    from graphopt.tracing.tensors.obtained import ObtainedValues

SCHEDULED = ("lr", "betas", "momentum", "weight_decay")
"""Settings of a parameter group that schedulers change; all others are guarded by value."""

SYMBOLIC = (torch.SymFloat, torch.SymInt, torch.SymBool)
"""What reading the value of a traced tensor gives."""

ARITHMETIC = (
    *(operator.add, operator.sub, operator.mul, operator.truediv, operator.pow),
    *(operator.floordiv, operator.mod),
)
"""Operators that `TracedFloat` records itself."""


class TracedFloat(torch.SymFloat):
    """A symbolic float whose arithmetic becomes graph nodes, operator by operator."""

    def known_result(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """The result of `function(*args)` if it is known before a call, else None."""
        return None

    def as_scalar(self) -> Any:
        """This number, converted to a numpy scalar in the graph if it is one in eager code."""
        return self

    def as_integer(self) -> torch.SymInt | None:
        """This number as a symbolic integer, if it is one in each call; else None."""
        return None

    def __divmod__(self, other: Any) -> Any:
        return _quotient(self, other)

    def __rdivmod__(self, other: Any) -> Any:
        return _quotient(other, self)


def _quotient(a: Any, b: Any) -> Any:
    """`divmod(a, b)` for traced numbers."""
    parts = record(operator.floordiv, a, b), record(operator.mod, a, b)
    return NotImplemented if any(part is NotImplemented for part in parts) else parts


def forward(function: Callable[..., Any]) -> Callable[[TracedFloat, Any], Any]:
    """A method that records `function(self, other)`."""
    return lambda self, other: record(function, self, other)


def reflected(function: Callable[..., Any]) -> Callable[[TracedFloat, Any], Any]:
    """A method that records `function(other, self)`."""
    return lambda self, other: record(function, other, self)


for _function in ARITHMETIC:
    setattr(TracedFloat, f"__{_function.__name__}__", forward(_function))
    setattr(TracedFloat, f"__r{_function.__name__}__", reflected(_function))


def record(function: Callable[..., Any], *args: Any) -> Any:
    """Records `function(*args)` on symbolic floats and plain numbers as one node."""
    if any(isinstance(arg, torch.SymInt) for arg in args):
        return _record_among_integers(function, args)
    # What says of itself that it is a float, as an array of one does, answers for itself.
    if not all(issubclass(type(arg), (torch.SymFloat, int, float)) for arg in args):
        return NotImplemented
    if all(issubclass(type(arg), torch.SymFloat) or type(arg) in _PLAIN for arg in args):
        return untraced(_record, function, args)
    return _record(function, args)  # which runs code of the user's, in a number of another class


def _record_among_integers(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Records `function(*args)` if one of the numbers is a symbolic integer."""
    if not all(issubclass(type(arg), (torch.SymInt, torch.SymFloat, int, float)) for arg in args):
        return NotImplemented
    integers = with_integers(args)
    floats = any(isinstance(arg, (torch.SymFloat, float)) for arg in integers)
    if floats or function is operator.truediv:  # for torch a question about what is divided
        return _recorded(function, integers)
    return as_read(function(*integers))


def with_integers(args: Iterable[Any]) -> tuple[Any, ...]:
    """The arguments with bools, and floats that are integers in each call, as integers."""
    found = [
        arg.as_integer() if issubclass(type(arg), (TracedFloat, ReadBool)) else None for arg in args
    ]
    return tuple(
        arg if integer is None else integer for arg, integer in zip(args, found, strict=True)
    )


_PLAIN = (int, float, bool)


def _record(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    for traced in (arg for arg in args if issubclass(type(arg), TracedFloat)):
        result = type(traced).known_result(traced, function, args)
        if result is not None:
            return result
    if function in GIVING_INTEGERS and len(args) == 1:
        return as_read(_compat.record_integer(function, args))
    return _recorded(function, args)


def _recorded(function: Callable[..., Any], args: Iterable[Any]) -> Any:
    """Records a float as one node; a numpy scalar if an argument is one."""
    args = tuple(a.as_scalar() if issubclass(type(a), TracedFloat) else a for a in args)
    args = tuple(_scalar(a, args) if is_numpy_float(a) else a for a in args)
    result = as_read(_compat.record_number(function, args))
    if function is not float and any(map(may_be_of_numpy, args)):
        result.of_numpy = True
    return result


def _scalar(constant: Any, among: tuple[Any, ...]) -> Any:
    """A node for a numpy scalar constant, which generated code cannot contain."""
    scalar = as_read(_compat.record_number(numpy_float64, (float(constant),), among))
    scalar.of_numpy = True
    return scalar


def may_be_of_numpy(value: Any) -> bool:
    """True if a traced number may be a numpy scalar when the graph runs."""
    return isinstance(value, torch.SymFloat) and "of_numpy" in vars(value)


_made: ContextVar[ObtainedValues | None] = ContextVar("made", default=None)


def current_notes() -> ObtainedValues | None:
    """The listener for events about traced numbers in this thread; None outside a trace."""
    return _made.get()


def noting(made: ObtainedValues) -> AbstractContextManager[None]:
    """While active, `made` receives the events of traced numbers."""
    return while_set(_made, made)


def refusal(reason: str, hint: str) -> CaptureError:
    """The error that refuses the step at the line that runs, even if the step catches it."""
    return refused(CaptureError(reason, location=current_location(), hint=hint))


def refused(error: CaptureError) -> CaptureError:
    """Refuses the step even if it catches the error; returns that error."""
    made = _made.get()
    return error if made is None else made.refuse(error)


def _as_text(function: Callable[..., str]) -> Callable[..., str]:
    def method(self: Any, *spec: str) -> str:
        made = _made.get()
        if made is None or is_torch_file(sys._getframe(1).f_code.co_filename):
            return f"{type(self).__name__}({self.node})"  # messages and logs of torch's own
        return made.text(function, (self, *spec))

    return method


_FLOATS = (torch.SymFloat, float)


def _refuse_array(self: Any, *args: Any, **options: Any) -> Any:
    made = _made.get()
    raise TypeError("a number of a graph is no array") if made is None else made.array("of numbers")


class ReadFloat(TracedFloat):
    """The result of `.item()` of a traced float tensor: for arithmetic, not for text."""

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        """Records the arithmetic of a numpy scalar with this number."""
        function = of_numpy(ufunc) if method == "__call__" and not options else None
        if function is None or not all(issubclass(type(each), _FLOATS) for each in inputs):
            return _refuse_array(self)
        return record(function, *inputs)

    def __round__(self, digits: Any = None) -> Any:
        return record(round, self) if digits is None else record(round, self, digits)

    def is_integer(self) -> Any:
        """True if the number has no fraction; False for NaN and infinity."""
        return record(operator.mod, self, 1.0) == 0.0


def compared(compare: Callable[[Any, Any], Any], one: Any, other: Any) -> Any:
    """Records `compare(one, other)` as a node, since even `x == x` does not hold for all numbers
    (NaN)."""
    if is_numpy_float(other):  # the answer is of numpy's kind, whatever is done with it
        return sys.modules["numpy"].bool_(bool(compared(compare, one, float(other))))
    if isinstance(other, torch.SymFloat) or type(other) in _PLAIN:
        return as_read(untraced(_compat.record_truth, compare, (one, other)))
    return NotImplemented


def _comparing(compare: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    original = getattr(torch.SymFloat, f"__{compare.__name__}__")

    @functools.wraps(original)
    def method(self: Any, other: Any) -> Any:
        answer = compared(compare, self, other)
        return as_read(original(self, other)) if answer is NotImplemented else answer

    return method


COMPARISONS = (operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge)
for _compare in COMPARISONS:
    setattr(ReadFloat, f"__{_compare.__name__}__", _comparing(_compare))
ReadFloat.__hash__ = torch.SymFloat.__hash__  # type: ignore[method-assign]


class ReadInt(torch.SymInt):
    """The result of `.item()` of a traced integer tensor: for arithmetic, not for text."""

    def __divmod__(self, other: Any) -> Any:
        return self // other, self % other

    def __rdivmod__(self, other: Any) -> Any:
        return other // self, other % self


class TakenInt(ReadInt):
    """The result of `int(tensor)`: torch functions that need a plain number (a size) get that, on
    which the graph is then specialized."""


class ReadBool(torch.SymBool):
    """The result of `.item()` of a traced bool tensor, or of comparing traced numbers."""

    def __eq__(self, other: Any) -> Any:
        return bool(self) == _decided(other)

    def __ne__(self, other: Any) -> Any:
        return bool(self) != _decided(other)

    def as_integer(self) -> Any:
        """A symbolic integer: 1 if true, else 0."""
        return as_read(_compat.record_integer(int, (self,)))


def _decided(value: Any) -> Any:
    return bool(value) if isinstance(value, torch.SymBool) else value


def _as_integer(function: Callable[..., Any], on_the_right: bool = False) -> Callable[..., Any]:
    """A method that computes with a traced bool as an integer."""

    def method(self: ReadBool, *others: Any) -> Any:
        if any(isinstance(other, torch.Tensor) for other in others):
            return NotImplemented
        numbers = (self, *others)[:: -1 if on_the_right else 1]
        return function(*(n.as_integer() if type(n) is ReadBool else n for n in numbers))

    return method


for _function in ARITHMETIC:
    setattr(ReadBool, f"__{_function.__name__}__", _as_integer(_function))
    setattr(ReadBool, f"__r{_function.__name__}__", _as_integer(_function, on_the_right=True))
for _sign in (operator.neg, operator.pos, operator.abs):
    setattr(ReadBool, f"__{_sign.__name__}__", _as_integer(_sign))


_READ = {torch.SymFloat: ReadFloat, torch.SymInt: ReadInt, torch.SymBool: ReadBool}


def as_read(value: Any) -> Any:
    """Wraps the result of `Tensor.item()` so that it is tracked and cannot become text."""
    if isinstance(value, (list, tuple)):
        return type(value)(map(as_read, value))
    kind = _READ.get(type(value))
    if kind is None:
        return value
    return noted(kind(value.node))


def is_float_read(value: Any) -> bool:
    """True if a value is a traced float. Integers that are known before a call are none."""
    return isinstance(value, torch.SymFloat) and not isinstance(value, int)


def truth(tensor: torch.Tensor) -> bool:
    """The truth of a traced one-element tensor in this call."""
    return bool(as_read(tensor.item()))


def noted(number: Any) -> Any:
    """Records that the step obtains a number, and returns it."""
    made = _made.get()
    if made is not None:
        made.add_number(number)
    return number


def _itself(self: Any, memo: Any = None) -> Any:
    return self


def _reading(name: str, base: type) -> Callable[..., Any]:
    original = getattr(base, name)

    @functools.wraps(original)
    def method(self: Any, *args: Any) -> Any:
        if base is torch.SymInt:
            args = with_integers(args)
        result = as_read(original(self, *args))
        return taken(result) if type(self) is TakenInt else result

    return method


def taken(number: Any) -> Any:
    """Converts a traced integer to the result of `int(tensor)`; other numbers unchanged."""
    return noted(TakenInt(number.node)) if type(number) is ReadInt else number


def _operators_of(kind: type, base: type) -> Iterator[str]:
    """The names of arithmetic and comparison methods that `base` has and `kind` does not define."""
    for name in dir(base):
        own = any(name in vars(c) for c in kind.__mro__[: kind.__mro__.index(base)])
        if (name in _OPERATORS or name.startswith("__sym_")) and not own:
            yield name


_UNARY = ("neg", "pos", "abs", "invert", "round", "trunc", "floor", "ceil")
_BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift")
_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge", "rshift", "int_truediv")
_OPERATORS = frozenset(
    f"__{name}__" for name in (*_UNARY, *_BINARY, *_COMPARISONS, *(f"r{n}" for n in _BINARY))
)


def _hashing(kind: type, base: type) -> Callable[[Any], int]:
    """A `__hash__` by the number's value in this call, for dictionaries and sets."""
    original: Any = base.__hash__

    def method(self: Any) -> int:
        if is_torch_file(sys._getframe(1).f_code.co_filename):
            return int(original(self))
        return hash(kind(self))

    return method


def _deciding(name: str, kind: type, base: type) -> Callable[[Any], Any]:
    original = getattr(base, name)

    @functools.wraps(original)
    def method(self: Any) -> Any:
        made = _made.get()
        try:
            return original(self)  # known for all values, such as that a size is not negative
        except _compat.data_dependent_errors():
            if made is None:
                raise
            return made.decide(self, kind)

    return method


for _base, _kind in _READ.items():
    _kind.__bool__ = _deciding("__bool__", bool, _base)  # type: ignore[attr-defined]
for _name, _division in (("truediv", forward), ("rtruediv", reflected)):
    setattr(ReadInt, f"__{_name}__", _division(operator.truediv))
for _name in ("__index__", "__int__"):
    setattr(ReadInt, _name, _deciding(_name, int, torch.SymInt))
for _base, _plain in ((torch.SymInt, int), (torch.SymBool, bool)):
    _READ[_base].__hash__ = _hashing(_plain, _base)  # type: ignore[method-assign,assignment]
for _base, _kind in _READ.items():
    for _name in _operators_of(_kind, _base):
        setattr(_kind, _name, _reading(_name, _base))
for _number in _READ.values():
    for _writes in (str, repr, format):
        setattr(_number, f"__{_writes.__name__}__", _as_text(_writes))
    for _name in ("__copy__", "__deepcopy__"):
        setattr(_number, _name, _itself)
    _number.__array__ = _refuse_array  # type: ignore[attr-defined]
