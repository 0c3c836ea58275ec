"""Functions of Python, numpy and torch that change nothing: each call may call them when its graph
has run."""

from __future__ import annotations

import builtins
import functools
import json
import math
import operator
import statistics
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from graphopt import _compat
from graphopt.tracing.arrays import CHANGING
from graphopt.tracing.replace import original
from graphopt.tracing.running_trace import BEGIN
from graphopt.tracing.source import is_library_file

FUNCTIONS = frozenset(
    {builtins.sum, builtins.min, builtins.max, builtins.len, builtins.sorted, builtins.abs, round,
     builtins.float, builtins.int, builtins.bool, list, tuple, any, all, divmod, pow, json.dumps,
     isinstance, repr, str, format}
)  # fmt: skip
"""Functions that change nothing."""
MAKING_TENSORS = frozenset(
    {
        torch.tensor,
        torch.as_tensor,
        torch.asarray,
        torch.from_numpy,
        torch.stack,
        torch.mean,
        torch.median,
    }
)
"""Functions of torch that make tensors of arrays, lists and numbers, and change nothing."""
NUMBERS = frozenset({sum, min, max, len, float, int})
"""What gives a number."""
MODULES = (math, statistics)
OF_LISTS = frozenset({"copy", "index", "count"})
TAKING = frozenset(
    {"append", "appendleft", "extend", "extendleft", "insert", "update", "setdefault"}
)
GOING_THROUGH = frozenset({reversed, enumerate, zip, iter, map, filter})
_MAKING = (dict, OrderedDict, defaultdict, deque)
"""Containers that are made of others."""
PASSING = frozenset({setattr, zip, enumerate, iter, reversed, *_MAKING, map, filter, next,
                      callable, id})  # fmt: skip
"""Functions that do nothing with the values that they hand on, or ask them."""

OF_TENSORS = frozenset(
    {"item", "tolist", "median", "float", "double", "long", "int", "cpu", "numpy", "detach",
     "quantile", "count", "index", "view", "bool", "unsqueeze", "total_seconds", "timestamp",
     "date"}
)  # fmt: skip
"""Methods of tensors, lists and times that change nothing."""
OF_ROWS = frozenset({"append", "appendleft", "extend", "insert", "add", "update"})
"""Methods that change a list, dictionary or set."""
GIVING_NUMBERS = frozenset({"item", "total_seconds", "timestamp"})
_OF_TEXTS = frozenset(
    {"format", "ljust", "rjust", "center", "strip", "lstrip", "rstrip", "upper", "lower", "title",
     "replace", "zfill", "removeprefix", "removesuffix", "capitalize", "expandtabs"}
)  # fmt: skip
"""Methods of texts that give a text."""
GIVING_TEXTS = (_OF_TEXTS - {"replace"}) | {"strftime", "isoformat", "ctime"}
"""Methods of texts and times that give a text, whatever they are of."""
ASKING_TEXTS = frozenset(
    {"startswith", "endswith", "find", "rfind", "count", "isdigit", "isalpha", "isupper", "islower",
     "splitlines", "casefold", "swapcase"}
)  # fmt: skip
OF_TIMES = frozenset(
    {"year", "month", "day", "hour", "minute", "second", "microsecond", "days", "seconds",
     "microseconds", "tm_year", "tm_mon", "tm_mday", "tm_hour", "tm_min", "tm_sec"}
)  # fmt: skip
"""Attributes of dates, times and what lies between them."""

_OF_LISTS = frozenset({"clear", "pop", "popleft", "reverse", "rotate"})
_GIVING_BY_CLASS: dict[Any, frozenset[str]] = {
    dict: frozenset({"items", "values", "keys", "copy", "clear", "popitem"}),
    list: _OF_LISTS,
    deque: _OF_LISTS,
}
"""Methods of containers that hand on what is in them, or take it out."""


def is_followed(callee: Any) -> bool:
    """Whether such values may be given to a callee: one that is observed, or hands them on."""
    from graphopt.tracing.outside.files import is_observed

    callee = getattr(callee, "__func__", callee)
    if isinstance(callee, types.FunctionType):
        return is_observed(callee.__code__.co_filename)
    name = getattr(callee, "__name__", "")
    of_sets = getattr(callee, "__objclass__", type(getattr(callee, "__self__", None))) is set
    if (name in TAKING and not of_sets) or name == "join" or is_in(callee, PASSING):
        return True
    methods = _GIVING_BY_CLASS.get(getattr(callee, "__objclass__", None), ())
    if name in methods:
        return True
    code = getattr(
        *((callee, "__init__") if isinstance(callee, type) else (type(callee), "__call__"))
    )
    return isinstance(callee, functools.partial) or hasattr(code, "__code__")


def is_of_library(callee: Any) -> bool:
    """Whether a class, or a module of torch's, is one whose own code is not observed."""
    if isinstance(callee, functools.partial):
        return not is_followed(callee.func) or is_of_library(callee.func)
    method = getattr(callee, "__init__" if isinstance(callee, type) else "forward", None)
    code = getattr(method, "__code__", None)
    return code is not None and is_library_file(code.co_filename)


def is_in(callee: Any, functions: frozenset[Any]) -> bool:
    try:
        return callee in functions
    except TypeError:  # it has no hash
        return False


def is_of(callee: Any, module: Any) -> bool:
    """Whether a callee is a function that a module defines itself."""
    name = getattr(callee, "__name__", None)
    defined = getattr(callee, "__module__", None) == module.__name__
    return defined and isinstance(name, str) and original(getattr(module, name, None)) is callee


def makes_tensor(callee: Any) -> bool:
    """Whether a callee makes a tensor of arrays, lists and numbers: also `torch.FloatTensor`."""
    return is_in(callee, MAKING_TENSORS) or _compat.made_by_legacy(callee) is not None


def is_of_torch(callee: Any) -> bool:
    """Whether a callee is a function of torch's, or a method of tensors."""
    bound = getattr(callee, "__self__", None)
    if isinstance(bound, torch.Tensor) or getattr(callee, "__objclass__", None) is _TENSOR:
        return True
    module = getattr(callee, "__module__", None) or getattr(bound, "__module__", None)
    return str(module or getattr(bound, "__name__", "")).partition(".")[0] == "torch"


_TENSOR = torch.Tensor.__mro__[1]


def is_of_numpy(callee: Any) -> bool:
    """Whether a callee is a function of numpy's that changes nothing."""
    module = str(getattr(callee, "__module__", None) or type(callee).__module__)
    if module.partition(".")[0] != "numpy" or "random" in module:
        return False
    of = getattr(callee, "__self__", None)
    free = of is None or isinstance(of, types.ModuleType)
    return free and getattr(callee, "__name__", "") not in CHANGING


def of_floats(callee: Any) -> bool:
    name = getattr(callee, "__name__", "")
    return is_of(callee, statistics) or (
        is_of_numpy(callee) and name in ("mean", "std", "var", "median", "average", "percentile")
    )


def gives_text(callee: Any) -> bool:
    if callee in (json.dumps, repr, str, format):
        return True
    name = getattr(callee, "__name__", "")
    return getattr(callee, "__objclass__", None) is str and name in (*_OF_TEXTS, "join")


def is_total(callee: Any, args: Sequence[Any]) -> bool:
    """Whether it does not depend on what a text says whether a function raises an exception."""
    if getattr(callee, "__objclass__", None) is str:
        name = callee.__name__
        if name == "format":
            return type(args[0]) is str and BEGIN not in args[0] and "[" not in args[0]
        return name in _OF_TEXTS or name in ASKING_TEXTS
    return _is_one_of(callee, (len, str, repr, format, bool, list, tuple, sorted))


def takes_apart(callee: Any, args: Sequence[Any]) -> bool:
    """Whether a function may look at values that it is not given itself: it calls another one, or
    goes through an iterator, and is not observed."""
    name = getattr(callee, "__name__", "")
    if _is_one_of(callee, _HANDING_ON) or name == "join" or _is_harmless(callee):
        return False
    if is_followed(callee) and not (_is_one_of(callee, (*_MAKING, filter)) or name == "update"):
        return False
    return any(callable(each) or isinstance(each, Iterator) for each in args)


_HANDING_ON = (
    *(list, tuple, str, repr, format, print, isinstance, issubclass, getattr, hasattr, len, next),
    *(map, zip, enumerate, iter, type, id, callable, super),
)


def _is_harmless(callee: Any) -> bool:
    """Whether a function looks at no texts."""
    return str(getattr(callee, "__module__", "")).partition(".")[0] in ("torch", "graphopt")


def _is_one_of(callee: Any, functions: Sequence[Any]) -> bool:
    return any(callee is each for each in functions)


def is_fresh(function: Any) -> bool:
    """Whether a function never gives a part of its arguments."""
    name = getattr(function, "__name__", "")
    module = str(getattr(function, "__module__", ""))
    if type(function).__module__ == "numpy" and type(function).__name__ == "ufunc":
        return True
    return name in _FRESH or (module in ("_operator", "builtins", "math") and name != "getitem")


_MAKING_ARRAYS = frozenset(
    {"isin", "in1d", "concatenate", "stack", "vstack", "hstack", "array", "copy", "zeros_like",
     "ones_like", "full_like", "empty_like", "zeros", "ones", "full", "eye", "arange", "bincount",
     "cumsum", "cumprod", "tile", "repeat", "delete", "append", "insert"}
)  # fmt: skip
_FRESH = frozenset(
    {"bincount", "argmax", "argmin", "argsort", "mean", "sum", "std", "var", "median", "percentile",
     "max", "min", "unique", "where", "concatenate", "stack", "array", "copy", "isnan", "isfinite",
     "clip", "exp", "log", "sqrt", "abs", "round", "histogram", "cumsum", "cumprod", "dot", "all",
     "any", "nanmean", "nonzero", "count_nonzero", "astype", "tolist", "item", "prod", "take",
     "array_equal", "tensor", "add", "subtract", "multiply", "divide", "equal", "not_equal",
     "power", "maximum", "minimum", "logical_and", "logical_or", "logical_not", "norm", "str",
     "format", "repr", "dumps", "arange", "on_copy", "copied_item", "zeros_like", "ones_like",
     *_MAKING_ARRAYS}
)  # fmt: skip
"""Functions and methods that give values of their own."""


def is_elementwise(function: Any) -> bool:
    """Whether a function gives an array of its own where one of its operands is an array that has
    dimensions."""
    if type(function).__module__ == "numpy" and type(function).__name__ == "ufunc":
        return function.signature is None and function.nout == 1
    return _is_one_of(function, _ELEMENTWISE)


_ELEMENTWISE = tuple(
    getattr(operator, name)
    for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and_", "or_", "xor",
                 "eq", "ne", "lt", "le", "gt", "ge", "neg", "invert", "abs")
)  # fmt: skip


def makes_array(function: Any, args: Sequence[Any]) -> bool:
    """Whether a function of numpy's gives an array of its own for these arguments, which may be
    one without dimensions, and never a number."""
    if not is_of_numpy(function):
        return False
    return function.__name__ in _MAKING_ARRAYS or (function.__name__ == "where" and len(args) == 3)
