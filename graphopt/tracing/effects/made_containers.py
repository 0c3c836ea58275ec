"""Containers of constants that a step stores in an attribute, created again in each call.

self.rows = []       the program appends to the list of this call, and not to that of all
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from graphopt.tracing.results.signature import Constant
from graphopt.tracing.rollback.nests import parts

_KINDS = frozenset({list, dict, OrderedDict, defaultdict, deque, set, tuple})


@dataclass(frozen=True)
class MadeConstant(Constant):
    """A Python value whose containers each call creates again.

    Attributes:
        made: which containers these are, by id.
    """

    made: frozenset[int] = frozenset()

    def anew(self) -> Any:
        """Builds the value for one more call."""
        return self._copied(self.value, {})

    def _copied(self, value: Any, known: dict[int, Any]) -> Any:
        if id(value) not in self.made:
            return value
        if id(value) in known:
            return known[id(value)]
        if type(value) is tuple:
            return tuple(self._copied(each, known) for each in value)
        new = known[id(value)] = copy.copy(value)
        if isinstance(value, dict):
            new.update((key, self._copied(each, known)) for key, each in value.items())
        elif type(value) in (list, deque):
            for index, each in enumerate(value):
                new[index] = self._copied(each, known)
        return new


def constant_with(value: Any, is_outside: Callable[[Any], bool]) -> Constant:
    """Wraps a constant value of a step whose containers each call must create again."""
    nests = [each for each in parts(value, _is_nest) if _is_nest(each)]
    made = frozenset(id(each) for each in nests if not is_outside(each))
    return MadeConstant(value, made) if made else Constant(value)


def _is_nest(value: Any) -> bool:
    return type(value) in _KINDS
