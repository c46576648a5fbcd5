"""Whole trainers side by side: ours and speculators 0.9's, on the same samples from the same weights.

python -m benchmarks.finetune trainers RUN/manifest.json --target-weights TARGET   # needs speculators

Both read a run's real states from disk with their own loaders (speculators those that `datagen export`
wrote), start from one fresh drafter, see every sample --repeats times, and take the same learning rate,
schedule, batch tokens and depths. Rounds alternate. What is compared:

supervised_tokens_per_s   by the clock, between steps, after the first ones (compilation); a sample's
                          supervised tokens are counted alike for both: the trained rows of depth 1
accept_len                of the drafter that comes out, by replay on the held-out samples: our median run's
                          is at least that of the peer's best. Beside it, the difference paired by prompt
                          with its interval, which says how far so few samples can tell them apart

--settings are of ours alone. What they should be is chosen before, by `choose`, which trains ours with each
of --choices and replays it on the --aside held-out samples; `trainers` leaves these out and judges on others.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import load_file

from datagen.acceptance.metrics import Counts, accept_len, compare
from datagen.acceptance.replay import Replay
from datagen.drafter.checkpoint import export_files, load_drafter, own_name
from datagen.drafter.curves import read_metrics
from datagen.drafter.dataset import ManifestSource, SampleRef, first_by_hash
from datagen.drafter.model import Drafter
from datagen.drafter.packing import usable
from datagen.drafter.rows import Sample, trained_counts
from datagen.drafter.speculators import write_speculators
from datagen.drafter.start import fresh_drafter
from datagen.drafter.target import Target, load_target
from datagen.drafter.vocab import by_frequency
from datagen.finetune import finetune, finetune_config

LOG_EVERY = 5
WARM_UP = 0.05
PEER_OPTIMIZERS = ("adamw", "muon")  # ours, and its default: a round each; its best one counts
Result = dict[str, Any]


class Bench:
    """What every run starts from, and how its drafter is judged. `samples`: of one side of held-out."""

    def __init__(self, given: Namespace, folder: Path, *, aside: bool) -> None:
        self.given = given
        self.depths, self.tokens = given.depths or 5, given.batch_tokens or 8192
        self.source = ManifestSource(given.manifest)
        self.target_dir = _target_directory(given)
        self.target: Target = load_target(self.target_dir)
        self.size = min(given.draft_vocab, self.target.vocab_size)
        info = self.source.info
        self.words = by_frequency(
            info.token_frequencies, self.size, self.target.vocab_size, info.stop_token_ids
        )
        self.start = fresh_drafter(info, self.target, self.words, 0)
        self.init = folder / "init"
        self.init.mkdir(parents=True, exist_ok=True)
        export_files(
            self.init, self.start.config, self.start.state_dict(), dtype="float32",
            target_type=self.target.model_type, context_length=self.target.context_length,
        )  # fmt: skip
        held = usable(side_of(self.source.index("heldout", 0), given.aside, aside=aside), 1 << 30)
        self.samples: list[Sample] = [
            self.source.read(r, n) for r, n in zip(held.refs, held.lengths, strict=True)
        ]

    def measured(self, drafter: Drafter) -> list[Counts]:
        """By replay."""
        embed_VH = self.target.embed_VH.float()
        replay = Replay(drafter, embed_VH, steps=self.depths, device=self.given.device)
        return [r.counts for r in replay.run(self.samples)]

    def trained(self, out: Path, settings: Result) -> tuple[Result, Drafter]:
        """Ours, once."""
        run = _ours(self.given, out, self.init, self.target_dir, self.tokens, self.depths, settings)
        return run, load_drafter(run.pop("final")).drafter

    def about(self) -> Result:
        """The conditions."""
        given = self.given
        return {
            "samples": len(self.source.index("train", 0)), "heldout": len(self.samples),
            "heldout_prompts": len({s.sample_id.rsplit("-", 1)[0] for s in self.samples}),
            "aside": given.aside, "repeats": given.repeats, "batch_tokens": self.tokens,
            "depths": self.depths, "learning_rate": given.learning_rate, "draft_vocab": self.size,
            "accept_len_start": accept_len(self.measured(self.start)).value,
        }  # fmt: skip


def settings_of(given: str) -> Result:
    """JSON, or where it stands: @FILE, which `choose` may write until ours is first started."""
    text = Path(given[1:]).read_text() if given.startswith("@") else given
    found: Result = json.loads(text)
    return found


def side_of(refs: Sequence[SampleRef], count: int, *, aside: bool) -> list[SampleRef]:
    """The `count` samples set aside to choose settings on, or the others; no prompt is on both sides."""
    chosen = {r.prompt_id for r in first_by_hash(refs, count)} if count else set()
    return [r for r in refs if (r.prompt_id in chosen) == aside]


def choose(given: Namespace, folder: Path, keep: Callable[[Result], Result]) -> Result:
    """Ours with each of `--choices`, by accept_len on what was set aside; best.json holds the best yet."""
    if not given.aside:
        raise SystemExit(
            "choose needs --aside: the held-out samples that trainers will not judge on"
        )
    bench = Bench(given, folder, aside=True)
    about = bench.about()
    runs: list[Result] = []
    counts: list[list[Counts]] = []
    best: Result = {}
    for number, settings in enumerate(json.loads(given.choices)):
        run, drafter = bench.trained(folder / f"choice-{number}", settings)
        counts.append(bench.measured(drafter))
        paired = compare(counts[0], counts[-1])
        runs.append({
            "settings": settings, "accept_len": accept_len(counts[-1]).value,
            "over_the_first": asdict(paired.difference), **run,
        })  # fmt: skip
        print(f"choice: {json.dumps(runs[-1])}", flush=True)
        best = max(runs, key=lambda r: float(r["accept_len"]))["settings"]
        (folder / "best.json").write_text(json.dumps(best))
        keep({**about, "choices": runs, "best": best})
    return {**about, "choices": runs, "best": best, "passed": True}


def trainers(given: Namespace, folder: Path, keep: Callable[[Result], Result]) -> Result:
    """Run both, `--rounds` times each, in `folder`; `keep` is given what is known after every run."""
    bench = Bench(given, folder, aside=False)
    depths, tokens, start = bench.depths, bench.tokens, bench.start
    write_speculators(
        folder / "peer-init", start.config, start.state_dict(), embed_VH=bench.target.embed_VH,
        target=str(bench.target_dir), dtype="float32",
    )  # fmt: skip
    refs = bench.source.index("train", 0)
    rows = given.repeats * sum(trained_counts(r.n_tokens, r.n_context, 1)[0] for r in refs)
    ratio = _peer_data(given, folder, len(refs), bench.target_dir)
    np.save(folder / "d2t.npy", bench.words.d2t.numpy())
    np.save(folder / "t2d.npy", bench.words.t2d.numpy())
    about: Result = {**bench.about(), "supervised_tokens": rows}
    ours: list[Result] = []
    theirs: list[Result] = []
    counts: dict[str, list[list[Counts]]] = {"ours": [], "speculators": []}

    def ended(name: str, run: Result, runs: list[Result], drafter: Drafter) -> None:
        counts[name].append(bench.measured(drafter))
        runs.append({**run, "accept_len": accept_len(counts[name][-1]).value})
        print(f"{name}: {runs[-1]}", flush=True)
        keep({**about, "ours": ours, "speculators": theirs})

    for number in range(given.rounds):
        optimizer = PEER_OPTIMIZERS[number % len(PEER_OPTIMIZERS)]
        run = _theirs(
            given, folder, number, optimizer, ratio, bench.target_dir, tokens, depths, rows
        )
        ended("speculators", run, theirs, _as_drafter(run.pop("weights"), start))
        settings = settings_of(given.settings)
        run, drafter = bench.trained(folder / f"ours-{number}", settings)
        ended("ours", {**run, "settings": settings}, ours, drafter)
    return {**about, "ours": ours, "speculators": theirs, **judged(ours, theirs, counts)}


def judged(
    ours: list[Result], theirs: list[Result], counts: dict[str, list[list[Counts]]]
) -> Result:
    """The bars and what they are held against: our median run by accept_len, and the peer's best one.

    `counts`: of every run, "ours" and "speculators", in the order of the runs.
    """
    speed = statistics.median(
        a["supervised_tokens_per_s"] / b["supervised_tokens_per_s"]
        for a, b in zip(ours, theirs, strict=True)
    )
    middle = sorted(range(len(ours)), key=lambda i: ours[i]["accept_len"])[(len(ours) - 1) // 2]
    best = max(range(len(theirs)), key=lambda i: theirs[i]["accept_len"])
    paired = compare(counts["speculators"][best], counts["ours"][middle])
    wait = max(r["wait_share"] for r in ours)
    bars = {
        "faster": speed > 1,
        "accept_len_at_least_theirs": ours[middle]["accept_len"] >= theirs[best]["accept_len"],
        "waits_below_5_percent": wait < 0.05,
        "their_optimizers_all_ran": {r["optimizer"] for r in theirs} == set(PEER_OPTIMIZERS),
    }
    return {
        "median_speed_ratio": speed,
        "accept_len_ours": ours[middle]["accept_len"],
        "accept_len_speculators": theirs[best]["accept_len"],
        "accept_len_difference": asdict(paired.difference), "accept_len_verdict": paired.verdict,
        "largest_wait_share": wait,
        "bars": bars,
        "passed": all(bars.values()),
    }  # fmt: skip


def _target_directory(given: Namespace) -> Path:
    if given.target_weights:
        return Path(given.target_weights)
    from datagen.embedded.weights import ensure_checkpoint

    return ensure_checkpoint()


def _ours(
    given: Namespace, out: Path, init: Path, target: Path, tokens: int, depths: int,
    settings: Result,
) -> Result:  # fmt: skip
    common = {
        "manifest": str(given.manifest), "weights": str(float(given.repeats)), "out": str(out),
        "init": str(init), "target_weights": str(target), "device": given.device,
        "allow_chance": True, "batch_tokens": tokens, "depths": depths, "warmup": WARM_UP,
        "learning_rate": given.learning_rate, "log_every": LOG_EVERY, "evaluate_every": 100_000,
        "checkpoint_every": 100_000, "export_dtype": "float32", "threads": given.threads,
        "ahead": 2 * given.threads,
    }  # fmt: skip
    config = finetune_config(**common | settings)
    started = time.monotonic()
    outcome = finetune(config, lambda text: print(text, flush=True))
    seconds = time.monotonic() - started
    records = [r for r in read_metrics(out / "metrics.jsonl") if r["kind"] == "train"]
    steady = records[len(records) // 3 :]
    return {
        "supervised_tokens_per_s": statistics.median(r["rows_per_s"] for r in steady),
        "tokens_per_s": statistics.median(r["tokens_per_s"] for r in steady),
        "wait_share": statistics.median(r["wait_share"] for r in steady),
        "steps": outcome.steps,
        "predicted_accept_len": outcome.after["predicted_accept_len"],
        "seconds": seconds,
        "final": outcome.final,
    }


def _peer_data(given: Namespace, folder: Path, count: int, target: Path) -> float:
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


def _theirs(
    given: Namespace, folder: Path, number: int, optimizer: str, ratio: float, target: Path,
    tokens: int, depths: int, rows: int,
) -> Result:  # fmt: skip
    """`speculators train` in a process of its own (finetune_peer.py stamps its steps)."""
    cuda = given.device.startswith("cuda")
    name = f"theirs-{number}"
    out = folder / name
    flags = {
        "speculator-type": "eagle3", "verifier-name-or-path": str(target),
        "from-pretrained": str(folder / "peer-init"), "data-path": str(folder / "data"),
        "on-missing": "raise", "save-path": str(out), "log-dir": str(out / "logs"),
        "total-seq-len": tokens, "train-data-ratio": repr(ratio), "epochs": 1,
        "lr": given.learning_rate, "weight-decay": 0.0, "scheduler-type": "cosine",
        "scheduler-warmup-ratio": WARM_UP, "ttt-steps": depths, "log-freq": LOG_EVERY,
        "num-workers": 12 if cuda else 1, "seed": 0,
        "draft-attn-impl": "simple_flex_attention" if cuda else "eager",
        "loss-implementation": given.peer_loss, "draft-vocab-size": given.draft_vocab,
        "d2t-path": str(folder / "d2t.npy"), "t2d-path": str(folder / "t2d.npy"),
        "optimizer": optimizer,
    }  # fmt: skip
    stamps = folder / f"{name}.json"
    command = [sys.executable, "-m", "benchmarks.finetune_peer", str(stamps), str(LOG_EVERY)]
    command += [f"--{flag}={value}" for flag, value in flags.items()]
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
        "optimizer": optimizer,
        "seconds": seconds,
        "windows_s": windows,
        "weights": found[-1],
    }


def _as_drafter(weights: Path, start: Drafter) -> Drafter:
    """Their checkpoint under our names; the verifier's tensors in it are the target's."""
    tensors = {own_name(n): t for n, t in load_file(weights).items()}
    drafter = Drafter(start.config)
    wanted = drafter.state_dict()
    drafter.load_state_dict({n: tensors[n].to(wanted[n].dtype) for n in wanted})
    return drafter
