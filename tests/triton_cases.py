"""What the tests of Triton kernels share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from graphopt.lowering.triton_kernels import TritonKernel, lower_to_triton

ELF = b"\x7fELF"


def traced(fn: Callable[..., Any], *inputs: Tensor) -> fx.GraphModule:
    return make_fx(fn, tracing_mode="fake")(*inputs)


def kernels_of(
    fn: Callable[..., Any], *inputs: Tensor, target: str = "cuda:90"
) -> list[TritonKernel]:
    """The kernels of a function, of which every operator must have become part of one."""
    report = lower_to_triton(traced(fn, *inputs), target)
    assert report.failures == []
    assert not report.externs
    check(report.kernels)
    return report.kernels


def check(kernels: list[TritonKernel]) -> None:
    assert kernels
    for kernel in kernels:
        assert kernel.cubin.startswith(ELF)
        assert f".entry {kernel.name}(" in kernel.ptx
        assert f"def {kernel.name}(" in kernel.source
        assert 0 < kernel.registers <= 255
        assert kernel.shared_bytes >= 0 and kernel.spills >= 0
