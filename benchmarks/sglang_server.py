"""A real SGLang server with the capture plugin of this checkout in it, for the benchmarks.

Standard library, and torch for `widen`; runs in SGLang's own environment.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PLUGIN = {"datagen_capture": "datagen.capture.sglang_plugin:register"}
KIMI_WIDE = {
    "hidden_size": 7168, "num_hidden_layers": 6, "num_attention_heads": 56,
    "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 18432,
    "tie_word_embeddings": False,
}  # fmt: skip


def widen(model: Path, out: Path) -> None:
    """A random Llama of Kimi's width with `model`'s vocabulary and tokenizer (about 7 GB in bf16)."""
    import torch
    from safetensors.torch import save_file

    out.mkdir(parents=True, exist_ok=True)
    for path in model.iterdir():
        if path.suffix != ".safetensors":
            shutil.copy(path, out)
    config = json.loads((model / "config.json").read_text()) | KIMI_WIDE
    (out / "config.json").write_text(json.dumps(config))
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    query, key = config["num_attention_heads"] * 128, config["num_key_value_heads"] * 128
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(1)

    def drawn(*shape: int) -> Any:
        values = torch.randn(*shape, generator=generator, device=device, dtype=torch.bfloat16)
        return (values * 0.02).cpu()

    ones = torch.ones(hidden, dtype=torch.bfloat16)
    tensors = {
        "model.embed_tokens.weight": drawn(vocab, hidden),
        "lm_head.weight": drawn(vocab, hidden),
        "model.norm.weight": ones.clone(),
    }
    for i in range(config["num_hidden_layers"]):
        p = f"model.layers.{i}."
        tensors |= {
            f"{p}self_attn.q_proj.weight": drawn(query, hidden),
            f"{p}self_attn.k_proj.weight": drawn(key, hidden),
            f"{p}self_attn.v_proj.weight": drawn(key, hidden),
            f"{p}self_attn.o_proj.weight": drawn(hidden, query),
            f"{p}mlp.gate_proj.weight": drawn(inner, hidden),
            f"{p}mlp.up_proj.weight": drawn(inner, hidden),
            f"{p}mlp.down_proj.weight": drawn(hidden, inner),
            f"{p}input_layernorm.weight": ones.clone(),
            f"{p}post_attention_layernorm.weight": ones.clone(),
        }
    save_file(tensors, str(out / "model.safetensors"), metadata={"format": "pt"})


class Server:
    """One SGLang process group with the plugins in it, on `cpus` alone when some are named.

    `args`: python, port, spool, boundaries, flags.
    """

    def __init__(
        self, args: argparse.Namespace, model: Path, folder: Path, cpus: set[int] | None = None,
        plugins: dict[str, str] = PLUGIN,
    ) -> None:  # fmt: skip
        self.url, self.spool = f"http://127.0.0.1:{args.port}", Path(args.spool)
        self.log = folder / "server.log"
        site = folder / "site" / "datagen-0.dist-info"
        site.mkdir(parents=True)
        (site / "METADATA").write_text("Metadata-Version: 2.1\nName: datagen\nVersion: 0\n")
        lines = [f"{name} = {where}\n" for name, where in plugins.items()]
        (site / "entry_points.txt").write_text("[sglang.srt.plugins]\n" + "".join(lines))
        path = os.pathsep.join([str(site.parent), str(ROOT), os.environ.get("PYTHONPATH", "")])
        environment = os.environ | {
            "PYTHONPATH": path.rstrip(os.pathsep), "SGLANG_PLUGINS": ",".join(plugins),
            "DATAGEN_CAPTURE_DIR": args.spool, "DATAGEN_CAPTURE_BOUNDARIES": args.boundaries,
        }  # fmt: skip
        command = [
            args.python, "-m", "sglang.launch_server", "--model-path", str(model), "--host",
            "127.0.0.1", "--port", str(args.port), "--enable-return-hidden-states", *args.flags,
        ]  # fmt: skip
        with open(self.log, "wb") as log:
            self._process = subprocess.Popen(
                command, env=environment, stdout=log, stderr=log, start_new_session=True,
                preexec_fn=(lambda: os.sched_setaffinity(0, cpus)) if cpus else None,
            )  # fmt: skip

    def wait(self, patience_s: float) -> None:
        """Until it answers; ends this script with the log's end when it does not."""
        deadline = time.monotonic() + patience_s
        while True:
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=10):
                    return
            except OSError:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    sys.exit("the server did not come up:\n" + self.log.read_text()[-4000:])
            time.sleep(0.5)

    def stop(self) -> None:
        """With all its processes."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self._process.pid, number)
                self._process.wait(20)
            except ProcessLookupError:
                return
            except subprocess.TimeoutExpired:
                continue

    def info(self) -> dict[str, Any]:
        """What it says of itself."""
        with urllib.request.urlopen(f"{self.url}/server_info", timeout=30) as answer:
            return json.load(answer)  # type: ignore[no-any-return]


def split_cpus(clients: int) -> tuple[set[int] | None, list[int | None]]:
    """CPUs of the server, and one for each of `clients`; none are bound where there are too few."""
    mine = sorted(os.sched_getaffinity(0))
    if len(mine) < 2 * clients + 2:
        return None, [None] * clients
    return set(mine[:-clients]), list(mine[-clients:])


def bind(cpu: int | None) -> None:
    """Keep this process on `cpu`."""
    if cpu is not None:
        os.sched_setaffinity(0, {cpu})
