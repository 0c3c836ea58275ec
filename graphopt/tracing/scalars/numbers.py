"""Numbers that a traced step reads from tensors, by `.item()` and the like.

Numbers whose values are known before a call are more than that: `host_numbers`.
"""

from __future__ import annotations

import functools
import operator
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any, Protocol

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
    """A symbolic float whose arithmetic is recorded as it is written, operator by operator."""

    def known_result(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """`function(*args)`, where more is known of it than that it is a number, else None."""
        return None

    def as_scalar(self) -> Any:
        """The same number, of numpy's kind when the graph runs where it is one before."""
        return self

    def as_integer(self) -> torch.SymInt | None:
        """The same number among integers, where it is one in each call."""
        return None

    def __divmod__(self, other: Any) -> Any:
        return _quotient(self, other)

    def __rdivmod__(self, other: Any) -> Any:
        return _quotient(other, self)


def _quotient(a: Any, b: Any) -> Any:
    """`divmod(a, b)`."""
    parts = record(operator.floordiv, a, b), record(operator.mod, a, b)
    return NotImplemented if any(part is NotImplemented for part in parts) else parts


def forward(function: Callable[..., Any]) -> Callable[[TracedFloat, Any], Any]:
    """A method that records an operator of a number and another one."""
    return lambda self, other: record(function, self, other)


def reflected(function: Callable[..., Any]) -> Callable[[TracedFloat, Any], Any]:
    """The same with the other one on the left."""
    return lambda self, other: record(function, other, self)


for _function in ARITHMETIC:
    setattr(TracedFloat, f"__{_function.__name__}__", forward(_function))
    setattr(TracedFloat, f"__r{_function.__name__}__", reflected(_function))


def record(function: Callable[..., Any], *args: Any) -> Any:
    """`function(*args)` of symbolic floats and Python numbers, as one node."""
    if any(isinstance(arg, torch.SymInt) for arg in args):
        return _record_among_integers(function, args)
    # What says of itself that it is a float, as an array of one does, answers for itself.
    if not all(issubclass(type(arg), (torch.SymFloat, int, float)) for arg in args):
        return NotImplemented
    if all(issubclass(type(arg), torch.SymFloat) or type(arg) in _PLAIN for arg in args):
        return untraced(_record, function, args)
    return _record(function, args)  # which runs code of the user's, in a number of another class


def _record_among_integers(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """`function(*args)`, where one of the numbers is a symbolic integer."""
    if not all(issubclass(type(arg), (torch.SymInt, torch.SymFloat, int, float)) for arg in args):
        return NotImplemented
    integers = with_integers(args)
    floats = any(isinstance(arg, (torch.SymFloat, float)) for arg in integers)
    if floats or function is operator.truediv:  # for torch a question about what is divided
        return _recorded(function, integers)
    return as_read(function(*integers))


def with_integers(args: Iterable[Any]) -> tuple[Any, ...]:
    """Arguments, of which truths, and those that are integers in each call, are among integers."""
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
    """A float as one node, which is of numpy's kind where an argument is."""
    args = tuple(a.as_scalar() if issubclass(type(a), TracedFloat) else a for a in args)
    args = tuple(_scalar(a, args) if is_numpy_float(a) else a for a in args)
    result = as_read(_compat.record_number(function, args))
    if function is not float and any(map(may_be_of_numpy, args)):
        result.of_numpy = True
    return result


def _scalar(constant: Any, among: tuple[Any, ...]) -> Any:
    """A constant of numpy's kind of float, which a node makes: no code can be written of it."""
    scalar = as_read(_compat.record_number(numpy_float64, (float(constant),), among))
    scalar.of_numpy = True
    return scalar


def may_be_of_numpy(value: Any) -> bool:
    """Whether a traced number may be numpy's kind of float when the graph runs."""
    return isinstance(value, torch.SymFloat) and "of_numpy" in vars(value)


class NumberListener(Protocol):
    """Who is told what a step does with numbers.

    Attributes:
        positions: numbers that are known before the graph runs, as positions.
    """

    positions: Any

    def add_number(self, number: Any) -> None:
        """The step gets to see a number."""

    def hand_out(self, numbers: Iterable[int], text: bool) -> None:
        """The step takes a number itself, or its text, that was computed from these inputs."""

    def decide(self, number: Any, kind: type) -> Any:
        """What a number is in this call; the graph holds where it is that again."""

    def text(self, function: Callable[..., str], args: tuple[Any, ...]) -> str:
        """The text that a function gives of a value of the graph, for which the step is refused."""

    def array(self, what: str) -> CaptureError:
        """The refusal of a step that makes an array of numpy's of values of the graph."""

    def refuse(self, error: CaptureError) -> CaptureError:
        """The step is refused, even if it goes on: some code swallows errors, as `logging` does."""


_made: ContextVar[NumberListener | None] = ContextVar("made", default=None)


def current_notes() -> NumberListener | None:
    """Who is told now; None outside a trace."""
    return _made.get()


def noting(made: NumberListener) -> AbstractContextManager[None]:
    """While active, `made` is told what the step does with numbers."""
    return while_set(_made, made)


def refusal(reason: str, hint: str) -> CaptureError:
    """The refusal of a step, even if it swallows the error."""
    error = CaptureError(reason, location=current_location(), hint=hint)
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
    """What `.item()` of a traced floating-point tensor gives: usable in arithmetic, not as text."""

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        """A scalar of numpy's computes with it, as with any other float."""
        function = of_numpy(ufunc) if method == "__call__" and not options else None
        if function is None or not all(issubclass(type(each), _FLOATS) for each in inputs):
            return _refuse_array(self)
        return record(function, *inputs)

    def __round__(self, digits: Any = None) -> Any:
        return record(round, self) if digits is None else record(round, self, digits)

    def is_integer(self) -> Any:
        """Whether it has no fraction; no for what is no number."""
        return record(operator.mod, self, 1.0) == 0.0


def compared(compare: Callable[[Any, Any], Any], one: Any, other: Any) -> Any:
    """`compare(one, other)` of a traced float and a number, answered in each call anew: what holds
    for all numbers (`x == x`) need not hold for NaN."""
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
    """What `.item()` of a traced integer tensor gives: usable in arithmetic, not as text."""

    def __divmod__(self, other: Any) -> Any:
        return self // other, self % other

    def __rdivmod__(self, other: Any) -> Any:
        return other // self, other % self


class TakenInt(ReadInt):
    """What `int(tensor)` gives: the number itself for functions of torch that need one, such as a
    size, which the graph holds for alone then."""


class ReadBool(torch.SymBool):
    """What `.item()` of a traced boolean tensor gives, and what comparing such numbers does."""

    def __eq__(self, other: Any) -> Any:
        return bool(self) == _decided(other)

    def __ne__(self, other: Any) -> Any:
        return bool(self) != _decided(other)

    def as_integer(self) -> Any:
        """1 where it is true in a call, else 0: what it is in arithmetic."""
        return as_read(_compat.record_integer(int, (self,)))


def _decided(value: Any) -> Any:
    return bool(value) if isinstance(value, torch.SymBool) else value


def _as_integer(function: Callable[..., Any], on_the_right: bool = False) -> Callable[..., Any]:
    """A method that computes with a truth, of numbers: tensors take it for a truth."""

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
    """The result of `Tensor.item()`, of which it is known when it is kept, and which cannot be
    turned into text."""
    if isinstance(value, (list, tuple)):
        return type(value)(map(as_read, value))
    kind = _READ.get(type(value))
    if kind is None:
        return value
    return noted(kind(value.node))


def is_float_read(value: Any) -> bool:
    """Whether a value is a float of the trace. Integers that are known before a call are none."""
    return isinstance(value, torch.SymFloat) and not isinstance(value, int)


def truth(tensor: torch.Tensor) -> bool:
    """Whether a traced tensor of one element is true in this call."""
    return bool(as_read(tensor.item()))


def noted(number: Any) -> Any:
    """A number of which it is known from now on when the step keeps it."""
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
    """The result of `int(tensor)`, of an integer that was read; other numbers themselves."""
    return noted(TakenInt(number.node)) if type(number) is ReadInt else number


def _operators_of(kind: type, base: type) -> Iterator[str]:
    """Arithmetic and comparisons that a symbolic number has and `kind` does not define itself."""
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
    """A dictionary or set of the step's asks which number it is in this call."""
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
