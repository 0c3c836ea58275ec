"""Steps that leave another `requires_grad`, hooks or attributes on arguments and on parameters of
no module: equal to eager in every call, or refused with everything as it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphopt
from graphopt.errors import CaptureError
from test_decisions import assert_alike


class Scene:
    """What the steps work on.

    Attributes:
        model: an argument of the steps.
        free, other: parameters of no module, which the steps close over.
        optimizer: updates these two.
    """

    def __init__(self) -> None:
        torch.manual_seed(3)
        self.model = nn.Linear(4, 1)
        self.free, self.other = (nn.Parameter(torch.randn(4, 1)) for _ in range(2))
        self.optimizer = torch.optim.SGD([self.free, self.other], lr=0.1, momentum=0.9)
        self.batches = [torch.randn(5, 4) for _ in range(3)]
        self.batches[1].requires_grad_()

    def state(self) -> list[Any]:
        tensors = [*self.batches, self.free, self.other, *self.model.parameters()]
        return [
            (t.requires_grad, t.detach().clone(), None if t.grad is None else t.grad.clone())
            for t in tensors
        ]


Step = Callable[..., Any]


def of_arguments(change: Callable[[Tensor], Any]) -> Callable[[Scene], Step]:
    """A step that changes the flag of its argument, and differentiates by it where it can."""

    def made(scene: Scene) -> Step:
        def step(model: nn.Module, x: Tensor) -> Tensor:
            change(x)
            loss: Tensor = model(x).square().mean()
            loss.backward()
            return loss.detach()

        return step

    return made


def set_true(x: Tensor) -> None:
    x.requires_grad = True


def flip(x: Tensor) -> None:
    x.requires_grad_(not x.requires_grad)


def by_value(x: Tensor) -> None:
    x.requires_grad_(bool(x.detach().sum() > 0))


def twice(x: Tensor) -> None:
    x.requires_grad_(True)
    x.square().sum().backward()
    x.requires_grad_(False)


def of_a_dictionary(scene: Scene) -> Step:
    def inner(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        images = batch["images"].requires_grad_()
        loss: Tensor = model(images).square().mean()
        loss.backward()
        return loss.detach()

    return inner


def updated(scene: Scene, loss: Tensor) -> None:
    """The end of a training step, which leaves no gradients of what it updates."""
    loss.backward()
    scene.optimizer.step()
    scene.optimizer.zero_grad()


def frozen_at_the_end(scene: Scene) -> Step:
    free, other = scene.free, scene.other

    def step(model: nn.Module, x: Tensor) -> Tensor:
        loss: Tensor = (model(x.detach()) + x.detach() @ free + x.detach() @ other).square().mean()
        updated(scene, loss)
        free.requires_grad = False
        return loss.detach()

    return step


def frozen_in_between(scene: Scene) -> Step:
    free, other = scene.free, scene.other

    @contextmanager
    def frozen() -> Iterator[None]:
        before = free.requires_grad
        free.requires_grad = False
        assert not free.requires_grad
        try:
            yield
        finally:
            free.requires_grad = before

    def step(model: nn.Module, x: Tensor) -> Tensor:
        with frozen():
            loss: Tensor = (model(x.detach()) + x.detach() @ free * other.sum()).square().mean()
        updated(scene, loss)
        return loss.detach()

    return step


def asked_in_between(scene: Scene) -> Step:
    free, other = scene.free, scene.other

    def step(model: nn.Module, x: Tensor) -> Tensor:
        free.requires_grad_(False)
        factor = 2.0 if free.requires_grad else 3.0
        loss: Tensor = factor * (model(x.detach()) + x.detach() @ other).square().mean()
        updated(scene, loss)
        free.requires_grad_(True)
        return loss.detach()

    return step


def frozen_by_a_method(scene: Scene) -> Step:
    def step(model: nn.Module, x: Tensor) -> Tensor:
        loss: Tensor = (model(x) + x @ scene.free).square().mean()
        loss.backward()
        scene.free.requires_grad_(False)
        return loss.detach()

    return step


def frozen_critic(scene: Scene) -> Step:
    """As of a Wasserstein GAN: trained at the beginning, and frozen for the other network."""

    def step(model: nn.Module, x: Tensor) -> Tensor:
        for parameter in model.parameters():
            parameter.requires_grad = True
        model.zero_grad()
        model(x.detach()).mean().backward()
        for parameter in model.parameters():
            parameter.requires_grad = False
        loss: Tensor = model(x.detach() * scene.free.T).square().mean()
        updated(scene, loss)
        return loss.detach()

    return step


def frozen_module_found(scene: Scene) -> Step:
    found = scene.model

    def step(model: object, x: Tensor) -> Tensor:
        loss: Tensor = found(x).square().mean()
        loss.backward()
        found.weight.requires_grad = False
        return loss.detach()

    return step


EQUAL = {
    "argument thawed": of_arguments(Tensor.requires_grad_),
    "argument thawed by its attribute": of_arguments(set_true),
    "argument frozen": of_arguments(lambda x: x.requires_grad_(False)),
    "argument flipped": of_arguments(flip),
    "argument by value": of_arguments(by_value),
    "argument thawed and frozen": of_arguments(twice),
    "argument in a dictionary": of_a_dictionary,
    "parameter of no module frozen at the end": frozen_at_the_end,
    "parameter of no module frozen in between": frozen_in_between,
    "parameter of no module asked in between": asked_in_between,
    "parameter of no module frozen by a method": frozen_by_a_method,
    "module frozen and thawed": frozen_critic,
    "module found, frozen at the end": frozen_module_found,
}


def run(made: Callable[[Scene], Step], compiled: bool) -> list[Any]:
    scene = Scene()
    step = made(scene)
    used: Any = graphopt.compile(step) if compiled else step
    found: list[Any] = []
    for call in range(9):
        batch = scene.batches[call % 3]
        given = {"images": batch} if made is of_a_dictionary else batch
        found.append((used(scene.model, given).clone(), scene.state()))
    return found


def assert_same(found: list[Any], expected: list[Any]) -> None:
    assert_alike(*map(torch.utils._pytree.tree_leaves, (found, expected)))


@pytest.mark.parametrize("name", list(EQUAL))
def test_every_call_leaves_eager_s_flags(name: str) -> None:
    expected, found = (run(EQUAL[name], compiled) for compiled in (False, True))
    assert_same(found, expected)


def doubled(gradient: Tensor) -> Tensor:
    return gradient * 2


def hook_on(pick: Callable[[nn.Module, Tensor], Tensor], keeps: bool) -> Callable[[Scene], Step]:
    """A step that hooks a tensor, and keeps the hook or removes it."""

    def made(scene: Scene) -> Step:
        def step(model: nn.Module, x: Tensor) -> Tensor:
            handle = pick(model, x.requires_grad_()).register_hook(doubled)
            loss: Tensor = model(x).square().mean()
            loss.backward()
            if not keeps:
                handle.remove()
            return loss.detach()

        return step

    return made


def weight(model: nn.Module, x: Tensor) -> Tensor:
    return model.get_parameter("weight")


def argument(model: nn.Module, x: Tensor) -> Tensor:
    return x


def hook_on_sum(scene: Scene) -> Step:
    def step(model: nn.Module, x: Tensor) -> Tensor:
        loss: Tensor = (model(x) + x @ scene.free).square().mean()
        scene.free.register_post_accumulate_grad_hook(lambda p: None)
        loss.backward()
        return loss.detach()

    return step


def attribute_of(value: Callable[[Tensor], Any]) -> Callable[[Scene], Step]:
    """A step that sets an attribute of its argument."""

    def made(scene: Scene) -> Step:
        def step(model: nn.Module, x: Tensor) -> Tensor:
            setattr(x, "mark", value(x))  # noqa: B010 - as a program would write it
            return model(x).sum()

        return step

    return made


STAYS: dict[str, tuple[Callable[[Scene], Step], str]] = {
    "hook on a parameter": (hook_on(weight, keeps=True), "hooks on weight"),
    "hook on an argument": (hook_on(argument, keeps=True), "hooks on x"),
    "hook on a parameter of no module": (hook_on_sum, "hooks on"),
    "number on an argument": (attribute_of(lambda x: 3), "sets the attribute mark"),
    "tensor on an argument": (attribute_of(lambda x: x.detach() * 2), "sets the attribute mark"),
}


@pytest.mark.parametrize("name", list(STAYS))
def test_what_stays_on_a_tensor_is_refused(name: str) -> None:
    made, said = STAYS[name]
    scene = Scene()
    before = scene.state()
    with pytest.raises(CaptureError, match=said):
        graphopt.compile(made(scene))(scene.model, scene.batches[0])
    assert_same(scene.state(), before)
    assert not any(vars(batch) for batch in scene.batches)


@pytest.mark.parametrize("pick", [weight, argument])
def test_hooks_that_are_removed_are_eager_s(pick: Callable[[nn.Module, Tensor], Tensor]) -> None:
    made = hook_on(pick, keeps=False)
    expected, found = (run(made, compiled) for compiled in (False, True))
    assert_same(found, expected)
