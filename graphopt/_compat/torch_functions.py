"""The functions that torch reports to function modes, and the modes that a program has entered.

Torch's Python functions look themselves up by their names for that. Where a program has put its own
in the place of one, the mode is told of that one, which has run already, and runs it again:

    old = F.relu
    F.relu = lambda x: 2 * old(x)    in a function mode: 4 * relu(x)
"""

from __future__ import annotations

import inspect
import os
from types import CellType, CodeType, FrameType, FunctionType
from typing import Any

import torch
from torch.overrides import (
    TorchFunctionMode,
    _get_current_function_mode_stack,
    handle_torch_function,
)
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode

_TELLS = handle_torch_function.__code__
_TORCH = os.path.dirname(torch.__file__) + os.sep


_METADATA = frozenset(
    {"dim", "element_size", "get_device", "is_complex", "is_floating_point", "ndimension", "numel"}
    | {"nelement", "size", "stride", "storage_offset", "is_contiguous"}
)
_PROPERTIES = ("shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_leaf")
_READABLE = frozenset(getattr(torch.Tensor, name).__get__ for name in _PROPERTIES)


def reads_metadata(func: Any) -> bool:
    """True if a torch function reads a tensor's layout and not its values."""
    return func in _READABLE or getattr(func, "__name__", "") in _METADATA


def function_asked(func: Any) -> Any:
    """The torch function that called a mode's `__torch_function__` with `func`; for use in that
    method only."""
    if type(func) is not FunctionType or func.__code__.co_filename.startswith(_TORCH):
        return func
    frame = inspect.currentframe()
    method = None if frame is None else frame.f_back
    caller = None if method is None else method.f_back
    asking = None if caller is None else caller.f_back
    if caller is None or asking is None or caller.f_code is not _TELLS:
        return func
    return _FUNCTIONS.get(asking.f_code) or _function_of(asking)


def _written_in_python() -> dict[CodeType, FunctionType]:
    owners = (torch.Tensor, torch.nn.functional, torch.functional, torch.autograd)
    values = [value for owner in owners for value in vars(owner).values()]
    return {value.__code__: value for value in values if isinstance(value, FunctionType)}


_FUNCTIONS = _written_in_python()
"""Functions of torch by their code, as they are before a program has replaced any."""


def _function_of(frame: FrameType) -> FunctionType:
    code = frame.f_code
    cells = tuple(CellType(frame.f_locals[name]) for name in code.co_freevars)
    return FunctionType(code, frame.f_globals, code.co_name, None, cells)


def function_modes() -> list[Any]:
    """The function modes that a program has entered, except the default device."""
    if not torch._C._len_torch_function_stack():
        return []
    return [mode for mode in _get_current_function_mode_stack() if is_of_program(mode)]


def runs_mode(frame: FrameType) -> bool:
    """True if a frame runs a mode's `__torch_function__` or `__torch_dispatch__`."""
    if frame.f_code.co_name not in ("__torch_function__", "__torch_dispatch__"):
        return False
    return is_of_program(frame.f_locals.get("self"))


def is_of_program(mode: Any) -> bool:
    """True if a mode that sees calls was entered by the program, and not for a default device,
    tracing or fake tensors."""
    if type(mode).__module__.startswith(("graphopt.", "torch.utils.checkpoint")):
        return False  # what a selective checkpoint sees while it is traced is what eager code shows
    if isinstance(mode, TorchFunctionMode):
        return type(mode) is not DeviceContext
    return isinstance(mode, TorchDispatchMode) and getattr(mode, "_mode_key", None) is None


def is_unwatched() -> bool:
    """True if no mode sees functions or operators, and no hook what autograd saves."""
    return not (
        torch._C._len_torch_function_stack()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._autograd._top_saved_tensors_default_hooks(True)
        or torch.is_anomaly_enabled()
    )


def hooks_on_saved_tensors() -> str | None:
    """The name of the pack function of a program's saved-tensor hooks; None without hooks, or if
    they only move tensors (`save_on_cpu`)."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if hooks is None or inspect.getmodule(hooks[0]) is torch.autograd.graph:
        return None
    return getattr(hooks[0], "__qualname__", type(hooks[0]).__qualname__)
