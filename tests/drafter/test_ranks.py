"""Two processes train as one process with twice the micro-batches."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from datagen.drafter.curves import read_metrics
from datagen.drafter.state import read_provenance
from tests.drafter.run import tiny_target, write_run

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("accelerate") is None, reason="accelerate is not installed"
    ),
]


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_two_processes_train_as_one_with_twice_the_micro_batches(
    tmp_path: Path, optimizer: str
) -> None:
    manifest = write_run(tmp_path / "run", tiny_target(tmp_path), train=12, heldout=3)
    flags = [
        str(manifest), "--target-weights", str(tmp_path / "tiny-llama"), "--device", "cpu",
        "--batch-tokens", "64", "--depths", "2", "--max-steps", "6", "--draft-vocab", "128",
        "--log-every", "1", "--export-dtype", "float32", "--checkpoint-every", "3",
        "--learning-rate", "0.003", "--optimizer", optimizer,
    ]  # fmt: skip
    # What `accelerate launch --multi_gpu` starts; on CPUs alone its own launcher wants mpirun.
    launch = [
        "-m", "torch.distributed.run", "--nproc_per_node", "2", "--standalone",
        "-m", "datagen.cli",
    ]  # fmt: skip
    alone = ["-m", "datagen.cli"]
    for name, command, accumulate in (("two", launch, "1"), ("one", alone, "2")):
        out = ["--out", str(tmp_path / name), "--accumulate", accumulate]
        done = subprocess.run(
            [sys.executable, *command, "finetune", *flags, *out], cwd=ROOT, check=False,
            capture_output=True, text=True, timeout=280,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
    one, two = (
        [r["loss"] for r in read_metrics(tmp_path / n / "metrics.jsonl") if "loss" in r]
        for n in ("one", "two")
    )
    used = read_provenance(tmp_path / "two" / "final")
    assert used["settings"]["ranks"] == 2
    assert two == pytest.approx(one, rel=1e-4)
    weights = [
        load_file(tmp_path / n / "final" / "model.safetensors") for n in ("one", "two")
    ]  # fmt: skip
    for name, tensor in weights[0].items():
        torch.testing.assert_close(tensor, weights[1][name], rtol=1e-2, atol=1e-4)
