"""Settings in which a sharded training is compared with DDP: optimizers, models, and steps."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_value_
from torch.optim import Optimizer

from zero_cases import VOCABULARY, Beside, Language, Uneven, batches, train_step

Make = Callable[[Any], Optimizer]
optim = torch.optim


def _made(kind: type[Optimizer], **options: Any) -> Make:
    return lambda parameters: kind(parameters, **options)


_KINDS: dict[str, Callable[..., Make]] = {
    "sgd": functools.partial(_made, optim.SGD, lr=0.1),
    "sgd momentum": functools.partial(_made, optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "adam": functools.partial(_made, optim.Adam, lr=1e-2, weight_decay=0.1),
    "adamw": functools.partial(_made, optim.AdamW, lr=1e-2),
    "amsgrad": functools.partial(_made, optim.Adam, lr=1e-2, amsgrad=True),
    "rmsprop": functools.partial(_made, optim.RMSprop, lr=1e-3, momentum=0.5, centered=True),
    "adagrad": functools.partial(_made, optim.Adagrad, lr=1e-2),
    "adadelta": functools.partial(_made, optim.Adadelta, lr=0.5),
    "adamax": functools.partial(_made, optim.Adamax, lr=1e-2),
    "nadam": functools.partial(_made, optim.NAdam, lr=1e-2),
    "rprop": functools.partial(_made, optim.Rprop, lr=1e-2),
    "radam": functools.partial(_made, optim.RAdam, lr=1e-2),
    "asgd": functools.partial(_made, optim.ASGD, lr=1e-2),
}
_FUSED = ("sgd", "sgd momentum", "adam", "adamw", "amsgrad", "adagrad")

OPTIMIZERS: dict[str, Make] = {
    **{f"{name}, loop": kind(foreach=False) for name, kind in _KINDS.items()},
    **{f"{name}, foreach": kind(foreach=True) for name, kind in _KINDS.items()},
    **{f"{name}, fused": _KINDS[name](fused=True) for name in _FUSED},
}


class Adapted(nn.Module):
    """A frozen layer beside a product of two thin matrices, as LoRA has it."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, 128).requires_grad_(False)
        self.frozen = nn.Linear(128, 128).requires_grad_(False)
        self.down, self.up = nn.Linear(128, 8, bias=False), nn.Linear(8, 128, bias=False)
        self.head = nn.Linear(128, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        return self.head(self.frozen(x) + self.up(self.down(x)))


class Normed(nn.Module):
    """Statistics in buffers, which rank 0 gives to the others."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, 128)
        self.norm, self.head = nn.BatchNorm1d(128), nn.Linear(128, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        return self.head(self.norm(x.flatten(0, 1)).view_as(x))


class Scaled(nn.Module):
    """Numbers, vectors and tensors of four dimensions among the parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, 64)
        self.scale, self.shift = nn.Parameter(torch.ones(())), nn.Parameter(torch.zeros(64))
        self.mixed = nn.Conv2d(8, 8, 3, padding=1)
        self.head = nn.Linear(64, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) * self.scale + self.shift
        y = self.mixed(x.view(-1, 8, 8, 8)).view_as(x)
        return self.head(x + y)


class Mixed(nn.Module):
    """Rows that divide evenly, rows that do not, and what is too small to be cut."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.middle = nn.Embedding(VOCABULARY, 330), nn.Linear(330, 128)
        self.head = nn.Linear(128, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.middle(self.tokens(tokens)).tanh())


def groups(model_parameters: Any) -> Optimizer:
    """Two groups with numbers of their own."""
    found = list(model_parameters)
    matrices = [p for p in found if p.dim() > 1]
    others = [p for p in found if p.dim() <= 1]
    return optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": others, "lr": 3e-3}],
        lr=1e-2,
        foreach=True,
    )


def value_clipped(model: nn.Module, optimizer: Optimizer, tokens: Tensor, wanted: Tensor) -> Tensor:
    loss = F.cross_entropy(model(tokens).flatten(0, 1), wanted.flatten())
    loss.backward()
    clip_grad_value_(model.parameters(), 0.01)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def autocast(model: nn.Module, optimizer: Optimizer, tokens: Tensor, wanted: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        loss = F.cross_entropy(model(tokens).flatten(0, 1), wanted.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def half_loss(model: nn.Module, optimizer: Optimizer, tokens: Tensor, wanted: Tensor) -> Tensor:
    loss = F.cross_entropy(model(tokens).flatten(0, 1).float(), wanted.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def accumulating(
    model: nn.Module, optimizer: Optimizer, tokens: Tensor, wanted: Tensor, update: bool
) -> Tensor:
    """One of several backwards for one update."""
    loss = F.cross_entropy(model(tokens).flatten(0, 1), wanted.flatten())
    loss.backward()
    if update:
        optimizer.step()
        optimizer.zero_grad()
    return loss.detach()


def finite(model: nn.Module, optimizer: Optimizer, tokens: Tensor, wanted: Tensor) -> Tensor:
    """An update is left out where the loss is no number: a decision that all ranks take alike."""
    loss = F.cross_entropy(model(tokens).flatten(0, 1), wanted.flatten())
    loss.backward()
    if torch.isfinite(next(model.parameters()).grad.norm()):  # type: ignore[union-attr]
        optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def by_length(model: nn.Module, optimizer: Optimizer, tokens: Tensor, wanted: Tensor) -> Tensor:
    """A decision by values of a gradient, before some of the state is updated."""
    loss = F.cross_entropy(model(tokens).flatten(0, 1), wanted.flatten())
    loss.backward()
    first, *_ = (p.grad for p in model.parameters())
    if first[0].sum() > 0:  # type: ignore[index]
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad.mul_(2)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def twice(model: nn.Module, optimizer: Optimizer, tokens: Tensor, wanted: Tensor) -> Tensor:
    """Two losses with backwards of their own."""
    first = F.cross_entropy(model(tokens).flatten(0, 1), wanted.flatten())
    first.backward()
    optimizer.step()
    optimizer.zero_grad()
    second = F.cross_entropy(model(wanted).flatten(0, 1), tokens.flatten())
    second.backward()
    optimizer.step()
    optimizer.zero_grad()
    return (first + second).detach()


def _steps(pair: Beside, rank: int) -> None:
    pair.run(rank)


def _eight(pair: Beside, rank: int) -> None:
    """RAdam decides otherwise from the sixth step on."""
    pair.run(rank, 8)


def _shapes(pair: Beside, rank: int) -> None:
    pair.run(rank, 2, rows=2)
    pair.run(rank, 2, rows=3)
    pair.run(rank, 1, rows=2)


def _rates(pair: Beside, rank: int) -> None:
    for rate in (1e-2, 5e-3, 1e-3):
        for optimizer in (pair.optimizer, pair.reference_optimizer):
            for group in optimizer.param_groups:
                group["lr"] = rate
        pair.run(rank, 1)


def _unfrozen(pair: Beside, rank: int) -> None:
    pair.run(rank, 2)
    pair.step.flush()
    for model in (pair.model, pair.reference):
        model.frozen.requires_grad_(True)  # type: ignore[union-attr, operator]
    pair.renew_ddp()
    pair.run(rank, 2)


def _evaluated(pair: Beside, rank: int) -> None:
    pair.run(rank, 2)
    pair.model.eval(), pair.reference.eval()
    pair.run(rank, 1)
    pair.model.train(), pair.reference.train()
    pair.run(rank, 1)


@dataclass(frozen=True)
class Setting:
    """What is trained, how, and what is done."""

    build: Callable[[], nn.Module] = Language
    optimizer: Make = OPTIMIZERS["adamw, foreach"]
    step: Callable[..., Any] = train_step
    run: Callable[[Beside, int], None] = _steps


FUSED = OPTIMIZERS["adamw, fused"]
SETTINGS: dict[str, Setting] = {
    **{name: Setting(Mixed, make) for name, make in OPTIMIZERS.items()},
    "radam, loop, longer": Setting(Mixed, OPTIMIZERS["radam, loop"], run=_eight),
    "radam, foreach, longer": Setting(Mixed, OPTIMIZERS["radam, foreach"], run=_eight),
    "decided": Setting(Mixed, step=finite, run=_eight),
    "decided by a gradient": Setting(Mixed, OPTIMIZERS["adamw, loop"], by_length, _eight),
    "uneven": Setting(Uneven, FUSED),
    "uneven, loop": Setting(Uneven, OPTIMIZERS["adam, loop"]),
    "tied": Setting(lambda: Language(tied=True, width=128), FUSED),
    "tied, uneven": Setting(lambda: Language(tied=True, width=264)),
    "clipped by value": Setting(step=value_clipped),
    "clipped by value, uneven": Setting(Uneven, FUSED, value_clipped),
    "groups": Setting(optimizer=groups),
    "groups, uneven": Setting(Uneven, groups),
    "double": Setting(lambda: Language().double(), FUSED),
    "bfloat16": Setting(lambda: Language().bfloat16(), FUSED, half_loss),
    "bfloat16, uneven": Setting(lambda: Uneven().bfloat16(), FUSED, half_loss),
    "two dtypes": Setting(lambda: _half_of(Language()), OPTIMIZERS["adamw, loop"], half_loss),
    "autocast": Setting(step=autocast),
    "autocast, uneven": Setting(Uneven, FUSED, autocast),
    "adapters": Setting(Adapted),
    "frozen and unfrozen": Setting(Adapted, FUSED, run=_unfrozen),
    "buffers": Setting(Normed),
    "evaluated between": Setting(Normed, FUSED, run=_evaluated),
    "other shapes": Setting(Scaled),
    "batches of other shapes": Setting(run=_shapes),
    "learning rates": Setting(optimizer=FUSED, run=_rates),
    "two updates": Setting(optimizer=FUSED, step=twice),
    "deep": Setting(lambda: Language(layers=3, width=128), FUSED),
}


def _half_of(model: nn.Module) -> nn.Module:
    """Rows of two dtypes among the parameters of one group."""
    model.head.bfloat16()  # type: ignore[union-attr, operator]
    model.norm.bfloat16()  # type: ignore[union-attr, operator]
    model.norm.register_forward_pre_hook(_to_half)  # type: ignore[union-attr, operator]
    return model


def _to_half(module: nn.Module, inputs: Any) -> Any:
    return (inputs[0].bfloat16(),)


def run_setting(rank: int, name: str, stage: int) -> None:
    """Train beside DDP: the same losses, parameters and state."""
    setting = SETTINGS[name]
    pair = Beside(setting.build, setting.optimizer, setting.step, stage, "default")
    setting.run(pair, rank)
    pair.compare()


def run_accumulated(rank: int, stage: int, build: str) -> None:
    """Two local backwards before each update."""
    pair = Beside(
        {"language": Language, "uneven": Uneven}[build], FUSED, accumulating, stage, "default"
    )
    for number, given in enumerate(batches(rank, 6)):
        update = number % 3 == 2
        sync = nullcontext() if update else pair.step.no_sync()
        theirs = nullcontext() if update else pair.ddp.no_sync()
        with sync:
            ours = pair.step(pair.model, pair.optimizer, *given, update)
        with theirs:
            expected = accumulating(pair.ddp, pair.reference_optimizer, *given, update)
        assert torch.equal(ours, expected)
    pair.step.flush()
    pair.compare()


_BUILDS: dict[str, Callable[[], nn.Module]] = {
    "mixed": Mixed,
    "uneven": Uneven,
    "language": lambda: Language(width=264),
    "tied": lambda: Language(tied=True, width=128),
    "adapters": Adapted,
    "buffers": Normed,
    "scaled": Scaled,
    "double": lambda: Mixed().double(),
}
_STEPS = {
    "plain": train_step,
    "clipped": value_clipped,
    "autocast": autocast,
    "decided": finite,
    "by a gradient": by_length,
    "two updates": twice,
}
_RUNS = {"steps": _steps, "shapes": _shapes, "rates": _rates, "evaluated": _evaluated}
_AXES: tuple[dict[str, Any], ...] = (_BUILDS, OPTIMIZERS, _STEPS, _RUNS)
COMBINATIONS = 64


def combination(number: int) -> dict[str, Any]:
    """Names of one of `COMBINATIONS` settings, drawn so that each value has its turn: a setting of
    an axis comes again after all others of that axis."""
    chosen = []
    for place, axis in enumerate(_AXES):
        turn, index = divmod(number, len(axis))
        names = list(axis)
        Random(1000 * place + turn).shuffle(names)
        chosen.append(names[index])
    if chosen[2] in ("decided", "by a gradient") and chosen[0] in ("adapters", "scaled"):
        chosen[0] = "mixed"  # these steps look at the gradient of the first parameter, a matrix
    names = ("build", "optimizer", "step", "run")
    stage, keep = ((1, None), (3, None), (3, 0), (3, 1e6))[number % 4]
    return {**dict(zip(names, chosen, strict=True)), "stage": stage, "keep_mb": keep}


def run_combination(rank: int, number: int) -> None:
    """Train beside DDP, as `combination` says."""
    given = combination(number)
    build, optimizer, step, run = (axis[given[name]] for axis, name in zip(_AXES, given))  # noqa: B905
    options = {"stage": given["stage"], "keep_mb": given["keep_mb"]}
    pair = Beside(build, optimizer, step, pipeline="default", **options)
    run(pair, rank)
    pair.compare()


def averaging(
    model: nn.Module, optimizer: Optimizer, tokens: Tensor, wanted: Tensor, averages: list[Tensor]
) -> Tensor:
    """Averages of the parameters, in tensors that each rank gives."""
    loss = train_step(model, optimizer, tokens, wanted)
    with torch.no_grad():
        for average, parameter in zip(averages, model.parameters(), strict=True):
            average.lerp_(parameter, 0.1)
    return loss


def run_averages(rank: int, stage: int) -> None:
    """Those of the ranks differ, so that no rank may compute with its rows of them alone."""
    pair = Beside(Mixed, FUSED, averaging, stage)
    ours = [p.detach() + rank for p in pair.model.parameters()]
    theirs = [average.clone() for average in ours]
    for given in batches(rank):
        pair.step(pair.model, pair.optimizer, *given, ours)
        averaging(pair.ddp, pair.reference_optimizer, *given, theirs)
    pair.step.flush()
    pair.compare()
    assert all(map(torch.equal, ours, theirs))


def several_backwards(
    model: nn.Module, optimizer: Optimizer, tokens: Tensor, wanted: Tensor, unsynchronized: Any
) -> Tensor:
    """Two backwards for one update, the first of them in a context."""
    with unsynchronized():
        first = F.cross_entropy(model(tokens).flatten(0, 1), wanted.flatten())
        first.backward()
    second = F.cross_entropy(model(wanted).flatten(0, 1), tokens.flatten())
    second.backward()
    optimizer.step()
    optimizer.zero_grad()
    return (first + second).detach()


def run_several_backwards(rank: int, stage: int) -> None:
    """The sum of both is averaged, once, as DDP does with the first one under `no_sync`; without,
    DDP averages what it has averaged with the second one, which is the same but for rounding."""
    for made, synchronized in ((Mixed, False), (lambda: Mixed().double(), True)):
        pair = Beside(made, FUSED, several_backwards, stage, "default")
        context = nullcontext if synchronized else pair.ddp.no_sync
        for given in batches(rank):
            ours = pair.step(pair.model, pair.optimizer, *given, nullcontext)
            theirs = several_backwards(pair.ddp, pair.reference_optimizer, *given, context)
            assert torch.allclose(ours, theirs, rtol=0, atol=1e-12 if synchronized else 0)
        pair.step.flush()
        pair.compare(1e-9 if synchronized else 0)
