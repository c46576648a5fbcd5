"""Speculation, replay and their agreement on the embedded target, in float32.

    python -m benchmarks.acceptance --run runs/demo --drafter runs/demo/drafter/finetuned/final

lossless   output with the drafter == output without, token for token, on --prompts prompts
parity     replay of the drafter on those outputs == the live verify steps, on uncut steps
speed      tokens/s replayed / tokens/s generated live at concurrency 1, on the same CPU

Every difference is printed with how near a tie it was: the logits' gap between the two candidates.
Writes benchmarks/results/acceptance-<date>.json.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import queue
import sys
import time
from datetime import date
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from datagen.acceptance.replay import Replay
from datagen.drafter.checkpoint import load_drafter
from datagen.drafter.dataset import ManifestSource
from datagen.drafter.model import Drafter
from datagen.drafter.rows import Sample
from datagen.embedded.engine import Engine
from datagen.embedded.model import Llama
from datagen.embedded.requests import Request
from datagen.embedded.sampling import SamplingParams
from datagen.embedded.speculate import Speculator
from datagen.embedded.weights import ensure_checkpoint

RESULTS = Path(__file__).parent / "results"
NEAR_TIE = 1e-3  # logits; float32 rounding of these sums is about 1e-5


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


def main() -> None:
    """Run all three, print them, write the results file; exit 1 when a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--run", type=Path, required=True, help="a finished run of smollm2")
    parser.add_argument("--drafter", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--timed", type=int, default=12, help="prompts of the speed measurement")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    source = ManifestSource(args.run / "manifest.json")
    refs = [*source.index("heldout", 0), *source.index("train", 0)]
    seen: dict[tuple[int, ...], str] = {}
    for ref in refs:
        ids, _ = source.ids(ref)
        seen.setdefault(tuple(int(i) for i in ids[: ref.n_context]), ref.sample_id)
    contexts = list(seen)[: args.prompts]
    checkpoint = ensure_checkpoint()
    model = Llama.load(checkpoint, "float32")
    boundaries = source.info.boundaries
    print(f"{len(contexts)} prompts, K = {args.steps}, {args.max_new_tokens} tokens, float32")

    def engine(speculator: Speculator | None, max_running: int) -> Engine:
        made = Engine(
            model, Tokenizer.from_file(str(checkpoint / "tokenizer.json")),
            max_running=max_running, context_length=model.config.context_length, spool=None,
            on_death=_die, speculator=speculator, boundaries=boundaries,
        )  # fmt: skip
        made.start()
        return made

    def answers(made: Engine, chosen: list[tuple[int, ...]]) -> list[Request]:
        done: queue.SimpleQueue[Request] = queue.SimpleQueue()
        for number, ids in enumerate(chosen):
            params = SamplingParams(temperature=0.0, max_new_tokens=args.max_new_tokens)
            made.submit(Request(str(number), list(ids), params, False, False, 0.0), done.put)
        found = {r.rid: r for r in (done.get() for _ in chosen)}
        return [found[str(i)] for i in range(len(chosen))]

    def speculator() -> Speculator:
        return Speculator.load(args.drafter, model, boundaries, steps=args.steps)

    plain_engine = engine(None, 8)
    plain = answers(plain_engine, contexts)
    plain_engine.stop()
    spec_engine = engine(speculator(), 8)
    spec = answers(spec_engine, contexts)
    spec_engine.stop()
    lossless = _lossless(model, plain, spec)

    replay = Margins(load_drafter(args.drafter).drafter, model.embedding, steps=args.steps)
    samples = [_sample(model, r, boundaries) for r in spec if len(r.output_ids) > 1]
    parity = _parity(replay, samples, [r for r in spec if len(r.output_ids) > 1], args.steps)

    timed = contexts[: args.timed]
    alone = engine(speculator(), 1)
    answers(alone, timed[:1])
    started = time.monotonic()
    tokens = sum(len(answers(alone, [ids])[0].output_ids) for ids in timed)
    live_rate = tokens / (time.monotonic() - started)
    alone.stop()
    rates = []
    plain_replay = Replay(load_drafter(args.drafter).drafter, model.embedding, steps=args.steps)
    for _ in range(3):
        started = time.monotonic()
        counted = sum(r.counts.tokens for r in plain_replay.run(samples))
        rates.append(counted / (time.monotonic() - started))
    replay_rate = sorted(rates)[1]
    result: dict[str, Any] = {
        "date": date.today().isoformat(),
        "machine": {"cpu": platform.processor() or platform.machine(), "threads": args.threads,
                    "load_average": os.getloadavg()[0], "torch": torch.__version__},
        "prompts": len(contexts), "draft_steps": args.steps, "drafter": str(args.drafter),
        "lossless": lossless, "parity": parity,
        "speed": {"live_tokens_per_s": live_rate, "replay_tokens_per_s": replay_rate,
                  "ratio": replay_rate / live_rate, "timed_prompts": len(timed)},
    }  # fmt: skip
    bars = {
        "lossless but for near-ties": all(d["gap"] < NEAR_TIE for d in lossless["different"]),
        "same accepted count in 99.9 % of uncut steps": parity["same_share"] >= 0.999,
        "replay at least 20x live": result["speed"]["ratio"] >= 20,
    }
    result["bars"] = bars
    path = RESULTS / f"acceptance-{date.today().isoformat()}.json"
    path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=2))
    for bar, met in bars.items():
        print(f"{'met   ' if met else 'MISSED'} {bar}")
    sys.exit(0 if all(bars.values()) else 1)


def _lossless(model: Llama, plain: list[Request], spec: list[Request]) -> dict[str, Any]:
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


def _parity(
    replay: Margins, samples: list[Sample], requests: list[Request], steps: int
) -> dict[str, Any]:
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


def _sample(model: Llama, request: Request, boundaries: tuple[int, ...]) -> Sample:
    ids = [*request.input_ids, *request.output_ids]
    rows = model.prefill([ids], boundaries=boundaries).rows_NW
    assert rows is not None
    features = rows[:, : -model.config.hidden_size].to(torch.bfloat16)
    return Sample(f"{request.rid}-0", torch.tensor(ids), len(request.input_ids), features, None)


def _die(error: BaseException) -> None:
    print(f"the engine died: {error!r}", file=sys.stderr)
    os._exit(1)


if __name__ == "__main__":
    main()
