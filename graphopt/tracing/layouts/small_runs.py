"""Operator results on small CPU tensors, found by running the kernels alone.

A shape rule that torch has written in Python calls a dozen other operators, each with a shape rule
of its own. To run the kernel on scratch tensors (`scratch`) takes a fraction of that, and is right
by construction.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from itertools import zip_longest
from typing import Any

import torch

from graphopt import _compat
from graphopt.graph_utils import tensors_in
from graphopt.tracing.layouts.layouts import Layout, PlainArgument, described, layouts, leaves
from graphopt.tracing.layouts.scratch import SMALL, Call, called, halves, identities, unrecorded

aten = torch.ops.aten

_LARGEST_AT_ONCE = 1 << 20
"""The most elements of results for which a kernel is run instead of a shape rule."""


@lru_cache(maxsize=1 << 14)
def small_results(call: Call, elementwise: bool, settings: tuple[Any, ...]) -> Any | None:
    """Returns the real kernel's result layouts if all tensors are small and on the CPU, without any
    shape rule; cached forever.

    Args:
        elementwise, settings: as in `true_results`.

    Returns:
        None where that is not so, where the kernel takes no such values, or where a result is no
        tensor with memory of its own.
    """
    given = layouts(*call[1:])
    if not given or any(layout.device.type != "cpu" for layout in given):
        return None
    if sum(map(_size, given)) > SMALL:
        return None
    if _most_elements(call, given, elementwise) > _LARGEST_AT_ONCE:
        return None
    with unrecorded():  # none of these operators draws
        return next(filter(None, (_fresh(call, fill) for fill in (halves, identities))), None)


def _most_elements(call: Call, given: list[Layout], elementwise: bool) -> int:
    """Returns an upper bound of the results' number of elements."""
    if elementwise:
        dimensions = zip_longest(*(reversed(layout.shape) for layout in given), fillvalue=1)
        return math.prod(map(max, dimensions)) * len(given)  # one result for each entry of lists
    if call[0] in _PRODUCTS and all(len(layout.shape) > 1 for layout in given[-2:]):
        return math.prod(given[-2].shape[:-1]) * given[-1].shape[-1]
    name = _compat.operator_name(call[0]).removesuffix("_backward_data").removesuffix("_backward")
    if name in _NO_LARGER:
        return sum(map(_size, given))
    largest = sorted(map(_size, given), reverse=True)[:2]
    plain = (leaf for one in call[1:] for leaf in leaves(one) if isinstance(leaf, PlainArgument))
    numbers = [leaf.value for leaf in plain if leaf.kind is int]
    return math.prod(max(1, abs(factor)) for factor in (*largest, *numbers))


def _size(layout: Layout) -> int:
    """Returns a tensor's number of elements, expanded ones included, or that of its storage if
    larger."""
    return max(layout.span, math.prod(layout.shape))


_PRODUCTS = frozenset({aten.mm.default, aten.bmm.default, aten.addmm.default, aten.baddbmm.default})
"""Operators whose last two tensors are multiplied as matrices."""

_NO_LARGER = frozenset(
    f"aten::{name}"
    for name in (
        "_log_softmax",
        "_native_batch_norm_legit_functional",
        "_softmax",
        "cat",
        "cumsum",
        "linalg_vector_norm",
        "log_sigmoid",
        "log_sigmoid_forward",
        "mean",
        "native_batch_norm",
        "native_group_norm",
        "native_layer_norm",
        "nll_loss_forward",
        "nll_loss",
        "stack",
        "sum",
        "topk",
        "var",
        "var_mean",
    )
)
"""Operators, and their backwards, each of whose results has at most as many elements as all
arguments."""


def _fresh(call: Call, make: Callable[[Layout], torch.Tensor]) -> Any | None:
    """Returns a kernel's result layouts if each result fills memory of its own, or None."""
    known: set[int] = set()

    def noted(layout: Layout) -> torch.Tensor:
        tensor = make(layout)
        known.add(_compat.storage_key(tensor))
        return tensor

    def fresh(result: Any) -> Any | None:
        found = described(result)
        for tensor, layout in zip(tensors_in(result), layouts(found), strict=True):
            storage = _compat.storage_key(tensor)
            own = tensor.untyped_storage().nbytes() == layout.span * tensor.itemsize
            if storage in known or not own:
                return None
            known.add(storage)
        return found

    return called(call, noted, fresh)
