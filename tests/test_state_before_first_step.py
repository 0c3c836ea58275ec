"""Optimizer state that is made before the first call is traced: one trace, eager's bits, and the
arguments that the state of fused optimizers depends on."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
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
from torch.optim.optimizer import register_optimizer_step_pre_hook

import graphopt
from gloo import Pool
from graphopt._compat.fresh_state import fresh_state
from graphopt.graph_utils import call_function_with_meta, find_nodes
from graphopt.ir.families import FUSED_OPTIMIZERS, STATE_NEEDS
from graphopt.ir.operators import is_fused_optimizer
from graphopt.verify import check_dependencies

trace_module = importlib.import_module("graphopt.tracing.trace")

Step = Callable[[nn.Module, Optimizer, Tensor], Any]

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "Adadelta": lambda p: Adadelta(p, lr=0.1),
    "Adafactor": lambda p: Adafactor(p, lr=0.1),
    "Adagrad": lambda p: Adagrad(p, lr=0.1),
    "Adagrad, fused": lambda p: Adagrad(p, lr=0.1, fused=True),
    "Adam": lambda p: Adam(p, lr=0.1),
    "Adam, amsgrad": lambda p: Adam(p, lr=0.1, amsgrad=True),
    "Adam, foreach": lambda p: Adam(p, lr=0.1, foreach=True),
    "AdamW, fused": lambda p: AdamW(p, lr=0.1, fused=True),
    "AdamW, rate as tensor": lambda p: AdamW(p, lr=torch.tensor(0.1)),
    "Adamax": lambda p: Adamax(p, lr=0.1),
    "ASGD": lambda p: ASGD(p, lr=0.1),
    "ASGD, rate as tensor": lambda p: ASGD(p, lr=torch.tensor(0.1)),
    "Muon": lambda p: Muon(p, lr=0.1),
    "NAdam": lambda p: NAdam(p, lr=0.1),
    "RAdam": lambda p: RAdam(p, lr=0.1),
    "RMSprop": lambda p: RMSprop(p, lr=0.1),
    "RMSprop, centered": lambda p: RMSprop(p, lr=0.1, momentum=0.9, centered=True),
    "Rprop": lambda p: Rprop(p, lr=0.1),
    "SGD": lambda p: SGD(p, lr=0.1),
    "SGD, fused": lambda p: SGD(p, lr=0.1, fused=True),
}

MOMENTA: dict[str, Callable[[Any], Optimizer]] = {
    "momentum": lambda p: SGD(p, lr=0.1, momentum=0.9),
    "foreach, negative": lambda p: SGD(p, lr=0.1, momentum=0.5, foreach=True, maximize=True),
    "fused, decayed": lambda p: SGD(p, lr=0.1, momentum=0.9, fused=True, weight_decay=0.1),
    "nesterov": lambda p: SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "rate as tensor": lambda p: SGD(p, lr=torch.tensor(0.1), momentum=0.9),
}


class Parts(nn.Module):
    """Layers of which the second is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.unused, self.last = nn.Linear(3, 4), nn.Linear(2, 2), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.first(x).relu())
        return out


def plain(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
    loss: Tensor = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def begins(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss: Tensor = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


def drops_between(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
    loss: Tensor = model(x).square().mean()
    model.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


def assigns_none(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
    for parameter in model.parameters():
        parameter.grad = None
    loss: Tensor = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


def looks_first(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
    """Gradients that it finds double the loss."""
    found = next(model.parameters()).grad is not None
    optimizer.zero_grad()
    return _stepped(model(x).square().mean() * (2 if found else 1), optimizer)


def drops_some(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
    """All but one accumulate."""
    next(model.parameters()).grad = None
    return _stepped(model(x).square().mean(), optimizer)


def zeroes(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
    optimizer.zero_grad(set_to_none=False)
    return _stepped(model(x).square().mean(), optimizer)


def returns_its_argument(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
    optimizer.zero_grad()
    _stepped(model(x).square().mean(), optimizer)
    return x


def _stepped(loss: Tensor, optimizer: Optimizer) -> Tensor:
    loss.backward()
    optimizer.step()
    return loss.detach()


def looks_at_length(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
    loss: Tensor = model(x).square().mean() * (1 + len(optimizer.state))
    return _finished(loss, optimizer)


def asks_for_parameter(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
    known = next(model.parameters()) in optimizer.state
    return _finished(model(x).square().mean() * (3 if known else 1), optimizer)


def saves_state(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
    first = not optimizer.state_dict()["state"]
    return _finished(model(x).square().mean() * (2 if first else 1), optimizer)


def copies_state(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
    first = not dict(optimizer.state)
    return _finished(model(x).square().mean() * (2 if first else 1), optimizer)


def _finished(loss: Tensor, optimizer: Optimizer) -> Tensor:
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """One entry for each time a step is traced."""
    found: list[None] = []
    attempt = trace_module._run_once

    def counted(*args: Any) -> Any:
        found.append(None)
        return attempt(*args)

    monkeypatch.setattr(trace_module, "_run_once", counted)
    return found


def assert_as_eager(step: Step, make: Callable[[Any], Optimizer], model: nn.Module) -> None:
    """Four calls, their results, parameters and state, bit for bit."""
    ours, theirs = model, copy.deepcopy(model)
    optimizers = [make(each.parameters()) for each in (ours, theirs)]
    captured = graphopt.compile(step)
    for number in range(4):
        x = torch.full((2, 3), 0.3 + number)
        assert torch.equal(captured(ours, optimizers[0], x), step(theirs, optimizers[1], x))
        captured.flush()
        _assert_same_state(*optimizers)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(a, b)


def _assert_same_state(ours: Optimizer, theirs: Optimizer) -> None:
    a, b = ours.state_dict()["state"], theirs.state_dict()["state"]
    assert a.keys() == b.keys()
    for index, entries in a.items():
        assert entries.keys() == b[index].keys()
        for key, value in entries.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(b[index][key])), key


def layers(bias: bool = True) -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4, bias=bias), nn.ReLU(), nn.Linear(4, 1, bias=bias))


@pytest.mark.parametrize("step", [plain, begins])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_one_trace(name: str, step: Step, traces: list[None]) -> None:
    assert_as_eager(step, OPTIMIZERS[name], layers(bias=name != "Muon"))
    assert len(traces) == 1


@pytest.mark.parametrize("name", MOMENTA)
def test_momenta_begin_as_gradients(name: str, traces: list[None]) -> None:
    assert_as_eager(plain, MOMENTA[name], layers())
    assert len(traces) == 1


def test_a_damped_momentum_begins_otherwise(traces: list[None]) -> None:
    assert_as_eager(plain, lambda p: SGD(p, lr=0.1, momentum=0.9, dampening=0.5), layers())
    assert len(traces) > 1


def test_momenta_that_lie_in_memory_as_gradients_do(traces: list[None]) -> None:
    def turned(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
        loss: Tensor = model(x).square().mean()
        loss.backward()
        model.weight.grad = model.weight.grad.t().contiguous().t()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    model = nn.Linear(3, 4)
    made = SGD(model.parameters(), lr=0.1, momentum=0.9)
    graphopt.compile(turned)(model, made, torch.ones(2, 3))
    assert made.state[model.weight]["momentum_buffer"].stride() == (1, 4)
    assert len(traces) > 1


SET: dict[str, tuple[Callable[[Any], Optimizer], Callable[[dict[str, Any], float], Any]]] = {
    "momentum": (MOMENTA["momentum"], lambda group, n: group.update(momentum=-group["momentum"])),
    "from no momentum": (OPTIMIZERS["SGD"], lambda group, n: group.update(momentum=0.9)),
    "dampening": (MOMENTA["momentum"], lambda group, n: group.update(dampening=0.5)),
    "to no momentum": (OPTIMIZERS["RMSprop, centered"], lambda group, n: group.update(momentum=0)),
    "not centered": (
        OPTIMIZERS["RMSprop, centered"],
        lambda group, n: group.update(centered=False),
    ),
    "no amsgrad": (OPTIMIZERS["Adam, amsgrad"], lambda group, n: group.update(amsgrad=False)),
    "amsgrad": (OPTIMIZERS["Adam"], lambda group, n: group.update(amsgrad=True)),
    "centered": (OPTIMIZERS["RMSprop"], lambda group, n: group.update(centered=True)),
    "a momentum": (OPTIMIZERS["RMSprop"], lambda group, n: group.update(momentum=0.9)),
    "fused": (OPTIMIZERS["Adam"], lambda group, n: group.update(fused=True)),
    "rate of Rprop": (OPTIMIZERS["Rprop"], lambda group, n: group.update(lr=0.3 * n)),
    "rate of ASGD": (OPTIMIZERS["ASGD"], lambda group, n: group.update(lr=0.3 * n)),
    "rate, multiplied": (OPTIMIZERS["ASGD"], lambda group, n: group.update(lr=group["lr"] * 0.5)),
    "rate as tensor": (OPTIMIZERS["ASGD, rate as tensor"], lambda group, n: group["lr"].mul_(0.5)),
}
"""Settings that the step changes before its first update, which makes the state after them."""


@pytest.mark.parametrize("name", SET)
def test_a_setting_that_the_step_changes_first(name: str, traces: list[None]) -> None:
    make, change = SET[name]

    def changing(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
        change(optimizer.param_groups[0], 1.0 + float(x[0, 0]))
        return plain(model, optimizer, x)

    assert_as_eager(changing, make, layers())
    assert len(traces) > 1


@pytest.mark.parametrize("of", ["one optimizer", "all optimizers"])
@pytest.mark.parametrize("name", ["SGD", "Adam"])
def test_hooks_that_look_at_the_state_find_none_in_the_first_call(name: str, of: str) -> None:
    def made(parameters: Any) -> Optimizer:
        return OPTIMIZERS[name](parameters) if name == "Adam" else MOMENTA["momentum"](parameters)

    def hooked(parameters: Any) -> Optimizer:
        optimizer = made(parameters)
        optimizer.register_step_pre_hook(_doubles_first_gradients)
        return optimizer

    if of == "one optimizer":
        assert_as_eager(plain, hooked, layers())
        return
    handle = register_optimizer_step_pre_hook(_doubles_first_gradients)
    try:
        assert_as_eager(plain, made, layers())
    finally:
        handle.remove()


def _doubles_first_gradients(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for parameter in optimizer.param_groups[0]["params"]:
        if not optimizer.state[parameter]:
            parameter.grad.mul_(2)


class Around(Optimizer):
    """An optimizer around another one, which does not call the constructor of its base."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer, self.state = optimizer, optimizer.state
        self.param_groups, self.defaults = optimizer.param_groups, optimizer.defaults

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()


@pytest.mark.parametrize("name", ["SGD", "Adam"])
def test_an_optimizer_without_the_attributes_of_its_base(name: str) -> None:
    assert_as_eager(plain, lambda parameters: Around(OPTIMIZERS[name](parameters)), layers())


def test_momenta_of_gradients_that_are_sparse() -> None:
    """The first one is sparse, as the gradient is, and so no sum of zeros."""

    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(5, 3, sparse=True)

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.words(x.long())
            return found

    model = Words()
    made = SGD(model.parameters(), lr=0.1, momentum=0.9)
    step = graphopt.compile(plain)
    try:
        step(model, made, torch.ones(2))
    except graphopt.CaptureError:
        return
    assert made.state[model.words.weight]["momentum_buffer"].is_sparse


@pytest.mark.parametrize("step", [begins, drops_between, assigns_none])
@pytest.mark.parametrize("name", ["Adam", "SGD"])
def test_gradients_dropped_unread_need_no_other_trace(
    name: str, step: Step, traces: list[None]
) -> None:
    assert_as_eager(step, OPTIMIZERS[name], layers())
    assert len(traces) == 1


def test_a_step_that_drops_gradients_may_return_its_argument(traces: list[None]) -> None:
    assert_as_eager(returns_its_argument, OPTIMIZERS["Adam"], layers())
    assert len(traces) == 1


@pytest.mark.parametrize("step", [looks_first, drops_some, zeroes])
def test_gradients_used_otherwise_are_traced(step: Step, traces: list[None]) -> None:
    assert_as_eager(step, OPTIMIZERS["Adam"], layers())
    assert len(traces) > 1


@pytest.mark.parametrize("make", [OPTIMIZERS["AdamW, fused"], MOMENTA["momentum"]])
def test_a_scheduler_is_told_of_the_step(
    make: Callable[[Any], Optimizer], traces: list[None]
) -> None:
    made: list[Optimizer] = []

    def scheduled(parameters: Any) -> Optimizer:
        made.append(make(parameters))
        torch.optim.lr_scheduler.StepLR(made[-1], 1)
        return made[-1]

    assert_as_eager(begins, scheduled, layers())
    assert len(traces) == 1
    assert [optimizer._opt_called for optimizer in made] == [True, True]  # type: ignore[attr-defined]


def test_parameters_that_are_not_updated_get_no_state(traces: list[None]) -> None:
    model = Parts()
    model.last.bias.requires_grad_(False)
    assert_as_eager(plain, OPTIMIZERS["Adam"], model)
    assert len(traces) == 1


def test_a_fused_optimizer_has_a_parameter_that_its_kernel_does_not_take() -> None:
    """Torch refuses it where it gets a gradient, and this one never does."""
    model = Parts()
    model.phase = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    assert_as_eager(plain, OPTIMIZERS["AdamW, fused"], model)


@pytest.mark.parametrize("step", [looks_at_length, asks_for_parameter, saves_state, copies_state])
def test_a_step_that_looks_at_state_finds_none_in_its_first_call(step: Step) -> None:
    assert_as_eager(step, OPTIMIZERS["Adam"], nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1)))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_fresh_state_is_that_of_a_first_step(name: str) -> None:
    """What is made for each optimizer is what its step begins with; nothing is left changed."""
    model = nn.Linear(3, 2, bias=name != "Muon")
    optimizer = OPTIMIZERS[name](model.parameters())
    before = dict(optimizer.state)
    attributes = dict(vars(optimizer))
    made = fresh_state(optimizer)
    assert optimizer.state == before
    assert vars(optimizer).keys() == attributes.keys()
    assert all(parameter.grad is None for parameter in model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert made.keys() == optimizer.state.keys() - before.keys()
    for parameter, entries in made.items():
        assert entries.keys() == optimizer.state[parameter].keys()


def _traces_of_rank(rank: int, name: str) -> tuple[int, list[Tensor]]:
    """Traces of a rank's first call, and the parameters after three."""
    counted, attempt = [0], trace_module._run_once

    def counting(*args: Any) -> Any:
        counted[0] += 1
        return attempt(*args)

    trace_module._run_once = counting
    try:
        torch.manual_seed(0)
        model = layers()
        optimizer = (OPTIMIZERS | MOMENTA)[name](model.parameters())
        step = graphopt.compile(begins)
        for number in range(3):
            step(model, optimizer, torch.full((2, 3), 0.3 + number + rank))
        step.flush()
    finally:
        trace_module._run_once = attempt
    return counted[0], [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize("name", ["Adam, foreach", "momentum"])
def test_one_trace_on_each_rank(two_ranks: Pool, name: str) -> None:
    (first, ours), (second, theirs) = two_ranks.run(_traces_of_rank, name)
    assert [first, second] == [1, 1]
    assert all(map(torch.equal, ours, theirs))


FLAGS = ("amsgrad", "maximize", "nesterov", "is_first_step")
SMALL = {
    "lr": 0.1,
    "beta1": 0.9,
    "beta2": 0.99,
    "momentum": 0.9,
    "eps": 1e-3,
    "lr_decay": 0.1,
    "dampening": 0.2,
}


def overloads(name: str) -> list[Any]:
    """The functional forms of a fused optimizer."""
    packet = getattr(torch.ops.aten, name)
    return [getattr(packet, each) for each in packet.overloads() if "out" not in each]


def settings(target: Any) -> Iterator[dict[str, Any]]:
    """All arguments of a fused optimizer, for each choice of flags, decay and scaler."""
    schema = target._schema.arguments
    flags = [a.name for a in schema if a.name in FLAGS]
    for decay, scaled, *chosen in product((0.1, 0.0), (False, True), *[(False, True)] * len(flags)):
        given = dict(zip(flags, chosen, strict=True))
        if given.get("nesterov"):
            given["dampening"] = 0.0  # torch allows no other
        if given.get("is_first_step"):
            given["dampening"] = 0.5
        generator = torch.Generator().manual_seed(0)
        made = {a.name: value(a, decay, scaled, generator) for a in schema if a.name not in given}
        if not given.get("amsgrad", True):
            made["max_exp_avg_sqs"] = []
        yield {**made, **given}


def value(argument: Any, decay: float, scaled: bool, generator: torch.Generator) -> Any:
    """A value for an argument by its name and type."""
    name, kind = argument.name, str(argument.type)
    if name == "state_steps":
        return [torch.tensor(3.0)]
    if kind.startswith("List[Tensor]"):
        return [torch.rand(5, generator=generator) + 0.1]
    if name == "grad_scale":
        return torch.tensor(4.0) if scaled else None
    if name == "found_inf":
        return torch.tensor(0.0) if scaled else None
    number = decay if name == "weight_decay" else SMALL[name]
    return torch.tensor(number) if kind == "Tensor" else number


def changed(name: str, given: Any) -> Any:
    """Another value of the same kind; None where there is none."""
    if name == "found_inf" and given is not None:
        return torch.tensor(1.0)
    if isinstance(given, bool) or given is None or given == []:
        return None
    if isinstance(given, list):
        return [tensor * 1.5 + 0.25 for tensor in given]
    return given * 0.5 + 0.25


def results(target: Any, arguments: dict[str, Any]) -> list[list[Tensor]]:
    return [list(found) for found in target(**copy.deepcopy(arguments))]


def measured(target: Any) -> dict[int, set[str]]:
    """By the position of a list of results, the arguments that change it, whatever the flags."""
    found: dict[int, set[str]] = {}
    for arguments in settings(target):
        before = results(target, arguments)
        for name, given in arguments.items():
            other = changed(name, given)
            if other is None:
                continue
            after = results(target, {**arguments, name: other})
            for position, (was, now) in enumerate(zip(before, after, strict=True)):
                if not all(map(torch.equal, was, now)):
                    found.setdefault(position, set()).add(name)
    return found


CASES = [(name, target) for name in FUSED_OPTIMIZERS for target in overloads(name)]


@pytest.mark.parametrize(("name", "target"), CASES, ids=[str(target) for _, target in CASES])
def test_state_depends_on_what_the_table_says(name: str, target: Any) -> None:
    found = measured(target)
    for position in range(1, len(found)):
        assert set(STATE_NEEDS[name][position]) == found[position]
    tensors = {a.name for a in target._schema.arguments if a.name not in FLAGS}
    assert found[0] == tensors


def test_each_fused_optimizer_has_a_row() -> None:
    assert STATE_NEEDS.keys() == FUSED_OPTIMIZERS.keys()
    for name, updated in FUSED_OPTIMIZERS.items():
        assert set(updated) - {0} <= STATE_NEEDS[name].keys()


# In graphs


FUSED = {
    "adam": (torch.optim.Adam, {"amsgrad": True, "weight_decay": 0.1}),
    "adamw": (torch.optim.AdamW, {"amsgrad": True, "weight_decay": 0.1}),
    "sgd": (torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.1}),
    "adagrad": (torch.optim.Adagrad, {"weight_decay": 0.1, "lr_decay": 0.1}),
}
STATE = {"momentum_buffer": 2, "sum": 2, "max_exp_avg_sq": 4, "exp_avg_sq": 3, "exp_avg": 2}


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def captured(kind: str) -> fx.GraphModule:
    make, options = FUSED[kind]
    model = nn.Linear(3, 2)
    optimizer = make(model.parameters(), lr=0.1, fused=True, **options)
    args = model, optimizer, torch.randn(4, 3)
    step(*args)
    return graphopt.capture(step, *args).graph_module


@pytest.mark.parametrize("kind", FUSED)
def test_a_lost_hyperparameter_is_missed_where_it_matters(kind: str) -> None:
    for argument in ("lr", "weight_decay"):
        before = captured(kind)
        after = copy.deepcopy(before)
        (update,) = find_nodes(after.graph, is_fused_optimizer)
        old = update.kwargs[argument]
        if not isinstance(old, fx.Node):
            continue  # a setting that is a constant of the graph
        constant: Any = 0.125
        if isinstance(old.meta["val"], Tensor):
            with after.graph.inserting_before(update):
                full, given = torch.ops.aten.full.default, {"dtype": torch.float64}
                constant = call_function_with_meta(after.graph, full, ([], 0.1), given, like=old)
        update.kwargs = {**update.kwargs, argument: constant}
        problems = check_dependencies(before, after).problems
        lost = {problem.nodes[0].args[0].name for problem in problems}
        rows = STATE_NEEDS[str(update.target).split(".")[1]]
        for placeholder in before.graph.find_nodes(op="placeholder"):
            state = next((s for s in STATE if placeholder.name.endswith(s)), None)
            if placeholder.name in ("weight", "bias"):
                assert placeholder.name in lost
            elif state is not None:
                assert (placeholder.name in lost) == (argument in rows[STATE[state]])
