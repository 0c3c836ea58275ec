"""What stands for an array, or a scalar of numpy's, that is drawn or computed before the graph.

Not an array itself: nothing gets at the values but by what is defined here, and each of these is
done again in every call.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from graphopt.tracing.draws.arguments import FoundByGraph, Known, Metadata, Method
from graphopt.tracing.host_numbers import is_host_number
from graphopt.tracing.number_expressions import Application, Leaf
from graphopt.tracing.numbers import SYMBOLIC
from graphopt.tracing.running_trace import current_trace

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


class Attribute(Method):
    """Reads an attribute of its argument."""

    def __call__(self, value: Any, /, *args: Any, **options: Any) -> Any:
        return getattr(value, self.__name__)


class HostArray(Known):
    """See the module's docstring.

    Args:
        calls: makes what is computed from it.
        index: of the value in the program.
        value: in this call.

    Attributes:
        is_left: the step leaves it somewhere.
    """

    def __init__(self, calls: Any, index: int, value: Any) -> None:
        super().__init__(Leaf(index), value)
        self.calls, self.is_left = calls, False

    __class__ = property(lambda self: type(vars(self).get("plain", self)))

    @property
    def is_scalar(self) -> bool:
        """Whether numpy would give a scalar, which cannot be changed."""
        return not isinstance(self.plain, _array_type())

    @property
    def is_number(self) -> bool:
        """Whether it is a single number, and no truth."""
        return self.plain.size == 1 and self.plain.dtype.kind in "fiu"

    @property
    def _as_now(self) -> Any:
        """The value of now, which may be shuffled afterwards."""
        if self.is_scalar or not isinstance(self.plain, _array_type()):
            return self.expression
        return self.calls.found(Method("copy"), (self,)).expression

    def is_unknown(self, other: Any) -> bool:
        """Whether a number is not known before the graph runs, with which this one, a float, is to
        be computed."""
        unknown = isinstance(other, SYMBOLIC) and not is_host_number(other)
        return unknown and self.is_scalar and self.calls.as_float(self) is not self

    # ------------------------------------------------------------------ for torch

    def number(self) -> Any:
        """The number that it is, for torch and for Python.

        Raises:
            CaptureError: it is no single number.
        """
        kind = self.plain.dtype.kind
        if self.plain.size != 1 or kind not in "fiu":
            raise self._refused("uses it as a number")
        return self.calls.apply(float if kind == "f" else int, (self,))

    def for_torch(self) -> Any:
        """What a function of torch's gets in its place: a number."""
        if self.plain.ndim == 0:
            return bool(self) if self.plain.dtype.kind == "b" else self.number()
        raise self._refused("gives it to a function of torch that takes no arrays")

    def index(self) -> Any:
        """What a tensor is indexed with in its place: a number, or a tensor of indices."""
        if self.plain.ndim and self.plain.dtype.kind in "iub":
            return self.calls.tensor(torch.tensor, (self,))
        return self.for_torch()

    def beside_tensor(self) -> Any:
        """What an operator computes with that has a tensor on its other side, which numpy makes an
        array of where this is one.

        Raises:
            CaptureError: it is one.
        """
        if isinstance(self.plain, _array_type()):
            raise self._refused("computes with it and a tensor")
        return self.for_torch()

    # ------------------------------------------------------------------ for numpy

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        if options.get("out") is not None or method == "at":
            raise self._changed()
        function = ufunc if method == "__call__" else getattr(ufunc, method)
        return self.calls.apply(function, (*inputs, *options.values()), tuple(options))

    def __array_function__(self, function: Any, types: Any, args: Any, options: Any) -> Any:
        if changes_first(function) and type(args[0]) is HostArray and not options:
            args[0].changes(function, *args[1:])
            return None
        if function.__name__ in CHANGING or options.get("out") is not None:
            raise self._changed()
        return self.calls.apply(function, (*args, *options.values()), tuple(options))

    def __array__(self, *args: Any, **options: Any) -> Any:
        raise self._refused("hands it to code that is not followed")

    # ------------------------------------------------------------------ for Python

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or "plain" not in vars(self):
            raise AttributeError(name)
        if name in METADATA:
            term = Application(Metadata(name), (self.expression,))
            return self.calls.by_value(term, getattr(self.plain, name))
        if name in VIEWS:
            return self.calls.apply(Attribute(name), (self,))
        if name in CHANGING_METHODS and not self.is_scalar:
            return partial(_changed, self, Method(name))
        if name not in METHODS:
            if not hasattr(self.plain, name):
                raise AttributeError(name)
            raise self._refused(f"uses its {name}")

        def method(*args: Any, **options: Any) -> Any:
            if options.get("out") is not None:
                raise self._changed()
            return self.calls.apply(Method(name), (self, *args, *options.values()), tuple(options))

        return method

    def __len__(self) -> int:
        if self.plain.ndim == 0:
            raise TypeError("len() of unsized object")
        return int(self.shape[0])

    def __iter__(self) -> Iterator[Any]:
        return (self[i] for i in range(len(self)))

    def __getitem__(self, key: Any) -> Any:
        return self.calls.apply(operator.getitem, (self, key))

    def __setitem__(self, key: Any, value: Any) -> None:
        self.changes(operator.setitem, key, value)

    def changes(self, function: Callable[..., Any], *args: Any) -> HostArray:
        """A function changes it in place, and each view of it with it, now and in every call.

        Raises:
            CaptureError: it may lie in memory that is not the step's own, or a tensor lies in its.
        """
        if not self.calls.may_change(self) or any(isinstance(each, FoundByGraph) for each in args):
            raise self._changed()
        self.calls.apply(function, (self, *args))
        return self

    def __bool__(self) -> bool:
        return bool(self.calls.by_value(Application(bool, (self._as_now,)), bool(self.plain)))

    def __int__(self) -> int:
        return int(self.calls.by_value(Application(int, (self._as_now,)), int(self.plain)))

    def __index__(self) -> int:
        value = operator.index(self.plain)
        return int(self.calls.by_value(Application(operator.index, (self._as_now,)), value))

    def __float__(self) -> float:
        value = float(self.plain)
        return float(self.calls.by_value(Application(float, (self._as_now,)), value))

    def __hash__(self) -> int:
        if not self.is_scalar:
            raise TypeError("unhashable type: 'numpy.ndarray'")
        return hash(self.calls.by_value(self.expression, self.plain))

    def __str__(self) -> str:
        return current_trace().text_of(str, (self,))

    def __repr__(self) -> str:
        return current_trace().text_of(repr, (self,))

    def __format__(self, spec: str) -> str:
        return current_trace().text_of(format, (self, spec))

    def __copy__(self) -> HostArray:
        return self

    def __deepcopy__(self, memo: Any) -> HostArray:
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise self._refused("pickles it")

    def _refused(self, what: str) -> Exception:
        refused: Exception = self.calls.refused(
            f"it draws an array with numpy, reads one outside or computes with these, and {what}",
            "make a tensor of it at once, as in torch.tensor(array) or torch.from_numpy(array), and"
            " go on with that; or draw outside the step, and pass the result",
        )
        return refused

    def _changed(self) -> Exception:
        return self._refused("writes into it, or into another array with it")


class HostBool(HostArray):
    """What stands for a bool of Python's that each call finds. Deciding by it takes a graph for
    each outcome."""

    is_scalar = property(lambda self: False)  # none of numpy's
    is_number = property(lambda self: True)

    def number(self) -> Any:
        """The integer that it is."""
        return self.calls.apply(int, (self,))

    def for_torch(self) -> Any:
        """The bool."""
        return bool(self)

    def __hash__(self) -> int:
        return hash(bool(self))


def _array_type() -> type:
    kind: type = sys.modules["numpy"].ndarray
    return kind


def _forward(function: Callable[..., Any]) -> Callable[[HostArray, Any], Any]:
    def method(self: HostArray, other: Any) -> Any:
        if isinstance(other, torch.Tensor):
            return function(self.beside_tensor(), other)
        if isinstance(other, FoundByGraph):
            return NotImplemented
        if self.is_unknown(other):
            return function(self.calls.as_float(self), other)
        return self.calls.apply(function, (self, other))

    return method


def _reflected(function: Callable[..., Any]) -> Callable[[HostArray, Any], Any]:
    def method(self: HostArray, other: Any) -> Any:
        if isinstance(other, torch.Tensor):
            return function(other, self.beside_tensor())
        if self.is_unknown(other):
            return function(other, self.calls.as_float(self))
        return self.calls.apply(function, (other, self))

    return method


def _in_place(
    function: Callable[..., Any], changing: Callable[..., Any]
) -> Callable[[HostArray, Any], Any]:
    def method(self: HostArray, other: Any) -> Any:
        return function(self, other) if self.is_scalar else self.changes(changing, other)

    return method


def _changed(array: HostArray, method: Callable[..., Any], *args: Any) -> None:
    array.changes(method, *args)


def _unary(function: Callable[..., Any]) -> Callable[[HostArray], Any]:
    return lambda self: self.calls.apply(function, (self,))


_BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and_", "or_", "xor",
           "lshift", "rshift")  # fmt: skip

for _operator in _BINARY:
    _name = _operator.strip("_")
    _function = getattr(operator, _operator)
    setattr(HostArray, f"__{_name}__", _forward(_function))
    setattr(HostArray, f"__r{_name}__", _reflected(_function))
    setattr(HostArray, f"__i{_name}__", _in_place(_function, getattr(operator, f"i{_name}")))
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    setattr(HostArray, f"__{_name}__", _forward(getattr(operator, _name)))
for _name in ("neg", "pos", "abs", "invert"):
    setattr(HostArray, f"__{_name}__", _unary(getattr(operator, _name)))
