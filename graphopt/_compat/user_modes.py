"""Modes and hooks of the user around a step that only watch, such as flop counters.

They stand aside while a step is captured, since they would see what the capture does, and are there
again when its graph runs:

    with FlopCounterMode() as counter:
        step(x)      capture: unseen; graph: each operator is seen

A mode of operators that is not torch's might give other results than it is given. A first call
runs eagerly in it, and shows that (`modes_learned`). A rank of several cannot run a call eagerly
alone: there the class has to say it, `only_looks = True`, and the first graph that runs in it is
checked for that (`modes_checked`).

Written for torch 2.11 to 2.15.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
    _pop_mode,
    _push_mode,
)
from torch.utils._pytree import tree_leaves

from graphopt._compat.torch_functions import function_modes, hooks_on_saved_tensors, is_of_program
from graphopt.errors import GraphOptError

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


_ONLY_LOOK: WeakSet[type] = WeakSet()
"""Classes of modes of operators that have been seen to give what they are given."""

_CHANGE: WeakSet[type] = WeakSet()
"""Classes of those that have been seen not to."""

_TRUSTED: WeakSet[type] = WeakSet()
"""Classes that say that they only look."""


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
    for kind in unknown_modes():
        return Watching(
            f"a {kind.__qualname__}, a mode of torch that may change what operators give",
            f"{_WITHIN}; or let its class say that it only looks, only_looks = True, which one rank"
            " of several cannot find out by an eager call",
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
    """The classes of active user modes on operators that may change results."""
    known = (_ONLY_LOOK | _TRUSTED) - _CHANGE
    return [kind for kind in _kinds_of_program() if kind not in known]


def trust_modes() -> None:
    """Trusts user modes whose classes declare `only_looks`; the next graph run checks them."""
    _TRUSTED.update(each for each in unknown_modes() if getattr(each, "only_looks", False) is True)


def _kinds_of_program() -> list[type]:
    kinds = map(type, _modes_of_operators())
    return [kind for kind in kinds if not kind.__module__.startswith("torch.")]


def _modes_of_operators() -> list[Any]:
    modes = _get_current_dispatch_mode_stack() if torch._C._len_torch_dispatch_stack() else []
    return list(filter(is_of_program, modes))


@contextmanager
def modes_learned() -> Iterator[None]:
    """While active, an eager run shows whether user modes change operators."""
    kinds = unknown_modes()
    if not kinds:
        yield
        return
    with _looked_at(kinds):
        yield


@contextmanager
def modes_checked() -> Iterator[None]:
    """While active, a graph run checks the trusted user modes.

    Raises:
        GraphOptError: one does, so that the graph has computed other values than the step.
    """
    found = torch._C._len_torch_dispatch_stack() and _TRUSTED
    kinds = [kind for kind in _kinds_of_program() if kind in _TRUSTED - _ONLY_LOOK] if found else []
    if not kinds:
        yield
        return
    with _looked_at(kinds):
        yield
    if not _CHANGE.isdisjoint(kinds):
        raise GraphOptError(
            f"a {kinds[0].__qualname__}, a mode of torch around the call, says that it only looks,"
            " but gives other values than the operators that it sees: what this call has updated is"
            " neither what the step computes nor what it computes without the mode\n"
            "  hint:  enter the mode within the step, and load a checkpoint or begin anew"
        )


@contextmanager
def _looked_at(kinds: list[type]) -> Iterator[None]:
    """While active, checks if user modes of these classes change operators or results."""
    below, above = _OperatorsOfUserModes(), None
    with ExitStack() as stack:
        modes = _modes_of_operators()
        for _ in modes:
            stack.callback(_push_mode, _pop_mode())
        with below, ExitStack() as inside:
            for mode in modes:
                _push_mode(mode)
                inside.callback(_pop_mode)
            above = inside.enter_context(_OperatorsOfGraph(below))
            yield
    (_CHANGE if above.changed else _ONLY_LOOK).update(kinds)


class _OperatorsOfUserModes(TorchDispatchMode):
    """A mode below the user's modes that records the operators that they call.

    Attributes:
        calls: operator, arguments and result of each.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[Any, list[int], list[Any]]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self.calls.append((func, _identities((args, kwargs)), tree_leaves(result)))
        return result


class _OperatorsOfGraph(TorchDispatchMode):
    """A mode above the user's modes that compares its operators and results with theirs.

    Attributes:
        changed: whether one of them has given anything else.
    """

    def __init__(self, below: _OperatorsOfUserModes) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.below, self.changed = below, False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        asked, calls = _identities((args, kwargs)), self.below.calls
        calls.clear()
        result = func(*args, **(kwargs or {}))
        own = [results for called, given, results in calls if called is func and given == asked]
        wrote = any(called._schema.is_mutable for called, _, _ in calls if called is not func)
        same = len(own) == 1 and _identities(own[0]) == _identities(result)
        self.changed |= wrote or not same
        calls.clear()
        return result


def _identities(nest: Any) -> list[int]:
    return [id(each) for each in tree_leaves(nest) if isinstance(each, torch.Tensor)]


def global_hooks() -> list[tuple[Any, ...]]:
    """The keys of global hooks on modules and optimizers, except those of torch's trackers."""
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
