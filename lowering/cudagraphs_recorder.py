"""Recording and replaying work of a CUDA device."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from typing import Any, Protocol

import torch

from graphopt._compat import cuda
from graphopt.runtime.collector import collector_paused

Run = Callable[[], list[Any]]


class Recording(Protocol):
    """Work that can be done again."""

    def replay(self) -> None:
        """Do it, on the current stream."""


class Recorder(Protocol):
    """Records what a device does.

    Attributes:
        device_type: of the devices whose work it records.
    """

    device_type: str

    def records_group(self, name: str) -> bool:
        """Whether collectives of the process group of that name can be recorded."""

    def new_pool(self) -> Any:
        """Memory for recordings that are replayed in the order in which they were made."""

    def warm_up(self, device: torch.device, run: Run) -> list[Any]:
        """Run as it is, so that nothing is left to be done for the first time."""

    def record(self, device: torch.device, run: Run, pool: Any) -> tuple[Recording, list[Any]]:
        """Record without doing the work.

        Returns:
            The recording, and the results of `run`, which each replay overwrites.
        """


class CudaRecorder:
    """Records by the CUDA driver's stream capture, see `Recorder`."""

    device_type = "cuda"

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def records_group(self, name: str) -> bool:
        return cuda.uses_nccl(name)

    def new_pool(self) -> Any:
        # Memory that the warm-up has used is given back: a pool cannot take it.
        torch.cuda.synchronize()
        gc.collect()
        torch.cuda.empty_cache()
        return torch.cuda.graph_pool_handle()

    def warm_up(self, device: torch.device, run: Run) -> list[Any]:
        with torch.cuda.device(device):
            stream, current = self._stream(device), torch.cuda.current_stream()
            stream.wait_stream(current)
            try:
                with torch.cuda.stream(stream):
                    return run()
            finally:
                current.wait_stream(stream)

    def record(self, device: torch.device, run: Run, pool: Any) -> tuple[Recording, list[Any]]:
        # objects that are freed while something is recorded must not call the driver
        with torch.cuda.device(device), collector_paused():
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            cuda.clear_cublas_workspaces()
            with torch.cuda.stream(self._stream(device)):
                graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                try:
                    results = run()
                    graph.capture_end()
                except BaseException:
                    _abort(graph, device, pool)
                    raise
                finally:
                    cuda.clear_cublas_workspaces()
        return graph, results

    def _stream(self, device: torch.device) -> torch.cuda.Stream:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]


def _abort(graph: torch.cuda.CUDAGraph, device: torch.device, pool: Any) -> None:
    """Leave the device as it was before a recording that failed.

    Up to torch 2.14, random operators raise after such a recording, since the generator takes it to
    be still under way. Another one, which succeeds, corrects that.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the graph is empty
        try:
            graph.capture_end()
        except RuntimeError:
            cuda.end_allocation(device, pool)
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        number = torch.zeros((), device=device)
        stream.synchronize()
        repaired = torch.cuda.CUDAGraph()
        repaired.capture_begin(capture_error_mode="thread_local")
        number.add_(1)
        repaired.capture_end()
