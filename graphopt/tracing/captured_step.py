"""`CapturedStep`: a captured graph with descriptions of its inputs and results."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import fx

from graphopt.guards.outside import OutsideGuard
from graphopt.parallel import Manual, Parallel
from graphopt.ranks.independent_ranks import groups_apart
from graphopt.tracing.call import Call
from graphopt.tracing.inputs.entries import Inputs, InputSpec
from graphopt.tracing.inputs.found_places import FoundPlace
from graphopt.tracing.inputs.implicit import ImplicitInputs
from graphopt.tracing.optimizers.new_state import NewState
from graphopt.tracing.ranks.shards import ShardWindows
from graphopt.tracing.results.signature import Signature


@dataclass
class CapturedStep:
    """A captured training step: graph, inputs, and result signature.

    Attributes:
        graph_module: the graph in the captured dialect (docs/ir.md). Called with the live tensors
            in the order of `inputs`, it returns ``(user results, state updates, carried values)``.
        inputs: one `InputSpec` per placeholder.
        signature: how results become the return value, gradients and new optimizer state.
        live: where the values of `inputs` are found.
        outside: holds what the step read outside its arguments.
        besides: modules, optimizers and tensors that it works on besides its arguments.
        state: optimizer state among the inputs, to be put into the optimizers when the graph has
            run for the first time; None where there is none.
        parallel: the kind of parallelism that expands the markers of the graph.
        found: places outside that hold what may be another one in the next call.

    >>> import graphopt, torch
    >>> captured = graphopt.capture(lambda m, x: m(x), torch.nn.ReLU(), torch.ones(2))
    >>> [(entry.kind, entry.fqn) for entry in captured.inputs]
    [('user_input', 'x')]
    >>> captured
    CapturedStep(3 nodes, 1 inputs)
    """

    graph_module: fx.GraphModule
    inputs: tuple[InputSpec, ...]
    signature: Signature
    live: Inputs
    outside: OutsideGuard
    besides: ImplicitInputs
    state: NewState | None = None
    parallel: Parallel = field(default_factory=Manual)
    found: Sequence[FoundPlace] = ()

    def __repr__(self) -> str:
        return (
            f"CapturedStep({len(self.graph_module.graph.nodes)} nodes, {len(self.inputs)} inputs)"
        )

    @cached_property
    def apart(self) -> frozenset[str]:
        """The process groups of the expanded graph whose ranks may run another graph."""
        return groups_apart(self.graph_module.graph, self.parallel)

    def state_present(self) -> AbstractContextManager[None]:
        """While active, optimizers hold all state that is among the graph's inputs."""
        return nullcontext() if self.state is None else self.state.present()

    def values(self, call: Call) -> list[torch.Tensor]:
        """The inputs of the graph in a call; of those that are sharded, this rank's windows."""
        with self.state_present():
            values = self.live.live_values(call)
        return ShardWindows(self.inputs, self.parallel).put(values)
