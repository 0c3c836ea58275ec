"""`LoweredSubgraph`: a region as a module that is compiled on its first call."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx, nn

from graphopt import _compat
from graphopt._compat.inductor import Compiled
from graphopt.errors import LoweringError
from graphopt.graph_utils import tensors_in, written
from graphopt.lowering.compiler import InputKind, Options, compile_body, kind_of, number_dtypes

logger = logging.getLogger("graphopt")

_MOST_KINDS = 8


class LoweredSubgraph(nn.Module):
    """One region of a graph, compiled by Inductor on its first call.

    Compiled code holds for one kind of inputs: their dtypes, shapes, strides and devices. For each
    other kind it is compiled again, at most 8 times; from then on, and where compiling fails, the
    region runs operator by operator.

    Args:
        body: takes the inputs and returns a list of tensors. Kept as it is.
        name: for messages and the profiler.
        options: the options of lowering.

    Attributes:
        graph_module: `body`.
        failure: the reason why the region is not compiled, None while nothing has failed.

    >>> from graphopt.lowering import LoweredSubgraph, partial_lower
    >>> def wave(model, x):
    ...     return torch.tanh(torch.exp(x.cos() * 2) + x.sin())
    >>> gm = graphopt.capture(wave, torch.nn.Identity(), torch.ones(8)).graph_module
    >>> region = partial_lower(gm, min_ops=3).subgraph_0
    >>> isinstance(region, LoweredSubgraph), region.failure
    (True, None)
    """

    def __init__(self, body: fx.GraphModule, name: str, options: Options | None = None) -> None:
        super().__init__()
        self.graph_module = body
        self.options = options or Options()
        self.failure: LoweringError | None = None
        self._name = name
        self._written = _written_inputs(body.graph)
        self._warned = False
        self._eager = _CheckedCode(self._run_eagerly, [])
        self._compiled: dict[tuple[InputKind, ...], Compiled] = {}
        self._current: tuple[tuple[InputKind, ...], Compiled] | None = None

    @property
    def is_compiled(self) -> bool:
        """True if compiled code exists for the last call, or was prepared for the next."""
        return self.failure is None and bool(self._compiled)

    def forward(self, *args: torch.Tensor, tag: str = "") -> Sequence[torch.Tensor]:
        """Runs the region.

        Args:
            *args: its inputs.
            tag: names the range of this call in a profile.

        Returns:
            Its outputs, in storage of their own.
        """
        return self.call_boxed(list(args), tag)

    def call_boxed(self, args: list[Any], tag: str = "") -> Sequence[torch.Tensor]:
        """Runs the region, and empties the list of inputs so that they are freed early."""
        kinds = tuple(map(kind_of, args))
        current = self._current
        if current is None or current[0] != kinds:
            current = self._current = kinds, self._for_kinds(kinds)
        if not _compat.is_profiling():
            return current[1](args)
        with torch.profiler.record_function(tag or self._name):
            return current[1](args)

    def _for_kinds(self, kinds: tuple[InputKind, ...]) -> Compiled:
        if kinds in self._compiled:
            return self._compiled[kinds]
        if self.failure is not None or any(kind.negated for kind in kinds):
            return self._eager
        if len(self._compiled) >= _MOST_KINDS:
            self._warn_once(
                f"it was compiled for {_MOST_KINDS} kinds of inputs; others run op by op"
            )
            return self._eager
        try:
            compiled: Compiled = compile_body(self.graph_module, kinds, self.options)
            numbers = number_dtypes(self.graph_module.graph, kinds)
        except LoweringError as error:
            self.failure = error
            self._warn_once(f"it runs operator by operator: {error}")
            return self._eager
        self._compiled[kinds] = _CheckedCode(_with_numbers(compiled, numbers), self._written)
        return self._compiled[kinds]

    def _warn_once(self, text: str) -> None:
        if not self._warned:
            logger.warning("%s: %s", self._name, text)
        self._warned = True

    def _run_eagerly(self, args: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        given: list[Any] = list(args)
        args.clear()
        result: Sequence[torch.Tensor] = self.graph_module(*given)
        return result


def _with_numbers(compiled: Compiled, numbers: dict[int, torch.dtype]) -> Compiled:
    """Wraps compiled code: Python numbers at these positions become tensors."""
    if not numbers:
        return compiled

    def call(args: list[Any]) -> Sequence[torch.Tensor]:
        for index, dtype in numbers.items():
            args[index] = torch.tensor(args[index], dtype=dtype, device="cpu")
        return compiled(args)

    return call


def _written_inputs(graph: fx.Graph) -> list[int]:
    """The positions of inputs that a region updates in place."""
    states = {state for node in graph.nodes for state in written(node)}
    placeholders = graph.find_nodes(op="placeholder")
    return [index for index, node in enumerate(placeholders) if node in states]


class _CheckedCode:
    """Compiled code whose results are checked to have storage of their own.

    Results have storage of their own, which the graph around relies on: the compiler may find that
    two results are the same, or that one is an input. The first call tells, since it does so by its
    inputs' kinds alone. What is updated in place gets a new version, which autograd looks at.
    """

    def __init__(self, compiled: Compiled, written: list[int]) -> None:
        self._compiled, self._written = compiled, written
        self._shared: list[int] | None = None

    def __call__(self, args: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        updated = [args[index] for index in self._written if not args[index].is_inference()]
        results = self._compiled(args) if self._shared == [] else self._call_checked(args)
        if updated:
            torch.autograd.graph.increment_version(updated)
        return results

    def _call_checked(self, args: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        given = list(args) if self._shared is None else []  # alive, so that storages differ
        results = list(self._compiled(args))
        if self._shared is None:
            self._shared = _sharing(results, set(map(_compat.storage_key, tensors_in(given))))
        for index in self._shared:
            results[index] = results[index].clone()
        return results


def _sharing(results: Sequence[torch.Tensor], taken: set[int]) -> list[int]:
    """The indices of results that share storage with inputs or with earlier results."""
    found = []
    for index, result in enumerate(results):
        key = _compat.storage_key(result)
        if key in taken:
            found.append(index)
        taken.add(key)
    return found
