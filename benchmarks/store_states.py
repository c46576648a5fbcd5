"""Real states for the store's benchmark: SmolLM2 answers demo prompts and a few long ones, and captures.

Kept in the cache directory as .npy (bit patterns) and .json (lengths, ids), made once.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

N_SHORT, N_LONG, LONGEST, NEW_TOKENS = 64, 4, 1800, 200
ANSWERS_IN = "bfloat16"
BOUNDARIES, HIDDEN = (2, 15, 27), 576


@dataclass(frozen=True)
class Samples:
    """uint16 bit patterns [n, 4*576] per sample, its ids, its context length."""

    rows: list[NDArray[np.uint16]]
    ids: list[NDArray[np.int32]]
    n_context: list[int]


def real_samples(dtype: str = ANSWERS_IN) -> Samples:
    """Load what the model captured computing in `dtype`; captures it first where nobody has."""
    from datagen.embedded.weights import cache_directory

    folder = cache_directory() / "benchmarks"
    states, notes = (folder / f"store-states-{dtype}.{kind}" for kind in ("npy", "json"))
    if not notes.exists():
        folder.mkdir(parents=True, exist_ok=True)
        _capture(dtype, states, notes)
    noted = json.loads(notes.read_text())
    ids = [np.array(i, dtype=np.int32) for i in noted["ids"]]
    ends = np.cumsum([len(i) for i in ids])[:-1]
    rows = [np.ascontiguousarray(r) for r in np.split(np.load(states), ends)]
    return Samples(rows, ids, noted["n_context"])


def _capture(dtype: str, states: Path, notes: Path) -> None:
    import torch
    from embedded import LONG, SHORT, all_at_once, capture, generate, prompts, served

    with served(dtype) as url:
        if dtype == ANSWERS_IN:
            contexts = [*prompts(SHORT, N_SHORT, 400), *prompts(LONG, N_LONG, LONGEST)]
            n_context = [len(c) for c in contexts]
            answers = all_at_once(generate, url, contexts, max_new_tokens=NEW_TOKENS)
            joined = [c + a for c, a in zip(contexts, answers, strict=True)]
        else:  # the same text
            said = real_samples(ANSWERS_IN)
            joined, n_context = [i.tolist() for i in said.ids], said.n_context
        captured = all_at_once(capture, url, joined)
    rows = torch.cat([c.reshape(len(c), -1) for c in captured]).view(torch.int16).numpy()
    np.save(states, rows.view(np.uint16))
    kept = {"ids": joined, "n_context": n_context}
    temporary = notes.with_suffix(".tmp")
    temporary.write_text(json.dumps(kept))
    temporary.replace(notes)


def wide_samples(real: Samples, *, n: int, tokens: int, hidden: int = 7168) -> Samples:
    """Samples [tokens, 4*hidden] that have the real ones' channels: means and spreads drawn from those
    of the same layer, tokens as loud as real ones, Gaussian otherwise."""
    rng = np.random.default_rng(0)
    values = _floats(np.concatenate(real.rows)).reshape(-1, len(BOUNDARIES) + 1, HIDDEN)
    mean_LH, spread_LH = values.mean(0), values.std(0)
    loudness = np.sqrt((((values - mean_LH) / (spread_LH + 1e-9)) ** 2).mean((1, 2)))
    picked = rng.integers(0, HIDDEN, hidden)
    jitter_LH = rng.lognormal(0, 0.1, (len(BOUNDARIES) + 1, hidden)).astype(np.float32)
    rows = []
    for _ in range(n):
        noise = rng.standard_normal((tokens, len(BOUNDARIES) + 1, hidden), dtype=np.float32)
        noise *= rng.choice(loudness, (tokens, 1, 1)).astype(np.float32)
        noise *= spread_LH[:, picked] * jitter_LH
        noise += mean_LH[:, picked] * jitter_LH
        rows.append(_bits(noise).reshape(tokens, -1))
    ids = [rng.integers(0, 163_840, tokens).astype(np.int32) for _ in range(n)]
    return Samples(rows, ids, [tokens // 2] * n)


def _floats(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _bits(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    bits = np.ascontiguousarray(values).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


if __name__ == "__main__":
    found = real_samples(*sys.argv[1:2])
    sys.stdout.write(f"{len(found.rows)} samples of {sum(map(len, found.rows))} tokens\n")
