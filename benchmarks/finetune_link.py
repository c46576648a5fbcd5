"""A bare exchange of as many bytes as a drafter's gradients: what the link between the ranks allows.

accelerate launch --multi_gpu --num_processes 2 -m benchmarks.finetune_link WEIGHTS OUT.json cuda
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path

import torch
from accelerate import Accelerator

ROUNDS = 5


def main(weights: int, out: Path, device: str) -> None:
    """All-reduce of `weights` float32 numbers, the median of a few; the first rank writes."""
    accelerator = Accelerator(cpu=device == "cpu")
    gradients = torch.ones(weights, device=accelerator.device)
    cuda = accelerator.device.type == "cuda"
    seconds = []
    for _ in range(1 + ROUNDS):
        accelerator.wait_for_everyone()
        started = time.perf_counter()
        accelerator.reduce(gradients, reduction="sum")
        if cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    median = statistics.median(seconds[1:])
    if accelerator.is_main_process:
        found = {
            "bytes": 4 * weights, "seconds": median, "bytes_per_s": 4 * weights / median,
            "peer_access": torch.cuda.can_device_access_peer(0, 1) if cuda else None,
        }  # fmt: skip
        out.write_text(json.dumps(found))
    accelerator.end_training()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
