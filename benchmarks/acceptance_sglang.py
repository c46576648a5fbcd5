"""Live against a real SGLang on a GPU: `datagen evaluate --live URL`, and what the server loaded.

    python -m benchmarks.acceptance_sglang --model DIR --run RUN --drafter CKPT -- server flags

Two servers of one SGLang and one target start here: one with the capture plugin, one with the drafter
(EAGLE3, a chain of K = --steps). Then, by the product's own command, in bfloat16 and in float32 of the
replay: the sitting on the run's held-out prompts, its speeds, accept_len, and parity with replay of the
outputs that the server gave.

every tensor held  each tensor of the checkpoint stands in the loaded model (sglang_load.py)
drafts             spec fields are reported, and accept_len is above 1
parity             replayed and live verify steps of the same outputs within 3 %

Runs in SGLang's environment with this package's dependencies in it. Results: the object
live-sglang of benchmarks/results/acceptance-<date>.json.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks.sglang_server import PLUGIN, ROOT, Server

AUDIT = {"drafter_load": "benchmarks.sglang_load:register"}
APART = 0.03
Result = dict[str, Any]


def main() -> int:
    """Start, evaluate, print, write; 1 when a bar is missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True, help="the target's directory")
    parser.add_argument("--run", type=Path, required=True, help="a finished run of the target")
    parser.add_argument("--drafter", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=60, help="at most")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--concurrencies", default="1,8")
    parser.add_argument("--boundaries", default="2,15,27")
    parser.add_argument("--port", type=int, default=30071)
    parser.add_argument("--spool", default="/dev/shm/datagen-live")
    parser.add_argument("--wait", type=float, default=300.0, help="seconds for a server to start")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("flags", nargs="*", help="of both servers, after --")
    given = parser.parse_args()
    Path(given.spool).mkdir(mode=0o700, exist_ok=True)
    with tempfile.TemporaryDirectory() as name, _Servers(given, Path(name)) as servers:
        loaded = servers.wait()
        found = _evaluated(given, servers) | {"load": loaded}
    found["bars"] = _bars(found)
    print(json.dumps(found, indent=2), flush=True)
    _write(given.results, found)
    for bar, met in found["bars"].items():
        print(f"{'met   ' if met else 'MISSED'} {bar}")
    return 0 if all(found["bars"].values()) else 1


class _Servers:
    """The one that captures, and the one that drafts."""

    def __init__(self, given: argparse.Namespace, folder: Path) -> None:
        self.given, self.folder = given, folder
        self.report = folder / "load.json"

    def __enter__(self) -> _Servers:
        given, count = self.given, self.given.steps
        drafting = [
            "--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", str(given.drafter),
            "--speculative-num-steps", str(count), "--speculative-eagle-topk", "1",
            "--speculative-num-draft-tokens", str(count + 1),
        ]  # fmt: skip
        self.started = time.monotonic()
        self.plain = self._one("plain", 0, PLUGIN, [])
        os.environ["DATAGEN_LOAD_REPORT"] = str(self.report)
        self.drafting = self._one("drafting", 1, AUDIT, drafting)
        return self

    def _one(self, name: str, number: int, plugins: dict[str, str], more: list[str]) -> Server:
        given, folder = self.given, self.folder / name
        folder.mkdir()
        args = SimpleNamespace(
            python=sys.executable, port=given.port + number, spool=given.spool,
            boundaries=given.boundaries, flags=[*given.flags, *more],
        )  # fmt: skip
        return Server(args, given.model, folder, plugins=plugins)  # type: ignore[arg-type]

    def wait(self) -> Result:
        """Both answer; what the drafting one says it loaded."""
        for server in (self.plain, self.drafting):
            server.wait(self.given.wait)
        print(f"both servers up after {time.monotonic() - self.started:.0f} s", flush=True)
        found = json.loads(self.report.read_text(encoding="utf-8"))
        print(f"loaded: {found}", flush=True)
        return {"tensors_held": len(found["held"]), **found}

    def __exit__(self, *_: object) -> None:
        for server in (self.plain, self.drafting):
            server.stop()


def _evaluated(given: argparse.Namespace, servers: _Servers) -> Result:
    found: Result = {"split": "heldout", "draft_steps": given.steps}
    found["drafter"] = "/".join(given.drafter.parts[-3:])
    for dtype in ("bfloat16", "float32"):
        name = f"sglang-{dtype}"
        first = dtype == "bfloat16"
        flags = {
            "--drafter": given.drafter, "--name": name, "--dtype": dtype,
            "--steps": given.steps, "--target-weights": given.model, "--live": servers.drafting.url,
            "--baseline-url": servers.plain.url, "--live-prompts": given.prompts,
            "--concurrencies": given.concurrencies if first else "1", "--rounds": 2 if first else 1,
        }  # fmt: skip
        command = [sys.executable, "-m", "datagen.cli", "evaluate", str(given.run)]
        command += [str(part) for pair in flags.items() for part in pair]
        subprocess.run(command, check=True, timeout=300)
        path = given.run / "evaluation" / f"{name}.json"
        found[dtype] = _summed(json.loads(path.read_text(encoding="utf-8")), full=first)
    info = servers.drafting.info()
    found["sglang"] = info["version"]
    found["prompts"] = found["bfloat16"]["parity"]["samples"]
    return found


def _summed(report: Result, *, full: bool) -> Result:
    live, parity = report["live"], dict(report["parity"])
    differ = parity.pop("differ")
    parity["samples_that_differ"] = len(differ)
    parity["largest_difference"] = max(
        (abs(d["replay"] - d["live"]) for d in differ.values()), default=0
    )
    parity["relative_difference"] = parity["live_steps"] / parity["replay_steps"] - 1
    found = {
        "parity": parity,
        "live_accept_len": live["accept_len"],
        "replay_dtype": report["replay"]["dtype"],
    }
    if full:
        found |= {
            "accept_len_raw": live["accept_len_raw"], "speeds": live["speeds"],
            "replay_of_the_run": report["replay"]["accept_len"], "verdict": report["verdict"]["sentence"],
        }  # fmt: skip
    return found


def _bars(found: Result) -> dict[str, bool]:
    return {
        "every tensor of the checkpoint is held, none ignored": not found["load"]["ignored"]
        and found["load"]["tensors_held"] > 0,
        "drafts are accepted": found["bfloat16"]["live_accept_len"]["value"] > 1,
        **{
            f"replay in {dtype} and live within {APART:.0%}": abs(
                found[dtype]["parity"]["relative_difference"]
            )
            <= APART
            for dtype in ("bfloat16", "float32")
        },
    }


def _write(folder: Path, found: Result) -> None:
    path = folder / f"acceptance-{date.today().isoformat()}.json"
    earlier = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    path.write_text(
        json.dumps({**earlier, "live-sglang": found}, indent=2) + "\n", encoding="utf-8"
    )


if __name__ == "__main__":
    sys.exit(main())
