"""Refusal of a step's calls that do host work (see `refusals`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

from torch.optim import lr_scheduler
from torch.utils.data import DataLoader

from graphopt.ir.user_frames import is_library_file
from graphopt.tracing.effects.torch_generators import refuse_seeding
from graphopt.tracing.interception.replaced_functions import original
from graphopt.tracing.refusals.host_reads import read_by
from graphopt.tracing.refusals.host_work import HostWork
from graphopt.tracing.refusals.host_writes import written_by
from graphopt.tracing.refusals.kept_casts import refuse_switched
from graphopt.tracing.refusals.unknown_features import refuse_unknown_call
from graphopt.tracing.rollback.generators import draw_of


class RefusedCalls:
    """Checks each call that the step's own code makes.

    Args:
        is_outside: whether an object was there before the step.
    """

    def __init__(self, is_outside: Callable[[Any], bool]) -> None:
        self._is_outside = is_outside

    def __call__(self, callee: Any, args: Sequence[Any]) -> None:
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


def refusing(
    refuse: RefusedCalls, kinds: Sequence[Callable[[Any, Sequence[Any]], Any]]
) -> Callable[[Any, Sequence[Any]], Any]:
    """Returns a function that refuses host work and otherwise gives a replacement for a callee, or
    None."""

    def called(callee: Any, args: Sequence[Any]) -> Any:
        refuse(callee, args)
        return next(filter(None, (kind(callee, args) for kind in kinds)), None)

    return called
