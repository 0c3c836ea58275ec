"""The backward that runs on this thread, and the leaves that a backward would reach."""

from __future__ import annotations

import sys
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


def ends_in_hidden_leaves(tensor: torch.Tensor) -> bool:
    """True if backwards through a computed tensor change nothing that anybody holds: one function
    that keeps no values has made it of leaves that are otherwise gone.

    >>> torch.tensor([0.5], dtype=torch.float64, requires_grad=True).float()
    tensor([0.5000], grad_fn=<ToCopyBackward0>)
    """
    function = tensor.grad_fn
    if function is None or tensor.retains_grad:
        return False
    if type(function).__name__.rstrip("0123456789") not in _KEEPING_NOTHING:
        return False
    return all(each is None or _is_hidden(each) for each, _ in function.next_functions)


_KEEPING_NOTHING = frozenset(
    f"{name}Backward"
    for name in ("ToCopy", "Clone", "Alias", "View", "UnsafeView", "ReshapeAlias", "Unsqueeze",
                 "Squeeze", "Transpose", "T", "Permute", "Expand", "Slice", "Select", "Cat",
                 "Stack")
)  # fmt: skip


def _is_hidden(function: Any) -> bool:
    """True if a function accumulates into a leaf that nothing else holds and that has no hooks."""
    if type(function).__name__ != "AccumulateGrad":
        return False
    leaf = function.variable
    hooks = leaf._backward_hooks, getattr(leaf, "_post_accumulate_grad_hooks", None)
    return not any(hooks) and sys.getrefcount(leaf) == _REFERENCES_OF_HIDDEN


def _references_of_hidden() -> int:
    """The Python reference count of a leaf that only the autograd graph holds."""
    function: Any = torch.ones(1, requires_grad=True, device="cpu").clone().grad_fn
    leaf = function.next_functions[0][0].variable
    return sys.getrefcount(leaf)


_REFERENCES_OF_HIDDEN = _references_of_hidden()  # at once: in a trace, its operators would be seen


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
