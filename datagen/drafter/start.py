"""What training starts from, and the refusals of what does not fit together."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from datagen.drafter.checkpoint import Loaded, load_drafter
from datagen.drafter.config import DrafterConfig
from datagen.drafter.dataset import SampleRef, SourceInfo
from datagen.drafter.model import Drafter
from datagen.drafter.rope import Rope
from datagen.drafter.settings import LossKind
from datagen.drafter.target import Target
from datagen.drafter.vocab import DraftVocab
from datagen.errors import ConfigError


def require_final_states(info: SourceInfo, loss: LossKind) -> None:
    """kl and lk need the target's distribution, hence its final states."""
    if loss != "ce" and info.final_norm == "none":
        raise ConfigError(
            f"loss {loss} needs final states, and the run captured none", where=info.path,
            fix="use --loss ce, or collect with final states",
        )  # fmt: skip


def require_width(info: SourceInfo, target: Target) -> None:
    """The states must be this target's size."""
    hidden = int(target.embed_VH.shape[1])
    if hidden != info.hidden_size:
        raise ConfigError(
            f"the states are {info.hidden_size} wide, the target's weights {hidden}",
            where=info.path, fix=f"--target-weights must be {info.target_model}",
        )  # fmt: skip


def require_heldout(refs: Sequence[SampleRef], where: Path) -> None:
    """Nothing can be claimed without a held-out slice."""
    if not refs:
        raise ConfigError(
            "no held-out sample", where=where,
            fix="collect a mix with held-out prompts, or give --heldout-manifest",
        )  # fmt: skip


def load_init(directory: Path, info: SourceInfo, target: Target) -> Loaded:
    """An init checkpoint that fits the states and the target; raises ConfigError naming what does not."""
    loaded = load_drafter(directory, target_type=target.model_type)
    c = loaded.drafter.config
    if (c.n_boundaries, c.hidden_size) != (len(info.boundaries), info.hidden_size):
        raise ConfigError(
            f"the drafter reads {c.n_boundaries} boundaries of {c.hidden_size} ({c.width} values), the "
            f"states have {len(info.boundaries)} of {info.hidden_size} "
            f"({len(info.boundaries) * info.hidden_size})", where=directory,
            fix="capture with --speculative-algorithm EAGLE3 (EAGLE gives one boundary) and the "
            "drafter's layer ids",
        )  # fmt: skip
    if c.vocab_size != target.vocab_size:
        raise ConfigError(
            f"the drafter's target has {c.vocab_size} tokens, {info.target_model} "
            f"{target.vocab_size}", where=directory, fix="it is the drafter of another target",
        )  # fmt: skip
    if c.boundaries is not None and c.boundaries != info.boundaries:
        raise ConfigError(
            f"the drafter was made for boundaries {list(c.boundaries)}, the states are of "
            f"{list(info.boundaries)}", where=directory, fix="collect with the drafter's boundaries",
        )  # fmt: skip
    from dataclasses import replace

    loaded.drafter.config = replace(c, boundaries=info.boundaries)
    return loaded


@torch.no_grad()
def fresh_drafter(info: SourceInfo, target: Target, vocab: DraftVocab, seed: int) -> Drafter:
    """Random weights of the target's own dimensions; norm and lm_head start as the target's rows."""
    c = target.config
    heads = int(c["num_attention_heads"])
    hidden = info.hidden_size
    llama = target.model_type == "llama"
    drafter = Drafter(
        DrafterConfig(
            hidden_size=hidden,
            intermediate_size=int(c["intermediate_size"]),
            num_heads=heads,
            num_kv_heads=int(c.get("num_key_value_heads") or heads),
            head_dim=int((llama and c.get("head_dim")) or hidden // heads),
            vocab_size=target.vocab_size,
            draft_vocab_size=len(vocab.target_ids_U),
            rope=Rope.read(c, "the target's config.json"),
            max_positions=target.context_length,
            rms_norm_eps=target.norm_eps,
            n_boundaries=len(info.boundaries),
            boundaries=info.boundaries,
        )
    )
    drafter.initialise(seed)
    drafter.norm.weight.copy_(target.norm_H.float())
    drafter.lm_head.weight.copy_(target.draft_head(torch.from_numpy(vocab.target_ids_U)).float())
    drafter.d2t.copy_(vocab.d2t)
    drafter.t2d.copy_(vocab.t2d)
    return drafter
