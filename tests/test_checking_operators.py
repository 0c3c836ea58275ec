"""Operators that only check their arguments and give nothing: a captured step has them, and raises
as eager code does, before anything of it has changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphopt

SOLVERS: dict[str, Callable[[Tensor], Tensor]] = {
    "solve": lambda a: torch.linalg.solve(a, torch.ones(3, 1)),
    "inv": torch.linalg.inv,
    "inverse": torch.inverse,
    "det": lambda a: torch.linalg.inv(a) * torch.linalg.det(a),
    "cholesky": lambda a: torch.linalg.cholesky(a @ a.mT),
    "solve_triangular": lambda a: torch.linalg.solve_triangular(
        torch.linalg.cholesky(a @ a.mT), torch.ones(3, 1), upper=False
    ),
    "lu_factor": lambda a: torch.linalg.lu_factor(a)[0],
    "matrix_power": lambda a: torch.linalg.matrix_power(a, -2),
    "tensorinv": lambda a: torch.linalg.tensorinv(a, ind=1),
    "eigh": lambda a: torch.linalg.eigh(a + a.mT)[0],
}


def asserted(a: Tensor) -> Tensor:
    torch._assert_async((a != 0).any())
    return a * 2


def trained(solver: Callable[[Tensor], Tensor], compiled: bool, factors: list[float]) -> list[Any]:
    """Bytes of losses and of the weight behind each step; the type of an error that one raises."""
    torch.manual_seed(0)
    weight = nn.Parameter(torch.eye(3) * 2 + 0.1 * torch.randn(3, 3))
    optimizer = torch.optim.SGD([weight], lr=0.01, momentum=0.9)

    def step(factor: Tensor) -> Tensor:
        loss = solver(weight * factor).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    run = graphopt.compile(step) if compiled else step
    seen: list[Any] = []
    for factor in factors:
        try:
            seen.append(run(torch.tensor(factor)).detach().numpy().tobytes())
        except RuntimeError as error:
            seen.append(type(error).__name__)
        seen.append(weight.detach().numpy().tobytes())
    return seen


@pytest.mark.parametrize("name", [*SOLVERS, "asserted"])
def test_steps_with_checks_train_as_in_eager_code(name: str) -> None:
    solver = SOLVERS.get(name, asserted)
    factors = [1.0, 1.5, 0.0, 1.0]
    expected = trained(solver, compiled=False, factors=factors)
    assert trained(solver, compiled=True, factors=factors) == expected
