"""Compilation of list operators, and of operators that take numbers computed by the graph.

An optimizer that is not fused computes with lists of tensors (`_foreach_mul`, …) and with Python
numbers, such as the bias correction of a step. Here each becomes one operator for each tensor, and
a number becomes a 0-dim tensor, so that compiled code serves every step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from graphopt import _compat
from graphopt.graph_utils import tensors_in
from graphopt.ir.metadata import known_value

aten = torch.ops.aten

_WITH_NUMBERS = frozenset({"add", "addcdiv", "addcmul", "div", "lerp", "mul", "pow", "sub"})

_LISTED = _WITH_NUMBERS | {
    "abs",
    "clamp_max",
    "clamp_min",
    "copy",
    "exp",
    "maximum",
    "minimum",
    "neg",
    "norm",
    "reciprocal",
    "sign",
    "sqrt",
    "zero",
}


_OTHER_OVERLOADS = {
    ("addcdiv", "Tensor"),
    ("addcmul", "Tensor"),
    ("maximum", "Scalar"),
    ("maximum", "ScalarList"),
    ("minimum", "Scalar"),
    ("minimum", "ScalarList"),
    ("pow", "ScalarAndTensor"),
}
"""Their arguments mean something else than those of the operator on one tensor."""


@dataclass(frozen=True)
class GraphNumber:
    """A number computed by the graph, held in a 0-dim tensor."""

    tensor: torch.Tensor

    def like(self, dtype: torch.dtype) -> torch.Tensor:
        """The number in the precision that operators use for results of `dtype`."""
        return self.tensor.to(torch.float64 if dtype is torch.float64 else torch.float32)


def is_listed(node: fx.Node) -> bool:
    """True if a node is a list operator whose entries can be written as single operators."""
    name, target = _name(node.target), node.target
    if not name.startswith("_foreach_") or name.removeprefix("_foreach_") not in _LISTED:
        return False
    assert isinstance(target, _compat.OpOverload)
    return (name.removeprefix("_foreach_"), _compat.overload_name(target)) not in _OTHER_OVERLOADS


def counts_steps(node: fx.Node) -> bool:
    """True if a list operator works on single numbers, such as an optimizer's step counts, which
    Python reads."""
    return is_listed(node) and all(not tensor.dim() for tensor in tensors_in(known_value(node)))


def takes_numbers(node: fx.Node) -> bool:
    """True if a node can take numbers computed by the graph, and does not itself compute one."""
    name = _name(node.target).removeprefix("_foreach_")
    first = node.args[0] if node.args else None
    return name in _WITH_NUMBERS and not _is_number(first) and not counts_steps(node)


def _is_number(value: object) -> bool:
    return isinstance(value, fx.Node) and not list(tensors_in(known_value(value)))


def _name(target: object) -> str:
    if not isinstance(target, _compat.OpOverload) or target.namespace != "aten":
        return ""
    return str(_compat.operator_name(target)).removeprefix("aten::")


def written_out(target: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Computes a list operator entry by entry, with tensors in place of numbers.

    Args:
        target: a list operator, or one that is given a `GraphNumber`.
    """
    name = _name(target)
    if not name.startswith("_foreach_"):
        return _one(name, args, kwargs)
    name = name.removeprefix("_foreach_")
    return [
        _one(name, [_item(a, i) for a in args], {k: _item(v, i) for k, v in kwargs.items()})
        for i in range(len(args[0]))
    ]


def _item(value: Any, index: int) -> Any:
    return value[index] if isinstance(value, (list, tuple)) else value


def _one(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    dtype = _result_dtype(args)
    args = [v.like(dtype) if isinstance(v, GraphNumber) else v for v in args]
    kwargs = {k: v.like(dtype) if isinstance(v, GraphNumber) else v for k, v in kwargs.items()}
    result = (
        _RULES[name](*args, **kwargs) if name in _RULES else getattr(aten, name)(*args, **kwargs)
    )
    return result.to(dtype) if name in _WITH_NUMBERS else result


def _result_dtype(args: Sequence[Any]) -> torch.dtype:
    """The result dtype of operators on these operands, numbers counting as Python floats."""
    operands = [v for v in args if isinstance(v, (torch.Tensor, GraphNumber, int, float))]
    other: Any = operands[1] if len(operands) > 1 else operands[0]
    return torch.result_type(args[0], 1.5 if isinstance(other, GraphNumber) else other)


def _add(x: torch.Tensor, other: Any, alpha: Any = 1) -> Any:
    return x + _scaled(other, alpha)


def _sub(x: torch.Tensor, other: Any, alpha: Any = 1) -> Any:
    return x - _scaled(other, alpha)


def _scaled(value: Any, factor: Any) -> Any:
    return value if isinstance(factor, (int, float)) and factor == 1 else value * factor


def _lerp(x: torch.Tensor, end: torch.Tensor, weight: Any) -> Any:
    if isinstance(weight, torch.Tensor) and weight.dtype != x.dtype:
        weight = weight.to(x.dtype)
    return aten.lerp(x, end, weight)


def _addcmul(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, value: Any = 1) -> Any:
    return x + _scaled(a, value) * b


def _addcdiv(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, value: Any = 1) -> Any:
    return x + _scaled(a, value) / b


def _copy(x: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> Any:
    return source.to(x.dtype).expand_as(x).clone()


def _norm(x: torch.Tensor, order: Any = 2, dtype: torch.dtype | None = None) -> Any:
    return torch.linalg.vector_norm(x, order, dtype=dtype)


_RULES: dict[str, Callable[..., Any]] = {
    "add": _add,
    "addcdiv": _addcdiv,
    "addcmul": _addcmul,
    "copy": _copy,
    "lerp": _lerp,
    "mul": lambda x, other: x * other,
    "norm": _norm,
    "sub": _sub,
    "zero": torch.zeros_like,
}
