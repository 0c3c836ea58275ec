"""Functions on Python and numpy numbers that graph nodes may call.

Each is called in every call with numbers of the very kinds that it has at capture, so it gives what
it gives in eager code, bit for bit.
"""

from __future__ import annotations

import builtins
import math
import operator
import sys
from collections.abc import Callable
from typing import Any

_OF_FLOATS = (
    *("sqrt", "pow", "exp", "expm1", "log", "log2", "log10", "log1p", "sin", "cos", "tan", "tanh"),
    *("floor", "ceil", "fabs", "acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "cosh"),
    *("sinh", "copysign", "degrees", "radians", "erf", "erfc", "fmod", "gamma", "lgamma", "hypot"),
    *("remainder", "cbrt", "exp2"),
)
MATH: tuple[Any, ...] = tuple(getattr(math, n) for n in _OF_FLOATS if hasattr(math, n))
"""Functions of `math` that take an integer for the float that is equal to it."""

ROUNDING = (math.floor, math.ceil, math.trunc)
"""Functions of `math` that give an integer for a float, and an integer itself."""

GIVING_INTEGERS = frozenset({*ROUNDING, builtins.int, builtins.round})
"""Functions that give an integer for a float alone."""

BITWISE = (operator.and_, operator.or_, operator.xor, operator.lshift, operator.rshift)
CHOICES: tuple[Any, ...] = (builtins.max, builtins.min)


TESTS: tuple[Any, ...] = (math.isfinite, math.isnan, math.isinf)

ALIKE_IN_NUMPY = frozenset(
    {operator.add, operator.sub, operator.mul, operator.neg, operator.pos, operator.abs,
     builtins.float, builtins.int, *MATH}
)  # fmt: skip
"""What gives for numpy's floats what it gives for Python's, in every case."""


def numpy_float64(number: float) -> Any:
    """Converts a float to `numpy.float64`, a subclass of Python's `float`."""
    return sys.modules["numpy"].float64(number)


def is_numpy_float(value: object) -> bool:
    """True if a number is a numpy float that is also a Python float."""
    kind = type(value)
    return kind is not float and issubclass(kind, float) and kind.__module__ == "numpy"


PYTHON_FUNCTIONS: frozenset[Any] = frozenset(
    {*MATH, *GIVING_INTEGERS, *BITWISE, *CHOICES, *TESTS,
     builtins.float,
     operator.neg, operator.pos, operator.abs, operator.invert,
     operator.floordiv, operator.mod, numpy_float64}
)  # fmt: skip
"""What nodes of numbers may call besides `numbers.ARITHMETIC`."""


def of_numpy(ufunc: Any) -> Callable[..., Any] | None:
    """The Python operator equivalent to a numpy ufunc on scalars, or None."""
    return _OPERATORS.get(getattr(ufunc, "__name__", ""))


_OPERATORS: dict[str, Callable[..., Any]] = {
    "add": operator.add,
    "subtract": operator.sub,
    "multiply": operator.mul,
    "divide": operator.truediv,
    "true_divide": operator.truediv,
    "negative": operator.neg,
    "positive": operator.pos,
    "absolute": operator.abs,
}
