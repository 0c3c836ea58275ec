"""In-place operators whose results depend on the strides that they write to, written functionally.

Kernels that draw random numbers go through memory, and take another path where a tensor is not
contiguous; matrix products round otherwise where they have to go through a copy. The functional
forms that torch has write to a contiguous tensor, or to a dense one, and so give other numbers
(dropout of a transposed or channels-last tensor, say). The operators here work in place on a new
tensor with the very strides. The last stage of a pipeline turns them into the in-place operator
again, where the old value is no longer needed.
"""

from __future__ import annotations

from typing import Any

import torch

from graphopt import _compat

aten = torch.ops.aten

_RANDOM_FROM = getattr(aten.random_, "from")

_DRAWING = (
    aten.bernoulli_.Tensor,
    aten.bernoulli_.float,
    aten.cauchy_.default,
    aten.exponential_.default,
    aten.geometric_.default,
    aten.log_normal_.default,
    aten.normal_.default,
    _RANDOM_FROM,
    aten.random_.to,
    aten.random_.default,
    aten.uniform_.default,
)
"""Operators that do not read what they overwrite."""

_COMPUTING = (
    aten.addbmm_.default,
    aten.addmm_.default,
    aten.addmv_.default,
    aten.addr_.default,
    aten.baddbmm_.default,
    aten.polygamma_.default,
)

_NAMESPACE = "graphopt_inplace"
_WITHOUT_FUNCTIONAL = (aten.polygamma_.default,)
"""Operators that torch itself does not write functionally."""

_library = torch.library.Library(_NAMESPACE, "DEF")


def _functional_name(inplace: _compat.OpOverload) -> str:
    """`random_from` for `aten::random_.from`: an overload named by a Python keyword cannot be
    written in the code of a graph."""
    overload = inplace._overloadname
    name = inplace._schema.name.removeprefix("aten::").removesuffix("_")
    return name if overload == "default" else f"{name}_{overload}"


def _define(inplace: _compat.OpOverload) -> _compat.OpOverload:
    """The operator that computes what `inplace` writes, in a new tensor of the same strides."""
    name = _functional_name(inplace)
    arguments = str(inplace._schema).partition("(Tensor(a!) self")[2].partition(" -> ")[0]
    tags = tuple(tag for tag in inplace.tags if tag == torch.Tag.nondeterministic_seeded)
    _library.define(f"{name}(Tensor self{arguments} -> Tensor", tags=tags)
    reads = inplace not in _DRAWING

    def compute(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        result = _uninitialised(self)
        if reads:
            result.copy_(self)
        return inplace(result, *args, **kwargs)  # type: ignore[no-any-return]

    def shape(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return _uninitialised(self)

    _library.impl(name, compute, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{_NAMESPACE}::{name}", shape, lib=_library)
    found: _compat.OpOverload = getattr(getattr(torch.ops, _NAMESPACE), name).default
    return found


def _uninitialised(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
    )


def _define_random_from() -> _compat.OpOverload:
    """`aten::random_.from` under a name that code can call."""
    _library.define(
        "random_from_(Tensor(a!) self, int from, int? to, *, Generator? generator=None)"
        " -> Tensor(a!)",
        tags=(torch.Tag.nondeterministic_seeded,),
    )
    _library.impl("random_from_", _RANDOM_FROM, "CompositeExplicitAutograd")
    found: _compat.OpOverload = getattr(torch.ops, _NAMESPACE).random_from_.default
    return found


CALLABLE = {_RANDOM_FROM: _define_random_from()}
"""What stands in graphs for operators whose overloads are named by a Python keyword."""

_FUNCTIONAL = {
    CALLABLE.get(inplace, inplace): _define(inplace) for inplace in (*_DRAWING, *_COMPUTING)
}

INPLACE = {functional: inplace for inplace, functional in _FUNCTIONAL.items()}
"""The in-place operator of each operator here."""


def functional_form(target: Any, written: torch.Tensor) -> _compat.OpOverload | None:
    """What gives the numbers that the in-place operator `target` writes into a tensor.

    Returns:
        None where torch's own functional form does, and for other operators.
    """
    if target not in _FUNCTIONAL:
        return None
    if target in _WITHOUT_FUNCTIONAL or target.namespace == _NAMESPACE:
        return _FUNCTIONAL[target]
    return None if written.is_contiguous() else _FUNCTIONAL[target]
