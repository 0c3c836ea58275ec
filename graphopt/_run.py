"""Run a captured graph as a step: live tensors in, results where they belong."""

from __future__ import annotations

import logging
import threading
import weakref
from typing import Any

import torch

from graphopt import _compat
from graphopt._joint import Agreed
from graphopt.errors import GraphOptError
from graphopt.graph_utils import without_autocast
from graphopt.iter_graph import IterGraphModule
from graphopt.tracing.call import Call
from graphopt.tracing.capture import CapturedStep
from graphopt.tracing.guards import Guards
from graphopt.tracing.inputs import Storage, as_tensor
from graphopt.tracing.signature import Computed, Constant, Recipe, View
from graphopt.watching import Watch

logger = logging.getLogger("graphopt")


class BoundStep:
    """A captured step with the guards under which it holds, ready to be called.

    Args:
        captured: what was captured.
        module: its graph after all passes, finalized.
        call: the call it was captured from.
        guards: when it may be used.
        agreed: what the ranks agreed on for it; None where it does not communicate.
        number: counts the captures of a step.
    """

    def __init__(
        self,
        captured: CapturedStep,
        module: IterGraphModule,
        call: Call,
        guards: Guards,
        agreed: Agreed | None,
        number: int,
    ) -> None:
        self.captured = captured
        self.module = module
        self.guards = guards
        self.agreed = agreed
        self.number = number
        inputs = captured.live
        self._holders = inputs.placeholders
        dead = {id(inputs.module_tensors[i]) for i in captured.signature.dead_gradients}
        self._gradients = [(g.owner.tensor, id(g.owner) in dead) for g in inputs.gradients]
        self._numbers: dict[int, tuple[Any, torch.Tensor]] = {}
        self._lock = threading.RLock()
        self._running = False
        modules = [module for _, module in call.named_submodules()]
        reference = weakref.ref(self)
        self._watch = Watch(modules, call.optimizer_objects(), lambda: _finish_unasked(reference))

    def __call__(self, call: Call) -> Any:
        with self._lock:  # other threads that read state wait until the step is over
            if not self.module.in_flight:
                self._watch.settle_others()
            flat = self._values(call)
            self._running = True
            try:
                with torch.no_grad(), without_autocast():
                    # Not as a module: hooks of all modules are not meant for it.
                    user, _, carried = self.module.forward(*flat)
            finally:
                self._running = False
                self._watch_flight()
            return self._apply(call, flat, [*user, *carried])

    def _watch_flight(self) -> None:
        if not self.module.in_flight:
            self._watch.stop()
        elif not self._watch.start():
            logger.info("a table of parameters is of an unknown class, so nothing stays in flight")
            self.flush()

    def flush(self) -> None:
        """Do late work that is in flight.

        Raises:
            GraphOptError: a call failed in the middle of an update.
        """
        with self._lock:
            if self._running:  # a signal handler or hook reads state in the middle of a step
                return
            self._running = True
            try:
                if self.module.in_flight:
                    with torch.no_grad(), without_autocast(), _compat.without_modes():
                        self.module.flush()
            finally:
                self._running = False
                if not self.module.in_flight:
                    self._watch.stop()

    @property
    def needs_all_ranks(self) -> bool:
        """Whether late work is in flight that launches collectives."""
        return self.module.in_flight and self.module.flush_communicates

    def close(self) -> None:
        """Do late work that is in flight, or drop it where that is impossible."""
        if self.module.resumable and not self.needs_all_ranks:
            self.flush()
            return
        logger.error("late work of a training step is dropped: its last update is lost")
        self.drop()

    def drop(self) -> None:
        """Forget late work that is in flight."""
        self.module.drop_flight()
        self._watch.stop()

    def finish_unasked(self) -> bool:
        """Flush because somebody reads state, which must not wait for other ranks.

        Returns:
            Whether nothing is in flight any more; not so where the reader is within the step.
        """
        if self.needs_all_ranks and not self._running:
            raise GraphOptError(
                "parameters or optimizer state are read while a collective of the last step is"
                " still to be launched, which needs all ranks\n"
                "  hint:  call flush() of the training step on every rank first"
            )
        self.flush()
        return not self.module.in_flight

    def _values(self, call: Call) -> list[Any]:
        inputs = self.captured.live
        optimizers = call.optimizer_objects()
        flat: list[Any] = [
            holder.base() if isinstance(holder, Storage) else holder.live()
            for holder in self._holders
        ]
        flat += self.guards.states
        for parameter, dead in self._gradients:
            flat.append(None if dead else parameter.grad)
            if dead:
                parameter.grad = None
        for index, number in enumerate(inputs.hyperparameters):
            value = number.read(optimizers[number.optimizer].param_groups)
            flat.append(self._as_tensor(index, value))
        flat.extend(call.leaves[position] for position in inputs.user)
        return flat

    def _as_tensor(self, index: int, value: Any) -> torch.Tensor:
        """A hyperparameter as a tensor: that of the last call, if nobody has written to it."""
        known, tensor = self._numbers.get(index, (None, None))
        if tensor is None or known is not value or _compat.may_be_written(tensor):
            tensor = as_tensor(value)
            self._numbers[index] = value, tensor
        return tensor

    def _apply(self, call: Call, flat: list[Any], results: list[Any]) -> Any:
        signature = self.captured.signature
        tensors = self.captured.live.module_tensors
        optimizers = call.optimizer_objects()
        for gradient in signature.gradients:
            value = self._value(gradient.recipe, flat, results)
            if gradient.owner is not None:
                tensors[gradient.owner].tensor.grad = value
            elif gradient.argument is not None:
                call.leaves[gradient.argument].grad = value
        for state in signature.states:
            entries = optimizers[state.optimizer].state[tensors[state.owner].tensor]
            entries[state.key] = self._value(state.recipe, flat, results)
        for attribute in signature.attributes:
            value = self._value(attribute.recipe, flat, results)
            attribute.attributes[attribute.name] = value
        for index in signature.stepped:
            _compat.mark_stepped(optimizers[index])
        outputs = [self._value(recipe, flat, results) for recipe in signature.outputs]
        return _compat.tree_unflatten(outputs, signature.output_spec)

    def _value(self, recipe: Recipe, flat: list[Any], results: list[Any]) -> Any:
        """What a recipe stands for, given this call's inputs and the graph's results."""
        if isinstance(recipe, Computed):
            return results[recipe.index]
        if isinstance(recipe, Constant):
            return recipe.value
        if isinstance(recipe, View):
            base = self._value(recipe.of, flat, results).detach()
            offset = base.storage_offset() + recipe.offset
            return torch.as_strided(base, recipe.size, recipe.stride, offset)
        if recipe.module_tensor is not None:
            return self.captured.live.module_tensors[recipe.module_tensor].live()
        assert recipe.placeholder is not None
        return flat[recipe.placeholder]


def _finish_unasked(reference: weakref.ref[BoundStep]) -> bool:
    step = reference()
    return step is None or step.finish_unasked()
