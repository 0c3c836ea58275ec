"""Tensors that a call leaves with a history in eager code: no backward goes through them unseen."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphopt
from graphopt.errors import CaptureError

Step = Callable[[Tensor], Any]


class Trainer:
    """A model whose losses are kept from call to call."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(3, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1)
        self.total: Any = 0.0
        self.calls = 0
        self.mean = 0.0
        self.losses: list[Tensor] = []

    def loss(self, x: Tensor) -> Tensor:
        loss: Tensor = self.model(x).square().mean()
        return loss

    def update(self, loss: Tensor) -> None:
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()


def summed_in_attribute(trainer: Trainer, x: Tensor) -> None:
    trainer.total = trainer.total + trainer.loss(x)
    trainer.calls += 1
    if trainer.calls % 2 == 0:
        trainer.update(trainer.total)
        trainer.total = 0.0


def summed_in_place(trainer: Trainer, x: Tensor) -> None:
    trainer.total += trainer.loss(x)
    trainer.update(trainer.total)


def summed_in_list(trainer: Trainer, x: Tensor) -> None:
    trainer.losses.append(trainer.loss(x))
    trainer.update(trainer.losses[-1] + trainer.losses[0])


@pytest.mark.parametrize("step", [summed_in_attribute, summed_in_place, summed_in_list])
def test_a_backward_through_earlier_calls_is_refused(
    step: Callable[[Trainer, Tensor], None],
) -> None:
    trainer, compiled = Trainer(), graphopt.compile(step)
    weights = trainer.model.weight
    error: CaptureError | None = None
    for _ in range(3):
        before = weights.detach().clone()
        try:
            compiled(trainer, torch.ones(4, 3))
        except CaptureError as refusal:
            error = refusal
            break
    assert error is not None
    assert torch.equal(weights, before)
    assert error.location is not None
    assert any(each in error.location for each in ("backward()", "update(", "append("))


def test_a_backward_through_an_argument_of_an_earlier_call_is_refused() -> None:
    trainer = Trainer()

    def step(x: Tensor, total: Tensor) -> Tensor:
        total = total + trainer.loss(x)
        trainer.update(total)
        return total

    compiled = graphopt.compile(step)
    total = compiled(torch.ones(4, 3), torch.zeros(()))
    with pytest.raises(CaptureError, match="an earlier call has computed"):
        compiled(torch.ones(4, 3), total)
    compiled(torch.ones(4, 3), total.detach())
    assert len(compiled.captures) == 1


def running_mean(trainer: Trainer, x: Tensor) -> None:
    loss = trainer.loss(x)
    trainer.total += loss
    trainer.calls += 1
    trainer.update(loss)
    trainer.mean = (trainer.total / trainer.calls).item()


def detached_when_read(trainer: Trainer, x: Tensor) -> None:
    loss = trainer.loss(x) + (trainer.total.detach() if trainer.calls else 0.0)
    trainer.calls += 1
    trainer.total = loss
    trainer.update(loss)


def cut_by_no_grad(trainer: Trainer, x: Tensor) -> None:
    loss = trainer.loss(x)
    with torch.no_grad():
        trainer.total = 0.9 * trainer.total + 0.1 * loss
    trainer.update(loss)


@pytest.mark.parametrize("step", [running_mean, detached_when_read, cut_by_no_grad])
def test_what_no_backward_goes_through_is_as_in_eager(
    step: Callable[[Trainer, Tensor], None],
) -> None:
    found = []
    for run in (step, graphopt.compile(step)):
        trainer, values = Trainer(), []
        for index in range(5):
            run(trainer, torch.full((4, 3), 0.1 * index))
            values.append((trainer.total.detach().clone(), trainer.model.weight.detach().clone()))
        found.append((values, trainer.mean))
    eager, captured = found
    assert captured[1] == eager[1]
    for mine, theirs in zip(captured[0], eager[0], strict=True):
        assert all(map(torch.equal, mine, theirs))


def test_a_program_may_cut_the_history_between_calls() -> None:
    cell, state = nn.RNNCell(2, 2), SimpleNamespace(hidden=torch.zeros(1, 2))
    optimizer = torch.optim.SGD(cell.parameters(), 0.1)

    @graphopt.compile
    def step(x: Tensor) -> None:
        state.hidden = cell(x, state.hidden)
        optimizer.zero_grad()
        state.hidden.square().sum().backward()
        optimizer.step()

    for _ in range(3):
        step(torch.ones(1, 2))
        state.hidden = state.hidden.detach()
    step(torch.ones(1, 2))
    with pytest.raises(CaptureError, match="an earlier call has computed"):
        step(torch.ones(1, 2))


class Memory:
    """What was chosen, with its logarithm, which another policy has computed with gradients."""

    def __init__(self) -> None:
        self.chosen: list[Tensor] = []
        self.logs: list[Tensor] = []

    def fill(self, trainer: Trainer) -> None:
        self.chosen = [torch.randn(3) for _ in range(4)]
        self.logs = [trainer.model(row).log_softmax(0)[0] for row in self.chosen]


def ratio(trainer: Trainer, memory: Memory) -> Tensor:
    logs = torch.stack(memory.logs).detach()
    now = trainer.model(torch.stack(memory.chosen)).log_softmax(1)[:, 0]
    loss = -(now - logs).exp().mean()
    trainer.update(loss)
    return loss.detach()


def read_as_numbers(trainer: Trainer, memory: Memory) -> float:
    total = sum(each.item() for each in memory.logs)
    loss = trainer.loss(torch.stack(memory.chosen)) * total
    trainer.update(loss)
    return loss.item()


def compared_without_gradients(trainer: Trainer, memory: Memory) -> Tensor:
    loss = trainer.loss(torch.stack(memory.chosen))
    trainer.update(loss)
    with torch.no_grad():
        return (torch.stack(memory.logs) * 2 - loss).clamp(max=0.5)


def asked_what_it_is(trainer: Trainer, memory: Memory) -> tuple[bool, bool, bool]:
    log = memory.logs[0]
    trainer.update(trainer.loss(torch.stack(memory.chosen)))
    return log.requires_grad, log.is_leaf, log.detach().requires_grad


@pytest.mark.parametrize(
    "step", [ratio, read_as_numbers, compared_without_gradients, asked_what_it_is]
)
def test_what_other_code_has_computed_with_gradients_is_an_input(
    step: Callable[[Trainer, Memory], Any],
) -> None:
    found = []
    for run in (step, graphopt.compile(step)):
        trainer, memory, values = Trainer(), Memory(), []
        for _ in range(6):
            memory.fill(trainer)
            values.append((str(run(trainer, memory)), trainer.model.weight.tolist()))
            assert all(log.grad_fn is not None for log in memory.logs)
        found.append(values)
        if run is not step:
            assert len(run.captures) <= 3  # type: ignore[attr-defined]
    assert found[0] == found[1]


def goes_through(trainer: Trainer, log: Tensor) -> None:
    trainer.update(trainer.loss(torch.ones(4, 3)) * log)


def writes(trainer: Trainer, log: Tensor) -> None:
    with torch.no_grad():
        log.mul_(2)


def cuts(trainer: Trainer, log: Tensor) -> None:
    log.detach_()


@pytest.mark.parametrize("as_argument", [True, False])
@pytest.mark.parametrize("step", [goes_through, writes, cuts])
def test_the_history_of_other_code_is_left_alone(
    step: Callable[[Trainer, Tensor], None], as_argument: bool
) -> None:
    trainer = Trainer()
    log = trainer.loss(torch.ones(4, 3))
    before, weight = log.item(), trainer.model.weight.tolist()

    def run(trainer: Trainer, given: Tensor | None, x: Tensor) -> Tensor:
        step(trainer, log if given is None else given)
        return trainer.loss(x)

    with pytest.raises(CaptureError, match="computed with gradients outside") as caught:
        graphopt.compile(run)(trainer, log if as_argument else None, torch.ones(2, 3))
    assert caught.value.hint is not None and "detach()" in caught.value.hint
    assert log.item() == before and log.grad_fn is not None
    assert trainer.model.weight.tolist() == weight


def test_a_gradient_for_what_other_code_has_computed_is_as_in_eager() -> None:
    found = []
    for compiled in (False, True):
        trainer = Trainer()

        def step(hidden: Tensor, trainer: Trainer = trainer) -> Tensor:
            loss = trainer.loss(hidden)
            (gradient,) = torch.autograd.grad(loss, [hidden], retain_graph=True)
            trainer.update(trainer.loss(torch.ones(4, 3)) * gradient.sum())
            return gradient

        run: Any = graphopt.compile(step) if compiled else step
        rows = []
        for index in range(3):
            start = torch.full((4, 3), float(index), requires_grad=True)
            rows.append((run(start * 2).tolist(), trainer.model.weight.tolist()))
        found.append(rows)
    assert found[0] == found[1]


def of_parameters(trainer: Trainer, log: Tensor) -> None:
    torch.autograd.grad(trainer.loss(torch.ones(4, 3)) * log, list(trainer.model.parameters()))


def test_gradients_for_parameters_do_not_miss_a_history() -> None:
    """Which of the parameters it leads to is not known."""
    trainer = Trainer()
    log = trainer.loss(torch.ones(4, 3))
    with pytest.raises(CaptureError, match="computed with gradients outside"):
        graphopt.compile(of_parameters)(trainer, log)
    summed = graphopt.compile(summed_by_gradients)
    summed(trainer, torch.ones(4, 3))
    with pytest.raises(CaptureError, match="an earlier call has computed"):
        summed(trainer, torch.ones(4, 3))


def summed_by_gradients(trainer: Trainer, x: Tensor) -> None:
    trainer.total = trainer.total + trainer.loss(x)
    parameters = list(trainer.model.parameters())
    for parameter, each in zip(
        parameters, torch.autograd.grad(trainer.total, parameters), strict=True
    ):
        parameter.data.sub_(0.1 * each)


def test_hooks_of_what_other_code_has_computed_are_not_passed_over() -> None:
    trainer = Trainer()
    log = trainer.loss(torch.ones(4, 3))
    step = graphopt.compile(asked_for_its_gradient)
    assert step(trainer, log).item() == 2.0
    log.register_hook(lambda gradient: gradient * 10)
    with pytest.raises(CaptureError, match="with hooks"):
        step(trainer, log)


def asked_for_its_gradient(trainer: Trainer, log: Tensor) -> Tensor:
    (gradient,) = torch.autograd.grad(log * 2, [log])
    trainer.update(trainer.loss(torch.ones(4, 3)) * gradient)
    return gradient


def test_views_of_one_computed_tensor_are_read_as_they_are() -> None:
    trainer = Trainer()
    logs = trainer.model(torch.ones(4, 3))
    views = [logs, logs[:1]]

    @graphopt.compile
    def step(x: Tensor) -> Tensor:
        trainer.update(trainer.loss(x))
        return views[0].detach() + views[1].detach()

    for _ in range(2):
        assert torch.equal(step(torch.ones(2, 3)), (logs + logs[:1]).detach())


def test_an_earlier_call_may_leave_a_view() -> None:
    """Tacotron's decoder keeps what it computes, as views of lists of steps, and begins anew."""
    trainer = Trainer()

    def step(x: Tensor) -> Tensor:
        hidden = trainer.model(x)
        first, second = hidden.split(1, dim=1)
        trainer.first, trainer.second = first.relu().unsqueeze(0), second
        trainer.both = torch.stack([first, second]).transpose(0, 1)[1:]
        trainer.update((trainer.first * second).sum() + trainer.both.square().sum())
        return trainer.both.detach()

    compiled = graphopt.compile(step)
    for number in range(4):
        batch = torch.full((4, 3), 0.1 * number)
        twin = copy.deepcopy(trainer.model.state_dict())
        found = compiled(batch)
        kept = trainer.both.detach().clone(), copy.deepcopy(trainer.model.state_dict())
        trainer.model.load_state_dict(twin)
        expected = step(batch)
        assert torch.equal(found, expected) and torch.equal(kept[0], expected)
        for name, value in trainer.model.state_dict().items():
            assert torch.equal(value, kept[1][name]), name


class OfPlaces(Trainer):
    """A network that solves a differential equation at places which need gradients."""

    def __init__(self, places: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.x = places(torch.linspace(-1, 1, 12).view(4, 3))

    def solve(self, number: int) -> Tensor:
        u = self.model(self.x).tanh()
        (slope,) = torch.autograd.grad(u.sum(), self.x, create_graph=True)
        loss = (u - 1).square().mean() + slope.square().mean()
        self.update(loss)
        return loss + number


COMPUTED: dict[str, Callable[[Tensor], Tensor]] = {
    "cast": lambda values: values.double().requires_grad_().float(),
    "view": lambda values: values.clone().requires_grad_().unsqueeze(1).squeeze(1),
    "function": lambda values: values.clone().requires_grad_().exp(),
    "part": lambda values: torch.cat([values[:2].clone().requires_grad_(), values[2:]]),
}


@pytest.mark.parametrize("name", COMPUTED)
def test_a_backward_to_a_leaf_outside_is_refused_and_the_hint_works(name: str) -> None:
    """As programs make inputs for which they want gradients of an array of doubles."""
    with pytest.raises(CaptureError, match=r"tensor\.detach\(\)\.requires_grad_\(\)"):
        graphopt.compile(OfPlaces(COMPUTED[name]).solve)(0)
    found = []
    for compiled in (False, True):
        trainer = OfPlaces(lambda values: COMPUTED[name](values).detach().requires_grad_())
        step: Any = graphopt.compile(trainer.solve) if compiled else trainer.solve
        found.append([(step(n).item(), trainer.model.weight.tolist()) for n in range(3)])
    assert found[0] == found[1]
