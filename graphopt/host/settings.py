"""Settings of an optimizer that a scheduler has changed in this call, as nodes of the graph.

    scheduler.step()          callback  = graphopt.callback()
    optimizer.step()    ==>   setting_0 = graphopt.setting_0()
                              …the update, computed with it

Such a node is a call on the host as others are, and keeps its place among them; what it gives is a
number of the graph, as what a clock shows is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from graphopt.errors import GraphOptError
from graphopt.host import HostCall


class SettingReading(HostCall):
    """The target of a node that reads a setting of a parameter group.

    Args:
        read: gives it.
        key: of the parameter group.
        index: which reading of the step it is, in the order of the program.

    Attributes:
        answers: what the step has been told of comparisons of it with constants.
    """

    def __init__(self, read: Callable[[], Any], key: str, index: int) -> None:
        super().__init__(read, ())
        self.__name__ = self.__qualname__ = f"setting_{index}"
        self._key, self._index = key, index
        self.answers: list[tuple[Callable[[Any, Any], Any], Any, bool]] = []

    def __call__(self, *values: Any) -> float:
        return self._number()

    def run(self, values: Sequence[Any]) -> None:
        raise AssertionError("it is called by `__call__` alone")

    def _number(self) -> float:
        value = self.fn()
        if not _is_float(value):
            raise self._changed(f"to a {type(value).__name__}, of another kind")
        for compare, other, answer in self.answers:
            if bool(compare(value, other)) is not answer:
                asked = f"{compare.__name__}({self._key}, {other!r})"
                raise self._changed(f"to {value!r}: {asked}, by which the optimizer goes, is other")
        return float(value)

    def _changed(self, what: str) -> GraphOptError:
        return GraphOptError(
            f"a scheduler that the step steps before its optimizer has changed {self._key!r} of a"
            f" parameter group {what} than when the step was captured"
            "\n  hint:  step the scheduler behind the optimizer, or outside the step"
        )

    def repeats(self, other: HostCall) -> bool:
        if not isinstance(other, SettingReading):
            return False
        known = self.fn == other.fn and self._index == other._index
        return known and self.answers == other.answers

    def __repr__(self) -> str:
        return f"graphopt.setting({self._key}, {self._index})"


def _is_float(value: Any) -> bool:
    """Whether arithmetic with a value is that of Python's floats."""
    return type(value) in (float, int) or (
        isinstance(value, float) and type(value).__module__ == "numpy"
    )


def reads_setting(node: fx.Node) -> bool:
    """Whether a node gives a setting that a call on the host before it has changed."""
    return isinstance(node.target, SettingReading)
