"""Private hooks of optimizers and their learning rate schedulers."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import optimizer as optimizers

from graphopt._compat.threads import is_of_trace

Hook = Callable[[torch.optim.Optimizer, Any, Any], None]


@contextmanager
def hooks_around_steps(before: Hook, after: Hook) -> Iterator[None]:
    """While active, `before` and `after` are called around each optimizer step of the trace. The
    hook tables are replaced, since other threads may iterate over them."""
    names = ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")
    places: dict[str, Any] = vars(optimizers)
    former = [places[name] for name in names]
    with_own = [OrderedDict([*hooks.items(), (None, _of_trace(hook))])
                for hooks, hook in zip(former, (before, after), strict=True)]  # fmt: skip
    places.update(zip(names, with_own, strict=True))
    try:
        yield
    finally:
        places.update(zip(names, former, strict=True))
        for hooks, now in zip(former, with_own, strict=True):
            if len(now) > len(hooks) + 1:  # another thread has registered some
                hooks.update((key, hook) for key, hook in now.items() if key is not None)


def _of_trace(hook: Hook) -> Hook:
    def called(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if is_of_trace():
            hook(optimizer, args, kwargs)

    return called


def mark_stepped(optimizer: torch.optim.Optimizer) -> None:
    """Tells learning rate schedulers that the optimizer has stepped, so that they do not warn."""
    if hasattr(optimizer.step, "_wrapped_by_lr_sched"):
        optimizer._opt_called = True  # type: ignore[attr-defined]
