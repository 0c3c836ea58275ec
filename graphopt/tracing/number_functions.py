"""Functions of Python numbers that nodes of a graph may call.

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

OF_INTEGERS = (math.gcd, math.lcm, math.isqrt, math.factorial, math.comb, math.perm)
"""Functions of `math` that refuse floats."""

BITWISE = (operator.and_, operator.or_, operator.xor, operator.lshift, operator.rshift)
CHOICES: tuple[Any, ...] = (builtins.max, builtins.min)


def smallest(place: int, *numbers: float) -> float:
    """What is at a place among numbers that are sorted."""
    return sorted(numbers)[place]


def largest(place: int, *numbers: float) -> float:
    """What is at a place among numbers that are sorted the other way."""
    return sorted(numbers, reverse=True)[place]


TESTS: tuple[Any, ...] = (math.isfinite, math.isnan, math.isinf)

ALIKE_IN_NUMPY = frozenset(
    {operator.add, operator.sub, operator.mul, operator.neg, operator.pos, operator.abs,
     builtins.float, builtins.int, *MATH}
)  # fmt: skip
"""What gives for numpy's floats what it gives for Python's, in every case."""


def numpy_float64(number: float) -> Any:
    """A float as numpy's kind of float, which is one of Python's as well."""
    return sys.modules["numpy"].float64(number)


def numpy_float32(number: float) -> Any:
    """A float of single precision as numpy's scalar."""
    return sys.modules["numpy"].float32(number)


def numpy_int64(number: int) -> Any:
    """An integer as numpy's scalar."""
    return sys.modules["numpy"].int64(number)


def is_numpy_float(value: object) -> bool:
    """Whether a number is numpy's kind of float, which is one of Python's as well."""
    kind = type(value)
    return kind is not float and issubclass(kind, float) and kind.__module__ == "numpy"


def _of_floats(name: str) -> Any:
    """What a function of numpy's gives for a list of floats, as a function of the floats."""

    def function(*numbers: float) -> Any:
        return getattr(sys.modules["numpy"], name)(numbers)

    function.__name__ = function.__qualname__ = f"numpy_{name}"
    return function


numpy_mean, numpy_sum, numpy_std, numpy_var = map(_of_floats, ("mean", "sum", "std", "var"))
numpy_median, numpy_max, numpy_min = map(_of_floats, ("median", "max", "min"))
OF_FLOATS_IN_NUMPY: dict[str, Any] = {
    **{f.__name__.removeprefix("numpy_"): f
       for f in (numpy_mean, numpy_sum, numpy_std, numpy_var, numpy_median, numpy_max, numpy_min)},
    "average": numpy_mean, "amax": numpy_max, "amin": numpy_min,
}  # fmt: skip
"""Functions of the floats of a list, by what numpy calls them."""

SCALARS_OF_NUMPY = {f.__name__.removeprefix("numpy_"): f
                    for f in (numpy_float64, numpy_float32, numpy_int64)}  # fmt: skip
"""What gives a scalar of numpy's, by the name of its kind."""


PYTHON_FUNCTIONS: frozenset[Any] = frozenset(
    {*MATH, *GIVING_INTEGERS, *OF_INTEGERS, *BITWISE, *CHOICES, smallest, largest, *TESTS,
     builtins.float,
     operator.neg, operator.pos, operator.abs, operator.invert,
     operator.floordiv, operator.mod, *SCALARS_OF_NUMPY.values(), *OF_FLOATS_IN_NUMPY.values()}
)  # fmt: skip
"""What nodes of numbers may call besides `numbers.ARITHMETIC`."""


def of_numpy(ufunc: Any) -> Callable[..., Any] | None:
    """The operator that does to floats what a function of numpy's does to its scalars."""
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
