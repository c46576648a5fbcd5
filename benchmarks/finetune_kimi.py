"""A drafter of Kimi-K2.5's dimensions with drawn weights, for the parts of benchmarks/finetune.py."""

from __future__ import annotations

import torch

from datagen.drafter.config import DrafterConfig
from datagen.drafter.model import Drafter
from datagen.drafter.rope import Rope
from datagen.drafter.vocab import DraftVocab, by_frequency

HIDDEN, VOCAB, DRAFT, INTERMEDIATE = 7168, 163_840, 32_000, 18_432
BOUNDARIES, HEADS, MAX_POSITIONS = (2, 30, 58), 64, 262_144


def sizes(hidden: int) -> tuple[int, int, int]:
    """Vocabulary, draft vocabulary and MLP width in Kimi's proportions to `hidden`."""
    return (VOCAB * hidden // HIDDEN, DRAFT * hidden // HIDDEN, INTERMEDIATE * hidden // HIDDEN)


def drawn_drafter(
    hidden: int, device: torch.device, generator: torch.Generator
) -> tuple[Drafter, DraftVocab]:
    """On `device`; matrices are normal of 0.02."""
    vocab, draft, intermediate = sizes(hidden)
    words = by_frequency({}, draft, vocab)
    config = DrafterConfig(
        hidden_size=hidden, intermediate_size=intermediate, num_heads=HEADS, num_kv_heads=HEADS,
        head_dim=hidden // HEADS, vocab_size=vocab, draft_vocab_size=draft, rope=Rope(50_000.0),
        max_positions=MAX_POSITIONS, boundaries=BOUNDARIES,
    )  # fmt: skip
    with torch.device(device):
        drafter = Drafter(config)
    drafter._table = config.rope.table(config.head_dim)
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.02, generator=generator)
        drafter.d2t.copy_(words.d2t)
        drafter.t2d.copy_(words.t2d)
    return drafter, words
