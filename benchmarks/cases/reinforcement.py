"""Cases of reinforcement and meta-learning."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Categorical, Normal
from torch.nn import functional as F
from torch.optim import Adam, AdamW

from .case import Case, case, mlp, repeated, trains, trains_all


def layer_init(layer: nn.Linear, std: float = 2**0.5) -> nn.Linear:
    torch.nn.init.orthogonal_(layer.weight, std)
    torch.nn.init.constant_(layer.bias, 0.0)
    return layer


class Agent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.critic = nn.Sequential(layer_init(nn.Linear(4, 16)), nn.Tanh(), nn.Linear(16, 1))
        self.actor = nn.Sequential(layer_init(nn.Linear(4, 16)), nn.Tanh(), nn.Linear(16, 2))

    def get_value(self, x: Tensor) -> Tensor:
        return self.critic(x)

    def get_action_and_value(self, x: Tensor, action: Tensor | None = None) -> Any:
        probs = Categorical(logits=self.actor(x))
        if action is None:
            action = probs.sample()
        return action, probs.log_prob(action), probs.entropy(), self.critic(x)


def rollout() -> tuple[Tensor, ...]:
    n = 16
    return (torch.randn(n, 4), torch.randint(0, 2, (n,)), torch.randn(n) * 0.1 - 0.7,
            torch.randn(n), torch.randn(n), torch.randn(n))  # fmt: skip


@trains(Agent, Adam, rollout, lr=2.5e-4, eps=1e-5)
def ppo(agent: Any, optimizer: Any, obs: Any, actions: Any, old: Any, adv: Any, ret: Any,
        values: Any) -> Any:  # fmt: skip
    """PPO: CleanRL's update of one minibatch."""
    _, newlogprob, entropy, newvalue = agent.get_action_and_value(obs, actions.long())
    logratio = newlogprob - old
    ratio = logratio.exp()
    with torch.no_grad():
        approx_kl = ((ratio - 1) - logratio).mean()
        clipfrac = ((ratio - 1.0).abs() > 0.2).float().mean().item()
    adv = (adv - adv.mean()) / (adv.std() + 1e-8)
    pg_loss = torch.max(-adv * ratio, -adv * torch.clamp(ratio, 0.8, 1.2)).mean()
    newvalue = newvalue.view(-1)
    clipped = values + torch.clamp(newvalue - values, -0.2, 0.2)
    v_loss = 0.5 * torch.max((newvalue - ret) ** 2, (clipped - ret) ** 2).mean()
    loss = pg_loss - 0.01 * entropy.mean() + v_loss * 0.5
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
    optimizer.step()
    return loss, approx_kl, clipfrac


def policy() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 16), nn.Dropout(p=0.6), nn.ReLU(), nn.Linear(16, 2))


@trains(policy, Adam, lambda: (torch.randn(6, 4), torch.randn(6)), lr=1e-2)
def reinforce(policy: Any, optimizer: Any, states: Tensor, returns: Tensor) -> Any:
    m = Categorical(F.softmax(policy(states), dim=1))
    action = m.sample()
    loss = (-m.log_prob(action) * returns).sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss, action


class Actor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.mean, self.logstd = nn.Linear(3, 16), nn.Linear(16, 1), nn.Linear(16, 1)
        self.register_buffer("action_scale", torch.tensor(2.0))
        self.register_buffer("action_bias", torch.tensor(0.0))

    def get_action(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = F.relu(self.fc(x))
        log_std = torch.tanh(self.logstd(x))
        log_std = -5 + 0.5 * (2 + 5) * (log_std + 1)
        normal = Normal(self.mean(x), log_std.exp())
        x_t = normal.rsample()
        y_t = torch.tanh(x_t)
        log_prob = normal.log_prob(x_t)
        log_prob -= torch.log(self.action_scale * (1 - y_t.pow(2)) + 1e-6)
        return y_t * self.action_scale + self.action_bias, log_prob.sum(1, keepdim=True)


class Q(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(4, 16, 1)

    def forward(self, x: Tensor, a: Tensor) -> Tensor:
        return self.net(torch.cat([x, a], 1))


@case
def sac() -> Case:
    """Soft actor-critic with a learned temperature: a bare tensor with its own optimizer."""
    actor, qf1, qf2 = Actor(), Q(), Q()
    target1, target2 = copy.deepcopy(qf1), copy.deepcopy(qf2)
    q_optimizer = Adam([*qf1.parameters(), *qf2.parameters()], lr=1e-3)
    actor_optimizer = Adam(actor.parameters(), lr=3e-4)
    log_alpha = torch.zeros(1, requires_grad=True)
    a_optimizer = Adam([log_alpha], lr=1e-3)

    def step(actor: Any, qf1: Any, qf2: Any, target1: Any, target2: Any, q_optimizer: Any,
             actor_optimizer: Any, a_optimizer: Any, obs: Any, act: Any, nxt: Any,
             rew: Any) -> Any:  # fmt: skip
        alpha = log_alpha.exp().detach()
        with torch.no_grad():
            next_action, next_log_pi = actor.get_action(nxt)
            q1, q2 = target1(nxt, next_action), target2(nxt, next_action)
            goal = torch.min(q1, q2) - alpha * next_log_pi
            next_q = rew.flatten() + 0.99 * goal.view(-1)
        qf_loss = F.mse_loss(qf1(obs, act).view(-1), next_q)
        qf_loss = qf_loss + F.mse_loss(qf2(obs, act).view(-1), next_q)
        q_optimizer.zero_grad()
        qf_loss.backward()
        q_optimizer.step()
        pi, log_pi = actor.get_action(obs)
        actor_loss = ((alpha * log_pi) - torch.min(qf1(obs, pi), qf2(obs, pi))).mean()
        actor_optimizer.zero_grad()
        actor_loss.backward()
        actor_optimizer.step()
        with torch.no_grad():
            _, log_pi = actor.get_action(obs)
        alpha_loss = (-log_alpha.exp() * (log_pi - 1.0)).mean()
        a_optimizer.zero_grad()
        alpha_loss.backward()
        a_optimizer.step()
        for net, target in ((qf1, target1), (qf2, target2)):
            for param, target_param in zip(net.parameters(), target.parameters(), strict=True):
                target_param.data.copy_(0.005 * param.data + (1 - 0.005) * target_param.data)
        return qf_loss, actor_loss, alpha_loss

    def batch() -> tuple[Tensor, ...]:
        return torch.randn(8, 3), torch.randn(8, 1), torch.randn(8, 3), torch.randn(8)

    fixed = (actor, qf1, qf2, target1, target2, q_optimizer, actor_optimizer, a_optimizer)
    return Case(step, repeated(*fixed, draw=batch), [*fixed, log_alpha])


def with_target(**options: Any) -> tuple[Any, ...]:
    policy = mlp(4, 16, 2)
    return policy, copy.deepcopy(policy), AdamW(policy.parameters(), lr=1e-4, **options)


@case
def dqn() -> Case:
    """DQN of PyTorch's tutorial: a mask of non-final states, soft updates by state_dict."""
    fixed = policy, target, _ = with_target(amsgrad=True)

    def step(policy: Any, target: Any, optimizer: Any, state: Any, action: Any, mask: Any,
             following: Any, reward: Any) -> Any:  # fmt: skip
        values = policy(state).gather(1, action)
        next_values = torch.zeros(state.shape[0])
        with torch.no_grad():
            next_values[mask] = target(following).max(1).values
        expected = (next_values * 0.99) + reward
        loss = nn.SmoothL1Loss()(values, expected.unsqueeze(1))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_value_(policy.parameters(), 100)
        optimizer.step()
        return loss

    def batch() -> tuple[Tensor, ...]:
        mask = torch.zeros(8, dtype=torch.bool)
        mask[torch.randperm(8)[:6]] = True
        return (torch.randn(8, 4), torch.randint(0, 2, (8, 1)), mask, torch.randn(6, 4),
                torch.randn(8))  # fmt: skip

    def after(index: int, loss: Any) -> None:
        old, new = target.state_dict(), policy.state_dict()
        for key in new:
            old[key] = new[key] * 0.005 + old[key] * 0.995
        target.load_state_dict(old)

    return Case(step, repeated(*fixed, draw=batch), fixed, after)


def transitions() -> tuple[Tensor, ...]:
    return torch.randn(8, 4), torch.randint(0, 2, (8, 1)), torch.randn(8, 4), torch.rand(8) > 0.7


@trains_all(with_target, transitions)
def dqn_masked(policy: Any, target: Any, optimizer: Any, state: Any, action: Any, nxt: Any,
               done: Any) -> Any:  # fmt: skip
    """DQN whose target network runs on the masked rows only."""
    values = policy(state).gather(1, action)
    next_values = torch.zeros(state.shape[0])
    with torch.no_grad():
        next_values[~done] = target(nxt[~done]).max(1).values
    loss = F.smooth_l1_loss(values, next_values.unsqueeze(1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


class Sine(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.b1 = nn.Parameter(torch.randn(8, 1)), nn.Parameter(torch.zeros(8))
        self.w2, self.b2 = nn.Parameter(torch.randn(1, 8)), nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor, weights: Any = None) -> Tensor:
        w1, b1, w2, b2 = self.parameters() if weights is None else weights
        return F.linear(F.relu(F.linear(x, w1, b1)), w2, b2)


def tasks() -> tuple[Tensor, ...]:
    return tuple(torch.randn(3, 5, 1) for _ in range(4))


@trains(Sine, Adam, tasks, lr=1e-3)
def maml(model: Any, optimizer: Any, xs: Any, ys: Any, xq: Any, yq: Any) -> Tensor:
    optimizer.zero_grad()
    outer = torch.tensor(0.0)
    for task in range(xs.shape[0]):
        fast = list(model.parameters())
        for _ in range(2):
            loss = F.mse_loss(model(xs[task], fast), ys[task])
            grads = torch.autograd.grad(loss, fast, create_graph=True)
            fast = [w - 0.01 * g for w, g in zip(fast, grads, strict=True)]
        outer = outer + F.mse_loss(model(xq[task], fast), yq[task])
    outer = outer / xs.shape[0]
    outer.backward()
    optimizer.step()
    return outer


@trains(partial(mlp, 1, 8, 1), Adam, tasks, lr=1e-3)
def maml_functional(model: Any, optimizer: Any, xs: Any, ys: Any, xq: Any, yq: Any) -> Tensor:
    """MAML with torch.func: vmap over the tasks of an inner gradient step."""
    params = dict(model.named_parameters())

    def loss_of(params: Any, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(torch.func.functional_call(model, params, (x,)), y)

    def task(x: Tensor, y: Tensor, x2: Tensor, y2: Tensor) -> Tensor:
        grads = torch.func.grad(loss_of)(params, x, y)
        adapted = {k: params[k] - 0.01 * grads[k] for k in params}
        return loss_of(adapted, x2, y2)

    optimizer.zero_grad()
    loss = torch.func.vmap(task)(xs, ys, xq, yq).mean()
    loss.backward()
    optimizer.step()
    return loss


@trains_all(lambda: (mlp(1, 8, 1, activation=nn.Tanh),), tasks)
def reptile(model: Any, xs: Any, ys: Any, xq: Any, yq: Any) -> Tensor:
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for x, y in zip(xs, ys, strict=True):
        model.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        for p in model.parameters():
            p.data -= 0.02 * p.grad.data
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(before[name] + 0.1 * (p - before[name]))
    return loss
