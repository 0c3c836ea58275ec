"""Optimizers that make state in ways of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class Rule(Optimizer):
    """An optimizer given by what it makes of a parameter and its state."""

    def __init__(self, parameters: Iterable[Tensor], rule: Callable[..., None]) -> None:
        super().__init__(parameters, {"lr": 0.05})
        self.rule = rule

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.rule(parameter, parameter.grad, self.state[parameter], group["lr"])


def momentum_of_zeros(p: Tensor, g: Tensor, state: dict[str, Any], lr: float) -> None:
    if not state:
        state["momentum"] = torch.zeros_like(p)
    p.add_(state["momentum"].mul_(0.9).add_(g), alpha=-lr)


def several_at_once(p: Tensor, g: Tensor, state: dict[str, Any], lr: float) -> None:
    if "first" not in state:
        state.update(
            first=torch.ones_like(g), second=g.new_full(g.shape, 0.5), step=torch.tensor(0)
        )
    state["step"] += 1
    state["first"].lerp_(g, 0.1)
    state["second"].addcmul_(g, g)
    p.addcdiv_(state["first"], state["second"], value=-lr / 2)


def slow_weights(p: Tensor, g: Tensor, state: dict[str, Any], lr: float) -> None:
    """The values of the parameters before the first step are state."""
    if "slow" not in state:
        state["slow"] = p.clone()
    p.add_(g, alpha=-lr)
    state["slow"].lerp_(p, 0.5)
    p.copy_(state["slow"])


def slow_weights_late(p: Tensor, g: Tensor, state: dict[str, Any], lr: float) -> None:
    """The values after the first update are state."""
    p.add_(g, alpha=-lr)
    if "slow" not in state:
        state["slow"] = p.clone()
    p.copy_(state["slow"].lerp_(p, 0.5))


def a_flag(p: Tensor, g: Tensor, state: dict[str, Any], lr: float) -> None:
    if not state:
        state["average"], state["ready"] = torch.zeros_like(p), True
    p.add_(state["average"].lerp_(g, 0.3), alpha=-lr)


def first_gradient(p: Tensor, g: Tensor, state: dict[str, Any], lr: float) -> None:
    if "buffer" not in state:
        state["buffer"] = torch.clone(g).detach()
    else:
        state["buffer"].mul_(0.8).add_(g)
    p.add_(state["buffer"], alpha=-lr)


def first_gradient_damped(p: Tensor, g: Tensor, state: dict[str, Any], lr: float) -> None:
    if "buffer" not in state:
        state["buffer"] = g.clone()
    else:
        state["buffer"].mul_(0.8).add_(g, alpha=0.2)
    p.add_(state["buffer"], alpha=-lr)


def first_gradient_negative(p: Tensor, g: Tensor, state: dict[str, Any], lr: float) -> None:
    if "buffer" not in state:
        state["buffer"] = g.clone()
    else:
        state["buffer"].mul_(-0.5).add_(g)
    p.add_(state["buffer"], alpha=-lr)


def drawn(p: Tensor, g: Tensor, state: dict[str, Any], lr: float) -> None:
    if "noise" not in state:
        state["noise"] = torch.randn_like(p)
    p.add_(g + 0.01 * state["noise"].mul_(0.5), alpha=-lr)


def replaced(p: Tensor, g: Tensor, state: dict[str, Any], lr: float) -> None:
    """Each step gives the state another tensor."""
    average = state.get("average")
    state["average"] = g.clone() if average is None else 0.9 * average + g
    p.add_(state["average"], alpha=-lr)


def one_for_all(p: Tensor, g: Tensor, state: dict[str, Any], lr: float) -> None:
    """A state whose two entries are one tensor."""
    if not state:
        state["a"] = torch.zeros_like(p)
        state["b"] = state["a"]
    p.add_(state["a"].add_(g), alpha=-lr)
    state["b"].mul_(0.5)


def python_count(p: Tensor, g: Tensor, state: dict[str, Any], lr: float) -> None:
    state["step"] = state.get("step", 0) + 1
    p.add_(g, alpha=-lr / state["step"])


RULES = {
    rule.__name__: rule
    for rule in (
        *(momentum_of_zeros, several_at_once, slow_weights, slow_weights_late, a_flag),
        *(first_gradient, first_gradient_damped, first_gradient_negative, drawn),
    )
}
