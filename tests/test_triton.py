"""Graphs of CPU tensors become Triton kernels, PTX and cubins, without a GPU."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

import graphopt
import zoo
from graphopt._compat import triton_binaries
from graphopt.lowering.triton_kernels import TritonKernel, compile_triton, lower_to_triton
from triton_cases import check, kernels_of, traced

PHILOX = str(0xD2511F53 - 2**32)
"""What the generator multiplies by, as the assembly has it."""
LIBRARIES = {"mm", "bmm", "addmm"}


@pytest.fixture(autouse=True, scope="module")
def _nothing_compiled_before(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        yield


def test_pointwise() -> None:
    (kernel,) = kernels_of(lambda x, y: F.gelu(x + y) * 2, torch.randn(64, 48), torch.randn(48))
    assert kernel.name == "triton_poi_fused_add_gelu_mul_0"
    assert ".target sm_90a" in kernel.ptx
    assert kernel.shared_bytes == kernel.spills == 0
    assert kernel.regions == (0,)


def test_reduction_takes_shared_memory() -> None:
    kernels = kernels_of(lambda x: x.exp().sum(), torch.randn(1000, 1000))
    assert all("tl.sum" in kernel.source for kernel in kernels)
    assert any(kernel.shared_bytes > 0 for kernel in kernels)


def test_softmax_is_one_kernel() -> None:
    assert len(kernels_of(lambda x: torch.softmax(x, -1), torch.randn(64, 48))) == 1


def test_layer_norm_and_its_backward() -> None:
    def step(x: Tensor, weight: Tensor, bias: Tensor) -> list[Tensor]:
        out, mean, rstd = torch.ops.aten.native_layer_norm(x, [48], weight, bias, 1e-5)
        backward = torch.ops.aten.native_layer_norm_backward
        mask = [True, True, True]
        return [out, *backward(out.cos(), x, [48], mean, rstd, weight, bias, mask)]

    kernels_of(step, torch.randn(64, 48), torch.randn(48), torch.randn(48))


def test_embedding_backward_adds_atomically() -> None:
    def backward(gradient: Tensor, tokens: Tensor) -> Tensor:
        return torch.ops.aten.embedding_dense_backward(gradient, tokens, 100, -1, False)

    kernels = kernels_of(backward, torch.randn(64, 48), torch.randint(100, (64,)))
    assert any("tl.atomic_add" in kernel.source for kernel in kernels)
    assert any(re.search(r"\b(red|atom)\.", kernel.ptx) for kernel in kernels)


def test_dropout_draws_in_the_kernel() -> None:
    def dropout(x: Tensor) -> tuple[Tensor, Tensor]:
        out, mask = torch.ops.aten.native_dropout(x, 0.1, True)
        return out, mask

    report = lower_to_triton(traced(dropout, torch.randn(64, 48)))
    check(report.kernels)
    assert any("load_seed_offset" in kernel.source for kernel in report.kernels)
    assert any(PHILOX in kernel.ptx for kernel in report.kernels)
    # The seed is drawn by torch, everything else by the kernel.
    assert list(report.externs) == ["aten.randint.low_out"]


@pytest.mark.parametrize(
    ("dtype", "name"), [(torch.float32, "fp32"), (torch.bfloat16, "bf16"), (torch.int64, "i64")]
)
def test_dtypes(dtype: torch.dtype, name: str) -> None:
    (kernel,) = kernels_of(lambda x: (x * 2 + 1).amax(-1), torch.ones(64, 48, dtype=dtype))
    assert f"'in_ptr0': '*{name}'" in kernel.source


def test_more_elements_than_32_bits_can_count() -> None:
    def of_size(size: int) -> TritonKernel:
        with FakeTensorMode():
            module = make_fx(lambda x: x + 1)(torch.empty(size, dtype=torch.int8))
        (kernel,) = compile_triton(module)
        return kernel

    assert "'xnumel': 'i64'" in of_size(2**31 + 16).source
    assert "'xnumel': 'i32'" in of_size(2**20).source


def test_indexing_and_writing_parts() -> None:
    """What these call asks for the CUDA device in a torch that was built without it."""

    def parts(x: Tensor, rows: Tensor) -> list[Tensor]:
        written = x.clone()
        written[rows] = 1.0
        return [x[1:3, ::2], x[..., None, 0], x[rows], ~(x > 0), x.t().contiguous() + 1, written]

    check(compile_triton(traced(parts, torch.randn(64, 48), torch.randint(64, (8,)))))


def test_views_of_decomposed_operators() -> None:
    """Inductor's `cat` of one tensor that is not empty keeps strides, where eager's does not."""

    def keys(past: Tensor, new: Tensor) -> Tensor:
        joined = torch.cat([past, new.transpose(1, 2)], -2).transpose(-2, -1) * 0.5
        return torch.ops.aten.view(joined, [8, 32, 128])

    kernels_of(keys, torch.randn(0), torch.randn(2, 128, 3, 4, 32)[:, :, 1])


def test_constants_of_a_graph() -> None:
    graph_of = fx.Graph()
    x = graph_of.placeholder("x")
    x.meta["val"] = torch.empty(64, 48, device="meta")
    constant = graph_of.get_attr("constant")
    graph_of.output(graph_of.call_function(torch.ops.aten.add.Tensor, (x, constant)))
    (kernel,) = compile_triton(fx.GraphModule({"constant": torch.arange(48.0)}, graph_of))
    assert "tl.load(in_ptr1 + (x0)" in kernel.source


def test_the_graph_stays_as_it_is() -> None:
    module = traced(lambda x: torch.softmax(x, -1) + torch.ones(48), torch.randn(64, 48))
    code, metas = module.code, [dict(node.meta) for node in module.graph.nodes]
    compile_triton(module)
    assert module.code == code
    for node, meta in zip(module.graph.nodes, metas, strict=True):
        assert node.meta.keys() == meta.keys()
        assert node.meta.get("val") is meta.get("val")


def test_libraries_are_counted() -> None:
    def model(x: Tensor, w: Tensor, image: Tensor, kernel: Tensor) -> list[Tensor]:
        return [torch.relu(x @ w @ w), F.conv2d(image, kernel).relu()]

    shapes = ((64, 48), (48, 48), (1, 3, 9, 9), (4, 3, 3, 3))
    report = lower_to_triton(traced(model, *map(torch.randn, shapes)))
    check(report.kernels)
    assert report.externs == {"mm": 2, "convolution": 1}


def test_nothing_to_run() -> None:
    assert compile_triton(traced(lambda x: x.t(), torch.randn(3, 4))) == []


def test_names_and_binaries_are_the_same_each_time(monkeypatch: Any, tmp_path: Path) -> None:
    module = traced(lambda x: [torch.softmax(x, -1), x.sum(0)], torch.randn(64, 48))
    first = compile_triton(module)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    assert compile_triton(module) == first
    assert len({kernel.name for kernel in first}) == len(first)


def test_figures_are_those_of_the_cubin() -> None:
    """Triton drops what the assembler says, so it is run once more: with the same result."""
    for kernel in kernels_of(lambda x: torch.softmax(x, -1).sum(0), torch.randn(64, 48)):
        # Whether products and sums are fused is Inductor's choice, which differs with the version.
        said = [triton_binaries.usage(kernel.ptx, 90, fuse=fuse) for fuse in (True, False)]
        (usage, *_) = (usage for usage, cubin in said if cubin == kernel.cubin)
        assert (usage.registers, usage.spills) == (kernel.registers, kernel.spills)


def test_spills_are_reported() -> None:
    ptx = """
        .version 8.0
        .target sm_90a
        .address_size 64
        .visible .entry spilling(.param .u64 data) .maxntid 1024 .minnctapersm 2 {
        .reg .f32 %f<200>; .reg .u64 %a;
        ld.param.u64 %a, [data];
    """
    ptx += "\n".join(f"ld.volatile.global.f32 %f{i}, [%a+{4 * i}];" for i in range(150))
    ptx += "\n".join(f"st.volatile.global.f32 [%a+{4 * i}], %f{i};" for i in reversed(range(150)))
    usage, _ = triton_binaries.usage(ptx + "\nret;\n}\n", 90, fuse=True)
    assert usage.registers == 32
    assert usage.spills >= 2 * 4 * (150 - 32)


# ---------------------------------------------------------------------------- captured steps


def captured(model: str, optimizer: str) -> fx.GraphModule:
    case = zoo.MODELS[model]
    module = case.make()
    step = graphopt.capture(
        zoo.train_step, module, zoo.OPTIMIZERS[optimizer](module.parameters()), *case.batch(0)
    )
    return step.graph_module


@pytest.mark.full
def test_every_region_of_a_training_step_compiles() -> None:
    """Forward, loss, backward and AdamW of a GPT."""
    step = captured("gpt", "adamw-loop")
    before = [dict(node.meta) for node in step.graph.nodes]
    report = lower_to_triton(step)
    assert report.failures == []
    check(report.kernels)
    launching = {region for kernel in report.kernels for region in kernel.regions}
    assert launching == set(range(report.regions)) and report.regions >= 1
    assert {"mm"} <= report.externs.keys() <= LIBRARIES
    assert any("layer_norm_backward" in kernel.name for kernel in report.kernels)
    assert [node.meta.keys() for node in step.graph.nodes] == [meta.keys() for meta in before]


def test_regions_that_are_alike_are_compiled_once() -> None:
    """Two halves with a draw of random numbers between them, which stays outside."""

    def halves(x: Tensor) -> Tensor:
        for _ in range(2):
            x = torch.ops.aten.bernoulli.p(torch.softmax(x.sin().cos(), -1), 0.5)
        return x

    module = traced(halves, torch.randn(64, 48))
    with_output = module.graph.output_node()
    with_output.args = (([with_output.args[0]], [], []),)
    module.recompile()
    report = lower_to_triton(module, min_ops=2)
    assert report.regions == 2
    assert [kernel.regions for kernel in report.kernels] == [(0, 1)]
    assert lower_to_triton(module, min_ops=10).regions == 0


def test_an_iter_graph_module() -> None:
    step = graphopt.IterGraphModule(captured("mlp", "sgd-loop"))
    check(compile_triton(step, min_ops=3))


def test_the_document_is_right(capsys: pytest.CaptureFixture[str]) -> None:
    text = (Path(__file__).resolve().parent.parent / "docs/without_a_gpu.md").read_text()
    *_, block = re.findall(r"^```python\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    exec(compile(block, "docs/without_a_gpu.md", "exec"), {})
    assert "layer_norm" in capsys.readouterr().out
