"""Notice that somebody reads parameters or optimizer state while late work is in flight.

Whoever reads the parameters of a module goes through its table of parameters, and whoever reads an
optimizer's state through `optimizer.state` or a group's list of parameters: `state_dict()`,
`parameters()`, `module.weight`, a forward, `deepcopy`, pickling, an averaged copy. While something
is in flight, these containers are replaced by stand-ins that finish it before they answer. The
numbers in parameter groups, such as the learning rate, are not watched.

A tensor that the user keeps in a variable of their own cannot be watched.
"""

from __future__ import annotations

import atexit
import copy
import logging
import os
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import nn
from torch.optim import Optimizer

from graphopt import _compat

logger = logging.getLogger("graphopt")

_TABLES = ("_parameters", "_buffers")


class Watch:
    """Watches the containers of some modules and optimizers.

    Args:
        finish: does what is in flight; called when one of the containers is used. Returns whether
            nothing is left to do. If it raises, so does the use, and the containers stay watched.
    """

    def __init__(
        self,
        modules: Iterable[nn.Module],
        optimizers: Iterable[Optimizer],
        finish: Callable[[], bool],
    ) -> None:
        self._modules = [weakref.ref(module) for module in modules]
        self._optimizers = [weakref.ref(optimizer) for optimizer in optimizers]
        self._finish = finish
        self._replaced: list[tuple[dict[str, Any], str, Any]] = []
        self._storages: frozenset[int] = frozenset()

    def start(self) -> bool:
        """Replace the containers by stand-ins, unless they are.

        Returns:
            False, and nothing is replaced, where a container is of a class that has no stand-in.
        """
        if self._replaced:
            return True
        stand_ins = [(owner, key, _stand_in(owner[key], self)) for owner, key in self._places()]
        if any(stand_in is None for _, _, stand_in in stand_ins):
            return False
        self._storages = self._storages_now()
        for owner, key, stand_in in stand_ins:
            owner[key] = stand_in
        self._replaced = stand_ins
        _active.add(self)
        return True

    def stop(self) -> None:
        """Put the containers back."""
        replaced, self._replaced = self._replaced, []
        for owner, key, stand_in in replaced:
            if owner.get(key) is stand_in:
                owner[key] = unwatched(stand_in)
        _active.discard(self)

    def settle(self) -> None:
        """Finish what is in flight."""
        if self._finish():
            self.stop()

    def settle_others(self) -> None:
        """Finish what other steps have in flight for parameters in the same storage."""
        others = [watch for watch in list(_active) if watch is not self]
        if not others:
            return
        mine = self._storages_now()
        for other in others:
            if not mine.isdisjoint(other._storages):
                other.settle()

    def _storages_now(self) -> frozenset[int]:
        tables = (unwatched(o[k]) for o, k in self._places() if k in _TABLES)
        tensors = (tensor for table in tables for tensor in table.values())
        return frozenset(_compat.storage_key(t) for t in tensors if t is not None)

    def _places(self) -> Iterator[tuple[dict[str, Any], str]]:
        """Where the containers are kept: `(dictionary, key)`."""
        for reference in self._modules:
            module = reference()
            if module is not None:
                attributes = vars(module)
                yield from ((attributes, table) for table in _TABLES if attributes[table])
                if isinstance(module, nn.RNNBase):
                    yield attributes, "_flat_weights"
        for owner in self._optimizers:
            optimizer = owner()
            if optimizer is not None:
                yield vars(optimizer), "state"
                yield from ((group, "params") for group in optimizer.param_groups)


_active: weakref.WeakSet[Watch] = weakref.WeakSet()


def _settle_all() -> None:
    for watch in list(_active):
        try:
            watch.settle()
        except Exception as error:
            logger.error("late work of a training step could not be finished: %s", error)


atexit.register(_settle_all)
# A forked process has none of the threads that its collectives would have to wait for.
os.register_at_fork(before=_settle_all)


class _Watched:
    """What the stand-ins share. They hold the same items as the container they stand for."""

    plain: Any
    _watch: weakref.ref[Watch]

    def settle(self) -> Any:
        """Finish what is in flight; returns the container."""
        watch = self._watch()
        if watch is not None:
            watch.settle()
        return self.plain

    # Which names and members there are does not depend on what is in flight, and every assignment
    # to an attribute of a module asks.
    def __contains__(self, item: Any) -> bool:
        return item in self.plain

    def __len__(self) -> int:
        return len(self.plain)

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain = self.settle()
        if isinstance(plain, list):
            return list, (tuple(plain),)
        if isinstance(plain, defaultdict):
            return defaultdict, (plain.default_factory, dict(plain))
        return type(plain), (tuple(plain.items()),)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.settle(), memo)

    def __radd__(self, other: Any) -> Any:
        return other + self.settle()


_OWN = {*vars(_Watched), *vars(object)} - {"__eq__", "__ne__", "__repr__", "__str__", "__format__"}


def _forwarding(name: str) -> Callable[..., Any]:
    def method(self: _Watched, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.settle(), name)(*args, **kwargs)

    method.__name__ = name
    return method


def _watched(container: type) -> type[Any]:
    """A subclass of a container, all of whose methods settle first."""
    names = [
        name for name in dir(container) if name not in _OWN and callable(getattr(container, name))
    ]
    methods: dict[str, Any] = {name: _forwarding(name) for name in names}
    return type(f"Watched{container.__name__.title()}", (_Watched, container), methods)


_STAND_INS = {kind: _watched(kind) for kind in (dict, OrderedDict, list, defaultdict)}


def _stand_in(container: Any, watch: Watch) -> Any:
    """A stand-in with the same items; None for a container of an unknown class."""
    kind = type(container)
    stand_in: Any = _STAND_INS.get(kind)
    if stand_in is None:
        return None
    made = stand_in.__new__(stand_in)
    if kind is list:
        list.extend(made, container)
    else:
        dict.update(made, container)
    made.plain, made._watch = container, weakref.ref(watch)
    return made


def unwatched(container: Any) -> Any:
    """The container itself, be it watched or not; nothing is finished."""
    return container.plain if isinstance(container, _Watched) else container
