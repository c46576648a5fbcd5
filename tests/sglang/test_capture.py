"""Many captures among concurrent decodes: every row, every id, and the reference's values."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from datagen.capture.spool import SpoolFile, discard, read_spool
from datagen.target.profile import Profile
from tests.sglang.asking import Reference, capture, conversations, generate, rows_of_spool
from tests.sglang.conftest import Target

LEAST_COSINE, CLEAR_GAP = 0.999, 0.125


@pytest.fixture(scope="module")
def reference(profile: Profile) -> Reference:
    return Reference(profile)


def taken(target: Target, ids: Sequence[int]) -> tuple[SpoolFile, Any]:
    """One capture's file, unlinked, and its answer."""
    status, answer = capture(target.url, ids, return_logprob=True, top_logprobs_num=2)
    assert status == 200, answer
    (note,) = answer["meta_info"]["datagen"]
    assert "error" not in note, note
    path = Path(note["path"])
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not appear"
        time.sleep(0.01)
    spooled = read_spool(path)
    discard(path)
    assert (note["rows"], note["width"]) == (spooled.n_tokens, spooled.width)
    return spooled, answer


def decode_for_ever(target: Target, ids: Sequence[int], ended: threading.Event) -> int:
    """Keep the server decoding; returns how many tokens came."""
    n = 0
    while not ended.is_set():
        params = {"max_new_tokens": 24, "ignore_eos": True}
        n += generate(target.url, ids, sampling_params=params)[1]["meta_info"]["completion_tokens"]
    return n


def cosines(ours: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    return torch.cosine_similarity(ours, theirs, dim=-1)


def test_captures_among_decodes_hold_every_row_of_the_reference(
    target: Target, profile: Profile, reference: Reference
) -> None:
    asked = conversations(*((200, 100) if target.is_real else (8, 90)))
    n_alone = 8 if target.is_real else 4
    ended = threading.Event()
    with ThreadPoolExecutor(8) as pool, ThreadPoolExecutor(2) as decoders:
        decodes = [decoders.submit(decode_for_ever, target, asked[i], ended) for i in range(2)]
        try:
            captures = list(pool.map(lambda ids: taken(target, ids), asked))
        finally:
            ended.set()
        assert all(d.result() > 0 for d in decodes)
    assert [c.input_ids for c, _ in captures] == [tuple(ids) for ids in asked]
    assert {(c.width, c.boundaries, c.final_norm) for c, _ in captures} == {
        (profile.row_width, profile.boundaries, "post")
    }
    if target.is_real:
        assert max(a["meta_info"]["datagen"][0]["chunks"] for _, a in captures) > 1
    rows = [rows_of_spool(c) for c, _ in captures]
    found = torch.cat([cosines(r, reference.rows(ids)) for r, ids in zip(rows, asked, strict=True)])
    print(f"{target.kind}: {len(asked)} captures, {len(found)} rows, mean cosine {found.mean(0)}")
    assert (found.mean(0) >= LEAST_COSINE).all(), found.mean(0)
    clear = 0
    for row, (_, answer) in zip(rows, captures, strict=True):
        best, second = gap_of(answer)
        if best - second > CLEAR_GAP:
            clear += 1
            assert reference.next_token(row[-1, -1]) == answer["output_ids"][0]
    assert clear > len(asked) // 2
    alone = [rows_of_spool(taken(target, ids)[0]) for ids in asked[:n_alone]]
    same = torch.cat([cosines(a, b) for a, b in zip(alone, rows, strict=False)])
    print(f"{target.kind}: under load and alone, least mean cosine {same.mean(0).min():.6f}")
    assert (same.mean(0) >= LEAST_COSINE).all()
    assert not list(target.spool.glob("*.safetensors*"))


def gap_of(answer: Any) -> tuple[float, float]:
    """The two best log-probabilities of the sampled position."""
    (top,) = answer["meta_info"]["output_top_logprobs"]
    return float(top[0][0]), float(top[1][0])
