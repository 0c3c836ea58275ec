"""Log messages and warnings about repeated captures of a training step."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from graphopt.runtime.budget import MODE, RecaptureCause

if TYPE_CHECKING:
    from graphopt.guards.guards import Guards
    from graphopt.tracing.call import Call

logger = logging.getLogger("graphopt")

_SHAPES_BEFORE_ADVICE = 8


class Recaptures:
    """Logs the reason for each capture of a step.

    Args:
        name: the name of the step.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._for_shapes = 0

    def cause(
        self,
        call: Call,
        mode: tuple[Any, ...],
        branch: RecaptureCause | None,
        guards: Sequence[Guards],
    ) -> RecaptureCause | None:
        """Logs why a call needs another graph, and returns the cause if the step was captured
        before.

        Args:
            mode: the call's mode of communication.
            branch: the decision that goes another way than in all graphs, where that is why.
            guards: the guards of the existing graphs, most recently used first.
        """
        if branch is not None:
            logger.info("capturing %s again: %s: %s", self._name, branch.name, branch.said)
            return branch
        if not guards:
            logger.info("capturing %s", self._name)
            return None
        near = (each for each in guards if _is_near(call, mode, each))
        return self._of_call(call, mode, next(near, guards[0]))

    def _of_call(self, call: Call, mode: tuple[Any, ...], guards: Guards) -> RecaptureCause:
        call = call.using(guards.besides) or call
        reasons = list(guards.structure_mismatches(call, mode))
        shape = None if reasons else guards.shape_mismatch(call)
        local = None if reasons else guards.local_mismatch(call)
        structure = "; ".join(reasons)
        reasons += filter(None, [shape, local])
        logger.info("capturing %s again: %s", self._name, "; ".join(reasons))
        if shape is not None:
            self._advise(shape)
            return RecaptureCause.of_shape(shape)
        return (
            RecaptureCause(MODE, "", structure) if local is None else RecaptureCause.of_value(local)
        )

    def _advise(self, shape: str) -> None:
        """Warns once of a step that is captured for many shapes."""
        self._for_shapes += 1
        if self._for_shapes == _SHAPES_BEFORE_ADVICE:
            logger.warning(
                "%s was captured again for new shapes %d times, each for itself: pad the"
                " batch, or sort it into buckets of a few lengths (the last change: %s)",
                self._name,
                _SHAPES_BEFORE_ADVICE,
                shape,
            )


def _is_near(call: Call, mode: tuple[Any, ...], guards: Guards) -> bool:
    """True if a graph's argument shapes are those of a call, so that they caused no capture."""
    call = call.using(guards.besides) or call
    return guards.structure_mismatch(call, mode) is None and guards.shape_mismatch(call) is None
