"""Tensors that a step puts into attributes and dictionaries of the program, against eager."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_map

import graphopt

CALLS = 4


class Network:
    """A layer, its optimizer, and a place for whatever a step leaves."""

    def __init__(self) -> None:
        self.layer = nn.Linear(4, 4)
        self.optimizer = torch.optim.Adam(self.layer.parameters(), lr=0.1)
        self.hidden: Any = torch.zeros(5, 4)
        self.other: Any = torch.ones(5, 4)
        self.table: dict[str, Any] = {}

    def finish(self, loss: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss


class Loop(NamedTuple):
    """A training loop that is not captured yet.

    Attributes:
        step: of a batch.
        left: what the program finds afterwards.
        captures: how many graphs its calls need.
    """

    step: Callable[..., Any]
    left: Callable[[], Any]
    captures: int = 1


def kept_for_later() -> Loop:
    """As CycleGAN's model class keeps what each method hands to the next."""
    net = Network()

    def step(x: Tensor, y: Tensor) -> None:
        net.hidden = net.layer(x)
        net.other = F.mse_loss(net.hidden, y)
        net.finish(net.other)

    return Loop(step, lambda: (net.hidden, net.other))


def features_of_a_hook() -> Loop:
    net = Network()

    def hook(module: nn.Module, inputs: Any, output: Tensor) -> None:
        net.table["features"] = output

    net.layer.register_forward_hook(hook)

    def step(x: Tensor, y: Tensor) -> Tensor:
        return net.finish(F.mse_loss(net.layer(x), y) + net.table["features"].mean())

    return Loop(step, lambda: net.table)


def carried() -> Loop:
    """A hidden state that goes from call to call."""
    net = Network()

    def step(x: Tensor, y: Tensor) -> Tensor:
        net.hidden = torch.tanh(net.layer(x) + net.hidden.detach())
        return net.finish(F.mse_loss(net.hidden, y))

    return Loop(step, lambda: net.hidden, captures=2)  # one begins without a history


def made_in_the_first_call() -> Loop:
    net = Network()
    net.hidden = None

    def step(x: Tensor, y: Tensor) -> Tensor:
        if net.hidden is None:
            net.hidden = torch.ones(5, 4)
        net.hidden = torch.tanh(net.layer(x) + net.hidden.detach())
        return net.finish(F.mse_loss(net.hidden, y))

    return Loop(step, lambda: net.hidden, captures=2)


def moving_average() -> Loop:
    net = Network()

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = net.finish(F.mse_loss(net.layer(x), y))
        net.hidden = 0.9 * net.hidden + 0.1 * loss.detach()
        net.other += loss.detach()
        return loss

    same = net.other
    return Loop(step, lambda: (net.hidden, net.other, net.other is same))


def state_before_the_step() -> Loop:
    """What is returned is what was there, not what is put there."""
    net = Network()

    def step(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        before = net.hidden
        net.hidden = x * 2
        return before, net.finish(F.mse_loss(net.layer(x) + before, y))

    return Loop(step, lambda: net.hidden)


def shifted() -> Loop:
    net = Network()

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = net.finish(F.mse_loss(net.layer(x) + net.hidden * net.other, y))
        net.hidden, net.other = net.other, net.other + x
        return loss

    return Loop(step, lambda: (net.hidden, net.other))


def nested() -> Loop:
    net = Network()

    def step(x: Tensor, y: Tensor) -> Tensor:
        net.table["pair"] = (net.layer(x), [x.sum(), "text", 3])
        return net.finish(F.mse_loss(net.table["pair"][0], y))

    return Loop(step, lambda: net.table)


def a_part_of_another() -> Loop:
    """From the second call on both are one memory."""
    net = Network()

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = net.finish(F.mse_loss(net.layer(x) + net.hidden + net.other[0], y))
        net.hidden = x * 2
        net.other = net.hidden[:2]
        return loss

    return Loop(step, lambda: (net.hidden, net.other), captures=2)


LOOPS = [
    kept_for_later,
    features_of_a_hook,
    carried,
    made_in_the_first_call,
    moving_average,
    state_before_the_step,
    shifted,
    nested,
    a_part_of_another,
]


def run(make: Callable[[], Loop], compiled: bool, calls: int = CALLS) -> tuple[list[Any], int]:
    torch.manual_seed(0)
    loop = make()
    step = graphopt.compile(loop.step) if compiled else loop.step
    found = []
    for _ in range(calls):
        result = step(torch.randn(5, 4), torch.randn(5, 4))
        found.append(tree_map(_frozen, (result, loop.left())))
    captures = len(step.captures) if isinstance(step, graphopt.TrainStep) else 0
    if compiled:
        assert captures == loop.captures, captures
    return found, captures


def _frozen(value: Any) -> Any:
    """Values as they are now: equal tensors have equal texts of their bits."""
    return value.detach().numpy().tobytes() if isinstance(value, Tensor) else value


@pytest.mark.parametrize("make", LOOPS)
def test_what_a_step_leaves_is_there(make: Callable[[], Loop]) -> None:
    assert run(make, True)[0] == run(make, False)[0]


def test_another_object_in_the_place() -> None:
    """An equal object does not stand for the one that gets the tensor."""
    net = Network()
    objects = [Network() for _ in range(2)]
    holder = {"now": objects[0]}

    @graphopt.compile
    def step(x: Tensor) -> Tensor:
        holder["now"].hidden = net.layer(x)
        return net.finish(holder["now"].hidden.square().mean())

    x = torch.randn(5, 4)
    step(x)
    first = objects[0].hidden
    holder["now"] = objects[1]
    step(x)
    assert objects[0].hidden is first and not torch.equal(first, objects[1].hidden)


def test_a_refused_capture_leaves_nothing() -> None:
    net, kept = Network(), set[Tensor]()

    @graphopt.compile
    def step(x: Tensor) -> Tensor:
        net.hidden = net.layer(x)
        kept.add(net.hidden)
        return net.finish(net.hidden.mean())

    before = net.hidden
    with pytest.raises(graphopt.CaptureError, match="changes kept outside"):
        step(torch.randn(5, 4))
    assert net.hidden is before and not kept


def test_lists_and_dictionaries_among_the_arguments() -> None:
    def step(net: Network, batch: dict[str, Any]) -> Tensor:
        batch["logits"] = net.layer(batch["x"])
        batch["x"] = batch["x"] * 2
        batch["number"] += 1
        batch["meta"][0]["parts"] = [batch["logits"].sum(), "text"]
        labels = batch.pop("y")
        return net.finish(F.mse_loss(batch["logits"], labels))

    found: list[Any] = []
    for run_step in (step, graphopt.compile(step)):
        torch.manual_seed(0)
        net, left = Network(), []
        for number in range(CALLS):
            batch = {"x": torch.randn(5, 4), "y": torch.randn(5, 4), "number": number}
            batch["meta"] = [{"id": number}]
            left.append((run_step(net, batch), batch, list(batch)))
        found.append(tree_map(_frozen, left))
    assert found[0] == found[1]
    assert len(run_step.captures) == 1  # type: ignore[attr-defined]


@dataclasses.dataclass
class Output:
    """What a model gives, as a class of the program."""

    loss: Tensor
    parts: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Data in data."""

    output: Output
    value: float


def test_data_classes_as_results() -> None:
    def step(net: Network, x: Tensor) -> list[Outcome]:
        logits = net.layer(x)
        loss = net.finish(logits.square().mean())
        return [Outcome(Output(loss, {"logits": logits, "name": "text"}), loss.item())]

    found = []
    for run_step in (step, graphopt.compile(step)):
        torch.manual_seed(0)
        net = Network()
        for _ in range(CALLS):
            (outcome,) = run_step(net, torch.randn(5, 4))
            assert type(outcome) is Outcome and type(outcome.output) is Output
            values = (outcome.output.loss, outcome.output.parts, outcome.value)
            found.append(tree_map(_frozen, values))
    assert found[:CALLS] == found[CALLS:]


class TwoAttributes(nn.Module):
    """Plain attributes of a module, one a part of the other."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.whole = torch.zeros(5, 4)
        self.part = self.whole[:2]

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layer(x) + self.whole.sum() + self.part.sum()
        self.whole = result.detach() * 2
        self.part = self.whole[:2]
        return result


def test_attributes_of_a_module_that_share_memory() -> None:
    def step(model: nn.Module, x: Tensor) -> Tensor:
        loss: Tensor = model(x).square().mean()
        loss.backward()
        return loss

    found = []
    for run_step in (step, graphopt.compile(step)):
        torch.manual_seed(0)
        model = TwoAttributes()
        found.append([_frozen(run_step(model, torch.randn(5, 4))) for _ in range(CALLS)])
    assert found[0] == found[1]


class OneTensorTwice(nn.Module):
    """Two attributes hold one tensor, until one of them gets another."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.first = self.second = torch.zeros(5, 4)

    def forward(self, x: Tensor, replace: bool = False) -> Tensor:
        result: Tensor = self.layer(x) + self.first + 2 * self.second
        if replace:
            self.first = result.detach()
        return result


def test_an_attribute_that_is_replaced_between_two_calls() -> None:
    model = OneTensorTwice()
    compiled = graphopt.compile(lambda model, x: model(x))
    x = torch.randn(5, 4)
    compiled(model, x)
    model.first = torch.ones(5, 4)
    assert torch.equal(compiled(model, x), model(x))


def test_an_attribute_that_is_replaced_in_one_of_two_places() -> None:
    torch.manual_seed(0)
    model = OneTensorTwice()
    eager = copy.deepcopy(model)
    compiled = graphopt.compile(lambda model, x: model(x, True))
    for _ in range(4):
        x = torch.randn(5, 4)
        assert torch.equal(compiled(model, x), eager(x, True))
        assert torch.equal(model.first, eager.first) and torch.equal(model.second, eager.second)


def one_tensor_in_two_places() -> Loop:
    net = Network()
    net.hidden = net.other = torch.zeros(5, 4)

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = net.finish(F.mse_loss(net.layer(x) + net.hidden + 2 * net.other, y))
        net.hidden = x * 2
        return loss

    return Loop(step, lambda: (net.hidden, net.other), captures=2)


def test_one_tensor_in_two_places() -> None:
    assert run(one_tensor_in_two_places, True)[0] == run(one_tensor_in_two_places, False)[0]


def count_of_an_object() -> Loop:
    """A counter that the program advances between two calls, as TD3 delays its policy by."""
    net = Network()
    net.table["calls"] = 0

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(net.layer(x), y) * (1 + net.table["calls"] / 10)
        return net.finish(loss) if net.table["calls"] % 2 == 0 else loss

    def left() -> Any:
        net.table["calls"] += 1
        return list(net.layer.parameters())

    return Loop(step, left, captures=4)


def batch_of_an_object() -> Loop:
    """The program puts each batch into an attribute, from where the step takes it."""
    net = Network()
    net.hidden = torch.randn(5, 4)

    def step(x: Tensor, y: Tensor) -> Tensor:
        return net.finish(F.mse_loss(net.layer(net.hidden), y))

    def left() -> Any:
        net.hidden = torch.randn(5, 4)
        return list(net.layer.parameters())

    return Loop(step, left, captures=2)


class Counting(nn.Linear):
    """A module with a number that changes between two calls, as Lightning's `global_step`."""

    number = 0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + self.number / 10)


def count_of_a_module() -> Loop:
    net = Network()
    net.layer = Counting(4, 4)
    net.layer.number = 0
    net.optimizer = torch.optim.Adam(net.layer.parameters(), lr=0.1)

    def step(x: Tensor, y: Tensor) -> Tensor:
        return net.finish(F.mse_loss(net.layer(x), y))

    def left() -> Any:
        net.layer.number += 1
        return list(net.layer.parameters())

    return Loop(step, left, captures=3)


@pytest.mark.parametrize("make", [count_of_an_object, batch_of_an_object, count_of_a_module])
def test_what_changes_between_calls_becomes_an_input(make: Callable[[], Loop]) -> None:
    assert run(make, True, 8)[0] == run(make, False, 8)[0]


class Marked(torch.optim.Optimizer):
    """Reads marks that the program sets on parameters."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                rate = group["lr"] * getattr(parameter, "lr_scale", 1.0)
                parameter.sub_(parameter.grad, alpha=rate)


def test_attributes_of_parameters() -> None:
    found = []
    for compiled in (False, True):
        torch.manual_seed(0)
        net = Network()
        net.optimizer = Marked(net.layer.parameters())
        net.layer.weight.lr_scale = 0.5  # type: ignore[attr-defined]
        step: Any = lambda x, net=net: net.finish(net.layer(x).square().mean())  # noqa: E731
        step = graphopt.compile(step) if compiled else step
        for number in range(CALLS):
            if number == 2:
                net.layer.bias.lr_scale = 0.0  # type: ignore[attr-defined]
            step(torch.randn(5, 4))
        found.append([_frozen(parameter) for parameter in net.layer.parameters()])
    assert found[0] == found[1] and len(step.captures) == 2


class Estimated(torch.optim.SGD):
    """A second method works on the optimizer's state, as Sophia's does."""

    @torch.no_grad()
    def estimate(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                entries = self.state[parameter]
                if "estimate" not in entries:
                    entries["estimate"] = torch.zeros_like(parameter)
                entries["estimate"].mul_(0.9).add_(parameter.grad)


def test_an_optimizer_that_is_not_stepped() -> None:
    found = []
    for compiled in (False, True):
        torch.manual_seed(0)
        layer = nn.Linear(4, 4)
        optimizer = Estimated(layer.parameters(), lr=0.1)

        def step(x: Tensor, layer: Any = layer, optimizer: Any = optimizer) -> None:
            optimizer.zero_grad()
            layer(x).square().mean().backward()
            optimizer.estimate()

        run_step: Any = graphopt.compile(step) if compiled else step
        for _ in range(CALLS):
            run_step(torch.randn(5, 4))
        found.append([_frozen(entries["estimate"]) for entries in optimizer.state.values()])
    assert found[0] == found[1] and len(found[0]) == 2


class Scaled(torch.optim.SGD):
    """A number of its group is computed from gradients in each step, as Prodigy's `d` is."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            total = sum(p.grad.abs().sum().item() for p in group["params"])
            group["scale"] = 0.9 * group.get("scale", 1.0) + 0.1 * total
            for parameter in group["params"]:
                parameter.add_(parameter.grad, alpha=-group["lr"] * group["scale"])


def test_a_number_of_a_group_that_gradients_decide() -> None:
    found = []
    for compiled in (False, True):
        torch.manual_seed(0)
        net = Network()
        net.optimizer = Scaled(net.layer.parameters(), lr=0.1)
        step: Any = lambda x, net=net: net.finish(net.layer(x).square().mean())  # noqa: E731
        step = graphopt.compile(step) if compiled else step
        for _ in range(CALLS):
            step(torch.randn(5, 4))
            found.append((net.optimizer.param_groups[0]["scale"], _frozen(net.layer.weight)))
    assert found[:CALLS] == found[CALLS:]
