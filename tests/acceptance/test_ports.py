"""Ports are given once, and are none that a client's connection can take before its server starts."""

from __future__ import annotations

import socket

import pytest

from datagen.acceptance.ports import LOWEST, first_ephemeral, free_port


def test_no_port_is_given_twice_or_left_to_the_kernel() -> None:
    given = [free_port() for _ in range(50)]
    assert len(set(given)) == 50
    assert all(LOWEST <= port < first_ephemeral() for port in given)
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        assert s.getsockname()[1] >= first_ephemeral(), "what the kernel gives lies above"


def test_a_port_in_use_is_passed_over() -> None:
    a, b = free_port(), free_port()
    with socket.socket() as s:
        s.bind(("127.0.0.1", a))
        c = free_port()
        with pytest.raises(OSError, match="no port is free"):
            free_port([a, b])
        assert free_port([a, c + 1, *range(LOWEST, LOWEST + 50)]) not in (a, b, c)
