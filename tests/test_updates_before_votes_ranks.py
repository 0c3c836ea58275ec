"""A call that ends on all ranks because one of them raises leaves everything as it was, also state
that the graph updates between two collectives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphopt
from gloo import Pool


class Boom(Exception):
    """Raised by a step."""


class Averaging(nn.Module):
    """Has a mean that a forward updates in place."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        result: Tensor = self.inner(x - self.mean)
        return result


MODELS: dict[str, Callable[[], nn.Module]] = {
    "normalized": lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)),
    "averaging": lambda: nn.Sequential(Averaging(), nn.Linear(4, 4)),
    "plain": lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)),
}


def raises_in_a_branch(x: Tensor, loss: Tensor) -> None:
    if x.max() > 50:
        raise Boom("too large")


def raises_in_a_callback(x: Tensor, loss: Tensor) -> None:
    graphopt.callback(_check, x.max())


def _check(largest: Tensor) -> None:
    if largest > 50:
        raise Boom("too large")


def one_model(model: nn.Module, optimizer: Any, other: Any, ends: Any) -> Any:
    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        ends(x, loss)
        loss.backward()
        optimizer.step()
        return loss.detach()  # type: ignore[no-any-return]

    return step


def two_models(model: nn.Module, optimizer: Any, other: Any, ends: Any) -> Any:
    """The second model is trained on what the first one has become."""
    first = one_model(model, optimizer, None, ends)
    second, second_optimizer = other

    def step(x: Tensor) -> Tensor:
        first(x)
        second_optimizer.zero_grad()
        loss = second(model(x).detach()).square().mean()
        loss.backward()
        second_optimizer.step()
        return loss.detach()  # type: ignore[no-any-return]

    return step


def accumulating(model: nn.Module, optimizer: Any, other: Any, ends: Any) -> Any:
    """Gradients of two backward passes, of which the first is averaged by itself."""

    def step(x: Tensor) -> Tensor:
        model(x).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        loss = model(2 * x).square().mean()
        ends(x, loss)
        loss.backward()
        optimizer.step()
        return loss.detach()  # type: ignore[no-any-return]

    return step


def state_of(modules: list[nn.Module], optimizers: list[Any]) -> list[Tensor]:
    found: list[Any] = [value for module in modules for value in module.state_dict().values()]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                found.append(torch.empty(0) if parameter.grad is None else parameter.grad)
                state = optimizer.state[parameter].values()
                found += [each.to_local() if hasattr(each, "to_local") else each for each in state]
    return [each.detach().clone() for each in found]


def raised_on_one(
    rank: int, model: str, made: str, ending: str, pipeline: str, parallel: str
) -> tuple[str, list[int], list[Tensor]]:
    """Rank 1 raises in the third call.

    Returns:
        The error of this rank, what it has changed, and the parameters after a further call.
    """
    torch.manual_seed(0)
    modules = [MODELS[model](), nn.Linear(4, 2)]
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.1) for each in modules]
    step = globals()[made](
        modules[0], optimizers[0], (modules[1], optimizers[1]), globals()[ending]
    )
    ways: Any = {"ddp": None, "zero": graphopt.ZeRO(stage=1)}[parallel]
    compiled: Any = graphopt.compile(step, pipeline=pipeline, parallel=ways)
    batches = torch.Generator().manual_seed(rank)
    x = [torch.randn(5, 4, generator=batches) for _ in range(4)]
    compiled(x[0])
    compiled(x[1])
    compiled.flush()
    before = state_of(modules, optimizers)
    with pytest.raises((Boom, graphopt.SpmdMismatchError)) as caught:
        compiled(x[2] + 100 * rank)
    compiled.flush()
    after = state_of(modules, optimizers)
    # A gradient that the step sets to None at its begin may be gone, as in eager code.
    pairs = enumerate(zip(before, after, strict=True))
    changed = [number for number, (a, b) in pairs if b.numel() and not a.equal(b)]
    compiled(x[3])
    compiled.flush()
    return str(caught.value), changed, [p.detach() for p in modules[0].parameters()]


CASES = [
    (model, step, ending, pipeline, parallel)
    for model in MODELS
    for step in ("one_model", "two_models", "accumulating")
    for ending in ("raises_in_a_branch", "raises_in_a_callback")
    for pipeline in ("none", "default")
    for parallel in ("ddp", "zero")
]
FIRST = [
    ("normalized", "one_model", "raises_in_a_branch", "default", "ddp"),
    ("averaging", "one_model", "raises_in_a_callback", "default", "ddp"),
    ("plain", "two_models", "raises_in_a_branch", "default", "ddp"),
    ("normalized", "accumulating", "raises_in_a_callback", "none", "zero"),
]


def check(two_ranks: Pool, case: tuple[str, ...]) -> None:
    (said, changed, left), (other_said, other_changed, other_left) = two_ranks.run(
        raised_on_one, *case
    )
    assert "too large" in said
    assert "too large" in other_said
    assert changed == other_changed == []
    assert all(map(torch.equal, left, other_left))


@pytest.mark.parametrize("case", FIRST, ids="-".join)
def test_a_call_that_ends_on_all_ranks_changes_nothing(
    two_ranks: Pool, case: tuple[str, ...]
) -> None:
    check(two_ranks, case)


@pytest.mark.full
@pytest.mark.parametrize("case", [case for case in CASES if case not in FIRST], ids="-".join)
def test_further_calls_that_end_on_all_ranks_change_nothing(
    two_ranks: Pool, case: tuple[str, ...]
) -> None:
    check(two_ranks, case)


def failing_in_a_kernel(rank: int, place: str, pipeline: str) -> list[tuple[str, list[Any]]]:
    """Each rank uses the second layer by values of its own. A kernel behind the collectives fails
    on rank 1 in the third call, before or after the update.

    Returns:
        For each call, its error, and what there is of parameters and gradients.
    """
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    table = torch.arange(12.0)

    def step(x: Tensor, index: Tensor) -> Tensor:
        optimizer.zero_grad()
        hidden = model[0](x)
        if x.mean() > 0:
            hidden = model[1](hidden)
        loss: Tensor = model[2](hidden).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if place == "before":
            loss = loss + (table[index] * norm).sum()
        optimizer.step()
        if place == "after":
            loss = loss + (table[index] * model[2].bias.sum()).sum()
        return loss.detach()

    compiled: Any = graphopt.compile(step, pipeline=pipeline)
    numbers = torch.Generator().manual_seed(rank)
    found = []
    for call in range(5):
        x = torch.randn(3, 4, generator=numbers)
        said = ""
        try:
            compiled(x, torch.tensor([1, 99 if (call, rank) == (2, 1) else 2]))
        except (IndexError, graphopt.SpmdMismatchError) as error:
            said = str(error)
        compiled.flush()
        left = [p.detach().clone() for p in model.parameters()]
        grads = [p.grad is None for p in model.parameters()]
        found.append((said, [torch.cat([p.flatten() for p in left]).tolist(), grads]))
    return found


@pytest.mark.parametrize("pipeline", ["none", "default"])
def test_a_kernel_that_fails_before_the_vote(two_ranks: Pool, pipeline: str) -> None:
    one, other = two_ranks.run(failing_in_a_kernel, "before", pipeline)
    assert "rank 1 cannot go on with step 3" in one[2][0]
    assert "out of bounds" in one[2][0]
    assert "out of bounds" in other[2][0]
    assert [left for _, left in one] == [left for _, left in other]
    assert one[2][1][0] == one[1][1][0]


@pytest.mark.parametrize("pipeline", ["none", "default"])
def test_a_kernel_that_fails_behind_the_update(two_ranks: Pool, pipeline: str) -> None:
    one, other = two_ranks.run(failing_in_a_kernel, "after", pipeline)
    assert [said for said, _ in one] == [""] * 5
    assert "out of bounds" in other[2][0]
    assert [left[0] for _, left in one] == [left[0] for _, left in other]
    assert [left for _, left in one[3:]] == [left for _, left in other[3:]]
