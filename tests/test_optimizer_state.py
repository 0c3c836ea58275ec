"""Optimizers that keep state of no parameter: equal to eager, `state_dict()` included."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import graphopt
from gloo import Pool
from test_decisions import assert_alike, finish, same


class Counting(Optimizer):
    """SGD that keeps something in `state` by a rule of its own."""

    def __init__(self, parameters: Any, rule: Callable[[Counting], Any]) -> None:
        super().__init__(parameters, {"lr": 0.05})
        self.rule = rule

    def gradients(self) -> Iterator[tuple[Tensor, Tensor]]:
        for group in self.param_groups:
            yield from ((p, p.grad) for p in group["params"] if p.grad is not None)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        factor = self.rule(self)
        for parameter, gradient in self.gradients():
            parameter.add_(gradient * factor, alpha=-self.param_groups[0]["lr"])


def tensor_that_is_read(optimizer: Counting) -> Any:
    """As MADGRAD does."""
    state: Any = optimizer.state
    if "k" not in state:
        state["k"] = torch.tensor([0], dtype=torch.long)
    count = state["k"].item()
    state["k"] += 1
    return math.pow(count + 1, 0.5) / math.sqrt(count + 2)


def tensor_that_is_replaced(optimizer: Counting) -> Any:
    state: Any = optimizer.state
    state["k"] = state.get("k", torch.zeros(())) + 1
    return 1 / state["k"]


def number(optimizer: Counting) -> Any:
    state: Any = optimizer.state
    state["step"] = state.get("step", 0) + 1
    return 1 / state["step"] ** 0.5 if state["step"] < 5 else 0.25


def table(optimizer: Counting) -> Any:
    state: Any = optimizer.state["all"]  # type: ignore[index]
    if not state:
        state.update(steps=0, norm=torch.zeros(()), kind="mean", shape=(1, 2))
    norm = torch.stack([gradient.norm() for _, gradient in optimizer.gradients()]).norm()
    state["norm"].lerp_(norm, 0.1)
    state["steps"] += 1
    return state["steps"] / (1 + state["norm"])


RULES = [tensor_that_is_read, tensor_that_is_replaced, number, table]


def trained(rule: Any, compiled: bool, used: Any = lambda model: model) -> tuple[list[Any], int]:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = Counting(model.parameters(), rule)
    called = used(model)

    def step(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
        return finish(optimizer, model(x).square().mean())

    run: Any = graphopt.compile(step) if compiled else step
    found: list[Any] = []
    for call in range(8):
        if call == 4:
            optimizer.param_groups[0]["lr"] = 0.02
        if call == 6:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        found += [run(called, optimizer, torch.randn(5, 4)).detach(), *model.state_dict().values()]
        found.append(copy.deepcopy(optimizer.state_dict()))
    return torch.utils._pytree.tree_leaves(found), len(run.captures) if compiled else 0


@pytest.mark.parametrize("rule", RULES)
def test_every_call_is_eager_s(rule: Any) -> None:
    expected, _ = trained(rule, compiled=False)
    found, made = trained(rule, compiled=True)
    assert_alike(found, expected)
    assert made == (3 if rule is number else 2)  # the first step; and one more answer


def test_a_refused_or_failed_first_step_leaves_no_state() -> None:
    model = nn.Linear(4, 3)
    optimizer = Counting(model.parameters(), table)

    def check(x: Tensor) -> None:
        if x.max() > 1:
            raise ValueError("out of range")

    def step(model: nn.Module, optimizer: Optimizer, x: Tensor, asks: bool) -> None:
        graphopt.callback(check, x)
        loss = finish(optimizer, model(x).square().mean())
        if asks:
            max([loss], key=float)

    run = graphopt.compile(step)
    with pytest.raises(graphopt.CaptureError, match="value of a tensor"):
        run(model, optimizer, torch.ones(5, 4), True)
    assert not optimizer.state
    with pytest.raises(ValueError, match="out of range"):
        run(model, optimizer, torch.ones(5, 4) * 2, False)
    assert not optimizer.state


def keeps_a_list(optimizer: Counting) -> Any:
    state: Any = optimizer.state
    state["norms"] = [*state.get("norms", []), 1.0]
    return 1.0


def takes_out(optimizer: Counting) -> Any:
    state: Any = optimizer.state
    state.pop("k", None)
    return 1.0


@pytest.mark.parametrize(
    ("rule", "said"), [(keeps_a_list, "key 'norms'"), (takes_out, "takes entries out")]
)
def test_what_is_refused(rule: Any, said: str) -> None:
    model = nn.Linear(4, 3)
    optimizer = Counting(model.parameters(), rule)
    if rule is takes_out:
        optimizer.state["k"] = torch.ones(())  # type: ignore[index, assignment]
    before = dict(optimizer.state)

    def step(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
        return finish(optimizer, model(x).mean())

    with pytest.raises(graphopt.CaptureError, match=said):
        graphopt.compile(step)(model, optimizer, torch.ones(5, 4))
    assert dict(optimizer.state) == before


class Slow(Optimizer):
    """Around another optimizer, in whose state it keeps its own."""

    def __init__(self, base: Optimizer) -> None:
        self.base = base
        super().__init__(base.param_groups, {})
        self.param_groups, self.state = base.param_groups, base.state

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.base.step()
        state: Any = self.state
        for parameter in self.param_groups[0]["params"]:
            slow = state[parameter].setdefault("slow", torch.zeros_like(parameter))
            parameter.copy_(slow.lerp_(parameter, 0.5))
        state["steps"] = state.get("steps", 0) + 1


def test_one_state_of_two_optimizers() -> None:
    def run(compiled: bool) -> list[Any]:
        torch.manual_seed(0)
        model = nn.Linear(4, 3)
        optimizer = Slow(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))

        def step(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
            return finish(optimizer, model(x).square().mean())

        call: Any = graphopt.compile(step) if compiled else step
        found: list[Any] = [call(model, optimizer, torch.randn(5, 4)) for _ in range(6)]
        return torch.utils._pytree.tree_leaves([found, model.state_dict(), optimizer.state_dict()])

    expected, found = run(compiled=False), run(compiled=True)
    assert_alike(found, expected)


def _left_on_rank(rank: int, compiled: bool) -> list[Any]:
    used = (lambda model: model) if compiled else nn.parallel.DistributedDataParallel
    return trained(tensor_that_is_read, compiled, used)[0]


def test_on_two_ranks(two_ranks: Pool) -> None:
    expected, captured = two_ranks.run(_left_on_rank, False), two_ranks.run(_left_on_rank, True)
    for found, eager in zip(captured, expected, strict=True):
        assert len(found) == len(eager)
        assert all(map(same, found, eager))
