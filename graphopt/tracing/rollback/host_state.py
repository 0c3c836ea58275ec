"""Host state that a traced step changes: restored after the trace, and refused.

A trace runs the step's Python code. Everything that the step can reach is put back after it (see
`reachable`). What it has changed there, other than what each call puts there as a result of the
graph, would happen at capture only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from graphopt._compat.threads import other_threads_run
from graphopt.errors import CaptureError
from graphopt.ir.source import SourceLine
from graphopt.tracing.inputs.implicit import CarriedPlace, ImplicitInputs, MoreInputs, NamedModules
from graphopt.tracing.outside.record import OutsideRecord
from graphopt.tracing.outside.steps import refuse_changed_reads
from graphopt.tracing.rollback import contents
from graphopt.tracing.rollback.contents import NamespacePart, ObjectKind
from graphopt.tracing.rollback.generators import may_be_shared
from graphopt.tracing.rollback.nests import leaves_in
from graphopt.tracing.rollback.reachable import reachable
from graphopt.tracing.scalars.numbers import SYMBOLIC


@dataclass(frozen=True)
class ObjectChange:
    """An object whose content a trace has changed."""

    kind: ObjectKind
    changed: Any
    before: Any
    after: Any


@dataclass
class OutsideChanges:
    """The changes that one trace made outside the graph; false if there are none.

    Attributes:
        changes: the changes of objects that the step can reach.
        shared: other threads ran meanwhile.
    """

    changes: list[ObjectChange] = field(default_factory=list)
    shared: bool = False

    def __bool__(self) -> bool:
        return bool(self.changes)

    def first_change(
        self, record: OutsideRecord, modules: NamedModules
    ) -> tuple[str, SourceLine | None]:
        """A text on the first change, with its source line if known."""
        known = [record.unrepeated.written_at(change.changed) for change in self.changes]
        seen = next((each for each in known if each is not None), None)
        if seen is not None:
            return seen
        change = self.changes[0]
        if isinstance(change.changed, NamespacePart):
            return change.changed.differing(change.before, change.after), None
        for name, module in modules:
            for key, value in vars(module).items():
                if value is change.changed:
                    return f"{name or 'the model'}.{key}", None
        kind = type(change.changed)
        return record.path(change.changed, f"a {kind.__name__}"), None


class HostState:
    """A snapshot of everything that a step can reach on the host."""

    def __init__(self, step: Callable[..., Any], leaves: Sequence[Any]) -> None:
        found = reachable(step, leaves)
        self._held = [(kind, holder, kind.read(holder)) for kind, holder in found]
        self._shared = other_threads_run()

    def puts_back(self, value: Any) -> bool:
        """True if `restore` can restore an object of this kind."""
        return any(holder is value for _, holder, _ in self._held)

    def restore(self) -> OutsideChanges:
        """Restores everything that the trace changed, and returns the changes. Generators from
        which other threads may have drawn meanwhile are left as they are."""
        changes = [
            ObjectChange(kind, holder, before, now)
            for kind, holder, before in self._held
            if not kind.same(now := kind.read(holder), before)
        ]
        shared = self._shared or other_threads_run()
        for change in changes:
            if not (shared and may_be_shared(change.changed)):
                change.kind.write(change.changed, change.before)
        return OutsideChanges(changes, shared)


def check_effects(effects: OutsideChanges) -> None:
    """Refuses host side effects, which a graph would not repeat.

    Raises:
        CaptureError: it is the value of a tensor, a text with one, or a mode of torch.
    """
    for change in effects.changes:
        if change.kind is contents.MODES:
            raise CaptureError(
                "it leaves a mode of torch changed (grad mode, autocast, the default dtype or"
                " deterministic algorithms)",
                hint="set it outside the step, or for a part of the step by a context manager",
            )
        if any(isinstance(value, SYMBOLIC) for value in leaves_in(change.after, _is_nest)):
            raise CaptureError(
                "it keeps the value of a tensor outside its return value, which would happen at"
                " capture only",
                hint="return the value from the step and keep it outside",
            )


def refuse_left(record: OutsideRecord) -> None:
    """Refuses a step whose host state differs after the trace.

    Raises:
        CaptureError: it does; naming what, and the line.
        MoreInputs: it is a plain value, where the step has read another one: each call is to put it
            there.
    """
    places = [CarriedPlace(*each, counted=True) for each in record.unrepeated.left]
    if places:
        raise MoreInputs(ImplicitInputs(carried=places))
    refuse_changed_reads(record)


def drawn_from(effects: OutsideChanges) -> str | None:
    """The class of a random number generator that the step has drawn from or seeded, or perhaps
    another thread."""
    for change in effects.changes:
        if change.kind is contents.GENERATOR:
            name = f"{type(change.changed).__module__}.{type(change.changed).__qualname__}"
            perhaps = effects.shared and may_be_shared(change.changed)
            return f"{name}, which it holds, unless another thread did" if perhaps else name
    return None


def _is_nest(value: Any) -> bool:
    return isinstance(value, (list, tuple, frozenset))
