"""Emulation of slow links between ranks of one machine: the kernel paces each socket, without
root."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

PACING_RATE = getattr(socket, "SO_MAX_PACING_RATE", 47)  # Linux's number; not in Python
_UNLIMITED = 2**32 - 1
_DESCRIPTORS = Path("/proc/self/fd")


def pace_connections(bytes_per_second: float | None) -> int:
    """Limits the rate at which each open TCP connection of this process sends.

    gloo's connections between ranks exist as soon as the first collective has run.

    Args:
        bytes_per_second: None lifts the limit.

    Returns:
        How many connections were found.
    """
    rate = (
        _UNLIMITED if bytes_per_second is None else min(_UNLIMITED, max(1, round(bytes_per_second)))
    )
    found = 0
    for connection in _connections():
        connection.setsockopt(socket.SOL_SOCKET, PACING_RATE, struct.pack("=I", rate))
        found += 1
    return found


def _connections() -> Iterator[socket.socket]:
    for entry in _DESCRIPTORS.iterdir() if _DESCRIPTORS.exists() else ():
        if not entry.is_socket():
            continue
        with socket.socket(fileno=os.dup(int(entry.name))) as connection:
            if connection.type == socket.SOCK_STREAM and _is_connected(connection):
                yield connection


def _is_connected(connection: socket.socket) -> bool:
    if connection.family not in (socket.AF_INET, socket.AF_INET6):
        return False
    try:
        connection.getpeername()
    except OSError:
        return False
    return True
