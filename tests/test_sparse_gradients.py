"""Sparse gradients in a step: taken whole, and refused where a step looks at their entries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphopt

Post = Callable[[Tensor], Any]


def trained(post: Post, optimizer: Callable[..., Any], compiled: bool) -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.Embedding(20, 3, sparse=True)
    update = optimizer(model.parameters(), lr=0.1)

    def step(model: Any, update: Any, x: Tensor) -> Tensor:
        update.zero_grad()
        loss: Tensor = model(x).pow(2).sum()
        loss.backward()
        post(model.weight)
        update.step()
        return loss

    run = graphopt.compile(step) if compiled else step
    losses = [run(model, update, torch.randint(0, 20, (12,))) for _ in range(3)]
    return [each.detach().clone() for each in (*losses, model.weight)]


def nothing(weight: Tensor) -> None:
    pass


def made_dense(weight: Any) -> None:
    weight.grad = weight.grad.to_dense()


@pytest.mark.parametrize("post", [nothing, made_dense])
def test_equal_to_eager(post: Post) -> None:
    expected = trained(post, torch.optim.SGD, compiled=False)
    assert all(map(torch.equal, trained(post, torch.optim.SGD, compiled=True), expected))


def by_count(weight: Any) -> None:
    if weight.grad._nnz() > 0:
        weight.grad.mul_(0.5)


def by_size_of_values(weight: Any) -> None:
    if weight.grad._values().numel():
        weight.grad.mul_(0.5)


def coalesced(weight: Any) -> None:
    weight.grad = weight.grad.coalesce()


def summed(weight: Any) -> None:
    weight.grad = weight.grad * torch.sparse.sum(weight.grad)


@pytest.mark.parametrize("post", [by_count, by_size_of_values, coalesced, summed])
def test_what_looks_at_entries_is_refused(post: Post) -> None:
    with pytest.raises(graphopt.CaptureError, match="entries of a sparse tensor"):
        trained(post, torch.optim.SGD, compiled=True)


@pytest.mark.parametrize("optimizer", [torch.optim.SparseAdam, torch.optim.Adagrad])
def test_optimizers_that_do_are_refused(optimizer: Any) -> None:
    with pytest.raises(graphopt.CaptureError, match="entries of a sparse tensor"):
        trained(nothing, lambda given, lr: optimizer(list(given), lr=lr), compiled=True)


def test_a_sparse_matrix_outside() -> None:
    """As graph networks keep an adjacency."""
    found = []
    for captured in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model.adjacency = torch.eye(4).add(torch.ones(4, 4).triu()).to_sparse()
        features = torch.randn(4, 3)

        def step(
            batch: Tensor,
            model: Any = model,
            optimizer: Any = optimizer,
            features: Tensor = features,
        ) -> Tensor:
            x = features * batch
            loss = torch.sparse.mm(model.adjacency, model(x)).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss

        taken = graphopt.compile(step) if captured else step
        rows = torch.rand(3, 4, 1)
        found.append([taken(row).detach() for row in rows] + [*model.parameters()])
    assert all(map(torch.equal, *found))
