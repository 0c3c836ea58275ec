"""`parameter.data = new` in a step, against eager."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import graphopt
from loops import Loop, graphs_of

Step = Callable[..., Any]


def averaged(model: Any, average: Any, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    for old, new in zip(average.parameters(), model.parameters(), strict=True):
        old.data = old.data * 0.9 + new.data * 0.1
    loss = F.cross_entropy(model(x) + average(x).detach(), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


def by_hand(model: Any, average: Any, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    model.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    for parameter in model.parameters():
        parameter.data = (parameter.data - 0.1 * parameter.grad.data).clamp(-1, 1)
        parameter.data -= 0.01
    return loss


def updated_first(model: Any, average: Any, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    loss = averaged(model, average, optimizer, x, y)
    model.weight.data = model.weight.data.clamp(-0.2, 0.2)  # the old storage has been updated
    return loss


def between(model: Any, average: Any, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    """Autograd goes back through the values that a product was computed with."""
    for _ in range(2):
        loss = (F.linear(model(x).tanh() @ average.weight, model.weight) - x[:, :3]).square().mean()
        model.weight.data = model.weight.data * 0.5
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss


def swapped(model: Any, average: Any, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    """The weights of one model are lent to another one."""
    lent = [p.data for p in average.parameters()]
    own = [p.data for p in model.parameters()]
    for p, data in zip(model.parameters(), lent, strict=True):
        p.data = data
    expected = model(x).detach()
    for p, data in zip(model.parameters(), own, strict=True):
        p.data = data * 1.0 if data.dim() == 1 else data
    return averaged(model, average, optimizer, x, y) + (model(x) - expected).square().mean()


def put_back(model: Any, average: Any, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    """Other values for one forward."""
    own = model.weight.data
    model.weight.data = own * 0.5
    smaller = model(x).detach()
    model.weight.data = own
    return averaged(model, average, optimizer, x, y) + smaller.sum()


def kept(model: Any, average: Any, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    new = model.weight.detach() * 2
    view = new.detach()
    model.weight.data = new
    with torch.no_grad():
        model.weight.add_(1.0)  # `new` as well
        new.mul_(0.5)
    return (new + view + x.sum()).sum() + model.weight.sum().detach()


def returned(model: Any, average: Any, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    new = model.weight.detach() * 2
    model.weight.data = new
    return new


def sharp(model: Any, average: Any, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    """What is kept in the state of the optimizer becomes the memory of the parameters."""
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    with torch.no_grad():
        for p in model.parameters():
            optimizer.state[p]["before"] = p.data.clone()
            p.add_(p.grad, alpha=0.05)
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    for p in model.parameters():
        p.data = optimizer.state[p]["before"]
    optimizer.step()
    optimizer.zero_grad()
    return loss


def trained(step: Step, compiled: bool) -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    average = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    run = graphopt.compile(step) if compiled else step
    found, snapshots = [], []
    for _ in range(4):
        # What somebody holds of the old storage stays as it is.
        snapshots += [average.weight.data, model.weight.detach()]
        loss = run(model, average, optimizer, torch.randn(5, 6), torch.randint(0, 3, (5,)))
        found += [loss.clone(), *(each.clone() for each in snapshots)]
        snapshots.append(loss)
    if isinstance(run, graphopt.TrainStep):
        assert run._calls.captured <= 2
    return [*found, *model.parameters(), *average.parameters()]


STEPS = [averaged, by_hand, updated_first, between, swapped, put_back, kept, returned, sharp]


@pytest.mark.parametrize("step", STEPS)
def test_equal_to_eager_whoever_holds_the_old_storage(step: Step) -> None:
    expected, got = trained(step, False), trained(step, True)
    assert all(map(torch.equal, got, expected))


@pytest.mark.parametrize("step", [sharp, returned])
def test_memory_is_shared_as_in_eager(step: Step) -> None:
    """Entries of the state, results and parameters."""
    found = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(6, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run = graphopt.compile(step) if compiled else step
        for _ in range(3):
            result = run(model, None, optimizer, torch.randn(5, 6), torch.randint(0, 3, (5,)))
        state = [entries["before"] for entries in optimizer.state.values()]
        pointers = {p.data_ptr(): i for i, p in enumerate(model.parameters())}
        found.append([pointers.get(each.data_ptr()) for each in (*state, result)])
    assert found[0] == found[1]
    assert any(each is not None for each in found[0])


def test_state_of_its_own_is_captured_for_itself() -> None:
    """A checkpoint that is loaded takes apart what shared memory."""
    left = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(6, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        run = graphopt.compile(sharp) if compiled else sharp
        for call in range(5):
            if call == 3:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            run(model, None, optimizer, torch.randn(5, 6), torch.randint(0, 3, (5,)))
        left.append([*model.parameters(), *(e["before"] for e in optimizer.state.values())])
    assert all(map(torch.equal, *left))


def shared(model: Any, average: Any, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    average.weight.data = model.weight.data
    return model(x).sum()


def one_for_both(model: Any, average: Any, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    model.weight.data = average.weight.data = model.weight.data * 2
    return model(x).sum()


def cast(model: Any, average: Any, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    model.weight.data = model.weight.data.double()
    return x.sum()


def part(model: Any, average: Any, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    model.weight.data = torch.cat([model.weight.data, average.weight.data])[:3]
    return model(x).sum()


def left(model: Any, average: Any, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    before = model.weight.data
    model.weight.data = before * 2
    return before


@pytest.mark.parametrize("step", [shared, one_for_both, cast, part, left])
def test_what_is_no_update_is_refused(step: Step) -> None:
    with pytest.raises(graphopt.CaptureError, match=r"\.data = "):
        trained(step, True)


def outside(tensors: list[Tensor]) -> Any:
    """What a program sees of tensors that it holds."""
    pointers = {each.data_ptr(): number for number, each in enumerate(tensors)}
    return [(each, each.grad, pointers[each.data_ptr()]) for each in tensors]


def free() -> Loop:
    """Free adversarial training: a perturbation is updated with the model, and stays."""
    model, delta = nn.Linear(4, 2), torch.zeros(3, 4, requires_grad=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(number: int, x: Tensor) -> Tensor:
        for _ in range(2):
            loss: Tensor = model(x + delta[: x.size(0)]).square().mean()
            optimizer.zero_grad()
            loss.backward()
            assert delta.grad is not None
            gradient = delta.grad.detach()
            delta.data = torch.clamp(delta + 0.1 * torch.sign(gradient), -0.3, 0.3)
            delta.data[:2] = torch.clamp(delta[:2], -0.2, 0.2)
            optimizer.step()
            delta.grad.zero_()
        return loss

    return Loop(step, lambda: [model, outside([delta])])


def replaced() -> Loop:
    """The next call finds what is detached from it; who holds the former one keeps that."""
    model, delta = nn.Linear(4, 2), torch.zeros(3, 4)
    optimizer, held = torch.optim.SGD(model.parameters(), lr=0.1), [delta, delta.detach()]

    def step(number: int, x: Tensor) -> Tensor:
        nonlocal delta
        delta.requires_grad = True
        model(x + delta).square().mean().backward()
        assert delta.grad is not None
        delta.data = torch.clamp(delta + 0.1 * torch.sign(delta.grad), -0.3, 0.3)
        delta = delta.detach()
        optimizer.zero_grad()
        loss: Tensor = model(x + delta).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    def left() -> Any:
        if delta is not held[-1]:
            held.append(delta)
        return [model, outside(held)]

    return Loop(step, left)


def with_a_history() -> Loop:
    """What the tensor gets has a history, through which gradients go, and is one memory with it."""
    model, holder = nn.Linear(4, 2), SimpleNamespace(delta=torch.zeros(3, 4, requires_grad=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(number: int, x: Tensor) -> Any:
        new = holder.delta * 2 + x
        holder.delta.data = new
        loss = (model(new) + model(holder.delta)).square().mean()
        loss.backward()
        with torch.no_grad():
            holder.delta.mul_(0.5)
        optimizer.step()
        optimizer.zero_grad()
        return loss, (new * 2).detach()

    return Loop(step, lambda: [model, outside([holder.delta])])


@pytest.mark.parametrize("make", [free, replaced, with_a_history])
def test_tensors_outside(make: Callable[[], Loop]) -> None:
    assert graphs_of(make, 6) <= 3
