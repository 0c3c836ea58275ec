"""Functions that a step gives to others without Python code, which call them.

rows, targets = map(torch.tensor, arrays)    calls it as the step's own instructions would
total = sum(map(float, losses))
"""

from __future__ import annotations

import functools
import itertools
import types
from collections.abc import Sequence
from typing import Any

from graphopt.ir.source import SourceLine
from graphopt.tracing.outside.callees import Substitute
from graphopt.tracing.outside.calls import NativeCalls
from graphopt.tracing.outside.files import is_observed
from graphopt.tracing.outside.record import OutsideRecord
from graphopt.tracing.replace import is_in
from graphopt.tracing.scalars.numbers import current_notes

CALLING = frozenset({map, filter, itertools.starmap, functools.reduce})
"""Functions that call their first argument with what they go through."""


def is_called_by(callee: Any, args: Sequence[Any]) -> bool:
    """Whether a function calls its first argument, whose own instructions are not observed."""
    if not (is_in(callee, CALLING) and args and callable(args[0])):
        return False
    function = getattr(args[0], "__func__", args[0])
    if isinstance(function, types.FunctionType):
        return not is_observed(function.__code__.co_filename)
    return True


class GivenFunction:
    """Is called by a function to which the step has given it.

    Args:
        function: that is given.
        line: which gives it.
        record, calls, substitute: of the step's instructions.
    """

    def __init__(
        self,
        function: Any,
        line: SourceLine,
        record: OutsideRecord,
        calls: NativeCalls,
        substitute: Substitute,
    ) -> None:
        self._function, self._line = function, line
        self._record, self._calls, self._substitute = record, calls, substitute

    def __call__(self, *args: Any) -> Any:
        """What a call instruction with these operands gives."""
        function = self._function
        if current_notes() is None:  # the trace is over
            return function(*args)
        self._calls.call(function, args, self._line)
        return (self._substitute(function, args) or function)(*args)
