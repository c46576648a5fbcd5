"""What a drafter's config.json says of it, and what SGLang would silently read wrongly."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from datagen.drafter.rope import Rope
from datagen.errors import ConfigError

ARCHITECTURE = "LlamaForCausalLMEagle3"
# Their explicit layer ids are taken verbatim from SGLang 0.5.13 on; Llama-class models add one.
VERBATIM_TYPES = frozenset({"deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2", "kimi_k25"})


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterConfig:
    """Dimensions of a one-layer EAGLE-3 drafter.

    `boundaries`: canonical (Hugging Face hidden_states indices), None where a checkpoint states none.
    `norm_before_fc`, `norm_output`: SGLang's options of those names.
    """

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    rope: Rope
    max_positions: int
    rms_norm_eps: float = 1e-5
    n_boundaries: int = 3
    norm_before_fc: bool = False
    norm_output: bool = False
    boundaries: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(f"{self.num_heads} heads cannot share {self.num_kv_heads} key heads")
        if self.head_dim % 2:
            raise ConfigError(
                f"head size {self.head_dim} is odd: rotary halves cannot be made of it"
            )
        if self.draft_vocab_size > self.vocab_size:
            raise ConfigError(
                f"draft vocabulary {self.draft_vocab_size} exceeds the target's {self.vocab_size}"
            )

    @property
    def width(self) -> int:
        """Values of a row's feature: the boundaries, concatenated."""
        return self.n_boundaries * self.hidden_size

    def with_head_dim(self, q_rows: int) -> DrafterConfig:
        """The head size that q_proj's shape gives, whatever the file omitted."""
        if q_rows % self.num_heads:
            raise ConfigError(f"q_proj has {q_rows} rows for {self.num_heads} heads")
        return replace(self, head_dim=q_rows // self.num_heads)


def read_config(path: Path, *, target_type: str | None = None) -> DrafterConfig:
    """From a drafter's config.json. `target_type`: the target's model_type, which decides how engine

    layer ids are to be read. Raises ConfigError naming the file.
    """
    try:
        raw: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        eagle = raw.get("eagle_config") or {}
        refused = {
            "num_hidden_layers": raw.get("num_hidden_layers", 1) != 1,
            "attention_bias": raw.get("attention_bias", False),
            "mlp_bias": raw.get("mlp_bias", False),
            "fc_norm": raw.get("fc_norm") or raw.get("use_aux_norm"),
            "bias": raw.get("bias", False),
            "hidden_act": raw.get("hidden_act", "silu") != "silu",
        }
        bad = [f"{name} {raw.get(name)}" for name, is_bad in refused.items() if is_bad]
        hidden = int(raw["hidden_size"])
        if raw.get("target_hidden_size", hidden) != hidden:
            bad.append(f"target_hidden_size {raw['target_hidden_size']}")
        if bad:
            raise ConfigError(f"{', '.join(bad)} is not supported", where=path)
        ids = eagle.get("eagle_aux_hidden_state_layer_ids")
        own = (raw.get("datagen") or {}).get("boundaries")
        heads, kv_heads = int(raw["num_attention_heads"]), raw.get("num_key_value_heads")
        boundaries = own or (canonical_ids(ids, target_type) if ids and target_type else None)
        return DrafterConfig(
            hidden_size=hidden,
            intermediate_size=int(raw["intermediate_size"]),
            num_heads=heads,
            num_kv_heads=int(kv_heads or heads),
            head_dim=int(raw.get("head_dim") or hidden // heads),
            vocab_size=int(raw["vocab_size"]),
            draft_vocab_size=int(raw.get("draft_vocab_size") or raw["vocab_size"]),
            rope=Rope.read(raw, str(path)),
            max_positions=int(raw["max_position_embeddings"]),
            rms_norm_eps=float(raw["rms_norm_eps"]),
            n_boundaries=int(raw.get("num_aux_hidden_states") or (len(ids) if ids else 3)),
            norm_before_fc=bool(eagle.get("norm_before_fc", raw.get("norm_before_fc", False))),
            norm_output=bool(raw.get("norm_output", False)),
            boundaries=tuple(int(b) for b in boundaries) if boundaries else None,
        )
    except (OSError, KeyError, TypeError, ValueError) as e:
        raise ConfigError(f"no drafter config: {e!r}", where=path) from e


def written_config(config: DrafterConfig, target_type: str, dtype: str) -> dict[str, Any]:
    """config.json as SGLang reads it. Every key is there because SGLang's default for it is wrong."""
    if config.boundaries is None:
        raise ConfigError("the drafter's boundaries are not known", fix="give its target")
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.rms_norm_eps,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
        **config.rope.spelled(),
        "num_aux_hidden_states": config.n_boundaries,
        "norm_output": config.norm_output,
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": engine_ids(config.boundaries, target_type),
            "use_aux_hidden_state": True,
            "norm_before_fc": config.norm_before_fc,
        },
        "datagen": {"boundaries": list(config.boundaries), "target_type": target_type},
    }


def engine_ids(boundaries: tuple[int, ...], target_type: str) -> list[int]:
    """Boundaries as SGLang's explicit layer ids: b-1 for Llama classes, verbatim for DeepSeek's."""
    if target_type in VERBATIM_TYPES:
        if boundaries[0] == 1:
            raise ConfigError(
                f"boundaries {list(boundaries)} cannot be told to SGLang: for {target_type} it adds "
                "one to ids that begin with 1", fix="choose another first boundary",
            )  # fmt: skip
        return list(boundaries)
    if boundaries[0] == 0:
        raise ConfigError(f"boundary 0 cannot be told to SGLang for a {target_type} target")
    return [b - 1 for b in boundaries]


def canonical_ids(ids: list[int], target_type: str) -> tuple[int, ...]:
    """Boundaries that SGLang >= 0.5.13 captures for explicit layer `ids`."""
    verbatim = target_type in VERBATIM_TYPES and ids[0] != 1
    return tuple(int(i) if verbatim else int(i) + 1 for i in ids)
