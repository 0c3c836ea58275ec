"""Modes and hooks of the user around a step that only watch, such as flop counters.

They stand aside while a step is captured, since they would see what the capture does, and are there
again when its graph runs:

    with FlopCounterMode() as counter:
        step(x)      capture: unseen; graph: each operator is seen

A mode of operators that is not torch's may give other results than it is given. Its class says that
it does not, `only_looks = True`; otherwise a call in it runs eagerly.

Written for torch 2.11 to 2.15.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, _pop_mode, _push_mode

from graphopt._compat.torch_functions import (
    function_modes,
    hooks_on_saved_tensors,
    is_of_program,
    is_unwatched,
)

_GLOBAL_HOOKS: tuple[dict[Any, Any], ...] = (
    *(
        table
        for name, table in vars(torch.nn.modules.module).items()
        if name.startswith("_global_") and isinstance(table, dict)
    ),
    _global_optimizer_pre_hooks,
    _global_optimizer_post_hooks,
)

_TRACKERS = {
    "torch.utils.module_tracker": "ModuleTracker",
    "torch.distributed._tools.mod_tracker": "ModTracker",
}
"""Classes whose hooks note which module runs, for modes that count."""


class Watching(NamedTuple):
    """A mode or hook that must see the step's own functions, which its graph does not call.

    Attributes:
        what: as messages name it.
        cure: where the step cannot run eagerly.
    """

    what: str
    cure: str


_WITHIN = "enter it within the step, whose graph then has what it does"
_EAGERLY = "; or let all ranks run the step as it is written, GRAPHOPT_OFF=1"


def watches_functions() -> Watching | None:
    """The mode or hook of the user that must see the step's own functions; None without one."""
    if is_unwatched():
        return None
    for kind in unknown_modes():
        return Watching(
            f"a {kind.__qualname__}, a mode of torch that may change what operators give",
            f"{_WITHIN}; or let its class say that it only looks, only_looks = True",
        )
    for mode in function_modes():
        what = f"a {type(mode).__qualname__}, which sees functions of torch"
        return Watching(what, f"{_WITHIN}{_EAGERLY}; or count operators, by a TorchDispatchMode")
    hooks = hooks_on_saved_tensors()
    if hooks is not None:
        return Watching(f"hooks on saved tensors ({hooks})", f"{_WITHIN}{_EAGERLY}")
    if torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled():
        what = "torch's search for anomalies"
        return Watching(what, f"give check_nan=False, with which the graph runs{_EAGERLY}")
    return None


def unknown_modes() -> list[type]:
    """The classes of active user modes on operators that may change results: those neither of torch
    nor with `only_looks = True`."""
    kinds = map(type, _modes_of_operators())
    looks = (kind for kind in kinds if getattr(kind, "only_looks", False) is not True)
    return [kind for kind in looks if not kind.__module__.startswith("torch.")]


def _modes_of_operators() -> list[Any]:
    modes = _get_current_dispatch_mode_stack() if torch._C._len_torch_dispatch_stack() else []
    return list(filter(is_of_program, modes))


def global_hooks() -> list[tuple[Any, ...]]:
    """The keys of global hooks on modules and optimizers, except those of torch's trackers."""
    if not any(_GLOBAL_HOOKS):
        return []
    tables = (table for table in _GLOBAL_HOOKS if table)
    found = (tuple(k for k, hook in table.items() if not _tracks(hook)) for table in tables)
    return [keys for keys in found if keys]


@contextmanager
def unwatched() -> Iterator[None]:
    """While active, user modes that only watch, and torch's module trackers, see nothing."""
    with ExitStack() as stack:
        for table in _GLOBAL_HOOKS:
            if table and any(map(_tracks, table.values())):
                stack.enter_context(_without_trackers(table))
        for _ in [] if unknown_modes() else _modes_of_operators():
            stack.callback(_push_mode, _pop_mode())
        yield


@contextmanager
def _without_trackers(table: dict[Any, Any]) -> Iterator[None]:
    before = list(table.items())
    for key, hook in before:
        if _tracks(hook):
            del table[key]
    try:
        yield
    finally:
        added = [(key, hook) for key, hook in table.items() if key not in dict(before)]
        table.clear()
        table.update([*before, *added])


def _tracks(hook: Any) -> bool:
    kind = type(getattr(hook, "__self__", None))
    module = sys.modules.get(kind.__module__)
    name = _TRACKERS.get(kind.__module__)
    return name is not None and kind is getattr(module, name, None)
