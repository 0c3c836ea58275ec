"""Random programs in which each rank has sizes and takes branches by values of its own batch.

A program is a model of several layers and a list of statements, drawn by a seed, which all ranks
have alike: layers on the rows that a mask selects, experts that may get no row, layers by the sign
of a mean, as many rounds as a mask has rows, an early return. What a rank uses of the model depends
on its batch. Some programs leave out the backward, or the update, by a number of the batch that all
ranks happen to have alike. Some hold what no graph can follow on one rank alone: a branch that
raises, that communicates, or that leaves out the backward.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

ROWS, WIDTH = 5, 3


class BranchError(ValueError):
    """Raised by a branch of a program."""


Statement = Callable[["RandomModel", Tensor, Tensor], Tensor]
"""From what is computed so far and the batch to what is computed next."""


class RandomModel(nn.Module):
    """The layers of a program.

    Attributes:
        statements: what the forward does.
    """

    def __init__(self, layers: int, normalizes: bool, statements: list[Statement]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))
        self.norm = nn.BatchNorm1d(WIDTH) if normalizes else nn.Identity()
        self.statements = statements

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.norm(torch.tanh(self.layers[0](x)))
        for statement in self.statements:
            try:
                hidden = statement(self, hidden, x)
            except _ReturnedError as returned:
                return returned.value
        return hidden


class _ReturnedError(Exception):
    def __init__(self, value: Tensor) -> None:
        self.value = value


def _mask(draws: random.Random) -> Callable[[Tensor], Tensor]:
    column, limit = draws.randrange(WIDTH), draws.choice([0.0, 0.7, 1.1, 1.6])
    return lambda x: x[:, column] > limit


def _rows(draws: random.Random, layer: int) -> Statement:
    mask = _mask(draws)

    def rows(model: RandomModel, hidden: Tensor, x: Tensor) -> Tensor:
        (row,) = torch.where(mask(x))
        if row.numel() == 0:
            return hidden
        return hidden.index_add(0, row, model.layers[layer](hidden[row]))

    return rows


def _any(draws: random.Random, layer: int) -> Statement:
    mask = _mask(draws)

    def any_row(model: RandomModel, hidden: Tensor, x: Tensor) -> Tensor:
        chosen = mask(x)
        if not chosen.any():
            return hidden * 0.5
        return hidden + model.layers[layer](x[chosen]).sum(0)

    return any_row


def _sign(draws: random.Random, layer: int) -> Statement:
    limit, other = draws.uniform(-0.3, 0.3), draws.randrange(layer + 1)

    def sign(model: RandomModel, hidden: Tensor, x: Tensor) -> Tensor:
        result: Tensor = model.layers[layer if x.mean() > limit else other](hidden)
        return result

    return sign


def _experts(draws: random.Random, layer: int) -> Statement:
    shift = draws.uniform(-1.0, 1.0)

    def experts(model: RandomModel, hidden: Tensor, x: Tensor) -> Tensor:
        choice = (x[:, 0] > shift).long()
        for number, expert in enumerate((model.layers[0], model.layers[layer])):
            index = (choice == number).nonzero().squeeze(-1)
            if index.numel():
                hidden = hidden.index_add(0, index, expert(hidden[index]))
        return hidden

    return experts


def _rounds(draws: random.Random, layer: int) -> Statement:
    mask = _mask(draws)

    def rounds(model: RandomModel, hidden: Tensor, x: Tensor) -> Tensor:
        for _ in range(int(mask(x).sum()) % 3):
            hidden = torch.tanh(model.layers[layer](hidden))
        return hidden

    return rounds


def _early(draws: random.Random, layer: int) -> Statement:
    mask = _mask(draws)

    def early(model: RandomModel, hidden: Tensor, x: Tensor) -> Tensor:
        if not mask(x).any():
            raise _ReturnedError(hidden)
        return hidden + model.layers[layer](x)

    return early


def _padded(draws: random.Random, layer: int) -> Statement:
    mask = _mask(draws)

    def padded(model: RandomModel, hidden: Tensor, x: Tensor) -> Tensor:
        chosen = hidden[mask(x)]
        result: Tensor = hidden + model.layers[layer](chosen).sum() / max(len(chosen), 1)
        return result

    return padded


def _raises(draws: random.Random, layer: int) -> Statement:
    mask = _mask(draws)

    def raises(model: RandomModel, hidden: Tensor, x: Tensor) -> Tensor:
        if mask(x).sum() == 2:
            raise BranchError("two rows")
        return hidden + model.layers[layer](x)

    return raises


def _communicates(draws: random.Random, layer: int) -> Statement:
    mask = _mask(draws)

    def communicates(model: RandomModel, hidden: Tensor, x: Tensor) -> Tensor:
        if mask(x).sum() == 2:
            dist.all_reduce(hidden.detach().sum())
        return hidden + model.layers[layer](x)

    return communicates


FOLLOWED = (_rows, _any, _sign, _experts, _rounds, _early, _padded)
REFUSED = (_raises, _communicates)


@dataclass
class RandomProgram:
    """A program.

    Attributes:
        may_be_refused: it has a branch that a rank may not take alone.
        leaves_out: a rank leaves out the backward by a number of its own batch.
        returns: where all ranks end the step by a number that their batches have alike.
    """

    seed: int

    def __post_init__(self) -> None:
        draws = random.Random(self.seed)
        self._layers = draws.randint(3, 4)
        self._normalizes = draws.random() < 0.25
        self.ending = draws.choice(["plain", "clipped", "halved", "finite"])
        kinds = [draws.choice(FOLLOWED) for _ in range(draws.randint(1, 3))]
        self.leaves_out = draws.random() < 0.08
        if draws.random() < 0.12:
            kinds.insert(draws.randrange(len(kinds) + 1), draws.choice(REFUSED))
        self.may_be_refused = self.leaves_out or any(kind in REFUSED for kind in kinds)
        self.statements = [kind(draws, draws.randrange(1, self._layers)) for kind in kinds]
        self.returns = draws.choice(["", "", "at once", "with the loss", "after backward"])
        self.names = [kind.__name__ for kind in kinds]

    def __str__(self) -> str:
        ends = f"{self.ending}{', no backward' if self.leaves_out else ''}; returns {self.returns}"
        return f"{self.seed}: {self.names} {ends}"

    def model(self) -> RandomModel:
        torch.manual_seed(self.seed)
        return RandomModel(self._layers, self._normalizes, self.statements)

    def step(
        self, model: nn.Module, net: nn.Module, optimizer: torch.optim.Optimizer
    ) -> Callable[[Tensor], Tensor]:
        """A training step.

        Args:
            net: the model, or what averages its gradients.
        """
        ending, leaves_out, returns = self.ending, self.leaves_out, self.returns

        def step(x: Tensor) -> Tensor:
            optimizer.zero_grad()
            if returns == "at once" and x[0, 1] > 0:
                return x.sum()
            loss = net(x).square().mean()
            if returns == "with the loss" and x[0, 1] > 0:
                return loss.detach()  # type: ignore[no-any-return]
            if leaves_out and x[0, 0] < -0.5:
                return loss.detach()  # type: ignore[no-any-return]
            if ending == "halved" and loss.item() > 0.3:
                loss = loss * 0.5
            loss.backward()
            if returns == "after backward" and x[0, 1] > 0:
                return loss.detach()  # type: ignore[no-any-return]
            if ending in ("clipped", "finite"):
                norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                if ending == "finite" and not torch.isfinite(norm):
                    return loss.detach()  # type: ignore[no-any-return]
            optimizer.step()
            return loss.detach()  # type: ignore[no-any-return]

        return step

    def batches(self, rank: int, count: int) -> list[Tensor]:
        numbers = torch.Generator().manual_seed(1000 * self.seed + rank)
        batches = [torch.randn(ROWS, WIDTH, generator=numbers) for _ in range(count)]
        alike = torch.Generator().manual_seed(self.seed)
        for batch in batches if self.returns else []:
            batch[0, 1] = torch.randn(1, generator=alike)
        return batches


def left(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Parameters, buffers, gradients and optimizer state; an empty tensor where there is none."""
    found: list[Any] = list(model.state_dict().values())
    for parameter in model.parameters():
        found.append(torch.empty(0) if parameter.grad is None else parameter.grad)
        state = optimizer.state[parameter]
        found += [torch.as_tensor(len(state)), *map(torch.as_tensor, state.values())]
    return [tensor.detach().clone() for tensor in found]
