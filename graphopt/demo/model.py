"""A small GPT: tied embeddings, dropout, no buffers."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class GPTSize:
    """The sizes of the demo's GPT; by default 3.2 million parameters over a hundred tokens."""

    alphabet: int
    length: int = 32
    width: int = 256
    heads: int = 4
    layers: int = 4
    dropout: float = 0.1


class Block(nn.Module):
    """A transformer block: attention and a feed-forward network, pre-normalized and residual."""

    def __init__(self, size: GPTSize) -> None:
        super().__init__()
        self.heads = size.heads
        self.attention_norm = nn.LayerNorm(size.width)
        self.query_key_value = nn.Linear(size.width, 3 * size.width)
        self.attention_out = nn.Linear(size.width, size.width)
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(size.width),
            nn.Linear(size.width, 4 * size.width),
            nn.GELU(),
            nn.Linear(4 * size.width, size.width),
            nn.Dropout(size.dropout),
        )
        self.dropout = nn.Dropout(size.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        out: Tensor = x + self.feed_forward(x)
        return out

    def attention(self, x: Tensor) -> Tensor:
        """Causal self-attention of shape `[batch, length, width]`."""
        batch, length, width = x.shape
        heads = self.query_key_value(x).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: Tensor = self.attention_out(mixed.transpose(1, 2).reshape(batch, length, width))
        return out


class CharGPT(nn.Module):
    """The demo's GPT, from token numbers (batch, length), int64, to logits (batch, length,
    alphabet)."""

    def __init__(self, size: GPTSize) -> None:
        super().__init__()
        self.size = size
        self.tokens = nn.Embedding(size.alphabet, size.width)
        self.positions = nn.Embedding(size.length, size.width)
        self.dropout = nn.Dropout(size.dropout)
        self.blocks = nn.Sequential(*(Block(size) for _ in range(size.layers)))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, size.alphabet, bias=False)
        self.head.weight = self.tokens.weight
        self._initialise()

    def forward(self, numbers: Tensor) -> Tensor:
        x = self.tokens(numbers) + self.positions.weight[: numbers.shape[1]]
        logits: Tensor = self.head(self.norm(self.blocks(self.dropout(x))))
        return logits

    def _initialise(self) -> None:
        # Tokens that stand out of the residual stream let the first hundred steps learn.
        for block in self.blocks.modules():
            if isinstance(block, nn.Linear):
                nn.init.normal_(block.weight, std=0.04)
                nn.init.zeros_(block.bias)
        nn.init.normal_(self.tokens.weight, std=0.1)
        nn.init.normal_(self.positions.weight, std=0.02)
