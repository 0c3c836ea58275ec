"""Cases that draw from Python's and numpy's generators in the step, and take plain numbers."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adam

from .case import Case, cured, mlp, refused, repeated, trains


def convolutions() -> tuple[nn.Module, SGD]:
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(),
                        nn.Linear(288, 4))  # fmt: skip
    return net, SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)


def images() -> tuple[Tensor, Tensor]:
    return torch.randn(5, 3, 8, 8), torch.randint(0, 4, (5,))


@refused("draws from a generator of Python or numpy")
def mixup_inside() -> Case:
    """Mixup as its authors wrote it: coefficient and permutation are drawn in the step."""
    net, optimizer = convolutions()

    def mixup_data(x: Tensor, y: Tensor, alpha: float) -> tuple[Tensor, Tensor, Tensor, float]:
        lam = numpy.random.beta(alpha, alpha) if alpha > 0 else 1
        index = torch.randperm(x.size()[0])
        return lam * x + (1 - lam) * x[index, :], y, y[index], lam

    def step(net: Any, optimizer: Any, inputs: Tensor, targets: Tensor) -> float:
        inputs, targets_a, targets_b, lam = mixup_data(inputs, targets, 1.0)
        outputs = net(inputs)
        loss = lam * F.cross_entropy(outputs, targets_a)
        loss = loss + (1 - lam) * F.cross_entropy(outputs, targets_b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    return Case(step, repeated(net, optimizer, draw=images), [net, optimizer])


@cured
def mixup_inside_cured() -> Case:
    """Mixup with the coefficient as an argument; torch still draws the permutation."""
    net, optimizer = convolutions()

    def step(net: Any, optimizer: Any, inputs: Tensor, targets: Tensor, lam: float) -> float:
        index = torch.randperm(inputs.size()[0])
        outputs = net(lam * inputs + (1 - lam) * inputs[index, :])
        loss = lam * F.cross_entropy(outputs, targets)
        loss = loss + (1 - lam) * F.cross_entropy(outputs, targets[index])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    calls = repeated(net, optimizer, draw=lambda: (*images(), float(numpy.random.beta(1.0, 1.0))))
    return Case(step, calls, [net, optimizer])


class Decoder(nn.Module):
    """A recurrent text decoder whose next input is the target word or its own last output."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.embedding = nn.GRU(8, 8), nn.Embedding(12, 8)
        self.rnn, self.out = nn.GRU(8, 8), nn.Linear(8, 12)

    def forward(self, source: Tensor, target: Tensor, teacher_forcing_ratio: float) -> Tensor:
        _, hidden = self.encoder(self.embedding(source))
        outputs, word = [], target[0]
        for t in range(1, target.shape[0]):
            output, hidden = self.rnn(self.embedding(word)[None], hidden)
            logits = self.out(output[0])
            outputs.append(logits)
            word = self.next_word(target[t], logits, teacher_forcing_ratio)
        return torch.stack(outputs)

    def next_word(self, target: Tensor, logits: Tensor, ratio: float) -> Tensor:
        teacher_force = random.random() < ratio
        return target if teacher_force else logits.argmax(1)


class DecoderByTensors(Decoder):
    """A recurrent decoder that draws with torch, and chooses by tensor operators."""

    def next_word(self, target: Tensor, logits: Tensor, ratio: float) -> Tensor:
        return torch.where(torch.rand(()) < ratio, target, logits.argmax(1))


@refused("draws from a generator of Python or numpy")
def teacher_forcing() -> Case:
    """Teacher forcing by a Python draw for each word."""
    return translating(Decoder())


@cured
def teacher_forcing_cured() -> Case:
    """Teacher forcing by a torch draw for each word."""
    return translating(DecoderByTensors())


def translating(model: Decoder) -> Case:
    optimizer = Adam(model.parameters())

    def step(model: Any, optimizer: Any, source: Tensor, target: Tensor) -> float:
        output = model(source, target, 0.5)
        loss = F.cross_entropy(output.flatten(0, 1), target[1:].flatten(), ignore_index=0)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1)
        optimizer.step()
        return loss.item()

    def draw() -> tuple[Tensor, Tensor]:
        return torch.randint(1, 12, (5, 3)), torch.randint(1, 12, (3, 3))

    return Case(step, repeated(model, optimizer, draw=draw), [model, optimizer])


def adversaries() -> tuple[list[nn.Module], list[Adam]]:
    leaky = partial(nn.LeakyReLU, 0.2)
    generator = mlp(4, 16, 6, activation=leaky).append(nn.Tanh())
    critic = mlp(6, 16, 1, activation=leaky).append(nn.Sigmoid())
    nets: list[nn.Module] = [generator, critic]
    return nets, [Adam(net.parameters(), lr=2e-4) for net in nets]


def play(
    nets: Any, optimizers: Any, real: Tensor, noise: Tensor, valid: Tensor, fake: Tensor
) -> tuple[float, float]:
    """Trains generator and critic on noise and labels."""
    (generator, critic), (of_generator, of_critic) = nets, optimizers
    of_generator.zero_grad()
    made = generator(noise)
    g_loss = F.binary_cross_entropy(critic(made), valid)
    g_loss.backward()
    of_generator.step()
    of_critic.zero_grad()
    d_loss = F.binary_cross_entropy(critic(real), valid)
    d_loss = (d_loss + F.binary_cross_entropy(critic(made.detach()), fake)) / 2
    d_loss.backward()
    of_critic.step()
    return float(g_loss.detach()), float(d_loss.detach())


@refused("draws from a generator of Python or numpy")
def gan_with_noise_of_numpy() -> Case:
    """A GAN fed by `Tensor(np.random.normal(…))`, whose labels are sometimes flipped."""
    nets, optimizers = adversaries()
    tensor = torch.FloatTensor

    def step(nets: Any, optimizers: Any, real: Tensor) -> tuple[float, float]:
        valid, fake = tensor(real.size(0), 1).fill_(0.9), tensor(real.size(0), 1).fill_(0.0)
        if random.random() < 0.05:
            valid, fake = fake, valid
        noise = tensor(numpy.random.normal(0, 1, (real.shape[0], 4)))
        return play(nets, optimizers, real, noise, valid, fake)

    calls = repeated(nets, optimizers, draw=lambda: (torch.rand(5, 6),))
    return Case(step, calls, [*nets, *optimizers])


@cured
def gan_with_noise_of_numpy_cured() -> Case:
    """A GAN with the noise and the flip of labels as tensor arguments."""
    nets, optimizers = adversaries()

    def step(
        nets: Any, optimizers: Any, real: Tensor, noise: Tensor, flip: bool
    ) -> tuple[float, float]:
        valid, fake = torch.full((real.size(0), 1), 0.9), torch.zeros(real.size(0), 1)
        if flip:
            valid, fake = fake, valid
        return play(nets, optimizers, real, noise, valid, fake)

    def drawn() -> tuple[Tensor, Tensor, bool]:
        noise = torch.from_numpy(numpy.random.normal(0, 1, (5, 4))).float()
        return torch.rand(5, 6), noise, random.random() < 0.05

    return Case(step, repeated(nets, optimizers, draw=drawn), [*nets, *optimizers])


def two_batches() -> tuple[list[tuple[Tensor, Tensor]]]:
    return ([(torch.randn(5, 6), torch.randint(0, 3, (5,))) for _ in range(2)],)


@trains(partial(mlp, 6, 16, 3), Adam, two_batches, lr=0.01, weight_decay=5e-4)
def running_loss_as_float(net: Any, optimizer: Any, batches: list[tuple[Tensor, Tensor]]) -> Any:
    """An epoch's mean loss and accuracy in plain numbers, over two batches."""
    total_loss, correct, count = 0.0, 0, 0
    for x, y in batches:
        optimizer.zero_grad()
        out = net(x).log_softmax(dim=-1)
        loss = F.nll_loss(out, y)
        loss.backward()
        optimizer.step()
        total_loss += float(loss.detach()) * x.size(0)
        correct += int((out.argmax(dim=-1) == y).sum())
        count += x.size(0)
    return total_loss / count, correct / count
