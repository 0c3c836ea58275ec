"""Recurrent layers by oneDNN, packed sequences, the CTC loss: equal to eager."""

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
from test_decisions import assert_alike, finish, left_by


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.rnn = kind(4, 6, batch_first=True, **options)
        size = options.get("proj_size", 6)
        self.last = nn.Linear(2 * size if options.get("bidirectional") else size, 3)

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


def packed_in_float64(model: nn.Module, optimizer: Optimizer, x: Tensor, lengths: Any) -> Any:
    return finish(optimizer, model(x.double(), lengths).square().mean())


def transcribed(model: nn.Module, optimizer: Optimizer, x: Tensor, lengths: Any) -> Any:
    scores = F.log_softmax(model(x), dim=2).transpose(0, 1)
    targets = (x[:, :3, 0] > 0).long() + 1
    loss = F.ctc_loss(scores, targets, torch.full((4,), 7), lengths.clamp(max=3))
    return finish(optimizer, loss)


def skipped_unless_finite(model: nn.Module, optimizer: Optimizer, x: Tensor, lengths: Any) -> Any:
    """Decides by values behind the layer, and behind its backward."""
    loss = model(x).square().mean()
    if not torch.isfinite(loss):
        return loss
    optimizer.zero_grad()
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    if norm > 1e-3:
        optimizer.step()
    return norm


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
    assert_alike(found, expected)
    return made


LENGTHS = torch.tensor([7, 2, 5, 2])


@pytest.mark.parametrize("options", [{"num_layers": 2, "dropout": 0.3}, {"bidirectional": True}])
def test_lstm_by_onednn(options: dict[str, Any]) -> None:
    check(whole, lambda: Recurrent(nn.LSTM, **options), [LENGTHS] * 4)


def without_gradients(model: nn.Module, optimizer: Optimizer, x: Tensor, lengths: Any) -> Any:
    """As a teacher or a target network runs, and as what is predicted is shown."""
    with torch.no_grad():
        before = model(x).clone()
    loss = finish(optimizer, (model(x) - before * 0.9).square().mean())
    with torch.inference_mode():
        return torch.stack([loss, before.sum(), model(x).double().sum().float()])


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("options", [{"num_layers": 2, "dropout": 0.3}, {"bidirectional": True}])
def test_layers_without_gradients(kind: type[nn.RNNBase], options: dict[str, Any]) -> None:
    """oneDNN rounds otherwise where nothing is kept for a backward."""
    check(without_gradients, lambda: Recurrent(kind, **options), [LENGTHS] * 2)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_packed_sequences(kind: type[nn.RNNBase]) -> None:
    lengths = [LENGTHS, LENGTHS, torch.tensor([3, 3, 6, 1]), LENGTHS]
    assert check(packed, lambda: Recurrent(kind, bidirectional=True), lengths) == 2


@pytest.mark.parametrize("options", [{"num_layers": 2, "dropout": 0.3}, {"bidirectional": True}])
def test_packed_sequences_of_one_length(options: dict[str, Any]) -> None:
    """Torch gives them to oneDNN as sequences that are not packed, and those of others not."""
    alike = torch.full((4,), 5)
    lengths = [alike, LENGTHS, alike, torch.full((4,), 1)]
    assert check(packed, lambda: Recurrent(nn.LSTM, **options), lengths) == 3


def test_packed_sequences_of_one_length_that_onednn_does_not_take() -> None:
    alike = [torch.full((4,), 5)] * 2
    check(packed, lambda: Recurrent(nn.LSTM, proj_size=3, bidirectional=True), alike)
    check(packed_in_float64, lambda: Recurrent(nn.LSTM).double(), alike)


def test_lengths_in_a_list() -> None:
    assert check(packed, lambda: Recurrent(nn.RNN), [[7, 2, 5, 2]] * 3) == 1


def test_ctc_loss() -> None:
    lengths = [LENGTHS, torch.tensor([1, 2, 3, 3]), torch.tensor([2, 2, 2, 2])]
    assert check(transcribed, lambda: Recurrent(nn.GRU), lengths) == 1


def test_decisions_behind_an_lstm() -> None:
    model = lambda: Recurrent(nn.LSTM)  # noqa: E731
    assert check(skipped_unless_finite, model, [LENGTHS] * 3) == 1


def test_decisions_within_functions_of_torch() -> None:
    """`gaussian_nll_loss` asks itself whether a variance is negative."""

    def step(model: nn.Module, optimizer: Optimizer, x: Tensor, lengths: Any) -> Any:
        out = model(x)
        loss = F.gaussian_nll_loss(out[..., 0], x[..., 0], out[..., 1].exp())
        return finish(optimizer, loss)

    assert check(step, lambda: Recurrent(nn.GRU), [LENGTHS] * 3) == 1


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("infinite", [False, True])
def test_lengths_of_ctc_loss_in_lists(reduction: str, infinite: bool) -> None:
    model, loss_of = torch.nn.Linear(4, 5), torch.nn.CTCLoss(0, reduction, infinite)
    x, y = torch.randn(2, 10, 4), torch.randint(1, 5, (2, 4))

    def step(given: int, taken: int, kind: Any) -> Tensor:
        scores = model(x).log_softmax(2).transpose(0, 1)
        loss = loss_of(scores, y, kind([10, given]), kind([4, taken]))
        model.weight.grad = None
        loss.sum().backward()
        return loss.detach()

    for kind in (list, tuple, torch.tensor):
        run = graphopt.compile(step)
        for given, taken in ((9, 3), (9, 3), (4, 4), (2, 4)):
            ours, gradient = run(given, taken, kind), model.weight.grad
            theirs = step(given, taken, kind)
            assert torch.equal(ours, theirs)
            assert torch.equal(gradient.nan_to_num(), model.weight.grad.nan_to_num())
