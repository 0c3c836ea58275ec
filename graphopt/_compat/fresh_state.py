"""The state that torch's optimizers create in their first step."""

from __future__ import annotations

import inspect
import math
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch.optim import (
    ASGD,
    SGD,
    Adadelta,
    Adafactor,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    Muon,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
    Rprop,
)
from torch.optim import optimizer as optimizers
from torch.optim.optimizer import _device_dtype_check_for_fused

_OF_PARAMETERS = frozenset({Adadelta, Adagrad, Adam, AdamW, Adamax, ASGD, NAdam, RAdam, RMSprop})
_LIKE_GRADIENTS = frozenset({Adafactor, Muon, Rprop})
"""Whose steps make the state of all parameters that have gradients and none yet, from nothing but
the kinds of parameters or of their gradients and the settings, and then go on as every later step
does."""


_TO_LOOK = "_need_device_dtype_check_for_fused"


def makes_state_first(optimizer: Optimizer) -> bool:
    """True if the state of one of torch's own optimizers can be made before its first step."""
    kind = type(optimizer)
    names = ("_init_group", "__setattr__", "__getattribute__")
    if any(name in vars(optimizer) for name in names) or not _steps_as_its_class(optimizer):
        return False
    if not _have_known_kinds(optimizer):
        return False
    if any(group.get("differentiable") for group in optimizer.param_groups):
        return False
    if kind in _LIKE_GRADIENTS:  # gradients lie in memory as these parameters do
        known = all(map(_is_dense, _parameters(optimizer)))
    else:
        known = kind in _OF_PARAMETERS or (
            kind is SGD and all(map(_begins, optimizer.param_groups))
        )
    return known and not any(_hooks_around(optimizer))  # hooks may look at it


def _hooks_around(optimizer: Optimizer) -> tuple[Any, ...]:
    """The tables of hooks on an optimizer's steps: its own, and those of all optimizers."""
    own = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    return *own, optimizers._global_optimizer_pre_hooks, optimizers._global_optimizer_post_hooks


def fresh_state(optimizer: Optimizer) -> dict[torch.Tensor, dict[str, Any]]:
    """The state that an optimizer's first step would create for parameters that have none, without
    creating it."""
    if type(optimizer) is SGD:
        return _momenta(optimizer)
    attributes, known = dict(vars(optimizer)), optimizer.state
    lent: list[torch.Tensor] = []
    state: defaultdict[torch.Tensor, dict[str, Any]] = defaultdict(dict)
    try:
        vars(optimizer)["state"] = state
        for group in optimizer.param_groups:
            parameters = [p for p in group["params"] if p.requires_grad and p not in known]
            for parameter in parameters:
                if parameter.grad is None:  # whether there is one, of which kind, is all it asks
                    lent.append(parameter)
                    parameter.grad = parameter.detach()
            _make(optimizer, {**group, "params": parameters})
    finally:
        for parameter in lent:
            parameter.grad = None
        vars(optimizer).clear()
        vars(optimizer).update(attributes)
    return dict(state)


def attributes_after(optimizer: Optimizer) -> dict[str, Any]:
    """The attributes that the first step of one of torch's optimizers changes, with their new
    values, such as the mark that it has stepped."""
    after = {"_opt_called": True} if "step" in vars(optimizer) else {}
    if vars(optimizer).get(_TO_LOOK) and all(g["fused"] for g in optimizer.param_groups):
        after[_TO_LOOK] = False
    return {name: value for name, value in after.items() if vars(optimizer).get(name) != value}


def takes_negative_zeros(dtype: torch.dtype) -> bool:
    """True if adding a number to negative zero gives the number, bit for bit."""
    kinds = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
    return dtype in kinds and bool(torch.full((16,), 1e-40, device="cpu").add(0.0).all())


def _make(optimizer: Any, group: dict[str, Any]) -> None:
    """Collects an optimizer's parameters and creates their state, as the start of its step does."""
    make = type(optimizer)._init_group
    lists: list[list[Any]] = [[] for _ in list(inspect.signature(make).parameters)[2:]]
    with torch.no_grad():
        make(optimizer, group, *lists)


def _steps_as_its_class(optimizer: Optimizer) -> bool:
    """True if an optimizer has no step of its own but that which a scheduler notes."""
    own = vars(optimizer).get("step")
    noted = getattr(own, "_wrapped_by_lr_sched", False)
    return own is None or (noted and getattr(own, "__wrapped__", None) is type(optimizer).step)


def _have_known_kinds(optimizer: Optimizer) -> bool:
    """True unless a first step refuses parameters of a kind that no fused kernel takes."""
    try:
        if vars(optimizer).get(_TO_LOOK) or any(g.get("fused") for g in optimizer.param_groups):
            for parameter in _parameters(optimizer):
                _device_dtype_check_for_fused(parameter)
    except RuntimeError:
        return False
    return True


def _begins(group: dict[str, Any]) -> bool:
    """True if the momentum of a group of `SGD` begins as the gradient that comes first, to which
    later steps add all of the next one."""
    momentum, dampening = group["momentum"], group["dampening"]
    numbers = type(momentum) in (int, float) and type(dampening) in (int, float)
    return numbers and (momentum == 0 or (dampening == 0 and 0 < momentum < math.inf))


def _momenta(optimizer: Optimizer) -> dict[torch.Tensor, dict[str, Any]]:
    """The momentum of each parameter of `SGD`: negative zeros, to which the first step adds the
    gradient."""
    return {
        parameter: {"momentum_buffer": torch.full_like(parameter.detach(), -0.0)}
        for group in optimizer.param_groups
        for parameter in group["params"]
        if group["momentum"] and parameter.requires_grad
        if parameter not in optimizer.state and takes_negative_zeros(parameter.dtype)
    }


def _parameters(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _is_dense(parameter: torch.Tensor) -> bool:
    """True if the elements of a tensor lie next to each other, each at a place of its own."""
    like = torch.empty_like(parameter.detach(), device="meta")
    return like.stride() == parameter.stride()
