"""The objects that there were before a step: how one trace of it got to them."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from typing import Any
from weakref import WeakValueDictionary

import torch

from graphopt import _compat
from graphopt.errors import CaptureError
from graphopt.ir.source import SourceLine
from graphopt.ir.user_frames import current_location
from graphopt.tracing.outside.existing import existing_now
from graphopt.tracing.outside.places import OutsidePlace, is_container, is_value, viewed
from graphopt.tracing.rollback.nests import Path


class GivenObjects(dict[int, Any]):
    """Objects among the arguments of a call, by their positions."""


class KnownObjects:
    """What is outside a step, and what it does with such objects as such.

    Args:
        own: dictionaries that have guards of their own: attributes of modules and optimizers.

    Attributes:
        given: objects among its arguments in whose place others may be.
        of_call: lists, dictionaries and objects among its arguments, of which each call has its
            own, by id, each with where it is.
        stands_for: the tensors that have stand-ins, by the ids of these.
        stand_ins: of tensors of modules, by the ids of these.
        storages: of the stand-ins.
        doubled: containers, by id, that have both for keys.
        exchanged: those that have stand-ins for keys.
        gone_through: of the former, those of which the step asks for more than one item.
        compared: where it asks whether a tensor is one that has a stand-in.
    """

    def __init__(self, own: Iterable[dict[str, Any]]) -> None:
        self._own = {id(table) for table in own}
        self._existing = existing_now()
        self._namespaces = {id(vars(module)) for module in list(sys.modules.values())}
        self._paths: dict[int, tuple[Any, str]] = {}
        self._owners: dict[int, Callable[[], Any]] = {}
        self._pinned: dict[int, Any] = {}
        self.given = GivenObjects()
        self.of_call: Mapping[int, tuple[Any, Path]] = {}
        self.stands_for: Mapping[int, torch.Tensor] = {}
        self.stand_ins: Mapping[int, torch.Tensor] = WeakValueDictionary()
        self._marked: set[tuple[int, str]] = set()
        self.storages: Set[Any] = frozenset()
        self.doubled: set[int] = set()
        self.exchanged: set[int] = set()
        self.gone_through: set[int] = set()
        self.compared: SourceLine | None = None

    def marking(self, value: Any, name: Any) -> Any:
        """A tensor of which the step sets an attribute: what stands for it, if anything does, as
        the step may find it there as well."""
        if not isinstance(value, torch.Tensor) or hasattr(type(value), name):
            return value
        stand_in = self.stand_ins.get(id(value), value)
        self._marked.add((id(stand_in), name))
        return stand_in

    def marked(self, value: Any, name: Any) -> Any:
        """A tensor of which the step reads an attribute: what stands for it, if the step has set
        that attribute.

        Raises:
            CaptureError: it reads all of them as a dictionary, and has set one.
        """
        if not self._marked or not isinstance(value, torch.Tensor):
            return value
        stand_in = self.stand_ins.get(id(value), value)
        if name == "__dict__" and any(marked == id(stand_in) for marked, _ in self._marked):
            raise CaptureError(
                "it reads the dictionary of attributes of a tensor, and has set one of them",
                location=current_location(),
                hint="ask for an attribute by its name: getattr(parameter, name, None)",
            )
        return stand_in if (id(stand_in), name) in self._marked else value

    def is_outside(self, value: Any) -> bool:
        """Whether an object existed before the step."""
        built_in = isinstance(value, type) and not gc.is_tracked(value)
        return built_in or id(value) in self._paths or value in self._existing

    def is_made_here(self, value: Any) -> bool:
        """Whether the step has made an object, also one that it has put outside and found there."""
        return gc.is_tracked(value) and value not in self._existing

    def viewed(self, value: Any) -> Any:
        """`places.viewed`; the step gets to that container by the view or the method."""
        shown = viewed(value)
        if shown is not value and self.is_outside(value):
            self.reached(shown, self.path(value, type(value).__name__))
        return shown

    def is_own(self, table: Any) -> bool:
        return id(table) in self._own

    def path(self, value: Any, otherwise: str) -> str:
        """How the program got to an object."""
        known = self._paths.get(id(value))
        return otherwise if known is None else known[1]

    def path_to(self, value: Any) -> str | None:
        """How the step got to an object by places that are guarded; None where it did not."""
        known = self._paths.get(id(value))
        return None if known is None or known[0] is not value else known[1]

    def paths(self) -> Iterator[tuple[Any, str]]:
        """All objects that the step got to, each with how."""
        yield from list(self._paths.values())

    def reached(self, value: Any, path: str) -> None:
        """The step got an object that was there before it."""
        if not is_value(value) and id(value) not in self._paths:
            self._paths[id(value)] = (value, path)

    def owned(self, holder: Any, owner: Any) -> None:
        """`holder` does not outlive its use in `owner`: attributes of an object, say."""
        if holder is owner:  # a dictionary that is its own `__dict__`
            return
        if id(holder) not in self._owners:
            try:
                self._owners[id(holder)] = weakref.ref(owner)
            except TypeError:  # of some kinds there are no weak references
                self._owners[id(holder)] = lambda: owner

    def owner(self, holder: Any) -> Any:
        """What `holder` is a part of; None if of nothing."""
        reference = self._owners.get(id(holder))
        return None if reference is None else reference()

    def pin(self, value: Any) -> None:
        """The step uses an object as such, by code that is not observed, or by its identity."""
        if is_value(value) or _compat.is_fake(value):
            return  # what stands for a value is not outside
        if self.is_outside(value):
            self._pinned[id(value)] = value

    def need(self, value: Any) -> None:
        """Each call needs this very object, as the step is captured."""
        if value is not None:
            self._pinned[id(value)] = value

    def pins_own(self, value: Any) -> None:
        """The step gets an object by a table that has guards of its own: each call has to find it
        there, whatever other places lead to it."""
        if not isinstance(value, (torch.Tensor, torch.nn.Module)) and not is_container(value):
            self.pin(value)

    def is_pinned(self, value: Any) -> bool:
        """Whether each call needs this very object."""
        return id(value) in self._pinned

    def _goes_through(self, container: Any) -> None:
        if id(container) in self.doubled:
            self.gone_through.add(id(container))

    def looks_up(self, container: Any, key: Any, line: SourceLine) -> None:
        """The step looks for a key: not for the tensor where only its stand-in is one."""
        if id(container) in self.exchanged and any(t is key for t in self.stands_for.values()):
            self.compared = self.compared or line

    def compares(self, a: Any, b: Any, line: SourceLine) -> None:
        """The step asks whether two objects are one, which a tensor and its stand-in are not."""
        if self._original(a) is self._original(b):
            self.compared = self.compared or line

    def is_namespace(self, table: Any) -> bool:
        """Whether a dictionary is that of a module of Python."""
        return id(table) in self._namespaces

    def _outside(self, place: OutsidePlace) -> OutsidePlace:
        """A place as it is when the step is not traced: the keys are no stand-ins."""
        key = self._original(place.key)
        return place if key is place.key else OutsidePlace(place.kind, place.holder, key)

    def _original(self, value: Any) -> Any:
        """The tensor that a stand-in stands for; other values themselves."""
        return self.stands_for.get(id(value), value) if _compat.is_fake(value) else value
