"""Optimizers in a graph: finding them, and splitting them into independent updates."""

from graphopt.optim.blocks import (
    AdamArgs,
    ForeachAddBlock,
    FusedAdamBlock,
    FusedOptimizerBlock,
    ListOptimizerBlock,
)
from graphopt.optim.errors import OptimizerSplitError
from graphopt.optim.finding import get_all_fused_optimizer_blocks, get_fused_optimizer_block
from graphopt.optim.gradients import gradients_of
from graphopt.optim.split import split_fused_optimizer, split_updates

__all__ = [
    "AdamArgs",
    "ForeachAddBlock",
    "FusedAdamBlock",
    "FusedOptimizerBlock",
    "ListOptimizerBlock",
    "OptimizerSplitError",
    "get_all_fused_optimizer_blocks",
    "get_fused_optimizer_block",
    "gradients_of",
    "split_fused_optimizer",
    "split_updates",
]
