"""Correction of traced tensors' strides to those that real kernels give.

While a step is traced, each distinct operator, with the types and layouts of its arguments, is run
once on scratch tensors (`scratch`). What its shape rule has said is corrected before anybody reads
it: Python code that asks `is_contiguous()`, a `reshape` that is a view or a copy, the kernels that
come after. An answer depends on its question alone and is kept for later captures.
"""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any

import torch

from graphopt import _compat
from graphopt.graph_utils import is_pointwise, tensors_in
from graphopt.ir.operators import row
from graphopt.ir.writing_operators import NAMESPACE
from graphopt.tracing.exactness import fast_path, recurrent
from graphopt.tracing.layouts.layouts import ContainerLayout, Layout, described, layouts, leaves
from graphopt.tracing.layouts.scratch import true_results
from graphopt.tracing.layouts.small_runs import small_results

_LIKE_ELEMENTWISE = frozenset(
    f"aten::{name}"
    for name in (
        "_to_copy",
        "bernoulli",
        "copy",
        "empty_like",
        "full_like",
        "native_dropout",
        "ones_like",
        "rand_like",
        "randint_like",
        "randn_like",
        "zeros_like",
    )
)
"""Operators without the tag that compute each element from one of each operand, or from none."""

_VIEWS = frozenset({torch.ops.aten.view.default})
"""Views whose strides may differ from their shape rule if a size is 0 or 1."""

_JOIN = torch.ops.aten.cat.default

_NOT_CHECKED = frozenset(
    {"_c10d_functional", "c10d", "c10d_functional", "graphopt", "graphopt_inplace", "prims"}
    | {NAMESPACE}
)
"""Namespaces of operators that communicate, act on the process, or are right by construction."""


def corrected(func: Any, args: Any, kwargs: Any, result: Any) -> Any:
    """Returns the fake tensors `result` with the strides that the kernel of `func` gives."""
    if func is recurrent.BACKWARD:
        return recurrent.distinct(result)
    if not _is_checked(func) or _is_plain(func, args, kwargs):
        return result
    if func in _VIEWS and not any(type(n) is int and n < 2 for n in result.shape):
        return result
    try:
        call = (func, described(tuple(args)), described(dict(kwargs)))
        expected = described(result)
    except TypeError:
        return result
    if func.namespace != "aten" and not all(one.is_floating for one in layouts(*call[1:])):
        return result  # other values may be positions in memory
    found = true_results(call, expected, _is_elementwise(func), _settings())
    if found is None or found == expected:
        return result
    if func in _VIEWS:
        return result.as_strided(found.shape, found.strides, result.storage_offset())
    return _with_layouts(result, found)


def known(mode: Any, func: Any, args: Any, kwargs: Any) -> Any | None:
    """Returns an operator's results without its slow shape rule: by the kernel alone for small
    tensors (`small`), or for whole layers without a rule (`fast_path`). None for other operators.

    Returns:
        Fake tensors of `mode`; None where the shape rule has to be asked.
    """
    whole = fast_path.results_of(func, args)
    if whole is not None:
        return _compat.tree_map(partial(_on, mode, args[0].device), whole)
    if not _has_slow_rule(func):
        return None
    if not _compat.are_plain_fakes(mode, tensors_in((args, kwargs))):
        return None
    try:
        call = (func, described(tuple(args)), described(dict(kwargs)))
        found = small_results(call, _is_elementwise(func), _settings())
    except TypeError:
        return None
    return None if found is None else _made(mode, found)


def _on(mode: Any, device: torch.device, meta: Any) -> Any:
    return None if meta is None else _compat.fake_like(mode, meta, device)


@lru_cache(maxsize=4096)
def _has_slow_rule(func: Any) -> bool:
    return _is_checked(func) and not row(func).random and _compat.is_ruled_in_python(func)


def _made(mode: Any, found: Any) -> Any:
    """Returns fake tensors with the layouts in `found`, in the same nest."""
    if isinstance(found, ContainerLayout):
        return found.kind(_made(mode, each) for each in found.values)
    if not isinstance(found, Layout):
        return found.value
    meta = torch.empty_strided(found.shape, found.strides, dtype=found.dtype, device="meta")
    return _compat.fake_like(mode, meta, found.device)


@lru_cache(maxsize=4096)
def _is_checked(func: Any) -> bool:
    """True if an operator makes new tensors from tensors."""
    if not isinstance(func, _compat.OpOverload) or func.namespace in _NOT_CHECKED:
        return False
    if func in _VIEWS:
        return True
    schema = _compat.schema_of(func)
    if _reads_opaque_memory(schema):
        return False
    if any(result.alias_info is not None for result in schema.returns):
        return False
    takes = any("Tensor" in str(argument.type) for argument in schema.arguments)
    return takes and any("Tensor" in str(result.type) for result in schema.returns)


def _reads_opaque_memory(schema: Any) -> bool:
    """True if a kernel takes memory in a private format, such as a library's saved state, so that
    any other contents may crash the process."""
    names = [argument.name for argument in schema.arguments]
    opaque = ("workspace", "reserve", "philox", "rng_state")
    return any(part in name for part in opaque for name in names) or any(
        library in schema.name for library in ("mkldnn", "cudnn", "miopen")
    )


def _is_plain(func: Any, args: Any, kwargs: Any) -> bool:
    """True if an operator is elementwise on contiguous tensors of one shape, or concatenates
    vectors of one dtype."""
    if kwargs:
        return False
    if func is _JOIN:
        return all(map(_is_vector, args[0])) and len({vector.dtype for vector in args[0]}) == 1
    if not _is_elementwise(func):
        return False
    shape: torch.Size | None = None
    for value in args:
        if not isinstance(value, torch.Tensor):
            if isinstance(value, (list, tuple)):
                return False
            continue
        if value.dim() == 0:
            continue
        if _compat.has_symbolic_shape(value):
            return False
        if shape is not None and value.shape != shape:
            return False
        shape = value.shape
        if not value.is_contiguous() or 1 in shape or 0 in shape:
            return False
    return True


def _is_vector(value: torch.Tensor) -> bool:
    if _compat.has_symbolic_shape(value):
        return False
    return value.dim() == 1 and value.numel() > 1 and value.is_contiguous()


@lru_cache(maxsize=4096)
def _is_elementwise(func: Any) -> bool:
    return is_pointwise(func) or _compat.operator_name(func) in _LIKE_ELEMENTWISE


def _settings() -> tuple[Any, ...]:
    """Returns the global settings that may decide which kernel runs."""
    return (
        bool(torch.backends.mkldnn.enabled),
        bool(torch.backends.cudnn.enabled),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_default_dtype(),
    )


def _with_layouts(result: Any, found: Any) -> Any:
    """Returns fake tensors like `result` with the layouts `found`."""
    values, nest = _compat.tree_flatten(result)
    true = list(leaves(found))
    if len(true) != len(values):
        return result
    return _compat.tree_unflatten(list(map(_with_layout, values, true)), nest)


def _with_layout(value: Any, layout: Any) -> Any:
    if not isinstance(value, torch.Tensor) or not isinstance(layout, Layout):
        return value
    if layout == described(value):
        return value
    return _compat.fake_laid_out(value, layout.shape, layout.strides, layout.dtype)
