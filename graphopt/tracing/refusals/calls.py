"""Refusal of a step's calls that do host work (see `refusals`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

from torch.optim import lr_scheduler
from torch.utils.data import DataLoader

from graphopt.ir.user_frames import is_library_file
from graphopt.tracing.bytecode.inner_calls import inner_call
from graphopt.tracing.effects.torch_generators import refuse_seeding
from graphopt.tracing.interception.replaced_functions import original, replacement
from graphopt.tracing.refusals.host_reads import read_by
from graphopt.tracing.refusals.host_work import HostWork
from graphopt.tracing.refusals.host_writes import written_by
from graphopt.tracing.refusals.kept_casts import refuse_switched
from graphopt.tracing.refusals.unknown_features import refuse_unknown_call
from graphopt.tracing.rollback.generators import draw_of


def refuse_begun(frame: FrameType, is_outside: Callable[[Any], bool]) -> None:
    """Refuses the start of a library function that steps a scheduler, or takes values from an
    outside loader or iterator."""
    code = frame.f_code
    steps = code.co_name == "step" and code.co_filename == lr_scheduler.__file__
    takes = code.co_name == "__next__" and is_library_file(code.co_filename)
    if steps or takes or code is DataLoader.__iter__.__code__:
        owner = frame.f_locals.get("self")
        if is_outside(owner):
            work = HostWork.SCHEDULER if steps else HostWork.ITERATOR
            raise work.refused(f"{type(owner).__name__}.{code.co_name}()")


class SubstitutedCalls:
    """Gives what the step's own code calls in place of a function. Calls that are work on the host
    are refused before, under whatever name the step has the function.

    Args:
        is_outside: whether an object was there before the step.
        kinds: each says it of some functions; the first counts that does not say None.
    """

    def __init__(
        self,
        is_outside: Callable[[Any], bool],
        kinds: Sequence[Callable[[Any, Sequence[Any]], Any]],
    ) -> None:
        self._is_outside, self._kinds = is_outside, kinds

    def __call__(self, callee: Any, args: Sequence[Any]) -> Callable[..., Any] | None:
        """What is called in place of a function with some arguments; None: itself."""
        self._refuse(callee, args)
        found: Callable[..., Any] | None
        found = next(filter(None, (kind(callee, args) for kind in self._kinds)), None)
        inner = None if found is not None else inner_call(callee, args)
        if inner is None:
            return found or replacement(callee)
        other = self(inner.function, inner.args)
        return None if other is None else inner.around(other)

    def of_given(self, function: Any) -> Callable[..., Any] | None:
        """What a function of C is given in place of a function that it calls; None: itself."""
        self._refuse(function, ())
        inner = inner_call(function, ())
        if inner is None:
            return replacement(function)
        other = self.of_given(inner.function)
        return None if other is None else inner.around(other)

    def _refuse(self, callee: Any, args: Sequence[Any]) -> None:
        """Refuses a call that does host work.

        Args:
            args: positional values, the object of a method first, and those of keywords.
        """
        callee = original(callee)
        refuse_unknown_call(callee, args)
        refuse_switched(callee)
        refuse_seeding(callee, args)
        drawn = draw_of(callee, args, self._is_outside)
        if drawn is not None:
            raise HostWork.DRAW.refused(drawn)
        written = written_by(callee, args)
        if written is not None:
            kind, what = written
            raise kind.refused(what)
        read = read_by(callee, args)
        if read is not None:
            raise HostWork.READ.refused(read)
