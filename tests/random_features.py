"""Random steps over what modules, autograd and published training loops consist of."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize

SIZE = 6
BLOCKS = [
    *(
        "h = m.one(h)",
        "h = m.two(h).relu()",
        "h = F.relu(m.one(h), inplace=True)",
        "h = m.seq(h) + h",
    ),
    *("h = m.weight_norm(h)", "h = m.spectral_norm(h)", "h = m.orthogonal(h)", "h = m.scaled(h)"),
    *("h = m.layer_norm(h)", "h = m.batch_norm(h)", "h = m.group_norm(h)", "h = m.drop(h)"),
    "h = m.instance_norm(h.unsqueeze(0)).squeeze(0)",
    "h = h + m.words(ids)",
    "h = h + m.bags(ids, torch.arange(0, len(ids)))",
    "h = m.up(m.down(h.unsqueeze(1)).relu()).squeeze(1)",
    "h = m.gru(h.unsqueeze(0))[0].squeeze(0)",
    "out, m.hidden = m.lstm(h.unsqueeze(0), m.hidden); h = out[0]\n"
    "    m.hidden = tuple(t.detach() for t in m.hidden)",
    "h = m.cell(h, h * 0.5)",
    "h = m.attention(h[None], h[None], h[None])[0][0]",
    "h = m.encoder(h[None])[0]",
    "h = F.scaled_dot_product_attention(h[None], h[None], h[None], is_causal=True)[0]",
    "h = m.bilinear(h, h.detach())",
    "h = m.prelu(h) * m.scale",
    "h = m.image(h[:, :, None].matmul(h[:, None, :]).unsqueeze(1))",
    *("h = m.drop_path(h)", "h = m.layer_drop(h)", "h = m.experts(h)"),
    "h, more = m.codes(h); extra = extra + more",
    "h = checkpoint(m.seq, h, use_reentrant=False)",
    "h = checkpoint(m.seq, h, use_reentrant=True)",
    "h = checkpoint(lambda q: m.batch_norm(q).relu(), h, use_reentrant=False)",
    *("h = Clipped.apply(h)", "h = Clipped.apply(h, 3.0)", "h = Reversed.apply(h)"),
    *("h = Halved.apply(h.clone())", "h = Product.apply(h, m.scale)"),
    "h = torch.where(h > 0, h, h * 0.1)",
    "h = torch.einsum('bi,ij->bj', h, m.one.weight)",
    "h = torch.cat([h[:, :3], h[:, 3:].exp().clamp(max=2)], 1)",
    "h = h.view(-1, 2, 3).transpose(1, 2).reshape(-1, 6)",
    "h = h.gather(1, h.argsort(-1))",
    "v, at = h.topk(3, -1); h = torch.zeros_like(h).scatter_(1, at, v)",
    "h = h.clone(); h[:, 0] = h[:, 1] * 2",
    "h = h.clone(); h[h > 1] = 0.5",
    "h = h.clone(); h[0].mul_(2); h[:, 1:3].add_(1)",
    "h = h.add(1).sub_(0.5).mul_(2).div_(2.5).tanh_()",
    "h = h + torch.randn_like(h) * torch.bernoulli(torch.full_like(h, 0.7))",
    "h = h + F.gumbel_softmax(h, tau=0.7, hard=True)",
    "h = h + F.one_hot(torch.multinomial(h.detach().softmax(-1), 1).squeeze(1), 6)",
    "h = h[torch.randperm(len(h))]",
    "h = torch.fft.irfft(torch.fft.rfft(h) * m.spectrum, n=6)",
    "h = (torch.view_as_complex(h.reshape(-1, 3, 2)) * 1j).abs().repeat(1, 2)",
    "h = m.wide(h.double()).float()",
    "h = h.to(torch.bfloat16).to(torch.float32)",
    "with torch.autocast('cpu', torch.bfloat16): h = F.layer_norm(m.seq(h), (6,)).float()",
    "with torch.no_grad(): t = m.two(h)\n    h = h + t",
    "with torch.set_grad_enabled(i % 2 == 0): t = m.two(h).tanh()\n    h = h + t",
    "h = h - h.mean(0, keepdim=True); h = h / (h.std(0, unbiased=False) + 1e-3)",
    "h = h + m.mean; m.mean.lerp_(h.detach().mean(0), 0.1)",
    "m.mean = 0.9 * m.mean + 0.1 * h.detach().mean(0); m.seen += 1",
    "m.bank[m.place] = h[0].detach(); m.place = (m.place + 1) % 8; h = h + m.bank.mean(0)",
    "m.bank = torch.cat([m.bank[1:], h[:1].detach()]); h = h + m.bank.sum(0) * 0.1",
    "m.features['h'] = h; h = m.one(h) + m.features['h'].mean(); m.features['h'] = h.detach()",
    "m.warmth = max(0.5, m.warmth * 0.9); h = h / m.warmth",
    "if h.mean() > 0: h = h * 0.5",
    "while h.abs().max() > 4: h = h * 0.5",
    "h = h * (1.0 + 0.1 * h.detach().mean().item())",
    "k = h[h.sum(1) > 0]; h = h + (k.sum() * 0.01 if k.numel() else 0)",
    "h = h + m.words(ids.unique()).mean(0)",
    "for _ in range(int(ids[0]) % 3): h = m.one(h).tanh()",
    "if h.requires_grad: h.register_hook(lambda g: g * 0.7)",
    "h = h * m.scale; h.retain_grad(); kept.append(h)",
    "h = functional_call(m.one, {'weight': m.one.weight * 0.5, 'bias': m.two.bias}, (h,))",
    "h = h + vmap(lambda r: r * m.scale + r.sum())(h)",
    "h = h + grad(lambda r: (r * m.scale).square().sum())(h)",
    "h = h + jacrev(lambda r: m.one(r).tanh())(h[0]).sum(0)",
    "loss = m.one(h).square().mean()\n"
    "    gs = torch.autograd.grad(loss, list(m.one.parameters()), create_graph=True)\n"
    "    fast = {k: v - 0.1 * g for (k, v), g in zip(m.one.named_parameters(), gs)}\n"
    "    h = functional_call(m.one, fast, (h,))",
    "dist = D.Normal(h, m.scale.exp()); h = dist.rsample()\n"
    "    extra = extra + D.kl_divergence(dist, D.Normal(0.0, 1.0)).mean() * 0.1",
    "dist = D.Categorical(logits=h); act = dist.sample()\n"
    "    extra = extra - dist.log_prob(act).mean() - 0.01 * dist.entropy().mean()",
    "share = D.Beta(2.0, 2.0).sample(); h = share * h + (1 - share) * h[torch.randperm(len(h))]",
    "s = m.scale; q = (h / s).clamp(-8, 7); h = (q.round() - q).detach() * s + q * s",
    "h = h + torch.linalg.solve(torch.eye(6) * 3 + 0.1 * m.one.weight, h.t()).t()",
    "h = h + torch.zeros(6).scatter_add(0, ids % 6, torch.ones(len(ids)))",
    "with Frozen(m.one): h = m.one(h)",
    "with saved_tensors_hooks(lambda t: t * 1, lambda t: t): h = m.one(h).exp()",
]
LOSSES = [
    "loss = h.square().mean()",
    "loss = F.cross_entropy(h, y, label_smoothing=0.1, weight=m.scale.detach().abs())",
    "loss = F.cross_entropy(h, y.masked_fill(y == 1, -100), ignore_index=-100)",
    "loss = F.kl_div(h.log_softmax(-1), x.softmax(-1), reduction='batchmean')",
    "losses = {'a': F.mse_loss(h, x), 'b': h.abs().mean()}; loss = sum(losses.values())",
    "loss = (F.normalize(h, dim=-1) @ F.normalize(x, dim=-1).t()).logsumexp(1).mean()",
    "loss = F.nll_loss(h.log_softmax(-1), y, reduction='none').sort()[0][:2].mean()",
    "with torch.no_grad(): t = other(x).softmax(-1)\n"
    "    loss = -(t * h.log_softmax(-1)).sum(-1).mean()",
]
BACKWARDS = [
    *["loss.backward()"] * 4,
    "loss.backward(retain_graph=True); loss.backward()",
    "torch.autograd.backward([loss, h.sum() * 0.1], [None, None])",
    "gs = torch.autograd.grad(loss, list(m.parameters()), allow_unused=True)\n"
    "    for p, g in zip(m.parameters(), gs): p.grad = g",
    "gs = torch.autograd.grad(loss, h, create_graph=True)[0]\n"
    "    (loss + gs.square().sum() * 0.1).backward()",
    "(loss * 128).backward(); [p.grad.div_(128) for p in m.parameters() if p.grad is not None]",
    "loss.backward(inputs=[*m.one.parameters(), *m.two.parameters()])",
    "scaler.scale(loss).backward(); scaler.unscale_(o); scaler.step(o); scaler.update()",
]
GRADIENTS = [
    "found.append(nn.utils.clip_grad_norm_(m.parameters(), 1.0))",
    "nn.utils.clip_grad_value_(m.parameters(), 0.1)",
    "found.append([k.grad for k in kept])",
    "torch._foreach_mul_([p.grad for p in m.parameters() if p.grad is not None], 0.9)",
    "if m.one.weight.grad is not None: m.one.weight.grad = m.one.weight.grad.sign()",
    *["pass"] * 3,
]
STEPS = [
    *["o.step()"] * 4,
    "if i % 2: o.step()",
    "if loss.isfinite(): o.step()",
    "for g in o.param_groups: g['lr'] = 0.05 * (i + 1) / 4\n    o.step()",
    "o.step(); average(other, m)",
    "o.step(); other.load_state_dict(m.state_dict())",
    "with torch.no_grad():\n        for p in m.parameters():\n"
    "            if p.grad is not None: p -= 0.05 * p.grad",
    "o.step(); o.zero_grad(); m(x).square().mean().backward(); o.step()",
]
BEGINNINGS = [
    *["o.zero_grad()"] * 3,
    *("o.zero_grad(set_to_none=False)", "if i % 2 == 0: o.zero_grad()"),
    *("o.zero_grad(); x = x.requires_grad_()", "o.zero_grad(); x = x.clone().requires_grad_()"),
]
OPTIMIZERS = [
    *("SGD({p}, lr=0.05, momentum=0.9)", "AdamW({p}, lr=0.01)", "AdamW({p}, lr=0.01, fused=True)"),
    *("NAdam({p}, lr=0.01)", "Adamax({p}, lr=0.01)", "Adadelta({p})", "RAdam({p}, lr=0.01)"),
    *("Rprop({p}, lr=0.01)", "ASGD({p}, lr=0.01)", "RMSprop({p}, lr=0.005, centered=True)"),
    "Adam({p}, lr=torch.tensor(0.01), foreach=False)",
]
EVENTS = [
    *(
        "m.train()",
        "m.eval()",
        "m.batch_norm.eval()",
        "m.drop.p = 0.5",
        "rows[0] = 5",
        "rows[0] = 3",
    ),
    "o.param_groups[0]['lr'] = o.param_groups[0]['lr'] * 0.5",
    "m.handle = m.one.register_forward_hook(lambda module, args, out: out * 1.1)",
    "m.handle = m.seq.register_full_backward_hook(halve_all)",
    "m.handle = m.one.weight.register_post_accumulate_grad_hook(halve)",
    "m.handle = m.two.register_forward_pre_hook(lambda module, args: (args[0] * 0.5,))",
    "if m.handle: m.handle.remove()",
    *("m.one.requires_grad_(False)", "m.one.requires_grad_(True)", "m.hidden = None"),
    *("m.load_state_dict(copy.deepcopy(m.state_dict()))", "m.two.weight.data.mul_(0.5)"),
    *("o.load_state_dict(copy.deepcopy(o.state_dict()))", "m.warmth = 2.0", "m.bank.normal_()"),
    *["pass"] * 4,
]
HEAD = """
import copy

import torch
from torch import distributions as D
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call, grad, jacrev, vmap
from torch.nn import functional as F
from torch.optim import *
from torch.utils.checkpoint import checkpoint

from random_features import Clipped, Frozen, Halved, Product, Reversed, average, halve, halve_all

"""


class Clipped(torch.autograd.Function):
    """A function with a number among its arguments."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float = 2.0) -> Tensor:
        ctx.save_for_backward(x)
        ctx.scale = scale
        return x.clamp(-1, 1) * scale

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return gradient * ((x > -1) & (x < 1)) * ctx.scale, None


class Reversed(torch.autograd.Function):
    """A view, whose gradient is another one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient.neg() * 0.5


class Halved(torch.autograd.Function):
    """A function that writes to its argument."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(0.5)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * 0.5


class Product(torch.autograd.Function):
    """A function with a context of its own."""

    @staticmethod
    def forward(x: Tensor, w: Tensor) -> Tensor:
        return x * w

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, w = ctx.saved_tensors
        return gradient * w, (gradient * x).sum(0)


class Frozen:
    """A context in which a module's parameters get no gradients."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __enter__(self) -> None:
        self.before = [p.requires_grad for p in self.module.parameters()]
        self.module.requires_grad_(False)

    def __exit__(self, *exception: object) -> None:
        for parameter, before in zip(self.module.parameters(), self.before, strict=True):
            parameter.requires_grad_(before)


def halve(parameter: Any) -> None:
    parameter.grad.mul_(0.5)


def halve_all(module: nn.Module, inputs: Any, outputs: Any) -> Any:
    return tuple(None if g is None else g * 0.5 for g in inputs)


@torch.no_grad()
def average(other: nn.Module, model: nn.Module) -> None:
    for ours, theirs in zip(other.parameters(), model.parameters(), strict=True):
        ours.lerp_(theirs, 0.1)
    for ours, theirs in zip(other.buffers(), model.buffers(), strict=True):
        ours.copy_(theirs)


class Scale(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight * 0.9


class DropPath(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * (torch.rand(x.shape[0], 1) >= 0.2) / 0.8 if self.training else x


class LayerDrop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(SIZE, SIZE) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if not self.training or torch.rand(1).item() >= 0.3:
                x = layer(x).relu() + x
        return x


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(SIZE, 3)
        self.experts = nn.ModuleList(nn.Linear(SIZE, SIZE) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x).softmax(-1).topk(2, -1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows, slot = (chosen == number).nonzero(as_tuple=True)
            if rows.numel():
                out.index_add_(0, rows, expert(x[rows]) * weights[rows, slot].unsqueeze(1))
        return out


class Codes(nn.Module):
    """Vector quantization with codes that follow by averages."""

    def __init__(self) -> None:
        super().__init__()
        self.code = nn.Embedding(5, SIZE)
        self.register_buffer("average", self.code.weight.detach().clone())

    def forward(self, h: Tensor) -> tuple[Tensor, Tensor]:
        at = torch.cdist(h, self.code.weight).argmin(1)
        found = self.code(at)
        if self.training:
            one = F.one_hot(at, 5).float()
            self.average.mul_(0.9).add_(one.t() @ h.detach(), alpha=0.1)
            self.code.weight.data.copy_(self.average)
        return h + (found - h).detach(), F.mse_loss(found.detach(), h)


class Image(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.norm = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.down, self.up = nn.Conv2d(4, 4, 3, 2, 1), nn.ConvTranspose2d(4, 4, 2, 2)
        self.head = nn.Linear(16, SIZE)

    def forward(self, x: Tensor) -> Any:
        h = self.norm(self.one(x)).relu()
        pooled, at = F.max_pool2d(h, 2, return_indices=True)
        wide = F.max_unpool2d(pooled, at, 2) + self.up(self.down(h))
        return self.head(F.adaptive_avg_pool2d(wide, 2).flatten(1))


class Model(nn.Module):
    """A module of each kind, of which a step uses some."""

    def __init__(self) -> None:
        super().__init__()
        linear = nn.Linear
        self.one, self.two, self.scaled = (linear(SIZE, SIZE) for _ in range(3))
        self.wide = linear(SIZE, SIZE).double()
        self.seq = nn.Sequential(linear(SIZE, SIZE), nn.Tanh(), nn.Dropout(0.1), linear(SIZE, SIZE))
        self.weight_norm = parametrizations.weight_norm(linear(SIZE, SIZE))
        self.spectral_norm = parametrizations.spectral_norm(linear(SIZE, SIZE))
        self.orthogonal = parametrizations.orthogonal(linear(SIZE, SIZE))
        parametrize.register_parametrization(self.scaled, "weight", Scale())
        self.layer_norm, self.group_norm = nn.LayerNorm(SIZE), nn.GroupNorm(2, SIZE)
        self.batch_norm, self.instance_norm = nn.BatchNorm1d(SIZE), nn.InstanceNorm1d(SIZE)
        self.drop, self.drop_path, self.layer_drop = nn.Dropout(0.3), DropPath(), LayerDrop()
        self.words, self.bags = nn.Embedding(10, SIZE, padding_idx=0), nn.EmbeddingBag(10, SIZE)
        self.down, self.up = nn.Conv1d(1, 2, 3, padding=1), nn.ConvTranspose1d(2, 1, 3, padding=1)
        self.gru, self.lstm = (kind(SIZE, SIZE, batch_first=True) for kind in (nn.GRU, nn.LSTM))
        self.cell, self.attention = nn.GRUCell(SIZE, SIZE), nn.MultiheadAttention(SIZE, 2)
        self.encoder = nn.TransformerEncoderLayer(SIZE, 2, 8, batch_first=True)
        self.bilinear, self.prelu = nn.Bilinear(SIZE, SIZE, SIZE), nn.PReLU()
        self.experts, self.codes, self.image = Experts(), Codes(), Image()
        self.scale = nn.Parameter(torch.ones(SIZE))
        self.spectrum = nn.Parameter(torch.randn(4, dtype=torch.cfloat))
        self.register_buffer("mean", torch.zeros(SIZE))
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self.register_buffer("bank", torch.zeros(8, SIZE))
        self.place, self.warmth = 0, 1.0
        self.features: dict[str, Any] = {}
        self.hidden: Any = None
        self.handle: Any = None

    def forward(self, x: Tensor) -> Any:
        return self.two(torch.tanh(self.one(x)))


def source(seed: int) -> str:
    """A module with `make(m)`, which gives an optimizer, a step, and a function of what the program
    does behind a call."""
    draw = random.Random(seed)
    lines = [
        draw.choice(BEGINNINGS),
        "h, extra = x * m.scale, 0.0",
        *(draw.choice(BLOCKS) for _ in range(draw.randint(1, 6))),
        *(draw.choice(LOSSES), "loss = loss + extra", draw.choice(BACKWARDS)),
        *(draw.choice(GRADIENTS), draw.choice(STEPS)),
    ]
    if draw.random() < 0.3:
        lines.append(draw.choice(["found.append(m(x))", "found += [h, x.grad]", "o.zero_grad()"]))
    events = [f"    if i == {number}:\n        {draw.choice(EVENTS)}\n" for number in range(3)]
    optimizer = draw.choice(OPTIMIZERS).format(p="m.parameters()")
    return (
        f"{HEAD}def make(m):\n    return {optimizer}\n\n"
        "def step(m, o, other, scaler, x, y, ids, i):\n    found, kept = [], []\n"
        + "".join(f"    {line}\n" for line in lines)
        + "    return loss.detach(), found\n\ndef between(m, o, i, rows):\n"
        + "".join(events)
    )


def left(model: Model, other: Model, optimizer: Any, scaler: Any) -> list[Any]:
    """All that a call may have changed."""
    names = {id(p): name for name, p in model.named_parameters()}
    state = [
        (names.get(id(p), ""), sorted(entries.items())) for p, entries in optimizer.state.items()
    ]
    groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    kept = [model.place, model.warmth, model.features, model.hidden]
    gradients = [p.grad for of in (model, other) for p in of.parameters()]
    flags = [(p.requires_grad, p.is_leaf) for p in model.parameters()]
    return [
        *(dict(model.named_parameters()), dict(model.named_buffers()), other.state_dict()),
        *(gradients, sorted(state, key=lambda entry: entry[0]), groups, kept, flags),
        *(scaler.state_dict(), torch.get_rng_state()),
    ]


def bits(value: Any) -> Any:
    """A value as what can be compared, NaN with NaN."""
    if isinstance(value, Tensor):
        plain = value.detach().resolve_conj().contiguous().reshape(-1)
        return str(value.dtype), tuple(value.shape), plain.view(torch.uint8).numpy().tobytes()
    if isinstance(value, (list, tuple)):
        return [bits(each) for each in value]
    if isinstance(value, dict):
        return [(str(key), bits(each)) for key, each in value.items()]
    return repr(value)
