"""The guards of one captured graph: may it be used again, and if not, why not.

`make_fx` specializes without saying on what. These guards hold everything a step is specialized
on: the arguments, the modules, the optimizers' settings and state, numbers, and torch's modes.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator
from typing import Any

from graphopt import _compat
from graphopt.graph_utils import environment
from graphopt.guards.arguments import ArgumentGuards
from graphopt.guards.modules import ModuleGuards
from graphopt.guards.numbers import NumberGuards
from graphopt.guards.optimizer_state import StateGuards
from graphopt.guards.optimizers import OptimizerGuard
from graphopt.guards.outside import OutsideGuard
from graphopt.guards.snapshots.joined_snapshots import HasSnapshot, JoinedSnapshots
from graphopt.guards.snapshots.snapshot import body_of, is_body
from graphopt.guards.tensors import TensorGuards
from graphopt.guards.values import is_plain
from graphopt.tracing.call import Call
from graphopt.tracing.inputs.entries import Inputs, PlacedNumber
from graphopt.tracing.inputs.implicit import CarriedPlace
from graphopt.tracing.results.signature import Signature


class Guards:
    """All facts that one captured graph depends on.

    Args:
        mode: how the step communicates.
        outside: what the step reads besides its arguments.

    Attributes:
        besides: modules, optimizers and places that the step uses besides its arguments.
        inputs: those of the graph.
    """

    def __init__(
        self,
        call: Call,
        inputs: Inputs,
        mode: tuple[Any, ...],
        signature: Signature,
        outside: OutsideGuard | None = None,
    ) -> None:
        self._mode = mode
        self.besides, self.inputs = call.besides, inputs
        self._outside = outside
        self._environment, self._keeps_casts = environment(), signature.keeps_casts
        assigned, placed = _assigned(signature), _placed(inputs)
        moving = {
            (id(table), key)
            for entry in inputs.module_tensors
            if entry.rebindable
            for table, key in entry.slots
        }
        modules = [
            (name, m, assigned.get(id(vars(m)), ()), placed.get(id(vars(m)), ()), assigned, moving)
            for name, m in call.named_submodules()
        ]
        self._modules = ModuleGuards(modules)
        # A cached graph must not keep a model alive that the user has dropped.
        self._roots = [
            (weakref.ref(call.leaves[position]), body_of(call.leaves[position]))
            for position in call.modules
        ]
        self._optimizers = [
            OptimizerGuard(
                call.names[position],
                call.leaves[position],
                call.besides.counts,
                _looked_at_elsewhere(vars(call.leaves[position]), placed, assigned),
            )
            for position in call.optimizers
        ]
        self._tensors = TensorGuards(call, inputs, frozenset(signature.dropped_gradients))
        followed = () if outside is None else outside.given
        found = () if outside is None else outside.tensors(call.leaves)
        self._arguments = ArgumentGuards(call, inputs, self._tensors, followed, found)
        self._numbers = NumberGuards(call, inputs)
        self._states = StateGuards(call, inputs, self._tensors)
        together: list[HasSnapshot] = [self._modules, *self._optimizers, self._states]
        if outside is not None:
            together += [outside, outside.modules]
        self._together = JoinedSnapshots(together)

    @property
    def states(self) -> list[Any]:
        """The optimizer state of the last call that fits, in the order of the graph's inputs."""
        return self._states.values

    def alive(self) -> bool:
        """True if the captured modules still exist."""
        return all(root() is not None for root, _ in self._roots)

    def may_fit(self) -> bool:
        """True if the objects that this rank's step needs still exist."""
        return self.alive() and (self._outside is None or self._outside.alive)

    def fit(self, call: Call, mode: tuple[Any, ...]) -> bool:
        """True if the graph may be used for a call, because all facts hold."""
        known = self._together.unchanged()
        fits = (
            self.structure_mismatch(call, mode, known) is None
            and self.shape_mismatch(call) is None
            and self.local_mismatch(call, known) is None
        )
        if fits and not known:
            self._together.note()
        return fits

    def structure_mismatch(
        self, call: Call, mode: tuple[Any, ...], known: Collection[object] = ()
    ) -> str | None:
        """Describes the first changed fact that all ranks see alike, or returns None.

        Args:
            mode: how the step communicates.
            known: guards that hold.
        """
        return next(self.structure_mismatches(call, mode, known), None)

    def structure_mismatches(
        self, call: Call, mode: tuple[Any, ...], known: Collection[object] = ()
    ) -> Iterator[str]:
        """Yields descriptions of all such changes, as far as they can be separated."""
        extended = call.using(self.besides)
        if extended is None:
            yield "a module or an optimizer that it used besides its arguments is gone"
            return
        call = extended
        if mode != self._mode:
            yield f"{mode} in place of {self._mode}"
        if not self._arguments.same_structure(call):
            yield "the structure of the arguments changed"
            return
        if environment() != self._environment:
            yield "grad mode, autocast or another mode of torch changed"
        if self._keeps_casts and _compat.autocast_regions():
            yield "it enters autocast, and is called in an autocast region"
        for (root, body), position in zip(self._roots, call.modules, strict=True):
            if call.leaves[position] is not root() or not is_body(call.leaves[position], body):
                yield f"{call.names[position]} is another module"
                return
        if self._modules not in known:
            yield from self._modules.mismatches()
        for settings, position in zip(self._optimizers, call.optimizers, strict=True):
            reason = settings.mismatch(call.leaves[position], settings in known)
            if reason is not None:
                yield reason

    def local_mismatch(self, call: Call, known: Collection[object] = ()) -> str | None:
        """Describes the first changed fact that may differ on this rank alone, or returns None.

        Args:
            known: guards that hold.
        """
        return next(filter(None, self._local_mismatches(call, known)), None)

    def _local_mismatches(self, call: Call, known: Collection[object]) -> Iterator[str | None]:
        call = call.using(self.besides) or call
        yield self._arguments.constant_mismatch(call)
        outside = self._outside
        if outside is not None and not (outside in known and outside.modules in known):
            yield next(outside.mismatches(call.leaves), None)
        yield self._states.mismatch(call, self._states in known)
        yield self._tensors.gradient_mismatch()
        yield self._numbers.mismatch(call)
        yield self._tensors.mismatch(call)
        yield self._arguments.identity_mismatch(call)

    def shape_mismatch(self, call: Call) -> str | None:
        """Describes the first tensor argument of another kind than captured, or returns None."""
        return self._arguments.shape_mismatch(call.using(self.besides) or call)

    def counted_for(self, call: Call) -> list[CarriedPlace]:
        """Returns the places where the step increments a counter, if the call has the same
        objects."""
        same = self._arguments.same_objects(call.using(self.besides) or call)
        return [each for each in self.besides.carried if each.counted and same]

    def numbers_of(self, call: Call) -> list[Any]:
        """Returns the hyperparameters of a call that fits, in order."""
        return self._numbers.of(call)


def _looked_at_elsewhere(
    attributes: dict[str, Any], placed: dict[int, set[str]], assigned: dict[int, set[str]]
) -> set[str]:
    """Returns the optimizer attributes that other guards cover: numbers that are inputs, and
    objects that the step replaces."""
    left = assigned.get(id(attributes), set())
    objects = {key for key in left if not is_plain(attributes.get(key))}
    return objects | placed.get(id(attributes), set())


def _assigned(signature: Signature) -> dict[int, set[str]]:
    """Maps the id of each `__dict__` to the attributes that the step sets in it, and to containers
    that it fills."""
    assigned: dict[int, set[str]] = {}
    for result in signature.attributes:
        assigned.setdefault(id(result.attributes), set()).add(result.name)
    for left in signature.placed:
        assigned.setdefault(id(left.place.holder), set()).add(left.place.key)
    return assigned


def _placed(inputs: Inputs) -> dict[int, set[str]]:
    """Maps the id of each `__dict__` to the attributes whose numbers and arrays are inputs of the
    graph."""
    placed: dict[int, set[str]] = {}
    numbers = (each for each in inputs.hyperparameters if isinstance(each, PlacedNumber))
    for place in (each.place for each in numbers if each.place.is_item):
        placed.setdefault(id(place.holder), set()).add(place.key)
    return placed
