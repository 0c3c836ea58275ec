"""Targets and graphs for which there are no Triton kernels, and what is said of them."""

from __future__ import annotations

import re
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

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
