"""Objects that existed before a step, with the paths by which a trace reached them."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Set
from typing import Any, NamedTuple
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
    """Objects among the arguments of a call, by position.

    Attributes:
        opened: the positions of those that are taken apart.
    """

    opened: Collection[int] = ()


class StandInContainer(NamedTuple):
    """A list or tuple of stand-ins that the trace has put in place of one of tensors.

    Attributes:
        itself: the list or tuple.
        place: the place in which it, or what it is a part of, stands.
        path: its position in what stands there.
    """

    itself: Any
    place: OutsidePlace
    path: tuple[Any, ...]


class KnownObjects:
    """The objects outside a step, and the identity requirements of the step on them.

    Args:
        own: dictionaries that have guards of their own: attributes of modules and optimizers.

    Attributes:
        given: objects among its arguments in whose place others may be.
        of_call: lists, dictionaries and objects among its arguments, of which each call has its
            own, by id, each with where it is.
        stands_for: the tensors that have stand-ins, by the ids of these.
        stand_ins: of tensors of modules, by the ids of these.
        stand_in_containers: lists and tuples of stand-ins, by id.
        storages: of the stand-ins.
        compared: where it asks whether a tensor is one that has a stand-in.
        owners: by the id of what is found only as a part of an object, what gives that object.
    """

    def __init__(self, own: Iterable[dict[str, Any]]) -> None:
        self._own = {id(table) for table in own}
        self._existing = existing_now()
        self._namespaces = {id(vars(module)) for module in list(sys.modules.values())}
        self._paths: dict[int, tuple[Any, str]] = {}
        self.owners: dict[int, Callable[[], Any]] = {}
        self._pinned: dict[int, Any] = {}
        self.given = GivenObjects()
        self.of_call: Mapping[int, tuple[Any, Path]] = {}
        self.stands_for: Mapping[int, torch.Tensor] = {}
        self.stand_ins: Mapping[int, torch.Tensor] = WeakValueDictionary()
        self.stand_in_containers: dict[int, StandInContainer] = {}
        self._marked: set[tuple[int, str]] = set()
        self.storages: Set[Any] = frozenset()
        self.compared: SourceLine | None = None

    def marking(self, value: Any, name: Any) -> Any:
        """The stand-in of a tensor on which the step sets an attribute, if it has one, else the
        tensor."""
        if not isinstance(value, torch.Tensor) or hasattr(type(value), name):
            return value
        stand_in = self.stand_ins.get(id(value), value)
        self._marked.add((id(stand_in), name))
        return stand_in

    def marked(self, value: Any, name: Any) -> Any:
        """The stand-in of a tensor of which the step reads an attribute, if the step has set that
        attribute, else the tensor.

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
        """True if an object existed before the step, other than what the trace has put in place of
        one."""
        if id(value) in self.stand_in_containers:
            return False
        built_in = isinstance(value, type) and not gc.is_tracked(value)
        return built_in or id(value) in self._paths or value in self._existing

    def is_made_here(self, value: Any) -> bool:
        """True if the step has created an object, even if it found it outside later."""
        return gc.is_tracked(value) and value not in self._existing

    def viewed(self, value: Any) -> Any:
        """The container behind a view or bound method, recorded as reached."""
        shown = viewed(value)
        if shown is not value and self.is_outside(value):
            self.reached(shown, self.path(value, type(value).__name__))
        return shown

    def is_own(self, table: Any) -> bool:
        return id(table) in self._own

    def path(self, value: Any, otherwise: str) -> str:
        """The path by which an object was reached, for messages."""
        known = self._paths.get(id(value))
        return otherwise if known is None else known[1]

    def path_to(self, value: Any) -> str | None:
        """The path of guarded places to an object, or None."""
        known = self._paths.get(id(value))
        return None if known is None or known[0] is not value else known[1]

    def paths(self) -> Iterator[tuple[Any, str]]:
        """Yields all reached objects with their paths."""
        yield from list(self._paths.values())

    def reached(self, value: Any, path: str) -> None:
        """Records that the step reached an object that existed before it."""
        if not is_value(value) and id(value) not in self._paths:
            self._paths[id(value)] = (value, path)

    def owned(self, holder: Any, owner: Any) -> None:
        """Records that `holder` (such as an object's `__dict__`) is found only through `owner`."""
        if holder is owner:  # a dictionary that is its own `__dict__`
            return
        if id(holder) not in self.owners:
            try:
                self.owners[id(holder)] = weakref.ref(owner)
            except TypeError:  # of some kinds there are no weak references
                self.owners[id(holder)] = lambda: owner

    def owner(self, holder: Any) -> Any:
        """The object that `holder` is a part of, or None."""
        reference = self.owners.get(id(holder))
        return None if reference is None else reference()

    def pin(self, value: Any) -> None:
        """Records that the step uses an object by identity, or in code that is not observed."""
        if is_value(value) or _compat.is_fake(value):
            return  # what stands for a value is not outside
        if self.is_outside(value):
            self._pinned[id(value)] = value

    def need(self, value: Any) -> None:
        """Requires this very object in each call."""
        if value is not None:
            self._pinned[id(value)] = value

    def pins_own(self, value: Any) -> None:
        """Requires an object found in an attribute table with its own guard to be there in each
        call, whatever other paths lead to it."""
        if not isinstance(value, (torch.Tensor, torch.nn.Module)) and not is_container(value):
            self.pin(value)

    def is_pinned(self, value: Any) -> bool:
        """True if each call needs this very object."""
        return id(value) in self._pinned

    def compares(self, a: Any, b: Any, line: SourceLine) -> None:
        """Records an identity comparison of a tensor with its own stand-in."""
        if self._original(a) is self._original(b):
            self.compared = self.compared or line

    def is_namespace(self, table: Any) -> bool:
        """True if a dictionary is the namespace of a Python module."""
        return id(table) in self._namespaces

    def _outside(self, place: OutsidePlace) -> OutsidePlace:
        """Returns a place with a real tensor in place of a stand-in as its key."""
        key = self._original(place.key)
        return place if key is place.key else OutsidePlace(place.kind, place.holder, key)

    def _original(self, value: Any) -> Any:
        """The real tensor of a stand-in; any other value unchanged."""
        return self.stands_for.get(id(value), value) if _compat.is_fake(value) else value
