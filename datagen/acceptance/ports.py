"""Ports for servers that are started later: none that the kernel may give to others until then.

Unless it gives out nearly all: where its range begins at 20,000 or below, a port may be one of it.
"""

from __future__ import annotations

import random
import socket
from collections.abc import Iterable
from pathlib import Path

from datagen.errors import MeasurementError

LOWEST = 10_000
EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
DEFAULT_EPHEMERAL = 32_768
_given: set[int] = set()


def free_port(ports: Iterable[int] | None = None) -> int:
    """A port of `ports` that nobody uses now, the first that this process has not been given before.

    By default in random order those below the kernel's ephemeral ones. A server takes seconds to start,
    and meanwhile any client's connection, of this host or of the measurement itself, may be given an
    ephemeral port. Raises MeasurementError when none is free.
    """
    if ports is None:
        last = first_ephemeral()
        ports = random.sample(range(LOWEST, last), last - LOWEST)
    for port in ports:
        if port not in _given and _is_free(port):
            _given.add(port)
            return port
    raise MeasurementError("no port is free on this host", fix="stop what holds them")


def _is_free(port: int) -> bool:
    with socket.socket() as s:
        try:
            s.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def first_ephemeral() -> int:
    """The lowest port that the kernel gives to whoever names none."""
    try:
        first = int(EPHEMERAL.read_text(encoding="ascii").split()[0])
    except (OSError, ValueError, IndexError):  # no Linux
        return DEFAULT_EPHEMERAL
    return first if first > 2 * LOWEST else DEFAULT_EPHEMERAL
