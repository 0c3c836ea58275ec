"""Private torch APIs of activation checkpointing.

Written for torch 2.11 to 2.15.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch.utils.checkpoint as checkpointing

from graphopt._compat.threads import is_of_trace

_OF_TORCH = checkpointing.SAC_IGNORED_OPS
"""The operators that torch itself does not offer to policies."""


def _is_not_compiling(func: Any, args: Any, kwargs: Any) -> bool:
    """Always False, in place of torch's check: a checkpoint that compiles keeps everything, and
    leaves recomputation to the compiler."""
    return False


def selecting_as_in_eager(unseen: Iterable[Any]) -> list[tuple[Any, str, Any]]:
    """Replacements by which a selective checkpoint keeps the same values in a trace as in eager
    code.

    Args:
        unseen: operators that eager code does not call, which no policy is to be asked about.
    """
    return [
        (checkpointing, "_is_compiling", _is_not_compiling),
        (checkpointing, "SAC_IGNORED_OPS", _IgnoredInTrace(unseen)),
    ]


class _IgnoredInTrace(frozenset[Any]):
    """The operators that selective checkpoints ignore, with more of them during the trace."""

    def __contains__(self, operator: Any) -> bool:
        if operator in _OF_TORCH:
            return True
        return super().__contains__(operator) and is_of_trace()
