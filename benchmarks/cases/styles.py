"""Cases of ways to write a step, whatever the model."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Adam, AdamW
from torch.utils.checkpoint import checkpoint

from .case import STEPS, Case, case, mlp, repeated, trains


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 3))


def data() -> tuple[Tensor, Tensor]:
    return torch.randn(5, 6), torch.randint(0, 3, (5,))


in_style = partial(trains, optimizer=AdamW, draw=data, lr=1e-2)
"""Registers a step of a model as a case with that model's optimizer and data."""


def finish(loss: Tensor, optimizer: Any) -> Tensor:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


@trains(network, Adam, lambda: (data(),), numbered=True)
def batch_index_unused(net: Any, optimizer: Any, batch: Any, batch_idx: int) -> Tensor:
    """A `training_step(batch, batch_idx)` as Lightning calls it, which ignores the index."""
    x, y = batch
    return finish(F.cross_entropy(net(x), y), optimizer)


@trains(network, Adam, data, numbered=True)
def epoch_as_number(net: Any, optimizer: Any, x: Tensor, y: Tensor, it: int) -> Tensor:
    """A loss weight computed from the step number."""
    weight = it / 10
    out = net(x)
    return finish(F.cross_entropy(out, y) + weight * out.pow(2).mean(), optimizer)


@in_style(network)
def skip_if_not_finite(net: Any, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    loss = F.cross_entropy(net(x), y)
    if not torch.isfinite(loss):
        return loss
    return finish(loss, optimizer)


@in_style(network)
def clip_if_large(net: Any, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = F.cross_entropy(net(x), y)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0, error_if_nonfinite=False)
    if norm > 1e6:
        optimizer.zero_grad()
    optimizer.step()
    return loss


class Dropped(nn.Module):
    """Layer dropout: a torch draw decides if a layer is skipped."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(6, 8), nn.Linear(8, 3)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for layer in self.layers:
            if self.training and torch.rand([]) < 0.5:
                continue
            x = x + F.relu(layer(x))
        return self.leave(x)


def classify(net: Any, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    return finish(F.cross_entropy(net(x), y), optimizer)


@case
def closure_of_everything() -> Case:
    """A step that takes only the batch; model and optimizer are in its closure."""
    net = network()
    optimizer = AdamW(net.parameters())

    def step(x: Tensor, y: Tensor) -> Tensor:
        return finish(F.cross_entropy(net(x), y), optimizer)

    return Case(step, [data() for _ in range(STEPS)], [net, optimizer])


class Trainer:
    """A trainer object with everything as attributes; the step is a method."""

    def __init__(self) -> None:
        self.model = network()
        self.optimizer = AdamW(self.model.parameters())
        self.class_weights = torch.tensor([1.0, 2.0, 0.5])

    def train_step(self, x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(self.model(x), y, weight=self.class_weights)
        return finish(loss, self.optimizer)


@case
def trainer_method() -> Case:
    trainer = Trainer()
    calls = [data() for _ in range(STEPS)]
    return Case(trainer.train_step, calls, [trainer.model, trainer.optimizer])


logger = logging.getLogger("coverage")


@in_style(network)
def logged(net: Any, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    loss = finish(F.cross_entropy(net(x), y), optimizer)
    logger.debug("loss %.3f", loss.item())
    return loss


@in_style(network)
def tensors_from_numbers(net: Any, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    weights = torch.tensor([1.0, 2.0, 0.5])
    scale = torch.Tensor([0.5, 0.5, 0.5, 1.0, 1.0, 1.0])
    one = torch.FloatTensor([1.0])
    loss = F.cross_entropy(net(x * scale), y, weight=weights) * one
    return finish(loss.sum(), optimizer)


@in_style(network)
def functional_call(net: Any, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    params = dict(net.named_parameters())
    out = torch.func.functional_call(net, params, (x,))
    return finish(F.cross_entropy(out, y), optimizer)


@in_style(partial(mlp, 6, 8, 3))
def per_sample_gradients(net: Any, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    """Clipped per-sample gradients, as in differentially private training."""
    params = {name: p.detach() for name, p in net.named_parameters()}

    def loss_of(params: Any, sample: Tensor, label: Tensor) -> Tensor:
        out = torch.func.functional_call(net, params, (sample.unsqueeze(0),))
        return F.cross_entropy(out, label.unsqueeze(0))

    each = torch.func.vmap(torch.func.grad(loss_of), in_dims=(None, 0, 0))(params, x, y)
    norms = torch.stack([g.flatten(1).norm(dim=1) for g in each.values()]).norm(dim=0)
    factor = (1.0 / (norms + 1e-6)).clamp(max=1.0)
    for name, parameter in net.named_parameters():
        g = each[name]
        clipped = torch.einsum("b,b...->...", factor, g)
        parameter.grad = (clipped + 0.1 * torch.randn_like(parameter)) / x.shape[0]
    optimizer.step()
    return norms


@case
def exponential_average_global() -> Case:
    """A running mean of the loss in a tensor of the closure."""
    net, average = network(), torch.zeros(())
    optimizer = AdamW(net.parameters(), lr=1e-2)

    def step(net: Any, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
        loss = finish(F.cross_entropy(net(x), y), optimizer)
        average.mul_(0.9).add_(loss.detach(), alpha=0.1)
        return loss

    return Case(step, repeated(net, optimizer, draw=data), [net, optimizer, average])


@case
def learned_loss_weight() -> Case:
    """A bare parameter beside the model, in the same optimizer."""
    net = network()
    log_sigma = nn.Parameter(torch.zeros(2))
    optimizer = Adam([*net.parameters(), log_sigma], lr=1e-2)

    def step(net: Any, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
        out = net(x)
        losses = torch.stack([F.cross_entropy(out, y), out.pow(2).mean()])
        return finish((losses * torch.exp(-log_sigma) + log_sigma).sum(), optimizer)

    return Case(step, repeated(net, optimizer, draw=data), [net, optimizer, log_sigma])


class Sign(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sign()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * (x.abs() <= 1).float()


@in_style(network)
def custom_function(net: Any, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    """A straight-through estimator as an autograd function."""
    h = Sign.apply(net[0](x))
    return finish(F.cross_entropy(net[3](h), y), optimizer)


def normed() -> nn.Module:
    return nn.Sequential(
        nn.utils.parametrizations.spectral_norm(nn.Linear(6, 8)),
        nn.ReLU(),
        nn.utils.parametrizations.weight_norm(nn.Linear(8, 3)),
    )


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(6, 8, bias=False), nn.Linear(8, 6, bias=False)
        self.leave.weight = nn.Parameter(self.enter.weight.detach().t().clone())
        self.head = nn.Linear(6, 3)
        self.again = self.head

    def forward(self, x: Tensor) -> Tensor:
        h = F.linear(torch.tanh(self.enter(x)), self.enter.weight.t())
        return self.again(h) + self.head(self.leave(self.enter(x)))


in_style(Dropped, name="layer_drop")(classify)
in_style(normed, name="spectral_and_weight_norm")(classify)
in_style(Tied, name="weight_tying")(classify)


@in_style(network)
def checked_labels(net: Any, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    """A step that checks its arguments before it uses them."""
    if y.max() >= 3 or y.min() < 0:
        raise ValueError("labels out of range")
    assert torch.isfinite(x).all(), "inputs must be finite"
    return finish(F.cross_entropy(net(x), y), optimizer)


def named_batch() -> tuple[dict[str, Tensor]]:
    return (dict(zip("xy", data(), strict=True)),)


@trains(network, AdamW, named_batch)
def metrics_in_a_dictionary(net: Any, optimizer: Any, batch: dict[str, Tensor]) -> dict[str, Any]:
    out = net(batch["x"])
    loss = F.cross_entropy(out, batch["y"], label_smoothing=0.1)
    finish(loss, optimizer)
    correct = (out.argmax(1) == batch["y"]).float().mean()
    return {"loss": loss.item(), "accuracy": correct.item(), "logits": out.detach()}


@in_style(network)
def gradient_checkpointing(net: Any, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    h = checkpoint(net[:3], x, use_reentrant=False)
    return finish(F.cross_entropy(net[3](h), y), optimizer)


@in_style(network)
def two_losses_by_gradient(net: Any, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    """PCGrad: gradients of two losses by `autograd.grad`, combined by hand."""
    params = list(net.parameters())
    out = net(x)
    first = torch.autograd.grad(F.cross_entropy(out, y), params, retain_graph=True)
    second = torch.autograd.grad(out.pow(2).mean(), params)
    a = torch.cat([g.flatten() for g in first])
    b = torch.cat([g.flatten() for g in second])
    dot = torch.dot(a, b)
    a = a - torch.clamp(dot, max=0.0) * b / b.norm() ** 2
    offset = 0
    for p in params:
        p.grad = (a + b)[offset : offset + p.numel()].view_as(p).clone()
        offset += p.numel()
    optimizer.step()
    return dot


@in_style(network)
def top_k_losses(net: Any, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    """Hard example mining: a boolean mask selects losses."""
    losses = F.cross_entropy(net(x), y, reduction="none")
    hard = losses[losses > losses.mean()]
    return finish(hard.sum() / hard.numel(), optimizer)


@in_style(network)
def mask_through_layers(net: Any, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    """A step that runs layers on the rows that a mask selects."""
    chosen = x[:, 0] > -0.5
    out = net(x[chosen])
    return finish(F.cross_entropy(out, y[chosen]), optimizer)
