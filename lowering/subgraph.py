"""`LoweredSubgraph`: a region as a module that compiles itself when it is first called."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import fx, nn

from graphopt import _compat
from graphopt.errors import LoweringError
from graphopt.lowering.compiler import NUMBER, Kind, Options, compile_body, kind_of

logger = logging.getLogger("graphopt")

Compiled: TypeAlias = Callable[[list[Any]], Sequence[torch.Tensor]]

_MOST_KINDS = 8


class LoweredSubgraph(nn.Module):
    """One region of a graph, compiled by Inductor on its first call.

    Compiled code holds for one kind of inputs: their dtypes, shapes, strides and devices. For each
    other kind it is compiled again, at most 8 times; from then on, and where compiling fails, the
    region runs operator by operator.

    Args:
        body: takes the inputs and returns a list of tensors. Kept as it is.
        name: for messages and the profiler.
        options: how to compile.

    Attributes:
        graph_module: `body`.
        failure: why the region is not compiled, None while nothing has failed.
    """

    def __init__(self, body: fx.GraphModule, name: str, options: Options | None = None) -> None:
        super().__init__()
        self.graph_module = body
        self.options = options or Options()
        self.failure: LoweringError | None = None
        self._name = name
        self._numbers = [index for index, kind in enumerate(self.kinds) if kind is NUMBER]
        self._compiled: dict[tuple[Kind, ...], Compiled] = {}
        self._current: tuple[tuple[Kind, ...], Compiled] | None = None

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The kinds of inputs that the region was made for."""
        nodes = self.graph_module.graph.nodes
        return tuple(kind_of(node.meta["val"]) for node in nodes if node.op == "placeholder")

    @property
    def is_compiled(self) -> bool:
        """Whether there is compiled code for the last call, or for one to come."""
        return self.failure is None and bool(self._compiled)

    def forward(self, *args: torch.Tensor, tag: str = "") -> Sequence[torch.Tensor]:
        """Run the region.

        Args:
            *args: its inputs.
            tag: names the range of this call in a profile.

        Returns:
            Its outputs, in storage of their own.
        """
        return self.call_boxed(list(args), tag)

    def call_boxed(self, args: list[Any], tag: str = "") -> Sequence[torch.Tensor]:
        """Like `forward`, but clears the list, so that inputs are freed after their last use."""
        for index in self._numbers:
            args[index] = torch.tensor(args[index], dtype=torch.float64)
        kinds = tuple(map(kind_of, args))
        if self._current is None or self._current[0] != kinds:
            self._current = kinds, self._for_kinds(kinds)
        with torch.profiler.record_function(tag or self._name):
            return self._current[1](args)

    def prepare(self) -> None:
        """Compile now for the inputs that the region was made for."""
        self._for_kinds(self.kinds)

    def _for_kinds(self, kinds: tuple[Kind, ...]) -> Compiled:
        if kinds not in self._compiled:
            self._compiled[kinds] = self._compile(kinds)
        return self._compiled[kinds]

    def _compile(self, kinds: tuple[Kind, ...]) -> Compiled:
        if self.failure is not None:
            return self._run_eagerly
        if len(self._compiled) >= _MOST_KINDS:
            logger.warning(
                "%s was compiled for %d kinds of inputs; any other runs operator by operator",
                self._name,
                _MOST_KINDS,
            )
            return self._run_eagerly
        try:
            return _Checked(compile_body(self.graph_module, kinds, self.options))
        except LoweringError as error:
            self.failure = error
            logger.warning("%s runs operator by operator: %s", self._name, error)
            return self._run_eagerly

    def _run_eagerly(self, args: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        given: list[Any] = list(args)
        args.clear()
        for index in self._numbers:
            given[index] = given[index].item()
        result: Sequence[torch.Tensor] = self.graph_module(*given)
        return result


class _Checked:
    """Compiled code whose results have storage of their own, which the graph around relies on.

    The compiler may find that two results are the same, or that one is an input. The first call
    tells, since it does so by its inputs' kinds alone.
    """

    def __init__(self, compiled: Compiled) -> None:
        self._compiled = compiled
        self._shared: list[int] | None = None

    def __call__(self, args: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        if self._shared == []:
            return self._compiled(args)
        taken = set(map(_compat.storage_key, args)) if self._shared is None else set()
        results = list(self._compiled(args))
        if self._shared is None:
            self._shared = _sharing(results, taken)
        for index in self._shared:
            results[index] = results[index].clone()
        return results


def _sharing(results: Sequence[torch.Tensor], taken: set[int]) -> list[int]:
    """Indices of results in storage that is taken, by inputs or by results before them."""
    found = []
    for index, result in enumerate(results):
        key = _compat.storage_key(result)
        if key in taken:
            found.append(index)
        taken.add(key)
    return found
