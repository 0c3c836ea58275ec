"""Containers that a step makes of values that only Python computes, once the graph has run."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import graphopt

MAKERS: dict[str, Callable[[Any, Any], Any]] = {
    "pairs": lambda mean, top: OrderedDict([("mean", mean), ("top", f"{top:.3f}")]),
    "named": lambda mean, top: OrderedDict(mean=mean, top=top),
    "of a dictionary": lambda mean, top: OrderedDict({"mean": mean, "top": top}),
    "of what is sorted": lambda mean, top: OrderedDict(sorted({"top": top, "mean": mean}.items())),
    "with a default": lambda mean, top: defaultdict(list, {"mean": [mean], "top": [top]}),
    "queue": lambda mean, top: deque([mean, top, mean], maxlen=2),
    "item": lambda mean, top: OrderedDict([("mean", mean), ("top", top)])["top"],
    "lines": lambda mean, top: [
        f"{key}: {value:.4f}" for key, value in OrderedDict(mean=mean, top=top).items()
    ],
    "largest of a queue": lambda mean, top: max(deque([mean, top])),
}


def _run(compiled: bool, make: Callable[[Any, Any], Any], outside: bool) -> list[Any]:
    torch.manual_seed(0)
    net, kept = nn.Linear(3, 2), []

    def step(x: Tensor) -> Any:
        array = net(x).square().detach().numpy()
        found = make(np.mean(array), array.max().item())
        if outside:
            kept.append(found)
            return None
        return found

    called = graphopt.compile(step) if compiled else step
    returned = [called(torch.randn(2, 3)) for _ in range(3)]
    return [(type(each), repr(each)) for each in (*returned, *kept)]


@pytest.mark.parametrize("outside", [False, True])
@pytest.mark.parametrize("name", MAKERS)
def test_containers_are_made_in_each_call(name: str, outside: bool) -> None:
    eager = _run(False, MAKERS[name], outside)
    assert len(set(eager)) > 2
    assert _run(True, MAKERS[name], outside) == eager


def test_a_container_of_a_list_that_grows_is_refused() -> None:
    net, losses = nn.Linear(3, 2), list[float]()

    @graphopt.compile
    def step(x: Tensor) -> Any:
        losses.append(net(x).sum().item())
        return deque(losses, maxlen=3)

    with pytest.raises(graphopt.CaptureError, match="reads all of losses in a way"):
        step(torch.randn(2, 3))
