"""Random number generators that an operator may draw from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from graphopt import _compat


def generator_of(device: torch.device) -> torch.Generator:
    """Returns the default generator of a device; of the current device if the index is None."""
    if device.type == "cpu":
        return torch.random.default_generator
    module: Any = torch.get_device_module(device)
    index = module.current_device() if device.index is None else device.index
    return module.default_generators[index]  # type: ignore[no-any-return]


def generators_used(values: Any) -> list[torch.Generator]:
    """Returns the generators that an operator may draw from: those among its arguments, the CPU's
    default, and those of its tensors' CUDA devices.

    Args:
        values: a nest of what it is called with and, where that is known, of what it gives.
    """
    found = {torch.random.default_generator: None}
    for leaf in _compat.tree_leaves(values):
        device = leaf.device if isinstance(leaf, torch.Tensor) else leaf
        if isinstance(leaf, torch.Generator):
            found[leaf] = None
        elif isinstance(device, torch.device) and device.type == "cuda":
            found[generator_of(device)] = None
    return list(found)


@contextmanager
def generators_apart(devices: Iterable[torch.device], seed: int | None = None) -> Iterator[None]:
    """While active, operators draw from a copy of the CPU's default generator, which other threads
    draw from meanwhile; the default generators of other devices are put back.

    Args:
        devices: those that are not the CPU.
        seed: of what is drawn instead.
    """
    generators = [generator_of(device) for device in devices if device.type != "cpu"]
    before = [generator.get_state() for generator in generators]
    try:
        with _compat.CopiedGenerator(seed):
            for generator in generators if seed is not None else ():
                generator.manual_seed(seed or 0)
            yield
    finally:
        for generator, state in zip(generators, before, strict=True):
            generator.set_state(state)
