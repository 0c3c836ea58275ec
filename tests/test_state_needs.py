"""State of fused optimizers depends on those arguments that the table says, and on no others."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import graphopt
from graphopt.graph_utils import call_function_with_meta, find_nodes
from graphopt.ir.families import FUSED_OPTIMIZERS, STATE_NEEDS
from graphopt.ir.operators import is_fused_optimizer
from graphopt.verify import check_dependencies

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


OPTIMIZERS = {
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
    make, options = OPTIMIZERS[kind]
    model = nn.Linear(3, 2)
    optimizer = make(model.parameters(), lr=0.1, fused=True, **options)
    args = model, optimizer, torch.randn(4, 3)
    step(*args)
    return graphopt.capture(step, *args).graph_module


@pytest.mark.parametrize("kind", OPTIMIZERS)
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
