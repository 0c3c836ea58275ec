"""Separation of tensors whose `.data` a step sets from others over their old storage.

weight ─┐                         weight ──▶ storage of its own, which the graph updates
        ├─ one storage     ──▶
other  ─┘                         other  ──▶ the storage, with what the step left in it
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from graphopt.runtime.late.tensors import is_shared
from graphopt.tracing.captured_step import CapturedStep
from graphopt.tracing.inputs.entries import state_key

Moved = dict[int, tuple[torch.Tensor, torch.Tensor]]
"""By its position among the module's tensors, a tensor and what is over the storage that it had."""


class SeparatedStorages:
    """Moves such tensors to storage of their own before the graph runs."""

    def __init__(self, captured: CapturedStep) -> None:
        self._captured = captured
        self._aliases = _replaced_aliases(captured)

    def move(self) -> Moved:
        """Moves tensors whose storage others share to storage of their own."""
        moved: Moved = {}
        for index in self._captured.signature.rebound:
            tensor = self._captured.live.module_tensors[index].live()
            if is_shared(tensor, besides=self._aliases.get(index, 0)):
                moved[index] = tensor, tensor.detach()
                tensor.data = tensor.detach().clone()
        return moved

    def leave(self, moved: Moved, results: Sequence[Any]) -> None:
        """Copies the step's writes, made before it set `.data`, back into the old storages."""
        for index, (_, former) in moved.items():
            left = self._captured.signature.rebound[index]
            if left is not None:
                former.copy_(results[left.index])


def put_back(moved: Moved) -> None:
    """Undoes `SeparatedStorages.move`."""
    for tensor, former in moved.values():
        tensor.data = former


def _replaced_aliases(captured: CapturedStep) -> Counter[int]:
    """The number of optimizer state entries, by module tensor, that share its memory and that
    the step replaces without other reads."""
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
