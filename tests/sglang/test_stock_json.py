"""JSON states of SGLang without our plugin: two stock servers give what the spool gives."""

from __future__ import annotations

import pytest
import torch

from datagen.errors import CaptureUnproven
from datagen.target.client import SGLangClient
from datagen.target.preflight import inspect_server, require_whole_prefills
from datagen.target.profile import Profile
from datagen.target.states import capture_rows
from tests.sglang import environment
from tests.sglang.asking import Reference, conversations
from tests.sglang.conftest import RealEngine
from tests.sglang.server import SGLangServer

AUX = (
    "--enable-return-aux-hidden-states", "--speculative-algorithm", "EAGLE3",
    "--return-aux-hidden-state-layer-ids", "1", "14", "26",
)  # fmt: skip


def stock(engine: RealEngine, name: str, *flags: str) -> SGLangServer:
    return engine.server(name, "--chunked-prefill-size", "-1", *flags, DATAGEN_CAPTURE_DIR="")


@pytest.mark.skipif(
    environment.VERSION != environment.NEWEST, reason="stock servers tell boundaries since 0.5.23"
)
async def test_two_stock_servers_give_boundaries_and_final_state(
    real_engine: RealEngine, profile: Profile
) -> None:
    boundaries = stock(real_engine, "stock-aux", *AUX)
    last = stock(real_engine, "stock-final", "--enable-return-hidden-states")
    try:
        for server in (boundaries, last):
            server.start(wait=False)
        for server in (boundaries, last):
            server.wait()
        ids = conversations(3, 150)[2]
        async with SGLangClient(boundaries.url) as a, SGLangClient(last.url) as b:
            for client in (a, b):
                require_whole_prefills(await inspect_server(client, profile))
            with pytest.raises(CaptureUnproven, match="without the final state"):
                await capture_rows(a, ids, "r1", profile, mode="json")
            with pytest.raises(CaptureUnproven, match="EAGLE instead of EAGLE3"):
                await capture_rows(b, ids, "r2", profile, mode="json")
            found = await capture_rows(a, ids, "r3", profile, mode="json", final=b)
    finally:
        boundaries.stop()
        last.stop()
    bits = torch.from_numpy(found.rows.view("int16").copy()).view(torch.bfloat16).float()
    rows = bits.view(len(ids), -1, profile.hidden_size)
    same = torch.cosine_similarity(rows, Reference(profile).rows(ids), dim=-1).mean(0)
    assert (same >= 0.999).all(), same
