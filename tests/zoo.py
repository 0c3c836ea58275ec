"""Small models, optimizers and step functions that the differential tests share."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

CLASSES = 4


def train_step(model: nn.Module, optimizer: Optimizer, inputs: Tensor, targets: Tensor) -> Tensor:
    loss = F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


class MLP(nn.Module):
    def __init__(self, width: int = 16, layers: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8 if i == 0 else width, width) for i in range(layers))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.gelu(layer(x))
        return self.head(x)


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.p = heads, dropout
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            t.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for t in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        p = self.p if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=p)
        x = x + self.drop(self.proj(mixed.transpose(1, 2).flatten(-2)))
        return x + self.drop(self.down(F.gelu(self.up(self.norm2(x)))))


class GPT(nn.Module):
    """Token and position embeddings, a block, and a head that shares the token embedding."""

    def __init__(self, vocabulary: int = 32, width: int = 16, context: int = 8) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.drop = nn.Dropout(0.1)
        self.block = Block(width, 2, 0.1)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.token.weight

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[-1], device=tokens.device)
        x = self.drop(self.token(tokens) + self.position(positions))
        return self.head(self.norm(self.block(x)))


class ConvNet(nn.Module):
    """Convolutions with BatchNorm, whose statistics are buffers, and an in-place activation."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(inplace=True),
        )
        self.head = nn.Linear(16, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.features(images).mean((-2, -1)))


class Reused(nn.Module):
    """One weight used three times: as a layer twice and, transposed, once more."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.mix, self.head = (
            nn.Linear(8, 16),
            nn.Linear(16, 16),
            nn.Linear(16, CLASSES),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.mix(torch.tanh(self.mix(self.enter(x)))))
        return self.head(x @ self.mix.weight)


class Partial(nn.Module):
    """One layer that no loss depends on, and one that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.unused, self.frozen = nn.Linear(8, 16), nn.Linear(3, 3), nn.Linear(16, 16)
        self.head = nn.Linear(16, CLASSES)
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.frozen(torch.relu(self.body(x)))))


class Checkpointed(nn.Module):
    """Two recomputed segments with dropout: the recomputation must draw the same masks."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant
        self.enter = nn.Linear(8, 16)
        self.segments = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.3), nn.GELU()) for _ in range(2)
        )
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for segment in self.segments:
            x = x + checkpoint(segment, x, use_reentrant=self.use_reentrant)
        return self.head(x)


class Recurrent(nn.Module):
    """A recurrent layer keeps its weights a second time, in a plain list."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.GRU(8, 16, batch_first=True), nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0])


class Parametrized(nn.Module):
    """Weights computed by parametrizations, one of which updates buffers while training."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 16))
        self.head = nn.utils.parametrizations.weight_norm(nn.Linear(16, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.enter(x)))


class RunningMean(nn.Module):
    """Buffers that forward updates in place, one of them an integer: on several ranks they may not
    be replaced."""

    mean: Tensor
    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, CLASSES)
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean.copy_(0.9 * self.mean + 0.1 * x.detach().mean(0))
            self.calls.add_(1)
        return self.body(x - self.mean)


class SharedStorage(nn.Module):
    """Two parameters that are views of one storage, beside a buffer that is a view of a third."""

    window: Tensor

    def __init__(self) -> None:
        super().__init__()
        flat = torch.randn(8 * 16 + 16 * CLASSES) * 0.1
        self.first = nn.Parameter(flat[: 8 * 16].view(8, 16))
        self.second = nn.Parameter(flat[8 * 16 :].view(16, CLASSES))
        self.register_buffer("history", torch.zeros(4, 16))
        self.register_buffer("window", self.history[1:3])

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(x @ self.first)
        if self.training:
            self.window.add_(hidden.detach().mean(0))
        return (hidden + self.history.sum(0)) @ self.second


def _floats(*shape: int) -> Callable[[int, torch.Generator], tuple[Tensor, Tensor]]:
    """Floats of `shape` per example with one target each, or one for each row of a matrix."""

    def make(size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        x = torch.randn(size, *shape, generator=generator)
        targets = (size, *shape[:-1]) if len(shape) == 2 else (size,)
        return x, torch.randint(CLASSES, targets, generator=generator)

    return make


def _tokens(size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(32, (size, 9), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


@dataclass(frozen=True)
class ModelCase:
    make: Callable[[], nn.Module]
    make_batch: Callable[[int, torch.Generator], tuple[Tensor, Tensor]]

    def batch(self, index: int, size: int = 4) -> tuple[Tensor, Tensor]:
        """Batch number `index`: the same tensors for the same arguments."""
        return self.make_batch(size, torch.Generator().manual_seed(1000 + index))


MODELS: dict[str, ModelCase] = {
    "mlp": ModelCase(MLP, _floats(8)),
    "gpt": ModelCase(GPT, _tokens),
    "convnet": ModelCase(ConvNet, _floats(3, 8, 8)),
    "reused": ModelCase(Reused, _floats(8)),
    "partial": ModelCase(Partial, _floats(8)),
    "checkpointed": ModelCase(lambda: Checkpointed(use_reentrant=False), _floats(8)),
    "checkpointed-reentrant": ModelCase(lambda: Checkpointed(use_reentrant=True), _floats(8)),
    "recurrent": ModelCase(Recurrent, _floats(3, 8)),
    "parametrized": ModelCase(Parametrized, _floats(8)),
    "running-mean": ModelCase(RunningMean, _floats(8)),
    "shared-storage": ModelCase(SharedStorage, _floats(8)),
}

Parameters = Iterable[Any]
OptimizerMaker = Callable[[Parameters], Optimizer]


def optimizer_case(kind: type[Optimizer], lr: float, **settings: Any) -> OptimizerMaker:
    return lambda parameters: kind(parameters, lr=lr, **settings)


def _implementations(
    name: str, kind: type[Optimizer], lr: float, **settings: Any
) -> dict[str, Any]:
    """The plain loop and the foreach implementation, and the fused one where there is one."""
    flags: dict[str, dict[str, bool]] = {"loop": {"foreach": False}, "foreach": {"foreach": True}}
    if kind in (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad):
        flags["fused"] = {"fused": True}
    return {
        f"{name}-{how}": optimizer_case(kind, lr, **settings, **flag) for how, flag in flags.items()
    }


OPTIMIZERS: dict[str, OptimizerMaker] = {
    **_implementations("adam", torch.optim.Adam, 1e-2),
    **_implementations("adam-decay", torch.optim.Adam, 1e-2, weight_decay=0.1, maximize=True),
    **_implementations("adamw", torch.optim.AdamW, 1e-2),
    **_implementations("adamw-amsgrad", torch.optim.AdamW, 1e-2, amsgrad=True),
    **_implementations("sgd", torch.optim.SGD, 0.1),
    **_implementations("sgd-momentum", torch.optim.SGD, 0.1, momentum=0.9, weight_decay=0.01),
    **_implementations("sgd-dampening", torch.optim.SGD, 0.1, momentum=0.9, dampening=0.5),
    **_implementations("sgd-nesterov", torch.optim.SGD, 0.1, momentum=0.9, nesterov=True),
    **_implementations("adagrad", torch.optim.Adagrad, 0.1, lr_decay=0.01),
    **_implementations("rmsprop", torch.optim.RMSprop, 1e-2, centered=True, momentum=0.9),
    **_implementations("nadam", torch.optim.NAdam, 1e-2),
    **_implementations("adamax", torch.optim.Adamax, 1e-2),
    **_implementations("adadelta", torch.optim.Adadelta, 1.0),
    **_implementations("rprop", torch.optim.Rprop, 1e-2),
}

# Muon came late to torch.optim and takes matrices only.
MUON: OptimizerMaker | None = (
    optimizer_case(torch.optim.Muon, 1e-2) if "Muon" in dir(torch.optim) else None
)
