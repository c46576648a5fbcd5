"""What a run is: the fields of its fingerprint, and what must agree before it may go on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from datagen.config import CollectConfig
from datagen.errors import WrongTarget
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
    rendering: str,
    plan_digest: str,
) -> Fingerprint:
    """All fields; `rendering` is one where it is not ours.

    Raises WrongTarget when the endpoints do not serve one and the same model.
    """
    first = servers[0]
    for other in servers[1:]:
        if other.identity != first.identity:
            ours, theirs = asdict(first.identity), asdict(other.identity)
            names = [k for k in ours if ours[k] != theirs[k]]
            raise WrongTarget(
                f"{other.url} differs from {first.url} in {', '.join(names)}: "
                + ", ".join(f"{theirs[n]} against {ours[n]}" for n in names),
                fix="serve one model, revision and dtype on all endpoints of a run",
            )
    return Fingerprint(
        {
            **offline,
            "target": {**asdict(first.identity), "tokenizer": tokenizer, **rendered_by(rendering)},
            "plan": plan_digest,
        }
    )


def with_stored_target(
    offline: dict[str, Any], stored: Fingerprint, rendering: Rendering
) -> Fingerprint:
    """The fingerprint that would be stored if the target and the plan have not changed."""
    kept: dict[str, Any] = {k: stored.fields[k] for k in ("target", "plan") if k in stored.fields}
    if rendering != "auto" and "target" in kept:
        plain = {k: v for k, v in kept["target"].items() if k != "rendering"}
        kept["target"] = {**plain, **rendered_by(rendering)}
    return Fingerprint({**offline, **kept})


def rendered_by(rendering: str) -> dict[str, str]:
    """The field of the target where the server renders; runs rendered here have none."""
    return {"rendering": rendering} if rendering == "server" else {}
