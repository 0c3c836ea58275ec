"""One graph for all values: indices by tensors of one integer, numbers of numpy's, generators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import graphopt
from graphopt.errors import CaptureError
from twins import Twins, World, assert_same


class Chain(nn.Module):
    """Scores of a chain of tags: those of the tags, and of each after the one before."""

    def __init__(self) -> None:
        super().__init__()
        self.emission, self.transitions = nn.Linear(4, 5), nn.Parameter(torch.randn(5, 5))
        self.start = nn.Parameter(torch.randn(5, 2))

    def forward(self, x: Tensor, tags: Tensor) -> Tensor:
        features = self.emission(x)
        score = self.start[tags[0], 1] + self.start[tags[-1]].sum() + torch.zeros(1)
        for i, feature in enumerate(features[1:], 1):
            score = score + self.transitions[tags[i], tags[i - 1]] + feature[tags[i]]
        return score - features[:, tags[1]].exp().sum() - self.transitions[:, tags[0]].sum()


def chained(model: nn.Module, optimizer: Any, x: Tensor, tags: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = -model(x, tags).sum()
    loss.backward()
    optimizer.step()
    return loss


def test_index_by_a_tensor_of_one_integer() -> None:
    def build() -> World:
        model = Chain()
        return World(chained, [model], [torch.optim.SGD(model.parameters(), lr=0.01)])

    twins = Twins(build)
    for _ in range(5):
        twins.step(torch.randn(4, 4), torch.randint(-5, 5, (4,)))
    twins.finish(captures=1)


def test_signs_of_zeros_in_gradients_of_a_selection() -> None:
    def step(weight: nn.Module, x: Tensor, index: Tensor) -> Tensor:
        weight.zero_grad()
        (weight.weight[index[0]] * x).sum().backward()  # type: ignore[operator, index]
        return weight.weight.grad.clone()  # type: ignore[union-attr]

    model, compiled = nn.Linear(3, 4, bias=False), graphopt.compile(step)
    for i in range(4):
        x, index = torch.tensor([-0.0, 0.0, 1.0]), torch.tensor([i])
        for a, b in zip(compiled(model, x, index), step(model, x, index), strict=True):
            assert torch.equal(a.view(torch.int32), b.view(torch.int32))
    assert len(compiled.captures) == 1


def test_an_index_that_is_too_large() -> None:
    model = Chain()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    step = graphopt.compile(chained)
    step(model, optimizer, torch.randn(3, 4), torch.tensor([0, 1, 2]))
    with pytest.raises(IndexError):
        step(model, optimizer, torch.randn(3, 4), torch.tensor([0, 5, 2]))


def test_writing_to_what_was_selected() -> None:
    def build() -> World:
        return World(written, [nn.Linear(4, 3)], [])

    def written(model: nn.Module, x: Tensor, index: Tensor) -> Tensor:
        row = x[index[1]]
        row.mul_(2.0)
        x[index[0]].add_(row)
        return model(x)

    twins = Twins(build)
    for i in range(4):
        twins.step(torch.randn(3, 4), torch.tensor([i % 3, (i + 1) % 3]))
    twins.finish()


def mixed(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor, lam: Any) -> Tensor:
    out = model(lam * x + (1 - lam) * x.flip(0))
    loss = F.cross_entropy(out, y) * lam + F.cross_entropy(out, y.flip(0)) * (1.0 - lam)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


def made(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor, lam: Any) -> list[Tensor]:
    """A tensor of a number of numpy's has the dtype of that."""
    weight = torch.tensor(lam)
    return [mixed(model, optimizer, x, y, lam), weight, x.new_tensor([lam]), torch.full((2,), lam)]


def returned(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor, lam: Any) -> list[Any]:
    return [mixed(model, optimizer, x, y, lam), 1 - lam, lam]


def asked(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor, lam: Any) -> Tensor:
    if lam > 0.5 or 1 - lam > 0.875:
        lam = max(lam, 1 - lam) * np.float64(0.5)
    return mixed(model, optimizer, x, y, lam)


def rooted(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor, lam: Any) -> Tensor:
    return mixed(model, optimizer, x, y, np.sqrt(lam + 1.0) / (lam + 1) ** 2)


@pytest.mark.parametrize(
    ("step", "captures"), [(mixed, 1), (made, 6), (returned, 1), (asked, 3), (rooted, 6)]
)
@pytest.mark.parametrize("kind", [np.float64, np.float32, np.int64])
def test_numbers_of_numpy(step: Callable[..., Any], captures: int, kind: Any) -> None:
    def build() -> World:
        model = nn.Linear(4, 3)
        return World(step, [model], [torch.optim.SGD(model.parameters(), lr=0.1)])

    twins = Twins(build)
    for number in (0.3, 0.7, 0.05, 0.6, 0.31, 0.9):
        lam = kind(number * 4 if kind is np.int64 else number)
        result = twins.step(torch.randn(5, 4), torch.randint(3, (5,)), lam)
        if step is returned:
            assert type(result[1]) is type(1 - lam)
            assert type(result[2]) is kind
    twins.finish(captures=captures if kind is np.float64 else None)


def test_too_many_numbers_of_numpy() -> None:
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = graphopt.compile(rooted, max_graphs=2)
    x, y = torch.randn(5, 4), torch.randint(3, (5,))
    for i in range(2):
        step(model, optimizer, x, y, np.float64(i / 4))
    with pytest.raises(CaptureError, match=r"float\(value\)"):
        step(model, optimizer, x, y, np.float64(0.5))


def test_generators_of_the_program() -> None:
    """A step draws from a generator that it closes over, and decides by what it has drawn."""
    found = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model, generator = nn.Linear(4, 3), torch.Generator().manual_seed(3)

        def drawn(x: Tensor, model: Any = model, generator: Any = generator) -> Tensor:
            noise = torch.randn(x.shape, generator=generator)
            if torch.rand(1, generator=generator) > 0.5:
                noise = noise * 2
            return model(x + noise) * torch.randint(0, 2, (3,), generator=generator)

        step: Any = graphopt.compile(drawn) if compiled else drawn
        results = [step(torch.randn(2, 4)).detach() for _ in range(8)]
        found.append([results, generator.get_state(), torch.get_rng_state()])
    assert_same(found[1], found[0], "drawn")
    assert len(step.captures) == 2


def test_whether_a_tensor_contains_a_value() -> None:
    def build() -> World:
        return World(containing, [nn.Linear(4, 3)], [])

    def containing(model: nn.Module, x: Tensor, tokens: Tensor) -> Tensor:
        out: Tensor = model(x)
        return out * 2 if 3 in tokens else out

    twins = Twins(build)
    for tokens in ([1, 2], [3, 1], [0, 0]):
        twins.step(torch.randn(3, 4), torch.tensor(tokens))
    twins.finish(captures=2)
