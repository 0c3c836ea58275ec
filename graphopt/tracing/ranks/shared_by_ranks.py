"""Marking of gradients and buffers in one trace, for ranks that share them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch

from graphopt.tracing.effects.decisions import Decider
from graphopt.tracing.functional.tagging import Tagger
from graphopt.tracing.inputs.entries import Inputs
from graphopt.tracing.optimizers.first_gradients import FirstGradients
from graphopt.tracing.ranks.reduction import (
    AgreedOrder,
    GradientMarker,
    MarkedCommunication,
    Use,
    mark_buffers,
    roots_of_parameters,
)
from graphopt.tracing.rollback.substitute import StandIns


class SharedByRanks:
    """Marks them while the step is traced.

    Args:
        communication: what is marked; None where the ranks share nothing in this call.
        roots: the modules of the step that are in no other one.
        decider: asks whether other ranks use a parameter.
        gradients: takes note of the first use of each gradient.
    """

    def __init__(
        self,
        communication: MarkedCommunication | None,
        roots: Sequence[torch.nn.Module],
        inputs: Inputs,
        tagger: Tagger,
        decider: Callable[[], Decider],
        gradients: FirstGradients,
    ) -> None:
        self._communication, self._roots, self._inputs = communication, roots, inputs
        self._root_of = roots_of_parameters(roots, inputs)
        self._tagger, self._decider, self._gradients = tagger, decider, gradients
        self._marker: GradientMarker | None = None

    def begin(self, traced: StandIns) -> None:
        """Starts a trace with these stand-ins."""
        communication = self._communication
        if communication is None:
            return
        self._marker = GradientMarker(
            parameters={e.fqn: traced.by_id[id(e.tensor)] for e in self._inputs.parameters},
            roots=self._root_of,
            group=communication.group,
            tagger=self._tagger,
            agreed=communication.agreed,
            ask=partial(self._used_anywhere, communication.agreed),
            accumulated=communication.accumulated,
            look=self._gradients.look,
        )

    def running(self) -> Iterator[AbstractContextManager[Any]]:
        """Yields the contexts that must be active while the step runs."""
        if self._marker is not None and self._communication is not None:
            yield self._marker.watching()
            yield self._buffers_marked(self._communication)

    def mark(self) -> None:
        """Marks all gradients that are complete."""
        if self._marker is not None:
            self._marker.mark_ready()

    def mark_used(self, values: Any) -> None:
        """Marks all complete gradients if a value shares memory with one."""
        if self._marker is not None and self._marker.is_used_by(values):
            self._marker.mark_ready()

    def begin_backward(self) -> None:
        """A backward begins that no other one runs, as that of a reentrant checkpoint is run."""
        if self._marker is not None:
            self._marker.begin_backward()

    def refuse_reading(self, tensor: torch.Tensor) -> None:
        """The step looks at the gradient of a tensor while a backward runs."""
        if self._marker is not None:
            self._marker.refuse_reading(tensor)

    def finish(self) -> dict[str, tuple[int, ...]]:
        """Ends the step. Returns the parameters with marked gradients, in the order they were
        ready, and the rounds in which each was marked."""
        marker, self._marker = self._marker, None  # which holds gradients
        return {} if marker is None else {n: tuple(rounds) for n, rounds in marker.used.items()}

    def _used_anywhere(
        self, agreed: AgreedOrder | None, uses: Sequence[Use], sent: Sequence[torch.Tensor]
    ) -> Sequence[int]:
        """For each parameter that this rank does not use, 1 if another rank does, else 0."""
        assert agreed is not None
        anywhere = agreed.anywhere or ()
        likely = tuple(int(use in anywhere) for use in uses)
        return self._decider().used([agreed.position(use) for use in uses], sent, likely)

    @contextmanager
    def _buffers_marked(self, communication: MarkedCommunication) -> Iterator[None]:
        """While active, a root module's forward begins by marking its buffers."""
        if not communication.parallel.broadcast_buffers:
            yield
            return

        def mark(module: torch.nn.Module, args: Any) -> None:
            names = (name for name, _ in module.named_buffers())
            with torch.no_grad(), self._tagger.sending(*names):
                mark_buffers(module, communication.buffers)

        handles = [root.register_forward_pre_hook(mark, prepend=True) for root in self._roots]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
