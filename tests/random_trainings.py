"""Random steps of training, and what a program does to model and optimizer between their calls."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor, nn

BEFORE = [
    *("optimizer.zero_grad()", "optimizer.zero_grad(set_to_none=False)", "model.zero_grad()"),
    *("for p in model.parameters(): p.grad = None", "model.train()", "model.eval()"),
    *("x = x + torch.randn_like(x) * 0.1", "x = F.dropout(x, 0.3)", "if i % 2: x = x * 2"),
    "with torch.no_grad(): model.two.weight.mul_(0.99)",
    'for g in optimizer.param_groups: g["lr"] = 0.1 / (1 + i)',
    'for g in optimizer.param_groups: g["lr"] *= 0.9',
    *("model.two.requires_grad_(i % 2 == 0)", "model.norm.eval()", "average.eval()"),
    *("out.append(model.one.weight.grad)", "s.held = model.one.weight.data"),
    *("s.before = [p.detach().clone() for p in model.parameters()]", "torch.manual_seed(i)"),
    *("x = x * float(model.scale)", "x.requires_grad_()", "model.drop.p = 0.1 * (i + 1)"),
    "assert not any(p.grad is not None for p in average.parameters())",
]
LOSSES = [
    "loss = model(x).square().mean()",
    "loss = F.mse_loss(model(x), x)",
    "loss = model(x).abs().mean() + 0.01 * sum(p.square().sum() for p in model.parameters())",
    "with torch.no_grad(): target = average(x)\n        loss = F.mse_loss(model(x), target)",
    'with torch.autocast("cpu", torch.bfloat16): loss = model(x).float().square().mean()',
    "h = model.one(x).relu()\n        loss = model.two(model.drop(h)).square().mean()",
    "loss = model(x).square().mean() + model(-x).mean().square()",
    "loss = (model(x) * model.mask).sum() / x.shape[0]",
]
BACKWARDS = [
    *["loss.backward()"] * 4,
    "(loss / 2).backward()",
    "loss.backward(retain_graph=True); loss.backward()",
    "if loss.isfinite(): loss.backward()",
    "loss.backward(inputs=[p for p in model.parameters() if p.requires_grad])",
]
GRADIENTS = [
    "nn.utils.clip_grad_norm_(model.parameters(), 0.1)",
    "nn.utils.clip_grad_value_(model.parameters(), 0.05)",
    "for p in model.parameters():\n            if p.grad is not None: p.grad.mul_(0.5)",
    "for p in model.parameters():\n            if p.grad is not None: p.grad = p.grad * 2",
    "for p in model.parameters():\n"
    "            if p.grad is not None: p.grad.add_(torch.randn_like(p.grad) * 0.01)",
    "out.append([p.grad.clone() for p in model.parameters() if p.grad is not None])",
    "out.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1).item())",
    "if model.one.weight.grad is not None: model.one.weight.grad[0] = 0",
    "model.two.weight.grad = None",
    "s.gradient = model.one.weight.grad",
    "out.append(model.one.weight.grad)",
]
STEPS = [
    *["optimizer.step()"] * 5,
    "if i % 2: optimizer.step()",
    "if loss.item() < 1.0: optimizer.step()",
    "optimizer.step(); scheduler.step()",
    "optimizer.step(); scheduler.step()",
    "for p in model.parameters():\n"
    "            if p.grad is not None: p.data.add_(p.grad, alpha=-0.1)",
    "if model.one.weight.grad is not None and model.one.weight.grad.norm() < 5: optimizer.step()",
]
PAIRS = "zip(average.parameters(), model.parameters())"
BEHIND = [
    f"for a, p in {PAIRS}: a.data.mul_(0.9).add_(p.data, alpha=0.1)",
    f"for a, p in {PAIRS}: a.data = a.data * 0.9 + p.data * 0.1",
    f"for a, p in {PAIRS}: a.data.copy_(p.data)",
    "if i % 2 == 0: average.load_state_dict(model.state_dict())",
    "with torch.no_grad():\n            for p in model.parameters(): p.clamp_(-0.4, 0.4)",
    "for p in model.parameters(): p.data = p.data * 0.99",
    *("out.append(model.one.weight.norm().item())", 'out.append(optimizer.param_groups[0]["lr"])'),
    "s.best = {k: v.clone() for k, v in model.state_dict().items()}",
    *("s.state = model.state_dict()", "s.held = model.one.weight.data", "s.loss = loss"),
    *("with torch.no_grad(): out.append(model(x))", "out.append(scheduler.get_last_lr())"),
    *("optimizer.zero_grad()", "optimizer.zero_grad(set_to_none=False)", "out.append(x.grad)"),
    "s.moved = (model.one.weight - s.start).norm().item()",
    *("model.scale = model.scale * 0.9", "model.mask.mul_(0.5)", "model.mask = model.mask * 0.5"),
    "out.append(sum(float(v['step']) for v in optimizer.state.values() if 'step' in v))",
    "out.append(len(optimizer.state))",
    *("out.append(s.held.sum())", "model.calls += 1", "model.count += 1"),
    "s.gradient = None if s.gradient is None else s.gradient * 0.5",
]
EVENTS = [
    'optimizer.param_groups[0]["lr"] *= 0.5',
    'optimizer.param_groups[0]["weight_decay"] = 0.1',
    *("model.train()", "model.eval()", "model.drop.p = 0.1", "model.norm.eval()"),
    *("model.two.weight.requires_grad_(False)", "model.two.weight.requires_grad_(True)"),
    "with torch.no_grad(): model.one.weight.mul_(0.5)",
    "model.one.weight.data = model.one.weight.data * 0.5",
    "model.one.weight = nn.Parameter(model.one.weight.detach() * 0.5)",
    *("model.norm.running_mean.zero_()", "model.mask = torch.full((3,), 2.0)", "model.mask[0] = 3"),
    *("optimizer.state.clear()", "model.load_state_dict({k: v * 1 for k, v in s.first.items()})"),
    "optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))",
    *("optimizer.zero_grad()", "optimizer.zero_grad(set_to_none=False)"),
    "for p in model.parameters(): p.grad = torch.ones_like(p)",
    "model.one.weight.grad = None",
    *("torch.manual_seed(7)", "torch.randn(3)"),
    "model.two = nn.Linear(3, 3); optimizer.add_param_group({'params': model.two.parameters()})",
    "s.hook = model.one.register_forward_hook(double)",
    *("s.hook = model.one.weight.register_hook(double)", "s.hook = s.hook and s.hook.remove()"),
    *("model.two.weight = model.one.weight", "model.scale = 2.0", "model.act = torch.tanh"),
    *("s.rows = 3", "s.rows = 5", "average.load_state_dict(model.state_dict())"),
    *("s.held = None", "s.start = torch.zeros(3, 3)", "s.start.add_(1)", "model.one.bias = None"),
    "for v in optimizer.state.values(): [t.mul_(0.5) for t in v.values() if torch.is_tensor(t)]",
    "for p in model.parameters(): p.grad = None if p.grad is None else p.grad * 0.5",
    *("scheduler.step()", "scheduler.last_epoch = 0", "average.requires_grad_(False)"),
    "model.one.register_buffer('extra', torch.ones(1))",
    "model.forward = types.MethodType(other_forward, model)",
    "optimizer.param_groups[0]['params'].pop()",
    "s.kept = [p.grad for p in model.parameters()]",
    "s.kept = [p.data for p in model.parameters()]",
    "model.norm.momentum = 0.5",
    "model.norm.track_running_stats = False",
    "model.to(memory_format=torch.contiguous_format)",
    *["pass"] * 10,
]
OPTIMIZERS = [
    "torch.optim.SGD({p}, lr=0.1)",
    "torch.optim.SGD({p}, lr=0.1, momentum=0.9, nesterov=True)",
    "torch.optim.AdamW({p}, lr=0.01)",
    "torch.optim.Adam({p}, lr=0.01, foreach=False)",
    "torch.optim.Adam({p}, lr=0.01, fused=True, amsgrad=True)",
    "torch.optim.RMSprop({p}, lr=0.01)",
    "torch.optim.Adagrad({p}, lr=0.01)",
]
SCHEDULERS = [
    "torch.optim.lr_scheduler.StepLR(optimizer, 2)",
    "torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (1 + n))",
    "torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)",
    "torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=50, cycle_momentum=False)",
]
HEAD = """
import copy
import types

import torch
from torch import nn
from torch.nn import functional as F


def double(*args):
    return args[-1] * 2


def other_forward(self, x):
    return self.two(self.one(x)) * 0.5

"""


class State:
    """What a program keeps beside."""

    def __init__(self, model: nn.Module) -> None:
        self.held: Any = next(model.parameters()).data
        self.start, self.rows = self.held.clone(), 4
        self.hook: Any = None
        self.gradient: Any = None
        self.loss: Any = None
        self.best, self.state, self.moved = dict[str, Any](), dict[str, Any](), 0.0
        self.before: list[Any] = []
        self.kept: list[Any] = []
        self.first = {name: value.clone() for name, value in model.state_dict().items()}


class Model(nn.Module):
    """Two layers, with what people have between them."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(3, 3), nn.Linear(3, 3)
        self.norm, self.drop = nn.BatchNorm1d(3), nn.Dropout(0.2)
        self.register_buffer("mask", torch.tensor([1.0, 0.0, 1.0]))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.scale, self.calls, self.act = 1.0, 0, torch.relu

    def forward(self, x: Tensor) -> Any:
        return self.two(self.drop(self.act(self.norm(self.one(x)))) * self.scale)


def some(draw: random.Random, lines: list[str], most: int) -> list[str]:
    return [f"        {draw.choice(lines)}\n" for _ in range(draw.randint(0, most))]


def source(seed: int) -> str:
    """A module with a function `make(model, average, s)`: gives optimizer, scheduler and a step;
    and a function of what the program does behind a call."""
    draw = random.Random(seed)
    body = [
        *some(draw, BEFORE, 3),
        f"        {draw.choice(LOSSES)}\n",
        f"        {draw.choice(BACKWARDS)}\n",
        *some(draw, GRADIENTS, 2),
        f"        {draw.choice(STEPS)}\n",
        *some(draw, BEHIND, 3),
    ]
    events = [
        f"    if i == {number}:\n        {draw.choice(EVENTS)}\n"
        for number in (1, 1, 2, 2, 3, 3, 4)
    ]
    whole = "model.parameters()"
    optimizer = draw.choice(OPTIMIZERS).format(p=whole)
    return (
        HEAD
        + "def make(model, average, s):\n"
        + f"    optimizer = {optimizer}\n"
        + f"    scheduler = {draw.choice(SCHEDULERS)}\n"
        + "    def step(model, optimizer, x, i):\n        out = []\n"
        + "".join(body)
        + "        return loss, out\n    return optimizer, scheduler, step\n\n"
        + "def between(model, average, optimizer, scheduler, s, i):\n"
        + "".join(events)
    )


def shown(value: Any) -> Any:
    """A value as what can be compared, with its types and bits."""
    if isinstance(value, Tensor):
        return str(value.dtype), tuple(value.shape), value.detach().tolist()
    if isinstance(value, (list, tuple)):
        return [shown(each) for each in value]
    if isinstance(value, dict):
        return [(str(key), shown(each)) for key, each in value.items()]
    return repr(value)


_OF_SCHEDULERS = ("last_epoch", "_step_count", "_last_lr", "base_lrs")


def left(model: nn.Module, average: nn.Module, optimizer: Any, scheduler: Any, s: State) -> Any:
    """All that a call may have changed, by name."""
    order = {id(p): n for n, p in enumerate(p for g in optimizer.param_groups for p in g["params"])}
    groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    modes = [(module.training, vars(module).get("p")) for module in model.modules()]
    beside = {k: v for k, v in vars(s).items() if k != "hook"}
    return {
        "parameters": shown(dict(model.named_parameters())),
        "gradients": shown({k: p.grad for k, p in model.named_parameters()}),
        "buffers": shown(dict(model.named_buffers())),
        "average": shown(average.state_dict()),
        "of average": shown([p.grad for p in average.parameters()]),
        "state": sorted((order.get(id(p), -1), shown(v)) for p, v in optimizer.state.items()),
        "groups": shown(groups),
        "modes": modes,
        "scheduler": shown({k: v for k, v in vars(scheduler).items() if k in _OF_SCHEDULERS}),
        "attributes": [model.scale, model.calls],
        "beside": shown(beside),
        "generator": torch.get_rng_state().sum().item(),
        "leaves": [(p.is_leaf, p.requires_grad) for p in model.parameters()],
    }
