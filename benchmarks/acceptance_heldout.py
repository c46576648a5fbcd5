"""Held-out prompts of this repository, rendered for SmolLM2, and its greedy answers with their states.

Prompts are those of prompts/heldout/spec-bench.jsonl.zst, in the order of a hash of their text, cut off
at a length: the mix `demo` never trains on them. Answers are kept in the cache directory, made once.
"""

from __future__ import annotations

import hashlib
import json
import queue
from collections.abc import Sequence
from pathlib import Path

import orjson
import torch

from datagen.drafter.rows import Sample
from datagen.embedded.engine import Engine
from datagen.embedded.model import Llama
from datagen.embedded.requests import Request
from datagen.embedded.sampling import SamplingParams
from datagen.embedded.weights import cache_directory, ensure_checkpoint
from datagen.prompts.reader import read_lines
from datagen.target.tokens import TemplateRenderer

HELDOUT = Path(__file__).resolve().parents[1] / "prompts" / "heldout" / "spec-bench.jsonl.zst"
LONGEST = 200  # tokens of a rendered prompt
AT_ONCE = 16


def heldout_prompts(count: int) -> list[list[int]]:
    """Ids of the first turns of `count` held-out prompts, different ones."""
    renderer = TemplateRenderer(ensure_checkpoint())
    texts = set()
    for line in read_lines(HELDOUT):
        messages = orjson.loads(line.data)["messages"] if hasattr(line, "data") else []
        texts.update(m["content"] for m in messages[:1] if m["role"] == "user")
    ordered = sorted(texts, key=lambda t: hashlib.sha256(t.encode()).digest())
    found: list[list[int]] = []
    for text in ordered:
        ids = renderer.render([{"role": "user", "content": text}], None, None)
        if len(ids) <= LONGEST:
            found.append(list(ids))
        if len(found) == count:
            return found
    raise SystemExit(f"{HELDOUT.name} has {len(found)} prompts of at most {LONGEST} tokens")


def answered(
    engine: Engine, contexts: Sequence[Sequence[int]], max_new_tokens: int
) -> list[Request]:
    """Greedy answers of a started engine, in order."""
    done: queue.SimpleQueue[Request] = queue.SimpleQueue()
    for number, ids in enumerate(contexts):
        params = SamplingParams(temperature=0.0, max_new_tokens=max_new_tokens)
        engine.submit(Request(str(number), list(ids), params, False, False, 0.0), done.put)
    found = {r.rid: r for r in (done.get() for _ in contexts)}
    return [found[str(i)] for i in range(len(contexts))]


def captured(model: Llama, request: Request, boundaries: tuple[int, ...]) -> Sample:
    """Context and answer with their boundaries, rounded to bf16 as shards store them."""
    ids = [*request.input_ids, *request.output_ids]
    rows_NW = model.prefill([ids], boundaries=boundaries).rows_NW
    assert rows_NW is not None
    features_NW = rows_NW[:, : -model.config.hidden_size].to(torch.bfloat16)
    return Sample(f"{request.rid}-0", torch.tensor(ids), len(request.input_ids), features_NW, None)


def heldout_samples(count: int, max_new_tokens: int, boundaries: tuple[int, ...]) -> list[Sample]:
    """`count` held-out prompts with SmolLM2's greedy bf16 answers and exact states."""
    from benchmarks.acceptance import engine_of

    path = cache_directory() / "benchmarks" / f"heldout-{count}-{max_new_tokens}.json"
    model = Llama.load(ensure_checkpoint(), "bfloat16")
    prompts = heldout_prompts(count)
    if not path.exists():
        engine = engine_of(model, boundaries, None, AT_ONCE)
        said = [r.output_ids for r in answered(engine, prompts, max_new_tokens)]
        engine.stop()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_suffix(".tmp").write_text(json.dumps([prompts, said]))
        path.with_suffix(".tmp").replace(path)
    asked, said = json.loads(path.read_text())
    if asked != prompts:
        raise SystemExit(f"{path} holds answers to other prompts: remove it")
    found = []
    for number, (ids, answer) in enumerate(zip(asked, said, strict=True)):
        request = Request(str(number), ids, SamplingParams(), False, False, 0.0)
        request.output_ids.extend(answer)
        if len(answer) > 1:
            found.append(captured(model, request, boundaries))
    return found
