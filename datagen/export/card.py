"""README.md of an exported dataset: what `datasets` must know, and what people must."""

from __future__ import annotations

from collections import Counter

import yaml

from datagen.store.manifest import Manifest

# The Hub's own short names; https://huggingface.co/docs/hub/repositories-licenses
KNOWN = {
    "apache-2.0", "mit", "cc0-1.0", "cc-by-4.0", "cc-by-3.0", "cc-by-sa-4.0", "cc-by-sa-3.0",
    "cc-by-nc-4.0", "cc-by-nc-sa-4.0", "odc-by", "odbl", "pddl", "unlicense", "bsd-3-clause",
    "gpl-3.0", "openrail", "llama3.1", "llama3", "gemma",
}  # fmt: skip


class Card:
    """Counts what is exported, and writes it up."""

    def __init__(self, manifest: Manifest, *, with_states: bool) -> None:
        self._manifest, self._with_states = manifest, with_states
        self._splits: Counter[str] = Counter()
        self._tokens: Counter[str] = Counter()
        self._sources: Counter[tuple[str, str]] = Counter()

    @property
    def samples(self) -> int:
        """Samples counted so far."""
        return self._splits.total()

    def count(self, split: str, source: str, licence: str, tokens: int) -> None:
        """One sample."""
        self._splits[split] += 1
        self._tokens[split] += tokens
        self._sources[source, licence] += 1

    def text(self) -> str:
        """The whole card."""
        m, states = self._manifest, self._manifest.states
        licences = sorted({licence for _, licence in self._sources})
        named = sorted({x.lower() if x.lower() in KNOWN else "other" for x in licences})
        front = {
            "license": named[0] if len(named) == 1 else named,
            "pretty_name": m.run,
            "task_categories": ["text-generation"],
            "tags": ["speculative-decoding", "eagle3", "synthetic"],
            "configs": [
                {
                    "config_name": "default",
                    "data_files": [
                        {"split": s, "path": f"data/{s}-*.parquet"} for s in self._splits
                    ],
                }
            ],
        }
        parts = [
            f"---\n{yaml.safe_dump(front, sort_keys=False)}---\n",
            f"# {m.run}",
            (f"Prompts answered by `{m.target.get('model')}` (revision "
            f"{m.target.get('revision', 'unstated')}, {m.target.get('dtype', 'unstated')}), to train "
            "an EAGLE-3 drafter of this model. `input_ids` are the engine's own ids of context and "
            "response; `loss_mask` is 0 over the context and 1 over the response, stop token "
            "included."),
            self._table("split", "samples", "tokens", [
                (s, f"{n:,}", f"{self._tokens[s]:,}") for s, n in self._splits.items()
            ]),
            "## Licences",
            ("Each row names the licence of its prompt's source. The responses are the target's: its "
            f"licence is {m.target.get('licence', 'unstated')}."),
            self._table("source", "licence", "samples", [
                (source, licence, f"{n:,}") for (source, licence), n in sorted(self._sources.items())
            ]),
            "## How it was made",
            (f"Sampling: `{m.sampling}`. Of {m.samples.planned:,} planned samples "
            f"{m.samples.collected:,} were collected and {sum(m.samples.rejected.values()):,} "
            f"rejected. Fingerprint `{m.fingerprint}`, code version {m.code_version}."),
        ]  # fmt: skip
        if self._with_states:
            parts.append(
                f"`states`: {states.dtype} little-endian, row-major [tokens, "
                f"{len(states.boundaries) + 1}, {states.hidden_size}]: the residual stream entering "
                f"decoder layers {states.boundaries} (Hugging Face `hidden_states` indices), then the "
                f"final state, {states.final_norm}-norm. Row i belongs to token i."
            )
        return "\n\n".join(parts) + "\n"

    @staticmethod
    def _table(a: str, b: str, c: str, rows: list[tuple[str, str, str]]) -> str:
        head = f"| {a} | {b} | {c} |\n|-|-|-|\n"
        return head + "\n".join(f"| {x} | {y} | {z} |" for x, y, z in rows)
