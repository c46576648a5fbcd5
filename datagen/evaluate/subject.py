"""What is measured: the samples, their slices, and the proof that the drafter never saw them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from datagen.acceptance.metrics import length_tag
from datagen.errors import ConfigError, CorruptFile, MeasurementError
from datagen.store.layout import RunLayout
from datagen.store.plan import Plan

if TYPE_CHECKING:
    from datagen.drafter.dataset import SampleRef

Notify = Callable[[str], None]
TURNS = ("one turn", "first of several", "later turn")


def require_not_trained_on(drafter: Path, refs: Sequence[SampleRef]) -> str:
    """Raise MeasurementError when the drafter was trained on a held-out prompt; say what is proven."""
    from datagen.drafter.dataset import ManifestSource

    held = {r.prompt_id for r in refs}
    unknown = []
    for entry in trained(drafter).get("manifests", ()):
        path = Path(entry["path"])
        if not path.exists() or hashlib.sha256(path.read_bytes()).hexdigest() != entry["sha256"]:
            unknown.append(str(path))
            continue
        shared = held & {r.prompt_id for r in ManifestSource(path).index("train", 0)}
        if shared:
            raise MeasurementError(
                f"the drafter was trained on {len(shared)} of the {len(held)} prompts to measure "
                f"on, {min(shared)[:16]} among them",
                where=path,
                fix="evaluate on prompts it has not seen",
            )
    if unknown:
        return f"not proven: {', '.join(unknown)} cannot be read as it was trained on"
    known = trained(drafter).get("manifests")
    return "proven" if known else "not proven: the drafter does not say what it was trained on"


def trained(directory: Path) -> dict[str, Any]:
    """What a drafter's provenance says of its training; empty for a foreign checkpoint."""
    from datagen.drafter.state import PROVENANCE, read_provenance

    if not (directory / PROVENANCE).exists():
        return {}
    found = read_provenance(directory)
    return {
        "manifests": found.get("manifests", []),
        "trained_samples": (found.get("samples") or {}).get("train"),
        "trained_steps": found.get("step"),
    }


def tags_of(root: Path, refs: Sequence[SampleRef]) -> dict[str, Mapping[str, str]]:
    """Slices of every sample: from the plan where the run has one, and from its lengths."""
    path = RunLayout(root).plan
    if not path.exists():
        raise CorruptFile("no plan", where=path, fix="restore it: slices are read from it")
    wanted = {r.prompt_id for r in refs}
    about = {p.prompt_id: p for p in Plan.open(path).rows() if p.prompt_id in wanted}
    tags: dict[str, Mapping[str, str]] = {}
    for ref in refs:
        prompt, turn = about[ref.prompt_id], int(ref.sample_id.rpartition("-")[2])
        kind = TURNS[0] if prompt.n_turns == 1 else TURNS[1 if turn == 0 else 2]
        tags[ref.sample_id] = {
            "source": prompt.source,
            "category": prompt.category or "untagged",
            "language": prompt.language or "untagged",
            "tools": "with tools" if prompt.tools else "no tools",
            "thinking": {True: "on", False: "off", None: "unset"}[prompt.thinking],
            "turn": kind,
            "length": length_tag(ref.n_tokens - ref.n_context),
        }
    return tags


def digest_of(refs: Sequence[SampleRef]) -> str:
    """sha256 over the sorted sample ids: evaluations with one digest are of one set."""
    return hashlib.sha256("\n".join(sorted(r.sample_id for r in refs)).encode()).hexdigest()


def embedded_weights(model: str, notify: Notify) -> Path:
    from datagen.embedded.weights import MODEL_NAME, ensure_checkpoint

    if model.rsplit("/", 1)[-1] != MODEL_NAME:
        raise ConfigError(
            f"the weights of {model} are not known here",
            fix="give --target-weights: its checkpoint directory (the embedding is read)",
        )
    return ensure_checkpoint(progress=notify)
