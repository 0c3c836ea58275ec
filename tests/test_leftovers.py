"""What a capture leaves behind on the host: after a refusal nothing, otherwise what one eager step
leaves, once."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from twins import Twins, World
from zoo import MLP, MODELS, OPTIMIZERS

CASE = MODELS["mlp"]
TABLES = ("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_with_kwargs")


class Lazy(nn.Module):
    """Installs in its first forward what `install` adds, and notes that it has."""

    def __init__(self, install: Callable[[Lazy], None], flag: str) -> None:
        super().__init__()
        self.body, self.install, self.flag = MLP(), install, flag
        self.notes = SimpleNamespace(ready=False, inner=SimpleNamespace(ready=False))
        self.ready = False
        self.table: dict[str, Any] = {}
        self.seen: list[Any] = []
        self.queue: deque[int] = deque(maxlen=3)
        self.names: set[str] = set()

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_ready():
            self.install(self)
            self.set_ready()
        return self.body(x)

    def is_ready(self) -> bool:
        places = {
            "attribute": self.ready,
            "object": self.notes.ready,
            "deep": self.notes.inner.ready,
            "table": "ready" in self.table,
        }
        return bool(places[self.flag])

    def set_ready(self) -> None:
        if self.flag == "attribute":
            self.ready = True
        elif self.flag == "table":
            self.table["ready"] = True
        else:
            (self.notes if self.flag == "object" else self.notes.inner).ready = True

    def hooks(self) -> list[list[int]]:
        return [[len(vars(m)[table]) for table in TABLES] for m in self.modules()]


def hook(module: Lazy) -> None:
    module.body.register_forward_hook(lambda m, args, output: output * 2)


def hook_with_kwargs(module: Lazy) -> None:
    module.body.register_forward_hook(lambda m, args, kw, output: output + 1, with_kwargs=True)


def pre_hook(module: Lazy) -> None:
    module.body.head.register_forward_pre_hook(lambda m, args: (args[0] * 0.5,))


def containers(module: Lazy) -> None:
    module.seen.append("first")
    module.queue.extend([1, 2, 3, 4])
    module.names.add("head")
    module.table["order"] = OrderedDict(a=1)


def step(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


@pytest.mark.parametrize("flag", ["attribute", "object", "deep", "table"])
@pytest.mark.parametrize("install", [hook, hook_with_kwargs, pre_hook, containers])
def test_what_a_first_forward_installs_is_there_once(
    install: Callable[[Lazy], None], flag: str
) -> None:
    def build() -> World:
        model = Lazy(install, flag)
        return World(step, [model], [OPTIMIZERS["sgd-foreach"](model.parameters())])

    twins = Twins(build)
    for i in range(3):
        twins.step(*CASE.batch(i))
    eager, captured = twins.eager.model, twins.captured.model
    assert captured.hooks() == eager.hooks()
    assert (captured.seen, captured.queue, captured.names) == (eager.seen, eager.queue, eager.names)
    assert captured.is_ready() and captured.table == eager.table
    assert len(twins.compiled.captures) <= 2
