"""Kinds of work that threads do beside the one that trains, each with results to compare."""

from __future__ import annotations

import copy
import io
import logging
import random
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import graphopt

Work = Callable[[], Sequence[torch.Tensor]]

logger = logging.getLogger("beside")
logger.addHandler(logging.StreamHandler(io.StringIO()))
logger.propagate = False


def model(seed: int, width: int = 8) -> tuple[nn.Module, torch.Tensor]:
    """A model and its batch, made without the generator that all threads share."""
    generator = torch.Generator().manual_seed(seed)
    first = nn.utils.skip_init(nn.Linear, width, width)
    made = nn.Sequential(first, nn.ReLU(), nn.utils.skip_init(nn.Linear, width, 1))
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return made, torch.randn(4, width, generator=generator)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def train_cast(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
    """It leaves a region of autocast, which empties the cache of casts for all threads: so does
    eager code, and others that cast a weight twice in one region get other gradients."""
    with torch.autocast("cpu", torch.bfloat16):
        loss = checkpoint(model, x, use_reentrant=False).float().square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


STEPS = (train, train_cast)


def _state(module: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in module.parameters()]


def _gradients(module: nn.Module) -> list[torch.Tensor]:
    found = [parameter.grad for parameter in module.parameters()]
    module.zero_grad()
    return [each for each in found if each is not None]


def _optimizer_steps() -> Work:
    net, _ = model(1)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)

    def work() -> list[torch.Tensor]:
        for parameter in net.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        return _state(net)

    return work


def _backwards() -> Work:
    net, x = model(2)

    def work() -> list[torch.Tensor]:
        net(x).prod().backward()
        return _gradients(net)

    return work


def _checkpoints() -> Work:
    net, x = model(3)

    def work() -> list[torch.Tensor]:
        checkpoint(net, x, use_reentrant=False).sum().backward()
        return _gradients(net)

    return work


def _loads() -> Work:
    file = io.BytesIO()
    torch.save(model(4)[0].state_dict(), file)
    return lambda: list(torch.load(io.BytesIO(file.getvalue())).values())


def _saves() -> Work:
    net, _ = model(5)

    def work() -> list[torch.Tensor]:
        with tempfile.TemporaryFile("w+b") as file:
            torch.save(net.state_dict(), file)
            file.seek(0)
            return list(torch.load(file).values())

    return work


def _loaders(workers: int) -> Work:
    data = TensorDataset(torch.arange(12.0))
    generator = torch.Generator()

    def work() -> list[torch.Tensor]:
        generator.manual_seed(3)
        loader = DataLoader(data, 5, shuffle=True, num_workers=workers, generator=generator)
        return [batch for (batch,) in loader]

    return work


def _draws() -> Work:
    random.seed(7)
    numpy.random.seed(8)

    def work() -> list[torch.Tensor]:
        drawn = [random.random(), *random.sample(range(99), 3), *numpy.random.rand(2)]
        return [torch.tensor(drawn)]

    return work


def _output() -> Work:
    def work() -> list[torch.Tensor]:
        with tempfile.TemporaryFile("w+") as file:
            print("loss", 3.5, file=file)
            logger.warning("slow batch %d", 3)
            file.seek(0)
            return [torch.tensor(len(file.read()))]

    return work


def _copies() -> Work:
    net, x = model(6)
    return lambda: [copy.deepcopy(net)(x).detach()]


def _autocasts() -> Work:
    net, x = model(7)

    def work() -> list[torch.Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            loss = (net(x) + net(-x)).sum()  # with each weight cast once
        loss.backward()
        return _gradients(net)

    return work


def _without_gradients() -> Work:
    net, x = model(8)

    def work() -> list[torch.Tensor]:
        with torch.no_grad():
            one = net(x)
        with torch.inference_mode():
            other = net(x)
        return [one, torch.tensor([one.requires_grad, other.is_inference()])]

    return work


def _modules() -> Work:
    torch.manual_seed(9)

    def work() -> list[torch.Tensor]:
        made = nn.TransformerEncoderLayer(8, 2, 16)
        nn.init.xavier_uniform_(made.linear1.weight)
        return _state(made)

    return work


def _captured_step() -> Work:
    net, x = model(10)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    step = graphopt.compile(train, pipeline="none")
    step(net, optimizer, x)
    return lambda: [step(net, optimizer, x)]


def _scaled() -> Work:
    net, x = model(11)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu")

    def work() -> list[torch.Tensor]:
        scaler.scale(net(x).square().mean()).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return _state(net)

    return work


def _compiled() -> Work:
    def work() -> list[torch.Tensor]:
        time.sleep(0.1)  # it would compile most of the time, and captures would wait
        torch.compiler.reset()
        function = torch.compile(lambda x: (x * 2).sin() + 1, backend="aot_eager")
        return [function(torch.ones(3))]

    return work


def _identities() -> Work:
    tensor = torch.ones(3)
    known = {id(tensor): tensor}
    return lambda: [known[id(tensor)], torch.tensor([max(1, 2), min(3, 4), *sorted([3, 1])])]


KINDS: dict[str, Callable[[], Work]] = {
    "optimizer steps": _optimizer_steps,
    "backwards": _backwards,
    "checkpoints": _checkpoints,
    "torch.load": _loads,
    "torch.save": _saves,
    "a loader": lambda: _loaders(0),
    "a loader with a process": lambda: _loaders(1),
    "draws of Python and numpy": _draws,
    "print and logs": _output,
    "deepcopy": _copies,
    "autocast": _autocasts,
    "no_grad and inference_mode": _without_gradients,
    "modules made": _modules,
    "a captured step": _captured_step,
    "a gradient scaler": _scaled,
    "torch.compile": _compiled,
    "id, max, sorted": _identities,
}


class Beside:
    """A thread that does one kind of work again and again, as a context.

    Attributes:
        results: what it got, in order.
        errors: what it raised.
    """

    def __init__(self, work: Work) -> None:
        self.results: list[Sequence[torch.Tensor]] = []
        self.errors: list[BaseException] = []
        self._work, self._over = work, threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._over.wait(0.001) and not self.errors:
            try:
                self.results.append(self._work())
            except BaseException as error:
                self.errors.append(error)

    def __enter__(self) -> Beside:
        self._thread.start()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._over.set()
        self._thread.join(60)
        assert not self._thread.is_alive()


def trained(number: int, captured: bool, steps: Sequence[Any] = STEPS) -> list[torch.Tensor]:
    """What two calls of one of the steps give and leave, eager or captured anew."""
    net, x = model(100 + number)
    kind = torch.optim.AdamW if number % 3 else torch.optim.SGD
    optimizer = kind(net.parameters(), lr=0.05)
    step = steps[number % len(steps)]
    if captured:
        step = graphopt.compile(step, pipeline="none" if number % 4 else "default")
    losses = [step(net, optimizer, x).detach() for _ in range(2)]
    if captured:
        step.flush()
    return losses + _state(net)
