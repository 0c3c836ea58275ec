"""An emulated slow link between local ranks: one network namespace per rank, joined by a switch.

Each rank's only way out is a virtual Ethernet cable whose sending side is shaped to the rate (Linux
traffic control, token bucket filter), so a rank both sends and receives as over a full-duplex link
of that rate, and waiting for it takes wall time but no core.

A namespace belongs to a process that copies its standard input, which this process holds open.
When this process ends, in whatever way, so do those, and the kernel removes what they held.
"""

from __future__ import annotations

import os
import shutil
import subprocess

_TOOLS = {"ip": "iproute2", "tc": "iproute2", "unshare": "util-linux", "nsenter": "util-linux"}
_BUFFERED_SECONDS = 0.0105  # 256 KiB at 200 Mbit/s; a shorter burst starves the shaper's timer
_SMALLEST_BURST = 64 * 1024  # one segment as large as the network stack hands down


class LinkError(Exception):
    """This machine allows no emulated link, or lacks the tools to make one."""


class SlowLink:
    """Network namespaces for `ranks` ranks, joined by a slow link while the context is active.

    Attributes:
        prefixes: per rank, the command that runs another command inside the rank's namespace.
        environment: what gloo needs to use the emulated link, and that each rank has a host of its
            own.

    Raises:
        LinkError: on entering, when the machine does not allow it.
    """

    def __init__(self, rate: int, ranks: int) -> None:
        self.environment = {"GLOO_SOCKET_IFNAME": "link0", "LOCAL_WORLD_SIZE": "1"}
        self.rate = rate
        self.ranks = ranks
        self.prefixes: list[list[str]] = []
        self._holders: list[subprocess.Popen[str]] = []
        self._user: list[str] = []

    def __enter__(self) -> SlowLink:
        _check_tools()
        try:
            self._make()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self._remove()

    def _make(self) -> None:
        switch = self._inside(self._hold_first())
        _run([*switch, "ip", "link", "add", "switch0", "type", "bridge"])
        _run([*switch, "ip", "link", "set", "switch0", "up"])
        for rank in range(self.ranks):
            self._connect(switch, rank)

    def _hold_first(self) -> subprocess.Popen[str]:
        """Creates the switch's namespace: as root, else in a user namespace."""
        if os.geteuid() == 0:
            try:
                return self._hold(["unshare", "--net"])
            except LinkError:  # a container's root often lacks the right
                pass
        self._user = ["--user", "--preserve-credentials"]
        try:
            return self._hold(["unshare", "--user", "--map-root-user", "--net"])
        except LinkError as error:
            raise LinkError(
                "an emulated link needs network namespaces, which this machine does not allow"
                f" ({error}): run it as root, or allow unprivileged user namespaces"
            ) from error

    def _connect(self, switch: list[str], rank: int) -> None:
        holder = self._hold([*self._inside(self._holders[0])[:-1], "unshare", "--net"])
        inside = self._inside(holder)
        peer = ["peer", "name", "link0", "netns", str(holder.pid)]
        _run([*switch, "ip", "link", "add", f"port{rank}", "type", "veth", *peer])
        _run([*switch, "ip", "link", "set", f"port{rank}", "master", "switch0", "up"])
        _run([*inside, "ip", "address", "add", f"10.0.0.{rank + 1}/24", "dev", "link0"])
        _run([*inside, "ip", "link", "set", "lo", "up"])
        _run([*inside, "ip", "link", "set", "link0", "up"])
        _run([*inside, "tc", "qdisc", "add", *_shape(self.rate)])
        self.prefixes.append(inside)

    def _inside(self, holder: subprocess.Popen[str]) -> list[str]:
        return ["nsenter", f"--target={holder.pid}", *self._user, "--net"]

    def _hold(self, command: list[str]) -> subprocess.Popen[str]:
        """Starts a process that keeps the namespaces of `command` alive, once they exist."""
        holder = subprocess.Popen(
            [*command, "cat"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # a Ctrl-C at the terminal must not end it before the ranks
        )
        self._holders.append(holder)
        assert holder.stdin is not None
        assert holder.stdout is not None
        try:
            holder.stdin.write("made\n")
            holder.stdin.flush()
            made = holder.stdout.readline() == "made\n"
        except BrokenPipeError:
            made = False
        if not made:
            self._holders.remove(holder)
            raise LinkError(_last_line(holder))
        return holder

    def _remove(self) -> None:
        for holder in reversed(self._holders):
            holder.kill()
            holder.communicate()
        self._holders.clear()


def set_rate(rate: float) -> None:
    """Sets the rate of this rank's link, in bit/s; called inside a `SlowLink`.

    Raises:
        LinkError: there is no such link here.
    """
    _run(["tc", "qdisc", "change", *_shape(round(rate))])


def _shape(rate: int) -> list[str]:
    """The traffic control command of a token bucket at a rate."""
    burst = max(_SMALLEST_BURST, round(rate / 8 * _BUFFERED_SECONDS))
    shape = ["rate", f"{rate}bit", "burst", f"{burst}b", "latency", "50ms"]
    return ["dev", "link0", "root", "tbf", *shape]


def _check_tools() -> None:
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if not missing:
        return
    packages = " ".join(sorted({_TOOLS[tool] for tool in missing}))
    programs = f"program{'s' * (len(missing) > 1)} {', '.join(missing)}"
    raise LinkError(
        f"an emulated link needs the {programs}, not found on PATH: install them"
        f" (on Debian and Ubuntu: apt-get install {packages})"
    )


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return
    problem = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
    raise LinkError(
        f"the emulated link could not be set up: {problem[0]}\n  from:  {' '.join(command)}"
    )


def _last_line(process: subprocess.Popen[str]) -> str:
    _, printed = process.communicate()
    lines = printed.strip().splitlines()
    return lines[-1] if lines else f"{process.args!r} ended with exit code {process.returncode}"
