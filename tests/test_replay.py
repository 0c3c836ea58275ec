"""Lists, queues and arrays outside a step from which it takes what numbers of the call select:
replay memories, pools of images, states of noise."""

from __future__ import annotations

import copy
import random
from collections import deque, namedtuple
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import graphopt

Transition = namedtuple("Transition", ("state", "action", "reward", "done"))


def transition() -> Any:
    return Transition(
        torch.randn(1, 3), random.randrange(2), random.random(), random.random() < 0.3
    )


def of_arrays() -> Any:
    return [numpy.random.randn(3), random.randrange(2), random.random(), random.random() < 0.3]


def batched(items: Any) -> tuple[Tensor, Tensor, Tensor]:
    """States, actions and rewards of what was drawn."""
    states, actions, rewards, done = zip(*items, strict=True)
    if isinstance(states[0], Tensor):
        inputs = torch.cat(states)
    else:
        inputs = torch.from_numpy(numpy.vstack(states)).float()
    kept = 1 - torch.tensor(done, dtype=torch.float32)
    return inputs, torch.tensor(actions)[:, None], torch.tensor(rewards) * kept


def samples(kept: Any, model: nn.Module, x: Tensor) -> Any:
    return batched(random.sample(kept.memory, 3))


def appends_and_samples(kept: Any, model: nn.Module, x: Tensor) -> Any:
    kept.memory.append(Transition(x, 1, 0.5, False))
    return batched(random.sample(kept.memory, k=3))


def acts_and_samples(kept: Any, model: nn.Module, x: Tensor) -> Any:
    with torch.no_grad():
        action = model(x).argmax(1).item()
    kept.memory.append(Transition(x, action, x.sum().item(), False))
    if len(kept.memory) > 6:
        kept.memory.pop(0)
    return batched(random.choices(kept.memory, k=2))


def by_index(kept: Any, model: nn.Module, x: Tensor) -> Any:
    return batched([kept.memory[i] for i in numpy.random.randint(0, len(kept.memory), size=3)])


def by_choice(kept: Any, model: nn.Module, x: Tensor) -> Any:
    return batched([random.choice(kept.memory) for _ in range(2)])


def into_a_ring(kept: Any, model: nn.Module, x: Tensor) -> Any:
    if len(kept.memory) < 6:
        kept.memory.append(None)
    kept.memory[kept.position] = Transition(x, 1, x.sum().item(), True)
    kept.position = (kept.position + 1) % 6
    return batched(random.sample(kept.memory, 3))


def from_a_pool(kept: Any, model: nn.Module, x: Tensor) -> Any:
    first, second = random.randint(0, 3), random.randint(-4, 3)
    found = kept.memory[first]
    kept.memory[first] = Transition(x, 0, 1.0, False)
    found = [found, kept.memory[second]]
    kept.memory[second] = Transition(x * 2, 1, 2.0, True)
    return batched(found)


CASES: list[tuple[Callable[..., Any], Callable[[], Any], Any, int]] = [
    (samples, transition, list, 2),
    (samples, of_arrays, lambda items: deque(items, maxlen=6), 2),
    (appends_and_samples, transition, lambda items: deque(items, maxlen=6), 1),
    (acts_and_samples, transition, list, 2),
    (by_index, of_arrays, list, 2),
    (by_choice, transition, deque, 1),
    (into_a_ring, transition, list, 2),
    (from_a_pool, transition, list, 1),
]
"""How a step takes items; what the program puts there; in which container; how many graphs."""


def trained(
    use: Callable[..., Any], item: Callable[[], Any], container: Any, wrap: Callable[[Any], Any]
) -> tuple[Any, Any]:
    """Seven calls of a step; what they leave, and the step."""
    for seed in (torch.manual_seed, random.seed, numpy.random.seed):
        seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    kept = SimpleNamespace(memory=container(item() for _ in range(4)), position=4)
    grows = use in (samples, by_index)

    def step(model: nn.Module, optimizer: Any, x: Tensor) -> Any:
        states, actions, rewards = use(kept, model, x)
        loss = ((model(states).gather(1, actions)[:, 0] - rewards) ** 2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    run, losses = wrap(step), []
    for call in range(7):
        losses.append(run(model, optimizer, torch.randn(1, 3)))
        if grows:
            kept.memory.append(item())
        elif call == 3:
            kept.memory[0], kept.memory[1] = kept.memory[1], kept.memory[1]
    state = [losses, model.weight.tolist(), random.getstate(), kept.position, str(kept.memory)]
    return [*state, numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist()], run


@pytest.mark.parametrize(("use", "item", "container", "graphs"), CASES)
def test_items_of_each_call(use: Any, item: Any, container: Any, graphs: int) -> None:
    eager, _ = trained(use, item, container, lambda step: step)
    found, step = trained(use, item, container, graphopt.compile)
    assert found == eager
    assert len(step.captures) <= graphs


@pytest.mark.parametrize("given", ["weights", "cum_weights", "counts"])
def test_what_else_a_draw_is_given_is_that_of_the_call(given: str) -> None:
    """A list beside the memory, which the program changes between two calls."""

    def run(wrap: Callable[[Any], Any]) -> list[Any]:
        torch.manual_seed(0)
        random.seed(0)
        model = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        memory, numbers = [torch.randn(1, 3) for _ in range(4)], [1, 2, 3, 4]
        draw = random.sample if given == "counts" else random.choices

        @wrap
        def step(model: nn.Module, optimizer: Any) -> Any:
            loss = model(torch.cat(draw(memory, k=2, **{given: numbers}))).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.item()

        found = []
        for call in range(8):
            found.append(step(model, optimizer))
            numbers[2:] = [numbers[2] + 40 * (call % 2), numbers[3] + 50 + call]
        return found

    assert run(lambda step: step) == run(graphopt.compile)


def writes_to_an_item(kept: Any, model: nn.Module, x: Tensor) -> Any:
    item = random.choice(kept.memory)  # HERE
    item.state.mul_(2)
    return batched([item])


def changes_a_list(kept: Any, model: nn.Module, x: Tensor) -> Any:
    item = random.choice(kept.memory)  # HERE
    item[2] = 0.0
    return batched([item])


def goes_through_a_pool(kept: Any, model: nn.Module, x: Tensor) -> Any:
    kept.memory[random.randint(0, 3)] = Transition(x, 0, 1.0, False)  # HERE
    return batched(kept.memory)


def moves_a_pool(kept: Any, model: nn.Module, x: Tensor) -> Any:
    kept.memory[random.randint(0, 3)] = Transition(x, 0, 1.0, False)  # HERE
    kept.memory.append(Transition(x, 0, 1.0, False))
    kept.memory.pop(0)
    return batched([random.choice(kept.memory)])


@pytest.mark.parametrize(
    ("use", "item", "word"),
    [
        (writes_to_an_item, transition, "changes in place"),
        (changes_a_list, of_arrays, "changes in place"),
        (goes_through_a_pool, transition, "reads or changes the list in another way"),
        (moves_a_pool, transition, "reads or changes the list in another way"),
    ],
)
def test_refused_items(use: Any, item: Any, word: str) -> None:
    with pytest.raises(graphopt.CaptureError, match=word) as caught:
        trained(use, item, list, graphopt.compile)
    line = use.__code__.co_firstlineno + next(
        number for number, text in enumerate(_lines(use)) if "# HERE" in text
    )
    assert f"{__file__}:{line}" in str(caught.value)


def _lines(function: Callable[..., Any]) -> list[str]:
    import inspect

    return inspect.getsource(function).splitlines()


class Noise:
    def __init__(self) -> None:
        self.mean = numpy.zeros(3)
        self.reset()

    def reset(self) -> None:
        self.state = copy.copy(self.mean)

    def sample(self) -> Any:
        x = self.state
        self.state = x + 0.15 * (self.mean - x) + 0.2 * numpy.array([random.random() for _ in x])
        return self.state


def noisy(noise: Noise, table: Any, x: Tensor) -> Any:
    return x + torch.from_numpy(noise.sample()).float()


def of_a_table(noise: Noise, table: Any, x: Tensor) -> Any:
    table.cursor = (table.cursor + 1) % len(table.rows)
    return x + torch.FloatTensor(table.rows[numpy.random.randint(0, 4, size=2)]).mean(0)


def in_a_shuffled_order(noise: Noise, table: Any, x: Tensor) -> Any:
    order = numpy.arange(4)
    behind = order[2:]
    numpy.random.shuffle(order)
    return (x.expand(4, 3) * torch.arange(4.0)[:, None])[order[:3]][behind % 3]


@pytest.mark.parametrize("use", [noisy, of_a_table, in_a_shuffled_order])
def test_arrays_of_each_call(use: Any) -> None:
    def run(wrap: Any) -> tuple[Any, Any]:
        for seed in (torch.manual_seed, random.seed, numpy.random.seed):
            seed(0)
        model, noise = nn.Linear(3, 2), Noise()
        table = SimpleNamespace(rows=numpy.random.randn(4, 3), cursor=0)

        def step(model: nn.Module, x: Tensor) -> Any:
            loss = model(use(noise, table, x)).square().sum()
            loss.backward()
            return loss.item()

        step = wrap(step)
        losses = []
        for call in range(7):
            losses.append(step(model, torch.randn(1, 3)))
            table.rows[call % 4] = numpy.random.randn(3)
            if call == 4:
                noise.reset()
        assert model.weight.grad is not None
        return [losses, model.weight.grad.tolist(), noise.state.tolist(), table.cursor], step

    eager, _ = run(lambda step: step)
    found, step = run(graphopt.compile)
    assert found == eager
    assert len(step.captures) <= 4


def test_an_array_left_in_two_places_is_refused() -> None:
    noise = Noise()

    @graphopt.compile
    def step(model: nn.Module, x: Tensor) -> Any:
        return model(x), noise.sample()

    with pytest.raises(graphopt.CaptureError, match="keeps elsewhere"):
        step(nn.Linear(3, 2), torch.ones(1, 3))
    assert noise.state.tolist() == [0.0, 0.0, 0.0]


def test_an_array_that_comes_to_lie_in_the_model_is_refused_by_then() -> None:
    """Where eager code reads it behind the update, which changes it."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    kept = SimpleNamespace(state=numpy.ones(3, numpy.float32))

    @graphopt.compile
    def step(model: nn.Module, optimizer: Any, x: Tensor) -> Any:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        return torch.tensor(kept.state) * 2

    for call in range(4):
        assert step(model, optimizer, torch.ones(3)).tolist() == [2.0 + 2 * call] * 3
        kept.state = kept.state + 1
    kept.state = model.weight.detach().numpy()[0]
    before = model.weight.detach().clone()
    with pytest.raises(graphopt.CaptureError, match="lies in the memory of a tensor of the model"):
        step(model, optimizer, torch.ones(3))
    assert torch.equal(model.weight, before)
