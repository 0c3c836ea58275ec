"""Targets and graphs without Triton kernels: what is said, and that nothing is left behind."""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton
from torch import Tensor, fx
from torch._dynamo.device_interface import CudaInterface
from torch._inductor import codecache, config, graph, scheduler, utils
from torch._inductor.runtime import hints, triton_helpers
from torch._subclasses import fake_tensor
from torch.fx.experimental.proxy_tensor import make_fx

from graphopt._compat.triton import pretended_gpu
from graphopt._compat.triton_methods import methods_for_fake_cuda_tensors
from graphopt.errors import LoweringError
from graphopt.lowering.triton_kernels import compile_triton, lower_to_triton, parse_target
from triton_cases import check, kernels_of, traced


@pytest.fixture(autouse=True, scope="module")
def _nothing_compiled_before(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        yield


@pytest.mark.parametrize(
    ("target", "sm"), [("80", "sm_80"), ("100", "sm_100a"), ("120", "sm_120a")]
)
def test_targets(target: str, sm: str) -> None:
    x = torch.randn(64, 48)
    kernels = kernels_of(lambda x: torch.softmax(x, -1), x, target=f"cuda:{target}")
    assert all(re.search(rf"\.target {sm}\b", kernel.ptx) for kernel in kernels)


@pytest.mark.parametrize(
    "target", ["cuda", "cuda:", "cuda:9", "cuda:91", "cuda:90a", "sm_90", "hip:90", "", "cuda:1000"]
)
def test_bad_targets(target: str) -> None:
    with pytest.raises(LoweringError, match=r"no target .*known are .*cuda:80, .*cuda:90") as error:
        compile_triton(traced(torch.sin, torch.randn(3)), target)
    assert repr(target) in str(error.value)


@pytest.mark.filterwarnings("ignore:compute capability 7.5 does not support bfloat16")
def test_dtype_that_a_target_lacks() -> None:
    module = traced(lambda x: x.exp(), torch.randn(64, 48, dtype=torch.bfloat16))
    with pytest.raises(LoweringError, match=r"region 0: this cannot be lowered .*(?i:bf16)"):
        compile_triton(module, "cuda:75")


def test_a_kernel_that_does_not_compile_is_named_and_the_others_are_kept() -> None:
    def halves(x: Tensor) -> list[Tensor]:
        return [x.to(torch.float8_e4m3fn).float() * 2, torch.softmax(x, -1).sum(0)]

    module = traced(halves, torch.randn(64, 48))
    report = lower_to_triton(module, "cuda:80")
    check(report.kernels)
    (failure,) = report.failures
    assert failure.kernel not in {kernel.name for kernel in report.kernels}
    assert "fp8e4nv not supported in this architecture" in failure.reason
    with pytest.raises(LoweringError, match=f"region 0, kernel {failure.kernel}: CompilationError"):
        compile_triton(module, "cuda:80")


def test_triton_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(LoweringError, match=r"pip install 'graphopt\[triton\]'"):
        compile_triton(traced(torch.sin, torch.randn(3)))


def test_parse_target() -> None:
    assert parse_target("cuda:90") == 90


# ---------------------------------------------------------------------------- what is refused


@torch.library.custom_op("graphopt_test_triton::opaque", mutates_args=())
def opaque(x: Tensor) -> Tensor:
    return x.clone()


@opaque.register_fake
def _(x: Tensor) -> Tensor:
    if x.shape[0] == 3:
        raise NotImplementedError("no rule for three rows")
    return torch.empty_like(x)


def graph_with_opaque(rows: int) -> fx.GraphModule:
    graph_of = fx.Graph()
    x = graph_of.placeholder("x")
    x.meta["val"] = torch.empty(rows, device="meta")
    call = graph_of.call_function(torch.ops.graphopt_test_triton.opaque.default, (x,))
    call.meta["source"] = "train.py:41  return opaque(x)"
    graph_of.output((call,))
    return fx.GraphModule({}, graph_of)


def test_operator_without_a_meta_kernel() -> None:
    with pytest.raises(
        LoweringError, match=r"cannot be lowered .* no rule for three rows"
    ) as error:
        compile_triton(graph_with_opaque(3))
    assert "node:  %opaque_default = graphopt_test_triton.opaque.default" in str(error.value)
    assert "from:  train.py:41  return opaque(x)" in str(error.value)


def test_operator_without_a_lowering_is_called() -> None:
    report = lower_to_triton(graph_with_opaque(4))
    assert report.failures == report.kernels == []
    assert report.externs == {"graphopt_test_triton.opaque.default": 1}


def test_operator_whose_lowering_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(x: Any) -> None:
        raise ValueError("the rule is broken")

    lowerings = torch._inductor.lowering.lowerings
    monkeypatch.setitem(lowerings, torch.ops.graphopt_test_triton.opaque.default, broken)
    with pytest.raises(LoweringError, match="ValueError: the rule is broken") as error:
        compile_triton(graph_with_opaque(4))
    assert "node:  %opaque_default = graphopt_test_triton.opaque.default" in str(error.value)
    assert "from:  train.py:41  return opaque(x)" in str(error.value)


def test_values_that_only_real_data_has() -> None:
    module = traced(lambda x: x * x.sum().item(), torch.randn(3))
    with pytest.raises(LoweringError, match="node:  %_local_scalar_dense = "):
        compile_triton(module)


def test_symbolic_shapes() -> None:
    module = make_fx(lambda x: x + 1, tracing_mode="symbolic")(torch.randn(3, 4))
    with pytest.raises(LoweringError, match="shape or number that is not known"):
        compile_triton(module)


def test_placeholder_without_metadata() -> None:
    module = make_fx(lambda x: x + 1)(torch.randn(3))
    for node in module.graph.nodes:
        node.meta.clear()
    with pytest.raises(LoweringError, match=r"has no meta\['val'\]"):
        compile_triton(module)


OWNERS = (
    CudaInterface,
    codecache.CacheBase,
    fake_tensor,
    graph.GraphLowering,
    hints.DeviceProperties,
    scheduler,
    torch.cuda,
    torch.Tensor,
    triton.runtime.driver,
    triton.knobs.compilation,
    triton_helpers,
)


def state() -> tuple[Any, ...]:
    """Everything that `pretended_gpu` might leave behind."""
    attributes = [dict(vars(owner)) for owner in OWNERS]
    caches = (utils.is_big_gpu, utils.get_gpu_type, codecache.CacheBase.get_system)
    remembered = [cache.cache_info().currsize for cache in caches]
    flags = (torch.cuda.is_initialized(), torch.is_grad_enabled(), torch.get_rng_state().tolist())
    return attributes, remembered, config.save_config(), dict(os.environ), flags


def kernel_fails(module: fx.GraphModule) -> None:
    compile_triton(traced(lambda x: x.to(torch.float8_e4m3fn).float(), torch.ones(9)), "cuda:80")


def region_fails(module: fx.GraphModule) -> None:
    compile_triton(traced(lambda x: x * x.sum().item(), torch.ones(3)))


def interrupted(module: fx.GraphModule) -> None:
    def interrupt(name: str) -> None:
        assert torch.cuda.get_device_capability() == (9, 0)
        raise KeyboardInterrupt

    lower_to_triton(module, progress=interrupt)


@pytest.mark.parametrize(
    ("run", "error"),
    [
        (compile_triton, None),
        (kernel_fails, LoweringError),
        (region_fails, LoweringError),
        (interrupted, KeyboardInterrupt),
    ],
)
def test_nothing_stays_patched(run: Callable[[fx.GraphModule], Any], error: Any) -> None:
    module = traced(lambda x: torch.softmax(x, -1)[1:], torch.randn(64, 48))
    compile_triton(module)  # what torch imports and registers once is there now
    before = state()
    if error is None:
        run(module)
    else:
        with pytest.raises(error):
            run(module)
    assert state() == before


def test_the_gpu_of_the_machine_is_not_asked() -> None:
    with pretended_gpu(80):
        assert not torch.cuda.is_available()
        assert torch.cuda.get_device_capability() == (8, 0)
        assert torch.cuda.get_device_properties(0).multi_processor_count == 108
        assert triton.runtime.driver.active.get_current_target().arch == 80
    assert not torch.cuda.is_initialized()


def test_threads_take_turns() -> None:
    module = traced(lambda x: torch.softmax(x, -1), torch.randn(64, 48))
    found: dict[str, str] = {}

    def compile_for(target: str) -> None:
        found[target] = compile_triton(module, target)[0].ptx

    threads = [threading.Thread(target=compile_for, args=(f"cuda:{sm}",)) for sm in (80, 90)]
    before = state()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ".target sm_80" in found["cuda:80"] and ".target sm_90a" in found["cuda:90"]
    assert state() == before


# ---------------------------------------------------------------------------- methods of tensors

INDICES = {
    "number": 1,
    "negative": -1,
    "slice": slice(1, None),
    "step": slice(None, None, 2),
    "none": None,
    "all": ...,
    "numbers": (1, 2),
    "end": (..., 0),
    "middle": (0, ..., slice(1, 3)),
    "new": (slice(None), None, ..., None),
    "tensor": torch.tensor([0, 2]),
    "tensor after slice": (slice(None), torch.tensor([0, 2])),
    "tensor after dots": (..., torch.tensor([0, 2])),
    "number and tensor": (1, torch.tensor([0, 2])),
    "two tensors": (torch.tensor([0, 2]), slice(None), torch.tensor([1, 1])),
    "mask": torch.arange(12).view(3, 4) > 4,
    "mask and number": (torch.arange(12).view(3, 4) > 4, 1),
    "mask after number": (1, torch.tensor([True, False, True, True])),
}


@pytest.mark.parametrize("name", INDICES)
def test_indexing_is_torchs(name: str) -> None:
    from graphopt._compat import triton_methods

    x = torch.arange(60).view(3, 4, 5)
    assert torch.equal(triton_methods._getitem(x, INDICES[name]), x[INDICES[name]])


def test_methods_of_other_tensors_are_torchs() -> None:
    x = torch.arange(6).view(2, 3)
    with methods_for_fake_cuda_tensors():
        assert x[1].tolist() == [3, 4, 5]
        assert (~(x > 2)).sum() == 3
        assert x.t().contiguous().stride() == (2, 1)
        x[0] = 1
        assert x.clone().copy_(x, non_blocking=True)[0].tolist() == [1, 1, 1]
    for kind in (torch.Tensor, fake_tensor.FakeTensor):
        assert not {"__getitem__", "__setitem__", "copy_"} & vars(kind).keys()


def test_a_tensor_of_tensors_can_still_be_made() -> None:
    """A class that once had a `__getitem__` of Python's is a sequence ever after, to torch."""
    with methods_for_fake_cuda_tensors():
        pass
    for kind in (torch.tensor, torch.as_tensor):
        assert kind([torch.tensor(1.0), torch.tensor(2.0)]).tolist() == [1, 2]
    assert torch.Tensor([torch.tensor(1.0)]).tolist() == [1]
