"""Operators in many layouts: the same calls eagerly and captured, compared bit for bit.

`compare` runs a list of `Case`s in one captured step. A step that cannot be captured is cut in two
until the cases that are refused stand alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import graphopt

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda t: t.contiguous(),
    "reversed": lambda t: _through(t, lambda d: d[::-1]),
    "transposed": lambda t: _through(t, lambda d: [*d[:-2], *d[:-3:-1]]),
    "batch inside": lambda t: _through(t, lambda d: [*d[1:], *d[:1]]),
    "channels last": lambda t: _through(t, lambda d: [*d[:1], *d[2:], *d[1:2]]),
    "every second": lambda t: _within(t, -1, lambda s: slice(1, 2 * s, 2), lambda s: 2 * s + 1),
    "columns": lambda t: _within(t, -1, lambda s: slice(1, s + 1), lambda s: s + 3),
    "rows": lambda t: _within(t, 0, lambda s: slice(1, s + 1), lambda s: s + 2),
    "expanded": lambda t: t[:1].clone().expand_as(t) if t.dim() and len(t) else t.clone(),
}
"""Ways for the elements of a tensor to lie in memory. Values are kept, but for `expanded`."""


def _through(tensor: Tensor, reorder: Callable[[list[int]], Sequence[int]]) -> Tensor:
    """`tensor` with its dimensions in memory in the order that `reorder` gives."""
    order = list(reorder(list(range(tensor.dim()))))
    inverse = [order.index(d) for d in range(tensor.dim())]
    return tensor.permute(order).contiguous().permute(inverse)


def _within(
    tensor: Tensor, dim: int, window: Callable[[int], slice], size: Callable[[int], int]
) -> Tensor:
    """`tensor` as a slice of a larger one, along one dimension."""
    if not tensor.dim():
        return torch.stack([tensor, tensor, tensor])[1]
    larger = list(tensor.shape)
    larger[dim] = size(tensor.shape[dim])
    base = tensor.new_zeros(larger)
    index = [slice(None)] * tensor.dim()
    index[dim] = window(tensor.shape[dim])
    view = base[tuple(index)]
    view.copy_(tensor)
    return view


def twin_of(tensor: Tensor) -> Tensor:
    """A tensor of the same values, strides and offset, over a copy of the whole storage."""
    storage = tensor.untyped_storage().clone()
    twin = torch.empty(0, dtype=tensor.dtype)
    return twin.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())


@dataclass
class Case:
    """One call: `function(*tensors)`, where `tensors` may be written to."""

    name: str
    function: Callable[..., Any]
    tensors: list[Tensor]


@dataclass
class Found:
    """What came of some cases."""

    tried: int = 0
    different: dict[str, str] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    eager_refuses: int = 0

    def add(self, other: Found) -> None:
        self.tried += other.tried
        self.eager_refuses += other.eager_refuses
        self.different.update(other.different)
        self.refused.update(other.refused)


def compare(cases: Sequence[Case], **options: Any) -> Found:
    """Run all `cases` eagerly and as one captured step; say what differs."""
    possible = [case for case in cases if _runs(case)]
    found = _compare_all(possible, options)
    found.eager_refuses = len(cases) - len(possible)
    return found


def _runs(case: Case) -> bool:
    try:
        case.function(*map(twin_of, case.tensors))
    except (RuntimeError, TypeError, NotImplementedError, IndexError, ValueError):
        return False
    return True


def _compare_all(cases: Sequence[Case], options: dict[str, Any]) -> Found:
    found = Found(tried=len(cases))
    if not cases:
        return found
    eager, captured = ([list(map(twin_of, case.tensors)) for case in cases] for _ in range(2))
    torch.manual_seed(0)
    expected = [case.function(*given) for case, given in zip(cases, eager, strict=True)]
    after = torch.get_rng_state()

    def step(model: nn.Module, given: list[list[Tensor]]) -> list[Any]:
        return [case.function(*tensors) for case, tensors in zip(cases, given, strict=True)]

    torch.manual_seed(0)
    try:
        compiled = graphopt.compile(step, **{"pipeline": "none", **options})
        actual = compiled(nn.Identity(), captured)
    except Exception as error:
        return _divided(cases, options, error)
    for case, *results in zip(cases, actual, captured, expected, eager, strict=True):
        reason = difference(results[:2], results[2:])
        if reason is not None:
            found.different[case.name] = reason
    if not found.different and not torch.equal(torch.get_rng_state(), after):
        found.different[cases[0].name] = "the generator's state afterwards differs"
    return found


def _divided(cases: Sequence[Case], options: dict[str, Any], error: Exception) -> Found:
    """What came of cases one of which raised `error`."""
    if len(cases) > 1:
        found = _compare_all(cases[: len(cases) // 2], options)
        found.add(_compare_all(cases[len(cases) // 2 :], options))
        return found
    found = Found(tried=1)
    if isinstance(error, graphopt.CaptureError):
        found.refused[cases[0].name] = error.reason
    else:
        found.different[cases[0].name] = f"raises {type(error).__name__}: {error}"
    return found


def difference(actual: Any, expected: Any) -> str | None:
    """The first difference in structure, strides or bits; None if there is none."""
    ours, theirs = tree_leaves(actual), tree_leaves(expected)
    if len(ours) != len(theirs):
        return f"{len(ours)} results instead of {len(theirs)}"
    for a, e in zip(ours, theirs, strict=True):
        if not isinstance(e, Tensor):
            if a != e and not (isinstance(e, float) and math.isnan(e)):
                return f"{a!r} instead of {e!r}"
            continue
        kinds = [(t.dtype, tuple(t.shape), t.stride()) for t in (a, e)]
        if kinds[0] != kinds[1]:
            return f"{kinds[0]} instead of {kinds[1]}"
        same = (a == e) | ((a != a) & (e != e))
        if not bool(same.all()):
            return f"{int((~same).sum())} of {same.numel()} elements differ"
    return None


def laid_out(tensor: Tensor, layouts: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
    """`tensor` in each of `layouts`, by name; each distinct one once."""
    seen: set[tuple[Any, ...]] = set()
    for name in layouts:
        result = LAYOUTS[name](tensor)
        key = (result.stride(), result.storage_offset())
        if key not in seen:
            seen.add(key)
            yield name, result
