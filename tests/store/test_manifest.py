from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import orjson
import pytest

from datagen.errors import CorruptFile
from datagen.store.fingerprint import Fingerprint
from datagen.store.layout import RunLayout
from datagen.store.manifest import Manifest, build_manifest, manifest_schema, merge_seals
from datagen.store.partition import PartitionSummary
from datagen.store.plan import Plan
from datagen.store.responses import ResponsesReader
from tests.store.rows import (
    REJECTED,
    SPEC,
    collect_partition,
    complete_run,
    header,
    prepare_run,
    prompt_id,
    response,
)

SCHEMA = Path(__file__).parents[2] / "docs" / "manifest.schema.json"


def test_it_accounts_for_every_sample_of_every_split(tmp_path: Path) -> None:
    manifest = complete_run(tmp_path / "run", partitions=3, prompts=4)
    samples, train, heldout = manifest.samples, *(manifest.splits[s] for s in ("train", "heldout"))
    assert (samples.planned, samples.collected, samples.pending) == (15, 14, 0)
    assert samples.rejected == {"over_context": 1}
    assert (train.samples.planned, heldout.samples.planned) == (10, 5)
    assert (train.prompts, heldout.prompts, manifest.prompts) == (8, 4, 12)
    lengths = {n: len(response(n).context_ids) + len(response(n).response_ids) for n in range(8)}
    del lengths[REJECTED]
    second = sum(len(response(n, 1).context_ids) + len(response(n, 1).response_ids) for n in (0, 4))
    assert train.tokens_captured == sum(lengths.values()) + second
    assert manifest.raw_bytes == (
        (train.tokens_captured + heldout.tokens_captured) * SPEC.n_layers * SPEC.hidden_size * 2
    )
    assert sum(n for _, n in manifest.length_histogram) == samples.collected


def test_it_describes_every_file_on_disk(tmp_path: Path) -> None:
    manifest = complete_run(tmp_path / "run")
    files = {f.path: f for f in manifest.files()}
    on_disk = {str(p.relative_to(tmp_path / "run")) for p in (tmp_path / "run").rglob("*-*.arrow")}
    assert set(files) == on_disk
    for path, entry in files.items():
        content = (tmp_path / "run" / path).read_bytes()
        assert (len(content), hashlib.sha256(content).hexdigest()) == (entry.bytes, entry.sha256)
    assert manifest.stored_bytes == sum(f.bytes for s in manifest.splits.values() for f in s.states)
    manifest.require_files(tmp_path / "run")


def test_token_frequencies_are_of_train_responses_alone(tmp_path: Path) -> None:
    manifest = complete_run(tmp_path / "run", partitions=2, prompts=4)
    counted: Counter[int] = Counter()
    for number in (0, 1, 2):
        counted.update(response(number).response_ids.tolist())
    counted.update(response(0, 1).response_ids.tolist())
    assert manifest.token_frequencies == {str(t): n for t, n in sorted(counted.items())}


def test_the_digests_of_the_splits_prompts_are_over_sorted_ids(tmp_path: Path) -> None:
    manifest = complete_run(tmp_path / "run", partitions=2, prompts=4)
    for split, numbers in (("train", range(4)), ("heldout", range(4, 8))):
        ids = sorted(prompt_id(n) for n in numbers)
        expected = hashlib.sha256("\n".join(ids).encode()).hexdigest()
        assert manifest.splits[split].prompts_sha256 == expected


def test_it_comes_back_from_disk_and_can_be_made_anew_from_it(tmp_path: Path) -> None:
    made = complete_run(tmp_path / "run")
    layout = RunLayout(tmp_path / "run")
    loaded = Manifest.load(layout.manifest)
    assert loaded == made
    assert merge_seals(layout, Plan.open(layout.plan), loaded, loaded.created) == made


def test_a_partition_without_its_seal_stops_it(tmp_path: Path) -> None:
    layout, plan = prepare_run(tmp_path / "run")
    collect_partition(layout, plan, 0)
    with pytest.raises(CorruptFile, match=r"00001/partition\.json"):
        build_manifest(layout, plan, header(layout))
    assert not layout.manifest.exists()


def test_a_run_of_rejections_alone_has_a_manifest(tmp_path: Path) -> None:
    layout, plan = prepare_run(tmp_path / "run", partitions=1, prompts=1)
    from tests.store.rows import open_store

    store = open_store(layout.partition(0).root, digest=Fingerprint.load(layout.fingerprint).digest)
    for turn in (0, 1):
        store.add_rejection(prompt_id(0), turn, "generate", "refused", "", 1)
    store.seal(1)
    store.close()
    manifest = build_manifest(layout, plan, header(layout))
    assert manifest.samples.rejected == {"refused": 2}
    assert (manifest.token_frequencies, manifest.raw_bytes, list(manifest.files())) == ({}, 0, [])


def edited(root: Path, change: Any) -> Path:
    path = RunLayout(root).manifest
    data = orjson.loads(path.read_bytes())
    change(data)
    path.write_bytes(orjson.dumps(data))
    return path


@pytest.mark.parametrize("path", ["/etc/passwd", "../x.arrow", "a/../../x", "..", "a\\b", "", "."])
def test_a_path_that_leaves_the_run_is_refused(tmp_path: Path, path: str) -> None:
    complete_run(tmp_path / "run")

    def leave(data: dict[str, Any]) -> None:
        data["splits"]["train"]["states"][0]["path"] = path

    with pytest.raises(CorruptFile, match=r"splits\.train\.states\.0\.path"):
        Manifest.load(edited(tmp_path / "run", leave))


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("version", 2, "version"), ("samples", {"planned": 9, "collected": 9, "rejected": {"x": 1},
         "pending": 0}, "10 samples are accounted for"), ("prompts", -1, "prompts"),
        ("fingerprint", "abc", "fingerprint"), ("extra", 1, "extra"), ("splits", [], "splits"),
        ("samples", {"planned": 9, "collected": 10, "rejected": {"x": -1}, "pending": 0}, "rejected"),
    ],
)  # fmt: skip
def test_a_manifest_that_contradicts_itself_is_refused_by_field(
    tmp_path: Path, field: str, value: object, named: str
) -> None:
    complete_run(tmp_path / "run")
    with pytest.raises(CorruptFile, match=named):
        Manifest.load(edited(tmp_path / "run", lambda data: data.update({field: value})))


@pytest.mark.parametrize("content", [b"", b"{", b"null", b"[" * 100_000, b"\xff", b'"x"'])
def test_a_file_that_is_no_manifest_or_seal_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.json").write_bytes(content)
    with pytest.raises(CorruptFile):
        Manifest.load(tmp_path / "x.json")
    with pytest.raises(CorruptFile):
        PartitionSummary.load(tmp_path / "x.json")
    with pytest.raises(CorruptFile, match="finish the collect"):
        Manifest.load(tmp_path / "absent.json")


def test_a_file_that_is_gone_or_shorter_is_named(tmp_path: Path) -> None:
    manifest = complete_run(tmp_path / "run")
    entry = manifest.splits["train"].states[0]
    path = tmp_path / "run" / entry.path
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(
        CorruptFile, match=f"{entry.bytes - 1} bytes.*{entry.bytes}.*{path.name}|{path}"
    ):
        manifest.require_files(tmp_path / "run")
    path.unlink()
    with pytest.raises(CorruptFile, match="no file"):
        manifest.require_files(tmp_path / "run")


def test_a_token_id_no_vocabulary_has_is_refused_before_it_sizes_an_array(tmp_path: Path) -> None:
    from tests.store.rows import open_store

    layout, plan = prepare_run(tmp_path / "run", partitions=2, prompts=1)
    store = open_store(layout.partition(0).root, digest=Fingerprint.load(layout.fingerprint).digest)
    for turn in (0, 1):
        answer = response(0, turn)
        answer.response_ids[0] = 2**31 - 1
        store.add_response(answer)
    store.seal(1)
    store.close()
    collect_partition(layout, plan, 1)
    assert len(ResponsesReader(layout.partition(0).responses(0))) == 2
    with pytest.raises(CorruptFile, match="token ids"):
        build_manifest(layout, plan, header(layout))


def test_the_published_schema_is_current() -> None:
    """If not: `python -m datagen.store.manifest > docs/manifest.schema.json`."""
    assert json.loads(SCHEMA.read_text()) == manifest_schema()
    printed = subprocess.run(
        [sys.executable, "-m", "datagen.store.manifest"], capture_output=True, text=True, check=True
    )
    assert printed.stdout == SCHEMA.read_text()
