"""Fake tensors, which have shape, dtype and device but no elements."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import FrameType, MappingProxyType
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
    unset_fake_temporarily,
)

from graphopt._compat.tensor_writes import WriteCounts
from graphopt._compat.threads import is_of_trace
from graphopt._compat.trees import tree_leaves

Correction = Callable[[Any, Any, Any, Any], Any]
"""From operator, arguments, keyword arguments and what its shape rule says to the true result."""

Check = Callable[[Any, Any, Any], None]
"""Of an operator, arguments and keyword arguments that are about to be asked for."""

Known = Callable[[Any, Any, Any, Any], Any | None]
"""From mode, operator, arguments and keyword arguments to what it gives; None where that is not
known."""

Change = tuple[Any, str, Callable[..., Any]]
"""Owner, name and value of what is replaced while a step is traced, as `replaced` takes them."""

Sizer = Callable[[Any, Any], Any]
"""From operator and a result with unknown sizes to one with known ones."""


def new_fake_mode(
    correct: Correction | None = None, check: Check | None = None, known: Known | None = None
) -> Any:
    """A FakeTensorMode with static shapes, and a ShapeEnv for values read by `.item()`.

    Args:
        correct: applied to what each operator gives.
        check: called before each operator, of which torch runs the kernel where it has no shape
            rule for it; may raise.
        known: asked before the shape rule.
    """
    if correct is None:
        return FakeTensorMode(shape_env=_new_shape_env(), static_shapes=True)
    applied: Correction = correct

    class CorrectedMode(FakeTensorMode):
        correction = staticmethod(applied)
        sizer: Sizer | None = None
        met_sizes = False

        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            self._allow_unsafe_data_ptr_access = False  # an address would be 0
            self.writes = WriteCounts()

        def dispatch(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = MappingProxyType({})
        ) -> Any:
            unknown = gives_unknown_sizes(func, args)
            if check is not None:
                check(func, args, kwargs)
            self.writes.forget(func, args)
            if self.sizer is not None and unknown:
                return self.sized(self.sizer, func, types, args, kwargs)
            args, kwargs = _with_plain_numbers(func, args, kwargs)
            found = None if known is None else known(self, func, args, kwargs)
            if found is not None:
                return found
            return applied(func, args, kwargs, super().dispatch(func, types, args, kwargs))

        def sized(self, sizer: Sizer, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
            self.sizer = None  # what a shape rule calls itself stays as torch does it
            try:
                environment: Any = self.shape_env
                with environment.ignore_fresh_unbacked_symbols():
                    result = sizer(func, super().dispatch(func, types, args, kwargs))
                self.met_sizes |= any(map(_has_unknown_sizes, tree_leaves(result)))
                return result
            finally:
                self.sizer = sizer

    return CorrectedMode(shape_env=_new_shape_env(), static_shapes=True)


def _new_shape_env() -> Any:
    """Makes a ShapeEnv that does not record where symbols come from: that loads half of Inductor
    and walks the stack for each symbol."""
    from torch.fx.experimental.symbolic_shapes import ShapeEnv, SLoc

    nowhere = SLoc(None, None)

    class QuickShapeEnv(ShapeEnv):
        def _get_stack_summary(
            self, is_debug: bool = False, framework_loc: str | None = None
        ) -> tuple[SLoc, str]:
            if is_debug:  # for the text of an error
                return super()._get_stack_summary(is_debug, framework_loc)
            return nowhere, ""

        def _log_create_unbacked_symbol(self, *args: Any, **kwargs: Any) -> None:
            """Logs nothing, unlike torch's own."""

        def _get_user_frame(self) -> FrameType | None:
            frame = inspect.currentframe()
            while frame is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
                frame = frame.f_back
            return frame

    return QuickShapeEnv()


_LIBRARIES = (str(Path(torch.__file__).parent), str(Path(__file__).parent.parent))


def _with_plain_numbers(func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Replaces unknown numbers among an elementwise operator's arguments by any number, so that
    torch finds the result's shape in its cache."""
    numbers = any(isinstance(value, torch.SymFloat) for value in (*args, *kwargs.values()))
    if not numbers or torch.Tag.pointwise not in func.tags:
        return args, kwargs
    return tuple(map(_plain_number, args)), {key: _plain_number(kwargs[key]) for key in kwargs}


def _plain_number(value: Any) -> Any:
    return 0.5 if isinstance(value, torch.SymFloat) else value


def gives_unknown_sizes(func: Any, args: Any) -> bool:
    """True if the sizes of an operator's result depend on values, or if the result is an
    integer."""
    if func is torch.ops.aten._local_scalar_dense.default:
        kind: torch.dtype = args[0].dtype
        return not (kind is torch.bool or kind.is_floating_point or kind.is_complex)
    return torch.Tag.dynamic_output_shape in getattr(func, "tags", ())


@contextmanager
def sizes_given(mode: Any, sizer: Sizer | None) -> Iterator[None]:
    """While active, `sizer` gives the sizes of results that depend on values."""
    before = getattr(mode, "sizer", None)
    mode.sizer = sizer
    try:
        yield
    finally:
        mode.sizer = before


def truths_of_fakes(truth: Callable[[torch.Tensor], bool]) -> Change:
    """Replacements by which `truth` decides whether a one-element fake tensor is true, also
    inside torch functions, which no function mode sees."""
    otherwise = FakeTensor.__bool__

    def asked(tensor: torch.Tensor) -> bool:
        return truth(tensor) if tensor.numel() == 1 else otherwise(tensor)

    return FakeTensor, "__bool__", asked


def met_sizes(mode: Any) -> bool:
    """True if an operator has returned a result with data-dependent sizes."""
    return getattr(mode, "met_sizes", False)


without_fake_mode: Callable[[], AbstractContextManager[Any]] = unset_fake_temporarily
"""While active, the caller's fake mode is off; fake tensors stay fake."""

plain_fake_mode: Callable[[], Any] = FakeTensorMode
"""Makes a FakeTensorMode in which reading a value is an error."""


def fake_laid_out(
    fake: torch.Tensor, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    """A fake tensor of given layout and dtype, in the mode and on the device of another."""
    meta = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
    return FakeTensor(fake.fake_mode, meta, fake.device)  # type: ignore[attr-defined]


def fake_anew(fake: torch.Tensor) -> torch.Tensor:
    """A fake tensor of the same kind with memory of its own."""
    return fake_laid_out(fake, fake.shape, fake.stride(), fake.dtype)


def is_fake(value: object) -> bool:
    return isinstance(value, FakeTensor)


def is_fake_class(kind: type) -> bool:
    """True if a class is FakeTensor or derived from it."""
    return issubclass(kind, FakeTensor)


def fake_mode_of(tensors: Sequence[torch.Tensor]) -> Any | None:
    return next((t.fake_mode for t in tensors if is_fake(t)), None)  # type: ignore[attr-defined]


def to_fake(mode: Any, tensor: torch.Tensor) -> torch.Tensor:
    """The fake counterpart of a tensor in `mode`, with the same metadata but without `.grad`."""
    if is_fake(tensor) and tensor.fake_mode is mode:  # type: ignore[attr-defined]
        return tensor
    gradient, tensor.grad = tensor.grad, None
    try:
        fake: torch.Tensor = mode.from_tensor(tensor, static_shapes=True)
    finally:
        tensor.grad = gradient
    return fake


@contextmanager
def foreach_accepts_fakes() -> Iterator[None]:
    """While active, `foreach=None` treats fake CUDA tensors as real ones."""
    from torch.optim import optimizer
    from torch.utils import _foreach_utils

    lists = (optimizer._foreach_supported_types, _foreach_utils._foreach_supported_types)
    distinct = list({id(entry): entry for entry in lists}.values())
    for entry in distinct:
        entry.append(FakeTensor)
    try:
        yield
    finally:
        for entry in distinct:
            entry.remove(FakeTensor)


def errors_raised_once() -> AbstractContextManager[None]:
    """While active, torch does not also log the errors of fake operators of the trace."""
    return _logging_only(lambda record: not is_of_trace())


def is_fake_mode_on() -> bool:
    """True if operators on this thread give fake tensors."""
    key = torch._C._TorchDispatchModeKey.FAKE
    return torch._C._get_dispatch_mode(key) is not None


def data_dependent_errors() -> tuple[type[Exception], ...]:
    """The error classes that fake tensors raise when Python asks for a value."""
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    return (GuardOnDataDependentSymNode, DataDependentOutputException)


def unsupported_operator_errors() -> tuple[type[Exception], ...]:
    """The error classes that fake tensors raise for operators without a shape rule."""
    return (
        DynamicOutputShapeException,
        UnsupportedFakeTensorException,
        UnsupportedOperatorException,
    )


_fused_meta: torch.library.Library | None = None


def register_fused_meta_kernels(names: Iterable[str]) -> None:
    """Registers the shape rules that torch lacks for some fused optimizers; it would run the
    kernels instead.

    Args:
        names: the names of in-place operators, such as `_fused_adam_`.
    """
    global _fused_meta
    if _fused_meta is not None:
        return
    library = torch.library.Library("aten", "IMPL")
    for name in names:
        for form in getattr(torch.ops.aten, name).overloads():
            full = name if form == "default" else f"{name}.{form}"
            if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{full}", "Meta"):
                library.impl(full, lambda *args, **kwargs: None, "Meta")
    _fused_meta = library


def _has_unknown_sizes(value: Any) -> bool:
    return isinstance(value, torch.SymInt) or (
        isinstance(value, torch.Tensor) and has_symbolic_shape(value)
    )


def has_symbolic_shape(tensor: torch.Tensor) -> bool:
    """True if sizes, strides or offset of a tensor are symbolic."""
    if not tensor._has_symbolic_sizes_strides:
        return False
    numbers = (*tensor.shape, *tensor.stride(), tensor.storage_offset())
    return any(isinstance(number, torch.SymInt) for number in numbers)


def known_number(value: torch.SymInt | torch.SymFloat) -> int | float | None:
    """The value of a symbolic number that is constant, else None."""
    node: Any = value.node
    known: int | float | None = (
        node.maybe_as_int() if isinstance(value, torch.SymInt) else node.maybe_as_float()
    )
    return known


def new_unknown(mode: Any, integer: bool) -> torch.SymInt | torch.SymFloat:
    """A new symbolic number without known value, for fake tensors of `mode`."""
    environment = mode.shape_env
    with environment.ignore_fresh_unbacked_symbols():
        if integer:
            return environment.create_unbacked_symint()  # type: ignore[no-any-return]
        return environment.create_unbacked_symfloat()  # type: ignore[no-any-return]


def fake_like(
    mode: Any, meta: torch.Tensor, device: torch.device, *, conj: bool = False, neg: bool = False
) -> torch.Tensor:
    """A fake tensor on `device` that shares the storage of a meta tensor."""
    fake: torch.Tensor = FakeTensor(mode, meta, device)
    if not (conj or neg):
        return fake
    with mode:
        fake = torch.conj(fake) if conj else fake
        return torch._neg_view(fake) if neg else fake


def quiet_fakes() -> AbstractContextManager[None]:
    """While active, fake tensors do not log operator errors with tracebacks of their own."""
    return _logging_only(lambda record: False)


@contextmanager
def _logging_only(keeps: Callable[[logging.LogRecord], bool]) -> Iterator[None]:
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    logger.addFilter(keeps)
    try:
        yield
    finally:
        logger.removeFilter(keeps)
