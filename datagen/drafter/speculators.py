"""The layout of vllm-project/speculators (0.9): `midlayer` is layers.0, the config is nested.

Its defaults (norm before residual, norm before fc, normed output, a sliding window) are not ours and
not SGLang's: every one of them is written out as off, or as the drafter's config says.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from datagen.drafter.checkpoint import CONFIG, DTYPES, WEIGHTS
from datagen.drafter.config import DrafterConfig
from datagen.errors import ConfigError

VERSION = "0.9.0"


def speculators_config(config: DrafterConfig, target: str, dtype: str) -> dict[str, Any]:
    """config.json of an Eagle3DraftModel. `target`: name or path of the target's checkpoint."""
    if config.boundaries is None:
        raise ConfigError("the drafter's boundaries are not known", fix="give its target")
    layer = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.rms_norm_eps,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        **config.rope.spelled(),
    }
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": VERSION,
        "transformer_layer_config": layer,
        "draft_vocab_size": config.draft_vocab_size,
        "norm_before_residual": False,
        "norm_before_fc": config.norm_before_fc,
        "norm_output": config.norm_output,
        "fc_norm": False,
        "embed_requires_grad": False,
        "target_hidden_size": None,
        "eagle_aux_hidden_state_layer_ids": list(config.boundaries),
        "torch_dtype": dtype,
        "tie_word_embeddings": False,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {"proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1,
                 "accept_tolerance": 0.0}
            ],
            "verifier": {"name_or_path": target, "architectures": []},
        },
    }  # fmt: skip


def write_speculators(
    directory: Path, config: DrafterConfig, weights: dict[str, Tensor], *, embed_VH: Tensor,
    target: str, dtype: str = "bfloat16",
) -> None:  # fmt: skip
    """Write a drafter's state dict as a speculators checkpoint, the target's embedding included."""
    directory.mkdir(parents=True, exist_ok=True)
    kind = DTYPES[dtype]
    tensors = {
        (f"layers.0.{n.removeprefix('midlayer.')}" if n.startswith("midlayer.") else n): (
            t.to(kind) if t.is_floating_point() else t
        ).detach().cpu().contiguous()
        for n, t in weights.items()
    }  # fmt: skip
    tensors["embed_tokens.weight"] = embed_VH.to(kind).cpu().contiguous()
    with torch.no_grad():
        save_file(tensors, str(directory / WEIGHTS), metadata={"format": "pt"})
    text = json.dumps(speculators_config(config, target, dtype), indent=2) + "\n"
    (directory / CONFIG).write_text(text, encoding="utf-8")
