"""The emulated link of the benchmarks: network namespaces joined at a limited rate."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

from emulated_link import LinkError, SlowLink, set_rate  # noqa: E402


def reason_without_link() -> str:
    """Why there can be no slow link on this machine; empty where there can."""
    try:
        with SlowLink(200 * 10**6, 2):
            return ""
    except LinkError as error:
        return str(error)


def skip_without_link() -> None:
    if reason := reason_without_link():
        pytest.skip(reason)


def test_link_connects_ranks_at_its_rate_and_leaves_nothing() -> None:
    skip_without_link()
    before = {name for _, name in socket.if_nameindex()}
    with SlowLink(200 * 10**6, 3) as link:
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
    with SlowLink(200 * 10**6, 2) as link:
        subprocess.check_call([*link.prefixes[0], sys.executable, "-c", CHANGE])
        show = ["tc", "qdisc", "show"]
        shown = [subprocess.check_output([*p, *show], text=True) for p in link.prefixes]
    assert "rate 50Mbit" in shown[0]
    assert "rate 200Mbit" in shown[1]


CHANGE = f"import sys; sys.path.append({str(BENCHMARKS)!r}); from emulated_link import set_rate"
CHANGE += "; set_rate(50e6)"


def test_no_rate_to_change_where_there_is_no_link() -> None:
    if shutil.which("tc") is None:
        pytest.skip("needs tc")
    with pytest.raises(LinkError, match="link0"):
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
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LinkError, match="ip, tc, unshare, nsenter") as failure, SlowLink(10**6, 2):
        pass
    assert "apt-get install iproute2 util-linux" in " ".join(str(failure.value).split())


def test_link_without_permission_says_so() -> None:
    forbid = "echo 0 > /proc/sys/user/max_net_namespaces"
    wrapper = ["unshare", "--user", "--map-root-user", "sh", "-c"]
    tools = all(map(shutil.which, ("ip", "tc", "unshare", "nsenter")))
    if not tools or subprocess.run([*wrapper, forbid], capture_output=True, check=False).returncode:
        pytest.skip("cannot make a user namespace in which network namespaces are forbidden")
    code = (
        f"import sys; sys.path.append({str(BENCHMARKS)!r})\n"
        "from emulated_link import LinkError, SlowLink\n"
        "try:\n"
        "    with SlowLink(10**6, 2): pass\n"
        "except LinkError as error:\n"
        "    print(error)\n"
    )
    command = [*wrapper, f'{forbid}; exec "$@"', "sh", sys.executable, "-c", code]
    said = subprocess.check_output(command, text=True)
    assert said.startswith("an emulated link")
    assert "does not allow" in said
    assert "as root" in said


def test_link_needs_no_administrator_where_user_namespaces_are_allowed() -> None:
    forbid = ["setpriv", "--bounding-set", "-sys_admin", "--inh-caps", "-sys_admin"]
    allowed = ["unshare", "--user", "--map-root-user", "--net", "true"]
    if not shutil.which("setpriv") or subprocess.run([*forbid, *allowed], check=False).returncode:
        pytest.skip("cannot give up the administrator's right, or make a user namespace without it")
    skip_without_link()
    code = (
        f"import subprocess, sys; sys.path.append({str(BENCHMARKS)!r})\n"
        "from emulated_link import SlowLink\n"
        "with SlowLink(10**6, 2) as link:\n"
        "    assert '--user' in link.prefixes[0], link.prefixes\n"
        f"    subprocess.check_call([*link.prefixes[0], sys.executable, '-c', {CHANGE!r}])\n"
    )
    subprocess.run([*forbid, sys.executable, "-c", code], check=True)
