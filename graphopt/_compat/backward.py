"""The backward that runs on this thread."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch


def is_in_backward() -> bool:
    """True if autograd is running a backward on this thread."""
    return torch._C._current_graph_task_id() != -1


def after_backward(function: Callable[[], None]) -> None:
    """Calls `function` once the running backward has accumulated all gradients.

    `torch.autograd.Variable` is where FSDP and DDP in torch find the engine, in 2.11 to 2.15.
    """
    torch.autograd.Variable._execution_engine.queue_callback(function)


def around_backwards(
    around: Callable[[Iterable[Any]], AbstractContextManager[None]],
) -> tuple[tuple[Any, str, Any], ...]:
    """Replacements, for `replaced`, that enter `around` with the autograd functions of the
    results while a backward runs."""
    run = torch.autograd._engine_run_backward

    def run_around(results: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        edges = [torch.autograd.graph.get_gradient_edge(each) if isinstance(each, torch.Tensor)
                 else each for each in results]  # fmt: skip
        with around([edge.node for edge in edges]):
            return run(results, *args, **kwargs)

    return ((torch.autograd, "_engine_run_backward", run_around),)


def around_unpacking(
    around: Callable[[Callable[[Any], Any]], Callable[[Any], Any]],
) -> tuple[tuple[Any, str, Any], ...]:
    """Replacements, for `replaced`, that wrap the unpack function of saved-tensor hooks set from
    now on."""
    module: Any = torch._C._autograd
    push = module._push_saved_tensors_default_hooks

    def push_around(pack: Any, unpack: Any) -> None:
        push(pack, around(unpack))

    return ((module, "_push_saved_tensors_default_hooks", push_around),)
