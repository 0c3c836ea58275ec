"""`graphopt demo`: its parts, what it prints, its exit code, and that it leaves nothing behind."""

from __future__ import annotations

import gc
import os
import pty
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from graphopt.demo.compare import compare
from graphopt.demo.launch import Event, RankFailedError, run_ranks
from graphopt.demo.main import run_demo
from graphopt.demo.model import CharGPT, GPTSize
from graphopt.demo.pacing import PACING_RATE, pace_connections
from graphopt.demo.replica import ALPHABET, BATCH, DEFAULT_DDP, VARIANTS, Batches, RandomState
from graphopt.demo.report import Results, difference_text

REPOSITORY = Path(__file__).resolve().parent.parent


SECONDS_TO_END = 30  # a bound on hanging, far above what ending takes on a busy machine


def demo_command(*options: str) -> list[str]:
    return [sys.executable, "-m", "graphopt", "demo", *options]


def run_here(**changed: Any) -> int:
    """The exit code of a demo whose launcher is this process."""
    request = {"ranks": 2, "rounds": 1, "links": "0", "pipeline": "none", "seed": 0}
    return run_demo(**(request | changed))


def ranks_of(launcher: int) -> dict[int, int]:
    """Rank to process id of the living ranks of a demo, whoever their parent now is."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            variables = (folder / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"GRAPHOPT_LAUNCHER=%d" % launcher in variables:
            rank = next(v for v in variables if v.startswith(b"RANK="))
            found[int(rank[5:])] = int(folder.name)
    return found


def children_of(parent: int) -> list[Path]:
    """The /proc folders of its direct children."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == parent:
            found.append(folder)
    return found


def wait_until_gone(launcher: int) -> None:
    deadline = time.monotonic() + SECONDS_TO_END
    while ranks_of(launcher):
        assert time.monotonic() < deadline, f"left behind: {ranks_of(launcher)}"
        time.sleep(0.1)


@contextmanager
def training_demo(*options: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """A demo that has begun to train and would go on for long."""
    process = subprocess.Popen(
        demo_command("--ranks", "2", "--rounds", "100000", *options),
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("first steps"):
                break
        else:
            pytest.fail(f"ended before it trained: {process.communicate()[1]}")
        yield process
    finally:
        process.kill()
        process.communicate()
        wait_until_gone(process.pid)


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
@pytest.mark.usefixtures("unclosed_logs")
def test_it_shows_a_graph_a_refusal_and_what_the_graph_gains(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run_here(pipeline="default", links="0,0.5") == 0
    said = capsys.readouterr().out
    assert "optimizer.step()" in said  # the user's source line beside a node
    assert "pass 'wait_at_the_end' was refused" in said
    assert re.search(r"^wait_before_first_reader: \d changes", said, re.MULTILINE)
    rows = [
        line for line in said.splitlines() if re.search(r"^(loopback|link 0.5 x compute) +\d", line)
    ]
    assert len(rows) == 2
    assert re.search(r"largest difference\W+0\W*\n", said)
    assert "Bit for bit the same" in said


def test_both_ends_of_a_connection_are_paced() -> None:
    """The kernel holds what is sent to the rate that each socket says."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        sender = socket.create_connection(server.getsockname())
        receiver, _ = server.accept()
        with sender, receiver:
            unpaced = [end.getsockopt(socket.SOL_SOCKET, PACING_RATE) for end in (sender, receiver)]
            assert pace_connections(4_000_000) >= 2
            for end in (sender, receiver):
                assert end.getsockopt(socket.SOL_SOCKET, PACING_RATE) == 4_000_000
            assert pace_connections(None) >= 2
            again = [end.getsockopt(socket.SOL_SOCKET, PACING_RATE) for end in (sender, receiver)]
            assert again == unpaced


@pytest.mark.full
def test_a_killed_rank_is_named_and_takes_the_others_with_it() -> None:
    with training_demo() as process:
        os.kill(ranks_of(process.pid)[1], signal.SIGKILL)
        _, errors = process.communicate(timeout=SECONDS_TO_END)
        assert process.returncode == 1
        assert "rank 1 was killed by SIGKILL" in errors
        assert "Traceback" not in errors
        assert not ranks_of(process.pid)


def test_termination_is_passed_on() -> None:
    with training_demo() as process:
        children = children_of(process.pid)
        assert len(children) == 2
        process.terminate()
        _, errors = process.communicate(timeout=SECONDS_TO_END)
        assert process.returncode == 128 + signal.SIGTERM
        assert errors.strip() == "graphopt demo: stopped by SIGTERM; no rank is left"
        assert not [child for child in children if child.exists()]


@pytest.mark.full
def test_ranks_end_when_their_launcher_is_killed(tmp_path: Path) -> None:
    with training_demo(TMPDIR=str(tmp_path)) as process:
        ranks = ranks_of(process.pid)
        assert set(ranks) == {0, 1}
        process.kill()
        process.communicate()
        wait_until_gone(process.pid)


@pytest.mark.full
@pytest.mark.skipif(shutil.which("setsid") is None, reason="needs setsid (util-linux)")
def test_control_c_at_a_terminal() -> None:
    terminal, side = pty.openpty()
    process = subprocess.Popen(
        ["setsid", "--ctty", *demo_command("--ranks", "2", "--rounds", "100000")],
        stdin=side,
        stdout=side,
        stderr=side,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "120"},
    )
    os.close(side)
    try:
        shown = read_until(terminal, b"capturing")
        assert b"\x1b[?25l" in shown  # the progress bar has hidden the cursor
        os.write(terminal, b"\x03")
        shown = read_until(terminal, b"no rank is left")
        assert process.wait(SECONDS_TO_END) == 128 + signal.SIGINT
        assert b"stopped by SIGINT" in shown
        assert b"\x1b[?25h" in shown  # and shows it again
        assert b"Traceback" not in shown
        assert not ranks_of(process.pid)
    finally:
        os.close(terminal)
        process.kill()
        process.wait()
        wait_until_gone(process.pid)


def read_until(terminal: int, text: bytes) -> bytes:
    shown = b""
    while text not in shown:
        shown += os.read(terminal, 4096)
    return shown


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"links": "fast"}, "--links 'fast'"),
        ({"links": "1,-1"}, "numbers from 0 to 100"),
        ({"links": "1,1"}, "different numbers"),
        ({"pipeline": "no_such_pass"}, "no_such_pass"),
        ({"rounds": 0}, "--rounds must be at least 1"),
    ],
)
def test_what_cannot_be_met_is_said(
    options: dict[str, Any], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_here(**options) == 2
    assert message in capsys.readouterr().err


RAISING_SCRIPT = """
import time
from torch.distributed.elastic.multiprocessing.errors import record
from graphopt.demo.launch import Reporter
import sys, pathlib

@record
def main():
    reporter = Reporter(pathlib.Path(sys.argv[1]))
    reporter.send("started", ranks=reporter.ranks)
    if reporter.rank == 1:
        raise ValueError("this rank will not")
    time.sleep(1000)

main()
"""


# torch closes the log of a rank only if it had to end that rank.
@pytest.fixture
def unclosed_logs() -> Iterator[None]:
    yield
    gc.collect()


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
@pytest.mark.usefixtures("unclosed_logs")
def test_an_exception_on_a_rank_reaches_the_launcher(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(RAISING_SCRIPT)
    folder = tmp_path / "run"
    folder.mkdir()
    events: list[tuple[int, Event]] = []
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(RankFailedError) as failure:
        run_ranks(
            [str(script)],
            2,
            folder,
            lambda rank, event: events.append((rank, event)),
            environment={"PYTHONPATH": str(REPOSITORY)},
        )
    assert str(failure.value).startswith("rank 1 failed: ValueError: this rank will not\n")
    assert 'raise ValueError("this rank will not")' in str(failure.value)
    assert (1, {"kind": "started", "ranks": 2}) in events
    assert signal.getsignal(signal.SIGINT) is before
    assert not ranks_of(os.getpid())


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
@pytest.mark.usefixtures("unclosed_logs")
def test_an_exit_code_shows_what_was_printed_last(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import sys\nsys.exit('cannot go on')\n")
    with pytest.raises(RankFailedError, match="exit code 1\n  cannot go on"):
        run_ranks([str(script)], 1, tmp_path, lambda rank, event: None)


ABORTING_SCRIPT = """
import os, sys
from torch.distributed.elastic.multiprocessing.errors import record

def in_the_middle(): os.abort()

@record
def main():
    print("so far", file=sys.stderr, flush=True)
    in_the_middle()

main()
"""


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
@pytest.mark.usefixtures("unclosed_logs")
def test_an_abort_shows_what_was_said_and_where_the_rank_was(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(ABORTING_SCRIPT)
    with pytest.raises(RankFailedError, match="rank 0 was killed by SIGABRT") as failure:
        run_ranks([str(script)], 1, tmp_path, lambda rank, event: None)
    told = str(failure.value)
    assert told.index("so far") < told.index("Fatal Python error: Aborted")
    assert "in in_the_middle" in told and "Extension modules" not in told


def trained(value: float = 1.0) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.BatchNorm1d(3)
    optimizer = torch.optim.Adam(model.parameters())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return model, optimizer


def test_compare_counts_parameters_buffers_and_optimizer_state() -> None:
    result = compare(trained(), trained())
    assert (result.tensors, result.differing, result.largest) == (2 + 3 + 6, (), 0.0)


def test_compare_sees_one_bit() -> None:
    one, other = trained(), trained()
    with torch.no_grad():
        other[0].running_mean[1] = -0.0
    result = compare(one, other)
    assert result.differing == ("running_mean",)
    assert result.largest == 0.0
    other[1].state_dict()["state"][0]["exp_avg"][2] += 0.25
    result = compare(one, other)
    assert result.differing == ("running_mean", "optimizer state 0.exp_avg")
    assert result.largest == pytest.approx(0.25)


def test_compare_calls_the_incomparable_infinitely_different() -> None:
    one, other = trained(), trained()
    with torch.no_grad():
        other[0].weight[0] = float("nan")
    assert compare(one, other).largest == float("inf")
    assert compare(one, (one[0], torch.optim.Adam(one[0].parameters()))).largest == float("inf")


def test_replicas_with_one_seed_draw_the_same_numbers() -> None:
    one, other = (RandomState(7) for _ in range(2))
    drawn: dict[RandomState, list[float]] = {one: [], other: []}
    for state in (one, other, other, one):
        state.restore()
        drawn[state].append(torch.rand(()).item())
        state.save()
    assert drawn[one] == drawn[other]
    assert drawn[one][0] != drawn[one][1]


def test_targets_are_the_next_tokens() -> None:
    inputs, targets = Batches(0, 0).next()
    assert inputs.shape == targets.shape == (BATCH, GPTSize.length)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    strides = (targets - inputs) % ALPHABET
    assert torch.equal(strides, strides[:, :1].expand_as(strides))
    assert len(strides[:, 0].unique()) > 3


def test_model_has_millions_of_parameters_and_ties_its_embeddings() -> None:
    model = CharGPT(GPTSize(ALPHABET))
    assert 3e6 < sum(parameter.numel() for parameter in model.parameters()) < 6e6
    assert model.head.weight is model.tokens.weight


def turn(link: float, seconds: list[float]) -> dict[str, Any]:
    return {
        "kind": "turn",
        "link": link,
        "seconds": dict(zip(VARIANTS, seconds, strict=True)),
        "losses": dict.fromkeys(VARIANTS, 1.0),
    }


def test_the_slowest_rank_counts_and_the_best_ddp_is_of_each_link() -> None:
    results = Results()
    for rank, slower in ((0, 0.0), (1, 1.0)):
        results.record(rank, turn(0, [1, 4 + slower, 6, 7, 3]))
        results.record(rank, turn(1, [1, 9, 4 + slower, 7, 4]))
    assert results.links == [0, 1]
    assert results.seconds(DEFAULT_DDP, 0) == [5.0]
    assert [results.best_ddp(link) for link in (0, 1)] == [DEFAULT_DDP, "DDP, 1 MB"]
    assert results.ratios(DEFAULT_DDP, 0) == [3 / 5]
    assert results.ratios(results.best_ddp(1), 1) == [4 / 5]


def test_a_difference_is_said() -> None:
    results = Results()
    results.record(0, {"kind": "compared", "tensors": 5, "differing": [], "largest": 0.0})
    assert "Bit for bit the same: 5 tensors" in difference_text(results)
    results.record(1, {"kind": "compared", "tensors": 5, "differing": ["w"], "largest": 0.5})
    assert results.largest_difference == 0.5
    assert "Different: 1 of 10 tensors" in difference_text(results)
    assert "w (rank 1)" in difference_text(results)
