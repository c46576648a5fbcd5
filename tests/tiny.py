"""A seeded random Llama with a real tokenizer, as a checkpoint directory: a target that needs no file."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from datagen.acceptance import ports

HIDDEN, LAYERS, HEADS, KV_HEADS, FFN, VOCAB, CONTEXT = 64, 6, 4, 2, 128, 512, 1024
BOUNDARIES = (1, 3, 4)
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
WORDS = [
    "river",
    "stone",
    "lamp",
    "violin",
    "harbour",
    "orchard",
    "engine",
    "winter",
    "pepper",
    "galaxy",
    "ladder",
    "copper",
    "mirror",
    "anchor",
    "thunder",
    "velvet",
    "compass",
    "meadow",
    "lantern",
    "saddle",
    "puzzle",
    "rocket",
    "canyon",
    "basket",
    "whistle",
    "shadow",
    "marble",
    "feather",
    "tunnel",
    "garden",
    "hammer",
    "island",
    "jacket",
    "kettle",
    "lemon",
    "magnet",
    "needle",
    "oyster",
]
CORPUS = [
    "The quick brown fox jumps over the lazy dog and counts one two three four five.",
    "Name three rivers in Peru. Write a haiku about rain, then another one about snow.",
    "def add(a, b):\n    return a + b\n",
]


def write_tiny_checkpoint(directory: Path, *, seed: int = 0, context: int = CONTEXT) -> Path:
    """Config, weights, tokenizer and template; a few hundred kilobytes."""
    directory.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape: int, scale: float = 0.3) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * scale).to(torch.bfloat16)

    head_dim = HIDDEN // HEADS
    weights = {"model.embed_tokens.weight": drawn(VOCAB, HIDDEN, scale=1.0)}
    for i in range(LAYERS):
        p = f"model.layers.{i}"
        weights |= {
            f"{p}.self_attn.q_proj.weight": drawn(HEADS * head_dim, HIDDEN),
            f"{p}.self_attn.k_proj.weight": drawn(KV_HEADS * head_dim, HIDDEN),
            f"{p}.self_attn.v_proj.weight": drawn(KV_HEADS * head_dim, HIDDEN),
            f"{p}.self_attn.o_proj.weight": drawn(HIDDEN, HEADS * head_dim),
            f"{p}.mlp.gate_proj.weight": drawn(FFN, HIDDEN),
            f"{p}.mlp.up_proj.weight": drawn(FFN, HIDDEN),
            f"{p}.mlp.down_proj.weight": drawn(HIDDEN, FFN),
            f"{p}.input_layernorm.weight": 1 + drawn(HIDDEN, scale=0.1),
            f"{p}.post_attention_layernorm.weight": 1 + drawn(HIDDEN, scale=0.1),
        }
    weights["model.norm.weight"] = 1 + drawn(HIDDEN, scale=0.1)
    save_file(weights, str(directory / "model.safetensors"), metadata={"format": "pt"})
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN,
        "intermediate_size": FFN, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS, "head_dim": head_dim, "vocab_size": VOCAB,
        "max_position_embeddings": context, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "hidden_act": "silu", "attention_bias": False, "mlp_bias": False,
        "tie_word_embeddings": True, "eos_token_id": 2, "dtype": "bfloat16",
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(
            vocab_size=VOCAB,
            special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "eos_token": "<|im_end|>",
                "chat_template": TEMPLATE,
            }
        )
    )
    return directory


def write_tiny_profile(path: Path, checkpoint: Path, endpoint: str, **changes: Any) -> Path:
    """A target profile of the tiny model."""
    profile = {
        "name": "tiny", "model": f"tests/{checkpoint.name}", "licence": "Apache-2.0",
        "embedded": False, "hidden_size": HIDDEN, "num_layers": LAYERS, "vocab_size": VOCAB,
        "context_length": CONTEXT, "boundaries": list(BOUNDARIES), "stop_token_ids": [2],
        "max_new_tokens": 12, "endpoint": endpoint,
        "sampling": {"train": {"temperature": 0.0}, "heldout": {"temperature": 0.0}},
        **changes,
    }  # fmt: skip
    path.write_text(json.dumps(profile))  # JSON is YAML
    return path


def write_tiny_mix(
    folder: Path, prompts: int, *, name: str = "tiny", multi_turn_every: int = 4
) -> Path:
    """A mix over generated prompts, some of several turns, and a few held-out ones."""

    def row(kind: str, i: int) -> dict[str, Any]:
        chosen = random.Random(f"{kind}{i}").choices(WORDS, k=8)
        messages = [{"role": "user", "content": f"Write {i} lines on {' '.join(chosen)}."}]
        if i % multi_turn_every == 0:
            more = f"Now {i} more of {kind}, on {chosen[0]} and {chosen[1]}."
            messages.append({"role": "user", "content": more})
        return {"id": f"{kind}-{i}", "messages": messages}

    for kind, count in (("train", prompts), ("heldout", max(2, prompts // 10))):
        lines = "".join(json.dumps(row(kind, i)) + "\n" for i in range(count))
        (folder / f"{kind}.jsonl").write_text(lines)
    mix = folder / f"{name}.yaml"
    mix.write_text(json.dumps(tiny_mix(prompts, max(2, prompts // 10))))
    return mix


def tiny_mix(prompts: int, heldout: int) -> dict[str, Any]:
    """The mix file's content."""
    source = {"adapter": "openai", "licence": "Apache-2.0"}
    return {
        "version": 1,
        "total": prompts + heldout,
        "sources": [{"name": "train", "file": "train.jsonl", "count": prompts, **source}],
        "heldout": {
            "sources": [{"name": "heldout", "file": "heldout.jsonl", "count": heldout, **source}]
        },
    }


def free_port() -> int:
    """A port for a server that is started later: no client's connection and no other worker gets it."""
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    number = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    mine = range(ports.LOWEST + number, ports.first_ephemeral(), workers)
    return ports.free_port(random.sample(mine, len(mine)))


class TargetProcess:
    """A real server process that can be killed and started again on its port."""

    def __init__(
        self,
        target: str,
        *,
        port: int,
        spool: Path,
        dtype: str,
        log: Path,
        more: tuple[str, ...] = (),
        fault: str = "",
        threads: int = 1,
    ) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._command = [
            sys.executable, "-m", "datagen.cli", "serve", "--target", target, "--port", str(port),
            "--dtype", dtype, "--spool-dir", str(spool), "--threads", str(threads), *more,
        ]  # fmt: skip
        if target != "smollm2":
            self._command += ["--boundaries", ",".join(map(str, BOUNDARIES))]
        self._log = log
        self._environment = {**os.environ, "DATAGEN_EMBEDDED_FAULT": fault}
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with open(self._log, "ab") as log:
            self._process = subprocess.Popen(
                self._command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
                env=self._environment,
            )  # fmt: skip
        deadline = time.monotonic() + 180
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise RuntimeError(f"the target ended: {self._log.read_text()[-2000:]}")
            try:
                urllib.request.urlopen(f"{self.url}/health", timeout=10).close()
            except OSError:
                time.sleep(0.05)
            else:
                return
        raise RuntimeError("the target did not start in 180 s")

    def kill(self, number: int = signal.SIGKILL) -> int:
        """End it; returns the exit status."""
        assert self._process is not None
        if self._process.poll() is None:
            os.kill(self._process.pid, number)
        return self._process.wait(60)


@contextmanager
def serving(
    target: str,
    folder: Path,
    *,
    dtype: str = "float32",
    port: int | None = None,
    name: str = "target",
    more: tuple[str, ...] = (),
    fault: str = "",
    threads: int = 1,
) -> Iterator[TargetProcess]:
    """A running target process, ended on exit. `name`: of its log; `more`: further arguments."""
    process = TargetProcess(
        target,
        port=port or free_port(),
        spool=folder / ("spool" if name == "target" else f"spool-{name}"),
        dtype=dtype,
        log=folder / f"{name}.log",
        more=more,
        fault=fault,
        threads=threads,
    )
    process.start()
    try:
        yield process
    finally:
        process.kill(signal.SIGTERM)
