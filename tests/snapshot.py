"""A record of everything that a refused step must leave as it was."""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy
import torch
from torch import nn
from torch.optim import Optimizer

from twins import assert_same


class Snapshot:
    """Values, identities, hooks, attributes and random states at the time it is made."""

    def __init__(self, models: list[nn.Module], optimizers: list[Optimizer]) -> None:
        self._modules = [module for model in models for module in model.modules()]
        self._parameters = [p for model in models for p in model.parameters()]
        self._optimizers = optimizers
        self._identities, self._values = self._identity(), copy.deepcopy(self._value())

    def assert_unchanged(self) -> None:
        assert self._identity() == self._identities
        assert_same(self._value(), self._values, "after the error")

    def _identity(self) -> dict[str, Any]:
        """Which objects stand where: no tensor, hook, attribute or class was exchanged."""
        return {
            "modules": [(type(m), _entries(vars(m))) for m in self._modules],
            "parameters": [
                (type(p), id(p.grad), p._version, _entries(vars(p)), _hooks(p))
                for p in self._parameters
            ],
            "optimizers": [(type(o), _entries(vars(o))) for o in self._optimizers],
            "groups": [[_entries(group) for group in o.param_groups] for o in self._optimizers],
            "state": [
                [(id(p), _entries(state)) for p, state in o.state.items()] for o in self._optimizers
            ],
            "modes": (torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")),
        }

    def _value(self) -> dict[str, Any]:
        state = numpy.random.get_state(legacy=False)
        return {
            "parameters": [(p.detach(), p.requires_grad, p.grad) for p in self._parameters],
            "buffers": [dict(m.named_buffers(recurse=False)) for m in self._modules],
            "attributes": [[v for v in vars(m).values() if _plain(v)] for m in self._modules],
            "optimizers": [optimizer.state_dict() for optimizer in self._optimizers],
            "torch": torch.get_rng_state(),
            "random": random.getstate(),
            "numpy": [state["state"]["pos"], state["state"]["key"].tolist()],
        }


def _entries(table: dict[Any, Any]) -> list[Any]:
    """Keys in order, with the identity of each value and, one level down, of its entries."""
    return [
        (key, id(value), [(k, id(v)) for k, v in value.items()] if isinstance(value, dict) else [])
        for key, value in table.items()
        if not _plain(value)
    ] + list(table)


def _plain(value: Any) -> bool:
    return isinstance(value, (bool, int, float, str, type(None)))


def _hooks(parameter: nn.Parameter) -> list[list[int]]:
    tables = (parameter._backward_hooks, parameter._post_accumulate_grad_hooks)
    return [list(table or {}) for table in tables]
