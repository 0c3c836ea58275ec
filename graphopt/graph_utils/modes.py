"""Modes of torch under which graphs are made and run."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch

from graphopt import _compat


def without_autocast() -> AbstractContextManager[object]:
    """Autocast off: casts are nodes of a graph, and must not happen once more around them.

    >>> from graphopt.graph_utils import without_autocast
    >>> with torch.autocast("cpu"), without_autocast():
    ...     torch.is_autocast_enabled("cpu")
    False
    """
    enabled = [device for device in ("cpu", "cuda") if torch.is_autocast_enabled(device)]
    if not enabled:
        return nullcontext()
    stack = ExitStack()
    for device in enabled:
        stack.enter_context(torch.autocast(device, enabled=False))
    return stack


def environment() -> tuple[Any, ...]:
    """Modes of torch that change what operators run.

    >>> from graphopt.graph_utils import environment
    >>> with torch.no_grad():
    ...     without = environment()
    >>> without == environment()
    False
    """
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_default_dtype(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.is_autocast_enabled("cuda"),
        torch.get_autocast_dtype("cuda"),
        *_compat.global_settings(),
    )
