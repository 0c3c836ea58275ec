"""What runs on the host before a graph does: draws of random numbers, and what numpy makes of them.

0  random.random()                      values of a call: its numbers (learning rates, …),
1  numpy.random.normal(0, 1, (4, 2))    and then one for each of these calls, in their order
2  Tensor(%1)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from graphopt.tracing.draws.generators import is_same_state, read_state, write_state
from graphopt.tracing.draws.taken import NotTakenError, TakenValues, Taking, saved_states
from graphopt.tracing.number_expressions import Conditions, evaluate


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


@dataclass(frozen=True)
class ArgumentAt:
    """Gives an argument of a call.

    Attributes:
        position: among the leaves of the arguments.
    """

    position: int

    def __call__(self, leaves: Sequence[Any]) -> Any:
        return leaves[self.position]


@dataclass(frozen=True)
class HostStep:
    """One call.

    Attributes:
        function: what is called.
        args: constants and expressions of earlier values.
        names: keywords that the last of these are given by.
        generator: from which it draws; None where it draws nothing.
        said: the call as messages name it.
        line: of the program.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    names: tuple[str, ...] = ()
    generator: Any = None
    said: str = ""
    line: str = ""

    def run(self, values: Sequence[Any], leaves: Sequence[Any]) -> Any:
        """What the call gives, given what the steps before it gave, and the arguments."""
        if isinstance(self.function, ArgumentAt):
            return self.function(leaves)
        given = [evaluate(each, values) for each in self.args]
        if not self.names:
            return self.function(*given)
        split = len(given) - len(self.names)
        return self.function(*given[:split], **dict(zip(self.names, given[split:], strict=True)))


@dataclass(frozen=True)
class HostInput:
    """A value that a graph takes: a number, as 0-dim float64, or a tensor.

    Attributes:
        index: of the value.
        fqn: its name.
    """

    index: int
    fqn: str


@dataclass
class HostProgram:
    """The calls of one captured step, in their order.

    Attributes:
        first: how many numbers are there before.
        steps: the calls.
        inputs: what the graph takes.
        behind_callback: it draws after a function of `graphopt.callback`, which runs later here.
    """

    first: int = 0
    steps: list[HostStep] = field(default_factory=list)
    inputs: list[HostInput] = field(default_factory=list)
    behind_callback: bool = False

    @property
    def takes(self) -> int:
        """How many values it takes from iterators."""
        return sum(isinstance(step.function, Taking) for step in self.steps)

    def generators(self) -> list[Any]:
        """All that it draws from."""
        found = {id(step.generator): step.generator for step in self.steps}
        return [generator for generator in found.values() if generator is not None]

    def run(
        self,
        numbers: Sequence[Any],
        leaves: Sequence[Any],
        taken: TakenValues,
        conditions: Conditions | None,
    ) -> list[Any]:
        """Draw and compute; the values, behind the numbers.

        Args:
            leaves: the arguments of the call.
            taken: what the call takes from iterators.
            conditions: of the graph. None is taken where one does not hold that is known by then.

        Raises:
            NotTakenError: one does not.
        """
        values = list(numbers)
        for step in self.steps:
            if isinstance(step.function, Taking):
                if conditions is not None and conditions.broken(values) is not None:
                    raise NotTakenError("a condition does not hold")
                if taken.captured_for is self:
                    now = taken.again()
                else:
                    args = [evaluate(each, values) for each in step.args]
                    now = taken.next(step.function.function, step.function.asked(leaves, args))
                for generator, state in now.left:
                    write_state(generator, state)
                values.append(step.function(now))
            else:
                values.append(step.run(values, leaves))
        return values

    def tensors(self, values: Sequence[Any]) -> Iterator[torch.Tensor]:
        """What the graph takes."""
        for each in self.inputs:
            yield _as_tensor(values[each.index])

    def tensors_now(self, numbers: Sequence[Any], drawn: HostValues) -> list[torch.Tensor]:
        """What the graph would take now. The generators stay as they are.

        Args:
            drawn: of the call.
        """
        values = HostValues(drawn.leaves, drawn.taken)
        try:
            return list(self.tensors(values.of(self, numbers)))
        finally:
            values.undo()

    def repeats(self, other: HostProgram) -> bool:
        """Whether both do the same."""
        return self.steps == other.steps and self.inputs == other.inputs

    def said(self, index: int) -> str:
        """What messages call a value."""
        step = self.steps[index - self.first]
        return f"{step.said} at {step.line}" if step.line else step.said


def _as_tensor(value: Any) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value.detach() if value.requires_grad else value
    return torch.tensor(value, dtype=torch.float64, device="cpu")


class HostValues:
    """What one call has drawn so far, which can be put back.

    Attributes:
        leaves: the arguments of the call.
        taken: what it takes from iterators, which is not put back.
    """

    def __init__(self, leaves: Sequence[Any], taken: TakenValues | None = None) -> None:
        self.leaves = leaves
        self.taken = TakenValues() if taken is None else taken
        self._program: HostProgram | None = None
        self._values: list[Any] = []
        self._before: list[tuple[Any, Any]] = []
        self._after: list[tuple[Any, Any]] = []

    def of(
        self, program: HostProgram, numbers: Sequence[Any], conditions: Conditions | None = None
    ) -> list[Any]:
        """The values of a program in this call, behind its numbers. What another one has drawn is
        put back.

        Args:
            numbers: those of the call that the program begins with.
            conditions: see `HostProgram.run`.
        """
        if self._program is not program:
            self.undo()
            if not program.steps:
                return list(numbers)
            self._before = [(each, read_state(each)) for each in program.generators()]
            self._before += saved_states() if program.takes else []
            self._program = program
            try:
                self._values = program.run(numbers, self.leaves, self.taken, conditions)
                watched = program.generators() if program.behind_callback else []
                self._after = [(each, read_state(each)) for each in watched]
            except BaseException:
                self.undo()
                raise
        return self._values

    def value(self, index: int) -> Any:
        """A value of the program that was run last."""
        return self._values[index]

    def undo(self) -> None:
        """Nothing has been drawn."""
        for generator, state in self._before:
            write_state(generator, state)
        self.taken.begin_again()
        self._program, self._values, self._before, self._after = None, [], [], []

    def are_mixed(self) -> bool:
        """Whether somebody else has drawn meanwhile, from whom the step draws after him in the
        order of the program."""
        return any(not is_same_state(read_state(each), state) for each, state in self._after)
