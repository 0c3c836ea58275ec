"""Hooks on parameters of compiled stages, which read the gradient that microbatches add up."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product

import pytest
import torch
from torch import Tensor, nn

from graphopt.errors import GraphOptError
from graphopt.pipelining import StageCompileError
from sketch import one_rank
from stage_cases import Training, problem, train
from twins import assert_same

Hook = Callable[[Tensor], object]


@pytest.fixture(scope="module", autouse=True)
def _one_rank() -> Iterator[None]:
    with one_rank():
        yield


def sum_of(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def reads_itself_and_more(p: Tensor) -> None:
    scaled = sum_of(p) * 0.5
    sum_of(p).copy_(scaled.tanh() + scaled * sum_of(p).abs())


def leaves_a_mean(p: Tensor) -> None:
    sum_of(p).add_(p.detach() * 0.1).sub_(sum_of(p).mean())


AFTER_SUM: dict[str, Hook] = {
    "once": lambda p: sum_of(p).mul_(0.5),
    "twice": lambda p: sum_of(p).mul_(sum_of(p).sigmoid()),
    "by its norm": lambda p: sum_of(p).div_(sum_of(p).norm() + 1),
    "three times": reads_itself_and_more,
    "with the parameter": leaves_a_mean,
    "with numbers of its own": lambda p: sum_of(p).add_(torch.ones(p.shape), alpha=0.01),
}
OF_ONE: dict[str, Callable[[Tensor], Tensor]] = {
    "of one": lambda g: g * 0.5,
    "of one, twice": lambda g: g * g.sigmoid(),
}


def hooked(hook: str, schedule: str, compiled: bool) -> Training:
    training = Training(problem("mlp"), schedule)
    for stage in training.stages:
        for parameter in stage.submod.parameters():
            _hook(parameter, hook)
        if compiled:
            stage.compile()
    return training


def _hook(parameter: nn.Parameter, hook: str) -> None:
    if hook in OF_ONE:
        parameter.register_hook(OF_ONE[hook])
    else:
        parameter.register_post_accumulate_grad_hook(partial(_run, AFTER_SUM[hook]))


def _run(hook: Hook, parameter: Tensor) -> None:
    hook(parameter)  # torch refuses hooks that return something


WAYS = [
    *((hook, "interleaved") for hook in ("twice", "by its norm", "once", *list(AFTER_SUM)[3:])),
    *product(OF_ONE, ("zero bubble", "interleaved")),
]


@pytest.mark.parametrize(("hook", "schedule"), WAYS)
def test_a_hook_is_that_of_eager(hook: str, schedule: str) -> None:
    eager, compiled = (hooked(hook, schedule, way) for way in (False, True))
    assert_same(train(compiled), train(eager), hook)


def test_a_hook_that_torch_does_not_call_is_refused() -> None:
    with pytest.raises(StageCompileError, match="torch does not call"):
        hooked("once", "zero bubble", compiled=True).step()


@pytest.mark.parametrize("verify", ["equivalence", "off"])
def test_a_hook_that_draws_is_refused(verify: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHOPT_VERIFY", verify)
    monkeypatch.setitem(AFTER_SUM, "noise", lambda p: sum_of(p).add_(torch.randn_like(p.grad)))
    with pytest.raises(GraphOptError, match=r"a hook on .* draws random numbers"):
        hooked("noise", "interleaved", compiled=True).step()
