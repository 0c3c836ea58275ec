"""Makes the draws of one trace, and notes them as the program that further calls run.

Each draw is made for real, so that the trace sees what the call would see; when the trace is over
the generators are put back. Between two draws that are seen a generator has to stay as it is:
whoever else draws from it is found out.
"""

from __future__ import annotations

import operator
import re
import warnings
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import fx

from graphopt import _compat
from graphopt._compat.untraced import without_overrides
from graphopt.errors import CaptureError
from graphopt.host import HostCall
from graphopt.host.assumptions import Assumption
from graphopt.ir.source import SourceLine
from graphopt.tracing.draws.arguments import (
    Known,
    Method,
    UnknownArgumentError,
    expression_of,
    is_known,
    is_layout,
    kind_of_array,
    layout_of,
    plain,
)
from graphopt.tracing.draws.generators import (
    Drawing,
    is_global,
    is_same_state,
    read_state,
    write_state,
)
from graphopt.tracing.draws.memory import ArrayMemory, meet
from graphopt.tracing.draws.program import ArgumentAt, HostInput, HostProgram, HostStep
from graphopt.tracing.draws.taken import Taking
from graphopt.tracing.host_numbers import is_host_number, stand_in_of_number
from graphopt.tracing.host_numbers import is_of_numpy as is_float_of_numpy
from graphopt.tracing.inputs import is_exact
from graphopt.tracing.known_functions import is_fresh, is_of_numpy
from graphopt.tracing.nests import leaves_in
from graphopt.tracing.number_expressions import (
    Application,
    Condition,
    Conditions,
    Leaf,
    leaves_of,
    same_value,
)
from graphopt.tracing.number_functions import SCALARS_OF_NUMPY
from graphopt.tracing.source import current_user_line, user_line_of


def tensor_over(array: Any) -> torch.Tensor:
    """A tensor in the memory of an array, which may be one that nobody may write to."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.from_numpy(array)


def _looks_at_arguments(function: Any) -> bool:
    """Whether a function looks at no array but those that it is given."""
    is_operator = getattr(function, "__module__", None) == operator.add.__module__
    by_itself = is_operator or type(function) is Method
    return by_itself or function in SHARING or is_of_numpy(function)


SHARING = frozenset({torch.from_numpy, torch.as_tensor, torch.asarray, tensor_over})
"""Functions whose tensor may lie in the memory of the array."""


class HostCalls:
    """The host's part of one trace.

    Args:
        tracer: records the step.
        mode: in which it computes.
        program: to be filled.
        conditions: of the inputs.
        notes: told about numbers.
        added: called with the value and the stand-in of each new input of the graph.
        outside: says whether an object was there before the step.
        alone: no other rank runs the same step.
    """

    def __init__(
        self,
        tracer: Any,
        mode: Any,
        program: HostProgram,
        conditions: Conditions,
        notes: Any,
        added: Callable[[torch.Tensor, torch.Tensor], None],
        outside: Callable[[Any], bool],
        alone: bool,
    ) -> None:
        self._tracer, self.mode, self._alone = tracer, mode, alone
        self.program, self._conditions, self._notes = program, conditions, notes
        self._added, self.is_outside = added, outside
        self._generators: dict[int, tuple[Any, Any]] = {}
        self._states: dict[int, Any] = {}
        self._random: set[int] = set()  # values that depend on draws
        self._continuous: set[int] = set()  # of these, those that are others in each call
        self.memory = ArrayMemory()
        self.makes_arrays: Callable[[], None] = nothing_more
        self._symbols: dict[str, int] = {}
        self._copied: dict[int, Any] = {}  # arrays that are reshaped, and no views: of which kind

    # ------------------------------------------------------------------ the trace begins and ends

    def __enter__(self) -> HostCalls:
        self._conditions.check = self._check
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._conditions.check = None
        if isinstance(error, _compat.data_dependent_errors()):
            self._refuse_number(error)
        unseen = [g for g, _ in self._generators.values() if not self._is_as_left(g)]
        for generator, before in reversed(self._generators.values()):  # two may share a state
            write_state(generator, before)
        if error is None and unseen:
            raise self._unseen()
        if error is None and self.memory.is_read_by_others():
            self._refuse_written()

    def _refuse_number(self, error: BaseException) -> None:
        """Say that it was a number drawn, where an operator has asked for the value of one."""
        asked = set(re.findall(r"\w+", str(error)))
        for symbol, index in self._symbols.items():
            if symbol in asked:
                line = user_line_of(error)
                raise CaptureError(
                    f"it gives a random number ({self.program.said(index)}) to what takes a plain"
                    " one, which is another one in each call",
                    location=None if line is None else str(line),
                    hint="draw outside the step and pass the result; or compute with tensors",
                ) from error

    def _is_as_left(self, generator: Any) -> bool:
        return is_same_state(read_state(generator), self._states[id(generator)])

    def _unseen(self) -> CaptureError:
        return self.refused(
            "it draws random numbers from Python's or numpy's generator in a way that is not seen"
            " (from a library's own code, or by a function that is given to another one), besides"
            " draws that are seen",
            "draw in the step itself, or outside the step, and pass the result",
        )

    def refused(self, reason: str, hint: str, line: SourceLine | None = None) -> CaptureError:
        """The step cannot be captured, even if it swallows the error.

        Args:
            line: of the program; None: where it is.
        """
        line = line or current_user_line()
        location = None if line is None else str(line)
        return self.noted(CaptureError(reason, location=location, hint=hint))

    # ------------------------------------------------------------------ calls

    def draw(self, drawing: Drawing, args: Sequence[Any], names: Sequence[str] = ()) -> Any:
        """Draw now, and in every call. What the step gets."""
        drawn = self.drawn(drawing, args, names)
        return self._given(drawn.expression.index, drawn.plain)

    def drawn(self, drawing: Drawing, args: Sequence[Any], names: Sequence[str] = ()) -> Known:
        """Draw now, and in every call. What stands for it before the graph runs."""
        generator = drawing.generator
        known = self._generators.get(id(generator))
        if known is None and not (is_global(generator) or self.is_outside(generator)):
            raise self.refused(
                f"it draws from a {type(generator).__name__} that it makes itself",
                "make the generator outside the step; or draw there, and pass the result",
            )
        if known is None:
            self._generators[id(generator)] = (generator, read_state(generator))
        elif not self._is_as_left(generator):
            raise self._unseen()
        try:
            index, value = self._step(drawing.function, args, names, generator, drawing.said)
        finally:
            self._states[id(generator)] = read_state(generator)
        if not drawing.is_discrete:
            self._continuous.add(index)
        self.program.behind_callback |= bool(self.functions_called())
        return Known(Leaf(index), value)

    def functions_called(self) -> list[HostCall]:
        """The functions that the step has given to the host by now."""
        targets = (node.target for node in self.nodes())
        return [t for t in targets if isinstance(t, HostCall) and not isinstance(t, Assumption)]

    def apply(
        self, function: Callable[..., Any], args: Sequence[Any], names: Sequence[str] = ()
    ) -> Any:
        """Compute with what has been drawn, now and in every call.

        Args:
            names: keywords that the last of `args` are given by.
        """
        self._refuse_written(function, args)
        index, value = self._step(function, args, names)
        return self._given(index, value)

    def found(self, function: Callable[..., Any], args: Sequence[Any], said: str = "") -> Known:
        """What a function gives, now and in every call, of which the step gets nothing yet."""
        index, value = self._step(function, args, (), said=said)
        return Known(Leaf(index), value)

    def argument(self, position: int, value: Any, said: str) -> Known:
        """What stands for an argument that is an array before the graph runs."""
        return Known(Leaf(self._add(HostStep(ArgumentAt(position), (), said=said))), value)

    def taken(self, source: Taking, args: tuple[Any, ...], said: str) -> int:
        """The step gets what its call has taken. Returns its index."""
        return self._add(HostStep(source, args, said=said, line=_current_line()))

    def _add(self, step: HostStep) -> int:
        """Let the program call something as well. Returns the index of what that gives."""
        self.program.steps.append(step)
        return self.last_index()

    def last_index(self) -> int:
        """That of the last value."""
        return self.program.first + len(self.program.steps) - 1

    def leave(self, generator: Any, state: Any) -> None:
        """A generator is where the code of an iterator has left it."""
        self._generators.setdefault(id(generator), (generator, read_state(generator)))
        write_state(generator, state)
        self._states[id(generator)] = read_state(generator)

    def noted(self, error: CaptureError) -> CaptureError:
        """An error that refuses the step, also if the step swallows it."""
        refused: CaptureError = self._notes.refuse(error)
        return refused

    def nodes(self) -> Iterable[fx.Node]:
        """What has been recorded so far."""
        nodes: Iterable[fx.Node] = self._tracer.graph.nodes
        return nodes

    def given(self, found: Known) -> Any:
        """What the step gets for a value that each call finds: of a bool, what stands for it."""
        from graphopt.tracing.draws.arrays import HostBool

        if type(found.plain) is bool:
            return HostBool(self, found.expression.index, found.plain)
        return self._given(found.expression.index, found.plain)

    def _step(
        self,
        function: Callable[..., Any],
        args: Sequence[Any],
        names: Sequence[str],
        generator: Any = None,
        said: str = "",
    ) -> tuple[int, Any]:
        line = _current_line()
        try:
            expressions = tuple(map(expression_of, args))
        except UnknownArgumentError as error:
            what = said or getattr(function, "__name__", "a function of numpy")
            raise self.refused(
                f"{what} is given {error}, and what Python and numpy draw, or compute with arrays,"
                " is found before the graph runs",
                "use numbers that are known then, or tensors and torch's random functions; or do it"
                " outside the step, and pass the result",
            ) from None
        named = dict(zip(names, args[len(args) - len(names) :], strict=True))
        given = [plain(each) for each in args[: len(args) - len(names)]]
        if self.memory.is_changed((*given, *map(plain, named.values()))):
            raise self.refused(
                "it reads an array outside its arguments behind a line that changes it by what the"
                " graph gives",
                "read it before, or in the next call; or do both in graphopt.callback(function, …)",
            )
        with _compat.without_modes():
            value = function(*given, **{name: plain(each) for name, each in named.items()})
        said = said or getattr(function, "__name__", "a number that numpy computes")
        index = self._add(HostStep(function, expressions, tuple(names), generator, said, line))
        sources = set(chain.from_iterable(map(leaves_of, expressions)))
        if generator is not None or not self._random.isdisjoint(sources):
            self._random.add(index)
        if generator is None and not self._continuous.isdisjoint(sources):
            self._continuous.add(index)
        if function in _RESHAPING and not names and _is_copy(value, given[0]):
            self._copied[index] = kind_of_array(given[0])
        return index, value

    # ------------------------------------------------------------------ results

    def _given(self, index: int, value: Any) -> Any:
        """What the step gets for a value."""
        from graphopt.tracing.draws.arrays import HostArray, is_of_numpy

        if value is None:
            return None
        if type(value) is float or (type(value) is int and is_exact(value)):
            return self._number(index, value)
        if is_of_numpy(value):
            array = HostArray(self, index, value)
            self._notes.add_number(array)
            return array
        if type(value) in (list, tuple):
            items = range(len(value))
            return type(value)(self.apply(_item, (Known(Leaf(index), value), i)) for i in items)
        if type(value) in (bool, int, str, bytes):
            return self.by_value(Leaf(index), value)
        raise self.refused(
            f"{self.program.said(index)} gives a {type(value).__name__}",
            "draw numbers or arrays, or draw outside the step",
        )

    def by_value(self, expression: Any, value: Any) -> Any:
        """A value that the graph holds for alone."""
        self._conditions.add(Condition(same_value, expression, value, True))
        return value

    def item(self, container: Any, key: Any) -> Any:
        """`container[key]` of what is known before the graph runs, now and in every call: a number,
        numpy's or not, of one kind, or None."""
        item = self.apply(operator.getitem, (container, key))
        if item is None:
            return self.by_value(Leaf(self.last_index()), None)
        if is_host_number(item):
            self.by_value(Application(type, (item.expression,)), type(item.value))
        return self.as_float(item)

    def as_float(self, value: Any) -> Any:
        """A scalar that is numpy's kind of float, and so one of Python's, as a number of the graph;
        other values themselves."""
        if is_known(value) and is_float_of_numpy(value.plain) and type(value.expression) is Leaf:
            return self._number(value.expression.index, value.plain)
        return value

    def as_scalar(self, value: Any) -> Any:
        """A scalar of numpy's that was computed, as a number of the graph that is one in each call;
        other values themselves."""
        if is_known(value) and value.is_scalar and value.plain.dtype.name in SCALARS_OF_NUMPY:
            return _compat.record_number(
                SCALARS_OF_NUMPY[value.plain.dtype.name], (value.number(),)
            )
        if is_host_number(value) and is_float_of_numpy(value):
            return _compat.record_number(SCALARS_OF_NUMPY["float64"], (value,))
        return value

    def _number(self, index: int, value: Any) -> Any:
        with _compat.without_modes():
            tensor = torch.tensor(value, dtype=torch.float64, device="cpu")
        stand_in = self._input(index, tensor)
        self._notes.allow(index)
        with without_overrides():
            number = stand_in_of_number(stand_in, value, index, self._conditions, self._notes)
        number.is_drawn = index in self._random
        self._notes.add_number(number)
        self._symbols[str(number.node.expr)] = index
        return number

    def tensor(
        self, function: Callable[..., Any], args: Sequence[Any], names: Sequence[str] = ()
    ) -> torch.Tensor:
        """A tensor that a torch function makes of an array, now and in every call."""
        self._refuse_written(function, args)
        index, value = self._step(function, args, names)
        if not isinstance(value, torch.Tensor):
            raise self.refused("it makes no tensor of an array", "draw outside the step")
        with _compat.without_modes():
            requires_grad, layout, value = value.requires_grad, layout_of(value), value.detach()
            array = value.numpy() if function in SHARING else None
        term = Application(layout_of, (Leaf(index),))
        self._conditions.add(Condition(same_value, term, layout, True))
        stand_in = self._input(index, value)
        if function in SHARING:
            self.memory.lend(array, stand_in)
        return stand_in.detach().requires_grad_() if requires_grad else stand_in

    def _input(self, index: int, value: torch.Tensor) -> torch.Tensor:
        said = self.program.steps[index - self.program.first].said
        name = f"{said} {len(self.program.inputs)}"
        with without_overrides():
            stand_in = _compat.add_input(self._tracer, self.mode, value, name)
        self.program.inputs.append(HostInput(index, name))
        self._added(value, stand_in)
        return stand_in

    def _refuse_written(self, function: Any = None, args: Sequence[Any] = ()) -> None:
        """Refuse to go on with arrays where a tensor over the memory of one has been updated.

        Args:
            function: is about to be called; None: whatever is.
        """
        by_arguments = _looks_at_arguments(function)
        given = leaves_in([*map(plain, args)])
        if self.memory.is_written(given if by_arguments else None):
            raise self.refused(
                "it updates a tensor in place that lies in the memory of a drawn numpy array, and"
                " goes on with the array",
                "let the tensor be a copy: torch.tensor(array)",
            )

    def step_of(self, array: Known) -> HostStep:
        """What gives an array."""
        index: int = array.expression.index
        return self.program.steps[index - self.program.first]

    def may_change(self, array: Known) -> bool:
        """Whether an array, or the one that it is a part of, is the step's own, and no tensor's."""
        return self._is_own(array.expression) and not self.memory.is_lent(array.plain)

    def _is_own(self, expression: Any) -> bool:
        if type(expression) is not Leaf or expression.index < self.program.first:
            return False
        known = Known(expression, None)
        if self.is_fresh(known):
            return True
        step = self.step_of(known)
        parts = [each for each in step.args if isinstance(each, (Leaf, Application))]
        return step.function in _OF_PARTS and bool(parts) and self._is_own(parts[0])

    def has_views(self, array: Known) -> bool:
        """Whether something may have been made of an array that lies in its memory."""
        index = array.expression.index
        behind = self.program.steps[index + 1 - self.program.first :]
        taking = (
            step for step in behind if index in chain.from_iterable(map(leaves_of, step.args))
        )
        return any(not is_fresh(step.function) for step in taking)

    def is_fresh(self, array: Known) -> bool:
        """Whether an array lies in no memory but its own."""
        step = self.step_of(array)
        if array.expression.index in self._copied:
            return self._is_copied(step, self._copied[array.expression.index])
        copies = "copy" not in step.names and step.function is not operator.getitem
        return step.generator is not None or (copies and is_fresh(step.function))

    def _is_copied(self, step: HostStep, kind: Any) -> bool:
        """Numpy copies what it reshapes where the shape and strides of that ask for it, for which
        the graph holds alone from here on."""
        self.by_value(Application(kind_of_array, step.args[:1]), kind)
        return True

    # ------------------------------------------------------------------ conditions

    def _check(self, condition: Condition) -> None:
        """Look at a condition before it becomes one of the graph."""
        expressions = (condition.left, condition.right)
        drawn = [
            leaf
            for leaf in chain.from_iterable(map(leaves_of, expressions))
            if leaf in self._random
        ]
        if not drawn or (condition.compare is same_value and is_layout(condition.left)):
            return
        what = self.program.said(drawn[0])
        if not self._alone:
            raise self.refused(
                f"it decides by a random number ({what}), which may be another one on each rank",
                "decide outside the step, by a number that all ranks have alike, and pass the"
                " decision; or choose between values with torch.where",
            )
        exact = condition.compare is same_value and type(condition.right) is float
        if exact and not self._continuous.isdisjoint(drawn):
            raise self.refused(
                f"it takes a random number ({what}) for a plain number, which is another one in"
                " each call",
                "compute with it, or compare it with another number; turn it into text in"
                " graphopt.callback(function, number), or return it from the step",
            )


def _current_line() -> str:
    """The line of the program, as a program of the host keeps it; empty where there is none."""
    place = current_user_line()
    return "" if place is None else f"{place.file}:{place.line}"


def nothing_more() -> None:
    """No other trace is needed."""


_OF_PARTS = frozenset({operator.getitem, *map(Method, ("reshape", "transpose", "ravel"))})
"""What gives a part of its first argument, or a copy, and of no other."""
_RESHAPING = frozenset(map(Method, ("reshape", "ravel")))
"""Of these, what copies where it cannot give a view."""


def _is_copy(array: Any, of: Any) -> bool:
    return hasattr(of, "__array_interface__") and not meet(array, of)


def _item(values: Sequence[Any], position: int) -> Any:
    return values[position]
