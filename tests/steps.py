"""Step functions of many kinds. Each takes a model, an optimizer and a batch."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from zoo import train_step


def mean_square(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
    loss: Tensor = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def step_with_own_averages(
    model: nn.Module, optimizer: Optimizer, inputs: Tensor, targets: Tensor
) -> Tensor:
    """The step sums its gradients over the ranks itself."""
    loss = F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())
    loss.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    optimizer.step()
    optimizer.zero_grad()
    return loss


def step_keeping_gradients(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    return loss


def zero_in_the_middle(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


def zero_not_none(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    return loss


def model_zero_grad(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    model.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    return loss


def clip_norm(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    F.cross_entropy(model(x), y).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad()
    return norm


def clip_value(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    nn.utils.clip_grad_value_(model.parameters(), 0.01)
    optimizer.step()
    optimizer.zero_grad()
    return loss


def clip_loop(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    F.cross_entropy(model(x), y).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1, norm_type=1.0, foreach=False)
    optimizer.step()
    optimizer.zero_grad()
    return norm


def two_microbatches(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    total = torch.zeros(())
    for i, (part, targets) in enumerate(zip(x.chunk(2), y.chunk(2), strict=True)):
        # Under DDP the first half keeps its gradients local, as a user would write it.
        local = isinstance(model, DistributedDataParallel) and i == 0
        with model.no_sync() if local else nullcontext():
            loss = F.cross_entropy(model(part), targets) / 2
            loss.backward()
        total = total + loss.detach()
    optimizer.step()
    optimizer.zero_grad()
    return total


def two_losses(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    logits = model(x)
    loss, penalty = F.cross_entropy(logits, y), logits.square().mean()
    loss.backward(retain_graph=True)
    (0.1 * penalty).backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def autograd_grad(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    parameters = list(model.parameters())
    loss = F.cross_entropy(model(x), y)
    for p, g in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
        p.grad = g
    optimizer.step()
    optimizer.zero_grad()
    return loss


def manual_update(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    loss = train_step(model, optimizer, x, y)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.99)
            p.data.add_(0.001)
    return loss


GRADIENT_STEPS = [
    step_keeping_gradients,
    zero_in_the_middle,
    zero_not_none,
    model_zero_grad,
    clip_norm,
    clip_value,
    clip_loop,
    two_microbatches,
    two_losses,
    autograd_grad,
    manual_update,
]


def accumulate(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor, last: bool) -> Tensor:
    loss = F.cross_entropy(model(x), y) / 3
    loss.backward()
    if last:
        optimizer.step()
        optimizer.zero_grad()
    return loss


def autocast_step(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(x)
    loss = F.cross_entropy(logits.float().flatten(0, -2), y.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def nothing(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> None:
    train_step(model, optimizer, x, y)


def dictionary(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> dict[str, Any]:
    logits = model(x)
    loss = F.cross_entropy(logits, y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    correct = (logits.argmax(-1) == y).sum()
    return {"loss": loss.detach(), "metrics": [logits, (correct, None)], "size": 4, "name": "run"}


def gradient_norm(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    F.cross_entropy(model(x), y).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    optimizer.step()
    optimizer.zero_grad()
    return norm


def loss_item(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> float:
    return train_step(model, optimizer, x, y).item()


def lists_of_numbers(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Any:
    logits = model(x)
    F.cross_entropy(logits, y).backward()
    optimizer.step()
    optimizer.zero_grad()
    return logits.tolist()


def loss_and_item(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> tuple[Any, ...]:
    loss = train_step(model, optimizer, x, y)
    return loss.item(), loss, loss.detach() * 2


def the_weight(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    train_step(model, optimizer, x, y)
    return model.head.weight


def gradients(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> list[Tensor | None]:
    step_keeping_gradients(model, optimizer, x, y)
    return [p.grad for p in model.parameters()]


def an_input(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> list[Tensor]:
    loss = train_step(model, optimizer, x, y)
    return [x, x[1:], loss, loss]


RETURNS = [
    nothing,
    dictionary,
    gradient_norm,
    loss_item,
    loss_and_item,
    lists_of_numbers,
    the_weight,
    gradients,
    an_input,
]


def with_hidden_states(
    model: nn.Module, optimizer: Optimizer, tokens: Tensor
) -> tuple[Tensor, int]:
    """A step whose loss reads all hidden states, for which transformers installs hooks."""
    output = model(input_ids=tokens, labels=tokens, output_hidden_states=True)
    loss = output.loss + sum(h.square().mean() for h in output.hidden_states)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss, len(output.hidden_states)
