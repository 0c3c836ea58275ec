"""Arrays that Python computes of tensors of the graph, where a tensor is made of them again.

    torch.from_numpy(loss.numpy())                        the tensor itself

What a tensor does as numpy does it is done with tensors, in the graph.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from graphopt import _compat
from graphopt.tracing.arrays import SHARING, Method
from graphopt.tracing.known_functions import is_in
from graphopt.tracing.later import Later
from graphopt.tracing.named_calls import is_numpy_of_tensor
from graphopt.tracing.running_trace import current_trace

_JOINING: dict[str, Callable[..., torch.Tensor]] = {"stack": torch.stack, "concatenate": torch.cat}


def made_of_array(callee: Any, args: Sequence[Any]) -> Callable[..., Any] | None:
    """What is called in place of a function that makes a tensor of such an array; None where that
    is not so, or where numpy might compute otherwise than torch."""
    if not (callee is torch.tensor or is_in(callee, SHARING)) or not args:
        return None
    tensor = _tensor_of(args[0])
    if tensor is None:
        return None

    def make(array: Any, dtype: Any = None, **options: Any) -> torch.Tensor:
        whole = array.shared and array.shared.as_tensor()
        is_first = whole is None and not is_numpy_of_tensor(array.made_by[0])
        of, copied = tensor if whole is None else whole, callee is torch.tensor
        found = of.to(dtype=dtype or of.dtype, copy=copied or is_first, **_placed(options))
        is_same = (found.dtype, found.device) == (tensor.dtype, tensor.device)
        if is_first and is_same and not copied:  # which has the memory of the array from here on
            array.lies_in(current_trace().memory_of(found))
        return found.requires_grad_(options.get("requires_grad", False))

    return make


def _placed(options: dict[str, Any]) -> dict[str, Any]:
    return {name: options[name] for name in ("device",) if options.get(name) is not None}


def _tensor_of(value: Any) -> torch.Tensor | None:
    """An array as a tensor; None where it cannot be told."""
    if type(value) is not Later:
        return None
    function, args = value.made_by
    name = getattr(function, "__name__", "")
    if is_numpy_of_tensor(function) and isinstance(args[0], torch.Tensor):
        return args[0]
    if isinstance(function, Method) and name in ("astype", "copy"):
        tensor = _tensor_of(args[0])
        return tensor if name == "copy" or tensor is None else _converted(tensor, args[1:])
    numpy: Any = sys.modules.get("numpy")
    if name in _JOINING and function is getattr(numpy, name) and len(args) == 1:
        return _joined(_JOINING[name], args[0])
    return None


def _converted(tensor: torch.Tensor, given: Sequence[Any]) -> torch.Tensor | None:
    """`array.astype(dtype)`. A float that does not fit in an integer is another one in torch."""
    if len(given) != 1 or not isinstance(given[0], type):
        return None
    numpy: Any = sys.modules["numpy"]
    with _compat.without_modes():
        kind = torch.from_numpy(numpy.empty(0, given[0])).dtype
    if tensor.is_floating_point() and not kind.is_floating_point:
        return None
    return tensor.to(kind)


def _joined(join: Callable[..., torch.Tensor], arrays: Any) -> torch.Tensor | None:
    tensors = [_tensor_of(each) for each in arrays] if isinstance(arrays, (list, tuple)) else []
    if not tensors or any(tensor is None for tensor in tensors):
        return None
    kinds = {tensor.dtype for tensor in tensors if tensor is not None}
    return join(tensors) if len(kinds) == 1 else None
