"""A server's environment is read from the process that listens, and keeps its secrets."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from datagen.target.environment import server_environment
from tests.tiny import free_port

LISTENER = """
import socket, sys
s = socket.socket(); s.bind(('127.0.0.1', 0)); s.listen(); print(s.getsockname()[1], flush=True)
sys.stdin.read()
"""
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")


@pytest.fixture
def port() -> Iterator[int]:
    given = {
        "PATH": os.environ["PATH"], "NCCL_P2P_LEVEL": "SYS", "SGLANG_API_KEY": "s3cret",
        "HOME": "/", "DATAGEN_CAPTURE_BOUNDARIES": "2,30,58",
    }  # fmt: skip
    with subprocess.Popen(
        [sys.executable, "-c", LISTENER], env=given, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        yield int(process.stdout.readline())
        process.kill()


def test_settings_that_matter_are_read_and_keys_are_not(port: int) -> None:
    assert server_environment(f"http://127.0.0.1:{port}") == {
        "DATAGEN_CAPTURE_BOUNDARIES": "2,30,58",
        "NCCL_P2P_LEVEL": "SYS",
    }


def test_what_is_elsewhere_or_nowhere_is_unknown(port: int) -> None:
    assert server_environment(f"http://192.0.2.1:{port}") is None
    assert server_environment(f"http://127.0.0.1:{free_port()}") is None
