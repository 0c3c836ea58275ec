"""Cases that count and average in Python numbers of their own, as scripts do."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adam, AdamW

from .case import STEPS, Case, case, cured, mlp, refused, repeated


class DelayedAgent:
    """TD3 as published: it counts its calls, and updates the policy in every second one."""

    def __init__(self) -> None:
        self.actor, self.critic = nn.Sequential(mlp(4, 16, 2), nn.Tanh()), mlp(6, 16, 1)
        self.actor_target, self.critic_target = copy.deepcopy((self.actor, self.critic))
        self.actor_optimizer = Adam(self.actor.parameters(), lr=3e-4)
        self.critic_optimizer = Adam(self.critic.parameters(), lr=3e-4)
        self.total_it, self.policy_freq, self.epsilon = 0, 2, 1.0

    def train(self, state: Tensor, action: Tensor, after: Tensor, reward: Tensor) -> Tensor:
        self.total_it += 1
        self.epsilon = 0.05 + 0.85 * math.exp(-self.total_it / 10)
        with torch.no_grad():
            noise = (torch.randn_like(action) * 0.2).clamp(-self.epsilon, self.epsilon)
            following = (self.actor_target(after) + noise).clamp(-1, 1)
            wanted = reward + 0.99 * self.critic_target(torch.cat([after, following], 1))
        loss = F.mse_loss(self.critic(torch.cat([state, action], 1)), wanted)
        self.critic_optimizer.zero_grad()
        loss.backward()
        self.critic_optimizer.step()
        if self.total_it % self.policy_freq == 0:
            policy_loss = -self.critic(torch.cat([state, self.actor(state)], 1)).mean()
            self.actor_optimizer.zero_grad()
            policy_loss.backward()
            self.actor_optimizer.step()
            pairs = ((self.critic, self.critic_target), (self.actor, self.actor_target))
            for net, target in pairs:
                for p, t in zip(net.parameters(), target.parameters(), strict=True):
                    t.data.copy_(0.005 * p.data + 0.995 * t.data)
        return loss


@case
def td3_that_counts() -> Case:
    agent = DelayedAgent()
    calls = [tuple(torch.randn(8, width) for width in (4, 2, 4, 1)) for _ in range(STEPS)]
    return Case(agent.train, calls, [vars(agent)])


class AverageMeter:
    """The meter of torchvision's and ImageNet's examples."""

    def __init__(self) -> None:
        self.val = self.avg = self.sum = self.count = 0

    def update(self, val: Any, n: int = 1) -> None:
        self.val = val
        self.sum += val * n
        self.count += n
        self.avg = self.sum / self.count


def images() -> tuple[Tensor, Tensor]:
    return torch.rand(6, 3, 8, 8), torch.randint(0, 4, (6,))


def metered() -> tuple[Any, list[Any]]:
    """A step of an image classifier that keeps loss and accuracy in meters, and what it changes."""
    model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten())
    model.append(nn.Linear(216, 4))
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    losses, top1 = AverageMeter(), AverageMeter()

    def step(images: Tensor, target: Tensor) -> float:
        output = model(images)
        loss = F.cross_entropy(output, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.update(loss.item(), images.size(0))
        top1.update((output.argmax(1) == target).sum().item() * 100.0 / images.size(0))
        return loss.item()

    return step, [model, optimizer, vars(losses), vars(top1)]


@refused("changes history outside its arguments")
def running_averages() -> Case:
    """Loss and accuracy in meters, with a list of all losses."""
    train, state = metered()
    history: list[float] = []

    def step(images: Tensor, target: Tensor) -> None:
        history.append(train(images, target))

    return Case(step, repeated(draw=images), [*state, history])


@cured
def running_averages_cured() -> Case:
    """Loss and accuracy in meters; the list of losses is kept outside the step."""
    step, state = metered()
    history: list[float] = []
    state = [*state, history]
    return Case(step, repeated(draw=images), state, lambda index, loss: history.append(loss))


class Annealed(nn.Module):
    """A variational autoencoder whose beta rises with the calls of its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = mlp(12, 16, 8), mlp(4, 16, 12)
        self.iter, self.warmup = 0, 3

    def forward(self, x: Tensor) -> Tensor:
        self.iter += 1
        beta = min(1, self.iter / self.warmup)
        mean, log_variance = self.encoder(x).chunk(2, 1)
        z = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        divergence = -0.5 * (1 + log_variance - mean**2 - log_variance.exp()).sum(1).mean()
        loss: Tensor = F.mse_loss(self.decoder(z), x) + beta * divergence
        return loss


@case
def annealed_divergence() -> Case:
    model = Annealed()
    optimizer = AdamW(model.parameters(), lr=1e-3)

    def step(model: nn.Module, optimizer: Any, x: Tensor) -> Tensor:
        loss: Tensor = model(x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    calls = repeated(model, optimizer, draw=lambda: (torch.randn(6, 12),))
    return Case(step, calls, [model, optimizer, vars(model)])
