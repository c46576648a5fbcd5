"""A drafter of Kimi-K2.5's dimensions with drawn weights, for the parts of benchmarks/finetune.py."""

from __future__ import annotations

import torch

from datagen.drafter.config import DrafterConfig
from datagen.drafter.model import Drafter
from datagen.drafter.rope import Rope
from datagen.drafter.rows import Batch
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


def step_flops(c: DrafterConfig, batch: Batch) -> float:
    """Multiplications and additions that a step needs: forward once, backward twice; target once.

    Counted as computed here: context rows need fc, keys and values alone.
    """
    m, a, k = sum(batch.rows), sum(batch.active), batch.mask_AK.shape[1]
    h, q, kv = c.hidden_size, c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    pairs = int(batch.mask_AK.sum())
    every_row = 2 * m * (c.width * h + 2 * 2 * h * kv)
    queries = 2 * a * k * (2 * h * q + q * h + 3 * h * c.intermediate_size)
    deeper = 2 * a * (k - 1) * 2 * 2 * h * kv
    seen = sum(r * q_ - q_ * (q_ - 1) / 2 for r, q_ in zip(batch.rows, batch.active, strict=True))
    attention = 4 * k * q * seen
    head = 2 * pairs * h * c.draft_vocab_size
    goal = 2 * a * h * c.draft_vocab_size
    return 3.0 * (every_row + queries + deeper + attention + head) + goal
