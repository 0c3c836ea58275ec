"""Triton and Inductor's CUDA code generation without a GPU.

Written for Triton 3.6 to 3.9, which torch 2.11 to 2.15 are used with.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.fx.traceback
from torch import fx

from graphopt._compat.inductor import compile_inner
from graphopt._compat.triton_binaries import gpu_target
from graphopt._compat.triton_methods import methods_for_fake_cuda_tensors

DEVICE = torch.device("cuda", 0)

_MULTIPROCESSORS = {70: 80, 75: 40, 80: 108, 86: 84, 87: 16, 89: 142, 90: 132, 100: 148, 110: 20}
_MULTIPROCESSORS |= {120: 170, 121: 48}
"""Of the data centre or best known card of a compute capability; by it Inductor splits reductions.
A capability that is not here has as many as the one before it."""

_THREADS = {70: 2048, 75: 1024, 80: 2048, 86: 1536, 90: 2048, 110: 1536}
"""The most threads that a multiprocessor runs at once, in the same way."""

_ONE_AT_A_TIME = threading.RLock()
"""What is patched below belongs to the process."""


class _SourceReady(BaseException):
    """Signals that Inductor has generated a graph's code; no Exception, which Inductor would
    wrap."""


# ---------------------------------------------------------------------------- a GPU to believe in


@contextmanager
def pretended_gpu(capability: int) -> Iterator[None]:
    """While active, Inductor and Triton see one GPU of a compute capability.

    The GPU of the machine, if it has one, is neither asked nor touched. Everything is restored on
    leaving, and what torch remembered of the pretended GPU is forgotten.
    """
    _import_inductor()
    import triton
    from torch._dynamo.device_interface import CudaInterface
    from torch._inductor import config, scheduler
    from torch._inductor.runtime import triton_helpers
    from torch._subclasses import fake_tensor

    properties = _properties(capability)
    static_properties = staticmethod(lambda device=None: properties)
    patches: list[tuple[Any, str, Any]] = [
        (torch.cuda, "is_available", lambda: False),
        (torch.cuda, "current_device", lambda: 0),
        (torch.cuda, "get_device_capability", lambda device=None: divmod(capability, 10)),
        (torch.cuda, "get_device_properties", lambda device=None: properties),
        (CudaInterface, "current_device", staticmethod(lambda: 0)),
        (CudaInterface, "get_device_properties", static_properties),
        (CudaInterface.Worker, "current_device", staticmethod(lambda: 0)),
        (CudaInterface.Worker, "get_device_properties", static_properties),
        (CudaInterface, "is_bf16_supported", staticmethod(lambda *a, **k: capability >= 80)),
        (fake_tensor, "init_gpu_context", lambda device: None),
        (scheduler, "has_triton", lambda: True),
        (triton_helpers, "set_driver_to_gpu", lambda: None),
        (triton.runtime.driver, "_active", _driver(capability)),
    ]
    with _ONE_AT_A_TIME, ExitStack() as stack:
        _forget_devices()
        stack.callback(_forget_devices)
        for owner, name, value in patches:
            stack.enter_context(mock.patch.object(owner, name, value))
        if not torch.backends.cuda.is_built():
            stack.enter_context(methods_for_fake_cuda_tensors())
        stack.enter_context(config.patch(_SETTINGS))
        yield


def _import_inductor() -> None:
    """Imports Inductor without torch's own deprecation warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        import torch._inductor.compile_fx  # noqa: F401


_SETTINGS = {
    # What would run something on the GPU to find out which is faster.
    "benchmark_fusion": False,
    "benchmark_kernel": False,
    "coordinate_descent_tuning": False,
    "max_autotune": False,
    "max_autotune_gemm": False,
    "max_autotune_pointwise": False,
    "shape_padding": False,
    "triton.multi_kernel": 0,
    # Folding computes constants on their device.
    "joint_graph_constant_folding": False,
    # Kernels are read from the Python code of a graph, which a cache would not have.
    "compile_threads": 1,
    "cpp_wrapper": False,
    "fx_graph_cache": False,
    "fx_graph_remote_cache": False,
    "triton.cudagraphs": False,
    "triton.unique_kernel_names": True,
}


def _properties(capability: int) -> SimpleNamespace:
    """The device properties of the pretended GPU, as `torch.cuda.get_device_properties` returns
    them."""
    major, minor = divmod(capability, 10)
    return SimpleNamespace(
        name=f"compute capability {major}.{minor}",
        gcnArchName="",
        major=major,
        minor=minor,
        multi_processor_count=_at(_MULTIPROCESSORS, capability),
        max_threads_per_multi_processor=_at(_THREADS, capability),
        max_threads_per_block=1024,
        regs_per_multiprocessor=65536,
        warp_size=32,
    )


def _at(table: dict[int, int], capability: int) -> int:
    return table[max(known for known in table if known <= capability)]


def _driver(capability: int) -> Any:
    target = gpu_target(capability)
    return SimpleNamespace(get_current_target=lambda: target)


def _forget_devices() -> None:
    """Clears torch's caches of GPU properties."""
    from torch._dynamo import debug_utils
    from torch._inductor import codecache, compile_fx, utils
    from torch._inductor.runtime.hints import DeviceProperties
    from torch.utils import _triton

    caches = [
        DeviceProperties.create,
        codecache.CacheBase.get_system,
        compile_fx._warn_tf32_disabled,
        debug_utils._cuda_system_info_comment,
        utils.get_gpu_type,
        utils.is_big_gpu,
        *(value for value in vars(_triton).values() if hasattr(value, "cache_clear")),
    ]
    for cache in caches:
        cache.cache_clear()


# ---------------------------------------------------------------------------- code of a graph


def traced_with_decompositions(
    fn: Callable[..., Any], inputs: Sequence[Any], mode: Any
) -> fx.GraphModule:
    """Traces `fn` on fake tensors of `mode`, in the operators that Inductor lowers."""
    from torch._inductor.decomposition import select_decomp_table
    from torch.fx.experimental.proxy_tensor import make_fx

    # Inductor names kernels after the operators that were decomposed.
    with mode, torch.no_grad(), fx.traceback.preserve_node_meta():
        return make_fx(fn, decomposition_table=select_decomp_table())(*inputs)


def inductor_code(graph_module: fx.GraphModule, inputs: Sequence[Any], mode: Any) -> str:
    """The Python module that Inductor generates for a graph; empty if there is nothing to run."""
    from torch._inductor.graph import GraphLowering

    def stop(lowering: Any) -> None:
        raise _SourceReady(lowering.codegen()[0].value)

    with mock.patch.object(GraphLowering, "compile_to_module", stop):
        try:
            compile_inner(graph_module, list(inputs), mode)
        except _SourceReady as ready:
            return str(ready.args[0])
    return ""


def node_being_lowered(error: BaseException) -> fx.Node | None:
    """The node at which Inductor, or another graph interpreter, raised an error."""
    found, step = None, error.__traceback__
    while step is not None:
        if step.tb_frame.f_code.co_name == "run_node":
            found = step.tb_frame.f_locals.get("n", found)
        step = step.tb_next
    return found
