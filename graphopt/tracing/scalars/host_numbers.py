"""Numbers known before a call: optimizer settings and counts, and numeric arguments.

    lr, betas, state["step"], batch_idx  ──▶  0-dim float64 inputs of the graph
    arithmetic, `math`, `max` on them    ──▶  nodes that compute with Python numbers
    comparisons of them                  ──▶  answered now; the answer is a condition of the graph
    all else (`range(n)`, text, sizes)   ──▶  the number itself, under the condition that it is it

So a graph holds for all values that give the same answers, which is found out before a call runs.
"""

from __future__ import annotations

import builtins
import math
import operator
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from graphopt import _compat
from graphopt.ir.user_frames import is_torch_file
from graphopt.tracing.scalars.expressions import (
    Application,
    Condition,
    Conditions,
    Leaf,
    leaves_of,
    same_value,
)
from graphopt.tracing.scalars.functions import (
    ALIKE_IN_NUMPY,
    BITWISE,
    is_numpy_float,
    numpy_float64,
    of_numpy,
)
from graphopt.tracing.scalars.numbers import (
    COMPARISONS,
    TracedFloat,
    as_read,
    compared,
    current_notes,
    forward,
    noted,
    record,
    reflected,
)

if TYPE_CHECKING:
    from graphopt.tracing.tensors.obtained import ObtainedValues

EXACT = 2**53
"""Integers below are numbers in float64 themselves."""


class HostNumber(TracedFloat):
    """A traced number whose value is known before each call.

    Args:
        symbolic: what stands for it in the graph.
        value: the number at capture.
        expression: how it is computed from the numbers that the graph takes.
        conditions: where answers are noted.
        notes: of the trace that it belongs to.

    Attributes:
        made_by: the function that has computed it, with its arguments; None where none has.
    """

    made_by: tuple[Callable[..., Any] | None, tuple[Any, ...]] = (None, ())

    def __init__(
        self,
        symbolic: torch.SymFloat,
        value: Any,
        expression: Any,
        conditions: Conditions,
        notes: ObtainedValues,
    ) -> None:
        torch.SymFloat.__init__(self, symbolic.node)
        self.value = value
        self.expression = expression
        self.conditions = conditions
        self.notes = notes
        self._integer: torch.SymInt | None = None

    # `isinstance(number, int)` in a step gets the answer that it gets for the number.
    __class__ = property(lambda self: _class_of(self))

    def known_result(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        return _known(function, args)

    def as_scalar(self) -> Any:
        return scalar_of_numpy(self)

    def as_integer(self) -> torch.SymInt | None:
        if type(self.value) is not int:
            return None
        if self._integer is None:
            self._integer = _compat.record_integer(int, (self,))
        return self._integer

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        """Traces a numpy ufunc on this number."""
        if self.notes is not current_notes() or method != "__call__" or options.get("out"):
            return NotImplemented
        function = of_numpy(ufunc)
        if function is not None and not options and any(map(is_of_numpy, inputs)):
            return record(function, *inputs)
        known = [each.exactly() if is_host_number(each) else each for each in inputs]
        return ufunc(*known, **options)

    def __array_function__(self, function: Any, types: Any, args: Any, options: Any) -> Any:
        def exact(value: Any) -> Any:
            return value.exactly() if is_host_number(value) else value

        return function(*_compat.tree_map(exact, args), **_compat.tree_map(exact, options))

    def __array__(self, *args: Any, **options: Any) -> Any:
        """Converts the present number to an array; the graph is then specialized on it."""
        return sys.modules["numpy"].asarray(self.handed_out(), *args, **options)

    def exactly(self) -> Any:
        """Returns the plain number; the graph is then specialized on it."""
        if isinstance(self.expression, (Leaf, Application)):
            self.conditions.add(Condition(same_value, self.expression, self.value, True))
        return self.value

    def handed_out(self, text: bool = False) -> Any:
        """Returns the plain number for arbitrary Python code, and records that."""
        self.notes.hand_out(leaves_of(self.expression), text)
        return self.exactly()

    def taken_here(self) -> HostNumber:
        """A copy of the number, recorded as obtained at the current line."""
        number = self.copied()
        noted(number)
        return number

    def copied(self) -> HostNumber:
        """Returns this number as a new object."""
        number = HostNumber(self, self.value, self.expression, self.conditions, self.notes)
        number.made_by = self.made_by
        return number

    def rounded(self) -> int:
        """The integer part of a float; the graph is then specialized on it."""
        value = int(self.value)
        term = Application(int, (self.expression,))
        self.conditions.add(Condition(same_value, term, value, True))
        return value

    def __getattr__(self, name: str) -> Any:
        """Attributes that numbers have and symbolic ones lack, such as `bit_length`."""
        if name.startswith("_") or "value" not in vars(self):
            raise AttributeError(name)
        return getattr(self.handed_out(), name)

    def __pow__(self, other: Any, modulus: Any = None) -> Any:
        if modulus is None:
            return record(operator.pow, self, other)
        return pow(self.handed_out(), *map(_handed_out, (other, modulus)))

    def __round__(self, digits: Any = None) -> Any:
        if digits is None:
            return record(round, self)
        return record(round, self, _handed_out(digits))

    def __bool__(self) -> bool:
        return (
            bool(self.value)
            if self.notes is not current_notes()
            else bool(_compared(operator.ne, self, 0))
        )

    def __hash__(self) -> int:
        if is_torch_file(sys._getframe(1).f_code.co_filename):
            return id(self)
        return hash(self.handed_out())


def _class_of(number: Any) -> type:
    value = vars(number).get("value")
    return HostNumber if value is None else type(value)


class ScheduledFloat(HostNumber):
    """A number that is itself a graph input, such as a learning rate.

    Args:
        tensor: the 0-dim float64 input; fused optimizers take it as `tensor_lr`.
    """

    def __init__(
        self,
        symbolic: torch.SymFloat,
        tensor: torch.Tensor,
        value: Any,
        index: int,
        conditions: Conditions,
        notes: ObtainedValues,
    ) -> None:
        HostNumber.__init__(self, symbolic, value, Leaf(index), conditions, notes)
        self.tensor = tensor


def stand_in_of_number(
    tensor: torch.Tensor, value: Any, index: int, conditions: Conditions, notes: ObtainedValues
) -> HostNumber:
    """The stand-in of a number, given its graph input.

    Args:
        tensor: 0-dim, float64, of the trace.
        value: in this call.
        index: of the number among those that the graph takes.
    """
    leaf = ScheduledFloat(tensor.item(), tensor, value, index, conditions, notes)  # type: ignore[arg-type]
    if not isinstance(value, int):
        return leaf
    integer = _compat.record_number(int, (leaf,))
    return HostNumber(integer, value, leaf.expression, conditions, notes)


def is_host_number(value: Any) -> bool:
    """True if a value is a traced number that is known before each call."""
    return issubclass(type(value), HostNumber)


def plain(value: Any) -> Any:
    """A nested key with plain numbers in place of host numbers."""
    if type(value) in (list, tuple):
        return type(value)(map(plain, value))
    if type(value) is slice:
        return slice(plain(value.start), plain(value.stop), plain(value.step))
    return value.value if is_host_number(value) else value


def _known(function: Callable[..., Any], args: Sequence[Any]) -> HostNumber | None:
    """`function(*args)` on host numbers and constants as a host number; None for other values."""
    numbers = [arg for arg in args if is_host_number(arg)]
    if not numbers or len(numbers) < sum(isinstance(arg, torch.SymFloat) for arg in args):
        return None
    if not all(isinstance(arg, (int, float)) for arg in args):
        return None
    values = [arg.value if is_host_number(arg) else arg for arg in args]
    if any(map(is_of_numpy, values)) and not _is_alike_in_numpy(function, args, values):
        return function(*(arg.exactly() if is_host_number(arg) else arg for arg in args))  # type: ignore[no-any-return]
    value = function(*values)
    if type(value) not in (int, float) and not is_of_numpy(value):
        return None
    args = tuple(
        float(arg) if is_of_numpy(arg) and not is_host_number(arg) else arg for arg in args
    )
    expressions = tuple(
        arg.expression if is_host_number(arg) else given
        for arg, given in zip(args, values, strict=True)
    )
    term, conditions = Application(function, expressions), numbers[0].conditions
    if function in _POWERS and (type(value) is int or type(args[1]) is not int):
        # Signs decide whether a power is an integer, a fraction or complex.
        conditions.add(Condition(_is_of, term, type(value), True))
    symbolic = _compat.record_number(function, args)
    number = HostNumber(symbolic, value, term, conditions, numbers[0].notes)
    if type(value) is int:
        number.made_by = function, tuple(map(_of_its_own, args))
    noted(number)
    return number


def _of_its_own(value: Any) -> Any:
    """A copy of a host number that nobody else holds; other values unchanged."""
    return value.copied() if is_host_number(value) else value


def scalar_of_numpy(number: Any) -> Any:
    """A host number that is a numpy scalar also when the graph runs; others unchanged."""
    if not (is_host_number(number) and is_of_numpy(number)):
        return number
    scalar = as_read(_compat.record_number(numpy_float64, (number,)))
    scalar.of_numpy = True
    return scalar


def is_of_numpy(value: object) -> bool:
    """True if a number is a numpy float. Its sums and products are those of floats; it divides by
    zero."""
    return is_numpy_float(value.value if is_host_number(value) else value)  # type: ignore[attr-defined]


def _is_alike_in_numpy(
    function: Callable[..., Any], args: Sequence[Any], values: Sequence[Any]
) -> bool:
    """True if a function gives the same on numpy scalars as on Python numbers. Only numpy divides
    by zero."""
    if function is not operator.truediv:
        return function in ALIKE_IN_NUMPY
    return bool(values[1]) and bool(args[1] != 0)  # a condition, where it is a host number


_POWERS = (operator.pow, builtins.pow)


def _is_of(value: Any, kind: type) -> bool:
    return type(value) is kind


def _compared(compare: Callable[[Any, Any], Any], left: Any, right: Any) -> Any:
    if left.notes is not current_notes():  # of a trace that is over, in a cache of the program's
        return NotImplemented
    other = right.value if is_host_number(right) else right
    if type(other) not in (int, float, bool) and not is_of_numpy(other):
        return NotImplemented
    answer = compare(left.value, other)  # of numpy's kind where one of them is
    expression = right.expression if is_host_number(right) else right
    left.conditions.add(Condition(compare, left.expression, expression, bool(answer)))
    return answer


def _comparison(compare: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def method(self: Any, other: Any) -> Any:
        answer = _compared(compare, self, other)
        if answer is NotImplemented and isinstance(other, torch.SymFloat):
            return compared(compare, self, other)
        return answer

    return method


def _unary(function: Callable[..., Any]) -> Callable[[Any], Any]:
    return lambda self: record(function, self)


def _exact(function: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: HostNumber, *args: Any) -> Any:
        of_torch = is_torch_file(sys._getframe(1).f_code.co_filename)
        if function is int and isinstance(self.value, float):
            if not of_torch:
                self.notes.hand_out(leaves_of(self.expression), False)
            return self.rounded()
        if of_torch:
            return function(self.exactly(), *args)
        return function(self.handed_out(text=function in _TEXTS), *args)

    return method


_TEXTS = (str, repr, format)


def _handed_out(value: Any) -> Any:
    return value.handed_out() if is_host_number(value) else value


for _compare in COMPARISONS:
    setattr(HostNumber, f"__{_compare.__name__}__", _comparison(_compare))
for _operator in BITWISE:
    _name = _operator.__name__.strip("_")
    setattr(HostNumber, f"__{_name}__", forward(_operator))
    setattr(HostNumber, f"__r{_name}__", reflected(_operator))
for _function in (
    *(operator.neg, operator.pos, operator.abs, operator.invert),
    *(math.trunc, math.floor, math.ceil),
):
    setattr(HostNumber, f"__{_function.__name__.strip('_')}__", _unary(_function))
for _name, _call in (
    *(("int", int), ("float", float), ("index", operator.index), ("str", str), ("repr", repr)),
    *(("format", format), ("complex", complex)),
):
    setattr(HostNumber, f"__{_name}__", _exact(_call))
for _name in ("as_integer_ratio", "is_integer", "hex", "conjugate"):
    setattr(HostNumber, _name, _exact(operator.methodcaller(_name)))
for _name in ("__copy__", "__deepcopy__"):
    setattr(HostNumber, _name, lambda self, memo=None: self)
