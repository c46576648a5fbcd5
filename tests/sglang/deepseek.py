"""A random tiny model of Kimi-K2.5's class: DeepSeek-V3's text model, 61 layers, MoE from layer 1 on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.tiny import VOCAB, write_tiny_checkpoint

LAYERS, HIDDEN, HEADS, Q_RANK, FFN, EXPERT_FFN, EXPERTS = 61, 64, 2, 32, 96, 32, 4
KV_RANK, NOPE, ROPE, VALUE = 32, 16, 8, 24  # all different: no mix-up of them has shapes that fit
CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3",
    "hidden_size": HIDDEN, "intermediate_size": FFN, "moe_intermediate_size": EXPERT_FFN,
    "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": HEADS,
    "q_lora_rank": Q_RANK, "kv_lora_rank": KV_RANK, "qk_nope_head_dim": NOPE,
    "qk_rope_head_dim": ROPE, "v_head_dim": VALUE, "n_routed_experts": EXPERTS,
    "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
    "topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True,
    "routed_scaling_factor": 2.5, "first_k_dense_replace": 1, "moe_layer_freq": 1,
    "vocab_size": VOCAB, "max_position_embeddings": 1024, "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0, "hidden_act": "silu", "attention_bias": False,
    "attention_dropout": 0.0, "tie_word_embeddings": False, "eos_token_id": 2, "bos_token_id": 1,
    "torch_dtype": "bfloat16", "ep_size": 1, "num_nextn_predict_layers": 0,
    "rope_scaling": {
        "type": "yarn", "factor": 2.0, "original_max_position_embeddings": 512,
        "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
    },
}  # fmt: skip


ABSORBED_MLA = '''
"""For tests on a CPU: SGLang's own absorbed MLA for every pass of its torch-native attention."""


def register():
    from sglang.srt.models.deepseek_common import attention_backend_handler as handlers

    handlers.AttentionBackendRegistry.register("torch_native", handlers._dispatch_mla_subtype)
'''
"""A plugin of SGLang. Its torch-native attention reads keys and values from the cache alone. Without a
handler of its own it falls to the one of Triton, which lets a prefill without a prefix hand over per-head
keys and values (MHA): these are ignored, and the latents of the cache are taken for them. The absorbed
method, which reads latents, is SGLang's too; it runs decodes, and prefills behind a prefix, everywhere.
"""


def install_absorbed_mla(site: Path) -> str:
    """Put the plugin where a server finds it; returns its name for $SGLANG_PLUGINS."""
    name = "datagen_test_absorbed_mla"
    (site / f"{name}.py").write_text(ABSORBED_MLA)
    about = site / f"{name}-1.dist-info"
    about.mkdir(exist_ok=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
    (about / "entry_points.txt").write_text(f"[sglang.srt.plugins]\n{name} = {name}:register\n")
    return name


def write_tiny_deepseek(directory: Path) -> Path:
    """Config, weights and the tiny tokenizer; 5 MB."""
    write_tiny_checkpoint(directory)
    (directory / "config.json").write_text(json.dumps(CONFIG))
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int, scale: float = 0.2) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * scale).to(torch.bfloat16)

    def norm(size: int) -> torch.Tensor:
        return (1 + torch.randn(size, generator=generator) * 0.1).to(torch.bfloat16)

    def mlp(prefix: str, inner: int) -> dict[str, torch.Tensor]:
        return {
            f"{prefix}.gate_proj.weight": drawn(inner, HIDDEN),
            f"{prefix}.up_proj.weight": drawn(inner, HIDDEN),
            f"{prefix}.down_proj.weight": drawn(HIDDEN, inner),
        }

    tensors = {
        "model.embed_tokens.weight": drawn(VOCAB, HIDDEN, scale=1.0),
        "lm_head.weight": drawn(VOCAB, HIDDEN),
        "model.norm.weight": norm(HIDDEN),
    }
    for i in range(LAYERS):
        p = f"model.layers.{i}"
        a = f"{p}.self_attn"
        tensors |= {
            f"{a}.q_a_proj.weight": drawn(Q_RANK, HIDDEN),
            f"{a}.q_a_layernorm.weight": norm(Q_RANK),
            f"{a}.q_b_proj.weight": drawn(HEADS * (NOPE + ROPE), Q_RANK),
            f"{a}.kv_a_proj_with_mqa.weight": drawn(KV_RANK + ROPE, HIDDEN),
            f"{a}.kv_a_layernorm.weight": norm(KV_RANK),
            f"{a}.kv_b_proj.weight": drawn(HEADS * (NOPE + VALUE), KV_RANK),
            f"{a}.o_proj.weight": drawn(HIDDEN, HEADS * VALUE),
            f"{p}.input_layernorm.weight": norm(HIDDEN),
            f"{p}.post_attention_layernorm.weight": norm(HIDDEN),
        }
        if i < CONFIG["first_k_dense_replace"]:
            tensors |= mlp(f"{p}.mlp", FFN)
            continue
        tensors |= {
            f"{p}.mlp.gate.weight": drawn(EXPERTS, HIDDEN),
            f"{p}.mlp.gate.e_score_correction_bias": drawn(EXPERTS, scale=0.1).float(),
        }
        for name in (*(f"experts.{e}" for e in range(EXPERTS)), "shared_experts"):
            tensors |= mlp(f"{p}.mlp.{name}", EXPERT_FFN)
    save_file(tensors, str(directory / "model.safetensors"), metadata={"format": "pt"})
    return directory
