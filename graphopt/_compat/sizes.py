"""Data-dependent sizes during a trace: torch's symbols, and how to give them values.

A fake tensor whose size nobody can know (`x[mask]`, `nonzero`) has an *unbacked* symbol there, of
which every question is an error. A *backed* symbol has a value besides: questions are answered for
that value, and each answer is kept as a guard.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from graphopt._compat import fake_laid_out, tree_flatten, tree_leaves, tree_unflatten

_COUNTER = itertools.count()

Place = tuple[int, int | None]
"""Where a size stands: which leaf of a result, which dimension; None: the leaf is the number."""


def unknown_places(result: Any) -> list[tuple[Place, torch.SymInt]]:
    """The places of unknown sizes in a result, each symbol once."""
    found: dict[Any, tuple[Place, torch.SymInt]] = {}
    for place, number in _integers(result):
        if isinstance(number, torch.SymInt) and _is_unknown(number):
            found.setdefault(number.node.expr, (place, number))
    return list(found.values())


def _integers(result: Any) -> Iterator[tuple[Place, Any]]:
    for index, leaf in enumerate(tree_leaves(result)):
        if isinstance(leaf, torch.SymInt):
            yield (index, None), leaf
        elif isinstance(leaf, torch.Tensor):
            yield from (((index, d), size) for d, size in enumerate(leaf.shape))


def _is_unknown(number: torch.SymInt) -> bool:
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    expression = number.node.expr
    return bool(expression.is_Symbol) and bool(free_unbacked_symbols(expression))


def number_at(result: Any, place: Place) -> int:
    """The number at a place of a real result."""
    index, dimension = place
    leaf = tree_leaves(result)[index]
    return int(leaf) if dimension is None else int(leaf.shape[dimension])


def backed(mode: Any, value: int, is_size: bool) -> tuple[Any, Any]:
    """A symbolic number with the current value `value`, and its symbol; 0 and 1 stay plain,
    without symbol."""
    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic

    environment = mode.shape_env
    source = ConstantSource(f"graphopt_size_{next(_COUNTER)}")
    create = environment.create_symbol if is_size else environment.create_unspecified_symbol
    symbol = create(value, source, DimDynamic.DYNAMIC)
    number = environment.create_symintnode(symbol, hint=value, source=source)
    return number, (symbol if isinstance(number, torch.SymInt) else None)


def with_sizes(result: Any, unknown: Sequence[torch.SymInt], sizes: Sequence[Any]) -> Any:
    """Fake tensors and numbers like `result`, with known sizes in place of unknown ones.

    Args:
        sizes: symbolic or plain numbers.
    """
    pairs = zip(unknown, sizes, strict=True)
    known = {number.node.expr: size for number, size in pairs}

    def told(value: Any) -> Any:
        if not isinstance(value, torch.SymInt):
            return value
        return _substituted(value, known)

    leaves, nest = tree_flatten(result)
    new = []
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            shape, strides = [*map(told, leaf.shape)], [*map(told, leaf.stride())]
            leaf = fake_laid_out(leaf, shape, strides, leaf.dtype)
        new.append(told(leaf))
    return tree_unflatten(new, nest)


def _substituted(value: torch.SymInt, known: Mapping[Any, Any]) -> Any:
    expression = value.node.expr
    if expression in known:
        return known[expression]
    by = {symbol: known[symbol] for symbol in expression.free_symbols & known.keys()}
    if not by:
        return value
    environment = value.node.shape_env
    assert environment is not None  # every symbol has one
    expressions = {
        symbol: size.node.expr if isinstance(size, torch.SymInt) else size
        for symbol, size in by.items()
    }
    return environment.create_symintnode(expression.xreplace(expressions), hint=None)


def laid_out_like(result: Any, like: Any) -> Any:
    """The fake tensors of `result` with the sizes and strides of earlier ones, sharing their
    symbols."""
    leaves, nest = tree_flatten(result)
    new = []
    for leaf, old in zip(leaves, tree_leaves(like), strict=True):
        if isinstance(leaf, torch.Tensor):
            shape, strides = map(_plain, old.shape), map(_plain, old.stride())
            leaf = fake_laid_out(leaf, [*shape], [*strides], leaf.dtype)
        elif isinstance(leaf, torch.SymInt):
            leaf = _plain(old)
        new.append(leaf)
    return tree_unflatten(new, nest)


def _plain(number: Any) -> Any:
    """The plain number in place of a symbolic one whose value is fixed."""
    known = number.node.maybe_as_int() if isinstance(number, torch.SymInt) else None
    return number if known is None else known


@contextmanager
def arithmetic_when_used(tracer: Any) -> Iterator[None]:
    """While active, arithmetic on sizes is recorded only where something uses it."""
    from torch.fx.experimental.proxy_tensor import _enable_thunkify

    with _enable_thunkify(tracer):
        yield


class AnsweredQuestions:
    """The guards on known sizes that torch has evaluated, checked again whenever the graph runs.

    Args:
        mode: the fake mode whose numbers they are about.
    """

    def __init__(self, mode: Any) -> None:
        self._environment = mode.shape_env
        self._order: dict[Any, int] = {}
        self._sizes: set[Any] = set()
        self._checks: dict[int, list[Callable[..., bool]]] = {}
        self._read = 0

    def add(self, symbol: Any, order: int, is_size: bool) -> None:
        """Adds a symbol whose number the running step knows from check `order` on."""
        self._order[symbol] = order
        if is_size:
            self._sizes.add(symbol)

    def hold(self, order: int, numbers: Mapping[Any, int]) -> bool:
        """True if all guards that can be evaluated from check `order` on still hold.

        Args:
            numbers: of all symbols up to that.
        """
        self._compile()
        for symbol, at in self._order.items():
            if at == order and symbol in self._sizes and numbers[symbol] < 2:
                return False
        return all(check(numbers) for check in self._checks.get(order, ()))

    def _compile(self) -> None:
        guards = self._environment.guards
        for guard in guards[self._read :]:
            symbols = sorted(guard.expr.free_symbols & self._order.keys(), key=str)
            if symbols:
                last = max(self._order[symbol] for symbol in symbols)
                self._checks.setdefault(last, []).append(_compiled(guard.expr, symbols))
        self._read = len(guards)


def _compiled(expression: Any, symbols: Sequence[Any]) -> Callable[[Mapping[Any, int]], bool]:
    """A relation between sizes, compiled to a function of their numbers."""
    from torch.utils._sympy.interp import sympy_interp
    from torch.utils._sympy.printers import PythonPrinter
    from torch.utils._sympy.reference import PythonReferenceAnalysis

    def interpreted(numbers: Mapping[Any, int]) -> bool:
        known = {symbol: numbers[symbol] for symbol in symbols}
        return bool(sympy_interp(PythonReferenceAnalysis, known, expression))

    if expression.free_symbols - set(symbols):
        return lambda numbers: False
    try:
        names = ", ".join(map(str, symbols))
        text = PythonPrinter().doprint(expression)
        function = eval(f"lambda {names}: {text}", {"math": math, "torch": torch})
    except Exception:  # a function that cannot be written down
        return interpreted
    return lambda numbers: bool(function(*(numbers[symbol] for symbol in symbols)))


def symbolic_layout(tensor: torch.Tensor) -> tuple[tuple[int | str, ...], tuple[int | str, ...]]:
    """The sizes and strides of a tensor, symbolic ones as text.

    Where torch does not know that a size is not 0, strides are those of at least 1. That is left
    out: a tensor of such a size has no elements that could lie elsewhere.
    """
    from torch.utils._sympy.functions import Max

    given: Sequence[Any] = tensor.shape
    sizes = [size.node.expr for size in given if isinstance(size, torch.SymInt)]
    at_least_one = {Max(1, size): size for size in sizes}
    shape = tuple(_text(size, {}) for size in tensor.shape)
    return shape, tuple(_text(stride, at_least_one) for stride in tensor.stride())


def is_contiguous(tensor: torch.Tensor) -> bool:
    """True if a tensor is contiguous, decided without adding guards on its sizes. A trace that runs
    does not see it: its sizes may be unknown to that trace."""
    sizes: Sequence[Any] = tensor.shape
    if not any(isinstance(number, torch.SymInt) for number in (*sizes, *tensor.stride())):
        return tensor.is_contiguous()
    strides: list[int | str] = []
    elements: Any = 1
    for size in reversed(sizes):
        strides.insert(0, _written(elements))
        elements *= size.node.expr if isinstance(size, torch.SymInt) else max(size, 1)
    return symbolic_layout(tensor)[1] == tuple(strides)


def _text(number: Any, known: Mapping[Any, Any]) -> int | str:
    return _written(
        number.node.expr.xreplace(known) if isinstance(number, torch.SymInt) else number
    )


def _written(expression: Any) -> int | str:
    is_number = isinstance(expression, int) or expression.is_Integer
    return int(expression) if is_number else str(expression)
