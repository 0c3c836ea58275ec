"""A capture draws from copies: torch's default generator, one for all threads, stays as it is.

Each draw here takes one number of 24 bits from the generator, in whatever thread it is made. So all
that is drawn beside captures, and by captured steps, is what the seed gives one after another.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

import graphopt
from work_in_threads import Beside, model

BITS = 1 << 24


def _number(drawn: torch.Tensor) -> int:
    return int(drawn * BITS) if drawn.is_floating_point() else int(drawn)


DRAWS: dict[str, Callable[[], torch.Tensor]] = {
    "rand": lambda: torch.rand(1),
    "randint": lambda: torch.randint(BITS, (1,)),
    "rand_like": lambda: torch.rand_like(torch.empty(1)),
    "uniform_": lambda: nn.init.uniform_(torch.empty(1)),
    "random_": lambda: torch.empty(1, dtype=torch.int64).random_(BITS),
    "the default generator itself": lambda: torch.rand(1, generator=torch.default_generator),
}


@torch.library.custom_op("beside_captures::drawn", mutates_args=())
def drawn_by_operator(x: torch.Tensor) -> torch.Tensor:
    """An operator whose kernel draws, which a capture runs to see the layout of what it gives."""
    return torch.rand_like(x)


@drawn_by_operator.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def _decided(net: nn.Module, optimizer: Any, draw: Callable[[], torch.Tensor], x: Any) -> Any:
    """What a capture computes to decide depends on what it has drawn."""
    drawn = draw()
    loss = net(x + drawn.float()).square().mean()
    if not torch.isfinite(loss):
        return drawn
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return drawn


def _by_operator(net: nn.Module, optimizer: Any, draw: Callable[[], torch.Tensor], x: Any) -> Any:
    return _decided(net, optimizer, lambda: drawn_by_operator(torch.empty(1)), x)


def _with_layouts(net: nn.Module, optimizer: Any, draw: Callable[[], torch.Tensor], x: Any) -> Any:
    """Kernels run to show the layouts of what they give, of dropout as well: without a draw."""
    image = x[:, :, None, None].expand(4, 8, 2, 2).contiguous(memory_format=torch.channels_last)
    dropped = nn.functional.dropout(image, 0.0) + nn.functional.dropout2d(image, 0.5, False)
    drawn = draw()
    loss = net(dropped.mean((2, 3)) + drawn.float()).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return drawn


STEPS = (_decided, _by_operator, _with_layouts)


def _stepped(number: int, found: list[int]) -> None:
    """Three calls of a step that is captured anew."""
    net, x = model(number)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
    draw = list(DRAWS.values())[number % len(DRAWS)]
    pipeline = "default" if number % 2 else "none"
    step = graphopt.compile(STEPS[number % len(STEPS)], pipeline=pipeline)
    found.extend(_number(step(net, optimizer, draw, x)) for _ in range(3))
    step.flush()


def _is_in_order(part: Sequence[int], whole: Sequence[int]) -> bool:
    """Whether numbers stand in a sequence one after another."""
    rest = iter(whole)
    return all(number in rest for number in part)


def _check(captures: int, rounds: int) -> None:
    torch.manual_seed(captures)
    beside = [Beside(lambda draw=draw: [draw()]) for draw in DRAWS.values()]
    steps: list[list[int]] = [[] for _ in range(captures)]
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for one in range(rounds):
                _stepped(number + one * captures, steps[number])
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(captures)]
    for each in (*beside, *threads):
        (each.__enter__ if isinstance(each, Beside) else each.start)()
    for each in threads:
        each.join(240)
    for each in beside:
        each.__exit__()
    assert not errors
    assert not any(each.errors for each in beside)
    others = [[_number(each) for (each,) in thread.results] for thread in beside]
    drawn = [number for each in (*others, *steps) for number in each]
    torch.manual_seed(captures)
    expected = torch.randint(BITS, (len(drawn),)).tolist()
    assert Counter(drawn) == Counter(expected)
    assert all(_is_in_order(each, expected) for each in (*others, *steps))
    assert all(others)


@pytest.mark.parametrize("captures", [2, 4])
def test_each_number_is_drawn_once(captures: int) -> None:
    _check(captures, 1)


@pytest.mark.full
@pytest.mark.parametrize("captures", [2, 4])
def test_each_number_is_drawn_once_in_many_captures(captures: int) -> None:
    _check(captures, 20)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("kind", DRAWS)
def test_a_capture_leaves_the_generator_alone(kind: str, step: Callable[..., Any]) -> None:
    net, x = model(3)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
    before = torch.get_rng_state()
    graphopt.capture(step, net, optimizer, DRAWS[kind], x)
    assert torch.equal(torch.get_rng_state(), before)
