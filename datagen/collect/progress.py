"""What a collect run has done so far, as numbers and as one line."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

RATE_WINDOW_S = 30.0


@dataclass(frozen=True, slots=True)
class ProgressSnapshot:
    """Counts are in samples; planned = collected + rejected + pending. Rates are of this session."""

    planned: int
    collected: int
    rejected: int
    prompts_total: int
    prompts_done: int
    partitions_total: int
    partitions_sealed: int
    tokens_generated: int
    tokens_captured: int
    raw_bytes: int
    tokens_per_s: float
    eta_s: float | None
    elapsed_s: float
    rejects: dict[str, int]
    cut_by_length: int
    endpoints: list[dict[str, Any]] = field(default_factory=list)
    queue_wait_p50_s: float | None = None
    loop_lag_p99_s: float | None = None

    @property
    def pending(self) -> int:
        """Samples still to be collected or rejected."""
        return self.planned - self.collected - self.rejected

    @property
    def percent(self) -> float:
        """Share of the planned samples that is accounted for, 0 to 100."""
        return 100.0 * (1 - self.pending / self.planned) if self.planned else 100.0

    def endpoint_lines(self) -> list[str]:
        """What each server does, and how long rows wait for one; for views with room."""
        lines = [
            f"{e['url']} {e['state']}: {e['running']}/{e['window']} rows, {e['answered']:,} answered, "
            f"p50 {_seconds(e['latency_p50_s'])}, p99 {_seconds(e['latency_p99_s'])}"
            + "".join(f", {n:,} {reason}" for reason, n in sorted(e["failures"].items()))
            for e in self.endpoints
        ]
        if lines:
            lines.append(
                f"queue wait p50 {_seconds(self.queue_wait_p50_s)}, "
                f"event loop lag p99 {_seconds(self.loop_lag_p99_s)}"
            )
        return lines

    def line(self) -> str:
        """Everything a progress card can show, on one line."""
        parts = [
            f"{self.percent:.1f} %",
            f"{self.partitions_sealed}/{self.partitions_total} partitions",
            f"{self.prompts_done:,}/{self.prompts_total:,} prompts",
            f"{self.collected:,} samples",
            f"{self.tokens_per_s:,.0f} generated tok/s",
            f"{format_bytes(self.raw_bytes)} of states",
        ]
        if self.eta_s is not None:
            parts.append(f"ETA {format_seconds(self.eta_s)}")
        if self.endpoints:
            up = sum(e["state"] == "closed" for e in self.endpoints)
            running = sum(e["running"] for e in self.endpoints)
            window = sum(e["window"] for e in self.endpoints)
            parts.append(f"{up}/{len(self.endpoints)} endpoints, {running}/{window} rows in flight")
        if self.cut_by_length:
            parts.append(f"{self.cut_by_length:,} answers cut at their limit")
        if self.rejects:
            parts.append(
                "rejected " + ", ".join(f"{n} {r}" for r, n in sorted(self.rejects.items()))
            )
        return " · ".join(parts)


class Progress:
    """Counters of a run; rates over a sliding window of this session."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._started = clock()
        self._recent: deque[tuple[float, int]] = deque()
        self._session_samples = 0
        self.planned = self.prompts_total = self.partitions_total = 0
        self.collected = self.prompts_done = self.partitions_sealed = 0
        self.tokens_generated = self.tokens_captured = self.raw_bytes = 0
        self.cut_by_length = 0
        self.rejects: Counter[str] = Counter()

    def restored(self, *, collected: int, rejects: dict[str, int], prompts_done: int) -> None:
        """Rows found on disk when a partition opened."""
        self.collected += collected
        self.prompts_done += prompts_done
        self.rejects.update(rejects)

    def generated(self, n_tokens: int) -> None:
        """A response of `n_tokens` is on disk."""
        self.tokens_generated += n_tokens
        self._recent.append((self._clock(), n_tokens))

    def captured(self, n_tokens: int, n_bytes: int) -> None:
        """The states of a sample are on disk."""
        self.collected += 1
        self._session_samples += 1
        self.tokens_captured += n_tokens
        self.raw_bytes += n_bytes

    def rejected(self, reason: str) -> None:
        """A sample is out, with its reason on disk."""
        self.rejects[reason] += 1
        self._session_samples += 1

    def snapshot(
        self,
        endpoints: list[dict[str, Any]],
        *,
        queue_wait_p50_s: float | None = None,
        loop_lag_p99_s: float | None = None,
    ) -> ProgressSnapshot:
        """The state now."""
        now = self._clock()
        while self._recent and self._recent[0][0] < now - RATE_WINDOW_S:
            self._recent.popleft()
        elapsed = now - self._started
        span = min(elapsed, RATE_WINDOW_S)
        rejected = self.rejects.total()
        pending = self.planned - self.collected - rejected
        eta = None
        if self._session_samples and pending:
            eta = pending * elapsed / self._session_samples
        return ProgressSnapshot(
            planned=self.planned,
            collected=self.collected,
            rejected=rejected,
            prompts_total=self.prompts_total,
            prompts_done=self.prompts_done,
            partitions_total=self.partitions_total,
            partitions_sealed=self.partitions_sealed,
            tokens_generated=self.tokens_generated,
            tokens_captured=self.tokens_captured,
            raw_bytes=self.raw_bytes,
            tokens_per_s=sum(n for _, n in self._recent) / span if span > 0 else 0.0,
            eta_s=eta,
            elapsed_s=elapsed,
            rejects=dict(self.rejects),
            cut_by_length=self.cut_by_length,
            endpoints=endpoints,
            queue_wait_p50_s=queue_wait_p50_s,
            loop_lag_p99_s=loop_lag_p99_s,
        )


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g} s"


def format_bytes(n: float) -> str:
    """Decimal units, as disks are sold."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if n < 1000 or unit == "TB":
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1000
    raise AssertionError("unreachable")


def format_seconds(seconds: float) -> str:
    """`42 s`, `3 m 05 s`, `2 h 10 m`."""
    s = round(seconds)
    if s < 60:
        return f"{s} s"
    if s < 3600:
        return f"{s // 60} m {s % 60:02d} s"
    return f"{s // 3600} h {s % 3600 // 60:02d} m"
