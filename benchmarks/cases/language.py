"""Cases of language models and their training loops."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adam, AdamW, RMSprop
from torch.optim.lr_scheduler import OneCycleLR, StepLR

from .case import STEPS, Case, case, trains, trains_all

VOCABULARY = 48
LENGTH = 12


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.c_attn = nn.Linear(width, 3 * width)
        self.c_proj = nn.Linear(width, width)
        self.attn_dropout, self.resid_dropout = nn.Dropout(dropout), nn.Dropout(dropout)
        self.heads, self.width = heads, width
        mask = torch.tril(torch.ones(LENGTH, LENGTH)).view(1, 1, LENGTH, LENGTH)
        self.register_buffer("bias", mask)

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.width, dim=2)
        k = k.view(B, T, self.heads, C // self.heads).transpose(1, 2)
        q = q.view(B, T, self.heads, C // self.heads).transpose(1, 2)
        v = v.view(B, T, self.heads, C // self.heads).transpose(1, 2)
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf"))
        y = self.attn_dropout(F.softmax(att, dim=-1)) @ v
        y = y.transpose(1, 2).contiguous().view(B, T, C)
        return self.resid_dropout(self.c_proj(y))


class NanoGPT(nn.Module):
    """A GPT as in nanoGPT: returns logits and loss, ties weights, checks the length."""

    def __init__(self, width: int = 16, layers: int = 2, dropout: float = 0.1) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(VOCABULARY, width),
                "wpe": nn.Embedding(LENGTH, width),
                "drop": nn.Dropout(dropout),
                "h": nn.ModuleList(
                    nn.ModuleDict(
                        {
                            "ln_1": nn.LayerNorm(width),
                            "attn": Attention(width, 2, dropout),
                            "ln_2": nn.LayerNorm(width),
                            "mlp": nn.Sequential(
                                nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
                            ),
                        }
                    )
                    for _ in range(layers)
                ),
                "ln_f": nn.LayerNorm(width),
            }
        )
        self.lm_head = nn.Linear(width, VOCABULARY, bias=False)
        self.transformer.wte.weight = self.lm_head.weight

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        _, t = idx.size()
        assert t <= LENGTH, f"Cannot forward sequence of length {t}"
        pos = torch.arange(0, t, dtype=torch.long, device=idx.device)
        x = self.transformer.drop(self.transformer.wte(idx) + self.transformer.wpe(pos))
        for block in self.transformer.h:
            x = x + block["attn"](block["ln_1"](x))
            x = x + block["mlp"](block["ln_2"](x))
        logits = self.lm_head(self.transformer.ln_f(x))
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))


def tokens() -> tuple[Tensor, Tensor]:
    return (torch.randint(0, VOCABULARY, (2, LENGTH)), torch.randint(0, VOCABULARY, (2, LENGTH)))


def decaying_matrices(parameters: Any) -> AdamW:
    parameters = list(parameters)
    decay = [p for p in parameters if p.dim() >= 2]
    others = [p for p in parameters if p.dim() < 2]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return AdamW(groups, lr=6e-4, betas=(0.9, 0.95))


@trains(NanoGPT, decaying_matrices, tokens)
def nanogpt(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    _, loss = model(x, y)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss


@trains(NanoGPT, AdamW, tokens, lr=1e-3)
def gradient_accumulation(model: nn.Module, optimizer: Any, xs: Tensor, ys: Tensor) -> Tensor:
    """Gradient accumulation over microbatches in the step, under bfloat16 autocast."""
    optimizer.zero_grad()
    total = torch.zeros(())
    for x, y in zip(xs.chunk(2), ys.chunk(2), strict=True):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            _, loss = model(x, y)
            loss = loss / 2
        loss.backward()
        total += loss.detach()
    optimizer.step()
    return total


@trains(NanoGPT, AdamW, tokens, numbered=True, lr=1e-3)
def accumulation_by_batch_index(
    model: nn.Module, optimizer: Any, x: Tensor, y: Tensor, batch_idx: int
) -> Tensor:
    """Gradient accumulation in which `batch_idx` decides if the optimizer steps."""
    _, loss = model(x, y)
    (loss / 2).backward()
    if (batch_idx + 1) % 2 == 0:
        optimizer.step()
        optimizer.zero_grad()
    return loss


class LoRA(nn.Module):
    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base
        base.weight.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(rank, base.in_features) * 0.1)
        self.b = nn.Parameter(torch.zeros(base.out_features, rank))
        self.dropout = nn.Dropout(0.05)
        self.scaling = 2.0

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.dropout(x) @ self.a.T @ self.b.T * self.scaling


def with_lora() -> NanoGPT:
    model = NanoGPT().requires_grad_(False)
    for block in model.transformer.h:
        block["attn"].c_attn = LoRA(block["attn"].c_attn)
    return model


def trained_only(parameters: Any) -> AdamW:
    return AdamW([p for p in parameters if p.requires_grad], lr=1e-2)


def one_cycle(optimizer: Any) -> OneCycleLR:
    return OneCycleLR(optimizer, 1e-2, total_steps=20)


@trains(with_lora, trained_only, tokens, one_cycle)
def lora(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    loss = model(x, y)[1]
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


class Experts(nn.Module):
    """A mixture of experts as Mixtral's: each expert runs on the tokens routed to it."""

    def __init__(self, width: int = 16, experts: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.gate = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 32), nn.SiLU(), nn.Linear(32, width))
            for _ in range(experts)
        )
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, idx: Tensor) -> Tensor:
        x = self.embed(idx)
        flat = x.reshape(-1, x.shape[-1])
        weights, chosen = torch.topk(F.softmax(self.gate(flat), dim=1), 2, dim=-1)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        result = torch.zeros_like(flat)
        mask = F.one_hot(chosen, len(self.experts)).permute(2, 1, 0)
        for number, expert in enumerate(self.experts):
            place, token = torch.where(mask[number])
            current = expert(flat[token]) * weights[token, place, None]
            result.index_add_(0, token, current)
        return self.head(x + result.view_as(x))


def predict_tokens(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
    loss.backward()
    optimizer.step()
    return loss


class DenseExperts(Experts):
    """A mixture of experts that runs each expert on every token, weighted by the router."""

    def forward(self, idx: Tensor) -> Tensor:
        x = self.embed(idx)
        weights = F.softmax(self.gate(x), dim=-1)
        top, chosen = weights.topk(2, dim=-1)
        gates = torch.zeros_like(weights).scatter(-1, chosen, top)
        outputs = torch.stack([expert(x) for expert in self.experts], dim=-1)
        return self.head((outputs * gates.unsqueeze(-2)).sum(-1))


trains(Experts, AdamW, tokens, name="mixture_of_experts", lr=1e-3)(predict_tokens)
trains(DenseExperts, Adam, tokens, name="mixture_of_experts_dense", lr=1e-3)(predict_tokens)


class EncoderDecoder(nn.Module):
    """torch's Transformer with the masks of the translation tutorial."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.transformer = nn.Transformer(width, 2, 1, 1, 32, dropout=0.1, batch_first=True)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        length = target.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        padding = source == 0
        hidden = self.transformer(
            self.embed(source),
            self.embed(target),
            tgt_mask=mask,
            src_key_padding_mask=padding,
            memory_key_padding_mask=padding,
        )
        return self.head(hidden)


criterion = nn.CrossEntropyLoss(ignore_index=0, label_smoothing=0.1)


@trains(EncoderDecoder, Adam, tokens, lr=1e-3, betas=(0.9, 0.98), eps=1e-9)
def translation(model: nn.Module, optimizer: Any, source: Tensor, target: Tensor) -> Tensor:
    logits = model(source, target[:, :-1])
    optimizer.zero_grad()
    loss = criterion(logits.reshape(-1, logits.shape[-1]), target[:, 1:].reshape(-1))
    loss.backward()
    optimizer.step()
    return loss


class MaskedEncoder(nn.Module):
    """The language model of PyTorch's tutorial: an encoder with a mask, without `is_causal`."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        layer = nn.TransformerEncoderLayer(width, 2, 32, 0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, idx: Tensor) -> Tensor:
        x = self.embed(idx) * math.sqrt(16)
        mask = nn.Transformer.generate_square_subsequent_mask(idx.shape[1])
        return self.head(self.encoder(x, mask))


def decaying(optimizer: Any) -> StepLR:
    return StepLR(optimizer, 1, gamma=0.95)


@trains(MaskedEncoder, SGD, tokens, decaying, lr=0.5)
def encoder_with_mask(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    output = model(x).view(-1, VOCABULARY)
    loss = F.cross_entropy(output, y.view(-1))
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    return loss


@case
def lengths_that_vary() -> Case:
    """A language model trained on batches of another length in every call."""
    model = NanoGPT()
    optimizer = AdamW(model.parameters(), lr=1e-3)
    calls = []
    for length in range(6, 6 + STEPS):
        x, y = tokens()
        calls.append((model, optimizer, x[:, :length], y[:, :length].contiguous()))
    return Case(lora, calls, [model, optimizer])


def with_reference() -> tuple[Any, ...]:
    model, reference = NanoGPT(dropout=0.0), NanoGPT(dropout=0.0)
    reference.load_state_dict(model.state_dict())
    return model, reference.requires_grad_(False), RMSprop(model.parameters(), lr=1e-4)


def likelihood(model: nn.Module, x: Tensor) -> Tensor:
    logits = model(x)[0][:, :-1].log_softmax(-1)
    return torch.gather(logits, 2, x[:, 1:].unsqueeze(2)).squeeze(2).sum(-1)


@trains_all(with_reference, tokens)
def direct_preference(
    model: Any, reference: Any, optimizer: Any, chosen: Tensor, rejected: Tensor
) -> Any:
    """Direct preference optimization, with a frozen copy of the model as reference."""
    with torch.no_grad():
        old_chosen = likelihood(reference, chosen)
        old_rejected = likelihood(reference, rejected)
    margin = likelihood(model, chosen) - likelihood(model, rejected)
    losses = -F.logsigmoid(0.1 * (margin - (old_chosen - old_rejected)))
    optimizer.zero_grad()
    losses.mean().backward()
    optimizer.step()
    return losses.mean(), (margin > 0).float().mean()


def with_larger() -> tuple[Any, ...]:
    model, teacher = NanoGPT(width=8, layers=1), NanoGPT()
    return model, teacher.eval(), AdamW(model.parameters(), lr=1e-3)


@trains_all(with_larger, tokens)
def distillation(model: Any, teacher: Any, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        soft = F.softmax(teacher(x)[0] / 2.0, dim=-1)
    logits, hard = model(x, y)
    kl = F.kl_div(F.log_softmax(logits / 2.0, dim=-1), soft, reduction="batchmean") * 4.0
    loss = 0.5 * hard + 0.5 * kl
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss
