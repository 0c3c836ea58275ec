"""Tensors whose `.data` a step sets, apart from others over the storage that they had.

weight ─┐                         weight ──▶ storage of its own, which the graph updates
        ├─ one storage     ──▶
other  ─┘                         other  ──▶ the storage, with what the step left in it
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from graphopt.runtime.late import is_shared
from graphopt.tracing.capture import CapturedStep
from graphopt.tracing.inputs.entries import state_key

Moved = dict[int, tuple[torch.Tensor, torch.Tensor]]
"""By its position among the module's tensors, a tensor and what is over the storage that it had."""


class MovedApart:
    """Moves them before the graph of a captured step runs."""

    def __init__(self, captured: CapturedStep) -> None:
        self._captured = captured
        self._aliases = _replaced_aliases(captured)

    def move(self) -> Moved:
        """Move tensors to storage of their own where somebody else has theirs."""
        moved: Moved = {}
        for index in self._captured.signature.rebound:
            tensor = self._captured.live.module_tensors[index].live()
            if is_shared(tensor, besides=self._aliases.get(index, 0)):
                moved[index] = tensor, tensor.detach()
                tensor.data = tensor.detach().clone()
        return moved

    def leave(self, moved: Moved, results: Sequence[Any]) -> None:
        """Write into the storages that they had what the step wrote there before it set `.data`."""
        for index, (_, former) in moved.items():
            left = self._captured.signature.rebound[index]
            if left is not None:
                former.copy_(results[left.index])


def put_back(moved: Moved) -> None:
    """Undo `MovedApart.move`."""
    for tensor, former in moved.values():
        tensor.data = former


def _replaced_aliases(captured: CapturedStep) -> Counter[int]:
    """How many entries of optimizer state share the memory of a module tensor, by its position,
    that the step replaces without reading them through anything else."""
    tensors = captured.live.module_tensors
    positions = {id(entry): index for index, entry in enumerate(tensors)}
    replaced = {
        (state.optimizer, id(state.stands_at(tensors)), state.key)
        for state in captured.signature.states
    }
    return Counter(
        positions[id(owner)]
        for state, owner in captured.live.aliases
        if (state.optimizer, id(state_key(state.parameter)), state.key) in replaced
    )
