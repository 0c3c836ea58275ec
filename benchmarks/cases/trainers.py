"""Cases of trainer classes that keep state between calls or for the program."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Adagrad, Adam

from .case import STEPS, Case, case, mlp, repeated


def translator() -> nn.Module:
    return nn.Sequential(
        nn.ReflectionPad2d(1),
        nn.Conv2d(3, 6, 3),
        nn.InstanceNorm2d(6),
        nn.ReLU(True),
        nn.Conv2d(6, 3, 3, padding=1),
        nn.Tanh(),
    )


def patches() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 6, 4, 2, 1), nn.LeakyReLU(0.2, True), nn.Conv2d(6, 1, 3))


class CycleGAN:
    """CycleGAN's well-known model class: inputs, images and losses are attributes."""

    def __init__(self) -> None:
        self.G_A, self.G_B, self.D_A, self.D_B = translator(), translator(), patches(), patches()
        of_generators = [*self.G_A.parameters(), *self.G_B.parameters()]
        of_discriminators = [*self.D_A.parameters(), *self.D_B.parameters()]
        self.optimizer_G = Adam(of_generators, lr=2e-4, betas=(0.5, 0.999))
        self.optimizer_D = Adam(of_discriminators, lr=2e-4, betas=(0.5, 0.999))
        self.real_label, self.fake_label = torch.tensor(1.0), torch.tensor(0.0)

    def set_input(self, a: Tensor, b: Tensor) -> None:
        self.real_A, self.real_B = a, b

    def forward(self) -> None:
        self.fake_B, self.fake_A = self.G_A(self.real_A), self.G_B(self.real_B)
        self.rec_A, self.rec_B = self.G_B(self.fake_B), self.G_A(self.fake_A)

    def criterion(self, prediction: Tensor, real: bool) -> Tensor:
        label = self.real_label if real else self.fake_label
        return F.mse_loss(prediction, label.expand_as(prediction))

    def backward_D(self, net: Any, real: Tensor, fake: Tensor) -> Tensor:
        loss = self.criterion(net(real), True) + self.criterion(net(fake.detach()), False)
        (loss * 0.5).backward()
        return loss

    def set_requires_grad(self, requires_grad: bool) -> None:
        for net in (self.D_A, self.D_B):
            for parameter in net.parameters():
                parameter.requires_grad = requires_grad

    def optimize_parameters(self) -> None:
        self.forward()
        self.set_requires_grad(False)
        self.optimizer_G.zero_grad()
        self.loss_cycle = F.l1_loss(self.rec_A, self.real_A) + F.l1_loss(self.rec_B, self.real_B)
        self.loss_G = self.criterion(self.D_A(self.fake_B), True)
        self.loss_G = self.loss_G + self.criterion(self.D_B(self.fake_A), True)
        (self.loss_G + 10 * self.loss_cycle).backward()
        self.optimizer_G.step()
        self.set_requires_grad(True)
        self.optimizer_D.zero_grad()
        self.loss_D_A = self.backward_D(self.D_A, self.real_B, self.fake_B)
        self.loss_D_B = self.backward_D(self.D_B, self.real_A, self.fake_A)
        self.optimizer_D.step()


@case
def cycle_gan() -> Case:
    model = CycleGAN()
    batches = repeated(draw=lambda: (torch.rand(1, 3, 8, 8), torch.rand(1, 3, 8, 8)))
    model.set_input(*batches[0])

    def after(index: int, result: Any) -> None:
        model.set_input(*batches[(index + 1) % STEPS])

    return Case(model.optimize_parameters, [()] * STEPS, [vars(model)], after)


@case
def features_of_hooks() -> Case:
    """Feature distillation: hooks store a frozen teacher's features in a dictionary."""

    def network() -> nn.Module:
        layers = nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(216, 4)
        return nn.Sequential(*layers)

    teacher, student = network().eval().requires_grad_(False), network()
    features: dict[str, Tensor] = {}

    def keeping(name: str) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Tensor) -> None:
            features[name] = output

        return hook

    teacher[0].register_forward_hook(keeping("teacher"))  # type: ignore[operator]
    student[0].register_forward_hook(keeping("student"))  # type: ignore[operator]
    optimizer = Adam(student.parameters(), lr=1e-3)

    def step(x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = teacher(x)
        scores = student(x)
        soft = F.kl_div(F.log_softmax(scores / 4, 1), F.softmax(wanted / 4, 1), reduction="sum")
        loss = soft + F.cross_entropy(scores, y)
        loss = loss + F.mse_loss(features["student"], features["teacher"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    calls = repeated(draw=lambda: (torch.rand(4, 3, 8, 8), torch.randint(0, 4, (4,))))
    return Case(step, calls, [teacher, student, optimizer, features])


class Language:
    """A language model that keeps its hidden state between batches."""

    def __init__(self) -> None:
        self.embed, self.rnn, self.head = nn.Embedding(20, 8), nn.GRU(8, 8), nn.Linear(8, 20)
        self.nets = nn.ModuleList([self.embed, self.rnn, self.head])
        self.optimizer = Adagrad(self.nets.parameters(), lr=0.1)
        self.hidden = torch.zeros(1, 3, 8)

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        self.hidden = self.hidden.detach()
        output, self.hidden = self.rnn(self.embed(x), self.hidden)
        loss = F.cross_entropy(self.head(output).flatten(0, 1), y.flatten())
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.nets.parameters(), 0.25)
        self.optimizer.step()
        return loss


@case
def stateful_language_model() -> Case:
    model = Language()
    calls = repeated(draw=lambda: tuple(torch.randint(0, 20, (2, 5, 3))))
    return Case(model.step, calls, [vars(model)])


class TD3:
    """TD3 with twin critics; policy and targets follow in every second call."""

    def __init__(self) -> None:
        self.actor = nn.Sequential(mlp(4, 16, 2), nn.Tanh())
        self.critic = nn.ModuleList([mlp(6, 16, 1), mlp(6, 16, 1)])
        self.actor_target, self.critic_target = copy.deepcopy((self.actor, self.critic))
        self.actor_optimizer = Adam(self.actor.parameters(), lr=3e-4)
        self.critic_optimizer = Adam(self.critic.parameters(), lr=3e-4)
        self.total_it, self.policy_freq, self.tau = 0, 2, 0.005

    def train(self, state: Tensor, action: Tensor, after: Tensor, reward: Tensor) -> Tensor:
        with torch.no_grad():
            noise = (torch.randn_like(action) * 0.2).clamp(-0.5, 0.5)
            following = (self.actor_target(after) + noise).clamp(-1, 1)
            given = torch.cat([after, following], 1)
            wanted = reward + 0.99 * torch.min(*(q(given) for q in self.critic_target))
        given = torch.cat([state, action], 1)
        loss = sum(F.mse_loss(q(given), wanted) for q in self.critic)
        self.critic_optimizer.zero_grad()
        loss.backward()  # type: ignore[union-attr]
        self.critic_optimizer.step()
        if self.total_it % self.policy_freq == 0:
            self.improve(state)
        return loss  # type: ignore[return-value]

    def improve(self, state: Tensor) -> None:
        loss = -self.critic[0](torch.cat([state, self.actor(state)], 1)).mean()
        self.actor_optimizer.zero_grad()
        loss.backward()
        self.actor_optimizer.step()
        pairs = ((self.critic, self.critic_target), (self.actor, self.actor_target))
        for net, target in pairs:
            for p, t in zip(net.parameters(), target.parameters(), strict=True):
                t.data.copy_(self.tau * p.data + (1 - self.tau) * t.data)


@case
def td3() -> Case:
    """TD3 whose call count is an attribute that the program advances."""
    agent = TD3()

    def after(index: int, loss: Any) -> None:
        agent.total_it += 1

    calls = [
        (torch.randn(6, 4), torch.rand(6, 2), torch.randn(6, 4), torch.randn(6, 1))
        for _ in range(STEPS + 3)
    ]
    return Case(agent.train, calls, [vars(agent)], after)
