"""Numbers that a traced step reads: hyperparameters, and tensor values read by `.item()`.

A scheduled hyperparameter (`lr`, betas, momentum, weight decay) enters the graph as a 0-dim
float64 tensor; the optimizer sees its `.item()` as a symbolic float. Optimizers compare such
numbers with constants (`if momentum != 0`). `ScheduledFloat` answers from the value at capture and
records the answer, so that the graph holds for every value that gives the same answers.
"""

from __future__ import annotations

import functools
import operator
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from graphopt import _compat
from graphopt.errors import CaptureError
from graphopt.tracing.source import current_user_line, is_torch_file

SCHEDULED = ("lr", "betas", "momentum", "weight_decay")
"""Settings of a parameter group that schedulers change; all others are guarded by value."""

Predicate = tuple[str, float, bool]
"""(comparison, constant, answer): for example ``("ne", 0.0, True)``."""


def holds(value: float, predicate: Predicate) -> bool:
    name, constant, answer = predicate
    compare: Callable[[float, float], bool] = getattr(operator, name)
    return compare(value, constant) is answer


@dataclass
class Comparisons:
    """What was asked about one hyperparameter while tracing."""

    predicates: list[Predicate] = field(default_factory=list)


ARITHMETIC = (operator.add, operator.sub, operator.mul, operator.truediv, operator.pow)
"""Operators that `TracedFloat` records itself."""


class TracedFloat(torch.SymFloat):
    """A symbolic float whose arithmetic is recorded as it is written, operator by operator."""


def _forward(function: Callable[..., Any]) -> Callable[[TracedFloat, Any], Any]:
    def method(self: TracedFloat, other: Any) -> Any:
        return record(function, self, other)

    return method


def _reflected(function: Callable[..., Any]) -> Callable[[TracedFloat, Any], Any]:
    def method(self: TracedFloat, other: Any) -> Any:
        return record(function, other, self)

    return method


for _function in ARITHMETIC:
    setattr(TracedFloat, f"__{_function.__name__}__", _forward(_function))
    setattr(TracedFloat, f"__r{_function.__name__}__", _reflected(_function))


def record(function: Callable[..., Any], *args: Any) -> Any:
    """`function(*args)` of symbolic floats and Python numbers, as one node."""
    if not all(isinstance(arg, (torch.SymFloat, int, float)) for arg in args):
        return NotImplemented
    return as_read(_compat.record_number(function, args))


class ScheduledFloat(TracedFloat):
    """A hyperparameter inside the trace.

    Args:
        symbolic: the `.item()` of `tensor`.
        tensor: the 0-dim float64 graph input; fused optimizers take it as `tensor_lr`.
        value: the number at capture, in which comparisons are answered.
        asked: where the answers are recorded.
    """

    def __init__(
        self, symbolic: torch.SymFloat, tensor: torch.Tensor, value: float, asked: Comparisons
    ) -> None:
        super().__init__(symbolic.node)
        self.tensor = tensor
        self.value = value
        self.asked = asked

    def _answer(self, name: str, other: Any) -> Any:
        if not isinstance(other, (int, float)):
            return getattr(torch.SymFloat, f"__{name}__")(self, other)
        result = bool(getattr(operator, name)(self.value, other))
        predicate = (name, float(other), result)
        if predicate not in self.asked.predicates:
            self.asked.predicates.append(predicate)
        return result

    def __eq__(self, other: object) -> Any:
        return self._answer("eq", other)

    def __ne__(self, other: object) -> Any:
        return self._answer("ne", other)

    def __lt__(self, other: Any) -> Any:
        return self._answer("lt", other)

    def __le__(self, other: Any) -> Any:
        return self._answer("le", other)

    def __gt__(self, other: Any) -> Any:
        return self._answer("gt", other)

    def __ge__(self, other: Any) -> Any:
        return self._answer("ge", other)

    def __bool__(self) -> bool:
        return bool(self._answer("ne", 0.0))

    def __hash__(self) -> int:
        return id(self)


class Notes(Protocol):
    """Who is told what a step does with numbers."""

    def add_number(self, number: Any) -> None:
        """The step gets to see a number."""

    def refuse(self, error: CaptureError) -> CaptureError:
        """The step is refused, even if it goes on: some code swallows errors, as `logging` does."""


_made: ContextVar[Notes | None] = ContextVar("made", default=None)


@contextmanager
def noting(made: Notes) -> Iterator[None]:
    """While active, `made` is told what the step does with numbers."""
    token = _made.set(made)
    try:
        yield
    finally:
        _made.reset(token)


def _refuse_text(self: Any, *spec: str) -> str:
    if is_torch_file(sys._getframe(1).f_code.co_filename):
        return f"{type(self).__name__}({self.node})"  # messages and logs of torch's own
    error = CaptureError(
        "the value of a tensor is turned into text",
        location=str(current_user_line()),
        hint="let a function do it that is called in every step: graphopt.callback(print, loss), or"
        " return the value from the step and print it outside",
    )
    made = _made.get()
    raise error if made is None else made.refuse(error)


class ReadFloat(TracedFloat):
    """What `.item()` of a traced floating-point tensor gives: usable in arithmetic, not as text."""


class ReadInt(torch.SymInt):
    """What `.item()` of a traced integer tensor gives: usable in arithmetic, not as text."""


class ReadBool(torch.SymBool):
    """What `.item()` of a traced boolean tensor gives, and what comparing such numbers does."""


_READ = {torch.SymFloat: ReadFloat, torch.SymInt: ReadInt, torch.SymBool: ReadBool}
_TEXT = ("__str__", "__repr__", "__format__")


def as_read(value: Any) -> Any:
    """The result of `Tensor.item()`, of which it is known when it is kept, and which cannot be
    turned into text."""
    if isinstance(value, (list, tuple)):
        return type(value)(map(as_read, value))
    kind = _READ.get(type(value))
    if kind is None:
        return value
    read = kind(value.node)
    made = _made.get()
    if made is not None:
        made.add_number(read)
    return read


def _itself(self: Any, memo: Any = None) -> Any:
    return self


def _reading(name: str, base: type) -> Callable[..., Any]:
    original = getattr(base, name)

    @functools.wraps(original)
    def method(self: Any, *args: Any) -> Any:
        return as_read(original(self, *args))

    return method


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

for _base, _kind in _READ.items():
    for _name in _operators_of(_kind, _base):
        setattr(_kind, _name, _reading(_name, _base))
for _number in (*_READ.values(), ScheduledFloat):
    for _name in _TEXT:
        setattr(_number, _name, _refuse_text)
    for _name in ("__copy__", "__deepcopy__"):
        setattr(_number, _name, _itself)
