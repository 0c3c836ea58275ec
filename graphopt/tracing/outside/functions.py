"""Functions that torch's own code calls by a global name: they can be replaced as well."""

from __future__ import annotations

from functools import lru_cache
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, ModuleType

from graphopt._compat import frames
from graphopt.ir.source import SourceLine
from graphopt.tracing.outside.places import OutsidePlace
from graphopt.tracing.outside.record import OutsideRecord

_CALLED = (FunctionType, BuiltinFunctionType, type)
_FILES = ("torch/nn/", "torch/optim/", "torch/functional.py", "torch/_tensor.py")


def called_by_torch(record: OutsideRecord, frame: FrameType) -> None:
    """The function of torch that begins may call functions by name: which they are is a read."""
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
            line = SourceLine(code.co_filename, frame.f_lineno, code.co_name)
            record.read(OutsidePlace("item", namespace, name), path, line)


@lru_cache(maxsize=4096)
def _names(code: CodeType) -> tuple[tuple[str, str | None], ...]:
    """Global names that a function loads, each with the attribute that it takes of it at once."""
    if not any(part in code.co_filename for part in _FILES):
        return ()
    return frames.loaded_globals(code)
