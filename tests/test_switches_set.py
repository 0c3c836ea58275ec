"""A step that sets switches of parameter groups: constants that are no numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphopt

Setter = Callable[[dict[str, Any], int], Any]


def _schedule(group: dict[str, Any], index: int) -> None:
    """As SHOT's `lr_scheduler`, and many that follow it."""
    group["lr"] = 0.1 * (1 + index) ** -0.75
    group["weight_decay"] = 1e-3
    group["momentum"] = 0.9
    group["nesterov"] = True


SETTERS: dict[str, Setter] = {
    "schedule": _schedule,
    "by a number": lambda group, index: group.update(nesterov=index > 1, momentum=0.9),
    "to and fro": lambda group, index: group.update(maximize=not group["maximize"]),
    "a new one": lambda group, index: group.setdefault("frozen", True),
    "a new None": lambda group, index: group.update(extra=None),
    "None for a number": lambda group, index: group.update(extra=index if index < 2 else None),
    "there and back": lambda group, index: [group.update(maximize=b) for b in (True, False)],
    "a number for None": lambda group, index: group.update(extra=None if index < 2 else index),
    "a number for a switch": lambda group, index: group.update(nesterov=0),
}  # fmt: skip


def _run(compiled: bool, setter: Setter, **there: Any) -> list[Any]:
    torch.manual_seed(0)
    net = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    optimizer.param_groups[0].update(there)

    def step(x: Tensor, index: int) -> Any:
        for group in optimizer.param_groups:
            setter(group, index)
        optimizer.zero_grad()
        net(x).square().sum().backward()
        optimizer.step()
        return optimizer.param_groups[0].get("extra", "nothing")

    called = graphopt.compile(step) if compiled else step
    results = []
    for index in range(5):
        found = called(torch.randn(2, 3), index)
        group = {k: v for k, v in optimizer.param_groups[0].items() if k != "params"}
        results.append((found, group, net.weight.tolist()))
    return results


@pytest.mark.parametrize("name", SETTERS)
def test_switches_are_set_in_each_call(name: str) -> None:
    assert _run(True, SETTERS[name]) == _run(False, SETTERS[name])


@pytest.mark.parametrize("value", ["text", torch.tensor(True)])
def test_other_settings_are_refused(value: Any) -> None:
    with pytest.raises(graphopt.CaptureError, match="changes 'extra' of an optimizer's"):
        _run(True, lambda group, index: group.update(extra=value))


def test_taking_a_setting_away_is_refused() -> None:
    def take_away(group: dict[str, Any], index: int) -> None:
        del group["extra"]

    with pytest.raises(graphopt.CaptureError, match="changes 'extra' of an optimizer's"):
        _run(True, take_away, extra=1)
