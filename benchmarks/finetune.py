"""The trainer: does it learn, how fast is it, and against what.

python -m benchmarks.finetune learn RUN/manifest.json        # CPU: minutes. States of the embedded target
python -m benchmarks.finetune speed RUN/manifest.json        # CPU or CUDA: real states, wait share, tokens/s
python -m benchmarks.finetune kimi                           # CUDA: Kimi-K2.5's dimensions, synthetic states
python -m benchmarks.finetune speculators RUN/manifest.json  # CUDA or CPU, where speculators is installed
python -m benchmarks.finetune ranks                          # two GPUs: accelerate launch, synthetic states
python -m benchmarks.finetune trainers RUN/manifest.json     # the same: whole trainers, speed and accept_len
python -m benchmarks.finetune choose RUN/manifest.json --aside 300 --choices '[{}, {"optimizer": "muon"}]'

learn        held-out predicted_accept_len of a fresh drafter, before and after fine-tuning, beside 1.0
             (no drafter): it must rise over both
speed        supervised tokens/s and the share of the time that waits for data: below 5 %
kimi         7168 hidden, 21504 wide, 32,000 draft tokens of 163,840, 5 depths: peak memory, tokens/s, and
             MFU = arithmetic of the model / time / --peak-tflops (989: an H200's dense bf16)
speculators  one forward and backward of its Eagle3DraftModel and of ours, same samples, same depths,
             alternating: supervised tokens/s of both and the median of the ratios
ranks        `datagen finetune` alone and under `accelerate launch --multi_gpu`, on a made-up run of Kimi's
             dimensions, --accumulate batches a step: tokens/s of both, at least 0.9 x --ranks
choose       settings of ours, by accept_len on held-out samples that trainers, --aside alike, leaves out
trainers     both trainers whole, from the same weights on the same samples: faster, and accept_len by
             replay at least its best run's (AdamW, and its default, Muon)

Results go to benchmarks/results/finetune-<date>.json, one object per part; those of trainers, choose and
ranks after every run, so that one that is cut short leaves what it measured ("finished": false).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.finetune_kimi import drawn_drafter, sizes, step_flops
from benchmarks.finetune_results import add_result
from datagen.drafter.curves import read_metrics
from datagen.drafter.dataset import ManifestSource
from datagen.drafter.loader import Loader
from datagen.drafter.model import Drafter
from datagen.drafter.packing import filled, usable
from datagen.drafter.rows import Batch, Sample, pack
from datagen.drafter.settings import TrainConfig
from datagen.drafter.step import StepLoss, depth_weights
from datagen.drafter.target import LogitRule, Target
from datagen.drafter.vocab import DraftVocab, by_frequency
from datagen.finetune import finetune, finetune_config

ROOT = Path(__file__).resolve().parents[1]
Result = dict[str, Any]


def main() -> int:
    """Run a part, print it, add it to the day's results; exit 1 when its bar is missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("part", choices=list(PARTS))
    parser.add_argument("manifest", nargs="?", type=Path)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch-tokens", type=int, default=0)
    parser.add_argument("--depths", type=int, default=0)
    parser.add_argument(
        "--rounds", type=int, default=0, help="0: 5; of trainers 2, with either peer"
    )
    parser.add_argument("--target-weights", default="")
    parser.add_argument(
        "--hidden", type=int, default=7168, help="kimi: a smaller one, to try it out"
    )
    parser.add_argument("--repeats", type=int, default=40, help="trainers: of every sample")
    parser.add_argument("--learning-rate", type=float, default=1e-3, help="trainers: of both")
    parser.add_argument("--draft-vocab", type=int, default=8192, help="trainers")
    # Its fused loss does not survive torch.compile under torch 2.11: the eager one is then compiled.
    parser.add_argument("--peer-loss", choices=["fused", "eager"], default="eager")
    parser.add_argument(
        "--settings", default="{}", help="more of ours, as JSON; of trainers also @FILE"
    )
    parser.add_argument("--aside", type=int, default=0, help="trainers, choose: held-out samples")
    parser.add_argument("--choices", default="[{}]", help="choose: settings of ours, as JSON")
    parser.add_argument("--ranks", type=int, default=2, help="ranks")
    parser.add_argument("--samples", type=int, default=16, help="ranks: of 1,024 tokens")
    parser.add_argument(
        "--accumulate", type=int, default=1, help="ranks: batches of a step, of both"
    )
    parser.add_argument("--threads", type=int, default=0, help="that decode; 0: 6, of trainers 10")
    parser.add_argument("--folder", type=Path, help="ranks, trainers: where what they make is kept")
    parser.add_argument("--peak-tflops", type=float, default=989.0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    given = parser.parse_args()
    if given.part not in ("kimi", "ranks") and given.manifest is None:
        parser.error(f"{given.part} needs a manifest")
    given.rounds = given.rounds or (2 if given.part == "trainers" else 5)
    given.threads = given.threads or (10 if given.part in ("trainers", "choose") else 6)
    result = {**PARTS[given.part](given), "finished": True}
    print(json.dumps(_written(given, result), indent=2))
    return 0 if result["passed"] else 1


def _written(given: argparse.Namespace, result: Result) -> Result:
    """The result with its conditions, in the day's file."""
    result |= {"device": _device_name(given.device), "torch": torch.__version__}
    result |= {"cpus": os.cpu_count(), "load_average": os.getloadavg()[0]}
    out = ROOT / "benchmarks" / "results" / f"finetune-{time.strftime('%Y-%m-%d')}.json"
    name = f"{given.part}-{torch.device(given.device).type}"
    if given.part in ("trainers", "choose"):
        name += f"-{result['batch_tokens']}"
    add_result(out, name, result)
    return result


def _kept(given: argparse.Namespace) -> Callable[[Result], Result]:
    """Writes what is known of a part that is still running."""
    return lambda result: _written(given, {**result, "finished": False, "passed": False})


def _device_name(device: str) -> str:
    return torch.cuda.get_device_name() if device.startswith("cuda") else "cpu"


def learn(given: argparse.Namespace) -> Result:
    """Fine-tune a fresh drafter and compare its held-out slice with where it began."""
    with tempfile.TemporaryDirectory() as folder:
        config = finetune_config(
            manifest=str(given.manifest), out=f"{folder}/out", epochs=given.epochs,
            target_weights=given.target_weights, device=given.device,
            batch_tokens=given.batch_tokens or 1024, depths=given.depths or 3,
            learning_rate=1e-3, draft_vocab=8192, evaluate_every=50, checkpoint_every=1000,
        )  # fmt: skip
        started = time.perf_counter()
        outcome = finetune(config, lambda text: print(text, flush=True))
        seconds = time.perf_counter() - started
        records = [r for r in read_metrics(config.out / "metrics.jsonl") if r["kind"] == "train"]
    before, after = (o["predicted_accept_len"] for o in (outcome.before, outcome.after))
    return {
        "no_drafter": 1.0,
        "random_init": before,
        "fine_tuned": after,
        "conditional_acceptance": outcome.after["conditional_acceptance"],
        "best_constant": outcome.after["best_constant"],
        "target_agreement": outcome.after["target_agreement"],
        "heldout_rows": outcome.after["rows"],
        "steps": outcome.steps,
        "seconds": seconds,
        "supervised_tokens_per_s": statistics.median(r["rows_per_s"] for r in records),
        "wait_share": statistics.median(r["wait_share"] for r in records),
        "passed": after > max(1.0, before) + 0.05,
    }


def speed(given: argparse.Namespace) -> Result:
    """Steady training speed on real states through the whole trainer; the first steps are warm-up."""
    with tempfile.TemporaryDirectory() as folder:
        config = finetune_config(
            manifest=str(given.manifest), out=f"{folder}/out", epochs=1000,
            target_weights=given.target_weights, device=given.device, max_steps=given.steps + 10,
            batch_tokens=given.batch_tokens or 8192, depths=given.depths or 5, log_every=5,
            evaluate_every=10_000, checkpoint_every=10_000, **json.loads(given.settings),
        )  # fmt: skip
        finetune(config, lambda text: print(text, flush=True))
        records = [r for r in read_metrics(config.out / "metrics.jsonl") if r["kind"] == "train"]
    steady = records[2:]
    wait = statistics.median(r["wait_share"] for r in steady)
    return {
        "batch_tokens": given.batch_tokens or 8192,
        "depths": given.depths or 5,
        "tokens_per_s": statistics.median(r["tokens_per_s"] for r in steady),
        "supervised_tokens_per_s": statistics.median(r["rows_per_s"] for r in steady),
        "wait_share": wait,
        "passed": wait < 0.05,
    }


def kimi(given: argparse.Namespace) -> Result:
    """One optimizer step after another at Kimi-K2.5's size, on synthetic states."""
    device = torch.device(given.device)
    depths, tokens = given.depths or 5, given.batch_tokens or 8192
    hidden = given.hidden
    vocab_size, draft, _ = sizes(hidden)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    g = torch.Generator(device=device).manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g, device=device, dtype=dtype) * 0.02

    target = Target(
        drawn(vocab_size, hidden), drawn(vocab_size, hidden), torch.ones(hidden, device=device),
        1e-5, LogitRule(), "kimi_k25", 262_144, {},
    )  # fmt: skip
    drafter, words = drawn_drafter(hidden, device, g)
    config = drafter.config
    length, context = 1024, 256
    samples = []
    for i in range(max(1, tokens // length)):
        features = torch.randn(length, config.width).to(torch.bfloat16)
        ids = torch.randint(draft, (length,))
        final = torch.randn(length, hidden).to(torch.bfloat16)
        samples.append(Sample(f"s{i}", ids, context, features, final))
    batch = pack(samples, depths).to(device, dtype)
    train = TrainConfig(depths=depths, drop_outside=False)
    optimizer = torch.optim.AdamW(drafter.parameters(), fused=device.type == "cuda")
    seconds = _timed_steps(drafter, target, words, train, batch, given.steps, optimizer)
    flops = step_flops(config, batch)
    peak = torch.cuda.max_memory_allocated() / 1e9 if device.type == "cuda" else None
    median = statistics.median(seconds)
    return {
        "hidden": hidden,
        "depths": depths,
        "batch_tokens": batch.n_tokens,
        "supervised_rows": int(batch.mask_AK[:, 0].sum()),
        "parameters": sum(p.numel() for p in drafter.parameters()),
        "seconds_per_step": median,
        "tokens_per_s": batch.n_tokens / median,
        "supervised_tokens_per_s": int(batch.mask_AK[:, 0].sum()) / median,
        "tflop_per_step": flops / 1e12,
        "mfu": flops / median / (given.peak_tflops * 1e12),
        "peak_memory_gb": peak,
        "passed": True,
    }


def _timed_steps(
    drafter: Drafter, target: Target, words: DraftVocab, train: TrainConfig, batch: Batch,
    steps: int, optimizer: torch.optim.Optimizer | None,
) -> list[float]:  # fmt: skip
    one = stepper(drafter, target, words, train, batch, optimizer)
    for _ in range(3):
        one()
    return [_seconds(one, batch.tokens_M.device) for _ in range(steps)]


def stepper(
    drafter: Drafter, target: Target, words: DraftVocab, train: TrainConfig, batch: Batch,
    optimizer: torch.optim.Optimizer | None,
) -> Callable[[], float]:  # fmt: skip
    """One forward and backward of ours (and a step of the optimizer); returns the loss."""
    device = batch.tokens_M.device
    drafter.casts.fuse = device.type == "cuda"  # as training does
    module = StepLoss(
        drafter, target, words, train, final_norm="post", attention="auto",
        compiled=device.type == "cuda",
    )  # fmt: skip
    rows = tuple(int(n) for n in batch.mask_AK.sum(0))
    weights = depth_weights(train, rows, batch.n_tokens, device)

    def one() -> float:
        drafter.zero_grad(set_to_none=True)
        loss, _ = module(batch, weights)
        loss.backward()
        if optimizer is not None:
            optimizer.step()
        return float(loss.detach())

    return one


def _seconds(call: Callable[[], Any], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


def speculators(given: argparse.Namespace) -> Result:
    """Forward and backward of both trainers' models on the same real samples, alternating."""
    from benchmarks.finetune_peer import peer_stepper
    from datagen.drafter.start import fresh_drafter
    from datagen.drafter.target import load_target
    from datagen.embedded.weights import ensure_checkpoint

    device = torch.device(given.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    depths, tokens = given.depths or 5, given.batch_tokens or 2048
    source = ManifestSource(given.manifest)
    checkpoint = Path(given.target_weights or ensure_checkpoint())
    target = load_target(checkpoint).to(device, dtype)
    words = by_frequency(source.info.token_frequencies, 8192, target.vocab_size)
    drafter = fresh_drafter(source.info, target, words, 0).to(device)
    data = usable(source.index("train", 0), tokens)
    numbers = filled(range(len(data.refs)), data.lengths, tokens)[0]
    samples = [source.read(data.refs[n], data.lengths[n]) for n in numbers]
    batch = Loader([source], data, depths).batch(numbers).to(device, dtype)
    train = TrainConfig(depths=depths, decay=1.0, normalise="masked", drop_outside=False)
    ours = stepper(drafter, target, words, train, batch, None)
    theirs = peer_stepper(drafter, target, words, samples, depths, device, dtype)
    for _ in range(3):
        losses = ours(), theirs()
    seconds = [(_seconds(ours, device), _seconds(theirs, device)) for _ in range(given.rounds)]
    rows = int(batch.mask_AK[:, 0].sum())
    ratio = statistics.median(b / a for a, b in seconds)
    return {
        "batch_tokens": batch.n_tokens,
        "depths": depths,
        "supervised_rows": rows,
        "ours_supervised_tokens_per_s": rows / statistics.median(a for a, _ in seconds),
        "speculators_supervised_tokens_per_s": rows / statistics.median(b for _, b in seconds),
        "median_ratio": ratio,
        "rounds": given.rounds,
        "losses": losses,
        "passed": ratio > 1.0,
    }


def trainers(given: argparse.Namespace) -> Result:
    """Both trainers whole, in --folder, or one that is removed."""
    from benchmarks.finetune_trainers import trainers as both

    with tempfile.TemporaryDirectory() as folder:
        return both(given, given.folder or Path(folder), _kept(given))


def choose(given: argparse.Namespace) -> Result:
    """Settings of ours, in --folder, or one that is removed."""
    from benchmarks.finetune_trainers import choose as chosen

    with tempfile.TemporaryDirectory() as folder:
        return chosen(given, given.folder or Path(folder), _kept(given))


def ranks(given: argparse.Namespace) -> Result:
    """Two GPUs against one, in --folder, or one that is removed."""
    from benchmarks.finetune_ranks import ranks as compared

    with tempfile.TemporaryDirectory() as folder:
        return compared(given, given.folder or Path(folder), _kept(given))


PARTS: dict[str, Callable[[argparse.Namespace], Result]] = {
    "learn": learn,
    "speed": speed,
    "kimi": kimi,
    "speculators": speculators,
    "choose": choose,
    "trainers": trainers,
    "ranks": ranks,
}

if __name__ == "__main__":
    raise SystemExit(main())
