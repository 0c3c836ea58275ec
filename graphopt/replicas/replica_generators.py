"""Random number generators of their own for replicas in one process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from graphopt.ir.generators import generators_used


class ReplicaGenerators:
    """The states of every generator, for each replica but the first.

    Replica 0 uses the generators as they are; those of replica r are seeded with r more.
    """

    def __init__(self) -> None:
        self._states: dict[tuple[int, int], torch.Tensor] = {}

    @contextmanager
    def of(self, replica: int, values: Sequence[Any]) -> Iterator[None]:
        """While active, all generators have the states of one replica.

        Args:
            values: what an operator is called with; tells which generators it may use.
        """
        if not replica:
            yield
            return
        generators = generators_used(list(values))
        before = [generator.get_state() for generator in generators]
        for generator in generators:
            generator.set_state(self._state(generator, replica))
        try:
            yield
        finally:
            for generator, state in zip(generators, before, strict=True):
                self._states[id(generator), replica] = generator.get_state()
                generator.set_state(state)

    def _state(self, generator: torch.Generator, replica: int) -> torch.Tensor:
        known = self._states.get((id(generator), replica))
        if known is not None:
            return known
        seeded = torch.Generator(generator.device).manual_seed(generator.initial_seed() + replica)
        return seeded.get_state()
