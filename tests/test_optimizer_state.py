"""Unusual optimizer state: nested, of no parameter, or of parameters in no group any more."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

import graphopt
from gloo import Pool
from graphopt.errors import CaptureError
from test_decisions import assert_alike, finish, same


class Counting(Optimizer):
    """SGD that keeps something in `state` by a rule of its own."""

    def __init__(self, parameters: Any, rule: Callable[[Counting], Any]) -> None:
        super().__init__(parameters, {"lr": 0.05})
        self.rule = rule

    def gradients(self) -> Iterator[tuple[Tensor, Tensor]]:
        for group in self.param_groups:
            yield from ((p, p.grad) for p in group["params"] if p.grad is not None)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        factor = self.rule(self)
        for parameter, gradient in self.gradients():
            parameter.add_(gradient * factor, alpha=-self.param_groups[0]["lr"])


def tensor_that_is_read(optimizer: Counting) -> Any:
    """As MADGRAD does."""
    state: Any = optimizer.state
    if "k" not in state:
        state["k"] = torch.tensor([0], dtype=torch.long)
    count = state["k"].item()
    state["k"] += 1
    return math.pow(count + 1, 0.5) / math.sqrt(count + 2)


def tensor_that_is_replaced(optimizer: Counting) -> Any:
    state: Any = optimizer.state
    state["k"] = state.get("k", torch.zeros(())) + 1
    return 1 / state["k"]


def number(optimizer: Counting) -> Any:
    state: Any = optimizer.state
    state["step"] = state.get("step", 0) + 1
    return 1 / state["step"] ** 0.5 if state["step"] < 5 else 0.25


def table(optimizer: Counting) -> Any:
    state: Any = optimizer.state["all"]  # type: ignore[index]
    if not state:
        state.update(steps=0, norm=torch.zeros(()), kind="mean", shape=(1, 2))
    norm = torch.stack([gradient.norm() for _, gradient in optimizer.gradients()]).norm()
    state["norm"].lerp_(norm, 0.1)
    state["steps"] += 1
    return state["steps"] / (1 + state["norm"])


RULES = [tensor_that_is_read, tensor_that_is_replaced, number, table]


def trained(rule: Any, compiled: bool, used: Any = lambda model: model) -> tuple[list[Any], int]:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = Counting(model.parameters(), rule)
    called = used(model)

    def step(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
        return finish(optimizer, model(x).square().mean())

    run: Any = graphopt.compile(step) if compiled else step
    found: list[Any] = []
    for call in range(8):
        if call == 4:
            optimizer.param_groups[0]["lr"] = 0.02
        if call == 6:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        found += [run(called, optimizer, torch.randn(5, 4)).detach(), *model.state_dict().values()]
        found.append(copy.deepcopy(optimizer.state_dict()))
    return torch.utils._pytree.tree_leaves(found), len(run.captures) if compiled else 0


@pytest.mark.parametrize("rule", RULES)
def test_every_call_is_eager_s(rule: Any) -> None:
    expected, _ = trained(rule, compiled=False)
    found, made = trained(rule, compiled=True)
    assert_alike(found, expected)
    assert made == (3 if rule is number else 2)  # the first step; and one more answer


def test_a_refused_or_failed_first_step_leaves_no_state() -> None:
    model = nn.Linear(4, 3)
    optimizer = Counting(model.parameters(), table)

    def check(x: Tensor) -> None:
        if x.max() > 1:
            raise ValueError("out of range")

    def step(model: nn.Module, optimizer: Optimizer, x: Tensor, asks: bool) -> None:
        graphopt.callback(check, x)
        loss = finish(optimizer, model(x).square().mean())
        if asks:
            max([loss], key=float)

    run = graphopt.compile(step)
    with pytest.raises(graphopt.CaptureError, match="value of a tensor"):
        run(model, optimizer, torch.ones(5, 4), True)
    assert not optimizer.state
    with pytest.raises(ValueError, match="out of range"):
        run(model, optimizer, torch.ones(5, 4) * 2, False)
    assert not optimizer.state


def keeps_a_list(optimizer: Counting) -> Any:
    state: Any = optimizer.state
    state["norms"] = [*state.get("norms", []), 1.0]
    return 1.0


def takes_out(optimizer: Counting) -> Any:
    state: Any = optimizer.state
    state.pop("k", None)
    return 1.0


@pytest.mark.parametrize(
    ("rule", "said"), [(keeps_a_list, "key 'norms'"), (takes_out, "takes entries out")]
)
def test_what_is_refused(rule: Any, said: str) -> None:
    model = nn.Linear(4, 3)
    optimizer = Counting(model.parameters(), rule)
    if rule is takes_out:
        optimizer.state["k"] = torch.ones(())  # type: ignore[index, assignment]
    before = dict(optimizer.state)

    def step(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
        return finish(optimizer, model(x).mean())

    with pytest.raises(graphopt.CaptureError, match=said):
        graphopt.compile(step)(model, optimizer, torch.ones(5, 4))
    assert dict(optimizer.state) == before


class Slow(Optimizer):
    """Around another optimizer, in whose state it keeps its own."""

    def __init__(self, base: Optimizer) -> None:
        self.base = base
        super().__init__(base.param_groups, {})
        self.param_groups, self.state = base.param_groups, base.state

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.base.step()
        state: Any = self.state
        for parameter in self.param_groups[0]["params"]:
            slow = state[parameter].setdefault("slow", torch.zeros_like(parameter))
            parameter.copy_(slow.lerp_(parameter, 0.5))
        state["steps"] = state.get("steps", 0) + 1


def test_one_state_of_two_optimizers() -> None:
    def run(compiled: bool) -> list[Any]:
        torch.manual_seed(0)
        model = nn.Linear(4, 3)
        optimizer = Slow(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))

        def step(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
            return finish(optimizer, model(x).square().mean())

        call: Any = graphopt.compile(step) if compiled else step
        found: list[Any] = [call(model, optimizer, torch.randn(5, 4)) for _ in range(6)]
        return torch.utils._pytree.tree_leaves([found, model.state_dict(), optimizer.state_dict()])

    expected, found = run(compiled=False), run(compiled=True)
    assert_alike(found, expected)


def _left_on_rank(rank: int, compiled: bool) -> list[Any]:
    used = (lambda model: model) if compiled else nn.parallel.DistributedDataParallel
    return trained(tensor_that_is_read, compiled, used)[0]


def test_on_two_ranks(two_ranks: Pool) -> None:
    expected, captured = two_ranks.run(_left_on_rank, False), two_ranks.run(_left_on_rank, True)
    for found, eager in zip(captured, expected, strict=True):
        assert len(found) == len(eager)
        assert all(map(same, found, eager))


CALLS = 7


class Preconditioned(Optimizer):
    """As SOAP and Shampoo: statistics of each dimension in a list, which others replace from time
    to time."""

    def __init__(self, parameters: Any, every: int = 2) -> None:
        super().__init__(parameters, {"lr": 0.05, "every": every})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                self.update(parameter, parameter.grad, self.state[parameter], group)

    def update(self, parameter: Tensor, gradient: Tensor, state: Any, group: Any) -> None:
        if "step" not in state:
            state["step"], state["statistics"], state["bases"] = 0, [], None
            for size in gradient.shape:
                known = torch.zeros(size, size) if gradient.dim() > 1 else []
                state["statistics"].append(known)
            state["moments"] = {"first": torch.zeros_like(gradient), "pair": (gradient.clone(), 3)}
        state["step"] += 1
        for dimension, known in enumerate(state["statistics"]):
            if len(known) > 0:
                others = [d for d in range(gradient.dim()) if d != dimension]
                known.lerp_(torch.tensordot(gradient, gradient, [others] * 2), 0.1)
        if state["bases"] is None or state["step"] % group["every"] == 0:
            state["bases"] = [
                known if len(known) == 0 else torch.linalg.qr(known + torch.eye(len(known)))[0]
                for known in state["statistics"]
            ]
        moments = state["moments"]
        moments["first"].mul_(0.9).add_(gradient)
        moments["pair"] = (moments["pair"][0] * 0.5 + gradient, moments["pair"][1])
        direction = moments["first"] + moments["pair"][0] * moments["pair"][1]
        for base in state["bases"]:
            if len(base) > 0:
                direction = torch.tensordot(direction, base, [[0], [0]])
        parameter.add_(direction, alpha=-group["lr"])


class InPlace(Optimizer):
    """An entry of a list is replaced, the list itself is not; two share a tensor in turns."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            state: Any = self.state[parameter]
            if not state:
                state["last"] = [torch.zeros_like(parameter), torch.zeros_like(parameter)]
            last = state["last"]
            last[0], last[1] = last[1], parameter.grad.clone()
            parameter.add_(last[0] + last[1], alpha=-self.param_groups[0]["lr"])


def leaves(value: Any) -> Any:
    """A nest with its classes, tensors as bytes."""
    if isinstance(value, Tensor):
        return value.detach().numpy().tobytes()
    if isinstance(value, dict):
        return [(key, leaves(item)) for key, item in value.items()]
    if isinstance(value, (list, tuple)):
        return type(value), [leaves(item) for item in value]
    return type(value), value


def trained_with_nested_state(
    kind: type[Optimizer], compiled: bool, rank: int = 0
) -> tuple[list[Any], int]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
    optimizer: Any = kind(model.parameters())  # type: ignore[call-arg]

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    wrapped: Any = graphopt.compile(step) if compiled else step
    generator = torch.Generator().manual_seed(rank)
    found = []
    for number in range(CALLS):
        if number == 4:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        x = torch.randn(6, 4, generator=generator)
        loss = wrapped(x, torch.randint(0, 3, (6,), generator=generator))
        states = [dict(state) for state in optimizer.state.values()]
        found.append(leaves((loss, list(model.parameters()), states, optimizer.state_dict())))
    return found, len(wrapped.captures) if compiled else 0


@pytest.mark.parametrize(("kind", "captures"), [(Preconditioned, 3), (InPlace, 2)])
def test_nests_are_those_of_eager(kind: type[Optimizer], captures: int) -> None:
    expected, _ = trained_with_nested_state(kind, False)
    found, graphs = trained_with_nested_state(kind, True)
    assert found == expected
    assert graphs <= captures


def test_what_stands_in_a_list_is_guarded() -> None:
    """Another tensor, another kind of tensor and another number in a nest between two calls."""
    found = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(4, 3)
        optimizer = Preconditioned(model.parameters(), every=100)

        def step(x: Tensor, model: nn.Module = model, optimizer: Any = optimizer) -> Tensor:
            loss: Tensor = model(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss

        wrapped: Any = graphopt.compile(step) if compiled else step
        state: Any = optimizer.state
        for number in range(8):
            entries = state[model.weight] if number else {}
            if number == 2:
                entries["bases"][0] = torch.linalg.qr(torch.randn(3, 3))[0]
            if number == 4:
                entries["moments"]["pair"] = (entries["moments"]["pair"][0] * 2, 5)
            if number == 6:
                entries["statistics"][1] = []
            wrapped(torch.randn(6, 4))
            found.append(leaves((list(model.parameters()), dict(state[model.weight]))))
    assert found[:8] == found[8:]


def on_a_rank(rank: int) -> bool:
    """Each rank trains by itself."""
    expected, _ = trained_with_nested_state(Preconditioned, False, rank)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
    optimizer = Preconditioned(model.parameters())

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    wrapped = graphopt.compile(step)
    generator = torch.Generator().manual_seed(0)
    for _ in range(CALLS):
        x = torch.randn(6, 4, generator=generator)
        wrapped(x, torch.randint(0, 3, (6,), generator=generator))
    same: bool = (
        leaves(list(model.parameters()))
        == trained_with_nested_state(Preconditioned, False)[0][-1][1][1]
    )
    return same and bool(expected)


def test_nests_on_two_ranks(two_ranks: Pool) -> None:
    """With the same batches on both, the averages are the gradients of one."""
    assert two_ranks.run(on_a_rank) == [True, True]


class Momentum(torch.optim.Optimizer):
    """As people write them."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["mean"] = state.get("mean", 0.0) * 0.9 + parameter.grad
                parameter.sub_(state["mean"], alpha=group["lr"])


LOOKS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "length": lambda optimizer: len(optimizer.state),
    "values": lambda optimizer: sum(float(each["mean"].sum()) for each in optimizer.state.values()),
    "keys": lambda optimizer: [key.dim() for key in optimizer.state],
    "changes": lambda optimizer: [each["mean"].mul_(0.5) for each in optimizer.state.values()][:0],
}


def pops(model: nn.Linear, optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["params"].pop()


def replaces(model: nn.Linear, optimizer: torch.optim.Optimizer) -> None:
    model.weight = nn.Parameter(model.weight.detach() * 0.5)
    optimizer.param_groups[0]["params"][0] = model.weight


def adds(model: nn.Linear, optimizer: torch.optim.Optimizer) -> None:
    optimizer.state[nn.Parameter(torch.ones(2))] = {"mean": torch.ones(2)}


def run(look: Any, change: Any, compiled: bool) -> list[Any]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = Momentum(model.parameters())

    def step(x: Tensor) -> Any:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss, None if look is None else look(optimizer)

    taken = graphopt.compile(step, pipeline="none") if compiled else step
    found = []
    for number in range(4):
        loss, looked = taken(torch.randn(4, 3))
        means = [each["mean"].tolist() for each in optimizer.state.values()]
        found.append((loss.item(), looked, model.weight.tolist(), means))
        if number == 1:
            change(model, optimizer)
    return found


CHANGES = [pops, replaces, adds]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_an_optimizer_finds_the_state_of_its_parameters(change: Any) -> None:
    assert run(None, change, True) == run(None, change, False)


@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS)
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_step_that_looks_at_all_state_is_refused(look: Any, change: Any) -> None:
    with pytest.raises(CaptureError, match="state of a parameter that is in no group"):
        run(look, change, True)


@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS)
def test_a_step_looks_at_all_state_where_nothing_is_left_over(look: Any) -> None:
    def unchanged(model: nn.Linear, optimizer: torch.optim.Optimizer) -> None:
        """The program does nothing between two calls."""

    assert run(look, unchanged, True) == run(look, unchanged, False)
