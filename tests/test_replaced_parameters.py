"""Modules that put another parameter in the place of one, and `module.to(…)` in a forward: equal to
eager, or refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

import graphopt
from gloo import Pool
from test_decisions import assert_alike, finish
from twins import Twins, World


class Averaging(nn.Module):
    """Keeps a moving average of what comes in, as codebooks of a VQ-VAE do.

    Attributes:
        kind: how the average takes the place of the one before.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.linear = kind, nn.Linear(4, 4)
        self.average = nn.Parameter(torch.zeros(4), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x) * self.average.exp()
        new = self.average * 0.9 + h.detach().mean(0) * 0.1
        if self.kind == "updated":
            with torch.no_grad():
                self.average.copy_(new)
        else:
            self.average = nn.Parameter(new, requires_grad=False)  # HERE
        return h + self.average


def step(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
    return finish(optimizer, model(x).square().mean())


def trained(kind: str, compiled: bool) -> list[Any]:
    torch.manual_seed(0)
    model = Averaging(kind)
    optimizer = torch.optim.Adam(model.linear.parameters(), lr=0.05)
    run: Any = graphopt.compile(step) if compiled else step
    found: list[Any] = []
    for _ in range(4):
        found += [run(model, optimizer, torch.randn(6, 4)), *model.state_dict().values()]
        found = [value.clone() if isinstance(value, Tensor) else value for value in found]
    return found


def test_another_parameter_is_refused_and_the_cure_works() -> None:
    model = Averaging("replaced")
    optimizer = torch.optim.SGD(model.linear.parameters(), lr=0.05)
    before = dict(model.named_parameters())
    with pytest.raises(graphopt.CaptureError, match=r"HERE\n.*parameter\.copy_\(new\)"):
        graphopt.compile(step)(model, optimizer, torch.ones(6, 4))
    assert all(before[name] is parameter for name, parameter in model.named_parameters())
    assert_alike(trained("updated", True), trained("replaced", False))


def test_a_module_that_is_moved_to_where_it_is() -> None:
    """`model.to(device)` in a step, and a router of mixtures of experts in its forward."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))

    def step(model: nn.Module, x: Tensor) -> Tensor:
        model.to("cpu")
        model[0] = model[0].to(x.dtype)  # type: ignore[index,operator,assignment]
        result: Tensor = model(x)
        return result

    x = torch.randn(3, 4)
    compiled = graphopt.compile(step)
    for _ in range(2):
        expected = copy.deepcopy(model)(x)
        assert torch.equal(compiled(model, x), expected)
    assert len(compiled.captures) == 1


class Kept(nn.Module):
    """Puts another buffer into the place of one, and does something with either.

    Attributes:
        kind: what.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.linear = kind, nn.Linear(4, 4)
        self.register_buffer("last", torch.zeros(4))
        self.kept: Any = torch.zeros(4)
        self.log: list[Tensor] = []

    def forward(self, x: Tensor) -> Any:
        h = self.linear(x)
        new = h.detach().mean(0)
        if self.kind == "swapped":
            self.last, self.kept = self.kept, self.last
        elif self.kind == "a view of it is kept":
            self.kept = self.last[:2]
            self.last = new
        elif self.kind == "the new one is kept":
            self.last = self.kept = new
        elif self.kind == "an argument":
            self.last = x.detach()[0]
        elif self.kind == "the former one is read":
            former = self.last
            self.last = new * 0.5 + former
            self.kept = former * 2
        elif self.kind == "copies":
            self.log.append(self.last.clone())
            self.last = new
            self.kept = self.last.clone()
        elif self.kind == "itself":
            self.last = self.last.detach().view(4)
            self.last.mul_(0.9).add_(new)
        return h + self.last


def kept_by(kind: str, compiled: bool) -> list[Any]:
    torch.manual_seed(0)
    model = Kept(kind)
    optimizer = torch.optim.SGD(model.linear.parameters(), lr=0.1)
    run: Any = graphopt.compile(step) if compiled else step
    found: list[Any] = []
    for _ in range(5):
        found += [run(model, optimizer, torch.randn(6, 4)).detach()]
        found += [each.clone() for each in (model.last, model.kept, *model.log)]
        model.last.add_(1)
        found += [each.clone() for each in (model.last, model.kept, *model.log)]
    return found


@pytest.mark.parametrize(
    "kind",
    [
        *("the former one is read", "copies", "itself", "swapped"),
        *("a view of it is kept", "the new one is kept", "an argument"),
    ],
)
def test_a_buffer_that_is_replaced(kind: str) -> None:
    assert_alike(kept_by(kind, True), kept_by(kind, False))


def test_a_tensor_from_outside_in_a_module_is_an_input_elsewhere() -> None:
    """It was taken for one of the module's, and what was computed of it for a constant."""
    found = []
    for compiled in (False, True):
        torch.manual_seed(0)
        outside = {"x": torch.randn(3, 3), "row": torch.randn(3)}
        model = nn.Linear(3, 3)
        model.kept = torch.randn(3, 3)

        def keeping(x: Tensor, model: Any = model, outside: Any = outside) -> Tensor:
            model.kept = outside["x"]
            outside["row"] = outside["x"][1]
            return model(x).detach() + outside["row"]

        run: Any = graphopt.compile(keeping) if compiled else keeping
        for _ in range(3):
            found.append([run(torch.ones(2, 3)), outside["row"].clone(), model.kept.clone()])
            model.kept.add_(1)
            found[-1].append(outside["row"].clone())
            outside["x"] = torch.randn(3, 3)
    for one, other in zip(found[:3], found[3:], strict=True):
        assert_alike(other, one)


class Normalised:
    """Spectral norm as many programs write it: the weight that a layer computes with is a buffer,
    which is the parameter itself at first, and which a hook replaces before each forward."""

    def __init__(self, layer: Any) -> None:
        weight = layer.weight
        del layer._parameters["weight"]
        layer.register_parameter("weight_orig", weight)
        layer.register_buffer("weight", weight)
        layer.register_buffer("weight_u", torch.randn(len(weight)))
        layer.register_forward_pre_hook(self)

    def __call__(self, layer: Any, _: Any) -> None:
        weight, u = layer.weight_orig, layer.weight_u
        with torch.no_grad():
            v = functional.normalize(weight.t() @ u, dim=0)
            u = functional.normalize(weight @ v, dim=0)
        layer.weight, layer.weight_u = weight / (u @ weight @ v), u


@pytest.mark.parametrize("times", [1, 2])
def test_spectral_norm_by_hand(times: int) -> None:
    def trained(compiled: bool) -> list[Any]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))
        Normalised(model[0])
        Normalised(model[2])
        optimizer = torch.optim.Adam(model.parameters(), 0.01)

        def step(x: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = torch.stack([model(x * n).square().mean() for n in range(times)]).sum()
            loss.backward()
            optimizer.step()
            return loss.detach()

        run: Any = graphopt.compile(step) if compiled else step
        losses = [run(torch.randn(6, 4)) for _ in range(5)]
        return [*losses, *(tensor.detach() for tensor in (*model.parameters(), *model.buffers()))]

    assert_alike(trained(True), trained(False))


class Moving(nn.Module):
    """Keeps a moving average in a buffer, which it replaces or updates."""

    def __init__(self, replaces: bool) -> None:
        super().__init__()
        self.replaces, self.linear = replaces, nn.Linear(4, 4)
        self.register_buffer("average", torch.zeros(4))
        self.average: Tensor

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.linear(x)
        new = self.average * 0.9 + h.detach().mean(0) * 0.1
        if self.replaces:
            self.average = new
        else:
            self.average.copy_(new)
        return h + self.average


def _moving(rank: int) -> tuple[str, list[list[float]]]:
    """What is said where a buffer is replaced on several ranks, and what the cure leaves."""
    models = [Moving(True), Moving(False)]
    optimizers = [torch.optim.SGD(model.linear.parameters(), lr=0.05) for model in models]
    x = torch.full((6, 4), 1.0 + rank)
    with pytest.raises(graphopt.CaptureError) as refused:
        graphopt.compile(step)(models[0], optimizers[0], x)
    cured = graphopt.compile(step)
    for _ in range(3):
        cured(models[1], optimizers[1], x)
    return str(refused.value), [p.flatten().tolist() for p in models[1].parameters()]


def test_a_buffer_that_is_replaced_on_several_ranks_is_refused_with_a_cure(two_ranks: Pool) -> None:
    (said, one), (_, other) = two_ranks.run(_moving)
    assert "it replaces average" in said and "buffer.copy_(new)" in said
    assert one == other


class Routed(nn.Module):
    """Casts its router in every forward, which changes nothing but in the first one of a model of
    half precision."""

    def __init__(self, cast: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__()
        self.router, self.norm, self.cast = nn.Linear(4, 3), nn.BatchNorm1d(4), cast

    def forward(self, x: Tensor) -> Tensor:
        self.router = self.cast(self.router)
        self.norm = self.cast(self.norm)
        routed: Tensor = self.router(self.norm(x.float()))
        return routed


CASTS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "dtype": lambda module: module.to(torch.float32),
    "device": lambda module: module.to("cpu"),
    "like": lambda module: module.to(torch.zeros(1)),
    "float": lambda module: module.float(),
    "cpu": lambda module: module.cpu(),
}


def step_with_cast(model: nn.Module, optimizer: Any, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


@pytest.mark.parametrize("cast", CASTS)
def test_casts_that_change_nothing(cast: str) -> None:
    def build() -> World:
        model = Routed(CASTS[cast])
        return World(step_with_cast, [model], [torch.optim.Adam(model.parameters())])

    twins = Twins(build)
    for _ in range(3):
        twins.step(torch.randn(5, 4))
    twins.finish(captures=1)


@pytest.mark.parametrize("before", [torch.bfloat16, torch.float64])
def test_a_cast_is_refused(before: torch.dtype) -> None:
    model = Routed(CASTS["float"]).to(before)
    with pytest.raises(graphopt.CaptureError, match="casts or moves parameters") as refusal:
        graphopt.capture(
            step_with_cast, model, torch.optim.SGD(model.parameters()), torch.randn(5, 4)
        )
    assert "self.router = self.cast(self.router)" in str(refusal.value) or "module.float()" in str(
        refusal.value
    )
    assert {p.dtype for p in model.parameters()} == {before}
