"""What a captured step may be called with: pytrees, scalars, views, changed tensors."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

import graphopt
from twins import Twins, assert_same, world
from zoo import MODELS, train_step

STEPS = 5
MLP_CASE = MODELS["mlp"]


Example = namedtuple("Example", ["features", "label"])


def nested_step(model: nn.Module, optimizer: Optimizer, batch: Any, *, scale: float = 1.0) -> Any:
    losses = {}
    for name, parts in batch["examples"].items():
        losses[name] = sum(F.cross_entropy(model(e.features), e.label) for e in parts)
    loss = scale * sum(losses.values()) if batch["weights"] is None else losses["a"]
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return {"losses": losses, "total": Example(loss, None)}


def nested_batch(i: int) -> dict[str, Any]:
    examples = [Example(*MLP_CASE.batch(10 * i + k)) for k in range(3)]
    return {"examples": {"a": examples[:2], "b": (examples[2],)}, "weights": None, "tag": "train"}


def test_pytree_batches_and_keyword_arguments() -> None:
    twins = Twins(lambda: world(nested_step))
    for i in range(STEPS):
        twins.step(nested_batch(i), scale=2.0)
    twins.finish(captures=1)


def test_model_and_optimizer_inside_a_pytree_and_by_keyword() -> None:
    def step_of_state(state: dict[str, Any], *, batch: Any, mode: str) -> Tensor:
        assert mode == "train"
        return train_step(state["model"], state["optimizer"], *batch)

    torch.manual_seed(3)
    eager = world()
    torch.manual_seed(3)
    captured = world()
    step = graphopt.compile(step_of_state, pipeline="none")
    for i in range(STEPS):
        for w, function in ((eager, step_of_state), (captured, step)):
            function(
                {"model": w.model, "optimizer": w.optimizer}, batch=MLP_CASE.batch(i), mode="train"
            )
        assert_same(captured.state(), eager.state(), "state")
    assert len(step.captures) == 1


@pytest.mark.parametrize(
    ("scalars", "captures"),
    [
        ([0.5, 0.5, 0.5, 0.5], 1),
        ([1, 2, 1, 2], 1),
        ([True, False, True, True], 2),
        ([1.0, 1, True, 1.0], 3),
        ([None, 2.0, None, 2.0], 2),
    ],
    ids=str,
)
def test_python_scalars(scalars: list[Any], captures: int) -> None:
    """Numbers are inputs; a number of another type, and another value of anything else, is another
    capture."""

    def step(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor, scalar: Any) -> Any:
        loss = F.cross_entropy(model(x), y) * (1.0 if scalar is None else scalar)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss, scalar

    twins = Twins(lambda: world(step))
    for i, scalar in enumerate(scalars):
        twins.step(*MLP_CASE.batch(i), scalar)
    twins.finish(captures)


def test_zero_dimensional_tensor_argument() -> None:
    """The way to pass a number that changes at each step without another capture."""

    def step(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y) * scale
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    twins = Twins(lambda: world(step))
    for i in range(STEPS):
        twins.step(*MLP_CASE.batch(i), torch.tensor(1.0 / (i + 1)))
    twins.finish(captures=1)


def test_in_place_changes_of_an_argument() -> None:
    def step(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor, seen: Tensor) -> Tensor:
        loss = train_step(model, optimizer, x, y)
        seen.add_(1)
        seen[0].mul_(2)
        x.clamp_(-1, 1)
        return loss

    twins = Twins(lambda: world(step))
    for i in range(STEPS):
        twins.step(*MLP_CASE.batch(i), torch.zeros(3))
    twins.finish(captures=1)


def test_arguments_that_share_storage() -> None:
    def step(model: nn.Module, optimizer: Optimizer, x: Tensor, view: Tensor, y: Tensor) -> Tensor:
        view.mul_(0.5)
        return train_step(model, optimizer, x, y)

    w = world(step)
    x, y = MLP_CASE.batch(0)
    with pytest.raises(graphopt.CaptureError, match="argument view, which shares storage"):
        graphopt.compile(step)(*w.models, *w.optimizers, x, x[1:3], y)


def test_arguments_that_share_storage_and_are_read() -> None:
    def step(model: nn.Module, optimizer: Optimizer, x: Tensor, view: Tensor, y: Tensor) -> Tensor:
        return train_step(model, optimizer, x + view.mean(), y)

    twins = Twins(lambda: world(step))
    for i in range(STEPS):
        x, y = MLP_CASE.batch(i)
        twins.step(x, x[1:3], y)
    twins.finish(captures=1)


def test_strided_and_expanded_arguments() -> None:
    twins = Twins(lambda: world())
    for i in range(STEPS):
        x, y = MLP_CASE.batch(i)
        twins.step((x, x.t().contiguous().t(), x[:1].expand(4, 8))[i % 3], y)
    twins.finish()


def test_argument_that_requires_a_gradient() -> None:
    def step(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
        train_step(model, optimizer, x, y)
        return x.grad.clone()

    twins = Twins(lambda: world(step))
    for i in range(STEPS):
        x, y = MLP_CASE.batch(i)
        twins.step(x.requires_grad_(), y)
    twins.finish()
