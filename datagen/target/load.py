"""What a server says of its own queue: SGLang's Prometheus text (`--enable-metrics`), or `/server_info`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

SAMPLE = re.compile(r"^(sglang:\w+)(?:\{[^}]*\})?\s+(\S+)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class ServerLoad:
    """Requests that run and wait, share of the KV cache in use (0 to 1), tokens generated so far."""

    running: int
    queued: int
    token_usage: float | None = None
    generated_tokens: float | None = None


def load_from_metrics(text: str) -> ServerLoad | None:
    """Read SGLang's metrics; counts are summed over data-parallel ranks, the fullest cache counts.

    None when the running and queued gauges are absent.
    """
    sums: dict[str, float] = {}
    fullest: float | None = None
    for name, value in SAMPLE.findall(text):
        if name == "sglang:token_usage":
            fullest = max(fullest or 0.0, float(value))
        else:
            sums[name] = sums.get(name, 0.0) + float(value)
    try:
        return ServerLoad(
            running=int(sums["sglang:num_running_reqs"]),
            queued=int(sums["sglang:num_queue_reqs"]),
            token_usage=fullest,
            generated_tokens=sums.get("sglang:generation_tokens_total"),
        )
    except KeyError:
        return None


def load_from_info(info: dict[str, Any]) -> ServerLoad | None:
    """Read `internal_states` of `/server_info`; None when it does not tell."""
    states = [s for s in info.get("internal_states") or [] if isinstance(s, dict)]
    try:
        return ServerLoad(
            running=sum(int(s["num_running_reqs"]) for s in states),
            queued=sum(int(s["num_queue_reqs"]) for s in states),
        ) if states else None  # fmt: skip
    except (KeyError, TypeError, ValueError):
        return None
