"""Refusal of `functools.lru_cache` functions that return tensors.

Eager code runs such a function once for its arguments; from then on it gets the very tensors that
the function gave it. A trace would leave stand-ins there. Plain values are as the cache has them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from graphopt import _compat
from graphopt.errors import CaptureError
from graphopt.ir.user_frames import current_location
from graphopt.tracing.outside.record import OutsideRecord
from graphopt.tracing.scalars.numbers import SYMBOLIC


def cached_function(
    record: OutsideRecord, callee: Any, args: Sequence[Any]
) -> Callable[..., Any] | None:
    """The checked form of a cached function outside the step; None for other callees."""
    cached = type(callee) is functools._lru_cache_wrapper and record.is_outside(callee)
    return partial(_called, callee) if cached else None


def _called(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Calls a cached function, and checks arguments and result.

    Raises:
        CaptureError: that is a tensor, or it is given what only the trace has.
    """
    before = function.cache_info().misses
    try:
        result = function(*args, **kwargs)
    except BaseException:
        function.cache_clear()  # what it calls may have a cache of its own, and a stand-in in it
        raise
    if any(map(_is_tensor_or_traced, _compat.tree_leaves((result, args, kwargs)))):
        if function.cache_info().misses > before:
            function.cache_clear()
        name = getattr(function, "__name__", "a function")
        raise CaptureError(
            f"it calls a function with a cache ({name}) that gives or is given a tensor, which"
            " would be that of the capture in every call",
            location=current_location(),
            hint=f"call it outside the step, and pass what it gives: step(x, {name}(…)); or call it"
            f" without the cache: {name}.__wrapped__(…)",
        )
    return result


def _is_tensor_or_traced(value: Any) -> bool:
    return isinstance(value, (torch.Tensor, *SYMBOLIC))
