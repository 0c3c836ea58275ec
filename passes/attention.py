"""Replaces written-out attention by the fused operator, in forward and backward.

    scores  = q @ k.transpose(-2, -1) * scale         out, logsumexp = flash_attention(q, k, v)
    weights = softmax(scores + mask)            ==>   …
    out     = weights @ v                             dq, dk, dv = flash_attention_backward(…)
    …
    dv = …; dq = …; dk = …

The matrix of all scores is then never in memory. Sums are made in another order, so that results
differ in their last bits.

The product of queries and keys, or the queries before it, may be multiplied or divided by a
number; a mask may be added to the scores, or fill them, where it is true, with a number of at most
-1e4. Queries, keys and values have four dimensions, and heads of one size.

Left alone are attention with dropout, of which fused kernels draw other random numbers or none;
masks that have a gradient; attention of which only some of queries, keys and values have one; and a
softmax in another dtype than its scores, as under autocast. Of Hugging Face models with
``attn_implementation="eager"``, GPT-2 without dropout is fused in all layers. A row
of which a mask leaves nothing gives what the fused kernel gives.
"""

from __future__ import annotations

from dataclasses import dataclass
from inspect import Parameter, Signature
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional as F

from graphopt.graph_utils import find_nodes, is_operator
from graphopt.ir.metadata import fake_value
from graphopt.manager import graph_optimization_pass
from graphopt.rewriting import Match, rewrite

_NEGLIGIBLE = -1e4
"""A score that leaves nothing of a weight."""


@graph_optimization_pass(changes_numerics=True)
def fuse_attention(gm: fx.GraphModule) -> int:
    """Replace written-out attention by scaled_dot_product_attention.

    Returns:
        How many attentions are fused.
    """
    found = 0
    for variant in _VARIANTS:
        for gradients in (("q", "k", "v"), ()):
            if find_nodes(gm.graph, _is_softmax):
                examples = {"q": 4, "k": 4, "v": 4, **_MASKS[variant.masking]}
                found += rewrite(
                    gm,
                    variant,
                    _FusedAttention(variant),
                    where=_can_be_fused,
                    gradients=gradients,
                    examples=examples,
                )
    return found


def _is_softmax(node: fx.Node) -> bool:
    return is_operator(node.target, "aten::_softmax")


def _can_be_fused(match: Match) -> bool:
    """True if torch has a fused kernel for a match, and would not write it out again."""
    q, k, v = (fake_value(match.inputs[name]) for name in "qkv")
    if len({t.shape[-1] for t in (q, k, v)}) > 1 or any(t.stride(-1) != 1 for t in (q, k, v)):
        return False
    if match.inputs.get("fill", _NEGLIGIBLE) > _NEGLIGIBLE:
        return False
    return bool(q.numel() and k.numel())


@dataclass(frozen=True)
class _WrittenOutAttention:
    """Attention written with single operators in one of the usual ways: what the pass looks for.

    Attributes:
        scaling: "scores *", "scores /", "q *", "q /" or "".
        masking: "+", "fill" or "".
    """

    scaling: str
    masking: str

    @property
    def __name__(self) -> str:
        return "attention"

    @property
    def __signature__(self) -> Signature:
        names = ["q", "k", "v", *_MASK_PARAMETERS[self.masking]]
        names += ["scale"] if self.scaling else []
        kinds = [(name, float if name in ("scale", "fill") else Tensor) for name in names]
        kind = Parameter.POSITIONAL_OR_KEYWORD
        return Signature([Parameter(name, kind, annotation=of) for name, of in kinds])

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, **given: Any) -> Tensor:
        factor = given.get("scale", 1.0)
        if self.scaling.startswith("q"):
            q = q * factor if self.scaling.endswith("*") else q / factor
        scores = q @ k.transpose(-2, -1)
        if self.scaling.startswith("scores"):
            scores = scores * factor if self.scaling.endswith("*") else scores / factor
        if self.masking == "+":
            scores = scores + given["mask"]
        elif self.masking == "fill":
            scores = scores.masked_fill(given["mask"], given["fill"])
        return F.softmax(scores, dim=-1) @ v


@dataclass(frozen=True)
class _FusedAttention:
    """Attention as one fused operator: what the pass puts in."""

    written_out: _WrittenOutAttention

    @property
    def __signature__(self) -> Signature:
        return self.written_out.__signature__

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, **given: Any) -> Tensor:
        scale, mask = given.get("scale", 1.0), given.get("mask")
        if self.written_out.scaling.endswith("/"):
            scale = 1.0 / scale
        if self.written_out.masking == "fill":
            assert mask is not None
            mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill(mask, -torch.inf)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)


_MASK_PARAMETERS = {"": (), "+": ("mask",), "fill": ("mask", "fill")}
_MASKS: dict[str, dict[str, Any]] = {
    "": {},
    "+": {"mask": 4},
    "fill": {"mask": torch.empty(4, 4, dtype=torch.bool, device="meta")},
}
_VARIANTS = [
    _WrittenOutAttention(scaling, masking)
    for scaling in ("scores *", "scores /", "q *", "q /", "")
    for masking in _MASK_PARAMETERS
]
