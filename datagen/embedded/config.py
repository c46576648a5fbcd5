"""What a Llama checkpoint says of itself."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datagen.errors import ConfigError


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    """Dimensions of a Llama-class model."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    context_length: int
    rms_norm_eps: float
    rope_theta: float
    eos_token_ids: tuple[int, ...]
    model_type: str
    architecture: str

    @classmethod
    def read(cls, directory: Path) -> LlamaConfig:
        """From a checkpoint's config.json; raises ConfigError for what this forward cannot run."""
        path = directory / "config.json"
        try:
            raw: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
            if raw["model_type"] != "llama" or rope.get("rope_type", "default") != "default":
                raise ConfigError(
                    f"model_type {raw['model_type']} with rope {rope or 'default'} is not supported",
                    where=path,
                    fix="serve it with SGLang",
                )
            eos = raw.get("eos_token_id")
            heads = int(raw["num_attention_heads"])
            return cls(
                hidden_size=int(raw["hidden_size"]),
                intermediate_size=int(raw["intermediate_size"]),
                num_layers=int(raw["num_hidden_layers"]),
                num_heads=heads,
                num_kv_heads=int(raw["num_key_value_heads"]),
                head_dim=int(raw.get("head_dim") or int(raw["hidden_size"]) // heads),
                vocab_size=int(raw["vocab_size"]),
                context_length=int(raw["max_position_embeddings"]),
                rms_norm_eps=float(raw["rms_norm_eps"]),
                rope_theta=float(rope.get("rope_theta") or raw["rope_theta"]),
                eos_token_ids=tuple(eos)
                if isinstance(eos, list)
                else ()
                if eos is None
                else (eos,),
                model_type=str(raw["model_type"]),
                architecture=str((raw.get("architectures") or ["LlamaForCausalLM"])[0]),
            )
        except (OSError, KeyError, TypeError, ValueError) as e:
            raise ConfigError(f"no Llama checkpoint: {e!r}", where=path) from e
