"""A bare exchange of a drafter's gradients: what the link between the ranks takes when nothing else runs.

accelerate launch --multi_gpu --num_processes 2 -m benchmarks.finetune_link WEIGHTS OUT.json cuda

In training the exchange may run beside the backward pass, in buckets, so this bounds what it adds to a step
and does not explain it. Sums are taken in place, of float32, which training exchanges, and of bfloat16.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator

ROUNDS = 5


def main(weights: int, out: Path, device: str) -> None:
    """All-reduce of `weights` numbers in place, the median of a few; the first rank writes."""
    accelerator = Accelerator(cpu=device == "cpu")
    cuda = accelerator.device.type == "cuda"
    found: dict[str, Any] = {
        "weights": weights, "peer_access": torch.cuda.can_device_access_peer(0, 1) if cuda else None
    }  # fmt: skip
    for dtype in (torch.float32, torch.bfloat16):
        gradients = torch.ones(weights, device=accelerator.device, dtype=dtype)
        size = gradients.nbytes
        seconds = statistics.median([_exchanged(gradients, cuda) for _ in range(1 + ROUNDS)][1:])
        found[str(dtype).removeprefix("torch.")] = {
            "bytes": size, "seconds": seconds, "bytes_per_s": size / seconds,
        }  # fmt: skip
        del gradients
    if accelerator.is_main_process:
        out.write_text(json.dumps(found))
    accelerator.end_training()


def _exchanged(gradients: torch.Tensor, cuda: bool) -> float:
    dist.barrier()
    if cuda:
        torch.cuda.synchronize()
    started = time.perf_counter()
    dist.all_reduce(gradients)
    if cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - started


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
