"""Optimizers whose state holds lists, tuples and dictionaries of tensors, against eager."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

import graphopt
from gloo import Pool

CALLS = 7


class Preconditioned(Optimizer):
    """As SOAP and Shampoo: statistics of each dimension in a list, which others replace from time
    to time."""

    def __init__(self, parameters: Any, every: int = 2) -> None:
        super().__init__(parameters, {"lr": 0.05, "every": every})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                self.update(parameter, parameter.grad, self.state[parameter], group)

    def update(self, parameter: Tensor, gradient: Tensor, state: Any, group: Any) -> None:
        if "step" not in state:
            state["step"], state["statistics"], state["bases"] = 0, [], None
            for size in gradient.shape:
                known = torch.zeros(size, size) if gradient.dim() > 1 else []
                state["statistics"].append(known)
            state["moments"] = {"first": torch.zeros_like(gradient), "pair": (gradient.clone(), 3)}
        state["step"] += 1
        for dimension, known in enumerate(state["statistics"]):
            if len(known) > 0:
                others = [d for d in range(gradient.dim()) if d != dimension]
                known.lerp_(torch.tensordot(gradient, gradient, [others] * 2), 0.1)
        if state["bases"] is None or state["step"] % group["every"] == 0:
            state["bases"] = [
                known if len(known) == 0 else torch.linalg.qr(known + torch.eye(len(known)))[0]
                for known in state["statistics"]
            ]
        moments = state["moments"]
        moments["first"].mul_(0.9).add_(gradient)
        moments["pair"] = (moments["pair"][0] * 0.5 + gradient, moments["pair"][1])
        direction = moments["first"] + moments["pair"][0] * moments["pair"][1]
        for base in state["bases"]:
            if len(base) > 0:
                direction = torch.tensordot(direction, base, [[0], [0]])
        parameter.add_(direction, alpha=-group["lr"])


class InPlace(Optimizer):
    """An entry of a list is replaced, the list itself is not; two share a tensor in turns."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            state: Any = self.state[parameter]
            if not state:
                state["last"] = [torch.zeros_like(parameter), torch.zeros_like(parameter)]
            last = state["last"]
            last[0], last[1] = last[1], parameter.grad.clone()
            parameter.add_(last[0] + last[1], alpha=-self.param_groups[0]["lr"])


def leaves(value: Any) -> Any:
    """A nest with its classes, tensors as bytes."""
    if isinstance(value, Tensor):
        return value.detach().numpy().tobytes()
    if isinstance(value, dict):
        return [(key, leaves(item)) for key, item in value.items()]
    if isinstance(value, (list, tuple)):
        return type(value), [leaves(item) for item in value]
    return type(value), value


def trained(kind: type[Optimizer], compiled: bool, rank: int = 0) -> tuple[list[Any], int]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
    optimizer: Any = kind(model.parameters())  # type: ignore[call-arg]

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    wrapped: Any = graphopt.compile(step) if compiled else step
    generator = torch.Generator().manual_seed(rank)
    found = []
    for number in range(CALLS):
        if number == 4:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        x = torch.randn(6, 4, generator=generator)
        loss = wrapped(x, torch.randint(0, 3, (6,), generator=generator))
        states = [dict(state) for state in optimizer.state.values()]
        found.append(leaves((loss, list(model.parameters()), states, optimizer.state_dict())))
    return found, len(wrapped.captures) if compiled else 0


@pytest.mark.parametrize(("kind", "captures"), [(Preconditioned, 3), (InPlace, 2)])
def test_nests_are_those_of_eager(kind: type[Optimizer], captures: int) -> None:
    expected, _ = trained(kind, False)
    found, graphs = trained(kind, True)
    assert found == expected
    assert graphs <= captures


def test_what_stands_in_a_list_is_guarded() -> None:
    """Another tensor, another kind of tensor and another number in a nest between two calls."""
    found = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(4, 3)
        optimizer = Preconditioned(model.parameters(), every=100)

        def step(x: Tensor, model: nn.Module = model, optimizer: Any = optimizer) -> Tensor:
            loss: Tensor = model(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss

        wrapped: Any = graphopt.compile(step) if compiled else step
        state: Any = optimizer.state
        for number in range(8):
            entries = state[model.weight] if number else {}
            if number == 2:
                entries["bases"][0] = torch.linalg.qr(torch.randn(3, 3))[0]
            if number == 4:
                entries["moments"]["pair"] = (entries["moments"]["pair"][0] * 2, 5)
            if number == 6:
                entries["statistics"][1] = []
            wrapped(torch.randn(6, 4))
            found.append(leaves((list(model.parameters()), dict(state[model.weight]))))
    assert found[:8] == found[8:]


def on_a_rank(rank: int) -> bool:
    """Each rank trains by itself."""
    expected, _ = trained(Preconditioned, False, rank)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
    optimizer = Preconditioned(model.parameters())

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    wrapped = graphopt.compile(step)
    generator = torch.Generator().manual_seed(0)
    for _ in range(CALLS):
        x = torch.randn(6, 4, generator=generator)
        wrapped(x, torch.randint(0, 3, (6,), generator=generator))
    same: bool = leaves(list(model.parameters())) == trained(Preconditioned, False)[0][-1][1][1]
    return same and bool(expected)


def test_nests_on_two_ranks(two_ranks: Pool) -> None:
    """With the same batches on both, the averages are the gradients of one."""
    assert two_ranks.run(on_a_rank) == [True, True]
