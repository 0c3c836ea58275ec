"""Tensors with updates in flight, which their first use completes.

While an update is in flight, the tensors that it will change are of another class:

    class of p            p.add_(1), f(p), isinstance(p, …)          class of p
    Late Parameter   ──────────────────────────────────────►    Parameter, updated

The first use of any of them, in any thread, does what is in flight, gives all of them their own
class again and goes on. What only asks for metadata (shape, dtype, …) does nothing.

How a use is seen: `graphopt.runtime.late.classes`.

What cannot be seen is a use that does not go through the tensor's Python object: of another view of
the same memory, or of the tensor by C++ code that holds it. How many of these there are is counted
before anything is left in flight.
"""

from __future__ import annotations

import atexit
import functools
import gc
import logging
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from graphopt import _compat
from graphopt._compat.tensor_classes import alias_of, holders_of, set_class, without_torch_function
from graphopt.runtime.late.classes import OWNERS, class_behind, late_class

logger = logging.getLogger("graphopt")


class LateTensors:
    """Guards the tensors of one step so that nobody sees them before their update.

    Args:
        finish: does what is in flight; called when one of the tensors is used. Returns whether
            nothing is left to do. If it raises, so does the use, and the tensors stay late.
    """

    def __init__(self, finish: Callable[[], bool]) -> None:
        self._finish = finish
        self.tensors: list[torch.Tensor] = []
        self._aliases: dict[int, torch.Tensor] = {}
        self._warned = False

    @property
    def armed(self) -> bool:
        return bool(self.tensors)

    def arm(self, tensors: Sequence[torch.Tensor], anyway: bool = False) -> int | None:
        """Intercepts the first use of these tensors, by changing their class.

        Args:
            anyway: also where some are held in ways that cannot be seen.

        Returns:
            The number of the first that is so held; nothing is armed then. None: done.
        """
        settle(tensors)
        held = next((i for i, tensor in enumerate(tensors) if not self._arm(tensor)), None)
        if held is None:
            with without_torch_function():
                held = next(
                    (i for i, is_held in enumerate(held_elsewhere(tensors)) if is_held), None
                )
        if held is not None and not anyway:
            self.disarm()
            return held
        self._aliases = {id(tensor): alias_of(tensor) for tensor in self.tensors}
        return None

    def _arm(self, tensor: torch.Tensor) -> bool:
        late = late_class(type(tensor))
        if late is None:
            return False
        try:
            set_class(tensor, late)
        except TypeError:  # a class with slots
            return False
        self.tensors.append(tensor)
        OWNERS[id(tensor)] = self
        return True

    def disarm(self) -> None:
        """Restores the original classes of the tensors."""
        tensors, self.tensors = self.tensors, []
        self._aliases = {}
        for tensor in tensors:
            OWNERS.pop(id(tensor), None)
            set_class(tensor, class_behind(type(tensor)))

    def own(self, values: list[Any]) -> list[Any]:
        """The values with late tensors replaced by aliases, which the step itself may use."""
        aliases = self._aliases
        if not aliases:
            return values
        return [aliases.get(id(value), value) for value in values]

    def settle(self) -> None:
        """Completes the updates of these tensors that are in flight."""
        if self._finish():
            self.disarm()
        if not self._warned and _within_dynamo():
            self._warned = True
            logger.warning(
                "a function made by torch.compile was called with tensors whose update was in"
                " flight, which lets torch compile it anew each time: call flush() of the training"
                " step before it"
            )


def _within_dynamo() -> bool:
    """True if torch.compile inspects the arguments of a function."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == "torch._dynamo.convert_frame":
            return True
        frame = frame.f_back
    return False


def settle(values: Iterable[Any], besides: LateTensors | None = None) -> None:
    """Completes the updates in flight for these values, except those of `besides`."""
    if len(OWNERS) == (0 if besides is None else len(besides.tensors)):
        return
    for value in values:
        owner = OWNERS.get(id(value))
        if owner is not None and owner is not besides:
            owner.settle()


def _settle_all() -> None:
    for owner in {id(owner): owner for owner in list(OWNERS.values())}.values():
        try:
            owner.settle()
        except Exception as error:
            logger.error("late work of a training step could not be finished: %s", error)


atexit.register(_settle_all)
# A forked process has none of the threads that its collectives would have to wait for.
os.register_at_fork(before=_settle_all)


# ------------------------------------------------------------------------------ who else holds it


def held_elsewhere(tensors: Sequence[torch.Tensor]) -> Iterator[bool]:
    """For each tensor, True if its memory can be reached without these Python objects: through
    another view, an array, its storage, or from C++."""
    storages = Counter(_compat.storage_key(tensor) for tensor in tensors)
    storage, *alone = _alone()
    for tensor in tensors:
        if tensor.layout is not torch.strided:
            yield True
            continue
        uses, *others = holders_of(tensor)
        sharing = storages[_compat.storage_key(tensor)]
        yield uses != storage + sharing - 1 or others != alone


def is_shared(tensor: torch.Tensor, besides: int = 0) -> bool:
    """True if more than the known number of tensors share a tensor's memory."""
    uses, storages, _ = holders_of(tensor)
    storage, alone, _ = _alone()
    return uses != storage + besides or storages != alone


def names_of_held(named: Sequence[tuple[str, torch.Tensor]]) -> frozenset[str]:
    """The names of the tensors that something else holds."""
    found = _held_now(named)
    if found:
        gc.collect()  # what is garbage holds nothing
        found = _held_now(named)
    return found


def _held_now(named: Sequence[tuple[str, torch.Tensor]]) -> frozenset[str]:
    held = held_elsewhere([tensor for _, tensor in named])
    return frozenset(name for (name, _), is_held in zip(named, held, strict=True) if is_held)


def warn_of_held(names: str, consequence: str) -> None:
    """Warns of tensors whose use cannot be seen, with the consequence and the cure."""
    logger.warning(
        "%s: also held by another view of its memory (as in a state_dict), an array, a live"
        " autograd graph or code outside of Python, which are not seen using it, so that %s. Delete"
        " what holds it, or hold the tensor itself or a copy instead",
        names,
        consequence,
    )


@functools.cache
def _alone() -> tuple[int, int, int]:
    """The reference counts of a tensor that nobody else holds."""
    return holders_of(torch.empty(1, device="cpu"))
