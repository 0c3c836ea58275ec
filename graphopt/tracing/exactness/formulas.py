"""Gradients whose autograd formulas depend on tracing, computed by eager code's formulas.

Some formulas look at values, or write in place, but not for tensors that are traced: there they
take another way, which adds in another order, or loses a NaN or the sign of a zero.

    (2 * x).prod().backward()    ==>    graphopt_eager.prod(gradient, 2 * x, …)

While autograd goes back in a trace, what such a function gives is replaced by an operator that runs
the function once more, on the values of the call, and asks autograd for the gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from graphopt import _compat
from graphopt._compat.backward import around_backwards, around_unpacking
from graphopt._compat.settings import differentiating
from graphopt.errors import CaptureError
from graphopt.ir.user_frames import current_location
from graphopt.tracing.interception.replaced_functions import replaced

_NAMESPACE = "graphopt_eager"
_library = torch.library.Library(_NAMESPACE, "FRAGMENT")


def _define(
    name: str, arguments: str, rerun: Callable[..., Tensor], *, takes_dtype: bool = False
) -> Any:
    """Defines an operator that returns the gradient of `rerun`'s result with respect to the
    argument at `position`.

    Args:
        rerun: what gives the result, of these arguments.
        takes_dtype: it is told the dtype of the result as well.
    """
    _library.define(f"{name}(Tensor gradient, {arguments}, int position) -> Tensor")

    def differentiated(gradient: Tensor, *args: Any) -> Tensor:
        *given, position = args
        with differentiating():
            leaf = given[position] = given[position].detach().requires_grad_()
            result = rerun(*given, **({"dtype": gradient.dtype} if takes_dtype else {}))
            found: Tensor = torch.autograd.grad(result, leaf, gradient)[0]
        return found

    def shaped(gradient: Tensor, *args: Any) -> Tensor:
        return torch.empty_like(args[args[-1]])

    _library.impl(name, differentiated, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{_NAMESPACE}::{name}", shaped, lib=_library)
    return getattr(getattr(torch.ops, _NAMESPACE), name).default


# ---------------------------------------------------------------------------- the functions


def _prod(x: Tensor, dim: int | None, keepdim: bool, dtype: torch.dtype) -> Tensor:
    if dim is None:
        return torch.prod(x, dtype=dtype)
    return torch.prod(x, dim, keepdim, dtype=dtype)


def _filled(value: Tensor, mask: Tensor, gradient: Tensor) -> Tensor:
    return gradient.masked_fill(mask, value)  # whose own values do not matter


def _selected(x: Tensor, name: str) -> Tensor:
    return getattr(torch, name)(x)  # type: ignore[no-any-return]


def _cross_entropy(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    of_positive: Tensor | None,
    reduction: int,
) -> Tensor:
    return functional.binary_cross_entropy_with_logits(
        logits, target, weight, reduction=_REDUCTIONS[reduction], pos_weight=of_positive
    )


_REDUCTIONS = ("none", "mean", "sum")

PROD = _define("prod", "Tensor x, int? dim, bool keepdim", _prod, takes_dtype=True)
CUMPROD = _define("cumprod", "Tensor x, int dim", torch.cumprod, takes_dtype=True)
MASKED_FILL = _define("masked_fill", "Tensor value, Tensor mask, Tensor filled", _filled)
SELECTED = _define("selected", "Tensor x, str name", _selected)
ORMQR = _define(
    "ormqr", "Tensor a, Tensor tau, Tensor other, bool left, bool transpose", torch.ormqr
)
HOUSEHOLDER = _define(
    "householder_product", "Tensor a, Tensor tau", torch.linalg.householder_product
)
CROSS_ENTROPY = _define(
    "binary_cross_entropy_with_logits",
    "Tensor logits, Tensor target, Tensor? weight, Tensor? of_positive, int reduction",
    _cross_entropy,
)


class _EagerFormulaGradient(NamedTuple):
    """The recomputation of a gradient by its eager formula.

    Attributes:
        operator: by what.
        args: its arguments between the gradient of the result and the position.
        positions: that of each gradient that the function gives; None where its own is right.
        differs_twice: whether a gradient that is differentiated further differs by more than the
            sign of a zero and by what is not a number.
    """

    operator: Any
    args: tuple[Any, ...]
    positions: tuple[int | None, ...] = (0,)
    differs_twice: bool = False


def _of_prod(function: Any, gradient: Tensor) -> _EagerFormulaGradient:
    dim = getattr(function, "_saved_dim", None)
    keepdim = getattr(function, "_saved_keepdim", False)
    given = (None if dim is None else _signed(dim), keepdim)
    return _EagerFormulaGradient(PROD, (function._saved_self, *given), differs_twice=True)


def _of_cumprod(function: Any, gradient: Tensor) -> _EagerFormulaGradient:
    given = (function._saved_self, _signed(function._saved_dim))
    return _EagerFormulaGradient(CUMPROD, given, differs_twice=True)


def _of_det(function: Any, gradient: Tensor) -> _EagerFormulaGradient | None:
    """Returns a recomputation only for gradients that are differentiated further, which is
    refused."""
    return (
        _EagerFormulaGradient(None, (), (), differs_twice=True) if torch.is_grad_enabled() else None
    )


def _of_filled(function: Any, gradient: Tensor) -> _EagerFormulaGradient | None:
    if len(function.next_functions) < 2 or function.next_functions[1][0] is None:
        return None
    given = gradient.new_zeros(()), function._saved_mask, gradient
    return _EagerFormulaGradient(MASKED_FILL, given, positions=(None, 0), differs_twice=True)


def _of_selected(name: str) -> Callable[[Any, Tensor], _EagerFormulaGradient | None]:
    """Returns a recomputation for reductions such as `max` over all elements, not over a
    dimension."""

    def again(function: Any, gradient: Tensor) -> _EagerFormulaGradient | None:
        if hasattr(function, "_saved_dim") or not hasattr(function, "_saved_self"):
            return None
        return _EagerFormulaGradient(SELECTED, (function._saved_self, name))

    return again


def _of_reflected(function: Any, gradient: Tensor) -> _EagerFormulaGradient:
    tensors = function._saved_self, function._saved_input2, function._saved_input3
    given = (*tensors, function._saved_left, function._saved_transpose)
    return _EagerFormulaGradient(ORMQR, given, positions=(0, 1, 2))


def _of_householder(function: Any, gradient: Tensor) -> _EagerFormulaGradient:
    given = function._saved_input, function._saved_tau
    return _EagerFormulaGradient(HOUSEHOLDER, given, positions=(0, 1))


def _of_cross_entropy(function: Any, gradient: Tensor) -> _EagerFormulaGradient | None:
    """Returns a recomputation only for mixed dtypes, where the eager formula's in-place update
    keeps one."""
    logits, target = function._saved_self, function._saved_target
    weights = function._saved_weight, function._saved_pos_weight
    if len({each.dtype for each in (logits, target, *weights) if each is not None}) == 1:
        return None
    given = (logits, target, *weights, function._saved_reduction)
    return _EagerFormulaGradient(CROSS_ENTROPY, given, positions=(0, 1))


def _signed(number: int) -> int:
    """Converts a dimension from torch's unsigned form."""
    return number - (1 << 64) if number >= 1 << 63 else number


_FORMULAS: dict[str, Callable[[Any, Tensor], _EagerFormulaGradient | None]] = {
    "ProdBackward": _of_prod,
    "CumprodBackward": _of_cumprod,
    "LinalgDetBackward": _of_det,
    "MaskedFillBackward": _of_filled,
    "MaxBackward": _of_selected("max"),
    "MinBackward": _of_selected("min"),
    "MedianBackward": _of_selected("median"),
    "NanmedianBackward": _of_selected("nanmedian"),
    "OrmqrBackward": _of_reflected,
    "LinalgHouseholderProductBackward": _of_householder,
    "BinaryCrossEntropyWithLogitsBackward": _of_cross_entropy,
}
"""The recomputation of gradients by autograd function name, without its number."""


# ---------------------------------------------------------------------------- in a trace


@contextmanager
def as_in_eager() -> Iterator[None]:
    """A context in which backwards of the traced step use eager code's gradient formulas.

    Raises:
        CaptureError: the step differentiates a gradient whose formula would differ.
    """
    unpacked = _UnpackedTensors()

    @contextmanager
    def around(functions: Iterable[Any]) -> Iterator[None]:
        handles = []
        for function in functions_behind(functions):
            again = _FORMULAS.get(function.name().rstrip("0123456789"))
            if again is not None:
                handles.append(function.register_prehook(unpacked.begin))
                handles.append(function.register_hook(_replacing(function, again, unpacked)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    with replaced(*around_backwards(around), *around_unpacking(unpacked.kept)):
        yield


class _UnpackedTensors:
    """A cache of saved tensors while one autograd function runs, since some hooks unpack only
    once."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, Any]] | None = None

    def begin(self, gradients: Any) -> None:
        """Starts caching unpacked tensors."""
        self._known = {}

    def end(self) -> None:
        """Drops the cache."""
        self._known = None

    def kept(self, unpack: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Wraps `unpack` so that each saved tensor is unpacked once."""

        def unpack_once(packed: Any) -> Any:
            if self._known is None:
                return unpack(packed)
            if id(packed) not in self._known:
                self._known[id(packed)] = packed, unpack(packed)
            return self._known[id(packed)][1]

        return unpack_once


def functions_behind(functions: Iterable[Any]) -> list[Any]:
    """Returns all autograd functions reachable by a backward."""
    known: dict[Any, None] = {}
    waiting = list(functions)
    while waiting:
        function = waiting.pop()
        if function is not None and function not in known:
            known[function] = None
            waiting += [each for each, _ in function.next_functions]
    return list(known)


def _replacing(
    function: Any,
    formula: Callable[[Any, Tensor], _EagerFormulaGradient | None],
    unpacked: _UnpackedTensors,
) -> Callable[[Any, Any], tuple[Any, ...] | None]:
    """Returns an autograd hook that replaces the gradients of `function`."""

    def replace(gradients: tuple[Any, ...], given: tuple[Any, ...]) -> tuple[Any, ...] | None:
        try:
            (gradient,) = given
            if gradient is None or _compat.is_transformed(gradient):
                return None
            if not _compat.is_fake(gradient):  # a value that the trace computes: as in eager code
                return None
            again = formula(function, gradient)
        finally:
            unpacked.end()
        if again is None:
            return None
        if torch.is_grad_enabled():
            if again.differs_twice:
                raise _differentiated_twice(function)
            return None
        return tuple(map(partial(_computed, again, gradient), gradients, again.positions))

    return replace


def _computed(
    again: _EagerFormulaGradient, gradient: Tensor, former: Any, position: int | None
) -> Any:
    """Returns the recomputed gradient, or `former` if that is already right."""
    if former is None or position is None:
        return former
    return again.operator(gradient, *again.args, position).to(former.dtype)


def _differentiated_twice(function: Any) -> CaptureError:
    name = function.name().rstrip("0123456789").removesuffix("Backward")
    return CaptureError(
        f"it differentiates a gradient of {name.lower()} further, which torch computes by the"
        " values that it finds",
        location=current_location(),
        hint="leave out create_graph=True, or write the function with other operators",
    )
