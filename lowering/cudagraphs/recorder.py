"""Recording of nodes into CUDA graphs, and the reasons why a node cannot be recorded."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from graphopt import _compat
from graphopt._compat import cuda
from graphopt.graph_utils import is_collective, is_operator, is_pointwise, tensors_in, written
from graphopt.ir.metadata import known_value
from graphopt.ir.operators import argument, fused_optimizer, is_item
from graphopt.lowering.lowerable import has_mask, takes_indices
from graphopt.lowering.subgraph import LoweredSubgraph
from graphopt.runtime.memory import collector_paused

_WAITS_FOR_DEVICE = (
    "aten::_assert_scalar",
    "aten::_ctc_loss",
    "aten::_pack_padded_sequence",
    "aten::histc",
    "aten::is_nonzero",
    "aten::multinomial",
    "aten::randperm",
    "aten::segment_reduce",
)
"""Operators without a tag that says so, which read results back to the CPU or draw there."""

_WAITING_FAMILIES = ("aten::linalg_", "aten::_linalg_", "aten::_cudnn_ctc", "aten::_sparse_")
"""Beginnings of the names of operators of which many wait for the device."""

_TAGS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)

_NAMESPACES = ("aten", "prims", "_c10d_functional", "graphopt_inplace")


def is_number(value: object) -> bool:
    """True for a Python number, or a symbolic one."""
    return isinstance(value, (int, float, torch.SymInt, torch.SymFloat, torch.SymBool))


def is_unknown_number(value: object) -> bool:
    """True for a number that is known only when the graph runs."""
    if isinstance(value, (torch.SymInt, torch.SymFloat)):
        return _compat.known_number(value) is None
    return isinstance(value, torch.SymBool)


def takes_numbers(node: fx.Node) -> bool:
    """True if a node takes Python numbers that the graph computes."""
    return any(is_unknown_number(known_value(source)) for source in node.all_input_nodes)


@dataclass(frozen=True)
class Recordable:
    """Decides which nodes can be recorded into a CUDA graph.

    Attributes:
        device_type: the kind of device that records, ``"cuda"``.
        group_records: tells whether the collectives of the group of that name can be recorded.
    """

    device_type: str
    group_records: Callable[[str], bool]

    def reason_against(self, node: fx.Node, module: object = None) -> str | None:
        """Returns why a call cannot be recorded, or None if it can.

        Args:
            node: neither a pure view nor an item of several results.
            module: the module that a `call_module` node calls.
        """
        if node.op == "call_module":
            return self._against_module(node, module)
        target = node.target
        if node.op != "call_function" or not isinstance(target, _compat.OpOverload):
            return "it computes with Python numbers or calls Python"
        if target.namespace not in _NAMESPACES:
            return f"what operators of {target.namespace} do besides their result is not known"
        if isinstance(known_value(node), (list, tuple)) and not all(map(is_item, node.users)):
            return "its results are used as a list"
        return (
            self._against_communication(node)
            or _against_waiting(node, target)
            or _against_generator(node)
            or _against_update(node, target)
            or self._against_values(node)
        )

    def _against_module(self, node: fx.Node, module: object) -> str | None:
        if not isinstance(module, LoweredSubgraph):
            return "it is a module"
        for inner in module.graph_module.graph.nodes:
            if inner.op == "placeholder":
                continue
            if any(t.device.type != self.device_type for t in tensors_in(known_value(inner))):
                return f"%{inner.name} of it is on another device"
        return self._against_values(node)

    def _against_communication(self, node: fx.Node) -> str | None:
        if not is_collective(node):
            return None
        if self.group_records(argument(node, "group_name")):
            return None
        return "its process group does not communicate by NCCL"

    def _against_values(self, node: fx.Node) -> str | None:
        devices = set()
        for tensor in tensors_in(known_value(node)):
            devices.add(tensor.device)
            if tensor.layout is not torch.strided or _compat.has_symbolic_shape(tensor):
                return "its result has a shape or layout that is not fixed"
        for source in node.all_input_nodes:
            value = known_value(source)
            if is_unknown_number(value) and fused_optimizer(node.target) is None:
                return "it takes a number that is computed in the graph"
            for tensor in tensors_in(value):
                if tensor.layout is not torch.strided or _compat.has_symbolic_shape(tensor):
                    return "it takes a tensor of a shape or layout that is not fixed"
                if not self._is_baked_in(source, node, tensor):
                    devices.add(tensor.device)
        if not devices:
            return "it has no tensor"
        if any(device.type != self.device_type for device in devices):
            return f"it takes or gives a tensor on another device than {self.device_type}"
        if len(devices) > 1:
            return "it takes or gives tensors on several devices"
        return None

    def _is_baked_in(self, source: fx.Node, user: fx.Node, tensor: torch.Tensor) -> bool:
        """True if the recording holds a CPU tensor as a number: a constant, or a learning rate."""
        if tensor.device.type != "cpu" or self.device_type == "cpu" or tensor.dim() > 0:
            return False
        if fused_optimizer(user.target) is not None and argument(user, "lr") is source:
            return True
        takes_constants = user.op == "call_module" or is_pointwise(user.target)
        takes_constants &= not is_operator(user.target, "aten::where")
        return source.op == "get_attr" and takes_constants

    def device_of(self, node: fx.Node) -> torch.device | None:
        """The device that a recordable node runs on, or None if its tensors do not tell."""
        for tensor in _tensors_of(node):
            if tensor.device.type == self.device_type:
                return tensor.device
        return None


def _tensors_of(node: fx.Node) -> Iterator[torch.Tensor]:
    yield from tensors_in(known_value(node))
    for source in node.all_input_nodes:
        yield from tensors_in(known_value(source))


def _against_waiting(node: fx.Node, target: _compat.OpOverload) -> str | None:
    unsafe = getattr(torch.Tag, "cudagraph_unsafe", None)  # torch 2.11 has no such tag
    if unsafe is not None and unsafe in target.tags:
        return "it is tagged as unsafe in CUDA graphs"
    name = _compat.operator_name(target)
    waits = any(tag in target.tags for tag in _TAGS)
    if takes_indices(node):  # they wait where an index is a mask, and else do not
        waits = has_mask(node)
    if waits or name in _WAITS_FOR_DEVICE or name.startswith(_WAITING_FAMILIES):
        return "it waits for the device"
    return None


def _against_generator(node: fx.Node) -> str | None:
    if argument(node, "generator") is not None:
        return "it draws from a generator of its own"
    return None


def _against_update(node: fx.Node, target: _compat.OpOverload) -> str | None:
    """Returns why an in-place operator cannot be recorded: its result is not its first argument."""
    if not _compat.schema_of(target).is_mutable:
        return None
    if torch.Tag.inplace_view in target.tags:
        return "it changes the shape of its argument"
    if not _compat.schema_of(target).returns:
        return None
    updated = written(node)
    first = node.args[0] if node.args else None
    if len(_compat.schema_of(target).returns) == 1 and updated == [first]:
        return None
    return "it updates several arguments and returns them"


Run = Callable[[], list[Any]]


class CudaRecorder:
    """Records CUDA work for replay, by stream capture.

    Attributes:
        device_type: the type of the devices whose work it records.
    """

    device_type = "cuda"

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def records_group(self, name: str) -> bool:
        """True if collectives of the process group of that name can be recorded."""
        return cuda.uses_nccl(name)

    def new_pool(self) -> Any:
        """Allocates a memory pool for recordings that are replayed in the order of recording."""
        # Memory that the warm-up has used is given back: a pool cannot take it.
        torch.cuda.synchronize()
        gc.collect()
        torch.cuda.empty_cache()
        return torch.cuda.graph_pool_handle()

    def warm_up(self, device: torch.device, run: Run) -> list[Any]:
        """Runs the work unrecorded, so that one-time initialization is done."""
        with torch.cuda.device(device):
            stream, current = self._stream(device), torch.cuda.current_stream()
            stream.wait_stream(current)
            try:
                with torch.cuda.stream(stream):
                    return run()
            finally:
                current.wait_stream(stream)

    def record(
        self, device: torch.device, run: Run, pool: Any
    ) -> tuple[torch.cuda.CUDAGraph, list[Any]]:
        """Records the device work of a function without executing it.

        Returns:
            The recording, and the results of `run`, which each replay overwrites.
        """
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
    """Resets the device after a recording that failed.

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
