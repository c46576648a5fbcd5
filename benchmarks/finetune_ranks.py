"""Two GPUs against one, by the README's own line, on states of Kimi-K2.5's dimensions.

python -m benchmarks.finetune ranks --folder /dev/shm/ranks      # CUDA, two GPUs; 20 GB of space

A made-up run is written through the real store (random boundaries; final states that the made-up
lm_head turns into the recorded tokens), with a made-up target and init drafter. Then
`datagen finetune` runs on it alone, and under `accelerate launch --multi_gpu`: loader, packing,
checkpoint and measurement included. tokens_per_s is the trainer's own figure, the median of its
windows after the first third (compilation). --accumulate holds for both: one exchange for so many batches.
Beside it, what a bare exchange of as many gradients takes (`link`), and by how much a step of several is
longer (`longer_step_s`). The first is no part of the second: training may exchange beside its backward pass,
so the link bounds what is lost to it and does not explain it.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import statistics
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from benchmarks.finetune_kimi import BOUNDARIES, HEADS, MAX_POSITIONS, drawn_drafter, sizes
from datagen.drafter.checkpoint import MAPS, export_files
from datagen.drafter.curves import read_metrics
from datagen.drafter.state import read_provenance
from datagen.store.fingerprint import Fingerprint
from datagen.store.layout import RunLayout
from datagen.store.manifest import ManifestHeader, StatesEntry, build_manifest
from datagen.store.partition import PartitionStore
from datagen.store.plan import Plan, PlannedPrompt, write_plan
from datagen.store.responses import Response
from datagen.store.states import StatesSpec

LENGTH, CONTEXT, HELD_OUT = 1024, 256, 1
LOG_EVERY = 3
Result = dict[str, Any]


def ranks(given: Namespace, folder: Path, keep: Callable[[Result], Result]) -> Result:
    """Make the run (once; a folder that has one is used again), then both launches."""
    if not (folder / "made").exists():
        make(given, folder)
    found = {}
    link = _link(given, folder)
    print(f"link: {link}", flush=True)
    for count in (1, given.ranks):
        found[count] = _launched(given, folder, count)
        print(f"{count}: {found[count]}", flush=True)
        keep({"hidden": given.hidden, "accumulate": given.accumulate, "link": link, "runs": found})
    one, every = found[1], found[given.ranks]
    ratio = every["tokens_per_s"] / one["tokens_per_s"]
    tokens = given.batch_tokens or 8192
    longer = (
        given.accumulate * tokens * (given.ranks / every["tokens_per_s"] - 1 / one["tokens_per_s"])
    )
    return {
        "ranks": given.ranks, "hidden": given.hidden, "depths": given.depths or 5,
        "batch_tokens": tokens, "accumulate": given.accumulate, "one": one, "all": every,
        "link": link, "longer_step_s": longer, "ratio": ratio, "passed": ratio >= 0.9 * given.ranks,
    }  # fmt: skip


def _link(given: Namespace, folder: Path) -> Result:
    """An exchange of the init drafter's weights, nothing computed; `failed` where it cannot be measured."""
    with safe_open(folder / "init" / "model.safetensors", framework="pt") as f:
        shapes = [f.get_slice(n).get_shape() for n in f.keys() if n not in MAPS]  # noqa: SIM118
    out = folder / "link.json"
    command = [*_launcher(given), "-m", "benchmarks.finetune_link"]
    command += [str(sum(math.prod(s) for s in shapes)), str(out), given.device]
    try:
        subprocess.run(command, check=True, timeout=300)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as e:
        how = e.returncode if isinstance(e, subprocess.CalledProcessError) else "timeout"
        return {"failed": how}  # what the launches take is worth no less
    measured: Result = json.loads(out.read_text())
    return measured


def _launcher(given: Namespace) -> list[str]:
    if given.device.startswith("cuda"):
        return ["accelerate", "launch", "--multi_gpu", "--num_processes", str(given.ranks)]
    # On CPUs alone accelerate's launcher wants mpirun, and without it starts one process.
    return [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(given.ranks)]


def _launched(given: Namespace, folder: Path, count: int) -> Result:
    out = folder / f"out-{count}"
    command = [sys.executable, "-m", "datagen.cli"]
    if count > 1:
        command = [*_launcher(given), "-m", "datagen.cli"]
    flags = {
        "--init": folder / "init", "--target-weights": folder / "target", "--out": out,
        "--batch-tokens": given.batch_tokens or 8192, "--depths": given.depths or 5,
        "--weights": 1000, "--max-steps": given.steps, "--log-every": LOG_EVERY,
        "--evaluate-every": 10_000, "--checkpoint-every": 10_000, "--threads": given.threads,
        "--device": given.device, "--accumulate": given.accumulate,
    }  # fmt: skip
    command += ["finetune", str(folder / "run" / "manifest.json"), "--allow-chance"]
    command += [str(part) for pair in flags.items() for part in pair]
    environment = dict(os.environ)
    if count == 1:
        environment["CUDA_VISIBLE_DEVICES"] = "0"
    started = time.monotonic()
    subprocess.run(command, check=True, timeout=600, env=environment)
    seconds = time.monotonic() - started
    started_ranks = read_provenance(out / "final")["settings"]["ranks"]
    assert started_ranks == count, f"{started_ranks} ranks trained, {count} were asked for"
    records = [r for r in read_metrics(out / "metrics.jsonl") if r["kind"] == "train"]
    steady = records[len(records) // 3 :]
    return {
        "command": " ".join(command[:7] if count > 1 else ["python", *command[1:3]]),
        "tokens_per_s": statistics.median(r["tokens_per_s"] for r in steady),
        "supervised_tokens_per_s": statistics.median(r["rows_per_s"] for r in steady),
        "wait_share": statistics.median(r["wait_share"] for r in steady),
        "windows": [r["tokens_per_s"] for r in records],
        "seconds": seconds,
    }


def make(given: Namespace, folder: Path) -> None:
    """Run, target and init drafter in `folder`, drawn on the device."""
    hidden, device = given.hidden, torch.device(given.device)
    vocab, draft, _ = sizes(hidden)
    g = torch.Generator(device=device).manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g, device=device, dtype=torch.bfloat16) * 0.02

    (folder / "target").mkdir(parents=True)
    head_VH = drawn(vocab, hidden)
    tensors = {
        "model.embed_tokens.weight": drawn(vocab, hidden).cpu(), "lm_head.weight": head_VH.cpu(),
        "model.norm.weight": torch.ones(hidden, dtype=torch.bfloat16),
    }  # fmt: skip
    save_file(tensors, folder / "target" / "model.safetensors")
    target = {
        "model_type": "kimi_k2", "vocab_size": vocab, "hidden_size": hidden, "rms_norm_eps": 1e-5,
        "max_position_embeddings": MAX_POSITIONS, "tie_word_embeddings": False,
        "num_attention_heads": HEADS, "intermediate_size": sizes(hidden)[2],
    }  # fmt: skip
    (folder / "target" / "config.json").write_text(json.dumps(target))
    drafter, _ = drawn_drafter(hidden, device, g)
    (folder / "init").mkdir()
    export_files(
        folder / "init", drafter.config, drafter.state_dict(), target_type="kimi_k2",
        context_length=MAX_POSITIONS,
    )  # fmt: skip
    _make_run(given.samples, folder / "run", hidden, draft, head_VH, drawn)
    (folder / "made").touch()


def _make_run(
    count: int, root: Path, hidden: int, draft: int, head_VH: torch.Tensor, drawn: Any
) -> None:
    layout = RunLayout(root)
    root.mkdir()
    spec = StatesSpec(
        boundaries=BOUNDARIES, final_norm="post", dtype="BF16", hidden_size=hidden, codec="plane"
    )
    splits = {"train": range(count), "heldout": range(count, count + HELD_OUT)}
    plan = [
        PlannedPrompt(
            prompt_id=_id(n), messages=f'[{{"content":"{n}","role":"user"}}]', tools=None,
            thinking=None, split=split, n_turns=1, prompt_tokens=CONTEXT,
            max_new_tokens=LENGTH - CONTEXT, source="made-up", category=None, language="en",
            licence="CC0-1.0", partition=partition,
        )
        for partition, (split, numbers) in enumerate(splits.items())
        for n in numbers
    ]  # fmt: skip
    digest = write_plan(layout.plan, plan, {"mix": "made-up"})
    fingerprint = Fingerprint({"plan": digest})
    fingerprint.save(layout.fingerprint)
    rng = np.random.default_rng(0)
    for partition, numbers in enumerate(splits.values()):
        store = PartitionStore.open(
            layout.partition(partition), fingerprint_digest=fingerprint.digest, spec=spec,
            shard_bytes=1 << 30,
        )  # fmt: skip
        for n in numbers:
            ids = rng.integers(3, draft, LENGTH).astype(np.int32)
            follows = torch.from_numpy(np.roll(ids, -1).astype(np.int64)).to(head_VH.device)
            final = 50 * head_VH[follows] + drawn(LENGTH, hidden)
            states = torch.cat([drawn(LENGTH, len(BOUNDARIES) * hidden) * 50, final], dim=1)
            store.add_response(_response(n, ids))
            bits = states.view(torch.int16).cpu().numpy().view(np.uint16)
            store.add_states(_id(n), 0, ids, CONTEXT, bits)
            store.commit()
        store.seal(len(numbers))
        store.close()
    header = ManifestHeader(
        run=root.name, code_version="0.0", fingerprint=fingerprint.digest,
        target={"model": "made-up/kimi", "revision": "0"},
        sampling={"train": {"temperature": 0.0}}, settings={"stop_token_ids": [2]},
        states=StatesEntry(
            boundaries=list(BOUNDARIES), final_norm="post", dtype="BF16", hidden_size=hidden,
            codec="plane",
        ),
        servers=[], preflight={},
    )  # fmt: skip
    build_manifest(layout, Plan.open(layout.plan), header)


def _id(number: int) -> str:
    return hashlib.sha256(f"made-up {number}".encode()).hexdigest()


def _response(number: int, ids: np.ndarray) -> Response:
    return Response(
        prompt_id=_id(number), turn=0, context_ids=ids[:CONTEXT], response_ids=ids[CONTEXT:],
        text="", finish_reason="length", stop_reason_detail="", prompt_tokens=CONTEXT,
        completion_tokens=LENGTH - CONTEXT, cached_tokens=0, num_retractions=0,
        spec_verify_ct=None, seed=number, endpoint="made-up", attempts=1, queue_s=0.0, server_s=0.0,
    )  # fmt: skip
