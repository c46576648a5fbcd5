"""Ports are given once, and are none that a client's connection can take before its server starts."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from datagen.acceptance.ports import LOWEST, first_ephemeral, free_port
from datagen.errors import MeasurementError


def test_no_port_is_given_twice_or_left_to_the_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("datagen.acceptance.ports.EPHEMERAL", tmp_path / "range")
    (tmp_path / "range").write_text("21000\t60999\n")
    given = [free_port() for _ in range(50)]
    assert len(set(given)) == 50
    assert all(LOWEST <= port < 21_000 for port in given)


@pytest.mark.parametrize("text", ["1024\t65535\n", "", None])
def test_where_nothing_is_left_below_the_kernels_ports_its_usual_ones_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None
) -> None:
    monkeypatch.setattr("datagen.acceptance.ports.EPHEMERAL", tmp_path / "range")
    if text is not None:
        (tmp_path / "range").write_text(text)
    assert first_ephemeral() == 32_768
    assert LOWEST <= free_port() < 32_768


def test_a_port_in_use_is_passed_over() -> None:
    a, b = free_port(), free_port()
    with socket.socket() as s:
        s.bind(("127.0.0.1", a))
        c = free_port()
        with pytest.raises(MeasurementError, match="no port is free"):
            free_port([a, b])
        assert free_port([a, c + 1, *range(LOWEST, LOWEST + 50)]) not in (a, b, c)
