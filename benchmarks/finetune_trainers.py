"""Whole trainers side by side: ours and speculators 0.9's, on the same samples from the same weights.

python -m benchmarks.finetune trainers RUN/manifest.json --target-weights TARGET   # needs speculators

Both read a run's real states from disk with their own loaders (speculators those that `datagen export`
wrote), start from one fresh drafter, see every sample --repeats times, and take the same learning rate,
schedule, batch tokens and depths; round n of both is seeded with n. The peer's flags, which stand in the
result, give its weights no decay, as ours have none by default. Rounds alternate. What is compared:

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
import statistics
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.finetune_speculators import (
    LOG_EVERY,
    WARM_UP,
    as_drafter,
    peer_data,
    peer_flags,
    peer_run,
)
from datagen.acceptance.metrics import Counts, accept_len, compare
from datagen.acceptance.replay import Replay
from datagen.drafter.checkpoint import export_files, load_drafter
from datagen.drafter.curves import read_metrics
from datagen.drafter.dataset import ManifestSource, SampleRef, first_by_hash
from datagen.drafter.model import Drafter
from datagen.drafter.packing import usable
from datagen.drafter.rows import Sample, trained_counts
from datagen.drafter.speculators import write_speculators
from datagen.drafter.start import fresh_drafter
from datagen.drafter.target import Target, load_target
from datagen.drafter.vocab import by_frequency
from datagen.errors import ConfigError
from datagen.finetune import finetune, finetune_config
from datagen.store.atomic import write_json_atomic
from datagen.store.manifest import Manifest

PEER_OPTIMIZERS = ("adamw", "muon")  # ours, and its default: a round each; its best one counts
SHARED = frozenset({
    "manifest", "weights", "out", "init", "target_weights", "heldout_manifest", "fresh_vocab",
    "draft_vocab", "device", "allow_chance", "batch_tokens", "max_tokens", "accumulate", "depths",
    "epochs", "max_steps", "limit", "learning_rate", "warmup", "seed", "log_every",
    "evaluate_every", "checkpoint_every", "export_dtype", "threads", "ahead",
})  # fmt: skip
"""What ours does not choose: it holds for both trainers, or for every choice."""
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

    def trained(self, out: Path, settings: Result, seed: int) -> tuple[Result, Drafter]:
        """Ours, once."""
        common = shared(self.given, out, self.init, self.target_dir, self.tokens, self.depths, seed)
        run = _ours(common, settings)
        return run, load_drafter(run.pop("final")).drafter

    def about(self) -> Result:
        """The conditions."""
        given = self.given
        return {
            "samples": len(self.source.index("train", 0)), "heldout": len(self.samples),
            "heldout_prompts": len({s.sample_id.rsplit("-", 1)[0] for s in self.samples}),
            "aside": given.aside, "repeats": given.repeats, "batch_tokens": self.tokens,
            "depths": self.depths, "learning_rate": given.learning_rate, "draft_vocab": self.size,
            "versions": _versions(given.manifest),
            "accept_len_start": accept_len(self.measured(self.start)).value,
        }  # fmt: skip


class Chosen:
    """Settings of ours: JSON, or @FILE that holds it, which `choose` may write until they are asked for."""

    def __init__(self, given: str) -> None:
        self._given = given
        if not given.startswith("@"):
            _ = self.settings  # wrong ones are told before the peer has trained

    @cached_property
    def settings(self) -> Result:
        """Read once: every round trains with the same."""
        given = self._given
        text = Path(given[1:]).read_text() if given.startswith("@") else given
        return own_settings(json.loads(text))


def own_settings(settings: Result) -> Result:
    """The same; ends the benchmark where one is not for ours to choose, or is none."""
    if fixed := sorted(SHARED & set(settings)):
        raise SystemExit(f"settings of ours cannot hold {', '.join(fixed)}: leave them out")
    try:
        finetune_config(**settings)
    except ConfigError as e:
        raise SystemExit(f"settings of ours: {e}") from e
    return settings


def by_prompt(counts: list[Counts]) -> Result:
    """Sums in the order of the prompts' ids: whatever interval is wanted can be had of them."""
    tokens: Counter[str] = Counter()
    steps: Counter[str] = Counter()
    for c in counts:
        tokens[c.prompt_id] += c.tokens
        steps[c.prompt_id] += c.steps
    order = sorted(tokens)
    return {
        "tokens_by_prompt": [tokens[p] for p in order],
        "steps_by_prompt": [steps[p] for p in order],
    }


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
    choices = [own_settings(c) for c in json.loads(given.choices)]
    bench = Bench(given, folder, aside=True)
    about = bench.about()
    runs: list[Result] = []
    counts: list[list[Counts]] = []
    best: Result = {}
    for number, settings in enumerate(choices):
        run, drafter = bench.trained(folder / f"choice-{number}", settings, seed=0)
        counts.append(bench.measured(drafter))
        paired = compare(counts[0], counts[-1])
        runs.append({
            "settings": settings, "accept_len": accept_len(counts[-1]).value,
            "over_the_first": asdict(paired.difference), **run, **by_prompt(counts[-1]),
        })  # fmt: skip
        print(f"choice: {json.dumps(_told(runs[-1]))}", flush=True)
        best = max(runs, key=lambda r: float(r["accept_len"]))["settings"]
        write_json_atomic(folder / "best.json", best)
        keep({**about, "choices": runs, "best": best})
    return {**about, "choices": runs, "best": best, "passed": True}


def trainers(given: Namespace, folder: Path, keep: Callable[[Result], Result]) -> Result:
    """Run both, `--rounds` times each, in `folder`; `keep` is given what is known after every run."""
    chosen = Chosen(given.settings)
    bench = Bench(given, folder, aside=False)
    depths, tokens, start = bench.depths, bench.tokens, bench.start
    write_speculators(
        folder / "peer-init", start.config, start.state_dict(), embed_VH=bench.target.embed_VH,
        target=str(bench.target_dir), dtype="float32",
    )  # fmt: skip
    refs = bench.source.index("train", 0)
    rows = given.repeats * sum(trained_counts(r.n_tokens, r.n_context, 1)[0] for r in refs)
    ratio = peer_data(given, folder, len(refs), bench.target_dir)
    np.save(folder / "d2t.npy", bench.words.d2t.numpy())
    np.save(folder / "t2d.npy", bench.words.t2d.numpy())
    about: Result = {**bench.about(), "supervised_tokens": rows, "peer_loss": given.peer_loss}
    ours: list[Result] = []
    theirs: list[Result] = []
    counts: dict[str, list[list[Counts]]] = {"ours": [], "speculators": []}

    def ended(name: str, run: Result, runs: list[Result], drafter: Drafter) -> None:
        counts[name].append(bench.measured(drafter))
        found = {"accept_len": accept_len(counts[name][-1]).value, **by_prompt(counts[name][-1])}
        runs.append({**run, **found})
        print(f"{name}: {_told(runs[-1])}", flush=True)
        # A round that is cut short has no partner: what is judged so far is whole rounds.
        so_far = judged(ours, theirs[: len(ours)], counts) if ours else {}
        keep({**about, "ours": ours, "speculators": theirs, **so_far})

    for number in range(given.rounds):
        optimizer = PEER_OPTIMIZERS[number % len(PEER_OPTIMIZERS)]
        flags = peer_flags(
            given, optimizer=optimizer, seed=number, tokens=tokens, depths=depths, ratio=ratio
        )
        run = peer_run(folder, flags, bench.target_dir, rows)
        ended("speculators", run, theirs, as_drafter(run.pop("weights"), start))
        run, drafter = bench.trained(folder / f"ours-{number}", chosen.settings, seed=number)
        ended("ours", {**run, "settings": chosen.settings}, ours, drafter)
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


def _told(run: Result) -> Result:
    """Without what only a file holds."""
    return {k: v for k, v in run.items() if not k.endswith("_by_prompt")}


def _versions(manifest: Path) -> Result:
    """Of what trains, None where it is not installed; and of what captured the states."""
    found: Result = {}
    for name in ("torch", "speculators", "transformers"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    servers = Manifest.load(manifest).servers
    return {**found, "engines": sorted({str(s["engine"]) for s in servers if "engine" in s})}


def _target_directory(given: Namespace) -> Path:
    if given.target_weights:
        return Path(given.target_weights)
    from datagen.embedded.weights import ensure_checkpoint

    return ensure_checkpoint()


def shared(
    given: Namespace, out: Path, init: Path, target: Path, tokens: int, depths: int, seed: int
) -> Result:
    """Settings of ours that are no choice of its: SHARED names them, also where their default holds."""
    return {
        "manifest": str(given.manifest), "weights": str(float(given.repeats)), "out": str(out),
        "init": str(init), "target_weights": str(target), "device": given.device,
        "allow_chance": True, "batch_tokens": tokens, "depths": depths, "warmup": WARM_UP,
        "learning_rate": given.learning_rate, "seed": seed, "log_every": LOG_EVERY,
        "evaluate_every": 100_000, "checkpoint_every": 100_000, "export_dtype": "float32",
        "threads": given.threads, "ahead": 2 * given.threads,
    }  # fmt: skip


def _ours(common: Result, settings: Result) -> Result:
    config = finetune_config(**common, **settings)
    started = time.monotonic()
    outcome = finetune(config, lambda text: print(text, flush=True))
    seconds = time.monotonic() - started
    records = [r for r in read_metrics(config.out / "metrics.jsonl") if r["kind"] == "train"]
    steady = records[len(records) // 3 :]
    return {
        "supervised_tokens_per_s": statistics.median(r["rows_per_s"] for r in steady),
        "tokens_per_s": statistics.median(r["tokens_per_s"] for r in steady),
        "wait_share": statistics.median(r["wait_share"] for r in steady),
        "steps": outcome.steps,
        "seed": config.train.seed,
        "predicted_accept_len": outcome.after["predicted_accept_len"],
        "seconds": seconds,
        "final": outcome.final,
    }
