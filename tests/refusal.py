"""How the tests see that a step is refused with a useful error and leaves everything as it was."""

from __future__ import annotations

import copy
import inspect
import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import Optimizer

import graphopt
from twins import World, assert_same, world
from zoo import MODELS, train_step

CASE = MODELS["mlp"]


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


def marked_lines(function: Callable[..., Any]) -> list[int]:
    """The lines of `function` that end in `# HERE`, or all of them."""
    source, first = inspect.getsourcelines(function)
    marked = [first + i for i, text in enumerate(source) if text.rstrip().endswith("# HERE")]
    return marked or list(range(first, first + len(source)))


def refused(
    step: Callable[..., Any],
    w: World,
    *args: Any,
    lines_of: Callable[..., Any] | None = None,
    batch: tuple[Any, ...] | None = None,
) -> graphopt.GraphOptError:
    """Call the compiled step, and return its error once location, hint and state are checked."""
    snapshot = Snapshot(w.models, w.optimizers)
    compiled = graphopt.compile(step, pipeline="none")
    with pytest.raises(graphopt.CaptureError) as caught:
        compiled(*w.models, *w.optimizers, *(CASE.batch(0) if batch is None else batch), *args)
    snapshot.assert_unchanged()
    assert len(compiled.captures) == 0
    text = str(caught.value)
    lines = marked_lines(lines_of or step)
    file = inspect.getsourcefile(lines_of or step)
    assert any(f"{file}:{line}" in text for line in lines), f"{lines} not in {text}"
    assert "hint:" in text
    return caught.value


def fresh(step: Callable[..., Any] = train_step) -> World:
    """A world in the middle of training: optimizer state and gradients exist."""
    torch.manual_seed(0)
    w = world(step)
    for i in range(2):
        train_step(w.model, w.optimizer, *CASE.batch(i))
    F.cross_entropy(w.model(CASE.batch(0)[0]), CASE.batch(0)[1]).backward()
    return w
