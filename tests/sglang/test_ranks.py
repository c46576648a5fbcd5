"""Tensor parallelism: one rank of two writes, the rows are whole, and the states are summed over ranks."""

from __future__ import annotations

import random
import re
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from datagen.capture.spool import discard, read_spool
from tests.sglang.asking import capture, rows_of_spool
from tests.sglang.conftest import CAPTURE_FLAGS, RealEngine
from tests.sglang.server import SGLangServer
from tests.tiny import BOUNDARIES, VOCAB, serving, write_tiny_checkpoint


def taken(url: str, ids: list[int]) -> torch.Tensor:
    answer = capture(url, ids, uuid.uuid4().hex)[1]
    (note,) = answer["meta_info"]["datagen"]
    path = Path(note["path"])
    deadline = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < deadline, note
        time.sleep(0.01)
    spooled = read_spool(path)
    discard(path)
    assert spooled.input_ids == tuple(ids)
    return rows_of_spool(spooled)


def test_of_two_ranks_one_writes_what_a_single_one_would(
    real_engine: RealEngine, tmp_path: Path
) -> None:
    checkpoint = write_tiny_checkpoint(tmp_path / "tiny-llama")
    draw = random.Random(0)
    asked = [[draw.randrange(3, VOCAB) for _ in range(20 + 17 * i)] for i in range(10)]
    server = SGLangServer(
        real_engine.installed, real_engine.site, checkpoint, tmp_path, *CAPTURE_FLAGS,
        "--tp-size", "2", SGLANG_CPU_OMP_THREADS_BIND="0|1",
        DATAGEN_CAPTURE_DIR=str(tmp_path / "spool-sglang"),
        DATAGEN_CAPTURE_BOUNDARIES=",".join(map(str, BOUNDARIES)),
    )  # fmt: skip
    try:
        server.start()
        with ThreadPoolExecutor(4) as pool:
            rows = list(pool.map(lambda ids: taken(server.url, ids), asked))
    finally:
        server.stop()
    log = server.log.read_text(encoding="utf-8", errors="replace")
    assert sorted(re.findall(r"datagen capture: live, .* writes: (\w+)", log)) == ["False", "True"]
    assert log.count("datagen capture: self-test passed") == 2
    assert not list((tmp_path / "spool-sglang").iterdir())
    with serving(str(checkpoint), tmp_path, dtype="bfloat16") as alone:
        expected = [taken(alone.url, ids) for ids in asked]
    same = torch.cat(
        [torch.cosine_similarity(a, b, dim=-1) for a, b in zip(rows, expected, strict=True)]
    ).mean(0)
    assert (same >= 0.99).all(), (
        same
    )  # random weights: bf16 itself differs by more than on real ones
