"""The residual stream of a small Llama checkpoint, by a forward pass of its own in numpy.

A second opinion on what an engine captures: it shares no code with any engine, and no torch.
Shape suffixes: T tokens, H hidden, D head dimension, G query heads per key head, K key heads.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from datagen.target.weights import Checkpoint, Float

MOST_BYTES = 4 << 30


class NoReference(Exception):
    """This checkpoint is not computed here; the text says why."""


def require_computable(checkpoint: Checkpoint) -> None:
    """Raise NoReference for all but Llama with plain rotary positions and at most MOST_BYTES."""
    config = checkpoint.config
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", "default")
    if config.get("model_type") != "llama" or kind != "default" or config.get("attention_bias"):
        raise NoReference(f"no reference forward for {config.get('model_type')} with {kind} rope")
    if checkpoint.n_bytes > MOST_BYTES:
        raise NoReference(f"{checkpoint.n_bytes / 1e9:.0f} GB of weights are too many to recompute")


def streams(
    checkpoint: Checkpoint, embedding: str, ids: Sequence[int], wanted: Collection[int]
) -> dict[int, Float]:
    """float32 [T, H] entering each wanted layer, which may be the number of layers.

    Raises NoReference, NoTensor, CorruptFile. Reads a layer's weights at a time.
    """
    require_computable(checkpoint)
    config = checkpoint.config
    x_TH = np.concatenate([_row(checkpoint, embedding, i) for i in ids])
    kept: dict[int, Float] = {}
    for layer in range(max(wanted) + 1):
        if layer in wanted:
            kept[layer] = x_TH
        if layer < min(int(config["num_hidden_layers"]), max(wanted)):
            x_TH = _layer(checkpoint, layer, x_TH)
    return kept


def normalised(x_TH: Float, weight_H: Float, eps: float) -> Float:
    """RMS norm over the last axis."""
    scale = 1 / np.sqrt(np.square(x_TH).mean(-1, keepdims=True) + eps)
    result: Float = (x_TH * scale * weight_H).astype(np.float32)
    return result


def _row(checkpoint: Checkpoint, name: str, token: int) -> Float:
    return checkpoint.rows(name, token, token + 1)


def _layer(checkpoint: Checkpoint, layer: int, x_TH: Float) -> Float:
    def w(name: str) -> Float:
        return checkpoint.tensor(f"model.layers.{layer}.{name}.weight")

    config, n_tokens = checkpoint.config, len(x_TH)
    eps, heads = float(config["rms_norm_eps"]), int(config["num_attention_heads"])
    kv_heads = int(config.get("num_key_value_heads") or heads)
    dim = int(config.get("head_dim") or int(config["hidden_size"]) // heads)
    read_TH = normalised(x_TH, w("input_layernorm"), eps)
    q = _turned((read_TH @ w("self_attn.q_proj").T).reshape(n_tokens, heads, dim), config)
    k = _turned((read_TH @ w("self_attn.k_proj").T).reshape(n_tokens, kv_heads, dim), config)
    v = (read_TH @ w("self_attn.v_proj").T).reshape(n_tokens, kv_heads, dim)
    q_KGTD = q.reshape(n_tokens, kv_heads, heads // kv_heads, dim).transpose(1, 2, 0, 3)
    scores_KGTT = q_KGTD @ k.transpose(1, 2, 0)[:, None] / np.sqrt(np.float32(dim))
    scores_KGTT += np.triu(np.full((n_tokens, n_tokens), -np.inf, dtype=np.float32), 1)
    scores_KGTT = np.exp(scores_KGTT - scores_KGTT.max(-1, keepdims=True))
    scores_KGTT /= scores_KGTT.sum(-1, keepdims=True)
    mixed_KGTD = scores_KGTT @ v.transpose(1, 0, 2)[:, None]
    mixed = mixed_KGTD.transpose(2, 0, 1, 3).reshape(n_tokens, heads * dim)
    x_TH = x_TH + mixed @ w("self_attn.o_proj").T
    read_TH = normalised(x_TH, w("post_attention_layernorm"), eps)
    gate = read_TH @ w("mlp.gate_proj").T
    gated = gate / (1 + np.exp(-gate)) * (read_TH @ w("mlp.up_proj").T)
    result: Float = (x_TH + gated @ w("mlp.down_proj").T).astype(np.float32)
    return result


def _turned(heads_TND: Float, config: dict[str, object]) -> Float:
    """Rotary positions 0, 1, 2 ..., the two halves of a head turned against each other."""
    rope = config.get("rope_parameters")
    theta = rope.get("rope_theta") if isinstance(rope, dict) else None
    dim = heads_TND.shape[-1]
    steps = np.arange(0, dim, 2, dtype=np.float32) / dim
    base = float(str(theta or config["rope_theta"]))
    angles = np.outer(np.arange(len(heads_TND), dtype=np.float32), base**-steps)
    both = np.concatenate([angles, angles], -1)[:, None]
    low, high = np.split(heads_TND, 2, axis=-1)
    turned: Float = heads_TND * np.cos(both) + np.concatenate([-high, low], -1) * np.sin(both)
    return turned.astype(np.float32)
