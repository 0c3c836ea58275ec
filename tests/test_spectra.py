"""Functions that compute no vectors where no gradient is asked for: the bits of eager code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphopt

FUNCTIONS: dict[str, Callable[[Tensor], Any]] = {
    "svdvals": torch.linalg.svdvals,
    "svdvals, by name": lambda a: torch.linalg.svdvals(A=a),
    "eigvals": torch.linalg.eigvals,
    "eigvalsh": lambda a: torch.linalg.eigvalsh(a + a.mT),
    "eigvalsh, upper": lambda a: torch.linalg.eigvalsh(a + a.mT, "U"),
    "eigvalsh, by name": lambda a: torch.linalg.eigvalsh(a + a.mT, UPLO="U"),
    "nuclear": lambda a: torch.linalg.matrix_norm(a, "nuc"),
    "spectral": lambda a: torch.linalg.matrix_norm(a, 2),
    "smallest": lambda a: torch.linalg.norm(a, -2),
    "norm": lambda a: torch.norm(a, p="nuc"),
    "of a tensor": lambda a: a.norm(p="nuc"),
    "along others": lambda a: torch.linalg.matrix_norm(torch.stack([a, 2 * a]), 2, dim=(0, 2)),
    "condition": torch.linalg.cond,
    "condition, smallest": lambda a: torch.linalg.cond(a, -2),
    "rank": torch.linalg.matrix_rank,
    "with vectors": lambda a: torch.linalg.svd(a)[1],
    "with vectors, older": lambda a: torch.svd(a)[1],
    "eigh": lambda a: torch.linalg.eigh(a + a.mT)[0],
    "pinv": torch.linalg.pinv,
    "one of many": lambda a: torch.func.vmap(torch.linalg.svdvals)(torch.stack([a, -a])),
}


def trained(weight: nn.Parameter, function: Callable[[Tensor], Any], x: Tensor) -> Any:
    found = function(weight + x)
    if found.requires_grad:
        found.abs().sum().backward()
    return found.detach(), weight.grad


def without_gradients(weight: nn.Parameter, function: Callable[[Tensor], Any], x: Tensor) -> Any:
    with torch.no_grad():
        return function(weight + x), None


def detached(weight: nn.Parameter, function: Callable[[Tensor], Any], x: Tensor) -> Any:
    return function(weight.detach() + x), None


def left_by(step: Any, name: str, compiled: bool) -> list[Any]:
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(17, 17))
    run = graphopt.compile(step) if compiled else step
    left = []
    for _ in range(2):
        found, gradient = run(weight, FUNCTIONS[name], torch.randn(17, 17))
        left += [found.clone(), None if gradient is None else gradient.clone()]
    return left


@pytest.mark.covering(1)
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("step", [without_gradients, detached, trained])
def test_values_without_vectors(step: Any, name: str) -> None:
    expected, found = left_by(step, name, False), left_by(step, name, True)
    for one, other in zip(expected, found, strict=True):
        assert (one is None and other is None) or torch.equal(one, other)
