"""Recurrent layers by oneDNN, packed sequences, the CTC loss, gradient scaling: equal to eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.optim import Optimizer

import graphopt
from test_decisions import finish, left_by, same


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.rnn = kind(4, 6, batch_first=True, **options)
        self.last = nn.Linear(12 if options.get("bidirectional") else 6, 3)

    def forward(self, x: Tensor, lengths: Any = None) -> Tensor:
        if lengths is None:
            return self.last(self.rnn(x)[0])
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        output, found = pad_packed_sequence(self.rnn(packed)[0], batch_first=True, total_length=7)
        return self.last(output) * found.clamp(max=3).view(-1, 1, 1)


def whole(model: nn.Module, optimizer: Optimizer, x: Tensor, lengths: Any) -> Any:
    return finish(optimizer, model(x).square().mean())


def packed(model: nn.Module, optimizer: Optimizer, x: Tensor, lengths: Any) -> Any:
    return finish(optimizer, model(x, lengths).square().mean())


def transcribed(model: nn.Module, optimizer: Optimizer, x: Tensor, lengths: Any) -> Any:
    scores = F.log_softmax(model(x), dim=2).transpose(0, 1)
    targets = (x[:, :3, 0] > 0).long() + 1
    loss = F.ctc_loss(scores, targets, torch.full((4,), 7), lengths.clamp(max=3))
    return finish(optimizer, loss)


def trained(
    step: Callable[..., Any], model: nn.Module, lengths: list[Any], compiled: bool
) -> tuple[list[Any], int]:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    torch.manual_seed(1)
    run = graphopt.compile(step) if compiled else step
    found: list[Any] = []
    for each in lengths:
        result = run(model, optimizer, torch.randn(4, 7, 4), each)
        if isinstance(run, graphopt.TrainStep):
            run.flush()
        found += [result, *left_by(model, optimizer)]
    made = len(run.captures) if isinstance(run, graphopt.TrainStep) else 0
    return found, made


def check(step: Callable[..., Any], make: Callable[[], nn.Module], lengths: list[Any]) -> int:
    results = []
    for compiled in (False, True):
        torch.manual_seed(0)
        results.append(trained(step, make(), lengths, compiled))
    (expected, _), (found, made) = results
    assert len(expected) == len(found)
    assert all(map(same, found, expected))
    return made


LENGTHS = torch.tensor([7, 2, 5, 2])


@pytest.mark.parametrize("options", [{"num_layers": 2, "dropout": 0.3}, {"bidirectional": True}])
def test_lstm_by_onednn(options: dict[str, Any]) -> None:
    check(whole, lambda: Recurrent(nn.LSTM, **options), [LENGTHS] * 4)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_packed_sequences(kind: type[nn.RNNBase]) -> None:
    lengths = [LENGTHS, LENGTHS, torch.tensor([3, 3, 6, 1]), LENGTHS]
    assert check(packed, lambda: Recurrent(kind, bidirectional=True), lengths) == 2


def test_lengths_in_a_list() -> None:
    assert check(packed, lambda: Recurrent(nn.RNN), [[7, 2, 5, 2]] * 3) == 1


def test_ctc_loss() -> None:
    lengths = [LENGTHS, torch.tensor([1, 2, 3, 3]), torch.tensor([2, 2, 2, 2])]
    assert check(transcribed, lambda: Recurrent(nn.GRU), lengths) == 1


@pytest.mark.parametrize("unscaled", [False, True])
def test_gradient_scaling(unscaled: bool) -> None:
    """Steps are skipped where gradients are not finite, and the scale shrinks and grows."""

    def run(compiled: bool) -> tuple[list[Any], int]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)

        def step(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            scaler.scale(loss).backward()
            if unscaled:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            return loss

        call = graphopt.compile(step) if compiled else step
        found: list[Any] = []
        for number in range(7):
            x = torch.randn(8, 4)
            x[0, 0] = float("inf") if number in (2, 5) else 0.0
            found += [call(model, optimizer, x), *left_by(model, optimizer)]
            found += [scaler.get_scale(), scaler._get_growth_tracker()]
        return found, len(call.captures) if isinstance(call, graphopt.TrainStep) else 0

    found, made = run(compiled=True)
    expected, _ = run(compiled=False)
    assert len(found) == len(expected)
    assert all(map(same, found, expected))
    assert made <= 3
