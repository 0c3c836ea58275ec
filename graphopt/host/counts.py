"""Counts how often each `graphopt.callback` call in the program was reached, for `every=n`.

    for layer in layers:               every=2 with three layers calls
        layer(x)    # forward:           step 1:  the second
            callback(…, every=2)         step 2:  the first and the third

A captured step counts as eager code does, which cannot know where a step begins: a place counts for
itself, over all times that it is reached. A place is a call of `callback`, and the line of the
program that called the function or module in which it stands: what a logging function is called for
at two places is counted apart.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from types import CodeType, FrameType

from graphopt.ir.user_frames import is_library_file

Place = tuple[tuple[CodeType, int], ...]
"""Instructions of the program, innermost first: of two functions at the most. With fewer, the step
that was captured is the outer one."""

_FUNCTIONS = 2


def place_of(frame: FrameType, is_end: Callable[[FrameType], bool] | None = None) -> Place:
    """Identifies the call of `callback` in the program by its frame and callers.

    Args:
        is_end: frames from which on nothing belongs to the step.
    """
    return ((frame.f_code, frame.f_lasti), *_outside(frame.f_back, _FUNCTIONS - 1, is_end))


def _outside(
    frame: FrameType | None, count: int, is_end: Callable[[FrameType], bool] | None = None
) -> Place:
    """The innermost `count` user functions from a frame outwards."""
    found: list[tuple[CodeType, int]] = []
    while frame is not None and len(found) < count and not (is_end and is_end(frame)):
        if not is_library_file(frame.f_code.co_filename):
            found.append((frame.f_code, frame.f_lasti))
        frame = frame.f_back
    return tuple(found)


class TimesReached:
    """Counts of how often each place in the program was reached."""

    def __init__(self) -> None:
        self._reached: Counter[Place] = Counter()

    def is_due(self, place: Place, every: int) -> bool:
        """Counts one more visit; True for every `every`-th one.

        Where the place is in the captured step itself, who calls the step now is the rest of it.
        """
        if 0 < len(place) < _FUNCTIONS:
            place += _outside(sys._getframe(1), _FUNCTIONS - len(place))
        self._reached[place] += 1
        return self._reached[place] % every == 0
