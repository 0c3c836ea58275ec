"""Arrays of numpy's: which values are arrays, what their functions change, and whose memory they
lie in."""

from __future__ import annotations

import sys
import warnings
from typing import Any

import torch

from graphopt import _compat
from graphopt._compat.late import alias_of

METADATA = frozenset({"shape", "ndim", "dtype", "size", "nbytes", "itemsize", "strides"})
VIEWS = frozenset({"T", "mT", "real", "imag"})
METHODS = frozenset(
    {"all", "any", "argmax", "argmin", "argsort", "astype", "clip", "compress", "conj", "copy",
     "cumprod", "cumsum", "diagonal", "dot", "flatten", "item", "max", "mean", "min", "nonzero",
     "prod", "ravel", "repeat", "reshape", "round", "searchsorted", "squeeze", "std", "sum",
     "swapaxes", "take", "tolist", "trace", "transpose", "var", "view"}
)  # fmt: skip
"""Methods that change nothing."""
CHANGING_METHODS = frozenset({"sort", "fill"})
"""Methods that change an array, and give nothing."""
_CHANGING_FIRST = frozenset(
    {"copyto", "put", "putmask", "place", "put_along_axis", "fill_diagonal"}
)
CHANGING = frozenset(
    {*_CHANGING_FIRST, "save", "savez", "savez_compressed", "savetxt", "array2string", "array_repr",
     "array_str"}
)  # fmt: skip
"""Functions of numpy that write into an array or a file, or give text."""


def changes_first(function: Any) -> bool:
    """Whether a function of numpy's changes the array that is its first argument."""
    return getattr(function, "__name__", "") in _CHANGING_FIRST


def is_of_numpy(value: Any) -> bool:
    """Whether a value is an array, or a scalar of numpy's."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic))


def is_array(value: Any) -> bool:
    """Whether a value is an array of numbers, in memory or in a file."""
    numpy = sys.modules.get("numpy")
    kinds = () if numpy is None else (numpy.ndarray, numpy.memmap)
    return type(value) in kinds and not value.dtype.hasobject


def tensor_over(array: Any) -> torch.Tensor:
    """A tensor in the memory of an array, which may be one that nobody may write to."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.from_numpy(array)


SHARING = frozenset({torch.from_numpy, torch.as_tensor, torch.asarray, tensor_over})
"""Functions whose tensor may lie in the memory of the array."""


def meets(array: Any, tensor: torch.Tensor) -> bool:
    """Whether an array and the storage of a tensor have memory in common."""
    if tensor.device.type != "cpu" or _compat.is_fake(tensor):
        return False
    if not (array.size and hasattr(array, "base")):
        return False
    return any(_meets(array, part) for part in _compat.strided_parts(alias_of(tensor)))


def _meets(array: Any, tensor: torch.Tensor) -> bool:
    storage = tensor.untyped_storage()
    begin = storage.data_ptr()
    low = high = array.__array_interface__["data"][0]
    for size, stride in zip(array.shape, array.strides, strict=True):
        low, high = low + min(0, stride * (size - 1)), high + max(0, stride * (size - 1))
    return bool(low < begin + storage.nbytes() and begin < high + array.itemsize)


class FoundByGraph:
    """What stands for a value that is computed when the graph has run."""

    __slots__ = ()


class Method:
    """Calls a method of its first argument.

    Args:
        name: of the method.
    """

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __call__(self, value: Any, /, *args: Any, **options: Any) -> Any:
        return getattr(value, self.__name__)(*args, **options)

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and bool(vars(other) == vars(self))

    def __hash__(self) -> int:
        return hash(self.__name__)


class Attribute(Method):
    """Reads an attribute of its argument."""

    def __call__(self, value: Any, /, *args: Any, **options: Any) -> Any:
        return getattr(value, self.__name__)


class ArrayConstant:
    """Gives a numpy array that is among the arguments of a call, with the values that it had at
    capture."""

    def __init__(self, array: Any) -> None:
        self._array = array.copy()

    def __call__(self) -> Any:
        return self._array

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ArrayConstant) and self._known() == other._known()

    def __hash__(self) -> int:
        return hash(self._known())

    def _known(self) -> tuple[Any, ...]:
        return self._array.dtype, self._array.shape, self._array.tobytes()


class LiveItems:
    """Gives a container of the program's as it is then.

    Args:
        container: a list, a tuple or a numpy array.
    """

    def __init__(self, container: Any) -> None:
        self.container = container

    def __call__(self) -> Any:
        return self.container

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LiveItems) and other.container is self.container

    def __hash__(self) -> int:
        return id(self.container)
