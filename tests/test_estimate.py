"""`graphopt estimate`: finds a user's step, predicts it for numbers of ranks, and measures it."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from click.testing import Result
from rich.console import Console
from torch import Tensor
from typer.testing import CliRunner

import graphopt
from gloo import Pool
from graphopt import cli
from graphopt.errors import GraphOptError
from graphopt.estimate.measure import MeasuredVariants, Variant, compared, measure, process_group
from graphopt.estimate.predict import Prediction, captured_for_ranks, network_named, slowdown_of
from graphopt.estimate.tables import measurement_table, prediction_advice, prediction_table
from graphopt.estimate.target import StepCalls, find_step

SCRIPT = """
import graphopt, torch
from torch import nn
from torch.nn import functional as F

model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
optimizer = torch.optim.AdamW(model.parameters(), fused=True)


@graphopt.compile
def train_step(model, optimizer, x, y):
    loss = F.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def make():
    return (model, optimizer), ((torch.randn(4, 8), torch.randn(4, 8)) for _ in range(3))


if __name__ == "__main__":
    for x, y in make()[1]:
        train_step(model, optimizer, x, y)
    print("the script went on")
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train_here.py"
    path.write_text(SCRIPT)
    return path


def invoke(*words: str) -> Result:
    return CliRunner().invoke(cli.app, ["estimate", *words], env={"COLUMNS": "80", "NO_COLOR": "1"})


def test_a_script_is_run_until_it_calls_its_step(script: Path) -> None:
    calls = find_step(str(script))
    assert calls.function.__name__ == "train_step"
    assert len(calls.arguments) == 4
    assert calls.next_batches(2) == [(), ()]


def test_a_named_step_is_called_with_what_make_returns(script: Path) -> None:
    calls = find_step(f"{script}:train_step")
    assert [type(argument).__name__ for argument in calls.arguments] == ["Sequential", "AdamW"]
    batches = calls.next_batches(4)
    assert [x.shape for x, _ in batches] == [(4, 8)] * 4
    assert batches[3] is calls.batches[0]  # they begin anew


@pytest.mark.parametrize(
    ("change", "target", "message"),
    [
        (("", ""), "absent.py", "no such file"),
        (("@graphopt.compile\n", ""), "{}", "called no step that graphopt.compile made"),
        (("", ""), "{}:train", "has no function 'train'"),
        (("def make(", "def made("), "{}:train_step", "has no function 'make'"),
        (("return (model, optimizer), (", "return ("), "{}:train_step", "returned generator"),
        (("range(3)", "range(0)"), "{}:train_step", "returned no batches"),
    ],
)
def test_what_is_missing_is_said(
    script: Path, change: tuple[str, str], target: str, message: str
) -> None:
    script.write_text(SCRIPT.replace(*change).replace("made()[1]", "[]"))
    with pytest.raises(GraphOptError, match=re.escape(message)):
        find_step(target.format(script))


def test_networks_by_name_and_by_rate() -> None:
    assert network_named("nvlink").name == "nvlink"
    slow, fast = network_named("600"), network_named("25gbit")
    assert fast.bytes_per_second == pytest.approx(25_000 / 600 * slow.bytes_per_second)
    for text in ("", "fast", "0", "-3mbit", "600 mb"):
        with pytest.raises(GraphOptError, match="600mbit"):
            network_named(text)


def test_a_prediction_has_a_row_for_each_number_of_ranks(script: Path) -> None:
    result = invoke(str(script), "--network", "600mbit", "--ranks", "2,16")
    assert result.exit_code == 0, result.output
    rows = [line.split() for line in result.output.splitlines() if re.match(r" *\d", line)]
    assert [int(row[0]) for row in rows] == [2, 16]
    for row in rows:
        compute, communication, bound = map(float, row[1:4])
        assert bound == max(compute, communication)
        assert min(map(float, row[4:8])) >= 0.99 * bound


def test_sending_takes_a_share_of_the_cores_that_compute(script: Path) -> None:
    """Of a CPU, the more the faster the link is, and never all."""
    gm = captured_for_ranks(find_step(f"{script}:train_step"))
    shares = [slowdown_of(gm, network_named(name)) for name in ("60", "600", "6gbit", "loopback")]
    assert 0 < shares[0] < shares[1] < shares[2] <= shares[3] == 1
    for node in gm.graph.nodes:
        node.meta["val"] = torch.empty(2, device="meta")
    assert slowdown_of(gm, network_named("600")) == 0


@pytest.mark.parametrize("ranks", ["1", "two", "", "2,,8"])
def test_bad_numbers_of_ranks(script: Path, ranks: str) -> None:
    result = invoke(str(script), "--ranks", ranks)
    assert result.exit_code == 2
    assert "--ranks" in result.output


@pytest.mark.parametrize(
    ("compute", "communication", "ours", "said"),
    [(1.0, 0.01, 1.0, "Not worth it"), (1.0, 1.0, 1.19, "Little to gain"), (1.0, 1.0, 1.0, "0.83")],
)
def test_where_it_is_not_worth_it_the_advice_says_so(
    compute: float, communication: float, ours: float, said: str
) -> None:
    found = Prediction(8, compute, communication, {25.0: 1.5, 1.0: 1.2}, ours, (1, 1))
    assert said in prediction_advice([found])


def trained(value: float = 1.0) -> Variant:
    model = torch.nn.BatchNorm1d(3)
    optimizer = torch.optim.Adam(model.parameters())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return Variant(print, (model, optimizer), [model])


def test_parameters_buffers_and_optimizer_states_are_compared_bit_by_bit() -> None:
    made = {"eager": trained(), "same": trained(), "sign": trained(), "state": trained()}
    made |= {"nan": trained(), "no state": trained()}
    with torch.no_grad():
        made["eager"].model[0].running_mean[1] = 0.0
        made["same"].model[0].running_mean[1] = 0.0
        made["sign"].model[0].running_mean[1] = -0.0
        made["nan"].model[0].weight[0] = float("nan")
    made["state"].arguments[1].state_dict()["state"][0]["exp_avg"][2] += 0.25
    bare = torch.optim.Adam(made["no state"].model[0].parameters())
    made["no state"].arguments = (made["no state"].model[0], bare)
    found = compared(made).differences
    assert found["eager"] == found["same"] == 0
    assert 0 < found["sign"] < 1e-300  # one bit, though both are zero
    assert found["state"] == pytest.approx(0.25)
    assert found["nan"] == found["no state"] == float("inf")


@pytest.mark.parametrize("p", [0.0, 0.5])
def test_all_variants_draw_the_same_numbers(p: float) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(p))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    calls = StepCalls(squared_step, (model, optimizer), ((torch.randn(8, 4),),))
    found = measure(calls, rounds=1, turn=2, inductor=False)
    assert set(found.differences.values()) == {0.0}
    results = [variant.result for variant in found.variants.values()]
    assert all(r is not None and r.item() == results[0].item() != 0 for r in results)


class Layers(torch.nn.Module):
    """A model whose layers are in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(8, 64)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(3))
        self.last = torch.nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x).relu()
        return self.last(x)


def sharded_measurement(rank: int, stage: int, begun: bool) -> dict[str, float]:
    torch.manual_seed(3)
    model = Layers()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if begun:
        model(torch.ones(1, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    batches = tuple((torch.randn(4, 8) * (rank + 1),) for _ in range(3))
    kind = graphopt.ZeRO(stage=stage)
    calls = StepCalls(squared_step, (model, optimizer), batches, parallel=kind)
    return measure(calls, rounds=1, turn=2, inductor=False).differences


@pytest.mark.parametrize("stage", [1, 3])
def test_a_sharded_step_is_compared_with_fsdp2(two_ranks: Pool, stage: int) -> None:
    for found in two_ranks.run(sharded_measurement, stage, False):
        assert found["graphopt, default"] == found["graphopt, auto"] == found["DDP, 1 MB"] == 0
        assert found["FSDP2"] < 1e-4


def test_fsdp2_is_left_out_if_the_optimizer_has_state(two_ranks: Pool) -> None:
    for found in two_ranks.run(sharded_measurement, 1, True):
        assert "FSDP2" not in found and found["graphopt, default"] == 0


def scarce_measurement(rank: int, free: int) -> list[str]:
    """The variants measured with so many bytes free on rank 1, of which each call takes some."""
    left = itertools.count(free if rank == 1 else sys.maxsize, -1_000_000)
    model = Layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    calls = StepCalls(squared_step, (model, optimizer), ((torch.randn(4, 8),),))
    with patch("graphopt.estimate.measure.memory_left", lambda device: next(left)):
        return list(measure(calls, rounds=1, turn=1, inductor=False).variants)


def test_variants_without_which_one_can_do_are_left_out_where_memory_is_scarce(
    two_ranks: Pool,
) -> None:
    wanted = ["compute alone", "DDP, 25 MB", "graphopt, default"]
    for found in two_ranks.run(scarce_measurement, 0):
        assert found == wanted
    for found in two_ranks.run(scarce_measurement, sys.maxsize):
        assert found == [*wanted[:2], "DDP, 4 MB", "DDP, 1 MB", wanted[2], "graphopt, auto"]


def test_the_kind_of_parallelism_is_the_scripts(tmp_path: Path) -> None:
    sharded = SCRIPT.replace("@graphopt.compile", "@graphopt.compile(parallel=graphopt.ZeRO())")
    path = tmp_path / "train_sharded.py"
    path.write_text(sharded)
    for target in (str(path), f"{path}:train_step"):
        assert find_step(target).parallel == graphopt.ZeRO()


def squared_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    loss: Tensor = model(x).square().sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def test_tables_fit_80_columns() -> None:
    """Slow steps of large models too: nothing is cut off or wrapped."""
    names = ["compute alone", "DDP, 25 MB", "DDP, 1 MB", "graphopt, default", "graphopt, Inductor"]
    differences = dict.fromkeys(names, 1.2345e-7)
    variants = {
        name: Variant(print, (), [], [1.234 + n, 1.3 + n, 1.31], 123.4, 40 << 30)
        for n, name in enumerate(names)
    }
    found = MeasuredVariants(variants, "DDP, 25 MB", differences, 8, torch.device("cuda"))
    times = {25.0: 1.234, 4.0: 1.234, 1.0: 1.234}
    prediction = Prediction(1024, 1.234, 1.234, times, 0.00123, (1 << 30, 3 << 40))
    for table, rows in (
        (measurement_table(found), names),
        (prediction_table([prediction], "infiniband"), ["1024"]),
    ):
        console = Console(width=80, no_color=True)
        with console.capture() as captured:
            console.print(table)
        lines = captured.get().splitlines()
        assert len(lines) == 2 + len(rows), lines
        assert all(any(name in line for line in lines) for name in rows)
        assert max(map(len, lines)) <= 80 and "…" not in captured.get()


def test_fewer_gpus_than_ranks_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(GraphOptError, match="torch sees 2"), process_group():
        raise AssertionError("no device may be given out")


def test_one_process_is_measured_against_eager(script: Path) -> None:
    result = invoke(f"{script}:train_step", "--measure", "--no-inductor", "--rounds", "2")
    assert result.exit_code == 0, result.output
    row = next(line for line in result.output.splitlines() if "graphopt, default" in line)
    assert row.split()[-1] == "0"  # no difference to eager


def test_ranks_are_measured_against_ddp(script: Path) -> None:
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    words = ["-m", "graphopt", "estimate", f"{script}:train_step", "--measure", "--no-inductor"]
    root = str(Path(__file__).resolve().parent.parent)
    done = subprocess.run(
        [sys.executable, *launch, *words, "--rounds", "2", "--turn", "1", "--paced", "90mbit"],
        env={**os.environ, "PYTHONPATH": root, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    names = ("compute alone", "DDP, 25 MB", "DDP, 1 MB", "graphopt, default", "graphopt, auto")
    lines = done.stdout.splitlines()
    rows = {name: row for row in lines for name in names if row.startswith(f"{name} ")}
    assert set(rows) == set(names)
    for name in names[2:]:
        assert rows[name].split()[-1] == "0", rows[name]
