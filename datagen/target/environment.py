"""The settings in a running server's environment that change what it computes or how fast.

Read from /proc of the process that listens on the server's port, so only on this host and only as the
user who runs it; a server elsewhere keeps its environment to itself.
"""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path
from urllib.parse import urlsplit

from datagen.target.launch import PROC, process_environment

RELEVANT = re.compile(
    r"^(SGLANG|SGL|NCCL|CUDA|CUBLAS|PYTORCH|TORCH|TORCHINDUCTOR|TRITON|FLASHINFER|HIP|ROCR|OMP|MKL|KMP|"
    r"OPENBLAS|GLOO|UCX|DATAGEN)_|^LD_PRELOAD$"
)
SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL", re.IGNORECASE)
LISTENS = "0A"  # the kernel's number of the state


def server_environment(url: str) -> dict[str, str] | None:
    """Settings of the server at `url`, by name; None when its environment cannot be read from here."""
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    if not _is_here(parts.hostname or ""):
        return None
    for pid in _listeners(port):
        try:
            settings = process_environment(pid)
        except OSError:
            continue
        found = {k: v for k, v in settings.items() if RELEVANT.search(k) and not is_secret(k)}
        return dict(sorted(found.items()))
    return None


def is_secret(name: str) -> bool:
    """Whether what a setting of this name holds must not be written down."""
    return SECRET.search(name) is not None


def _is_here(host: str) -> bool:
    """Whether a host name is an address of this machine: one can be bound."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as s:
            s.bind(address)
    except OSError:
        return False
    return True


def _listeners(port: int) -> list[int]:
    """Process ids that hold a socket listening on `port`; none where there is no /proc."""
    inodes = set()
    for table in ("tcp", "tcp6"):
        try:
            lines = (PROC / "net" / table).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            if fields[3] == LISTENS and int(fields[1].rpartition(":")[2], 16) == port:
                inodes.add(f"socket:[{fields[9]}]")
    if not inodes:
        return []
    pids = sorted(int(e.name) for e in PROC.iterdir() if e.name.isdigit())
    return [pid for pid in pids if _holds(PROC / str(pid) / "fd", inodes)]


def _holds(folder: Path, inodes: set[str]) -> bool:
    try:
        return any(os.readlink(entry) in inodes for entry in folder.iterdir())
    except OSError:  # it ended, or belongs to another user
        return False
