"""Random operators that draw in place, written functionally.

Which number an element gets depends on the strides of the tensor that is drawn into: kernels go
through memory, and take another path where a tensor is not contiguous. The functional forms that
torch has draw into a contiguous tensor, or into a dense one, and so give other numbers (dropout of
a transposed or channels-last tensor, say). The operators here draw in place into a new tensor with
the very strides; the last stage of a pipeline may turn them into the in-place operator again.
"""

from __future__ import annotations

from typing import Any

import torch

from graphopt import _compat

aten = torch.ops.aten

_library = torch.library.Library("graphopt", "FRAGMENT")


def _functional_name(inplace: _compat.OpOverload) -> str:
    """`graphopt::random_from` for `aten::random_.from`: an overload named by a Python keyword cannot
    be written in the code of a graph."""
    overload = inplace._overloadname
    name = inplace._schema.name.removeprefix("aten::").removesuffix("_")
    return name if overload == "default" else f"{name}_{overload}"


def _define(inplace: _compat.OpOverload) -> _compat.OpOverload:
    """The operator that draws what `inplace` draws, into a new tensor of the same strides."""
    name = _functional_name(inplace)
    arguments = str(inplace._schema).partition("(Tensor(a!) self")[2].partition(" -> ")[0]
    tags = (torch.Tag.nondeterministic_seeded,)
    _library.define(f"{name}(Tensor self{arguments} -> Tensor", tags=tags)

    def draw(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        drawn: torch.Tensor = inplace(_uninitialised(self), *args, **kwargs)
        return drawn

    def shape(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return _uninitialised(self)

    _library.impl(name, draw, "CompositeExplicitAutograd")
    torch.library.register_fake(f"graphopt::{name}", shape, lib=_library)
    found: _compat.OpOverload = getattr(torch.ops.graphopt, name).default
    return found


def _uninitialised(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
    )


FUNCTIONAL = {
    inplace: _define(inplace)
    for inplace in (
        aten.bernoulli_.Tensor,
        aten.bernoulli_.float,
        aten.cauchy_.default,
        aten.exponential_.default,
        aten.geometric_.default,
        aten.log_normal_.default,
        aten.normal_.default,
        getattr(aten.random_, "from"),
        aten.random_.to,
        aten.random_.default,
        aten.uniform_.default,
    )
}
"""The operator that draws the same numbers without writing to its argument, by in-place operator."""

INPLACE = {functional: inplace for inplace, functional in FUNCTIONAL.items()}


def functional_form(target: Any, drawn_into: torch.Tensor) -> _compat.OpOverload | None:
    """What draws the numbers that the in-place operator `target` draws into a tensor.

    Returns:
        None where torch's own functional form does, and for other operators.
    """
    if target not in FUNCTIONAL:
        return None
    own = drawn_into.is_contiguous() and target is not getattr(aten.random_, "from")
    return None if own else FUNCTIONAL[target]
