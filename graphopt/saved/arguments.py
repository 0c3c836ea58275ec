"""JSON form of node targets and arguments.

Only what a table or a check of its own names is ever looked up, so that a file can call nothing but
operators.
"""

from __future__ import annotations

import functools
import importlib
import math
import operator
from collections.abc import Callable
from typing import Any

import torch

from graphopt import _compat
from graphopt.ir.writing_operators import form_behind, form_of
from graphopt.saved.errors import SavedGraphError

# fmt: off
_OPERATORS = [
    "abs", "add", "and_", "contains", "eq", "floordiv", "ge", "getitem", "gt", "invert",
    "le", "lshift", "lt", "matmul", "mod", "mul", "ne", "neg", "not_", "or_", "pos", "pow",
    "rshift", "sub", "truediv", "xor",
]
# fmt: on
_NUMERIC = ["ceil", "exp", "floor", "log", "sqrt", "trunc"]
_SYMBOLIC = ["sym_float", "sym_int", "sym_max", "sym_min", "sym_not"]

_FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{f"operator.{name}": getattr(operator, name) for name in _OPERATORS},
    **{f"math.{name}": getattr(math, name) for name in _NUMERIC},
    **{f"torch.{name}": getattr(torch, name) for name in _SYMBOLIC},
    **{f"builtins.{function.__name__}": function for function in (int, float)},
}
_FUNCTION_NAMES = {function: name for name, function in _FUNCTIONS.items()}

_FORM_OF = "functional form of "

_TORCH_TYPES: dict[str, Any] = {
    "dtype": torch.dtype,
    "layout": torch.layout,
    "memory_format": torch.memory_format,
}


def encode_target(target: object) -> str:
    """The qualified name of a function that a node calls.

    Raises:
        SavedGraphError: it is neither an operator nor a Python operator on numbers.
    """
    form = form_behind(target)
    if form is not None:  # which is defined when it is asked for
        return _FORM_OF + encode_target(form.original)
    if isinstance(target, _compat.OpOverload):
        return f"{_compat.operator_name(target)}.{_compat.overload_name(target)}"
    name = _FUNCTION_NAMES.get(target) if callable(target) else None
    if name is None:
        raise SavedGraphError(f"it calls {target!r}, which is not an operator")
    return name


def decode_target(name: str) -> Callable[..., Any]:
    """The function that a qualified name stands for.

    Raises:
        SavedGraphError: there is no such operator here.
    """
    if name in _FUNCTIONS:
        return _FUNCTIONS[name]
    if name.startswith(_FORM_OF):
        form = form_of(decode_target(name.removeprefix(_FORM_OF)))
        if form is None:
            raise SavedGraphError(f"it calls the {name}, which writes to no argument here")
        return form.functional
    namespace, _, rest = name.partition("::")
    if namespace.startswith("graphopt"):
        _define_operators()
    operator_name, _, overload = rest.rpartition(".")
    try:
        found = getattr(getattr(getattr(torch.ops, namespace), operator_name), overload)
    except (AttributeError, RuntimeError):
        found = None
    if not isinstance(found, _compat.OpOverload):
        raise SavedGraphError(
            f"it calls the operator {name}, which is not known here: import the module that"
            f" defines it, or use the torch version that the graph was saved with"
        )
    return found


@functools.cache
def _define_operators() -> None:
    """Imports the modules that define graphopt's own operators."""
    for name in ("parallel.shard_operators", "tracing.capture"):
        importlib.import_module(f"graphopt.{name}")


def encode(value: Any, special: Callable[[Any], Any]) -> Any:
    """The JSON form of `value`: numbers, text, containers, dtypes, devices and the like.

    Args:
        special: encodes all other leaves, as an object with one key of its own.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, list):
        return [encode(item, special) for item in value]
    if isinstance(value, tuple):
        return {"tuple": [encode(item, special) for item in value]}
    if isinstance(value, dict):
        pairs = [[encode(k, special), encode(v, special)] for k, v in value.items()]
        return {"dict": pairs}
    if isinstance(value, slice):
        parts = (value.start, value.stop, value.step)
        return {"slice": [encode(part, special) for part in parts]}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    if value is Ellipsis:
        return {"ellipsis": None}
    for kind, torch_type in _TORCH_TYPES.items():
        if isinstance(value, torch_type):
            return {kind: str(value).removeprefix("torch.")}
    return special(value)


def decode(data: Any, special: Callable[[str, Any], Any]) -> Any:
    """The value of a JSON form; `special` decodes leaves with keys of its own."""
    if isinstance(data, list):
        return [decode(item, special) for item in data]
    if not isinstance(data, dict):
        return data
    ((kind, content),) = data.items()
    if kind == "tuple":
        return tuple(decode(item, special) for item in content)
    if kind == "dict":
        return {decode(key, special): decode(value, special) for key, value in content}
    if kind == "slice":
        return slice(*(decode(part, special) for part in content))
    if kind == "complex":
        return complex(*content)
    if kind == "device":
        return torch.device(content)
    if kind == "ellipsis":
        return Ellipsis
    if kind in _TORCH_TYPES:
        found = getattr(torch, content)
        if not isinstance(found, _TORCH_TYPES[kind]):
            raise ValueError(f"torch.{content} is not a {kind}")
        return found
    return special(kind, content)


def not_saved(value: Any) -> Any:
    """Refuses a leaf that `encode` does not know.

    Raises:
        SavedGraphError: always.
    """
    raise SavedGraphError(f"{value!r} of type {type(value).__name__} cannot be saved")
