"""The state that torch's optimizers create in their first step."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Container
from typing import Any

import torch
from torch.optim import SGD, Adadelta, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop

_MAKE_IT_FIRST = frozenset({Adadelta, Adam, Adamax, AdamW, NAdam, RAdam, RMSprop})
"""Whose steps make the state of all parameters that have gradients and none yet, from nothing but
their kinds, and then go on as every later step does."""


def makes_state_first(optimizer: Optimizer) -> bool:
    """True if an optimizer is one of torch's own with known state, or has no state."""
    kind = type(optimizer)
    if kind is SGD:
        return not any(group["momentum"] for group in optimizer.param_groups)
    names = ("step", "_init_group", "__setattr__", "__getattribute__")
    if kind not in _MAKE_IT_FIRST or any(name in vars(optimizer) for name in names):
        return False
    return not any(group.get("differentiable") for group in optimizer.param_groups)


def fresh_state(
    optimizer: Optimizer, without: Container[int] = ()
) -> dict[torch.Tensor, dict[str, Any]]:
    """The state that an optimizer's first step would create, without creating it.

    Args:
        without: ids of parameters that the step leaves alone.
    """
    if type(optimizer) is SGD:
        return {}
    attributes, known = dict(vars(optimizer)), optimizer.state
    lent: list[torch.Tensor] = []
    state: defaultdict[torch.Tensor, dict[str, Any]] = defaultdict(dict)
    try:
        vars(optimizer)["state"] = state
        for group in optimizer.param_groups:
            parameters = [p for p in group["params"] if p.requires_grad and p not in known]
            parameters = [p for p in parameters if id(p) not in without]
            for parameter in parameters:
                if parameter.grad is None:  # whether there is one is all that is asked
                    lent.append(parameter)
                    parameter.grad = parameter.detach()
            _make(optimizer, {**group, "params": parameters})
    finally:
        for parameter in lent:
            parameter.grad = None
        vars(optimizer).clear()
        vars(optimizer).update(attributes)
    return dict(state)


def _make(optimizer: Any, group: dict[str, Any]) -> None:
    """Collects an optimizer's parameters and creates their state, as the start of its step does."""
    make = type(optimizer)._init_group
    lists: list[list[Any]] = [[] for _ in list(inspect.signature(make).parameters)[2:]]
    with torch.no_grad():
        make(optimizer, group, *lists)
