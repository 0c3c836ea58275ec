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
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import nn
from torch.optim import Optimizer

logger = logging.getLogger("graphopt")

_TABLES = ("_parameters", "_buffers")


class Watch:
    """Watches the containers of some modules and optimizers.

    Args:
        finish: does what is in flight; called when one of the containers is used. If it raises, so
            does the use, and the containers stay watched.
    """

    def __init__(
        self,
        modules: Iterable[nn.Module],
        optimizers: Iterable[Optimizer],
        finish: Callable[[], None],
    ) -> None:
        self._modules = [weakref.ref(module) for module in modules]
        self._optimizers = [weakref.ref(optimizer) for optimizer in optimizers]
        self._finish = finish
        self._replaced: list[tuple[dict[str, Any], str, Any]] = []

    def start(self) -> None:
        """Replace the containers by stand-ins, unless they are."""
        if self._replaced:
            return
        for owner, key in self._places():
            stand_in: Any = _stand_in(owner[key], self)
            if stand_in is not None:
                owner[key] = stand_in
                self._replaced.append((owner, key, stand_in))
        _active.add(self)

    def stop(self) -> None:
        """Put the containers back."""
        replaced, self._replaced = self._replaced, []
        for owner, key, stand_in in replaced:
            if owner.get(key) is stand_in:
                owner[key] = unwatched(stand_in)
        _active.discard(self)

    def settle(self) -> None:
        """Finish what is in flight."""
        self._finish()
        self.stop()

    def settle_others(self) -> None:
        """Finish what other steps have in flight for the same modules and optimizers."""
        for owner, key in self._places():
            container = owner[key]
            if isinstance(container, _Watched) and container.watch() is not self:
                container.settle()

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


@atexit.register
def _settle_all() -> None:
    for watch in list(_active):
        try:
            watch.settle()
        except Exception:
            logger.exception("late work of a training step could not be finished at exit")


class _Watched:
    """What the stand-ins share. They hold the same items as the container they stand for."""

    plain: Any
    _watch: weakref.ref[Watch]

    def watch(self) -> Watch | None:
        return self._watch()

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
        return dict, (tuple(plain.items()),)

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


_STAND_INS = {kind: _watched(kind) for kind in (dict, list, defaultdict)}


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
