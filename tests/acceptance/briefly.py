"""A drafter trained for a moment: good enough that some drafts are accepted and some are not."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from datagen.drafter.attention import attention_for
from datagen.drafter.checkpoint import export_files
from datagen.drafter.config import DrafterConfig
from datagen.drafter.model import Drafter, unrolled
from datagen.drafter.rope import Rope
from datagen.drafter.rows import Sample, pack
from datagen.embedded.cache import SequenceCache
from datagen.embedded.model import Llama

DEPTHS = 3


def trained_briefly(
    config: DrafterConfig, samples: Sequence[Sample], embed_VH: Tensor, *, rounds: int, lr: float
) -> Drafter:
    """Cross entropy on the recorded tokens; the vocabulary map keeps the most frequent ones."""
    drafter = Drafter(config)
    drafter.initialise(3)
    said = torch.cat([s.ids_N[s.n_context :] for s in samples])
    counts = torch.bincount(said, minlength=config.vocab_size)
    known = counts.argsort(descending=True, stable=True)[: config.draft_vocab_size].sort().values
    drafter.d2t.copy_(known - torch.arange(len(known)))
    drafter.t2d[known] = True
    to_draft = torch.full((config.vocab_size + 1,), -1)
    to_draft[known] = torch.arange(len(known))
    batch = pack(samples, DEPTHS).to(torch.device("cpu"), torch.float32)
    labels_AK = to_draft[batch.labels_AK]  # NO_LABEL is -1: the last entry, which is -1 too
    attention = attention_for(batch, "eager", torch.device("cpu"))
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=lr)
    for _ in range(rounds):
        h_AKH = unrolled(drafter, batch, embed_VH.float(), attention, DEPTHS)
        logits = drafter.lm_head(drafter.norm(h_AKH))
        loss = F.cross_entropy(logits.flatten(0, 1), labels_AK.flatten(), ignore_index=-1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return drafter.eval()


def greedy(model: Llama, prompts: Sequence[list[int]], n_tokens: int) -> list[list[int]]:
    """Prompts and what the embedded target says to them, stop tokens ignored."""
    caches = [SequenceCache(model.config) for _ in prompts]
    last = model.logits(model.prefill(prompts, caches=caches).last_BH).argmax(-1).tolist()
    texts = [[*p, t] for p, t in zip(prompts, last, strict=True)]
    for _ in range(n_tokens - 1):
        last = model.decode(last, caches).argmax(-1).tolist()
        for text, token in zip(texts, last, strict=True):
            text.append(token)
    return texts


def recorded(
    model: Llama, ids: list[int], n_context: int, boundaries: tuple[int, ...], name: str
) -> Sample:
    """A sample as shards store it: boundaries in bf16."""
    rows = model.prefill([ids], boundaries=boundaries).rows_NW
    assert rows is not None
    features = rows[:, : -model.config.hidden_size].to(torch.bfloat16)
    return Sample(name, torch.tensor(ids), n_context, features, None)


def drafter_config(model: Llama, boundaries: tuple[int, ...], draft_vocab: int) -> DrafterConfig:
    """A drafter of the target's size."""
    c = model.config
    return DrafterConfig(
        hidden_size=c.hidden_size, intermediate_size=c.intermediate_size, num_heads=c.num_heads,
        num_kv_heads=c.num_kv_heads, head_dim=c.head_dim, vocab_size=c.vocab_size,
        draft_vocab_size=draft_vocab, rope=Rope(c.rope_theta), max_positions=c.context_length,
        boundaries=boundaries, rms_norm_eps=c.rms_norm_eps,
    )  # fmt: skip


def export(drafter: Drafter, model: Llama, directory: Path) -> Path:
    """The drafter as a checkpoint directory, float32."""
    directory.mkdir(parents=True)
    export_files(
        directory, drafter.config, drafter.state_dict(), target_type="llama",
        context_length=model.config.context_length, dtype="float32",
    )  # fmt: skip
    return directory
