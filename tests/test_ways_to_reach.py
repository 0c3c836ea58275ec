"""A model and an optimizer among the arguments of a step, or reached in any other way: the outcome
is the same, on one rank and on two."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.optim import Optimizer

import graphopt
from gloo import Pool

Body = Callable[[nn.Module, Optimizer, Tensor], Any]
Step = Callable[[Tensor], Any]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(self.first(x).relu())
        return found


# What a step does.


def alike(value: Tensor) -> Tensor:
    """The same on all ranks."""
    if not dist.is_initialized():
        return value
    value = value.clone()
    dist.all_reduce(value)
    return value


def update(optimizer: Optimizer, loss: Tensor) -> Tensor:
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def plain(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
    return update(optimizer, model(x).square().mean())


def returns_early(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
    if alike(x[0, 0]) < 0:
        return x.sum()
    return update(optimizer, model(x).square().mean())


def skips(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    loss.backward()
    if alike(x[0, 0]) > 0:
        optimizer.step()
    optimizer.zero_grad()
    return loss


def of_a_part(model: Any, optimizer: Optimizer, x: Tensor) -> Tensor:
    return update(optimizer, model.first(x).square().mean())


def evaluates(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
    with torch.no_grad():
        return model(x).mean()


def of_weights(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
    """Of a dictionary of parameters that a transform is given."""
    weights = {name: torch.stack([each, 2 * each]) for name, each in model.named_parameters()}
    found = vmap(lambda own: functional_call(model, own, (x,)))(weights)
    return update(optimizer, found.square().mean())


def of_a_gradient(model: Any, optimizer: Optimizer, x: Tensor) -> Tensor:
    found = grad(lambda weight: (x @ weight).square().sum())(model.first.weight)
    return update(optimizer, model(x).mean() + found.square().mean())


BODIES = (plain, returns_early, skips, of_a_part, evaluates, of_weights, of_a_gradient)


# Ways in which it reaches the model and the optimizer.


def by_arguments(compiled: Any, body: Body, model: Any, optimizer: Optimizer) -> Step:
    return partial(compiled(body), model, optimizer)


def by_closure(compiled: Any, body: Body, model: Any, optimizer: Optimizer) -> Step:
    return compiled(lambda x: body(model, optimizer, x))  # type: ignore[no-any-return]


def by_model(compiled: Any, body: Body, model: Any, optimizer: Optimizer) -> Step:
    return partial(compiled(lambda m, x: body(m, optimizer, x)), model)


def by_optimizer(compiled: Any, body: Body, model: Any, optimizer: Optimizer) -> Step:
    return partial(compiled(lambda o, x: body(model, o, x)), optimizer)


def by_partial(compiled: Any, body: Body, model: Any, optimizer: Optimizer) -> Step:
    return compiled(partial(body, model, optimizer))  # type: ignore[no-any-return]


def by_default(compiled: Any, body: Body, model: Any, optimizer: Optimizer) -> Step:
    def step(x: Tensor, m: Any = model, o: Any = optimizer) -> Any:
        return body(m, o, x)

    return compiled(step)  # type: ignore[no-any-return]


def by_global(compiled: Any, body: Body, model: Any, optimizer: Optimizer) -> Step:
    found = {"model": model, "optimizer": optimizer, "body": body}
    exec("def step(x): return body(model, optimizer, x)", found)
    return compiled(found["step"])  # type: ignore[no-any-return]


def by_self(compiled: Any, body: Body, model: Any, optimizer: Optimizer) -> Step:
    @dataclass
    class Trainer:
        model: Any
        optimizer: Any

        def step(self, x: Tensor) -> Any:
            return body(self.model, self.optimizer, x)

    return compiled(Trainer(model, optimizer).step)  # type: ignore[no-any-return]


def by_calling(compiled: Any, body: Body, model: Any, optimizer: Optimizer) -> Step:
    class Trainer:
        def __init__(self) -> None:
            self.model, self.optimizer = model, optimizer

        def __call__(self, x: Tensor) -> Any:
            return body(self.model, self.optimizer, x)

    return compiled(Trainer())  # type: ignore[no-any-return]


def by_dictionary(compiled: Any, body: Body, model: Any, optimizer: Optimizer) -> Step:
    held = {"model": model, "optimizer": optimizer}
    return compiled(lambda x: body(held["model"], held["optimizer"], x))  # type: ignore[no-any-return]


def by_list(compiled: Any, body: Body, model: Any, optimizer: Optimizer) -> Step:
    held = [model, optimizer]
    return compiled(lambda x: body(held[0], held[1], x))  # type: ignore[no-any-return]


def by_nest(compiled: Any, body: Body, model: Any, optimizer: Optimizer) -> Step:
    held = SimpleNamespace(inner=SimpleNamespace(models=[model]), optimizer={"own": optimizer})
    return compiled(  # type: ignore[no-any-return]
        lambda x: body(held.inner.models[0], held.optimizer["own"], x)
    )


def by_function(compiled: Any, body: Body, model: Any, optimizer: Optimizer) -> Step:
    def of_model() -> Any:
        return model

    return compiled(lambda x: body(of_model(), optimizer, x))  # type: ignore[no-any-return]


WAYS = (
    *(by_arguments, by_closure, by_model, by_optimizer, by_partial, by_default, by_global),
    *(by_self, by_calling, by_dictionary, by_list, by_nest, by_function),
)


def run(way: Any, body: Body, compiled: Any, rank: int = 0) -> list[Tensor]:
    torch.manual_seed(0)
    model = Model()
    step = way(compiled, body, model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    torch.manual_seed(rank)
    found = []
    for sign in (-1, 1, 1, -1):
        x = torch.randn(3, 4)
        x[0, 0] = sign
        found.append(step(x).detach())
    return [*found, *(parameter.detach() for parameter in model.parameters())]


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("way", WAYS)
def test_the_same_as_eager_code(way: Any, body: Body) -> None:
    ours, expected = (run(way, body, each) for each in (graphopt.compile, lambda f: f))
    assert all(map(torch.equal, ours, expected))


OF_RANKS = (by_arguments, by_closure, by_self, by_dictionary)


def on_a_rank(rank: int, ways: tuple[Any, ...], body: Body) -> list[list[Tensor]]:
    return [run(way, body, graphopt.compile, rank) for way in ways]


@pytest.mark.parametrize("body", [returns_early, skips, of_weights])
def test_the_same_as_arguments_on_two_ranks(two_ranks: Pool, body: Body) -> None:
    for found in two_ranks.run(on_a_rank, OF_RANKS, body):
        for each in found:
            assert all(map(torch.equal, each, found[0]))


TRANSFORMS: dict[str, Callable[[dict[str, Tensor], Tensor], Tensor]] = {
    "vmap": lambda own, x: vmap(lambda each: x @ each["w"])(own),
    "vmap in parts": lambda own, x: vmap(lambda each: x @ each["w"], chunk_size=2)(own),
    "grad": lambda own, x: grad(lambda each: (x @ each["w"][0]).square().sum())(own)["w"],
    "vmap of grad": lambda own, x: vmap(
        grad(lambda each, row: (row @ each["w"][0]).square().sum()), in_dims=(None, 0)
    )(own, x)["w"],
    "jvp": lambda own, x: jvp(torch.square, (own["w"],), (torch.ones_like(own["w"]),))[1],
    "vjp": lambda own, x: vjp(torch.square, own["w"])[1](torch.ones(3, 4, 2))[0],
    "jacrev": lambda own, x: jacrev(lambda each: (x @ each).square().sum())(own["w"]),
    "jacfwd": lambda own, x: jacfwd(lambda each: (x @ each).square().sum())(own["w"]),
    "hessian": lambda own, x: hessian(lambda each: (each**3).sum())(own["w"]),
}


@pytest.mark.filterwarnings("ignore")  # torch warns of its own
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_of_weights_that_are_closed_over(name: str) -> None:
    def trained(compiled: Any) -> list[Tensor]:
        torch.manual_seed(0)
        own = {"w": nn.Parameter(torch.randn(3, 4, 2))}
        optimizer = torch.optim.SGD(own.values(), lr=0.1)
        step = compiled(lambda x: update(optimizer, TRANSFORMS[name](own, x).square().mean()))
        return [*(step(torch.randn(5, 4)).detach() for _ in range(2)), own["w"].detach()]

    assert all(map(torch.equal, trained(graphopt.compile), trained(lambda f: f)))
