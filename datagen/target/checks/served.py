"""Checks of what a server says it is: version, model, dimensions, tokenizer, no drafter."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from datagen.errors import ConfigError, CorruptFile
from datagen.target.checks.probes import Evidence
from datagen.target.checks.subject import EMBEDDED, Subject
from datagen.target.checks.verdict import Finding, Skipped, ok, red
from datagen.target.tokens import tokenizer_files_digest
from datagen.target.weights import Checkpoint

LOWEST, HIGHEST = (0, 5, 17), (0, 5, 23)  # SGLang, as the capture plugin is tested


def names_of(info: dict[str, Any], model: dict[str, Any]) -> list[str]:
    """What a server calls its model, the path first."""
    found = (model.get("model_path"), info.get("model_path"), info.get("served_model_name"))
    return list(dict.fromkeys(str(n) for n in found if n))


def check_version(subject: Subject, found: Evidence) -> Finding:
    """An engine and a version with which capture is tested."""
    engine, version = found.info.get("engine", "sglang"), str(found.info.get("version", "unstated"))
    if engine == EMBEDDED:
        return ok(f"{EMBEDDED} {version}", "the embedded target, or SGLang 0.5.17 to 0.5.23")
    low, high = (".".join(map(str, v)) for v in (LOWEST, HIGHEST))
    expected = f"SGLang {low} to {high}"
    parsed = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    number = tuple(map(int, parsed.groups())) if parsed else ()
    if LOWEST <= number <= HIGHEST:
        return ok(f"SGLang {version}", expected)
    return red(
        f"{engine} {version}",
        expected,
        f"install SGLang {high}: before {low} it returns rows of other requests, and later ones "
        "are not tested",
    )


def check_served_model(subject: Subject, found: Evidence) -> Finding:
    """The served model is the profile's, by name."""
    names = names_of(found.info, found.model)
    wanted = subject.profile.model
    if subject.profile.serves(*names):
        return ok(names[0], wanted)
    return red(
        f"the server serves {names[0] if names else 'an unnamed model'}",
        wanted,
        f"point --endpoints at a server of {wanted}, or choose the matching --target",
    )


def check_dimensions(subject: Subject, found: Evidence) -> Finding:
    """config.json of the checkpoint says what the profile says."""
    checkpoint = Checkpoint.found(subject.checkpoint)
    if checkpoint is None:
        raise Skipped("the server's checkpoint is not on this machine")
    profile, config = subject.profile, checkpoint.config
    ours = {
        "hidden_size": profile.hidden_size,
        "num_hidden_layers": profile.num_layers,
        "vocab_size": profile.vocab_size,
    }
    theirs = {name: config.get(name) for name in ours}
    expected = ", ".join(f"{k} {v}" for k, v in ours.items())
    measured = ", ".join(f"{k} {v}" for k, v in theirs.items())
    if theirs == ours:
        return ok(measured, expected)
    return red(measured, expected, "correct the dimensions in the profile, or serve its model")


def check_tokenizer(subject: Subject, found: Evidence) -> Finding:
    """The tokenizer that renders here is, byte for byte, the one the server loaded."""
    served = str(found.model.get("tokenizer_path") or found.info.get("tokenizer_path") or "")
    if not served or not Path(served).is_dir():
        raise Skipped("the server's tokenizer is not on this machine; `rendering` compares its ids")
    theirs = tokenizer_files_digest(Path(served))
    if theirs is None:
        raise Skipped(f"no tokenizer file lies in {served}")
    ours = subject.renderer.digest
    if ours == theirs:
        return ok(ours[:16], theirs[:16])
    return red(
        f"sha256 {ours[:16]} here",
        f"{theirs[:16]}, as the server's",
        f"render with the server's own files: --tokenizer {served}",
    )


def check_no_drafter(subject: Subject, found: Evidence) -> Finding:
    """No draft model runs on a server that captures."""
    if not subject.captures:
        raise Skipped("this server does not capture")
    algorithm, draft = (
        found.info.get(k) for k in ("speculative_algorithm", "speculative_draft_model_path")
    )
    if not algorithm and not draft:
        return ok("none", "no draft model")
    return red(
        f"speculative decoding is on: {algorithm} {draft or ''}".strip(),
        "no draft model while states are captured",
        "start the capture server without --speculative-* flags (`datagen launch --role capture`)",
    )


def readable(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint if its configuration can be read. Raises Skipped."""
    try:
        _ = checkpoint.config
    except (CorruptFile, ConfigError) as e:
        raise Skipped(str(e)) from e
    return checkpoint
