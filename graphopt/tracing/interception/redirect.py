"""The torch function mode under which a step is traced.

It sees every torch function the step calls, before autograd does, and

- replaces tensors that the step reached without going through its arguments' modules (a list of
  parameters it closes over, say) by their traced stand-ins;
- refuses tensors it knows nothing about, which would be baked in as constants;
- notices when gradients are used in any way, before which they have to be averaged over ranks;
- says which phase the nodes made by a backward belong to.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from graphopt import _compat
from graphopt._compat.backward import around_backwards
from graphopt._compat.own_tracing import untraced
from graphopt._compat.transforms import transforms_given
from graphopt.ir.user_frames import current_user_line, is_asked_by_torch, is_installed
from graphopt.tracing.call import check_anomalies
from graphopt.tracing.exactness import (
    averages,
    ctc,
    fast_path,
    fused,
    recurrent,
    smoothing,
    spectra,
)
from graphopt.tracing.functional.tagging import Tagger
from graphopt.tracing.inputs.implicit import ImplicitInputFinder
from graphopt.tracing.interception.concrete import concrete
from graphopt.tracing.interception.replaced_functions import assigned, replaced
from graphopt.tracing.layouts import sparse
from graphopt.tracing.layouts.packed import Packing
from graphopt.tracing.optimizers import first_gradients
from graphopt.tracing.ranks.shared_by_ranks import SharedByRanks
from graphopt.tracing.refusals.host_work import HostWork
from graphopt.tracing.refusals.unknown_features import MEMORY, refuse_unknown_call
from graphopt.tracing.rollback.nests import with_leaves
from graphopt.tracing.rollback.substitute import StandIns
from graphopt.tracing.rollback.tensor_keys import own_equality
from graphopt.tracing.scalars import numbers, selecting
from graphopt.tracing.tensors import constants
from graphopt.tracing.tensors.obtained import ObtainedValues
from graphopt.tracing.tensors.rebinding import Rebinding

_BACKWARDS = frozenset({torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad})
_TEXTS: dict[Any, Callable[..., str]] = {
    torch.Tensor.__repr__: repr,
    torch.Tensor.__format__: format,
    torch.Tensor.__str__: str,
}
_ARRAYS: tuple[Any, ...] = (torch.Tensor.numpy, torch.Tensor.__array__)
_TRUTHS = frozenset({torch.Tensor.__bool__, torch.is_nonzero, torch.Tensor.is_nonzero})
_INTEGERS = frozenset({torch.Tensor.__index__, torch.Tensor.__int__})
_FROM_NUMBERS = frozenset({torch.tensor, torch.as_tensor, torch.asarray})
_COMPARISONS = {
    torch.equal: torch.eq,
    torch.Tensor.equal: torch.eq,
    torch.allclose: torch.isclose,
    torch.Tensor.allclose: torch.isclose,
}
_SET_DATA = getattr(torch.Tensor, "data").__set__  # noqa: B009 - typed as the value it gives
_PROFILED = frozenset(
    {
        torch.ops.profiler._record_function_enter_new,
        torch.ops.profiler._record_function_exit._RecordFunction,
    }
)
"""Begin and end of a range for the profiler, which is the trace's and no part of the graph."""


class Redirect(TorchFunctionMode):
    """The torch function mode of one trace.

    Args:
        traced: stand-ins of the real tensors.
        tagger: told about backward phases.
        shared: told where the step uses gradients, and where backwards begin.
        made: takes note of every result.
        optimizers: those of the step.
        rebinding: does what `.data = …` does.
        first: takes note of the first use of each gradient.
        finder: gives stand-ins of real tensors that are no inputs yet, where they may become some.
    """

    def __init__(
        self,
        traced: StandIns,
        tagger: Tagger,
        shared: SharedByRanks,
        made: ObtainedValues,
        optimizers: Sequence[Optimizer],
        finder: ImplicitInputFinder,
        rebinding: Rebinding,
        first: first_gradients.FirstGradients,
    ) -> None:
        super().__init__()
        self._rebinding = rebinding
        self._finder = finder
        self._counts = constants.CountsJustMade(optimizers)
        self._traced = traced
        self._tagger = tagger
        self._shared = shared
        self._made = made
        self._tracer = _compat.current_tracer()
        self._packing = Packing(lambda tensor: untraced(made.decider.values, tensor))
        self._is_out = self._is_back = False
        self._first_gradients = first

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        func, kwargs = own_equality(_compat.function_asked(func)), kwargs or {}
        if self._is_back and isinstance(func, _compat.OpOverload):
            return func(*args, **kwargs)  # of autograd's own formulas
        if _compat.reads_metadata(func):
            known = self._traced.by_id
            return func(*(known.get(id(value), value) for value in args), **kwargs)
        if func in MEMORY and not is_asked_by_torch(sys._getframe(1)):
            refuse_unknown_call(func, args)
        if func in _PROFILED:
            with _compat.without_dispatch():
                return func(*args, **kwargs)
        args, kwargs = untraced(self._prepared, func, args, kwargs)
        if not self._is_back:
            self._shared.mark_used((args, kwargs))
        result = self._call(func, args, kwargs)
        untraced(self._made.add, result)
        return result

    @contextmanager
    def in_backwards(self) -> Iterator[None]:
        """While active, Python code that runs inside a backward is seen as well: hooks, autograd
        functions, recomputation of checkpoints."""
        with replaced(*around_backwards(self._seeing), *transforms_given(self._stand_in)):
            yield

    @contextmanager
    def _seeing(self, functions: object) -> Iterator[None]:
        if not self._is_out:
            yield
            return
        with assigned(self, _is_out=False, _is_back=True), self:
            yield

    def _prepared(self, func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        args, kwargs = (with_leaves(each, self._stand_in_at) for each in (args, kwargs))
        constants.forget_mixed(self._tracer, args, kwargs)
        args, kwargs = concrete(func, args, kwargs)
        if constants.writes(func) and self._tagger.phase == "optimizer":
            self._counts.forget(self._tracer, args[:1])
        sparse.refuse_entries(func, args)
        return args, kwargs

    def _call(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if func in first_gradients.ACCESSES and self._is_back:
            self._shared.refuse_reading(args[0])
        elif func in first_gradients.ACCESSES:
            self._first_gradients.note(func, args[0])
            self._shared.mark()
        elif func in _BACKWARDS:
            check_anomalies()
            if not self._is_out and not self._is_back:
                self._shared.begin_backward()
            with assigned(self, _is_out=True), self._tagger.during("backward"):
                return func(*args, **kwargs)
        elif func in (torch.Tensor.item, torch.Tensor.tolist):
            return numbers.as_read(func(*args, **kwargs))
        elif func in _TRUTHS and args[0].numel() == 1 and not _compat.is_transformed(args[0]):
            return numbers.truth(args[0])
        elif func in _INTEGERS and _is_number(args[0]):
            return operator.index(numbers.as_read(args[0].item()))
        elif (grown := self._rebinding.grown(func, args, kwargs)) is not None:
            return grown
        elif selecting.selects(func, args):
            return selecting.selected(func, args, torch.Tensor.item)
        elif func is torch.Tensor.detach_ and self._is_input(args[0]):
            return args[0]  # it has no history, and may be a view where the real one is none
        elif func in _DRAWING_WITHIN and any(map(numbers.is_float_read, (*args, *kwargs.values()))):
            args, kwargs = with_leaves((args, kwargs), self._plain)
        elif func is torch.Tensor.__contains__:
            return numbers.truth((args[0] == args[1]).any())
        elif func in _FROM_NUMBERS and _is_of_numbers(args):
            return constants.from_numbers(*args, **kwargs)
        elif func in _COMPARISONS:
            return _all_alike(_COMPARISONS[func], args, kwargs)
        elif func in fused.FUNCTIONS:
            return fused.call_with_symbols(self._tracer, func, args, fused.take_tensor_lr(kwargs))
        elif averages.takes(func, args, kwargs):
            return averages.call_with_symbol(self._tracer, func, args, kwargs)
        elif spectra.gives_values_alone(func, args, kwargs):
            with assigned(self._tagger, rewritten=spectra.without_vectors):
                return spectra.alone(func)(*args, **kwargs)
        elif smoothing.is_weighted(func, args, kwargs):
            with assigned(self._tagger, rewritten=smoothing.left_out):
                return func(*args, **kwargs)
        elif (by_numbers := ctc.mean_by_numbers(func, args, kwargs)) is not None:
            return by_numbers()
        elif fast_path.packs(func):
            raise fast_path.nested()
        elif recurrent.is_on_cudnn(func, args):
            raise recurrent.refused(func)
        elif self._packing.takes(func, args):
            return self._packing.call(func, args, kwargs)
        elif func in _ARRAYS:
            raise HostWork.ARRAY.refused(f"{func.__name__} of a tensor")
        elif func is torch.Tensor.__deepcopy__:
            return constants.deepcopied(*args)
        elif func == _SET_DATA:
            self._rebinding.set(*args)
            return None
        elif _names_something(func, args):
            return format(operator.index(numbers.as_read(args[0].item())), args[1])
        elif func in _TEXTS:
            return self._made.text(_TEXTS[func], args)
        return func(*args, **kwargs)

    def _is_input(self, tensor: torch.Tensor) -> bool:
        stand_ins = self._traced.by_id.values()
        return not tensor.requires_grad and any(each is tensor for each in stand_ins)

    def _plain(self, value: Any) -> Any:
        """A plain float in place of a traced one; the graph is specialized on it."""
        return self._made.decide(value, float) if numbers.is_float_read(value) else value

    def _stand_in_at(self, value: Any) -> Any:
        return self._stand_in(value) if isinstance(value, torch.Tensor) else value

    def _stand_in(self, tensor: torch.Tensor) -> torch.Tensor:
        if _compat.is_fake(tensor) and id(tensor) not in self._traced.by_id:
            return tensor
        known = self._traced.by_id.get(id(tensor))
        if known is None and _compat.is_transformed(tensor):
            return tensor
        if known is None:
            known = self._finder.stand_in(tensor)
        if known is None:
            raise self._finder.unknown(tensor)
        return known


_DRAWING_WITHIN = frozenset(
    {torch.Tensor.uniform_, torch.Tensor.normal_, torch.Tensor.exponential_, torch.Tensor.cauchy_,
     torch.Tensor.log_normal_, torch.Tensor.bernoulli_, torch.Tensor.geometric_}
)  # fmt: skip
"""Draws whose bounds are plain numbers, which torch looks at."""


def _is_number(tensor: torch.Tensor) -> bool:
    """True if a tensor may be an index or size: one element, neither float nor complex."""
    return tensor.numel() == 1 and not tensor.is_floating_point() and not tensor.is_complex()


def _is_of_numbers(args: Any) -> bool:
    """True if a tensor is created from numbers that the graph computes."""
    return bool(args) and (constants.holds_read(args[:1]) or constants.holds_tensors(args[0]))


def _names_something(func: Any, args: Any) -> bool:
    """True if a library formats an integer to name a submodule (`self[f"expert_{index}"]`), not to
    show it."""
    if func is not torch.Tensor.__format__ or args[0].ndim or not _is_number(args[0]):
        return False
    line = current_user_line()
    return line is not None and is_installed(line.file)


def _all_alike(compare: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """`torch.equal` and `torch.allclose` as a traced elementwise comparison."""
    if compare is torch.eq and args[0].shape != args[1].shape:
        return False
    return numbers.truth(compare(*args, **kwargs).all())
