"""What a check says, and what all of them say together."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal

from datagen.errors import ConfigError, PreflightRed

Status = Literal["ok", "red", "skipped"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One check's verdict, in words: what was measured, what was expected, what to change."""

    status: Status
    measured: str
    expected: str
    fix: str | None = None


@dataclass(frozen=True, slots=True)
class Result:
    """A finding with the name of its check."""

    name: str
    status: Status
    measured: str
    expected: str
    fix: str | None


class Skipped(Exception):
    """Raised by a check that cannot be made here; its text says why."""


def ok(measured: str, expected: str) -> Finding:
    """As it should be."""
    return Finding("ok", measured, expected)


def red(measured: str, expected: str, fix: str) -> Finding:
    """Wrong, with what to change."""
    return Finding("red", measured, expected, fix)


@dataclass(frozen=True, slots=True)
class Speeds:
    """Of one server: generated tokens/s with `concurrency` requests, prefilled tokens/s with capture."""

    generate_tokens_per_s: float
    prefill_tokens_per_s: float
    concurrency: int


@dataclass(frozen=True, slots=True)
class ServerChecks:
    """All results of one place: a server's URL, or this machine."""

    where: str
    results: tuple[Result, ...]
    seconds: float
    speeds: Speeds | None = None
    captured_tokens: int = 0
    rendering: Literal["ours", "server"] | None = None
    """Who renders the contexts of a run on this server; None: it has none to render."""
    rendered_sha256: str | None = None
    """Of the ids that the server's chat endpoint makes of the probe conversations."""
    contexts_sha256: str | None = None
    """Of the ids that the server makes of them for the run; None: it has none to render."""

    def reds(self, accepted: Collection[str] = ()) -> list[Result]:
        """What stops a run."""
        return [r for r in self.results if r.status == "red" and r.name not in accepted]

    def line(self) -> str:
        """Counts and time, on one line."""
        n = {s: sum(r.status == s for r in self.results) for s in ("ok", "red", "skipped")}
        said = ", ".join(f"{count} {status}" for status, count in n.items() if count)
        proven = (
            f", capture proven on {self.captured_tokens} tokens" if self.captured_tokens else ""
        )
        return f"{self.where}: preflight {said} in {self.seconds:.1f} s{proven}"

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for --json and the manifest."""
        return asdict(self)


def require_known(accepted: Iterable[str], names: Collection[str]) -> None:
    """Raise ConfigError for a risk that names no check."""
    for name in accepted:
        if name not in names:
            raise ConfigError(
                f"no check is named '{name}'", fix=f"--accept-risk takes {', '.join(names)}"
            )


def require_green(places: Iterable[ServerChecks], accepted: Collection[str]) -> None:
    """Raise PreflightRed, one line for all red checks that are not accepted."""
    found = [(p.where, r) for p in places for r in p.reds(accepted)]
    if not found:
        return
    where = ", ".join(dict.fromkeys(w for w, _ in found))
    fixes = "; ".join(dict.fromkeys(str(r.fix) for _, r in found))
    raise PreflightRed(
        "preflight is red: " + "; ".join(f"[{r.name}] {r.measured}" for _, r in found),
        where=where,
        fix=f"{fixes} (or go on with --accept-risk {','.join(dict.fromkeys(r.name for _, r in found))})",
    )
