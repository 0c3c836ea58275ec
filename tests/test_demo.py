"""`graphopt demo`: its parts, what it prints, its exit code, and that it leaves nothing behind."""

from __future__ import annotations

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
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import typer

from graphopt.demo import main
from graphopt.demo.main import run_demo
from graphopt.demo.model import CharGPT, GPTSize
from graphopt.demo.report import best_ddp, step_table
from graphopt.demo.training import ALPHABET, BATCH, BUCKETS_MB, DemoResults, DemoTask, batches
from graphopt.estimate.pacing import PACING_RATE, pace_connections

TESTS = Path(__file__).resolve().parent
PATH = os.pathsep.join([str(TESTS), str(TESTS.parent)])
SECONDS_TO_END = 30  # a bound on hanging, far above what ending takes on a busy machine


SLEEPING = [sys.executable, "-c", "import test_demo; test_demo.sleeping_demo()"]
"""Runs the demo with ranks that do not train, in a process of its own."""


def sleeping_demo() -> None:
    main.train_rank, main.show_graph_and_passes = sleeps, print
    sys.exit(run_here())


def sleeps(rank: int, task: DemoTask, folder: str, events: Any) -> None:
    if rank == 0:
        events.put("first steps")
    time.sleep(1000)


def dies(rank: int, task: DemoTask, folder: str, events: Any) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(1000)


def raises(rank: int, task: DemoTask, folder: str, events: Any) -> None:
    if rank == 1:
        raise ValueError("this rank will not")
    time.sleep(1000)


def run_here(**changed: Any) -> int:
    """The exit code of a demo whose launcher is this process."""
    request = {"ranks": 2, "rounds": 1, "links": "0", "pipeline": "none", "seed": 0}
    try:
        return run_demo(**(request | changed))
    except typer.Exit as exit_:
        return exit_.exit_code


def ranks_of(launcher: int) -> list[Path]:
    """The /proc folders of the ranks that a demo has started; multiprocessing has a helper too."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            command = (folder / "cmdline").read_bytes()
        except OSError:
            continue
        if int(fields[1]) == launcher and b"spawn_main" in command and fields[0] != "Z":
            found.append(folder)
    return sorted(found, key=lambda folder: int(folder.name))


def wait_until_gone(ranks: list[Path]) -> None:
    deadline = time.monotonic() + SECONDS_TO_END
    while any((rank / "cmdline").exists() and (rank / "cmdline").read_bytes() for rank in ranks):
        assert time.monotonic() < deadline, f"left behind: {ranks}"
        time.sleep(0.1)


@contextmanager
def training_demo() -> Iterator[tuple[subprocess.Popen[str], list[Path]]]:
    """A demo whose ranks would go on for long, and these."""
    process = subprocess.Popen(
        SLEEPING,
        env=os.environ | {"PYTHONPATH": PATH},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    ranks: list[Path] = []
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("first steps"):
                break
        else:
            pytest.fail(f"ended before it trained: {process.communicate()[1]}")
        ranks = ranks_of(process.pid)
        assert len(ranks) == 2
        yield process, ranks
    finally:
        process.kill()
        process.communicate()
        wait_until_gone(ranks)


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


def test_one_rank_is_compared_with_eager_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_here(ranks=1) == 0
    said = capsys.readouterr().out
    assert "/ eager" in said and "Bit for bit the same" in said


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


@pytest.mark.parametrize(("what", "said"), [(dies, "SIGKILL"), (raises, "this rank will not")])
def test_a_rank_that_fails_is_named_and_takes_the_others_with_it(
    what: Any, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(main, "train_rank", what)
    monkeypatch.setattr(main, "show_graph_and_passes", lambda console: None)
    before = signal.getsignal(signal.SIGTERM)
    assert run_here() == 1
    errors = capsys.readouterr().err
    assert "rank 1 failed" in errors and said in errors
    assert not ranks_of(os.getpid())
    assert signal.getsignal(signal.SIGTERM) is before


def test_termination_is_passed_on() -> None:
    with training_demo() as (process, ranks):
        process.terminate()
        _, errors = process.communicate(timeout=SECONDS_TO_END)
        assert process.returncode == 128 + signal.SIGTERM
        assert errors.strip() == "graphopt demo: stopped by SIGTERM; no rank is left"
        wait_until_gone(ranks)


def test_ranks_end_when_their_launcher_is_killed() -> None:
    with training_demo() as (process, ranks):
        process.kill()
        process.communicate()
        wait_until_gone(ranks)


@pytest.mark.skipif(shutil.which("setsid") is None, reason="needs setsid (util-linux)")
def test_control_c_at_a_terminal() -> None:
    terminal, side = pty.openpty()
    process = subprocess.Popen(
        ["setsid", "--ctty", *SLEEPING],
        stdin=side,
        stdout=side,
        stderr=side,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "120", "PYTHONPATH": PATH},
    )
    os.close(side)
    ranks: list[Path] = []
    try:
        shown = read_until(terminal, b"first steps")
        ranks = ranks_of(process.pid)
        os.write(terminal, b"\x03")
        shown = read_until(terminal, b"no rank is left")
        assert process.wait(SECONDS_TO_END) == 128 + signal.SIGINT
        assert b"stopped by SIGINT" in shown
        assert b"Traceback" not in shown
    finally:
        os.close(terminal)
        process.kill()
        process.wait()
        wait_until_gone(ranks)


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
    ],
)
def test_what_cannot_be_met_is_said(
    options: dict[str, Any], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_here(**options) == 2
    assert message in capsys.readouterr().err


def test_targets_are_the_next_tokens() -> None:
    inputs, targets = next(batches(0, 0))
    assert inputs.shape == targets.shape == (BATCH, GPTSize.length)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    strides = (targets - inputs) % ALPHABET
    assert torch.equal(strides, strides[:, :1].expand_as(strides))
    assert len(strides[:, 0].unique()) > 3


def test_model_has_millions_of_parameters_and_ties_its_embeddings() -> None:
    model = CharGPT(GPTSize(ALPHABET))
    assert 3e6 < sum(parameter.numel() for parameter in model.parameters()) < 6e6
    assert model.head.weight is model.tokens.weight


def test_the_best_ddp_is_of_each_link() -> None:
    names = ("compute alone", *(f"DDP, {size:g} MB" for size in BUCKETS_MB), "graphopt")
    seconds = {
        0.0: dict(zip(names, [[1.0], [4.0], [6.0], [7.0], [3.0]], strict=True)),
        1.0: dict(zip(names, [[1.0], [9.0], [5.0], [7.0], [4.0]], strict=True)),
    }
    numbers = dict.fromkeys(names, 0.0)
    results = DemoResults(seconds, numbers, dict.fromkeys(names, 0), numbers, numbers)
    assert [best_ddp(of_link) for of_link in seconds.values()] == ["DDP, 25 MB", "DDP, 1 MB"]
    cells = [list(column.cells) for column in step_table(results).columns]
    assert cells[-2:] == [["0.75", "0.80"], ["0.75", "0.44"]]
    alone = {0.0: {"eager": [2.0], "graphopt": [1.0]}}
    numbers = {"eager": 0.0, "graphopt": 0.0}
    table = step_table(replace(results, seconds=alone, first_call=numbers))
    assert list(table.columns[-1].cells) == ["0.50"]
