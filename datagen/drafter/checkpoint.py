"""A drafter's directory as SGLang loads it: config.json and model.safetensors, strictly.

SGLang ignores names it does not know and leaves what is missing at its random start, without a word.
So here every name is checked, both ways, on reading and on writing. Names (layers.0 is midlayer in
some writers' files, and read as it):

    fc.weight [H, B*H]   midlayer.{hidden_norm, input_layernorm, post_attention_layernorm}.weight [H]
    midlayer.self_attn.{q,k,v}_proj.weight [*, 2H]   midlayer.self_attn.o_proj.weight [H, *]
    midlayer.mlp.{gate,up,down}_proj.weight   norm.weight [H]   lm_head.weight [U, H]
    d2t int64 [U]   t2d bool [V]   input_norm.weight [B*H] with norm_before_fc
    embed_tokens.weight [V, H] may be there and is the target's: it is neither kept nor written
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from datagen.drafter.config import DrafterConfig, read_config, written_config
from datagen.drafter.model import Drafter
from datagen.drafter.vocab import DraftVocab, from_maps, whole
from datagen.errors import ConfigError
from datagen.store.atomic import fsync_dir, storage_errors

WEIGHTS, CONFIG = "model.safetensors", "config.json"
EMBEDDING = "embed_tokens.weight"
MAPS = ("d2t", "t2d")
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class Loaded:
    """A drafter, its vocabulary, and the sha256 of its weights file."""

    drafter: Drafter
    vocab: DraftVocab
    sha256: str


def expected_shapes(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor a checkpoint of this config has, the embedding aside, with its shape."""
    with torch.device("meta"):
        state = Drafter(config).state_dict()
    return {name: tuple(tensor.shape) for name, tensor in state.items()}


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files of a checkpoint; raises ConfigError when there is none."""
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise ConfigError("no safetensors", where=directory, fix="name a checkpoint directory")
    return files


def own_name(name: str) -> str:
    """SGLang's name of a tensor: `model.` and `layers.0` are other writers' spellings."""
    name = name.removeprefix("model.")
    return name.replace("layers.0.", "midlayer.", 1) if name.startswith("layers.0.") else name


def read_tensors(directory: Path) -> dict[str, Tensor]:
    """All tensors under SGLang's names; raises ConfigError."""
    tensors: dict[str, Tensor] = {}
    for path in weight_files(directory):
        try:
            with safe_open(str(path), framework="pt") as f:
                for name in f.keys():  # noqa: SIM118
                    tensors[own_name(name)] = f.get_tensor(name)
        except (OSError, SafetensorError) as e:
            raise ConfigError(f"cannot be read: {e}", where=path) from e
    return tensors


def load_drafter(directory: Path, *, target_type: str | None = None) -> Loaded:
    """Read a checkpoint, strictly: unknown or missing names and other shapes are errors by name.

    `target_type`: the target's model_type, by which engine layer ids become boundaries.
    """
    config = read_config(directory / CONFIG, target_type=target_type)
    tensors = read_tensors(directory)
    tensors.pop(EMBEDDING, None)
    q_proj = tensors.get("midlayer.self_attn.q_proj.weight")
    if q_proj is not None:
        config = config.with_head_dim(int(q_proj.shape[0]))
    if not set(MAPS) & set(tensors) and config.draft_vocab_size == config.vocab_size:
        every = whole(config.vocab_size)
        tensors |= {"d2t": every.d2t, "t2d": every.t2d}
    _require_same(expected_shapes(config), tensors, directory)
    vocab = from_maps(tensors["d2t"], tensors["t2d"])
    drafter = Drafter(config)
    drafter.load_state_dict(
        {n: t.float() if n not in MAPS else t.to(_map_dtype(n)) for n, t in tensors.items()},
        strict=True,
    )
    return Loaded(drafter, vocab, sha256_of_weights(directory))


def _map_dtype(name: str) -> torch.dtype:
    return torch.long if name == "d2t" else torch.bool


def _require_same(
    shapes: dict[str, tuple[int, ...]], tensors: dict[str, Tensor], where: Path
) -> None:
    unknown = sorted(set(tensors) - set(shapes))
    missing = sorted(set(shapes) - set(tensors))
    other = [
        f"{n} is {list(tensors[n].shape)}, the config makes it {list(shape)}"
        for n, shape in shapes.items()
        if n in tensors and tuple(tensors[n].shape) != shape
    ]
    odd = [n for n, t in tensors.items() if n not in MAPS and t.dtype not in DTYPES.values()]
    faults = [f"unknown {', '.join(unknown)}"] if unknown else []
    faults += [f"missing {', '.join(missing)}"] if missing else []
    faults += other + [f"{n} is {tensors[n].dtype}" for n in odd]
    if faults:
        raise ConfigError(
            "; ".join(faults), where=where, fix="only one-layer EAGLE-3 drafters are read"
        )


def sha256_of_weights(directory: Path) -> str:
    """sha256 over the weight files, in order of name."""
    digest = hashlib.sha256()
    for path in weight_files(directory):
        with open(path, "rb") as f:
            digest.update(hashlib.file_digest(f, "sha256").digest())
    return digest.hexdigest()


def write_directory(directory: Path, fill: Callable[[Path], None]) -> None:
    """A whole directory or none: `fill` writes its files beside, then it takes its name.

    One that is there already is replaced.
    """
    work = directory.with_name(directory.name + ".tmp")
    shutil.rmtree(work, ignore_errors=True)
    with storage_errors(directory):
        work.mkdir(parents=True)
        fill(work)
        for path in work.iterdir():
            fd = os.open(path, os.O_RDONLY)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
        fsync_dir(work)
        if directory.exists():
            shutil.rmtree(directory)
        os.rename(work, directory)
        fsync_dir(directory.parent)


def export_files(
    directory: Path, config: DrafterConfig, weights: dict[str, Tensor], *, target_type: str,
    context_length: int, dtype: str = "bfloat16",
) -> None:  # fmt: skip
    """Write config.json and model.safetensors into an existing directory, as SGLang loads them.

    `weights`: a drafter's state dict. Served positions reach `context_length`, whatever the init
    checkpoint claimed. Raises ConfigError on another key set than expected.
    """
    config = config.with_head_dim(int(weights["midlayer.self_attn.q_proj.weight"].shape[0]))
    config = replace(config, max_positions=max(config.max_positions, context_length))
    if dtype not in DTYPES:
        raise ConfigError(f"unknown dtype '{dtype}'", fix=f"use one of {', '.join(DTYPES)}")
    _require_same(expected_shapes(config), weights, directory)
    tensors = {
        name: (t if name in MAPS else t.to(DTYPES[dtype])).detach().cpu().contiguous()
        for name, t in weights.items()
    }
    save_file(tensors, str(directory / WEIGHTS), metadata={"format": "pt"})
    written = written_config(config, target_type, dtype)
    text = json.dumps(written, indent=2) + "\n"
    (directory / CONFIG).write_text(text, encoding="utf-8")
