"""speculators 0.9's own `train` on exported samples, in a process of its own: its data, flags and result."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from argparse import Namespace
from itertools import pairwise
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from datagen.drafter.checkpoint import own_name
from datagen.drafter.model import Drafter

LOG_EVERY = 5
WARM_UP = 0.05
Result = dict[str, Any]


def peer_data(given: Namespace, folder: Path, count: int, target: Path) -> float:
    """Its data directory, every sample `--repeats` times, and one more for its validation split.

    Returns the share of rows that train.
    """
    from datasets import concatenate_datasets, load_from_disk

    once = folder / "once"
    command = [sys.executable, "-m", "datagen.cli", "export", str(given.manifest)]
    flags = ["--format", "speculators", "--split", "train", "--checkpoint", str(target)]
    subprocess.run([*command, *flags, "--output", str(once)], check=True)
    rows = load_from_disk(str(once))
    assert len(rows) == count
    every = concatenate_datasets([rows] * given.repeats + [rows.select([0])])
    every.with_format("torch").save_to_disk(str(folder / "data"))
    states = folder / "data" / "hidden_states"
    states.mkdir()
    for n in range(len(every)):
        os.link(
            once / "hidden_states" / f"hs_{n % count}.safetensors", states / f"hs_{n}.safetensors"
        )
    os.link(once / "token_freq.pt", folder / "data" / "token_freq.pt")
    return (len(every) - 0.5) / len(every)


def peer_flags(
    given: Namespace, *, optimizer: str, seed: int, tokens: int, depths: int, ratio: float
) -> Result:
    """Of `speculators train`, all that is no path: the same as of ours where it has the same."""
    cuda = given.device.startswith("cuda")
    return {
        "speculator-type": "eagle3", "on-missing": "raise", "total-seq-len": tokens,
        "train-data-ratio": repr(ratio), "epochs": 1, "optimizer": optimizer,
        "lr": given.learning_rate, "weight-decay": 0.0, "muon-weight-decay": 0.0,
        "scheduler-type": "cosine", "scheduler-warmup-ratio": WARM_UP, "ttt-steps": depths,
        "log-freq": LOG_EVERY, "num-workers": 12 if cuda else 1, "seed": seed,
        "draft-attn-impl": "simple_flex_attention" if cuda else "eager",
        "loss-implementation": given.peer_loss, "draft-vocab-size": given.draft_vocab,
    }  # fmt: skip


def peer_run(folder: Path, flags: Result, target: Path, rows: int) -> Result:
    """`speculators train` in a process of its own (finetune_peer.py stamps its steps).

    `folder` holds what it starts from, and gets its output. `rows`: the supervised tokens of all.
    """
    name = f"theirs-{flags['seed']}"
    out = folder / name
    paths = {
        "verifier-name-or-path": target, "from-pretrained": folder / "peer-init",
        "data-path": folder / "data", "save-path": out, "log-dir": out / "logs",
        "d2t-path": folder / "d2t.npy", "t2d-path": folder / "t2d.npy",
    }  # fmt: skip
    stamps = folder / f"{name}.json"
    command = [sys.executable, "-m", "benchmarks.finetune_peer", str(stamps), str(LOG_EVERY)]
    command += [f"--{flag}={value}" for flag, value in (flags | paths).items()]
    started = time.monotonic()
    subprocess.run(command, check=True, timeout=3600)
    seconds = time.monotonic() - started
    times = json.loads(stamps.read_text())
    steps, marks = times["steps"], times["marks"]
    marks = marks[len(marks) // 3 :]
    windows = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in pairwise(marks)]
    found = sorted(out.rglob("model.safetensors"))
    assert found, f"no checkpoint below {out}"
    return {
        "supervised_tokens_per_s": rows / steps / statistics.median(windows),
        "steps": steps,
        "optimizer": flags["optimizer"],
        "seed": flags["seed"],
        "flags": flags,
        "seconds": seconds,
        "windows_s": windows,
        "weights": found[-1],
    }


def as_drafter(weights: Path, start: Drafter) -> Drafter:
    """Their checkpoint under our names; the verifier's tensors in it are the target's."""
    tensors = {own_name(n): t for n, t in load_file(weights).items()}
    drafter = Drafter(start.config)
    wanted = drafter.state_dict()
    drafter.load_state_dict({n: tensors[n].to(wanted[n].dtype) for n in wanted})
    return drafter
