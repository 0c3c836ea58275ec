"""Cases of recurrent models and speech."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.optim import Adam, AdamW

from .case import STEPS, Case, case, trains


class Classifier(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.rnn = kind(8, 8, batch_first=True, **options)
        self.fc = nn.Linear(16 if options.get("bidirectional") else 8, 3)

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        x = self.embed(x)
        if lengths is None:
            return self.fc(self.rnn(x)[0][:, -1])
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        output, _ = pad_packed_sequence(self.rnn(packed)[0], batch_first=True)
        return self.fc(output.mean(1))


def classify(model: Any, optimizer: Any, *data: Tensor) -> Tensor:
    *inputs, labels = data
    loss = F.cross_entropy(model(*inputs), labels)
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss


def texts() -> tuple[Tensor, Tensor]:
    return torch.randint(0, 20, (4, 7)), torch.randint(0, 3, (4,))


for name, kind, options in (
    ("lstm", nn.LSTM, {"num_layers": 2, "dropout": 0.2}),
    ("bidirectional_lstm", nn.LSTM, {"bidirectional": True}),
    ("gru", nn.GRU, {}),
    ("elman", nn.RNN, {}),
):
    trains(partial(Classifier, kind, **options), Adam, texts, name=name, lr=1e-3)(classify)


def _packed(lengths: list[Tensor]) -> Case:
    model = Classifier(nn.LSTM)
    optimizer = Adam(model.parameters(), lr=1e-3)
    calls = []
    for each in lengths:
        x, y = texts()
        calls.append((model, optimizer, x, each, y))
    return Case(classify, calls, [model, optimizer])


@case
def packed_sequences() -> Case:
    return _packed([torch.tensor([7, 5, 3, 2])] * STEPS)


@case
def packed_sequences_that_vary() -> Case:
    return _packed([torch.tensor([7, 5, 3, n + 1]) for n in range(STEPS)])


class Speech(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(6, 8, 3, padding=1)
        self.rnn = nn.GRU(8, 8, batch_first=True, bidirectional=True)
        self.fc = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        h = F.gelu(self.conv(x)).transpose(1, 2)
        return F.log_softmax(self.fc(self.rnn(h)[0]), dim=2).transpose(0, 1)


ctc_loss = nn.CTCLoss(blank=0, zero_infinity=True)


def spoken() -> tuple[Tensor, ...]:
    lengths = torch.full((3,), 10), torch.tensor([4, 3, 2])
    return torch.randn(3, 6, 10), torch.randint(1, 5, (3, 4)), *lengths


@trains(Speech, AdamW, spoken, lr=5e-4)
def speech_with_ctc(
    model: Any, optimizer: Any, x: Any, y: Any, in_len: Any, out_len: Any
) -> Tensor:
    optimizer.zero_grad()
    loss = ctc_loss(model(x), y, in_len, out_len)
    loss.backward()
    optimizer.step()
    return loss


class Decoder(nn.Module):
    """An LSTM cell decoder, step by step, with teacher forcing by a torch draw."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.cell, self.out = nn.Embedding(20, 8), nn.LSTMCell(8, 8), nn.Linear(8, 20)

    def forward(self, targets: Tensor) -> Tensor:
        batch, length = targets.shape
        h = c = torch.zeros(batch, 8)
        token, outputs = targets[:, 0], []
        for t in range(1, length):
            h, c = self.cell(self.embed(token), (h, c))
            logits = self.out(h)
            outputs.append(logits)
            forced = torch.rand(batch) < 0.5
            token = torch.where(forced, targets[:, t], logits.argmax(1))
        return torch.stack(outputs, 1)


@trains(Decoder, Adam, lambda: (torch.randint(0, 20, (4, 5)),), lr=1e-3)
def seq2seq_decoder(model: Any, optimizer: Any, targets: Tensor) -> Tensor:
    optimizer.zero_grad()
    logits = model(targets)
    loss = F.cross_entropy(logits.flatten(0, 1), targets[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    return loss


@case
def hidden_state_carried() -> Case:
    """Truncated back-propagation: the hidden state is carried from call to call."""
    model = nn.ModuleDict(
        {"embed": nn.Embedding(20, 8), "rnn": nn.GRU(8, 8), "out": nn.Linear(8, 20)}
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    held = {"hidden": torch.zeros(1, 4, 8)}

    def step(model: Any, optimizer: Any, x: Tensor, hidden: Tensor) -> Any:
        optimizer.zero_grad()
        output, hidden = model["rnn"](model["embed"](x[:-1]), hidden.detach())
        loss = F.cross_entropy(model["out"](output).flatten(0, 1), x[1:].flatten())
        loss.backward()
        optimizer.step()
        return loss, hidden.detach()

    calls = [
        (model, optimizer, torch.randint(0, 20, (5, 4)), torch.randn(1, 4, 8)) for _ in range(STEPS)
    ]

    def after(index: int, result: Any) -> None:
        held["hidden"] = result[1]

    return Case(step, calls, [model, optimizer, held], after)
