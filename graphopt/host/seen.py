"""State outside the step that a host callback may read or write.

    self.n += 1
    graphopt.callback(lambda: print(self.n))        an error, naming self.n
    graphopt.callback(print, self.n)                what eager code prints

A captured step puts what it leaves in attributes and dictionaries there when a call is over. While
it calls a function that may look for what it has set by then, something stands there whose every
use is an error. And what the step uses, a function must not change.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from graphopt.errors import GraphOptError
from graphopt.host.context import while_set
from graphopt.ir.same_values import same_value

if TYPE_CHECKING:
    from graphopt.tracing.effects.callback_view import HostView


_view: ContextVar[HostView | None] = ContextVar("view", default=None)


def current_view() -> HostView | None:
    """The `HostView` of the running trace."""
    return _view.get()


def viewed_by(view: HostView) -> AbstractContextManager[None]:
    """While active, `view` is told of recorded callbacks."""
    return while_set(_view, view)


class ViewedPlace(Protocol):
    """A protocol for an attribute, item or variable outside the step."""

    @property
    def identity(self) -> Hashable: ...
    def now(self) -> Any: ...
    def write(self, value: Any) -> None: ...


@dataclass(frozen=True)
class UsedPlace:
    """A place that the step reads after a callback, or writes: its path and the step's use of it,
    for messages."""

    place: ViewedPlace
    path: str
    used: str


@dataclass(frozen=True)
class EarlierWrite:
    """A place outside the step that the step has written before a callback.

    Attributes:
        shown: what is there for the function.
    """

    place: ViewedPlace
    path: str
    shown: Any


class StaleValue:
    """A stand-in for a computed value that is not yet stored; any use of it raises an error."""

    def __init__(self, path: str) -> None:
        object.__setattr__(self, "_path", path)

    def __getattribute__(self, name: str) -> Any:
        raise _stale(self)


def _stale(value: StaleValue) -> GraphOptError:
    path = object.__getattribute__(value, "_path")
    return GraphOptError(
        f"a function that the step calls on the host (graphopt.callback) uses {path}, which the"
        " step has set before, and which is there when the call is over\n"
        "  hint:  give it the value as an argument: graphopt.callback(function, value)"
    )


def _used(value: StaleValue, *others: Any) -> Any:
    raise _stale(value)


_USES = (
    "bool str repr format hash eq ne lt le gt ge len iter next getitem setitem delitem contains"
    " call add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod rmod pow rpow matmul"
    " rmatmul and rand or ror xor rxor lshift rlshift rshift rrshift neg pos abs invert divmod"
    " rdivmod round int float complex index enter exit copy deepcopy reduce_ex array"
)
for _name in _USES.split():
    setattr(StaleValue, f"__{_name}__", _used)


@contextmanager
def set_before(places: Sequence[EarlierWrite]) -> Iterator[None]:
    """While active, places hold what the step has written to them before a callback.

    Raises:
        GraphOptError: it has put something else there.
    """
    before = [each.place.now() for each in places]
    for each in places:
        each.place.write(each.shown)
    try:
        yield
        for each in places:
            if each.place.now() is not each.shown:
                raise changes(each.path, "sets")
    finally:
        for each, value in zip(places, before, strict=True):
            each.place.write(value)


def changes(path: str, used: str) -> GraphOptError:
    """Builds the error for a callback that changes a place which the step uses."""
    return GraphOptError(
        f"a function that the step calls on the host (graphopt.callback) changes {path}, which the"
        f" step {used}. The captured step has what was there before\n"
        "  hint:  let the step itself compute it; or do this behind the call"
    )


def refuse_changed(places: Sequence[UsedPlace], before: Sequence[Any]) -> None:
    """Raises if a callback has changed a place that the step uses.

    Args:
        before: what was in the places before the function was called.

    Raises:
        GraphOptError: naming the place, and what the step does with it.
    """
    for each, value in zip(places, before, strict=True):
        if not _is_still(each.place.now(), value):
            raise changes(each.path, each.used)


_BY_VALUE = (bool, int, float, complex, str, bytes, frozenset)


def _is_still(now: Any, before: Any) -> bool:
    return same_value(now, before, lambda value: isinstance(value, _BY_VALUE))
