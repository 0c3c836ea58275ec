"""Late work runs in the modes of a step, whatever modes the one who flushes is in."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, in_kernel_invocation_manager
from torch.optim import Optimizer

import graphopt
from graphopt.graph_utils import find_nodes
from graphopt.iter_graph import IterGraphModule

MODES: list[tuple[bool, ...]] = []


@torch.library.custom_op("graphopt_tests::seen_modes", mutates_args=())
def seen_modes(value: Tensor) -> Tensor:
    """A copy; notes in which modes it is made."""
    modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    MODES.append((*modes, torch.is_autocast_enabled("cpu")))
    return value.clone()


@seen_modes.register_fake
def _(value: Tensor) -> Tensor:
    return torch.empty_like(value)


class Noting(Optimizer):
    """Gradient descent whose updates note in which modes they run."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.sub_(0.1 * seen_modes(parameter.grad))


@graphopt.graph_optimization_pass()
def run_what_notes_modes_late(gm: IterGraphModule) -> None:
    """Run what notes its modes, and what depends on it, in the next iteration."""
    noting = find_nodes(gm.graph, lambda n: n.target is torch.ops.graphopt_tests.seen_modes.default)
    late = list(noting)
    for node in late:
        late += [user for user in node.users if user.op != "output" and user not in late]
    gm.graph.move_to_next_iter_before(late, None)


def train_step(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
    loss = model(x).square().sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def inside_an_operator_on_fake_tensors() -> AbstractContextManager[None]:
    """Where garbage may be collected, and a step in flight with it."""
    return in_kernel_invocation_manager(FakeTensorMode())


@pytest.mark.parametrize(
    "mode",
    [
        torch.no_grad,
        torch.enable_grad,
        torch.inference_mode,
        partial(torch.autocast, "cpu", torch.bfloat16),
        FakeTensorMode,
        inside_an_operator_on_fake_tensors,
    ],
)
def test_late_work_is_done_in_the_modes_of_a_step(
    mode: Callable[[], AbstractContextManager[Any]],
) -> None:
    model = nn.Linear(3, 2)
    start = copy.deepcopy(model.state_dict())
    optimizer = Noting(model.parameters())
    step = graphopt.compile(train_step, pipeline=[run_what_notes_modes_late])
    step(model, optimizer, torch.ones(4, 3))
    assert step.graph_module.in_flight
    MODES.clear()
    with mode():
        step.flush()
    assert MODES == [(False, False, False)] * 2
    eager = nn.Linear(3, 2)
    eager.load_state_dict(start)
    train_step(eager, Noting(eager.parameters()), torch.ones(4, 3))
    assert all(map(torch.equal, model.parameters(), eager.parameters()))
