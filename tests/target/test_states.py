"""Rows that come as JSON: counted, of the right width, and bit for bit what the spool would carry."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from datagen.config import collect_config
from datagen.errors import CaptureUnproven, ConfigError
from datagen.store.states import ShardReader
from datagen.store.verify import verify_run
from datagen.target.client import Capture, SGLangClient
from datagen.target.failures import RowFailure
from datagen.target.preflight import inspect_server, require_whole_prefills
from datagen.target.profile import Profile, load_profile
from datagen.target.states import capture_rows
from tests.collect.harness import Bench
from tests.tiny import (
    BOUNDARIES,
    HIDDEN,
    TargetProcess,
    serving,
    write_tiny_checkpoint,
    write_tiny_profile,
)

IDS = [5, 6, 7, 8, 9]
K_H = len(BOUNDARIES) * HIDDEN


class Stock:
    """What a server without the plugin hands over: `width` values of each of `rows` tokens."""

    def __init__(self, width: int, rows: int = len(IDS), low_bits: int = 0) -> None:
        bits = np.random.default_rng(width).integers(0x3C00, 0x4100, (rows, width), dtype=np.uint32)
        self.states = ((bits << 16) | low_bits).astype(np.uint32).view(np.float32)

    async def capture(self, input_ids: Sequence[int], *, rid: str) -> Capture:
        raise NotImplementedError

    async def capture_states(self, input_ids: Sequence[int], *, rid: str) -> NDArray[np.float32]:
        del input_ids, rid
        return self.states


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[TargetProcess, Path]]:
    folder = tmp_path_factory.mktemp("states")
    checkpoint = write_tiny_checkpoint(folder / "tiny-llama")
    with serving(str(checkpoint), folder) as process:
        yield process, folder


@pytest.fixture(scope="module")
def profile(target: tuple[TargetProcess, Path]) -> Profile:
    process, folder = target
    path = write_tiny_profile(folder / "p.yaml", folder / "tiny-llama", process.url)
    return load_profile(str(path))


async def test_json_and_spool_carry_the_same_bits(
    target: tuple[TargetProcess, Path], profile: Profile
) -> None:
    async with SGLangClient(target[0].url) as client:
        spooled = await capture_rows(client, IDS, "a", profile)
        as_json = await capture_rows(client, IDS, "b", profile, mode="json")
        assert spooled.path is not None
        assert spooled.path.exists()
        assert (spooled.rows == as_json.rows).all()
        spooled.discard()
        assert not spooled.path.exists()
        assert as_json.path is None
        assert as_json.rows.shape == (len(IDS), profile.row_width)
        require_whole_prefills(await inspect_server(client, profile))


async def test_the_final_state_can_come_from_a_second_stock_server(profile: Profile) -> None:
    boundaries, last = Stock(K_H), Stock(HIDDEN)
    found = await capture_rows(boundaries, IDS, "r", profile, mode="json", final=last)
    values = (found.rows.astype(np.uint32) << 16).view(np.float32)
    assert (values[:, :K_H] == boundaries.states).all()
    assert (values[:, K_H:] == last.states).all()


@pytest.mark.parametrize(
    ("server", "complaint"),
    [
        (Stock(K_H), "boundaries without the final state.*--final-endpoint"),
        (Stock(HIDDEN), f"hands over {HIDDEN} values a token.*EAGLE instead of EAGLE3"),
        (Stock(K_H + HIDDEN, low_bits=1), "no BF16 values"),
    ],
)
async def test_other_states_than_the_profiles_are_refused(
    profile: Profile, server: Stock, complaint: str
) -> None:
    with pytest.raises(CaptureUnproven, match=complaint):
        await capture_rows(server, IDS, "r", profile, mode="json")


async def test_rows_lost_to_chunks_fail_the_row_and_name_the_flag(profile: Profile) -> None:
    with pytest.raises(RowFailure, match=r"1 rows for 5 tokens: .*--chunked-prefill-size -1"):
        await capture_rows(Stock(K_H + HIDDEN, rows=1), IDS, "r", profile, mode="json")


async def test_a_server_that_prefills_in_chunks_is_refused_for_json(
    target: tuple[TargetProcess, Path], profile: Profile
) -> None:
    async with SGLangClient(target[0].url) as client:
        report = await inspect_server(client, profile)
    report.arguments["chunked_prefill_size"] = 8192
    with pytest.raises(CaptureUnproven, match=r"chunks of 8192 .*--chunked-prefill-size -1"):
        require_whole_prefills(report)


async def test_a_run_through_json_is_the_run_through_the_spool(
    target: tuple[TargetProcess, Path],
) -> None:
    process, folder = target
    bench = Bench.make(folder, process.url, prompts=6)
    for run in ("spool", "json"):
        await bench.collect_here(run, capture_mode=run, accept_risk="")
        assert verify_run(folder / run).ok
    spool, json = (states_of_run(folder / run) for run in ("spool", "json"))
    assert spool == json
    assert len(spool) > 6


def states_of_run(root: Path) -> dict[str, bytes]:
    """Sample id -> its states, decoded: another order of captures is encoded with another bias."""
    shards = [ShardReader(path) for path in root.rglob("states-*.arrow")]
    return {
        shard.columns(row).sample_id: shard.states(row).tobytes()
        for shard in shards
        for row in range(len(shard))
    }


def test_a_second_server_without_json_is_a_mistake(target: tuple[TargetProcess, Path]) -> None:
    with pytest.raises(ConfigError, match="final_endpoint is for mode json"):
        collect_config(final_endpoint=target[0].url)
    with pytest.raises(ConfigError, match=r"capture\.mode"):
        collect_config(capture_mode="smoke signals")
