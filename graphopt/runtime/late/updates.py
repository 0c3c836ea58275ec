"""The late updates of a captured step: if they may stay in flight, and their execution."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from operator import is_

import torch

from graphopt import _compat
from graphopt.graph_utils import without_autocast, written
from graphopt.guards.guards import Guards
from graphopt.iter_graph import IterGraphModule
from graphopt.runtime.late.tensors import LateTensors, warn_of_held
from graphopt.tracing.captured_step import CapturedStep
from graphopt.tracing.inputs.entries import Storage


class LateUpdates(LateTensors):
    """The late work of one graph, and the tensors that it updates.

    Args:
        finish: as of `LateTensors`.
    """

    def __init__(
        self,
        captured: CapturedStep,
        module: IterGraphModule,
        guards: Guards,
        finish: Callable[[], bool],
    ) -> None:
        super().__init__(finish)
        self._inputs, self._guards, self._module = captured.live, guards, module
        self._updated = _updated_late(module)
        self._warned_of_held, self._collects = False, True
        self._stream: torch.cuda.Stream | None = None

    def may_be_left(self, flush: Callable[[], None]) -> bool:
        """True if all uses of the tensors that a call would update late can be seen. Uses are
        intercepted from now on, until the update.

        Args:
            flush: flushes the step, for what is in flight for other tensors.
        """
        if not self._updated:
            return True
        if self._inputs.answers:  # another graph may have to run in this call
            return False
        names, tensors = zip(*self._named(), strict=True)
        if self._module.in_flight:
            if all(map(is_, tensors, self.tensors)):
                return True
            flush()  # other tensors have taken their place
        held = self.arm(tensors)
        if held is not None and self._collects:
            gc.collect()  # capturing has left garbage, which holds what it has looked at
            held = self.arm(tensors)
        self._collects = False
        if held is None:
            return True
        stays = self._module.flush_communicates
        if not self._warned_of_held:
            consequence = (
                "it is late until the next call, or flush() on every rank"
                if stays
                else "it is updated in its own step, and no update overlaps with the next one"
            )
            warn_of_held(names[held], consequence)
        self._warned_of_held = True
        if stays:
            self.arm(tensors, anyway=True)
        return stays

    def watch(self) -> None:
        """Records, after a call, that late work is in flight."""
        self._stream = _stream_of(self.tensors)
        if not self._module.in_flight:
            self.disarm()
        elif not self.armed:  # an update failed: whoever uses its tensors is told
            self.arm([tensor for _, tensor in self._named()], anyway=True)

    def run(self) -> None:
        """Runs the late work in flight."""
        try:
            if self._module.in_flight:
                with (
                    _compat.without_modes(),  # leaving inference mode turns grad mode on
                    torch.no_grad(),
                    without_autocast(),
                    _on(self._stream),
                ):
                    self._module.flush()
        finally:
            if not self._module.in_flight:
                self.disarm()

    def drop(self) -> None:
        """Drops the late work in flight."""
        self._module.drop_flight()
        self.disarm()

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
