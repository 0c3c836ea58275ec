"""The torch modes under which graphs are made and run."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch

from graphopt import _compat


def without_autocast() -> AbstractContextManager[object]:
    """Disables autocast: a graph has its casts as nodes, which must not be cast again.

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
    """Returns the torch modes that influence which operators run.

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
