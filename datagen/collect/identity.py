"""What a run is: the fields of its fingerprint, and what must agree before it may go on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from datagen.config import CollectConfig
from datagen.errors import FingerprintMismatch, WrongTarget
from datagen.store.fingerprint import Fingerprint
from datagen.target.preflight import ServerReport
from datagen.target.tokens import Rendering

FORMAT = 1


def offline_fields(config: CollectConfig, mix: dict[str, Any]) -> dict[str, Any]:
    """The fields known without a server: prompts, settings, profile."""
    return {
        "format": FORMAT,
        "mix": mix,
        "settings": config.content,
        "model": config.profile.model,
    }


def complete_fingerprint(
    offline: dict[str, Any],
    servers: Sequence[ServerReport],
    tokenizer: str,
    contexts: str | None,
    plan_digest: str,
) -> Fingerprint:
    """All fields. `contexts`: digest of what the servers make of the probe conversations, where it is
    they who render the run's contexts.

    Raises WrongTarget when the endpoints do not serve one and the same model.
    """
    first = servers[0]
    for other in servers[1:]:
        unlike = difference(other, first)
        if unlike is not None:
            raise WrongTarget(
                f"{other.url} differs from {first.url} in {unlike}",
                fix="serve one model, revision and dtype on all endpoints of a run",
            )
    rendered = {} if contexts is None else {"rendering": "server", "rendered_probes": contexts}
    return Fingerprint(
        {
            **offline,
            "target": {**asdict(first.identity), "tokenizer": tokenizer, **rendered},
            "plan": plan_digest,
        }
    )


def difference(here: ServerReport, there: ServerReport) -> str | None:
    """In what two servers are not the same target, in words; None when they are."""
    ours, theirs = asdict(here.identity), asdict(there.identity)
    names = [k for k in ours if ours[k] != theirs[k]]
    if not names:
        return None
    return f"{', '.join(names)}: " + ", ".join(f"{ours[n]} against {theirs[n]}" for n in names)


def require_same_rendering(now: Fingerprint, stored: Fingerprint, root: Path) -> None:
    """Raise FingerprintMismatch when the server renders otherwise than it did when the run began."""
    one, other = (f.fields["target"].get("rendered_probes") for f in (now, stored))
    if None in (one, other) or one == other:
        return
    raise FingerprintMismatch(
        "the server renders conversations otherwise than when the run began "
        f"(probe conversations {one[:12]}, were {other[:12]})",
        where=root,
        fix="serve the chat template, tokenizer and version of then, or choose another run name",
    )


def with_stored_target(
    offline: dict[str, Any], stored: Fingerprint, rendering: Rendering
) -> Fingerprint:
    """The fingerprint that would be stored if the target and the plan have not changed."""
    kept: dict[str, Any] = {k: stored.fields[k] for k in ("target", "plan") if k in stored.fields}
    if rendering != "auto" and "target" in kept:
        plain = {k: v for k, v in kept["target"].items() if k != "rendering"}
        kept["target"] = plain if rendering == "ours" else {**plain, "rendering": "server"}
    return Fingerprint({**offline, **kept})
