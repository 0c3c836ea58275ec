"""Random number generators of their own for replicas in one process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from graphopt import _compat
from graphopt.ir.generators import generators_used


class ReplicaGenerators:
    """The states of every generator, for each replica but the first.

    Replica 0 uses the generators as they are; those of replica r are seeded with r more. In place
    of the CPU's default one, which other threads use, they have others.
    """

    def __init__(self) -> None:
        self._default: dict[int, _compat.CopiedGenerator] = {}
        self._states: dict[tuple[int, int], torch.Tensor] = {}

    @contextmanager
    def of(self, replica: int, values: Sequence[Any]) -> Iterator[None]:
        """While active, all generators have the states of one replica.

        Args:
            values: an operator's arguments, which tell the generators that it may use.
        """
        if not replica:
            yield
            return
        default = torch.random.default_generator
        generators = [each for each in generators_used(list(values)) if each is not default]
        before = [generator.get_state() for generator in generators]
        for generator in generators:
            generator.set_state(self._state(generator, replica))
        if replica not in self._default:
            seed = default.initial_seed() + replica
            self._default[replica] = _compat.CopiedGenerator(seed)
        try:
            with self._default[replica]:
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
