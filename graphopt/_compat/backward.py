"""Where a backward is, on this thread."""

from __future__ import annotations

from collections.abc import Callable

import torch


def is_in_backward() -> bool:
    """Whether autograd is running a backward on this thread."""
    return torch._C._current_graph_task_id() != -1


def after_backward(function: Callable[[], None]) -> None:
    """Call `function` once the backward that runs on this thread has accumulated all gradients.

    `torch.autograd.Variable` is where FSDP and DDP in torch find the engine, in 2.11 to 2.15.
    """
    torch.autograd.Variable._execution_engine.queue_callback(function)
