"""CUDA graphs played on the CPU: what is recorded, what a replay reads and what it overwrites.

And a training step whose derived graphs run with them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from graphopt import _compat
from graphopt.executable import finalize
from graphopt.iter_graph import IterGraphModule
from graphopt.lowering.cudagraphs import CudaGraphs
from graphopt.lowering.cudagraphs.recorder import CudaRecorder
from graphopt.lowering.cudagraphs.replay import CudaGraphPiece
from graphopt.manager import PassManager
from graphopt.tracing.call import Call
from graphopt.tracing.capture import capture_call
from zoo import MODELS, OPTIMIZERS, train_step


class _WritesUndone(TorchDispatchMode):
    """Remembers each storage before it is first written, and restores all of them."""

    def __init__(self) -> None:
        super().__init__()
        self._before: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for index, argument in enumerate(func._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            for tensor in tree_leaves(value):
                if isinstance(tensor, Tensor):
                    self._keep(tensor)
        return func(*args, **kwargs)

    def _keep(self, tensor: Tensor) -> None:
        key = _compat.storage_key(tensor)
        if key not in self._before:
            whole = tensor.detach().new_empty(0).set_(tensor.untyped_storage())
            self._before[key] = (whole, whole.clone())

    def undo(self) -> None:
        for whole, before in self._before.values():
            whole.copy_(before)


class EmulatedRecording:
    def __init__(self, recorder: EmulatedRecorder, run: Callable[[], list[Any]]) -> None:
        self._recorder, self._run = recorder, run
        self.results: list[Any] = []
        self.replays = 0

    def replay(self) -> None:
        self._recorder.about_to_replay(self)
        self.replays += 1
        for result, value in zip(self.results, self._run(), strict=True):
            if isinstance(result, Tensor):
                result.copy_(value)
            else:
                assert result == value


class EmulatedRecorder:
    """Records by remembering what to run. A recording does no work, and a replay overwrites.

    When a call begins, whatever results of the last call are still in the recordings' memory become
    NaN: nobody may read them any more.
    """

    device_type = "cpu"

    def __init__(
        self, refuse: Callable[[], bool] = lambda: False, records_groups: bool = False
    ) -> None:
        self.recordings: list[EmulatedRecording] = []
        self.pools = 0
        self.pools_used: list[int] = []
        self.warm_ups = 0
        self._refuse = refuse
        self._records_groups = records_groups

    def records_group(self, name: str) -> bool:
        return self._records_groups

    def new_pool(self) -> int:
        self.pools += 1
        return self.pools

    def warm_up(self, device: torch.device, run: Callable[[], list[Any]]) -> list[Any]:
        self.warm_ups += 1
        return run()

    def record(
        self, device: torch.device, run: Callable[[], list[Any]], pool: int
    ) -> tuple[EmulatedRecording, list[Any]]:
        if self._refuse():
            raise RuntimeError("operation not permitted when stream is capturing")
        self.pools_used.append(pool)
        recording = EmulatedRecording(self, run)
        numbers = torch.get_rng_state()
        writes = _WritesUndone()
        with writes:
            recording.results = run()
        writes.undo()
        torch.set_rng_state(numbers)
        self.recordings.append(recording)
        return recording, recording.results

    def about_to_replay(self, recording: EmulatedRecording) -> None:
        if recording is not self.recordings[0]:
            return
        for result in (r for other in self.recordings[1:] for r in other.results):
            if isinstance(result, Tensor) and result.is_floating_point():
                result.fill_(float("nan"))


def pieces_of(gm: fx.GraphModule) -> list[CudaGraphPiece]:
    """The pieces that a graph calls, in order."""
    found = [gm.get_submodule(str(n.target)) for n in gm.graph.nodes if n.op == "call_module"]
    return [piece for piece in found if isinstance(piece, CudaGraphPiece)]


class Training:
    """A model of the zoo that is trained by its captured step, all derived graphs with pieces.

    Args:
        recorder: None trains without pieces.
        pipeline: passes for the captured graph.
        step: takes model, optimizer, inputs and targets.
    """

    def __init__(
        self,
        model: str,
        optimizer: str,
        recorder: Callable[[], CudaRecorder] | None,
        *,
        pipeline: Sequence[Any] = (),
        step: Callable[..., Any] = train_step,
        device: str = "cpu",
    ) -> None:
        torch.manual_seed(0)
        self._case, self._step, self._device = MODELS[model], step, device
        self.model = self._case.make().to(device)
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        step(*self._arguments(0))  # makes the optimizer's state
        captured = capture_call(Call(step, self._arguments(0), {}))
        self._live = captured.live
        self.module = IterGraphModule(captured.graph_module)
        PassManager(list(pipeline)).run(self.module)
        self._recorder = recorder
        self.graphs: list[fx.GraphModule] = []
        self.module.finalize_setup(self._transform)
        self.losses: list[Tensor] = []

    def _transform(self, derived: fx.GraphModule) -> fx.GraphModule:
        derived = finalize(derived)
        if self._recorder is not None:
            self.graphs.append(CudaGraphs(self._recorder()).apply(derived))
        return derived

    def _arguments(self, index: int) -> tuple[Any, ...]:
        batch = (tensor.to(self._device) for tensor in self._case.batch(index))
        return (self.model, self.optimizer, *batch)

    def run(self, steps: int) -> None:
        """Train, with another learning rate in each step."""
        for index in range(steps):
            values = self._live.live_values(Call(self._step, self._arguments(index), {}))
            with torch.no_grad():
                (loss,), _, _ = self.module(*values)
            self.losses.append(loss)
            self.optimizer.param_groups[0]["lr"] *= 0.9

    def flush(self) -> None:
        """Do what is late."""
        with torch.no_grad():
            self.module.flush()

    def state(self) -> list[Tensor]:
        """Losses, parameters, buffers and optimizer state."""
        self.flush()
        states = self.optimizer.state.values()
        return [
            *self.losses,
            *(parameter.detach() for parameter in self.model.parameters()),
            *self.model.buffers(),
            *(v for state in states for v in state.values() if isinstance(v, Tensor)),
        ]

    @property
    def pieces(self) -> list[CudaGraphPiece]:
        """Of the graph that was derived last, which is main where something runs late."""
        return pieces_of(self.graphs[-1])
