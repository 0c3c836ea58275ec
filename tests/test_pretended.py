"""`graphopt.testing.pretended`: CUDA and ranks that are not there."""

from __future__ import annotations

import importlib
import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

import gpu_steps
import planned_steps
from graphopt.errors import PretendError
from graphopt.graph_utils import is_operator
from graphopt.saved import load_graph
from graphopt.testing import pretended

REPOSITORY = Path(__file__).resolve().parent.parent
PAGE, BENCHMARKS = REPOSITORY / "docs" / "without_a_gpu.md", REPOSITORY / "benchmarks"

pytestmark = pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """What one process has found."""
    with_kernels = importlib.util.find_spec("triton") is not None
    return pretended("cuda:90").run(gpu_steps.everything, with_kernels)  # type: ignore[no-any-return]


def test_a_compiled_step_runs(found: dict[str, Any]) -> None:
    device, captures, operators = found["compiled"]
    assert (device, captures) == ("cuda:0", 1)
    for kind in ("", "_backward"):
        assert operators[f"aten::_scaled_dot_product_flash_attention{kind}"] == 1
        assert operators[f"aten::native_dropout{kind}"] == 1
    assert operators["aten::_fused_adamw"] == 1


def test_statistics_of_cudnn(found: dict[str, Any]) -> None:
    """They are values of the graph, which a reader after the forward gets."""
    assert found["normalized"] == (0, ["graphopt_inplace.cudnn_batch_norm.default"])


def test_gradients_are_added_in_the_order_of_eager(found: dict[str, Any]) -> None:
    """The thread of the device records a double backward, and counts on its own."""
    eager, ours = found["double_backward"]
    assert eager == ours and len(eager) > 8


def test_recurrent_layers_of_cudnn(found: dict[str, Any]) -> None:
    said = found["recurrent"]
    assert "(lstm) by cuDNN" in said and "cudnn.flags(enabled=False)" in said
    assert "gpu_steps.py" in said


def test_ranks() -> None:
    world, before, after, passes = pretended("cuda:90", ranks=64).run(
        gpu_steps.among_ranks, verify="equivalence"
    )
    launch = "_c10d_functional::all_reduce"
    assert world == 64 and passes > 3
    assert before[launch] == 4 and 1 <= after[launch] <= 4
    assert after["aten::_fused_adamw"] >= 1


def test_machine_code(found: dict[str, Any]) -> None:
    pytest.importorskip("triton")
    assert found["kernels"] > 2


@pytest.mark.full  # the page about it has a script as well
def test_a_script_and_what_it_saves(tmp_path: Path) -> None:
    script, saved = tmp_path / "prepare.py", tmp_path / "step.pt"
    script.write_text(
        f"import sys\nsys.path.insert(0, {str(Path(__file__).parent)!r})\nimport gpu_steps\n"
        'if __name__ == "__main__":\n    gpu_steps.save(sys.argv[1])\n'
    )
    pretended("cuda:80").script(script, str(saved))
    command = [sys.executable, "-m", "graphopt", "show", str(saved)]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "_fused_adamw" in shown and "flash_attention" in shown


def test_the_page_about_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/without_a_gpu.md: its script is run as it says."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (tmp_path / "prepare.py").write_text(blocks[0])
    monkeypatch.chdir(tmp_path)
    exec(blocks[1], {})
    graph = load_graph(tmp_path / "step.pt").graph
    sent = [
        node for node in graph.nodes if is_operator(node.target, "_c10d_functional::all_reduce")
    ]
    assert len(sent) == 4 and str(sent[0].meta["val"].device) == "cuda:0"


def test_what_a_function_raises() -> None:
    with pytest.raises(ZeroDivisionError, match="on purpose") as caught:
        pretended("cuda:90").run(gpu_steps.raises)
    assert "gpu_steps.py" in str(caught.value.__cause__)


@pytest.mark.full
def test_a_result_that_cannot_leave_its_process() -> None:
    with pytest.raises(PretendError, match="return numbers or text"):
        pretended("cuda:90").run(gpu_steps.gives_a_tensor)


@pytest.mark.full
def test_a_process_that_ends() -> None:
    with pytest.raises(PretendError, match="ended with 3"):
        pretended("cuda:90").run(gpu_steps.ends)


@pytest.mark.parametrize("device", ["cpu", "cuda", "cuda:0", "rocm:90", ""])
def test_devices_that_nobody_can_pretend(device: str) -> None:
    with pytest.raises(PretendError, match="compute capability"):
        pretended(device)


def test_no_rank() -> None:
    with pytest.raises(PretendError, match="at least one"):
        pretended("cuda:90", ranks=0)


@pytest.mark.parametrize("compiler", ["no-such-compiler", "false"])
def test_no_compiler(compiler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", compiler)
    if compiler != "false":
        monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(PretendError, match="CXX"):
        pretended("cuda:90").run(gpu_steps.ends)
    assert not list(tmp_path.rglob("*.so"))


CASES = (
    "adversarial.dcgan", "adversarial.diffusion_with_ema", "adversarial.vae", "adversarial.wgan_gp",
    "language.direct_preference", "language.distillation",
    "language.gradient_accumulation", "language.lora", "language.nanogpt",
    "optimizers.adam_fused", "optimizers.muon", "representation.byol", "representation.clip",
    "styles.gradient_checkpointing", "vision.masked_autoencoder", "vision.mean_teacher",
    "vision.resnet_with_schedule", "vision.vision_transformer",
)  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("part", range(2))
def test_published_loops(part: int, seed: int) -> None:
    """Half of them, which the seed chooses, forward to machine code; five in one process."""
    pytest.importorskip("transformers")
    pytest.importorskip("triton")
    names = Random(seed).sample(CASES, 10)[5 * part :][:5]
    found = pretended("cuda:90").run(gpu_steps.coverage, names)
    assert list(found) == names
    assert not {n: f for n, f in found.items() if f[0] <= 50 or f[1] <= 2}


@pytest.mark.parametrize("stage", [1, 3])
def test_the_default_pipeline_makes_a_sharded_step_faster(stage: int, tmp_path: Path) -> None:
    """Proven on the way; and its file can be shown by a process that has captured nothing."""
    path = str(tmp_path / "step.pt")
    found = pretended("cuda:90", ranks=64).run(planned_steps.planned, stage, path)
    before, after = found["seconds"]
    assert after < before
    before, after = found["collectives"]
    assert after < 0.6 * before
    command = [sys.executable, "-m", "graphopt", "show", path]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "reduce_scatter_tensor_coalesced" in shown and "_fused_adamw" in shown


def test_the_benchmark_shows_a_plan_that_inductor_does_not_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of stage 1 there are two rows; the seconds that Inductor may take are no row."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    benchmark = importlib.import_module("plan_llama")
    names = ("seconds", "compute", "communication", "bound", "peak", "collectives")
    figures = dict.fromkeys(names, 1)
    found = {"nodes": 9, "seconds": {"capture": 0.5}, "given": figures, "default": figures}
    ranks = SimpleNamespace(run=lambda planned, options: found)
    monkeypatch.setattr(benchmark, "pretended", lambda *device, **options: ranks)
    options = SimpleNamespace(ranks=[64], stages=[1], layers=1, batch=1, length=8)
    options.no_checkpoints, options.inductor = False, 120.0
    (row,) = benchmark.planned_rows(options)
    assert benchmark.table(row).row_count == 2
