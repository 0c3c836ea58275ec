"""Steps with an enabled GradScaler: equal to eager, steps that are skipped included."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

import graphopt
from gloo import Pool
from test_decisions import assert_alike, left_by, same

Step = Callable[..., Any]


def new_scaler(device: str = "cpu") -> GradScaler:
    return GradScaler(device, init_scale=256.0, growth_interval=2)


def plain(model: nn.Module, optimizer: Optimizer, x: Tensor, scaler: GradScaler) -> Tensor:
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), x[:, :1].nan_to_num(posinf=0))
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    return loss


def clipped(model: nn.Module, optimizer: Optimizer, x: Tensor, scaler: GradScaler) -> Any:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(x).square().mean()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    return {"loss": loss, "norm": norm, "scale": scaler.get_scale()}


def accumulated(model: nn.Module, optimizer: Optimizer, x: Tensor, scaler: GradScaler) -> Any:
    for half in x.chunk(2):
        losses: Any = scaler.scale([model(half).square().mean(), model(half).abs().mean()])
        sum(losses).backward()
    scaler.step(optimizer)
    before = scaler.get_scale()
    scaler.update()
    if scaler.get_scale() < before:  # it has been skipped
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.99)
    optimizer.zero_grad()


def halved(model: nn.Module, optimizer: Optimizer, x: Tensor, scaler: GradScaler) -> Tensor:
    """As a loop for a GPU does it."""
    with torch.autocast(x.device.type, dtype=torch.float16):
        loss = F.mse_loss(model(x), x[:, :1].nan_to_num(posinf=0))
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    return loss.detach()


KINDS: dict[str, Callable[[Any], Optimizer]] = {
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01, foreach=True),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9, foreach=True),
    "fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True),
}


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 1), nn.BatchNorm1d(1), nn.Dropout(0.1))


def trained(
    step: Step, kind: str, compiled: bool, bad: tuple[int, ...] = (2, 5), device: str = "cpu"
) -> tuple[list[Any], int]:
    torch.manual_seed(0)
    model = small().to(device)
    optimizer = KINDS[kind](model.parameters())
    scaler = new_scaler(device)
    run: Any = graphopt.compile(step) if compiled else step
    found: list[Any] = []
    for number in range(8):
        x = torch.randn(8, 4)
        if number in bad:
            x[0, 0] = float("inf")
        found += [run(model, optimizer, x.to(device), scaler), *left_by(model, optimizer)]
        found += scaler.state_dict().values()
    return torch.utils._pytree.tree_leaves(found), len(run.captures) if compiled else 0


@pytest.mark.parametrize(
    ("step", "kind", "graphs"),
    [
        *((plain, "adam", 2), (plain, "fused", 1), (clipped, "sgd", 2), (clipped, "fused", 1)),
        (accumulated, "adam", 2),
    ],
)
def test_every_call_is_eager_s(step: Step, kind: str, graphs: int) -> None:
    expected, _ = trained(step, kind, compiled=False)
    found, made = trained(step, kind, compiled=True)
    assert_alike(found, expected)
    assert made == graphs


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("step", [plain, halved, accumulated])
def test_every_call_is_eager_s_on_a_gpu(step: Step, kind: str) -> None:
    expected, _ = trained(step, kind, compiled=False, device="cuda")
    found, made = trained(step, kind, compiled=True, device="cuda")
    assert_alike(found, expected)
    assert made <= 2


def test_the_first_steps_are_skipped() -> None:
    expected, _ = trained(plain, "adam", compiled=False, bad=(0, 1, 4))
    found, made = trained(plain, "adam", compiled=True, bad=(0, 1, 4))
    assert_alike(found, expected)
    assert made == 3  # skipped without and with optimizer state


class Trainer:
    """Has everything as attributes, with one scaler for two optimizers."""

    def __init__(self) -> None:
        self.models = nn.ModuleList([nn.Linear(4, 1), nn.Linear(4, 1)])
        kinds = zip(("sgd", "fused"), self.models, strict=True)
        self.optimizers = [KINDS[kind](model.parameters()) for kind, model in kinds]
        self.scaler = new_scaler()

    def step(self, xs: list[Tensor]) -> list[Tensor]:
        losses = [model(x).square().mean() for model, x in zip(self.models, xs, strict=True)]
        for loss, optimizer in zip(losses, self.optimizers, strict=True):
            optimizer.zero_grad()
            self.scaler.scale(loss).backward()
            self.scaler.step(optimizer)
        self.scaler.update()
        return losses


def _trained_by_trainer(compiled: bool) -> tuple[list[Any], int]:
    torch.manual_seed(0)
    trainer = Trainer()
    run: Any = graphopt.compile(trainer.step) if compiled else trainer.step
    found: list[Any] = []
    for number in range(7):
        xs = [torch.randn(8, 4), torch.randn(8, 4)]
        if number in (2, 4):
            xs[number // 4][0, 0] = float("nan")
        if number == 5:
            trainer.scaler.set_growth_factor(4.0)
        if number == 6:
            trainer.step(xs)  # eagerly, which makes other notes of the scaler
        found += run(xs)
        for model, optimizer in zip(trainer.models, trainer.optimizers, strict=True):
            found += left_by(model, optimizer)
        found += trainer.scaler.state_dict().values()
    return found, len(run.captures) if compiled else 0


def test_two_optimizers_of_a_trainer() -> None:
    found, made = _trained_by_trainer(compiled=True)
    expected, _ = _trained_by_trainer(compiled=False)
    assert_alike(found, expected)
    assert made == 3  # one of them skipped; another growth factor


def _entries(scaler: GradScaler) -> dict[str, Any]:
    return {key: id(value) for key, value in vars(scaler).items()}


def test_a_refused_or_failed_first_step_leaves_a_scaler_as_it_was() -> None:
    scaler, model = new_scaler(), small()
    optimizer = KINDS["fused"](model.parameters())

    def check(x: Tensor) -> None:
        if x.max() > 1:
            raise ValueError("out of range")

    def step(x: Tensor, asks: bool) -> Tensor:
        graphopt.callback(check, x)
        loss = plain(model, optimizer, x, scaler)
        if asks:
            max([loss.detach()], key=float)
        return loss

    run, before = graphopt.compile(step), _entries(scaler)
    with pytest.raises(graphopt.CaptureError, match="value of a tensor"):
        run(torch.ones(8, 4), True)
    assert _entries(scaler) == before
    with pytest.raises(ValueError, match="out of range"):
        run(torch.ones(8, 4) * 2, False)
    assert _entries(scaler) == before
    assert not optimizer.state
    run(torch.ones(8, 4), False)
    assert scaler.state_dict()["_growth_tracker"] == 1


def test_a_scaler_that_is_updated_elsewhere_is_refused() -> None:
    scaler, model = new_scaler(), small()
    optimizer = KINDS["adam"](model.parameters())

    def step(x: Tensor) -> None:
        scaler.scale(model(x).mean()).backward()
        scaler.step(optimizer)  # HERE

    with pytest.raises(graphopt.CaptureError, match=r"is not updated[^§]*HERE[^§]*update\(\)"):
        graphopt.compile(step)(torch.ones(8, 4))
    assert not scaler._per_optimizer_states


def test_what_a_scaler_has_noted_before_is_refused() -> None:
    scaler, model = new_scaler(), small()
    optimizer = KINDS["fused"](model.parameters())
    run = graphopt.compile(plain)
    run(model, optimizer, torch.ones(8, 4), scaler)
    before = copy.deepcopy(model.state_dict())
    scaler.unscale_(optimizer)
    with pytest.raises(graphopt.CaptureError, match=r"before the step[^§]*update\(\)"):
        run(model, optimizer, torch.ones(8, 4), scaler)
    assert all(map(same, model.state_dict().values(), before.values()))


def _left_on_rank(rank: int, kind: str, compiled: bool) -> tuple[list[Any], int]:
    """One rank's batch makes the average infinite: all ranks skip that update."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 2), nn.Tanh(), nn.Linear(2, 1))
    optimizer, scaler = KINDS[kind](model.parameters()), new_scaler()
    step = clipped if kind == "adam" else plain
    run: Any = graphopt.compile(step) if compiled else step
    used = model if compiled else nn.parallel.DistributedDataParallel(model)
    generator = torch.Generator().manual_seed(rank)
    found: list[Any] = []
    for call in range(8):
        x = torch.randn(8, 4, generator=generator)
        if (call, rank) in ((2, 1), (5, 0)):
            x[0, 0] = float("inf")
        found += [run(used, optimizer, x, scaler), *left_by(model, optimizer)]
        found += scaler.state_dict().values()
    leaves = torch.utils._pytree.tree_leaves(found)
    leaves = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    return leaves, len(run.captures) if compiled else 0


@pytest.mark.parametrize(("kind", "captures"), [("fused", 1), ("adam", 2)])
def test_all_ranks_skip_a_step(two_ranks: Pool, kind: str, captures: int) -> None:
    expected = two_ranks.run(_left_on_rank, kind, False)
    captured = two_ranks.run(_left_on_rank, kind, True)
    for (found, made), (eager, _) in zip(captured, expected, strict=True):
        assert made == captures
        assert len(found) == len(eager)
        assert all(map(same, found, eager))
