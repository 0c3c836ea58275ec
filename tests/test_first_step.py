"""The first call of a step with an optimizer of torch's runs the graph of the later ones: the
state that it finds is made beforehand, and seen when the step has succeeded. With other optimizers
the step that makes their state has a graph of its own."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

import graphopt
from first_step_cases import RULES, Rule, one_for_all, python_count, replaced
from gloo import Pool
from refusal import Snapshot
from twins import SEED, Twins, World, world
from zoo import MODELS, train_step

CASE = MODELS["mlp"]


def zeroed_first(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    return loss


def by_rule(rule: Callable[..., None]) -> Callable[[], World]:
    def build() -> World:
        model = CASE.make()
        return World(train_step, [model], [Rule(model.parameters(), rule)])

    return build


def trained(build: Callable[[], World], steps: int = 3, **options: Any) -> Twins:
    twins = Twins(build, **options)
    for i in range(steps):
        twins.step(*CASE.batch(i))
        assert_same_order(twins)
    return twins


def assert_same_order(twins: Twins) -> None:
    """State is made for the parameters in eager's order, with eager's keys and strides."""
    described = [
        [
            [
                (key, value.stride() if isinstance(value, Tensor) else value)
                for key, value in entries.items()
            ]
            for entries in w.optimizer.state.values()
        ]
        for w in (twins.captured, twins.eager)
    ]
    assert described[0] == described[1]


@pytest.mark.parametrize(
    "optimizer", ["adamw-loop", "adamw-fused", "sgd-momentum-foreach", "nadam-loop"]
)
def test_one_capture(optimizer: str) -> None:
    trained(lambda: world(optimizer=optimizer)).finish(captures=1)


@pytest.mark.parametrize("rule", RULES.values(), ids=lambda rule: rule.__name__)
def test_a_first_step_that_makes_state_is_captured_for_itself(rule: Callable[..., None]) -> None:
    trained(by_rule(rule)).finish(captures=2)


@pytest.mark.parametrize("rule", [one_for_all, replaced], ids=lambda rule: rule.__name__)
def test_other_state_is_as_in_eager_code(rule: Callable[..., None]) -> None:
    with suppress(graphopt.CaptureError):
        trained(by_rule(rule))


def test_signs_of_zeros_in_a_first_momentum() -> None:
    """A gradient of negative zeros is the first momentum, bit for bit."""

    def step(model: nn.Module, optimizer: Optimizer, x: Tensor) -> None:
        (model.weight * x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    momenta = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        x = torch.tensor([[-0.0, 0.0, 1e-42, -1.0]])
        (graphopt.compile(step) if compiled else step)(model, optimizer, x)
        momenta.append(optimizer.state[model.weight]["momentum_buffer"].view(torch.int32))
    assert torch.equal(*momenta)


@pytest.mark.parametrize("optimizer", ["adamw-foreach", "sgd-foreach", "sgd-momentum-loop"])
def test_a_step_that_begins_with_zero_grad_is_captured_once(optimizer: str) -> None:
    trained(lambda: world(zeroed_first, optimizer=optimizer)).finish(captures=1)


def test_gradients_kept_by_zeroing_them_are_another_step() -> None:
    def step(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad(set_to_none=False)
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    trained(lambda: world(step)).finish(captures=2)


def test_parameters_that_are_unfrozen_later_get_their_state() -> None:
    def build() -> World:
        w = world(optimizer="adamw-loop")
        w.model.head.requires_grad_(False)
        return w

    twins = trained(build)
    twins.both(lambda w: w.model.head.requires_grad_(True) and None)
    for i in range(3):
        twins.step(*CASE.batch(i))
        assert_same_order(twins)
    twins.finish(captures=2)


def test_a_refused_capture_leaves_no_state() -> None:
    """What the second call would be refused for, the first one is, before it changes anything."""
    torch.manual_seed(0)
    w = by_rule(python_count)()
    before = Snapshot(w.models, w.optimizers)

    def step(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
        loss = train_step(model, optimizer, x, y)
        max([loss.detach()], key=float)
        return loss

    with pytest.raises(graphopt.CaptureError, match="value of a tensor"):
        graphopt.compile(step)(w.model, w.optimizer, *CASE.batch(0))
    before.assert_unchanged()
    assert not w.optimizer.state


def test_an_exception_in_the_first_step_leaves_no_state() -> None:
    seen: list[int] = []

    def step(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        graphopt.callback(look, loss)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    torch.manual_seed(0)
    w = world(step)
    torch.manual_seed(0)
    twin = world()

    def look(loss: Tensor) -> None:
        seen.append(len(w.optimizer.state))
        if len(seen) == 1:
            raise ValueError("not now")

    compiled = graphopt.compile(step)
    with pytest.raises(ValueError, match="not now"):
        compiled(w.model, w.optimizer, *CASE.batch(0))
    assert not w.optimizer.state
    for i in range(2):
        compiled(w.model, w.optimizer, *CASE.batch(i))
        train_step(twin.model, twin.optimizer, *CASE.batch(i))
    compiled.flush()
    assert seen[:2] == [0, 0]
    for mine, theirs in zip(w.model.parameters(), twin.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("toggles", [False, True])
def test_attributes_that_the_first_step_sets(toggles: bool) -> None:
    """An attribute set once is set by the first call; one that changes in every call is refused or
    followed, but never wrong."""

    class Flagged(torch.optim.SGD):
        ready = False

        def step(self, closure: Any = None) -> None:
            super().step()
            self.ready = not self.ready if toggles else True

    def build() -> World:
        model = CASE.make()
        return World(train_step, [model], [Flagged(model.parameters(), lr=0.1)])

    twins = Twins(build)
    for i in range(4):
        twins.step(*CASE.batch(i))
        assert twins.captured.optimizer.ready == twins.eager.optimizer.ready
    assert toggles or len(twins.compiled.captures) == 2


def test_passes_meet_the_steady_step_at_once() -> None:
    """An explicit pass that needs the optimizer's state among the inputs."""
    w = world(optimizer="adamw-fused")
    compiled = graphopt.compile(train_step)
    compiled(w.model, w.optimizer, *CASE.batch(0))
    (captured,) = compiled.captures
    assert any(spec.kind == "optimizer_state" for spec in captured.inputs)
    assert captured.state is None


def _train(rank: int, optimizer: str) -> int:
    twins = Twins(
        lambda: world(optimizer=optimizer), ddp=True, seed=SEED + rank, pipeline="default"
    )
    for i in range(4):
        twins.step_unseen(*CASE.batch(10 * rank + i))
    twins.finish()
    return len(twins.compiled.captures)


@pytest.mark.parametrize("optimizer", ["adamw-loop", "sgd-momentum-foreach"])
def test_one_capture_on_several_ranks(two_ranks: Pool, optimizer: str) -> None:
    assert two_ranks.run(_train, optimizer) == [1, 1]


def _slow_weights(rank: int) -> int:
    """State made of parameters, which all ranks get from rank 0 in the first call."""
    twins = Twins(by_rule(RULES["slow_weights"]), ddp=True, seed=SEED + rank)
    for i in range(3):
        twins.step(*CASE.batch(10 * rank + i))
    twins.finish()
    return len(twins.compiled.captures)


def test_state_made_of_parameters_on_several_ranks(two_ranks: Pool) -> None:
    assert two_ranks.run(_slow_weights) == [2, 2]


def _refused_on_one(rank: int) -> int:
    torch.manual_seed(rank)
    w = by_rule(RULES["a_flag"])()

    def step(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
        loss = train_step(model, optimizer, x, y)
        if rank:
            max([loss.detach()], key=float)
        return loss

    compiled = graphopt.compile(step)
    with pytest.raises(graphopt.GraphOptError):
        compiled(w.model, w.optimizer, *CASE.batch(0))
    return len(w.optimizer.state)


def test_a_capture_refused_on_one_rank_leaves_no_state_on_any(two_ranks: Pool) -> None:
    assert two_ranks.run(_refused_on_one) == [0, 0]


def _gradients_given(step: Callable[..., Any], between: Callable[..., None]) -> int:
    """Calls between which the program gives parameters gradients, or takes them away, compared with
    eager ones. Returns how often the step was captured."""
    captured = graphopt.compile(step)
    worlds = []
    for run in (step, captured):
        torch.manual_seed(0)
        model = nn.ModuleDict({"used": nn.Linear(3, 2), "unused": nn.Linear(2, 2)})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        left = []
        for number in range(5):
            between(number, model)
            result = run(model, optimizer, torch.full((2, 3), 0.5 + number))
            left.append([result.clone(), *(p.detach().clone() for p in model.parameters())])
            left[-1] += [g.clone() for p in model.parameters() if (g := p.grad) is not None]
        worlds.append(left)
    for ours, theirs in zip(*worlds, strict=True):
        assert len(ours) == len(theirs)
        assert all(map(torch.equal, ours, theirs))
    return len(captured.captures)


def _given_now_and_then(number: int, model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 7.0) if number % 2 else None


def _dropping(model: Any, optimizer: Optimizer, x: Tensor) -> Tensor:
    optimizer.zero_grad()
    return _rest(model, optimizer, x)


def _dropping_one_by_one(model: Any, optimizer: Optimizer, x: Tensor) -> Tensor:
    for parameter in model.parameters():
        parameter.grad = None
    return _rest(model, optimizer, x)


def _dropping_late(model: Any, optimizer: Optimizer, x: Tensor) -> Tensor:
    model["used"](x).sum().backward()
    model.zero_grad()
    return _rest(model, optimizer, x)


def _dropping_and_deciding(model: Any, optimizer: Optimizer, x: Tensor) -> Tensor:
    optimizer.zero_grad()
    if model["used"](x).sum() > 1e6:
        return x.sum()
    return _rest(model, optimizer, x)


def _looking(model: Any, optimizer: Optimizer, x: Tensor) -> Tensor:
    before = sum(p.grad.sum() for p in model.parameters() if p.grad is not None)
    optimizer.zero_grad()
    return _rest(model, optimizer, x) + before


def _zeroing(model: Any, optimizer: Optimizer, x: Tensor) -> Tensor:
    optimizer.zero_grad(set_to_none=False)
    return _rest(model, optimizer, x)


def _rest(model: Any, optimizer: Optimizer, x: Tensor) -> Tensor:
    loss: Tensor = model["used"](x).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


@pytest.mark.parametrize(
    "step", [_dropping, _dropping_one_by_one, _dropping_late, _dropping_and_deciding]
)
def test_gradients_that_a_step_drops_may_be_there_or_not(step: Callable[..., Any]) -> None:
    assert _gradients_given(step, _given_now_and_then) == 1


@pytest.mark.parametrize("step", [_looking, _zeroing])
def test_gradients_that_a_step_looks_at_are_guarded(step: Callable[..., Any]) -> None:
    assert _gradients_given(step, _given_now_and_then) > 1
