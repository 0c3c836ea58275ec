"""Functional forms of in-place operators whose results depend on the strides that they write to.

Kernels that draw random numbers go through memory, and take another path where a tensor is not
contiguous; matrix products round otherwise where they have to go through a copy. The functional
forms that torch has write to a contiguous tensor, or to a dense one, and so give other numbers
(dropout of a transposed or channels-last tensor, say). Some round otherwise in place at any
strides: products of half precision with a number, which is rounded first, and of complex numbers.
The operators here work in place on a new tensor with the very strides. The last stage of a pipeline
turns them into the in-place operator again, where the old value is no longer needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from operator import attrgetter
from typing import Any

import torch

from graphopt import _compat
from graphopt._compat.sizes import is_contiguous
from graphopt.ir.families import ROUNDS_IN_PLACE, TWINS
from graphopt.ir.operators import rounds_a_list_in_place, rounds_in_place, row

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

_ROUNDING = tuple(
    attrgetter(f"{name}.default" if "." not in name else name)(aten)
    for name in (known.removeprefix("aten::") for known in ROUNDS_IN_PLACE)
)
"""Operators that round some dtypes differently than their functional forms."""

ROUNDING = frozenset(_ROUNDING) - frozenset(_COMPUTING)
"""Those of them that have a form here for no other reason."""

_NAMESPACE = "graphopt_inplace"
_WITHOUT_FUNCTIONAL = (aten.polygamma_.default,)
"""Operators that torch does not functionalize."""

_library = torch.library.Library(_NAMESPACE, "DEF")


def _functional_name(inplace: _compat.OpOverload) -> str:
    """Returns a name that generated code can call: `random_from` for `aten::random_.from`, since
    `from` is a keyword."""
    overload = _compat.overload_name(inplace)
    name = _compat.operator_name(inplace).removeprefix("aten::").removesuffix("_")
    return name if overload == "default" else f"{name}_{overload}"


def _define(inplace: _compat.OpOverload) -> _compat.OpOverload:
    """Defines an operator that computes what `inplace` writes, in a new tensor of the same
    strides."""
    name = _functional_name(inplace)
    arguments = (
        str(_compat.schema_of(inplace)).partition("(Tensor(a!) self")[2].partition(" -> ")[0]
    )
    tags = tuple(tag for tag in inplace.tags if tag == torch.Tag.nondeterministic_seeded)
    _library.define(f"{name}(Tensor self{arguments} -> Tensor", tags=tags)
    reads = inplace not in _DRAWING

    def compute(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        result = uninitialised_like(self)
        if reads:
            result.copy_(self)
        return inplace(result, *args, **kwargs)  # type: ignore[no-any-return]

    def shape(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return uninitialised_like(self)

    _library.impl(name, compute, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{_NAMESPACE}::{name}", shape, lib=_library)
    found: _compat.OpOverload = getattr(getattr(torch.ops, _NAMESPACE), name).default
    return found


def uninitialised_like(tensor: torch.Tensor) -> torch.Tensor:
    """Returns an uninitialised tensor with the shape, strides, dtype and device of another."""
    return torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
    )


def _define_random_from() -> _compat.OpOverload:
    """Defines `aten::random_.from` under a name that code can call."""
    _library.define(
        "random_from_(Tensor(a!) self, int from, int? to, *, Generator? generator=None)"
        " -> Tensor(a!)",
        tags=(torch.Tag.nondeterministic_seeded,),
    )
    _library.impl("random_from_", _RANDOM_FROM, "CompositeExplicitAutograd")
    found: _compat.OpOverload = getattr(torch.ops, _NAMESPACE).random_from_.default
    return found


CALLABLE = {_RANDOM_FROM: _define_random_from()}
"""Replacements in graphs for operators whose overload name is a Python keyword."""

_FUNCTIONAL = {
    CALLABLE.get(inplace, inplace): _define(inplace)
    for inplace in dict.fromkeys((*_DRAWING, *_COMPUTING, *_ROUNDING))
}

INPLACE = {functional: inplace for inplace, functional in _FUNCTIONAL.items()}
"""The in-place operator of each operator here."""


def inplace_form(target: Any, result: Any = None) -> Any | None:
    """Returns the operator that writes into its first argument what `target` returns, or None.

    Args:
        result: what `target` returns, or fake tensors like that: in place some operators give other
            bits for some dtypes.
    """
    found = _inplace_form(target)
    if isinstance(result, (list, tuple)) and rounds_a_list_in_place(found, result):
        return None
    rounds = isinstance(result, torch.Tensor) and rounds_in_place(found, result.dtype)
    return None if rounds and target not in INPLACE else found


@cache
def _inplace_form(target: Any) -> Any | None:
    if not isinstance(target, _compat.OpOverload):
        return None
    if target in INPLACE:
        return INPLACE[target]
    known = row(target)
    namespace, name = _compat.operator_name(target).split("::")
    same_bits = known.pointwise or (known.listed and not known.collective)
    if not (same_bits and namespace == "aten") and _compat.operator_name(target) not in TWINS:
        return None
    packet = getattr(getattr(torch.ops, namespace), f"{name}_", None)
    if packet is None:
        return None
    return next((each for each in overloads_like(packet, target) if 0 in row(each).writes), None)


def overloads_like(packet: Any, target: Any) -> Iterator[_compat.OpOverload]:
    """Yields the overloads of an operator that take the arguments of another: for `pow_.Scalar`,
    `pow.Tensor_Scalar` and not `pow.Scalar`."""
    wanted = _argument_types(target)
    for overload in packet.overloads():
        candidate = getattr(packet, overload)
        if _argument_types(candidate) == wanted:
            yield candidate


def _argument_types(target: Any) -> list[str]:
    return [str(argument.type) for argument in _compat.schema_of(target).arguments]


def functional_form(target: Any, args: Sequence[Any]) -> _compat.OpOverload | None:
    """Returns the functional operator that computes what in-place `target` writes into its first
    argument, or None.

    Returns:
        None where torch's own functional form does, and for other operators.
    """
    if target not in _FUNCTIONAL:
        return None
    written: torch.Tensor = args[0]
    if rounds_in_place(target, written.dtype):
        return _FUNCTIONAL[_by_number(target, args)]
    if target in _WITHOUT_FUNCTIONAL or target.namespace == _NAMESPACE:
        return _FUNCTIONAL[target]
    return None if torch_gives_the_same(target, written) else _FUNCTIONAL[target]


def torch_gives_the_same(target: Any, written: torch.Tensor) -> bool:
    """True if torch's functional form of an in-place operator gives the same bits for this
    tensor."""
    if rounds_in_place(target, written.dtype):
        return False
    return target in ROUNDING or is_contiguous(written)


def _by_number(target: _compat.OpOverload, args: Sequence[Any]) -> _compat.OpOverload:
    """Returns the `Scalar` overload if the second argument of a `Tensor` overload is a number."""
    if _compat.overload_name(target) != "Tensor" or isinstance(args[1], torch.Tensor):
        return target
    found: _compat.OpOverload = target.overloadpacket.Scalar
    return found
