"""The late updates of a captured step: if they may stay in flight, and their execution."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from operator import is_
from typing import Any

import torch

from graphopt import _compat
from graphopt.graph_utils import without_autocast, written
from graphopt.guards.guards import Guards
from graphopt.iter_graph import IterGraphModule
from graphopt.runtime.late.tensors import LateTensors, settle, warn_of_held
from graphopt.tracing.captured_step import CapturedStep
from graphopt.tracing.inputs.entries import Storage


class LateUpdates:
    """The late work of one graph, and the tensors that it updates.

    Args:
        finish: does what is in flight, because somebody uses one of the tensors. Returns whether
            nothing is left to do.
    """

    def __init__(
        self,
        captured: CapturedStep,
        module: IterGraphModule,
        guards: Guards,
        finish: Callable[[], bool],
    ) -> None:
        self._inputs, self._guards = captured.live, guards
        self._module = module
        self._updated = _updated_late(module)
        self._tensors = LateTensors(finish)
        self._warned, self._collects = False, True
        self._stream: torch.cuda.Stream | None = None

    def may_be_left(self, flush: Callable[[], None], known: bool) -> bool:
        """True if all uses of the tensors that a call would update late can be seen. Uses are
        intercepted from now on, until the update.

        Args:
            flush: flushes the step, for what is in flight for other tensors.
            known: true if it is known that no other graph may have to run in this call.
        """
        if not self._updated:
            return True
        if not known:
            return False
        names, tensors = zip(*self._named(), strict=True)
        if self._module.in_flight:
            if all(map(is_, tensors, self._tensors.tensors)):
                return True
            flush()  # other tensors have taken their place
        held = self._tensors.arm(tensors)
        if held is not None and self._collects:
            gc.collect()  # capturing has left garbage, which holds what it has looked at
            held = self._tensors.arm(tensors)
        self._collects = False
        if held is None:
            return True
        if not self._warned:
            warn_of_held(names[held], self._consequence())
        self._warned = True
        if self._module.flush_communicates:
            self._tensors.arm(tensors, anyway=True)
        return self._module.flush_communicates

    def own(self, values: list[Any]) -> list[Any]:
        """The values with late tensors replaced by aliases, which the step itself may use."""
        return self._tensors.own(values)

    def settle_others(self, values: list[Any]) -> None:
        """Completes updates of other steps in flight for these values."""
        settle(values, besides=self._tensors)

    def watch(self) -> None:
        """Records, after a call, that late work is in flight."""
        self._stream = _stream_of(self._tensors.tensors)
        if not self._module.in_flight:
            self._tensors.disarm()
        elif not self._tensors.armed:  # an update failed: whoever uses its tensors is told
            self._tensors.arm([tensor for _, tensor in self._named()], anyway=True)

    def run(self) -> None:
        """Runs the late work in flight."""
        if self._module.in_flight:
            with (
                _compat.without_modes(),  # leaving inference mode turns grad mode on
                torch.no_grad(),
                without_autocast(),
                _on(self._stream),
            ):
                self._module.flush()

    def release(self) -> None:
        """Restores the tensors' classes if nothing is in flight."""
        if not self._module.in_flight:
            self._tensors.disarm()

    def drop(self) -> None:
        """Drops the late work in flight."""
        self._module.drop_flight()
        self._tensors.disarm()

    def _named(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors that are updated late, with their names."""
        holders, states = self._inputs.placeholders, self._guards.states
        for index in self._updated:
            if index >= len(holders):
                state = index - len(holders)
                yield self._inputs.states[state].fqn, states[state]
                continue
            holder = holders[index]
            members = holder.members if isinstance(holder, Storage) else [holder]
            yield from ((member.fqn, member.live()) for member in members)

    def _consequence(self) -> str:
        if self._module.flush_communicates:
            return "it is late until the next call, or flush() on every rank"
        return "it is updated in its own step, and no update overlaps with the next one"


def _updated_late(module: IterGraphModule) -> list[int]:
    """The positions of placeholders that late nodes update."""
    late = {state for node in module.graph.late for state in written(node)}
    placeholders = module.graph.find_nodes(op="placeholder")
    return [index for index, node in enumerate(placeholders) if node in late]


def _stream_of(tensors: Sequence[torch.Tensor]) -> torch.cuda.Stream | None:
    """The CUDA stream on which a step has just run; None on other devices."""
    device = tensors[0].device if tensors else None
    return (
        torch.cuda.current_stream(device) if device is not None and device.type == "cuda" else None
    )


@contextmanager
def _on(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """While active, work goes to the step's stream, whose kernels may still read the tensors;
    the caller's stream waits for it."""
    if stream is None:
        yield
        return
    asking = torch.cuda.current_stream(stream.device)
    with torch.cuda.stream(stream):
        yield
    asking.wait_stream(stream)
