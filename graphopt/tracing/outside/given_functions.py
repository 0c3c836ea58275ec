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
from graphopt.tracing.known_functions import is_followed, is_in
from graphopt.tracing.outside.callees import Substitute
from graphopt.tracing.outside.calls import NativeCalls
from graphopt.tracing.outside.record import Record
from graphopt.tracing.running_trace import is_running

CALLING = frozenset({map, filter, itertools.starmap, functools.reduce})
"""Functions that call their first argument with what they go through."""
_WITHOUT_CODE = (functools.partial, types.BuiltinMethodType, types.MethodDescriptorType)


def is_called_by(callee: Any, args: Sequence[Any]) -> bool:
    """Whether a function calls its first argument, whose own instructions are not observed."""
    if not (is_in(callee, CALLING) and args and callable(args[0])):
        return False
    return isinstance(args[0], _WITHOUT_CODE) or not is_followed(args[0])


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
        record: Record,
        calls: NativeCalls,
        substitute: Substitute,
    ) -> None:
        self._function, self._line = function, line
        self._record, self._calls, self._substitute = record, calls, substitute

    def __call__(self, *args: Any) -> Any:
        """What a call instruction with these operands gives."""
        function, laters = self._function, self._record.laters
        if laters is None or not is_running():  # the trace is over
            return function(*args)
        other = laters.called(function, args, self._line)
        if other is not None:
            return other(*args)
        given = laters.taken(function, args)
        self._calls.call(function, given, self._line)
        return (self._substitute(function, given) or function)(*given)
