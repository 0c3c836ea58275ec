"""`CudaGraphPiece`: a part of a graph that is recorded once and replayed from then on."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx, nn

from graphopt.errors import LoweringError
from graphopt.lowering.compiler import Kind
from graphopt.lowering.cudagraphs_inputs import Input, PieceInputs, Values, copy_of
from graphopt.lowering.cudagraphs_recorder import Recorder, Recording

logger = logging.getLogger("graphopt")

_MOST_RECORDINGS = 8


class Pools:
    """The memory that the pieces of one graph are recorded into.

    Pieces that are recorded in the order in which they run share a pool: what one of them frees,
    the next may use. A piece that is recorded again gets a pool of its own, for memory that is free
    now may be in use when the piece runs.

    Args:
        new_pool: makes a pool.
    """

    def __init__(self, new_pool: Callable[[], Any]) -> None:
        self._new_pool = new_pool
        self._shared: Any = None
        self._last = -1

    def of(self, position: int) -> Any:
        """The pool for the piece that runs at that position, which is about to be recorded."""
        if position <= self._last:
            return self._new_pool()
        if self._shared is None:
            self._shared = self._new_pool()
        self._last = position
        return self._shared


class CudaGraphPiece(nn.Module):
    """A piece of a graph that runs as a CUDA graph.

    Its first call runs it operator by operator, where regions are compiled and kernels are chosen.
    The second records it, and from then on it is replayed. Where an input that has to be the same
    tensor in each call is another one, it is recorded again, at most 8 times; from then on, and
    where recording fails, it runs operator by operator.

    Args:
        body: takes the inputs and returns a list.
        name: for messages.
        inputs: how it gets each input.
        leaving: for each result, whether it is needed after the next replay may have begun.
        position: how many pieces of its graph run before it.
        device: where it runs.
        pools: memory of the graph's pieces.
        recorder: records.

    Attributes:
        graph_module: `body`.
        failure: why it runs operator by operator, None while it does not.
    """

    def __init__(
        self,
        body: fx.GraphModule,
        name: str,
        inputs: Sequence[Input],
        leaving: Sequence[bool],
        *,
        position: int,
        device: torch.device,
        pools: Pools,
        recorder: Recorder,
    ) -> None:
        super().__init__()
        self.graph_module = body
        self.failure: str | None = None
        self._name = name
        self._inputs = PieceInputs(inputs, device)
        self._leaving = list(leaving)
        self._position, self._device = position, device
        self._pools, self._recorder = pools, recorder
        self._recordings = 0
        self._warm: tuple[Kind, ...] | None = None
        self._recorded: tuple[Recording, Values] | None = None

    @property
    def leaving(self) -> list[bool]:
        """For each result, whether it is handed out as a copy."""
        return list(self._leaving)

    @property
    def copied(self) -> set[int]:
        """Positions of the inputs of which replays read copies."""
        return self._inputs.copied

    @property
    def is_recorded(self) -> bool:
        """Whether the next call replays, as long as its inputs are where they were."""
        return self._recorded is not None

    def forward(self, *values: Any) -> Values:
        """Run the piece.

        Args:
            *values: its inputs.

        Returns:
            Its results. Those that are not leaving are overwritten by the next call.
        """
        if self.failure is not None:
            return self._run(values)
        if self._recorded is not None:
            changed = self._inputs.changed(values)
            if not changed:
                self._inputs.load(values)
                return self._replay()
            self._forget(changed)
            if self.failure is not None:
                return self._run(values)
        try:
            bound = self._inputs.bind(values)
        except LoweringError as error:
            self._give_up(str(error))
            return self._run(values)
        kinds = self._inputs.kinds(bound)
        if kinds != self._warm:
            self._warm = kinds
            return self._own(self._recorder.warm_up(self._device, lambda: self._run(bound)))
        return self._record(values, bound)

    def _run(self, values: Sequence[Any]) -> Values:
        results: Values = self.graph_module(*values)
        return results

    def _record(self, values: Sequence[Any], bound: Values) -> Values:
        noting = _Noting(self.graph_module)
        pool = self._pools.of(self._position)
        try:
            self._recorded = self._recorder.record(self._device, lambda: noting.run(*bound), pool)
        except Exception as error:
            message = str(error).strip().partition("\n")[0]
            self._give_up(f"{noting.place}: {type(error).__name__}: {message}")
            return self._run(values)
        self._recordings += 1
        for index, result in enumerate(self._recorded[1]):
            in_buffer = isinstance(result, torch.Tensor) and self._inputs.is_buffer(result)
            self._leaving[index] = self._leaving[index] or in_buffer
        logger.info("%s is recorded", self._name)
        return self._replay()

    def _replay(self) -> Values:
        assert self._recorded is not None
        recording, results = self._recorded
        recording.replay()
        return [
            copy_of(result) if leaving else result
            for result, leaving in zip(results, self._leaving, strict=True)
        ]

    def _own(self, results: Values) -> Values:
        """Results of a run on buffers, which the next call overwrites."""
        return [
            copy_of(result)
            if isinstance(result, torch.Tensor) and self._inputs.is_buffer(result)
            else result
            for result in results
        ]

    def _forget(self, changed: list[str]) -> None:
        self._recorded = self._warm = None
        names = ", ".join(changed[:3]) + (f" and {len(changed) - 3} more" if changed[3:] else "")
        if self._recordings >= _MOST_RECORDINGS:
            self._give_up(f"it was recorded {self._recordings} times, and {names} changed again")
        else:
            logger.info("%s will be recorded again: %s changed", self._name, names)

    def _give_up(self, reason: str) -> None:
        self.failure = reason
        logger.warning("%s runs operator by operator: %s", self._name, reason)


class _Noting(fx.Interpreter):
    """Runs a graph and knows where it is."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.extra_traceback = False
        self.place = "it begins"

    def run_node(self, n: fx.Node) -> Any:
        if n.op not in ("placeholder", "get_attr", "output"):
            self.place = f"%{n.name} = {n.target}"
        return super().run_node(n)
