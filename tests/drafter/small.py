"""Small seeded drafters, samples and targets."""

from __future__ import annotations

import torch

from datagen.drafter.attention import attention_for
from datagen.drafter.config import DrafterConfig
from datagen.drafter.model import Drafter
from datagen.drafter.rope import Rope
from datagen.drafter.rows import Batch, Sample
from datagen.drafter.target import LogitRule, Target
from datagen.drafter.vocab import DraftVocab

H, V, U = 16, 40, 24
CPU = torch.device("cpu")


def config(**changes: object) -> DrafterConfig:
    given = {
        "hidden_size": H, "intermediate_size": 32, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8,
        "vocab_size": V, "draft_vocab_size": U, "rope": Rope(10_000.0), "max_positions": 512,
        "boundaries": (1, 3, 4),
    }  # fmt: skip
    return DrafterConfig(**{**given, **changes})  # type: ignore[arg-type]


def vocab(seed: int = 0) -> DraftVocab:
    ids = torch.randperm(V, generator=torch.Generator().manual_seed(seed))[:U].sort().values
    return DraftVocab(ids.numpy(), V)


def drafter(seed: int = 0, scale: float = 8.0, **changes: object) -> Drafter:
    made = Drafter(config(**changes))
    made.initialise(seed)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.dim() == 2:
                parameter.mul_(scale)
    made.d2t.copy_(vocab().d2t)
    made.t2d.copy_(vocab().t2d)
    return made


def target(seed: int = 0) -> Target:
    g = torch.Generator().manual_seed(seed)
    embed, head = torch.randn(V, H, generator=g), torch.randn(V, H, generator=g)
    return Target(embed, head, torch.ones(H), 1e-5, LogitRule(), "llama", 512, {})


def sample(n: int, context: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Sample:
    g = torch.Generator().manual_seed(seed)
    return Sample(
        sample_id=f"s{seed}",
        ids_N=torch.randint(V, (n,), generator=g),
        n_context=context,
        features_NW=torch.randn(n, 3 * H, generator=g).to(dtype),
        final_NH=torch.randn(n, H, generator=g).to(dtype),
    )


def eager(batch: Batch):  # type: ignore[no-untyped-def]
    return attention_for(batch, "eager", CPU)
