"""The prompt stage against its bars. Each part runs in a process of its own, so that memory is its own.

python benchmarks/prompts.py                 # everything: about 25 minutes on 2 cores
python benchmarks/prompts.py plan near       # some parts

plan           offline-83k, read to frozen plan with a real tokenizer: <= 150 s, <= 1.0 GB resident
identical      the same plan from shuffled files, cut in two, with two workers: byte for byte
stream         350,000 and 1.4 million generated rows: <= 2.5 GB resident, linear within 15 %
near           near duplicates on labelled pairs: recall and precision >= 0.95
contamination  planted held-out prompts: all found; long meeting transcripts: none removed
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import yaml
import zstandard

ROOT = Path(__file__).resolve().parents[1]
PROMPTS = ROOT / "prompts"
POOL = ("permissive", "CC-BY-SA-4.0", "CC-BY-SA-3.0", "CC-BY-3.0")
Result = dict[str, Any]


def main(parts: list[str]) -> int:
    """Run the parts; prints a line each, writes results/, exits 1 when a bar is missed."""
    results = {part: in_process(part) for part in parts or list(PARTS)}
    out = ROOT / "benchmarks" / "results" / f"prompts-{time.strftime('%Y-%m-%d')}.json"
    out.parent.mkdir(exist_ok=True)
    earlier = json.loads(out.read_text()) if out.exists() else {}
    out.write_text(json.dumps({**earlier, "cpus": os.cpu_count(), **results}, indent=2) + "\n")
    return 0 if all(r["passed"] for r in results.values()) else 1


def in_process(part: str) -> Result:
    """Run one part in a fresh interpreter and print what it found."""
    with tempfile.TemporaryDirectory(prefix="prompts-") as folder:
        done = subprocess.run(
            [sys.executable, __file__, "--part", part, folder], stdout=subprocess.PIPE, check=True
        )
    result: Result = json.loads(done.stdout.splitlines()[-1])
    print(f"{'pass' if result['passed'] else 'MISS'}  {part}: {json.dumps(result)}", flush=True)
    return result


def resident_mib() -> int:
    """Most memory that this process, or its largest child, has had."""
    of_self = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    of_child = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    return (of_self + of_child) // 1024


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a data file."""
    from datagen.prompts.reader import read_lines

    return (json.loads(line.data) for line in read_lines(path))


def plan(folder: Path, mix_path: str = "offline-83k", workers: int = 1) -> Result:
    """offline-83k with SmolLM2's tokenizer and template, from an empty cache."""
    from datagen.embedded.weights import ensure_checkpoint
    from datagen.prompts.mix import load_mix
    from datagen.prompts.plan import build_plan
    from datagen.store.plan import write_plan
    from datagen.target.profile import load_profile
    from datagen.target.tokens import TemplateRenderer

    checkpoint = ensure_checkpoint()
    started = time.monotonic()
    made = build_plan(
        load_mix(mix_path),
        renderer=TemplateRenderer(checkpoint),
        profile=load_profile("smollm2"),
        cache=folder / "cache",
        workers=workers,
    )
    frozen = folder / "plan.arrow"
    write_plan(frozen, made.rows, {})
    seconds, splits = time.monotonic() - started, made.report.splits
    prompts = sum(s["prompts"] for s in splits.values())
    resident = resident_mib()
    return {
        "prompts": prompts,
        "samples": sum(s["samples"] for s in splits.values()),
        "seconds": round(seconds, 1),
        "resident_mib": resident,
        "removed_by": dict(made.report.removed_by),
        "sha256": hashlib.sha256(frozen.read_bytes()).hexdigest(),
        "passed": prompts == 83_000
        and seconds <= 150
        and resident <= 1000
        and made.report.is_balanced(),
    }


def identical(folder: Path) -> Result:
    """The plan of offline-83k from its files in another order, in two pieces, with two workers."""
    (folder / "mixes").mkdir()
    (folder / "pool").mkdir()
    (folder / "heldout").symlink_to(PROMPTS / "heldout")
    rng = random.Random(0)
    for name in POOL:
        lines = zstd_lines(PROMPTS / "pool" / f"{name}.jsonl.zst")
        rng.shuffle(lines)
        cut = len(lines) // 3
        for piece, some in enumerate((lines[:cut], lines[cut:])):
            raw = b"\n".join(some) + b"\n"
            (folder / "pool" / f"{name}-{piece}.jsonl.zst").write_bytes(zstandard.compress(raw))
    text = (PROMPTS / "mixes" / "offline-83k.yaml").read_text()
    text = re.sub(r"(\.\./pool/[\w.-]+?)\.jsonl\.zst", r'"\1-*.jsonl.zst"', text)
    mix = folder / "mixes" / "offline-83k.yaml"
    mix.write_text(text)
    (folder / "a").mkdir()
    (folder / "b").mkdir()
    first, second = plan(folder / "a"), plan(folder / "b", str(mix), workers=2)
    return {
        "sha256": [first["sha256"], second["sha256"]],
        "seconds": [first["seconds"], second["seconds"]],
        "passed": first["sha256"] == second["sha256"],
    }


def zstd_lines(path: Path) -> list[bytes]:
    """The lines of a compressed file."""
    from datagen.prompts.reader import read_lines

    return [line.data for line in read_lines(path)]


def stream(folder: Path) -> Result:
    """The pool again and again, every third word another: rows that are no near duplicates."""
    sizes = {}
    for total in (350_000, 1_400_000):
        place = folder / str(total)
        place.mkdir()
        subprocess.run([sys.executable, __file__, "--generate", str(place), str(total)], check=True)
        done = subprocess.run(
            [sys.executable, __file__, "--stream", str(place), str(total)],
            stdout=subprocess.PIPE,
            check=True,
        )
        sizes[total] = json.loads(done.stdout.splitlines()[-1])
        (place / "rows.jsonl.zst").unlink()
    small, large = sizes.values()
    per_row = large["cpu_seconds"] / 1_400_000 / (small["cpu_seconds"] / 350_000)
    return {
        "runs": sizes,
        "cpu_time_per_row_ratio": round(per_row, 3),
        "passed": per_row <= 1.15 and large["resident_mib"] <= 2500,
    }


def generate(folder: Path, total: int) -> None:
    """Write `total` rows made of the pool."""
    word = re.compile(r"[\u3040-\u9fff]|[^\s\u3040-\u9fff]+")
    made = 0
    repeat = 0
    with zstandard.open(folder / "rows.jsonl.zst", "wb") as sink:
        while made < total:
            for name in POOL:
                for row in read_rows(PROMPTS / "pool" / f"{name}.jsonl.zst"):
                    if made == total or row["source"] == "qmsum-train":
                        continue
                    for message in row["messages"]:
                        message["content"] = varied(word, message["content"], repeat)
                    sink.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
                    made += 1
            repeat += 1


def varied(word: re.Pattern[str], text: str, repeat: int) -> str:
    """The text with every third word changed in a way that no other repeat has."""
    count = iter(range(len(text) + 1))
    return word.sub(lambda m: f"{m.group()}{repeat}" if next(count) % 3 == 0 else m.group(), text)


def stream_once(folder: Path, total: int) -> Result:
    """From the generated file to the last planned row."""
    from datagen.prompts.estimate import RatioCounter, estimate_plan
    from datagen.prompts.mix import load_mix
    from datagen.prompts.plan import build_plan
    from datagen.target.profile import load_profile

    kimi = load_profile("kimi-k2.5")
    mix = {
        "version": 1,
        "total": total,
        "on_short_source": "rescale",
        "decontaminate": {"against": [str(p) for p in sorted((PROMPTS / "heldout").glob("*.zst"))]},
        "sources": [
            {"name": "rows", "file": "rows.jsonl.zst", "licence": "per-row", "count": total}
        ],
    }
    path = folder / "mix.yaml"
    path.write_text(yaml.safe_dump(mix))
    started = time.monotonic()
    marks: dict[str, float] = {}
    made = build_plan(
        load_mix(str(path)),
        renderer=RatioCounter(),
        profile=kimi,
        cache=folder / "cache",
        progress=lambda said: marks.update({said: round(time.monotonic() - started, 1)}),
    )
    estimate = estimate_plan(made.rows, kimi)
    return {
        "seconds": round(time.monotonic() - started, 1),
        "cpu_seconds": round(time.process_time(), 1),
        "resident_mib": resident_mib(),
        "planned": estimate.cost.prompts,
        "dropped": dict(made.report.reasons()),
        "marks": marks,
    }


def near(_: Path) -> Result:
    """Pairs whose exact Jaccard similarity is spread evenly over 0.6-1.0, of the pool's own words."""
    from datagen.prompts.minhash import near_duplicates, sketch
    from datagen.prompts.mix import Near
    from datagen.prompts.words import hash_words, words_of

    rng = random.Random(11)
    settings = Near()
    vocabulary = [
        w
        for row in read_rows(PROMPTS / "pool" / "permissive.jsonl.zst")
        for w in words_of(row["messages"][-1]["content"])[:50]
    ]
    bins: list[list[tuple[list[str], list[str], float]]] = [[] for _ in range(40)]
    while any(len(b) < 100 for b in bins):
        size = rng.randint(20, 150)
        first = rng.choices(vocabulary, k=size)
        second = list(first)
        for _edit in range(rng.randint(0, size // 10 + 1)):
            at = rng.randrange(len(second))
            change = rng.choice(("replace", "insert", "delete"))
            second[at : at + (change != "insert")] = (
                [] if change == "delete" else [rng.choice(vocabulary)]
            )
        similarity = jaccard(first, second, settings.shingle_words)
        place = bins[min(int((similarity - 0.6) * 100), 39)] if similarity >= 0.6 else None
        if place is not None and len(place) < 100:
            place.append((first, second, similarity))
    pairs = [pair for b in bins for pair in b]
    rng.shuffle(pairs)
    texts = [text for first, second, _s in pairs for text in (first, second)]
    hashes = hash_words(texts)
    made = sketch(hashes, settings, np.zeros(len(texts), dtype=np.uint64))
    dropped = near_duplicates(
        made,
        settings,
        lambda rows: hash_words([texts[r] for r in rows]),
        np.ones(len(texts), dtype=np.bool_),
    )
    found = dropped[1::2] | dropped[0::2]
    similarity = np.array([s for _f, _s, s in pairs])
    clear = np.abs(similarity - settings.threshold) > 0.03
    away, close = (scores(found, similarity >= settings.threshold, w) for w in (clear, ~clear))
    return {
        "away_from_threshold": away,
        "within_0.03": close,
        "passed": min(away["recall"], away["precision"]) >= 0.95,
    }


def jaccard(left: list[str], right: list[str], n: int) -> float:
    """Similarity of the sets of n-grams."""
    a, b = ({tuple(w[i : i + n]) for i in range(len(w) - n + 1)} for w in (left, right))
    return len(a & b) / max(len(a | b), 1)


def scores(found: Any, true: Any, among: Any) -> dict[str, float]:
    """Recall and precision among some pairs."""
    hits = int((found & true & among).sum())
    return {
        "pairs": int(among.sum()),
        "recall": round(hits / max(int((true & among).sum()), 1), 4),
        "precision": round(hits / max(int((found & among).sum()), 1), 4),
    }


def contamination(folder: Path) -> Result:
    """Held-out prompts planted in five ways, and the long meetings of QMSum's training part."""
    from datagen.prompts.estimate import RatioCounter
    from datagen.prompts.mix import load_mix
    from datagen.prompts.plan import build_plan
    from datagen.target.profile import load_profile

    rng = random.Random(3)
    held = {
        path.name.split(".")[0]: list(read_rows(path))
        for path in sorted((PROMPTS / "heldout").glob("*.zst"))
    }
    meetings = [
        row
        for row in read_rows(PROMPTS / "pool" / "permissive.jsonl.zst")
        if row["source"] == "qmsum-train"
    ]
    rows: list[dict[str, Any]] = [{**row, "kind": "meeting"} for row in meetings]
    for prompts in held.values():
        for prompt in rng.sample(prompts, min(120, len(prompts))):
            text = rng.choice([m for m in prompt["messages"] if m["role"] == "user"])["content"]
            for kind, planted in plantings(text, rng, meetings):
                rows.append({"messages": [{"role": "user", "content": planted}], "kind": kind})
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    mix = {
        "version": 1,
        "total": len(rows),
        "on_short_source": "rescale",
        "defaults": {"min_chars": 0},
        "dedup": {"near": None},
        "decontaminate": {"against": [str(PROMPTS / "heldout" / f"{n}.jsonl.zst") for n in held]},
        "sources": [
            {
                "name": "rows",
                "file": "rows.jsonl",
                "licence": "test",
                "count": len(rows),
                "columns": {"category": "kind"},
            }
        ],
    }
    (folder / "mix.yaml").write_text(yaml.safe_dump(mix))
    made = build_plan(
        load_mix(str(folder / "mix.yaml")),
        renderer=RatioCounter(),
        profile=load_profile("kimi-k2.5"),
        cache=folder / "cache",
    )
    left = [row.category for row in made.rows]
    planted = {
        kind: sum(r["kind"] == kind for r in rows) for kind in sorted({r["kind"] for r in rows})
    }
    missed = {kind: left.count(kind) for kind in planted if kind != "meeting"}
    wrongly = planted["meeting"] - left.count("meeting")
    return {
        "planted": planted,
        "missed": missed,
        "meetings_wrongly_removed": wrongly,
        "removed_by": dict(made.report.removed_by),
        "passed": not any(missed.values()) and wrongly == 0,
    }


def plantings(text: str, rng: random.Random, meetings: list[Any]) -> Iterator[tuple[str, str]]:
    """A held-out text whole, restyled, framed and inside a long document, as far as it is long enough."""
    tokens = text.split()
    yield "whole", text
    if len(tokens) >= 5:
        yield "restyled", re.sub(r"[.,;!?]", " ", " ; ".join(tokens)).swapcase()
    letters = [t for t in tokens if re.fullmatch(r"[A-Za-z]+", t)]
    if 20 <= len(tokens) == len(letters) or len(letters) >= 25:
        start = rng.randrange(len(tokens) - 18)
        yield (
            "framed",
            f"Tell me in your own words: {' '.join(tokens[start : start + 18])} and why?",
        )
    if 20 <= len(tokens) <= 400 and len(letters) >= 15:
        document = rng.choice(meetings)["messages"][-1]["content"].split()[:9000]
        at = rng.randrange(len(document))
        yield "inside", " ".join([*document[:at], *tokens, *document[at:]])


PARTS: dict[str, Callable[[Path], Result]] = {
    "plan": plan,
    "identical": identical,
    "stream": stream,
    "near": near,
    "contamination": contamination,
}

if __name__ == "__main__":
    match sys.argv[1:]:
        case ["--part", part, folder]:
            print(json.dumps(PARTS[part](Path(folder))))
        case ["--generate", folder, total]:
            generate(Path(folder), int(total))
        case ["--stream", folder, total]:
            print(json.dumps(stream_once(Path(folder), int(total))))
        case chosen:
            sys.exit(main(chosen))
