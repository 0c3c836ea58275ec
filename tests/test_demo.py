"""`graphopt demo`: what it prints, its exit code, and that it leaves nothing behind."""

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

from graphopt.demo import DemoError
from graphopt.demo.launch import Event, RankFailedError, run_ranks
from graphopt.demo.link import SlowLink, parse_rate, set_rate
from graphopt.demo.main import run_demo

REPOSITORY = Path(__file__).resolve().parent.parent
SECONDS_TO_END = 30  # a bound on hanging, far above what ending takes on a busy machine


def demo_command(*options: str) -> list[str]:
    return [sys.executable, "-m", "graphopt", "demo", *options]


def run_here(**changed: Any) -> int:
    """The exit code of a demo whose launcher is this process."""
    request = {
        "ranks": 2,
        "steps": 2,
        "device": "cpu",
        "backend": "gloo",
        "pipeline": "none",
        "link": None,
        "seed": 0,
    }
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
        demo_command("--ranks", "2", "--steps", "100000", *options),
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
def test_both_variants_end_with_the_same_bits(capsys: pytest.CaptureFixture[str]) -> None:
    link = (link_if_possible() or [None])[-1]
    assert run_here(steps=4, pipeline="default", link=link) == 0
    said = capsys.readouterr().out
    assert re.search(r"largest difference\W+0\W*\n", said)
    assert "Bit for bit the same" in said
    sent = re.search(r"bytes reduced\D+([\d,]+)\D+([\d,]+)", said)
    assert sent is not None
    parameters = re.search(r"([\d,]+) parameters", said)
    assert parameters is not None
    expected = 4 * int(parameters[1].replace(",", ""))
    assert [int(size.replace(",", "")) for size in sent.groups()] == [expected, expected]


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
    link = link_if_possible()
    with training_demo(*link) as process:
        children = children_of(process.pid)
        assert len(children) == (2 + 3 if link else 2)  # ranks, and who holds a namespace
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
        ["setsid", "--ctty", *demo_command("--ranks", "2", "--steps", "100000")],
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


def test_a_busy_port_is_one_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        monkeypatch.setenv("MASTER_PORT", str(port))
        assert run_here() == 2
    said = capsys.readouterr().err
    assert f"port {port} (from MASTER_PORT) cannot be used" in said
    assert "unset MASTER_PORT" in said


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backend": "nccl"}, "--backend nccl needs --device cuda"),
        ({"link": "fast"}, "--link 'fast' is not a rate"),
        ({"link": "200mbit", "ranks": 1}, "--link needs at least two ranks"),
        ({"pipeline": "no_such_pass"}, "no_such_pass"),
        ({"steps": 0}, "--steps must be at least 1"),
        ({"device": "tpu"}, "--device is cpu or cuda"),
        pytest.param(
            {"device": "cuda"},
            "--device cuda: torch sees no CUDA device",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device"),
        ),
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


# --------------------------------------------------------------------------- the emulated link


def reason_without_link() -> str:
    """Why there can be no slow link on this machine; empty where there can."""
    try:
        with SlowLink(parse_rate("200mbit"), 2):
            return ""
    except DemoError as error:
        return str(error)


def link_if_possible() -> list[str]:
    return [] if reason_without_link() else ["--link", "200mbit"]


def skip_without_link() -> None:
    if reason := reason_without_link():
        pytest.skip(reason)


def test_link_connects_ranks_at_its_rate_and_leaves_nothing() -> None:
    skip_without_link()
    before = {name for _, name in socket.if_nameindex()}
    with SlowLink(parse_rate("200mbit"), 3) as link:
        assert len(link.prefixes) == 3
        for prefix in link.prefixes:
            inside = subprocess.check_output([*prefix, "tc", "qdisc", "show"], text=True)
            assert re.search(r"tbf .*dev link0 .*rate 200Mbit", inside)
        answer = subprocess.check_output(
            [*link.prefixes[0], sys.executable, "-c", TALK, *link.prefixes[2]], text=True
        )
        assert answer == "hello from 10.0.0.3"
        holders = [int(prefix[1].removeprefix("--target=")) for prefix in link.prefixes]
    assert not [pid for pid in holders if Path(f"/proc/{pid}").exists()]
    assert {name for _, name in socket.if_nameindex()} == before


def test_link_changes_its_rate_from_inside_and_no_other() -> None:
    skip_without_link()
    with SlowLink(parse_rate("200mbit"), 2) as link:
        subprocess.check_call([*link.prefixes[0], sys.executable, "-c", CHANGE])
        show = ["tc", "qdisc", "show"]
        shown = [subprocess.check_output([*p, *show], text=True) for p in link.prefixes]
    assert "rate 50Mbit" in shown[0]
    assert "rate 200Mbit" in shown[1]


CHANGE = "from graphopt.demo.link import set_rate; set_rate(50e6)"


def test_no_rate_to_change_where_there_is_no_link() -> None:
    if shutil.which("tc") is None:
        pytest.skip("needs tc")
    with pytest.raises(DemoError, match="link0"):
        set_rate(50e6)


TALK = """
import socket, subprocess, sys
with socket.create_server(("10.0.0.1", 0)) as server:
    client = (
        "import socket, sys\\n"
        "with socket.create_connection(('10.0.0.1', int(sys.argv[1]))) as connection:\\n"
        "    connection.sendall(b'hello from ' + connection.getsockname()[0].encode())\\n"
    )
    port = str(server.getsockname()[1])
    subprocess.Popen([*sys.argv[1:], sys.executable, "-c", client, port])
    connection, _ = server.accept()
    with connection:
        print(connection.makefile().read(), end="")
"""


def test_link_without_its_tools_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert run_here(link="200mbit") == 2
    said = capsys.readouterr().err
    assert "ip, tc, unshare, nsenter" in said
    assert "apt-get install iproute2 util-linux" in " ".join(said.split())


def test_link_without_permission_says_so() -> None:
    forbid = "echo 0 > /proc/sys/user/max_net_namespaces"
    wrapper = ["unshare", "--user", "--map-root-user", "sh", "-c"]
    tools = all(map(shutil.which, ("ip", "tc", "unshare", "nsenter")))
    if not tools or subprocess.run([*wrapper, forbid], capture_output=True, check=False).returncode:
        pytest.skip("cannot make a user namespace in which network namespaces are forbidden")
    code = (
        "from graphopt.demo import DemoError\n"
        "from graphopt.demo.link import SlowLink\n"
        "try:\n"
        "    with SlowLink(10**6, 2): pass\n"
        "except DemoError as error:\n"
        "    print(error.exit_code, error)\n"
    )
    command = [*wrapper, f'{forbid}; exec "$@"', "sh", sys.executable, "-c", code]
    said = subprocess.check_output(command, text=True)
    assert said.startswith("2 --link")
    assert "does not allow" in said
    assert "as root" in said


def test_link_needs_no_administrator_where_user_namespaces_are_allowed() -> None:
    forbid = ["setpriv", "--bounding-set", "-sys_admin", "--inh-caps", "-sys_admin"]
    allowed = ["unshare", "--user", "--map-root-user", "--net", "true"]
    if not shutil.which("setpriv") or subprocess.run([*forbid, *allowed], check=False).returncode:
        pytest.skip("cannot give up the administrator's right, or make a user namespace without it")
    skip_without_link()
    code = (
        "import subprocess, sys\n"
        "from graphopt.demo.link import SlowLink\n"
        "with SlowLink(10**6, 2) as link:\n"
        "    assert '--user' in link.prefixes[0], link.prefixes\n"
        f"    subprocess.check_call([*link.prefixes[0], sys.executable, '-c', {CHANGE!r}])\n"
    )
    subprocess.run([*forbid, sys.executable, "-c", code], check=True)
