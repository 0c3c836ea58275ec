"""Functions that code calls which is not observed itself.

torch.nn.functional.relu       torch's own code calls it by a global name: it can be replaced
total = sum(map(float, losses))    a step gives `float` to a function without Python code
"""

from __future__ import annotations

import functools
import itertools
import types
from collections.abc import Callable, Sequence
from functools import lru_cache
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, ModuleType
from typing import Any

from graphopt._compat import frames
from graphopt.ir.source import SourceLine
from graphopt.tracing.bytecode.accesses import is_observed
from graphopt.tracing.bytecode.calls import NativeCalls
from graphopt.tracing.interception.replaced_functions import is_in, passing
from graphopt.tracing.outside.places import OutsidePlace
from graphopt.tracing.outside.record import OutsideRecord
from graphopt.tracing.refusals.calls import SubstitutedCalls
from graphopt.tracing.scalars.numbers import current_notes

_CALLED = (FunctionType, BuiltinFunctionType, type)
_FILES = ("torch/nn/", "torch/optim/", "torch/functional.py", "torch/_tensor.py")


def called_by_torch(record: OutsideRecord, frame: FrameType) -> None:
    """Records which functions the beginning torch function finds under global names."""
    code = frame.f_code
    if code in record.functions_of_torch:
        return
    record.functions_of_torch.add(code)
    for name, attribute in _names(code):
        namespace = frame.f_globals
        value = namespace.get(name)
        path = name
        if attribute is not None and isinstance(value, ModuleType):
            namespace, path = vars(value), f"{name}.{attribute}"
            name, value = attribute, namespace.get(attribute)
        if isinstance(value, _CALLED):
            record.read(OutsidePlace("item", namespace, name), path, SourceLine.of(frame))


@lru_cache(maxsize=4096)
def _names(code: CodeType) -> tuple[tuple[str, str | None], ...]:
    """The global names that a function loads, each with an attribute that it reads of it."""
    if not any(part in code.co_filename for part in _FILES):
        return ()
    return frames.loaded_globals(code)


CALLING = frozenset({map, filter, itertools.starmap, functools.reduce})
"""Functions that call their first argument with what they go through."""


def is_called_by(callee: Any, args: Sequence[Any]) -> bool:
    """True if a native callee calls its first argument, an unobserved function."""
    if not (is_in(callee, CALLING) and args and callable(args[0])):
        return False
    function = getattr(args[0], "__func__", args[0])
    if isinstance(function, types.FunctionType):
        return not is_observed(function.__code__.co_filename)
    return True


def followed(
    function: Any, line: SourceLine, calls: NativeCalls, substitute: SubstitutedCalls
) -> Callable[..., Any]:
    """What a native function is given to call a function as an instruction of the step would.

    Args:
        line: which gives it.
        calls, substitute: of the step's instructions.
    """

    @passing
    def call(*args: Any) -> Any:
        if current_notes() is None:  # the trace is over
            return function(*args)
        calls.call(function, args, line)
        return (substitute(function, args) or function)(*args)

    return call
