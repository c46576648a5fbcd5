"""Speculation, replay, their agreement and their speed, with the embedded target and with real states.

    python -m benchmarks.acceptance live   --run RUN --drafter RUN/drafter/finetuned/final
    python -m benchmarks.acceptance bf16   --run RUN --drafter ...
    python -m benchmarks.acceptance speed  --run RUN --drafter ...
    python -m benchmarks.acceptance codecs --run RUN
    python -m benchmarks.acceptance replay --device cuda      (needs neither run nor weights)

live    float32, on held-out prompts of this repository that no mix trains on. lossless: output with the
        drafter == output without, token for token. parity: replay of the drafter on those outputs == the
        live verify steps, on uncut steps
bf16    the same parity where the target computes in bfloat16: replay's boundaries come from a prefill,
        the engine's from verify passes
speed   tokens/s replayed / tokens/s generated live at concurrency 1, on the same CPU
codecs  accept_len of drafters trained on `plane` and on `mantissa-4` states of the same samples, paired
replay  seconds for 1,000 held-out samples at SmolLM2's size; states are drawn (their values matter to
        the time only through how deep drafts stay alive: both extremes are timed)

Every difference is printed with how near a tie it was: the logits' gap between the two candidates.
Results go to benchmarks/results/acceptance-<date>.json, one object per part. Exit 1 when a bar is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from datagen.acceptance.replay import Replay
from datagen.drafter.checkpoint import load_drafter
from datagen.drafter.model import Drafter
from datagen.drafter.rows import Sample

RESULTS = Path(__file__).parent / "results"
NEAR_TIE = 1e-3  # logits; float32 rounding of these sums is about 1e-5
NEAR_TIE_BF16 = 0.5  # bf16 states move logits of this size by about 0.1
Result = dict[str, Any]


class Margins(Replay):
    """A replay that also says how far the drafted token leads the second, in logits."""

    def __init__(self, drafter: Drafter, embed_VH: Tensor, *, steps: int) -> None:
        super().__init__(drafter, embed_VH, steps=steps)
        self.gaps: list[list[float]] = []

    def _drafted(self, h_AH: Tensor) -> Tensor:
        top = self._drafter.lm_head(self._drafter.norm(h_AH)).topk(2, dim=-1).values
        self.gaps.append((top[:, 0] - top[:, 1]).tolist())
        return super()._drafted(h_AH)

    def of(self, sample: Sample) -> list[list[float]]:
        """Per depth, per row P-1 .. N-3."""
        self.gaps = []
        self.drafts([sample], prune=False)
        return self.gaps


@dataclass(frozen=True)
class Bench:
    """SmolLM2 in one precision, and a drafter for it."""

    model: Any
    boundaries: tuple[int, ...]
    drafter: Path
    steps: int

    @classmethod
    def of(cls, args: argparse.Namespace, dtype: str) -> Bench:
        from datagen.embedded.model import Llama
        from datagen.embedded.weights import ensure_checkpoint
        from datagen.store.manifest import Manifest

        states = Manifest.load(args.run / "manifest.json").states
        model = Llama.load(ensure_checkpoint(), dtype)
        return cls(model, tuple(states.boundaries), args.drafter, args.steps)

    def speculator(self) -> Any:
        from datagen.embedded.speculate import Speculator

        return Speculator.load(self.drafter, self.model, self.boundaries, steps=self.steps)

    def answers(self, contexts: list[list[int]], tokens: int, drafts: bool) -> list[Any]:
        from benchmarks.acceptance_heldout import AT_ONCE, answered

        made = engine_of(
            self.model, self.boundaries, self.speculator() if drafts else None, AT_ONCE
        )
        try:
            return answered(made, contexts, tokens)
        finally:
            made.stop()

    def samples(self, answers: list[Any]) -> list[Sample]:
        from benchmarks.acceptance_heldout import captured

        return [captured(self.model, r, self.boundaries) for r in answers]


def engine_of(model: Any, boundaries: tuple[int, ...], speculator: Any, max_running: int) -> Any:
    """The embedded engine, started."""
    from tokenizers import Tokenizer

    from datagen.embedded.engine import Engine
    from datagen.embedded.weights import ensure_checkpoint

    made = Engine(
        model, Tokenizer.from_file(str(ensure_checkpoint() / "tokenizer.json")),
        max_running=max_running, context_length=model.config.context_length, spool=None,
        on_death=_die, speculator=speculator, boundaries=boundaries,
    )  # fmt: skip
    made.start()
    return made


def main() -> None:
    """Run a part, print it, add it to the day's results; exit 1 when a bar is missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=list(PARTS))
    parser.add_argument("--run", type=Path, help="a finished run of smollm2")
    parser.add_argument("--drafter", type=Path)
    parser.add_argument("--prompts", type=int, default=60)
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--timed", type=int, default=12, help="prompts of the speed measurement")
    parser.add_argument("--epochs", type=int, default=3, help="codecs: of either training")
    parser.add_argument("--device", default="cpu", help="replay: cpu or cuda")
    parser.add_argument("--samples", type=int, default=1000, help="replay")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    if args.part != "replay" and args.run is None:
        parser.error(f"{args.part} needs --run")
    if args.part in ("live", "bf16", "speed") and args.drafter is None:
        parser.error(f"{args.part} needs --drafter")
    torch.set_num_threads(args.threads)
    cpu, wall = time.process_time(), time.monotonic()
    found = PARTS[args.part](args)
    found["machine"] = {
        "cpu": platform.processor() or platform.machine(), "threads": args.threads,
        "load_average": os.getloadavg()[0], "torch": torch.__version__,
        "cpu_seconds": time.process_time() - cpu, "seconds": time.monotonic() - wall,
    }  # fmt: skip
    print(json.dumps(found, indent=2))
    path = args.results / f"acceptance-{date.today().isoformat()}.json"
    earlier = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    name = f"replay-{args.device}" if args.part == "replay" else args.part
    path.write_text(json.dumps({**earlier, name: found}, indent=2) + "\n", encoding="utf-8")
    for bar, met in found["bars"].items():
        print(f"{'met   ' if met else 'MISSED'} {bar}")
    sys.exit(0 if all(found["bars"].values()) else 1)


def live(args: argparse.Namespace) -> Result:
    """Lossless, and parity with replay, in float32."""
    from benchmarks.acceptance_heldout import heldout_prompts

    bench = Bench.of(args, "float32")
    contexts = heldout_prompts(args.prompts)
    print(
        f"{len(contexts)} held-out prompts, K = {args.steps}, {args.max_new_tokens} tokens, float32"
    )
    plain = bench.answers(contexts, args.max_new_tokens, drafts=False)
    spec = bench.answers(contexts, args.max_new_tokens, drafts=True)
    lossless = _lossless(bench.model, plain, spec)
    drafted = [r for r in spec if len(r.output_ids) > 1]
    replay = Margins(load_drafter(args.drafter).drafter, bench.model.embedding, steps=args.steps)
    parity = _parity(replay, bench.samples(drafted), drafted, args.steps)
    return {
        "heldout_prompts": len(contexts), "draft_steps": args.steps, "drafter": str(args.drafter),
        "lossless": lossless, "parity": parity,
        "bars": {
            "lossless but for near-ties": all(d["gap"] < NEAR_TIE for d in lossless["different"]),
            "same accepted count in 99.9 % of uncut steps": parity["same_share"] >= 0.999,
            "on at least 50 held-out prompts": parity["samples"] >= 50,
        },
    }  # fmt: skip


def bf16(args: argparse.Namespace) -> Result:
    """Parity with replay where the target computes in bfloat16."""
    from benchmarks.acceptance_heldout import heldout_prompts

    bench = Bench.of(args, "bfloat16")
    contexts = heldout_prompts(args.prompts)
    print(f"{len(contexts)} held-out prompts, K = {args.steps}, bfloat16")
    spec = [r for r in bench.answers(contexts, args.max_new_tokens, drafts=True)
            if len(r.output_ids) > 1]  # fmt: skip
    replay = Margins(load_drafter(args.drafter).drafter, bench.model.embedding, steps=args.steps)
    parity = _parity(replay, bench.samples(spec), spec, args.steps)
    apart = abs(parity["replay_accept_len"] / parity["live_accept_len"] - 1)
    return {
        "heldout_prompts": len(contexts), "draft_steps": args.steps, "drafter": str(args.drafter),
        "parity": parity, "relative_difference": apart,
        "bars": {
            "accept_len within 1 %": apart <= 0.01,
            "every difference a near-tie": all(
                d["gap"] < NEAR_TIE_BF16 or d["live"] is None for d in parity["different"]
            ),
        },
    }  # fmt: skip


def speed(args: argparse.Namespace) -> Result:
    """Replay against live speculation of one request at a time."""
    from benchmarks.acceptance_heldout import answered, heldout_prompts

    bench = Bench.of(args, "float32")
    timed = heldout_prompts(args.timed)
    alone = engine_of(bench.model, bench.boundaries, bench.speculator(), 1)
    answered(alone, timed[:1], 4)
    started = time.monotonic()
    said = [answered(alone, [ids], args.max_new_tokens)[0] for ids in timed]
    live_rate = sum(len(r.output_ids) for r in said) / (time.monotonic() - started)
    alone.stop()
    samples = bench.samples([r for r in said if len(r.output_ids) > 1])
    replay = Replay(load_drafter(args.drafter).drafter, bench.model.embedding, steps=args.steps)
    rates = []
    for _ in range(5):
        started = time.monotonic()
        counted = sum(r.counts.tokens for r in replay.run(samples))
        rates.append(counted / (time.monotonic() - started))
    rate = sorted(rates)[2]
    return {
        "live_tokens_per_s": live_rate, "replay_tokens_per_s": rate, "ratio": rate / live_rate,
        "timed_prompts": len(timed), "draft_steps": args.steps,
        "bars": {"replay at least 20x live": rate / live_rate >= 20},
    }  # fmt: skip


def codecs(args: argparse.Namespace) -> Result:
    """See acceptance_codecs.py."""
    from benchmarks.acceptance_codecs import compared

    return compared(args)


def replay(args: argparse.Namespace) -> Result:
    """See acceptance_replay.py."""
    from benchmarks.acceptance_replay import timed

    return timed(args)


PARTS: dict[str, Callable[[argparse.Namespace], Result]] = {
    "live": live, "bf16": bf16, "speed": speed, "codecs": codecs, "replay": replay,
}  # fmt: skip


def _lossless(model: Any, plain: list[Any], spec: list[Any]) -> Result:
    different = []
    for a, b in zip(plain, spec, strict=True):
        if a.output_ids == b.output_ids:
            continue
        pairs = zip(a.output_ids, b.output_ids, strict=False)
        at = next((i for i, (x, y) in enumerate(pairs) if x != y), 0)
        logits = model.logits(model.prefill([[*a.input_ids, *a.output_ids[:at]]]).last_BH)[0]
        gap = abs(float(logits[a.output_ids[at]] - logits[b.output_ids[at]]))
        different.append({"prompt": a.rid, "position": at, "gap": gap})
        print(f"prompt {a.rid} parts at token {at}: the two logits are {gap:.2e} apart")
    return {
        "prompts": len(plain), "same": len(plain) - len(different), "different": different,
        "tokens": sum(len(r.output_ids) for r in plain),
    }  # fmt: skip


def _parity(replay: Margins, samples: list[Sample], requests: list[Any], steps: int) -> Result:
    uncut = same = ours_steps = ours_tokens = theirs_steps = 0
    different = []
    for sample, request, found in zip(samples, requests, replay.run(samples), strict=True):
        assert request.spec is not None
        live = {length: accepted for length, accepted, _ in request.spec.steps}
        theirs_steps += len(live)
        ours_steps += len(found.steps)
        ours_tokens += found.counts.tokens
        for step in found.steps:
            if step.cut(len(sample.ids_N), steps):
                continue
            uncut += 1
            if live.get(step.length) == step.accepted:
                same += 1
                continue
            depth = min(step.accepted, live.get(step.length, step.accepted))
            row = step.length - sample.n_context
            gap = replay.of(sample)[min(depth, steps - 1)][row]
            different.append({"sample": sample.sample_id, "length": step.length, "gap": gap,
                              "replay": step.accepted, "live": live.get(step.length)})  # fmt: skip
            print(f"{sample.sample_id} at {step.length}: replay {step.accepted}, live "
                  f"{live.get(step.length)}; the draft leads by {gap:.2e} logits")  # fmt: skip
    return {
        "samples": len(samples), "uncut_steps": uncut, "same": same,
        "same_share": same / uncut if uncut else 0.0, "different": different,
        "replay_accept_len": ours_tokens / ours_steps, "live_accept_len": ours_tokens / theirs_steps,
    }  # fmt: skip


def _die(error: BaseException) -> None:
    print(f"the engine died: {error!r}", file=sys.stderr)
    os._exit(1)


if __name__ == "__main__":
    main()
