"""Repair and the collect after it: what was damaged is captured again, the rest is not touched."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

import datagen.cli  # noqa: F401 - registers the commands
from datagen.cli.app import app
from datagen.collect.job import CollectJob
from datagen.collect.opening import stored_config
from datagen.store.manifest import Manifest
from datagen.store.verify import verify_run
from tests.collect.harness import Bench, responses, state_ids
from tests.scripted_target import scripted


def a_shard_of_several_rows(root: Path) -> tuple[Path, dict[str, Any]]:
    """A sealed shard and what its seal says; one sample may lie alone, in the codec's first parameters."""
    for path in sorted(root.rglob("partition.json")):
        for seal in json.loads(path.read_text())["states"]:
            if len(seal["row_ends"]) > 1:
                return path.parent / seal["name"], seal
    raise AssertionError("no shard holds two samples")


async def test_damaged_samples_are_captured_again_from_their_responses(tmp_path: Path) -> None:
    root = tmp_path / "run"
    async with scripted(tmp_path / "spool") as url:
        bench = Bench.make(tmp_path, url, prompts=8)
        before = await bench.collect_here("run")
        said, ids = dict(responses(root)), sorted(state_ids(root))
        shard, seal = a_shard_of_several_rows(root)
        content = bytearray(shard.read_bytes())
        content[(seal["row_ends"][0] + seal["row_ends"][1]) // 2] ^= 0x10
        shard.write_bytes(content)
        others = {
            p: p.read_bytes() for p in root.rglob("*-*.arrow") if p.parent != shard.parent
        } | {p: p.read_bytes() for p in shard.parent.glob("responses-*.arrow")}
        bench.mix.unlink()  # a repair goes by the frozen plan
        done = CliRunner().invoke(app, ["repair", str(root), "--no-recapture"])
        assert done.exit_code == 0, done.output
        assert "1 samples are pending" in done.stdout.replace("\n", " ")
        settings = root / "run.yaml"  # as an earlier version wrote it
        text = settings.read_text().replace(
            "\ncapture:\n", "\ncapture:\n  encode_processes: null\n"
        )
        assert "encode_processes" in text
        settings.write_text(text)
        config = stored_config(root, endpoints=url)
        async with CollectJob.open(config, print, frozen=True) as job:
            await job.collect_all()
    report = verify_run(root)
    assert report.ok, report.faults
    assert not report.partial
    after = Manifest.load(root / "manifest.json")
    assert after.samples == before.samples
    assert after.fingerprint == before.fingerprint
    assert dict(responses(root)) == said
    assert sorted(state_ids(root)) == ids
    for path, content_before in others.items():
        assert path.read_bytes() == content_before
    shown = CliRunner().invoke(app, ["inspect", str(root), "--sample", ids[0][0]])
    assert shown.exit_code == 0, shown.output
    assert "<|im_start|>assistant" in shown.stdout
    assert "the final state" in shown.stdout
