"""The store against its bars: sizes, speeds, reads, and what the lossy codec loses.

python benchmarks/store.py                   # everything: about 15 minutes on 2 cores
python benchmarks/store.py codecs lossy      # some parts
python benchmarks/store.py --machine "16 cores" codecs threads    # figures of a machine of their own

codecs      real SmolLM2 states (computed in float32 and in bfloat16) and Kimi-width synthetic ones:
            ratio, the conditional-entropy limit, MB of raw states per CPU second, beside Arrow IPC zstd 1,
            Parquet BYTE_STREAM_SPLIT + zstd 1, blosc2 and zipnn, in 5 alternating rounds
threads     2, 4 and 8 threads against one, encoding and decoding, beside as many processes
read        2,000 samples in random order, warm and cold: the store, `.pt` files, Arrow's own zstd
open        83,000 samples: time to open, memory of the index, token statistics
lossy       mantissa-4: ratio, KL of the target's distribution, top-1 agreement, error
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
ROUNDS = 5
GROUP = 8  # samples
Result = dict[str, Any]


def main(parts: list[str], machine: str | None = None) -> int:
    """Run the parts; prints a line each, writes results/, exits 1 when a bar is missed.

    `machine`: the name of conditions of their own, under which the results are kept beside the others.
    """
    results = {part: in_process(part) for part in parts or list(PARTS)}
    out = ROOT / "benchmarks" / "results" / f"store-{time.strftime('%Y-%m-%d')}.json"
    kept = json.loads(out.read_text()) if out.exists() else {}
    into = kept if machine is None else kept.setdefault("machines", {}).setdefault(machine, {})
    into |= {"cpus": os.cpu_count(), "cpu": _cpu_model(), "load_average": os.getloadavg()[0]}
    into |= results
    out.write_text(json.dumps(kept, indent=2) + "\n")
    return 0 if all(r["passed"] for r in results.values()) else 1


def _cpu_model() -> str | None:
    """What Linux calls the CPU."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((x.partition(":")[2].strip() for x in lines if x.startswith("model name")), None)


def in_process(part: str) -> Result:
    """Run one part in a fresh interpreter and print what it found."""
    with tempfile.TemporaryDirectory(prefix="store-") as folder:
        done = subprocess.run(
            [sys.executable, __file__, "--part", part, folder], stdout=subprocess.PIPE, check=True
        )
    result: Result = json.loads(done.stdout.splitlines()[-1])
    print(f"{'pass' if result['passed'] else 'MISS'}  {part}: {json.dumps(result)}", flush=True)
    return result


def judged(result: Result, bars: Mapping[str, bool | None]) -> Result:
    """The result with its bars, by name. None: not measured, which is neither met nor missed."""
    plain = {name: None if met is None else bool(met) for name, met in bars.items()}
    return {**result, "bars": plain, "passed": False not in plain.values()}


def above_others(name: str, table: Result) -> dict[str, bool | None]:
    """Of each other library that knows bytes: whether `plane` stores less. None where it is not installed."""
    return {
        f"{name}: ratio above {other}": (
            table["plane"]["ratio"] > scheme["ratio"] if "ratio" in scheme else None
        )
        for other, scheme in table.items()
        if other.startswith(("parquet", "blosc2", "zipnn"))
    }


# -- codecs -------------------------------------------------------------------------------------


def codecs(_: Path) -> Result:
    """Ratios and speeds, all schemes over the same samples."""
    from store_limits import physical_speeds, with_mantissa_bits
    from store_states import Samples, real_samples, wide_samples

    real = {dtype: real_samples(dtype) for dtype in ("float32", "bfloat16")}
    whole = {d: Samples(s.rows[:64], s.ids[:64], s.n_context[:64]) for d, s in real.items()}
    found = {f"smollm2 {d}": _compare(s, 576) for d, s in whole.items()}
    found["kimi width"] = _compare(wide_samples(real["float32"], n=3, tokens=700), 7168)
    plane = {name: table["plane"] for name, table in found.items()}
    bars: dict[str, bool | None] = {}
    for name, table in found.items():
        ratios = plane[name]["to arrow zstd 1"]
        bars |= {
            f"{name}: encode >= 0.95 of arrow zstd 1": ratios["encode"] >= 0.95,
            f"{name}: decode >= 1.05 of arrow zstd 1": ratios["decode"] >= 1.05,
            f"{name}: ratio >= 1.18 of arrow zstd 1": ratios["ratio"] >= 1.18,
            f"{name}: ratio >= 1.49": plane[name]["ratio"] >= 1.49,
            f"{name}: >= 98 % of the limit": plane[name]["of_the_limit"] >= 0.98,
            **above_others(name, table),
        }
    first = plane["smollm2 float32"]
    physical = physical_speeds(whole["bfloat16"].rows)
    return judged(
        {
            "lossless_ratio": first["ratio"],
            "lossless_ratio_bfloat16": plane["smollm2 bfloat16"]["ratio"],
            "lossless_ratio_kimi_width": plane["kimi width"]["ratio"],
            "entropy_limit_ratio": first["limit"],
            "encode_mb_per_cpu_s": first["encode"],
            "decode_mb_per_cpu_s": first["decode"],
            "physical_mb_per_cpu_s": physical,
            "bfloat16_with_mantissa_bits_in_symbols": with_mantissa_bits(
                whole["bfloat16"].rows, 576
            ),
            "rounds": ROUNDS,
            "samples": found,
        },
        bars,
    )


def _compare(samples: Any, hidden: int) -> Result:
    from store_codecs import arrow, cpu_s, optional, ours, parquet
    from store_limits import limit_bits

    from datagen.store.states import StatesSpec

    spec = StatesSpec((2, 15, 27), "post", "BF16", hidden, "plane")
    own = [ours(name, spec, samples) for name in ("plane", "ipc-zstd", "mantissa-4")]
    others = [arrow(1), parquet(), optional("blosc2"), optional("zipnn")]
    schemes = [s for s in (*own, *others) if s is not None]
    rows, raw = samples.rows, sum(r.nbytes for r in samples.rows)
    speeds: dict[str, dict[str, list[float]]] = {
        s.name: {"encode": [], "decode": []} for s in schemes
    }
    sizes: dict[str, int] = {}
    for scheme in schemes:
        scheme.decode(scheme.encode(rows[:1]))  # what is imported or set up once
        sizes[scheme.name] = scheme.size(scheme.encode(rows))
    for number in range(ROUNDS):
        spent = {s.name: {"encode": 0.0, "decode": 0.0} for s in schemes}
        for at in range(
            0, len(rows), GROUP
        ):  # a few samples at a time: the neighbours' load is shared
            group = rows[at : at + GROUP]
            for scheme in schemes[:: 1 if (number + at // GROUP) % 2 == 0 else -1]:
                seconds, encoded = cpu_s(lambda s=scheme, g=group: s.encode(g))
                spent[scheme.name]["encode"] += seconds
                seconds, decoded = cpu_s(lambda s=scheme, e=encoded: s.decode(e))
                spent[scheme.name]["decode"] += seconds
                if scheme.name != "mantissa-4":
                    pairs = zip(decoded, group, strict=True)
                    assert all(np.array_equal(a.ravel(), b.ravel()) for a, b in pairs), scheme.name
                del encoded, decoded
        for name, ways in spent.items():
            for way, seconds in ways.items():
                speeds[name][way].append(raw / seconds / 1e6)
        note(f"hidden {hidden}, round {number}: {speeds['plane']}")
    reference = speeds["arrow zstd 1"]
    table: Result = {}
    for scheme in schemes:
        name, speed = scheme.name, speeds[scheme.name]
        table[name] = {
            "ratio": round(raw / sizes[name], 4),
            **{way: round(median(speed[way])) for way in speed},
            "to arrow zstd 1": {
                "ratio": round(sizes["arrow zstd 1"] / sizes[name], 4),
                **{
                    way: round(
                        median(a / b for a, b in zip(speed[way], reference[way], strict=True)), 3
                    )
                    for way in speed
                },
            },
        }
    for name, scheme in (("blosc2", others[2]), ("zipnn", others[3])):
        if scheme is None:
            table[name] = {"skipped": "not installed"}
    bits = limit_bits(np.concatenate(rows), hidden)
    limit = 16 / sum(bits.values())
    table["plane"] |= {
        "limit": round(limit, 4),
        "limit_bits": {name: round(value, 4) for name, value in bits.items()},
        "limit_with_raw_mantissa": round(16 / (bits["exponent"] + bits["sign"] + 7), 4),
        "bits": round(16 * sizes["plane"] / raw, 4),
        "of_the_limit": round(raw / sizes["plane"] / limit, 4),
    }
    table["tokens"] = sum(map(len, rows))
    return table


# -- threads ------------------------------------------------------------------------------------


def threads(_: Path) -> Result:
    """Encoding and decoding by several threads against one, in wall time, beside as many processes."""
    from store_threads import measure

    return judged(*measure())


# -- reading ------------------------------------------------------------------------------------


def read(folder: Path) -> Result:
    """Random reads of 2,000 samples of 48 tokens, each summed, through four layouts."""
    from store_reads import measure

    return judged(*measure(folder))


# -- 83,000 samples -----------------------------------------------------------------------------


def open_run(folder: Path) -> Result:
    """83,000 samples with ids of real lengths and hardly any states: open, index, token statistics."""
    from store_run import Sample, write_run
    from store_states import real_samples

    from datagen.store.run_reader import RunReader
    from datagen.store.states import StatesSpec

    n = 83_000
    real = real_samples()
    spec = StatesSpec((1,), "post", "BF16", 1, "plane")

    def sample(number: int) -> Sample:
        ids, context = real.ids[number % 64], real.n_context[number % 64]
        return ids, context, np.full((len(ids), 2), 0x3F80 + number % 9, dtype=np.uint16)

    manifest = write_run(folder / "run", spec, map(sample, range(n)), n)
    opened, counted, counted_cpu = [], [], []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        run = RunReader.open(manifest)
        opened.append(time.perf_counter() - started)
        started, started_cpu = time.perf_counter(), time.process_time()
        counts = run.token_counts("train")
        counted.append(time.perf_counter() - started)
        counted_cpu.append(time.process_time() - started_cpu)
    stated = run.manifest.token_frequencies
    assert {int(i): int(counts[i]) for i in np.flatnonzero(counts)} == {
        int(k): v for k, v in stated.items()
    }
    per_sample = run.index.n_bytes / len(run)
    return judged(
        {
            "samples": len(run),
            "tokens": int(run.index.tokens.sum()),
            "open_s": round(median(opened), 3),
            "index_bytes_a_sample": round(per_sample, 1),
            "token_statistics_s": round(median(counted), 3),
            "token_statistics_cpu_s": round(median(counted_cpu), 3),
        },
        {
            "open < 1 s": median(opened) < 1,
            "index < 100 bytes a sample": per_sample < 100,
            "token statistics < 5 s": median(counted) < 5,
        },
    )


# -- lossy --------------------------------------------------------------------------------------


def lossy(_: Path) -> Result:
    """What rounding does to the target's distribution (from the final state) and to the aux states."""
    import torch
    from safetensors.torch import load_file
    from store_states import real_samples

    from datagen.embedded.weights import ensure_checkpoint
    from datagen.store.codecs.mantissa_4 import rounded
    from datagen.store.encoder import Encoder
    from datagen.store.states import StatesSpec

    samples = real_samples()
    spec = StatesSpec((2, 15, 27), "post", "BF16", 576, "mantissa-4")
    encoder = Encoder(spec, refit_after=8)
    for rows in samples.rows[:8]:
        encoder(rows)
    raw = sum(r.nbytes for r in samples.rows)
    ratio = raw / sum(encoder(r).n_bytes for r in samples.rows)
    weights = load_file(ensure_checkpoint() / "model.safetensors")
    head_VH = weights.get("lm_head.weight", weights["model.embed_tokens.weight"]).float()
    rows = np.concatenate(samples.rows)
    picked = rows[np.random.default_rng(0).choice(len(rows), 1500, replace=False)]
    before, after = (
        torch.from_numpy((bits.astype(np.uint32) << 16).view(np.float32)).view(len(bits), 4, 576)
        for bits in (picked, rounded(picked))
    )
    kl, agree = [], []
    for a, b in zip(before[:, 3].split(100), after[:, 3].split(100), strict=True):
        p, q = (torch.log_softmax(x @ head_VH.T, -1) for x in (a, b))
        kl.append((p.exp() * (p - q)).sum(-1))
        agree.append(p.argmax(-1) == q.argmax(-1))
    divergence = torch.cat(kl).double()
    errors = {}
    for layer, name in enumerate(("2", "15", "27")):
        a, b = before[:, layer], after[:, layer]
        others = a.abs().mean(0).argsort()[:-4]
        relative = (a - b)[:, others].norm(dim=-1) / a[:, others].norm(dim=-1)
        errors[name] = {
            "median": round(float(relative.median()), 4), "max": round(float(relative.max()), 4)
        }  # fmt: skip
    return judged(
        {
            "mantissa_4_ratio": round(ratio, 3),
            "tokens": len(picked),
            "kl_mean": float(f"{float(divergence.mean()):.3g}"),
            "kl_p99": float(f"{float(divergence.quantile(0.99)):.3g}"),
            "top1_agreement": round(float(torch.cat(agree).double().mean()), 4),
            "relative_error_without_4_largest_channels": errors,
        },
        {"ratio >= 2": ratio >= 2},
    )


def note(text: str) -> None:
    """Progress, apart from the result."""
    print(f"      {text}", file=sys.stderr, flush=True)


PARTS = {"codecs": codecs, "threads": threads, "read": read, "open": open_run, "lossy": lossy}

if __name__ == "__main__":
    if sys.argv[1:2] == ["--part"]:
        print(json.dumps(PARTS[sys.argv[2]](Path(sys.argv[3]))))
    elif sys.argv[1:2] == ["--machine"]:
        sys.exit(main(sys.argv[3:], sys.argv[2]))
    else:
        sys.exit(main(sys.argv[1:]))
