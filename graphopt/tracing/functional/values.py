"""Values of traced nodes in the capturing call, computed on copies of the live tensors.

What nodes draw from the default generator of the CPU, they draw from a copy of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx

from graphopt import _compat
from graphopt.errors import CaptureError
from graphopt.graph_utils import is_collective, is_operator, without_autocast
from graphopt.host import HostCall
from graphopt.ir.generators import generators_used
from graphopt.ir.operators import draws, is_marker
from graphopt.ir.user_frames import current_location
from graphopt.parallel.sharding import is_dtensor
from graphopt.tracing.ranks.uniformity import depends_on, reached_by


class TracedValues:
    """The values of traced nodes in the capturing call, computed on demand without changing live
    tensors."""

    def __init__(self, tracer: Any, live: Sequence[torch.Tensor]) -> None:
        self._tracer, self._inputs = tracer, live
        self._values: dict[fx.Node, Any] = {}
        self._generators: dict[torch.Generator, torch.Tensor] = {}
        self._copied = _compat.CopiedGenerator()
        self._done = self._taken = 0

    def of(self, wanted: Any) -> Any:
        """Returns the value of a node."""
        if not isinstance(wanted, fx.Node):
            return wanted
        self._compute()
        return self._values[wanted]

    def _compute(self) -> None:
        aside = (self._generators_aside(), self._copied)
        with _compat.without_modes(), torch.no_grad(), without_autocast(), aside[0], aside[1]:
            nodes = list(self._tracer.graph.nodes)
            for node in nodes[self._done :]:
                self._values[node] = self.computed(node)
            self._done = len(nodes)

    def computed(self, node: fx.Node) -> Any:
        if node.op == "placeholder":
            self._taken += 1
            return _copy(self._inputs[self._taken - 1])
        if isinstance(node.target, HostCall):
            return None
        if node.op == "get_attr":
            return copied_constant(getattr(self._tracer.root, str(node.target)))
        if is_collective(node) or is_marker(node):
            raise CaptureError(
                "it decides by the value of a tensor behind a collective",
                location=current_location(),
                hint="decide outside the step",
            )
        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), self._values.__getitem__)
        for generator in generators_used((args, kwargs)):
            self._use(generator)
        target: Any = node.target
        return target(*args, **kwargs)

    def _use(self, generator: torch.Generator) -> None:
        """Switches a generator to the trace's state; its live state is restored later."""
        if generator not in self._live and generator is not torch.random.default_generator:
            self._live[generator] = generator.get_state()
            if generator in self._generators:
                generator.set_state(self._generators[generator])

    @contextmanager
    def _generators_aside(self) -> Iterator[None]:
        """A context in which generators have the state that earlier nodes left."""
        self._live: dict[torch.Generator, torch.Tensor] = {}
        try:
            yield
        finally:
            for generator, state in self._live.items():
                self._generators[generator] = generator.get_state()
                generator.set_state(state)


class ValuesBeforeCollectives(TracedValues):
    """Values of a trace with collectives. Behind a collective they assume that all ranks sent this
    rank's values; values computed from sharded rows are unknown.

    Attributes:
        launched: collectives stand before what has been asked for.
    """

    def __init__(self, tracer: Any, live: Sequence[torch.Tensor]) -> None:
        super().__init__(tracer, live)
        self._unknown: set[Any] = set()
        self._of_rows: set[Any] = set()
        self._draws_of_rows = False
        self.launched = False

    def of(self, wanted: Any) -> Any:
        """Returns the value of a node.

        Raises:
            CaptureError: it depends on what each rank has rows of.
        """
        if self.needs_rows(wanted):
            raise CaptureError(
                "what it reads is computed of values of which each rank has rows",
                location=current_location(),
                hint="read it in a step of its own, from what this one returns, or let all ranks"
                " have parameters whole: graphopt.ZeRO(stage=1)",
            )
        return super().of(wanted)

    def knows(self, wanted: Any) -> bool:
        """True if the value of a node depends on no collective."""
        self._compute()
        return wanted not in self._unknown

    def needs_rows(self, wanted: Any) -> bool:
        """True if a node depends on sharded rows, so that its value is unknown."""
        self._compute()
        return wanted in self._of_rows

    def _is_left_out(self, node: fx.Node) -> bool:
        """True if a node depends on sharded rows, or draws random numbers after one that does."""
        if node.op == "placeholder":
            found = is_dtensor(self._inputs[self._taken])
            self._taken += found
        else:
            found = depends_on(node, self._of_rows) or (self._draws_of_rows and draws(node))
        if found:
            self._of_rows |= reached_by(node)
            self._unknown |= reached_by(node)
            self._draws_of_rows |= draws(node)
        return found

    def computed(self, node: fx.Node) -> Any:
        communicates = is_collective(node) or is_marker(node)
        self.launched |= communicates
        if self._is_left_out(node):
            return None
        if communicates or depends_on(node, self._unknown):
            self._unknown |= reached_by(node)
        return self._of_own(node) if communicates else super().computed(node)

    def _of_own(self, node: fx.Node) -> Any:
        """Returns the result of a collective if all ranks sent this rank's value."""
        given: Any = fx.map_arg(node.args, self._values.__getitem__)
        sent, *options = given
        if isinstance(sent, (list, tuple)):
            return [tensor.clone() for tensor in sent]
        if is_operator(node.target, "_c10d_functional::all_gather_into_tensor"):
            return torch.cat([sent] * options[0])
        if is_operator(node.target, "_c10d_functional::reduce_scatter_tensor"):
            return sent.chunk(options[1])[0].clone()
        return sent.clone()


def _copy(value: torch.Tensor) -> torch.Tensor:
    """Copies a tensor, with its layout if that is dense."""
    return value.detach().clone()


def copied_constant(value: Any) -> Any:
    """Returns a copy of a tensor that a traced graph holds as a constant, for computing with it."""
    return _copy(value) if isinstance(value, torch.Tensor) else value
