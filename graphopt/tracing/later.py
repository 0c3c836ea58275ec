"""Values of Python that are computed in each call when the graph has run, as the step says.

    np.mean(rows[-100:])       of a list that the step appends to
    f"loss {loss.item():.3f}"  a text
    images.cpu().numpy()       an array

Nobody but Python needs them: the step keeps, returns or shows them. The trace knows no more than
how they are made, of numbers and tensors that the graph gives. Deciding by one asks for its value.
"""

from __future__ import annotations

import datetime
import operator
import sys
import time
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NoReturn

import torch

from graphopt import _compat
from graphopt.errors import CaptureError
from graphopt.tracing.array_parts import OnCopy, without_ranges
from graphopt.tracing.arrays import (
    CHANGING_METHODS,
    METADATA,
    METHODS,
    VIEWS,
    ArrayConstant,
    Attribute,
    FoundByGraph,
    Method,
    is_of_numpy,
)
from graphopt.tracing.known_functions import (
    ASKING_TEXTS,
    GIVING_NUMBERS,
    GIVING_TEXTS,
    OF_ROWS,
    OF_TENSORS,
    OF_TIMES,
    is_elementwise,
    is_fresh,
    makes_array,
)
from graphopt.tracing.named_calls import Named, Swapped, called_by, is_numpy_of_tensor, joined
from graphopt.tracing.numbers import SYMBOLIC, refusal
from graphopt.tracing.running_trace import BEGIN, current_trace, is_running
from graphopt.tracing.shared_memory import OwnMemory, SharedMemory

ESCAPED = "\\udc81"
"""What the beginning of a piece becomes where a text is escaped."""


class Later(FoundByGraph):
    """Stands for a value while a step is traced.

    Args:
        function: gives it.
        args: of the function: numbers and tensors of the trace, other such values, constants, and
            lists, tuples and dictionaries of these.
        is_number: it is a number, which nothing changes in place.
        is_changed: it is a part of an array, which the step only changes in place.
        shares: it is an array in the memory of an argument or a tensor of the model.
        memory: it is an array in that of a tensor.

    Attributes:
        parts: other such values that it is made of.
        memories: those of tensors and arrays in which it lies.
        own: its own memory; None where it may be a part of something else.
        is_scalar: it is a number, or one of numpy's kinds that an operator has made of arrays
            without dimensions, and nothing changes it in place.
        dimensions: of what is known to be an array, -1 where nobody knows how many; None otherwise.
        hands_on: it is a list, or the like, of the very objects that it is made of.
        handed_on: it is that, or one of them.
        shared: that of the tensor that it is the array of, in its whole; None otherwise.
    """

    __slots__ = (
        "__weakref__",
        "_args",
        "_function",
        "_is_changed",
        "_known_as",
        "dimensions",
        "handed_on",
        "hands_on",
        "is_number",
        "is_scalar",
        "memories",
        "own",
        "parts",
        "shared",
        "shares",
    )

    def __init__(
        self,
        function: Callable[..., Any],
        args: Sequence[Any],
        is_number: bool = False,
        is_changed: bool = False,
        shares: bool = False,
        memory: SharedMemory | None = None,
    ) -> None:
        self.hands_on = _hands_on(function, args)
        of_one = function is operator.getitem and _is_handed_on(args)
        self.handed_on = self.hands_on or of_one
        self._function = function
        self._args = tuple(map(partial(argument, itself=self.handed_on), args))
        self.is_number, self._is_changed = is_number, is_changed
        self.is_scalar = is_number
        self.shares = shares
        laters = [a for a in _compat.tree_leaves(self._args) if isinstance(a, Later)]
        for each in laters:
            each.is_used()
        self.own = OwnMemory() if is_fresh(called_by(function)) and not is_number else None
        within = () if is_number or self.own else tuple(laters)
        self.shares |= any(each.shares for each in within)
        self.memories: set[SharedMemory | OwnMemory] = set()
        for each in laters:
            self.memories |= {memory for memory in each.memories if memory.reaches_all}
        for each in within:
            self.memories |= each.memories if each.own is None else {*each.memories, each.own}
        self.dimensions = _dimensions_of(function, self._args)
        self._known_as: Later | None = None
        self.shared: SharedMemory | None = None
        if memory is not None:
            self.lies_in(memory)
        self.parts = tuple(laters)

    def is_used(self) -> None:
        """The step uses it here."""
        for memory in self.memories:
            memory.is_used()

    def lies_in(self, memory: SharedMemory) -> None:
        """From here on, it is an array in the memory of a tensor."""
        self.shared = memory
        self.memories.add(memory)

    def as_it_is(self) -> Later:
        """What stands for the value as it is here, also where the step changes the array behind, or
        a tensor in a list."""
        if self.handed_on:
            args = tuple(map(argument, self._args))
            if not _are_same(args, self._args):
                return self._with(args)
        if self.own is None:
            return self
        if self._known_as is None:
            self._known_as = self._with(self._args)
        return self._known_as

    def _with(self, args: tuple[Any, ...]) -> Later:
        """The same with these arguments."""
        known = Later(self._function, ())
        known._args, known.own = args, self.own
        known.hands_on = known.handed_on = False
        known.parts = tuple(a for a in _compat.tree_leaves(args) if isinstance(a, Later))
        known.memories, known.shares = self.memories, self.shares
        known.dimensions, known.is_number = self.dimensions, self.is_number
        known.is_scalar = self.is_scalar
        return known

    def remade(self, args: Iterable[Any]) -> Later:
        """What the same function gives of these arguments as they are, and not as copies."""
        found = Later(self._function, ())
        found._args = tuple(args)
        found.parts = tuple(each for each in found._args if type(each) is Later)
        return found

    def changes(self, function: Callable[..., Any], *args: Any) -> Later:
        """From here on, it is the array as a function that changes it in place leaves it."""
        if self.own is None or self.own.is_exported:
            raise _refused("changes it in place", "make another one: x = x + y, not x += y")
        new = Later(OnCopy(function), (self, *args))
        self.own.is_written = True
        self._function, self._args, self.parts = new._function, new._args, new.parts
        self.own, self._known_as = new.own, None
        self.dimensions = -1 if self.dimensions is None else self.dimensions
        return self

    def __setitem__(self, key: Any, value: Any) -> None:
        self.changes(operator.setitem, without_ranges(key), value)

    @property
    def made_by(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """The function that gives it, with its arguments."""
        return self._function, self._args

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if name in _OF_SHAPES and self._lies_in_tensor():
            return _OF_SHAPES[name](self._args[0])
        if name in METADATA or name in VIEWS:
            known = current_trace().takes(self)
            return self._of_tensor(name) if known else Later(Attribute(name), (self,))
        if name in OF_TIMES:
            return Later(Attribute(name), (self,), is_number=True)
        of_row = current_trace().arrays.row_method(self, name) if name in OF_ROWS else None
        if of_row is not None:
            return of_row
        if name in CHANGING_METHODS and self.own is not None:
            return partial(_changed, self, Method(name))
        if not any(name in names for names in (METHODS, OF_TENSORS, GIVING_TEXTS, ASKING_TEXTS)):
            return self._of_tensor(name)

        def method(*args: Any, **options: Any) -> Any:
            found = applied(Method(name), (self, *args), options, is_number=name in GIVING_NUMBERS)
            return current_trace().text(found) if name in GIVING_TEXTS else found

        method.of_later = True  # type: ignore[attr-defined]
        return method

    def _lies_in_tensor(self) -> bool:
        """Whether it is the whole array in the memory of a tensor of known shape."""
        of_tensor = is_numpy_of_tensor(self._function) and isinstance(self._args[0], torch.Tensor)
        return of_tensor and not _compat.has_symbolic_shape(self._args[0])

    def _of_tensor(self, name: str) -> Any:
        """What only a tensor has, which is one of the graph from here on."""
        if not current_trace().takes(self):
            raise self.refused(f"uses its {name}")
        return getattr(current_trace().of_graph(self), name)

    def refused(self, what: str) -> CaptureError:
        """The refusal of a step that does something else with it than Python can do later."""
        return _refused(what)

    def __getitem__(self, key: Any) -> Any:
        left = _dimensions_left(self.dimensions, key if type(key) is tuple else (key,))
        is_number = self.is_number or left == 0
        item = Later(operator.getitem, (self, without_ranges(key)), is_number)
        item.dimensions = left or None
        return item

    def __len__(self) -> int:
        if self._lies_in_tensor():
            return len(self._args[0])
        return int(current_trace().decide(Later(len, (self,)), int))

    def __iter__(self) -> Iterator[Any]:
        return (self[index] for index in range(len(self)))

    def __contains__(self, value: Any) -> bool:
        return bool(Later(operator.contains, (self, value)))

    def __bool__(self) -> bool:
        return bool(current_trace().decide(self, bool))

    def __int__(self) -> int:
        return int(current_trace().decide(Later(int, (self,)), int))

    def __index__(self) -> int:
        return int(current_trace().decide(Later(operator.index, (self,)), int))

    def __str__(self) -> str:
        return current_trace().text(Later(str, (self,)))

    def __repr__(self) -> str:
        return current_trace().text(Later(repr, (self,)))

    def __format__(self, spec: str) -> str:
        return current_trace().text(Later(format, (self, spec)))

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        if options.get("out") is not None or method != "__call__":
            raise _refused("writes it into an array")
        return applied(ufunc, inputs, options, are_numbers(inputs))

    def __copy__(self) -> Later:
        return self

    def __deepcopy__(self, memo: Any) -> Later:
        return self

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), options: dict[str, Any] | None = None
    ) -> Any:
        given, named = map(current_trace().of_graph, (args, options or {}))
        return function(*given, **named)

    def _not_known(self, *args: Any, **options: Any) -> NoReturn:
        raise _refused("gives it to code that is not followed, or changes it in place")

    __float__ = __complex__ = __hash__ = __delitem__ = _not_known
    __array__ = __array_function__ = __reduce_ex__ = _not_known


_OF_SHAPES: dict[str, Callable[[torch.Tensor], Any]] = {
    "shape": lambda tensor: tuple(tensor.shape),
    "ndim": lambda tensor: tensor.ndim,
    "size": lambda tensor: tensor.numel(),
}
"""What numpy's attributes of an array are that lies in the memory of a tensor."""


def applied(
    function: Callable[..., Any],
    args: Sequence[Any],
    options: dict[str, Any],
    is_number: bool = False,
) -> Later:
    """What a function gives for these arguments, in each call."""
    if options.get("out") is not None:
        raise _refused("writes it into an array")
    if options:
        function, args = Named(function, tuple(options)), (*args, *options.values())
    return Later(function, args, is_number)


def as_later(value: Any) -> Any:
    """A text in which something stands for values, as a value; any other value itself."""
    if not isinstance(value, str) or not (BEGIN in value or ESCAPED in value):
        return value
    if not is_running():
        return value
    pieces = current_trace().parts(value)
    if all(type(piece) is str for piece in pieces):
        return value
    return pieces[0] if len(pieces) == 1 else Later(joined, pieces)


def _hands_on(function: Callable[..., Any], args: Sequence[Any]) -> bool:
    """Whether a function gives a container of the objects that it is given in containers."""
    if function in (list, tuple, dict) or getattr(function, "hands_on", False):
        return True
    if function is operator.getitem:
        return _is_handed_on(args) and args[0].hands_on and type(args[1]) is slice
    return function in _OF_LISTS and any(type(a) is Later and a.hands_on for a in args)


def _is_handed_on(args: Sequence[Any]) -> bool:
    return bool(args) and type(args[0]) is Later and args[0].handed_on


_OF_LISTS = (operator.add, operator.iadd, operator.mul)
"""Operators that do so where an operand is a list."""


def _are_same(args: Any, others: Any) -> bool:
    leaves, other_leaves = _compat.tree_leaves(args), _compat.tree_leaves(others)
    return len(leaves) == len(other_leaves) and all(map(operator.is_, leaves, other_leaves))


def argument(value: Any, itself: bool = False) -> Any:
    """An argument as it is now: what the step changes afterwards is another one.

    Args:
        itself: tensors, and what hands them on, are no copies: what the step makes of these
            afterwards, they are wherever they stand.
    """
    value = as_later(value)
    if type(value) is Later:
        return value if itself and value.handed_on else value.as_it_is()
    if isinstance(value, SYMBOLIC):
        return value
    if isinstance(value, torch.Tensor):
        return value if itself else value.detach().clone()
    if type(value) in (list, tuple):
        return type(value)(argument(each, itself) for each in value)
    if type(value) is dict:
        return {key: argument(each, itself) for key, each in value.items()}
    if type(value) is slice:
        bounds = value.start, value.stop, value.step
        if not all(map(is_constant, bounds)):
            return Later(slice, bounds)
    if is_of_numpy(value) and not value.dtype.hasobject:
        found = Later(Method("copy"), (Later(ArrayConstant(value), ()),))
        found.dimensions = value.ndim or None
        return found
    if is_constant(value):
        return value
    raise _refused(f"computes it of a {type(value).__name__}")


def _dimensions_left(dimensions: int | None, keys: Sequence[Any]) -> int | None:
    """How many dimensions items of an array have that are taken by integers and slices; None where
    that is not known."""
    numbers = [each for each in keys if type(each) is not slice]
    if dimensions is None or dimensions < len(keys) or not are_numbers(numbers):
        return None
    return dimensions - len(numbers)


def _dimensions_of(function: Callable[..., Any], args: Sequence[Any]) -> int | None:
    """How many dimensions what a function gives has; see `Later.dimensions`."""
    if is_numpy_of_tensor(function) and args and isinstance(args[0], torch.Tensor):
        return args[0].ndim
    function = called_by(function)
    if makes_array(function, args):
        of_list = function.__name__ == "array" and args and type(args[0]) in (list, tuple)
        return 1 if of_list and args[0] and are_numbers(args[0]) else -1
    operands = [each.dimensions or 0 for each in args if type(each) is Later]
    return -1 if is_elementwise(function) and max(operands, default=0) > 0 else None


def _changed(value: Later, method: Callable[..., Any], *args: Any) -> None:
    value.changes(method, *args)


def _known_before(value: Any) -> Later:
    """An array that is known before the graph runs, for what is computed when it has run."""
    if value.plain.dtype.kind == "b" and value.is_scalar:
        raise _refused("computes it of a truth that is known before")
    array = Later(Method("numpy"), (value.calls.tensor(torch.tensor, (value,)),))
    return Later(operator.getitem, (array, ())) if value.is_scalar else array


def is_constant(value: Any) -> bool:
    """Whether a value is one that nothing changes."""
    from graphopt.tracing.outside.places import is_value

    return is_value(value) or isinstance(value, (type, *_PLAIN))


_PLAIN = (
    *(types.BuiltinFunctionType, torch.dtype, torch.device, type(Ellipsis)),
    *(datetime.date, datetime.timedelta, datetime.tzinfo, time.struct_time),
)
_NUMBERS = (int, float, *SYMBOLIC)


def are_numbers(values: Sequence[Any]) -> bool:
    """Whether values are numbers, some of which may be known only when the graph has run."""
    numpy = sys.modules.get("numpy")
    kinds = _NUMBERS if numpy is None else (*_NUMBERS, numpy.number)
    return all(
        each.is_number if type(each) is Later else isinstance(each, kinds) for each in values
    )


def _gives_scalars(value: Any) -> bool:
    """Whether a value is a scalar, or an array without dimensions, of which operators make one."""
    return type(value) is Later and (value.is_scalar or value.dimensions == 0)


_HINT = (
    "keep, return or show such values, compute with them, or decide by them; compute what the graph"
    " needs with tensors, or do it in graphopt.callback(function, …)"
)


def _refused(what: str, hint: str = _HINT) -> CaptureError:
    return refusal(
        "it computes a value in Python of what the graph gives, or of a list that it changes, and"
        f" {what}",
        hint,
    )


def _forward(function: Callable[..., Any], in_place: bool = False) -> Callable[..., Any]:
    changing = getattr(operator, f"i{function.__name__.strip('_')}") if in_place else function

    def method(self: Later, *others: Any) -> Any:
        if any(isinstance(other, torch.Tensor) for other in others):
            return function(current_trace().of_graph(self), *others)
        if in_place and self._is_changed:
            return Later(changing, (self, *others), False, True)
        if in_place and self.dimensions is not None:
            return self.changes(changing, *others)
        if in_place and not self.is_scalar:
            raise _refused("changes it in place", "make another one: x = x + y, not x += y")
        operands = (self, *others)
        found = Later(function, operands, are_numbers(operands))
        found.is_scalar = are_numbers([each for each in operands if not _gives_scalars(each)])
        return found

    return method


def _reflected(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, other: _forward(Swapped(function))(self, other)


for _name in (
    *("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and_", "or_", "xor"),
):
    _function, _bare = getattr(operator, _name), _name.strip("_")
    setattr(Later, f"__{_bare}__", _forward(_function))
    setattr(Later, f"__r{_bare}__", _reflected(_function))
    setattr(Later, f"__i{_bare}__", _forward(_function, in_place=True))
for _name in ("eq", "ne", "lt", "le", "gt", "ge", "neg", "pos", "abs", "invert"):
    setattr(Later, f"__{_name}__", _forward(getattr(operator, _name)))
Later.__round__ = _forward(round)  # type: ignore[attr-defined]
