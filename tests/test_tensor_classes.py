"""Tensors that are more than their elements: a graph of plain tensors does not stand for them, in
the first call or in a later one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor

import graphopt
from graphopt.errors import CaptureError


class Named(Tensor):
    """Changes nothing; but what is computed of it is of its class."""


class Doubling(Tensor):
    """A class with operators of its own."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})
        return result * 2 if func is torch.Tensor.square else result


class Overriding(nn.Parameter):
    """Parameters with a method of their own."""

    def square(self) -> Tensor:
        return self.abs()


class Marked(nn.Parameter):
    """Parameters that say something of themselves, and compute as others."""

    axis = 0

    def describe(self) -> str:
        return f"by {self.axis}"


Change = Callable[[Tensor], Tensor]


def distributed(tensor: Tensor) -> Tensor:
    mesh = init_device_mesh("cpu", (1,))
    result: Tensor = distribute_tensor(tensor.detach(), mesh, [Replicate()])
    return result


def parameter_of(change: Change) -> Change:
    return lambda tensor: nn.Parameter(change(tensor))


def jagged(tensor: Tensor) -> Tensor:
    return torch.nested.nested_tensor([tensor, tensor], layout=torch.jagged)


def in_rows(tensor: Tensor) -> Tensor:
    return tensor.to_sparse_csr()


def of_class(kind: type[Tensor]) -> Change:
    return lambda tensor: tensor.as_subclass(kind)


CLASSES: dict[str, tuple[Change, str]] = {
    "named": (of_class(Named), "of the class Named"),
    "doubling": (of_class(Doubling), "of the class Doubling"),
    "overriding": (of_class(Overriding), "of the class Overriding"),
    "distributed": (distributed, "is a DTensor"),
}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 2)
        self.register_buffer("scale", torch.ones(2))
        self.plain = torch.ones(2)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).square() * self.scale * self.plain  # type: ignore[no-any-return]


class Training:
    def __init__(self) -> None:
        self.model = Model()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.outside = torch.ones(2)

    def step(self, x: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        loss = (self.model(x) * self.outside).square().sum()
        loss.backward()
        self.optimizer.step()
        return loss.detach()


def argument(training: Training, change: Change) -> Tensor:
    return change(torch.ones(3, 4))


def parameter(training: Training, change: Change) -> Tensor:
    linear = training.model.linear
    linear.weight = nn.Parameter(change(linear.weight.detach()))
    return torch.ones(3, 4)


def buffer(training: Training, change: Change) -> Tensor:
    training.model.scale = change(torch.ones(2))
    return torch.ones(3, 4)


def attribute(training: Training, change: Change) -> Tensor:
    training.model.plain = change(torch.ones(2))
    return torch.ones(3, 4)


def outside(training: Training, change: Change) -> Tensor:
    training.outside = change(torch.ones(2))
    return torch.ones(3, 4)


def state(training: Training, change: Change) -> Tensor:
    weight = training.model.linear.weight
    buffer = torch.zeros(2, 4)
    training.optimizer.state[weight]["momentum_buffer"] = change(buffer)
    return torch.ones(3, 4)


PLACES = [argument, parameter, buffer, attribute, outside, state]


@pytest.fixture(scope="module", autouse=True)
def alone() -> Iterator[None]:
    """A group of one rank, for a mesh."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("later", [False, True], ids=["first", "later"])
@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__)
@pytest.mark.parametrize("name", CLASSES)
def test_other_classes_are_refused(name: str, place: Any, later: bool) -> None:
    change, says = CLASSES[name]
    if name == "overriding" and place is parameter:
        pytest.skip("nn.Parameter(tensor) gives it its own class")
    training = Training()
    step = graphopt.compile(training.step)
    if later:
        step(torch.ones(3, 4))
        step(torch.ones(3, 4))
    x = place(training, change)
    before = [each.detach().clone() for each in training.model.linear.parameters()]
    with pytest.raises(CaptureError, match=says) as raised:
        step(x)
    assert raised.value.hint is not None
    for now, then in zip(training.model.linear.parameters(), before, strict=True):
        assert torch.equal(now, then)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize("later", [False, True], ids=["first", "later"])
@pytest.mark.parametrize("change", [jagged, in_rows])
def test_other_layouts_are_refused(change: Change, later: bool) -> None:
    step = graphopt.compile(Training().step)
    if later:
        step(torch.ones(3, 4))
    with pytest.raises(CaptureError, match="argument x is a tensor of layout"):
        step(change(torch.ones(3, 4)))


def test_the_hint_works() -> None:
    eager, other = Training(), Training()
    step = graphopt.compile(other.step)
    for kind in (Named, Doubling):
        x = torch.randn(3, 4).as_subclass(kind).as_subclass(Tensor)
        assert torch.equal(eager.step(x), step(x))


def test_parameters_with_marks_are_as_others() -> None:
    losses = []
    for compiled in (False, True):
        training = Training()
        linear = training.model.linear
        linear.weight = Marked(linear.weight.detach())
        training.optimizer = torch.optim.SGD(training.model.parameters(), lr=0.1)
        step = graphopt.compile(training.step) if compiled else training.step
        losses.append([step(torch.full((3, 4), float(i))).item() for i in range(4)])
        assert type(linear.weight) is Marked and linear.weight.describe() == "by 0"
    assert losses[0] == losses[1]
