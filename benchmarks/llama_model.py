"""Llama after its paper, for steps that are planned without weights.

Source: Touvron et al., "LLaMA: Open and Efficient Foundation Language Models" (arXiv 2302.13971),
with the shared keys and values of Llama 3 (arXiv 2407.21783).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class Sizes:
    """The sizes of a Llama model; by default Llama 3 with 8 billion parameters."""

    layers: int = 32
    width: int = 4096
    hidden: int = 14336
    heads: int = 32
    key_heads: int = 8
    words: int = 128256
    checkpointed: bool = True


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Applies rotary position embeddings to queries or keys of batch x heads x length x size."""
    one, other = x.chunk(2, -1)
    return x * cos + torch.cat([-other, one], -1) * sin


class Attention(nn.Module):
    """Causal grouped-query attention: several heads share keys and values."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.size = sizes.width // sizes.heads
        keys = sizes.key_heads * self.size
        self.q = nn.Linear(sizes.width, sizes.width, bias=False)
        self.k = nn.Linear(sizes.width, keys, bias=False)
        self.v = nn.Linear(sizes.width, keys, bias=False)
        self.o = nn.Linear(sizes.width, sizes.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (
            made(x).view(batch, length, -1, self.size).transpose(1, 2)
            for made in (self.q, self.k, self.v)
        )
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        shared = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)
        found = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(found.transpose(1, 2).reshape(batch, length, width))


class Layer(nn.Module):
    """A transformer layer: attention and a gated feed-forward network."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.attention = Attention(sizes)
        self.gate = nn.Linear(sizes.width, sizes.hidden, bias=False)
        self.up = nn.Linear(sizes.width, sizes.hidden, bias=False)
        self.down = nn.Linear(sizes.hidden, sizes.width, bias=False)
        self.before, self.behind = nn.RMSNorm(sizes.width), nn.RMSNorm(sizes.width)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.before(x), cos, sin)
        given = self.behind(x)
        return x + self.down(functional.silu(self.gate(given)) * self.up(given))


class Llama(nn.Module):
    """A Llama that returns the loss of predicting the next word."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.checkpointed = sizes.checkpointed
        self.head_size = sizes.width // sizes.heads
        self.embedding = nn.Embedding(sizes.words, sizes.width)
        self.layers = nn.ModuleList(Layer(sizes) for _ in range(sizes.layers))
        self.norm = nn.RMSNorm(sizes.width)
        self.head = nn.Linear(sizes.width, sizes.words, bias=False)

    def forward(self, words: Tensor, following: Tensor) -> Tensor:
        x = self.embedding(words)
        cos, sin = self._positions(words.shape[1], x)
        for layer in self.layers:
            if self.checkpointed:
                x = checkpoint(layer, x, cos, sin, use_reentrant=False)
            else:
                x = layer(x, cos, sin)
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits.flatten(0, 1), following.flatten())

    def _positions(self, length: int, x: Tensor) -> tuple[Tensor, Tensor]:
        halves = torch.arange(0, self.head_size, 2, device=x.device, dtype=torch.float32)
        rates = 500000.0 ** (-halves / self.head_size)
        angles = torch.arange(length, device=x.device, dtype=torch.float32)[:, None] * rates
        angles = torch.cat([angles, angles], -1)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)
