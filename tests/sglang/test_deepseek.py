"""Kimi-K2.5's class on the real engine: DeepSeek-V3's forward, 61 layers, boundaries [2, 30, 58].

On a CPU SGLang runs this model with torch-native attention, which takes MLA's latent cache for keys and
values: its states are not those of the weights, so they are not compared with a reference here. What
is proven is the path: the model class takes the boundaries, each is what its decoder layer reads (the
plugin's self-test), every row is there, and lm_head over the final state gives the sampled token.
"""

from __future__ import annotations

import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from datagen.capture.spool import read_spool
from datagen.target.profile import load_profile
from tests.sglang.asking import capture, rows_of_spool
from tests.sglang.conftest import CAPTURE_FLAGS, RealEngine
from tests.sglang.deepseek import HIDDEN, LAYERS, write_tiny_deepseek
from tests.sglang.server import SGLangServer
from tests.tiny import VOCAB


def test_the_class_of_kimi_captures_its_boundaries(real_engine: RealEngine, tmp_path: Path) -> None:
    kimi = load_profile("kimi-k2.5")
    assert kimi.num_layers == LAYERS
    checkpoint = write_tiny_deepseek(tmp_path / "tiny-deepseek")
    server = SGLangServer(
        real_engine.installed, real_engine.site, checkpoint, tmp_path, *CAPTURE_FLAGS,
        DATAGEN_CAPTURE_DIR=str(tmp_path / "spool"),
        DATAGEN_CAPTURE_BOUNDARIES=",".join(map(str, kimi.boundaries)),
    )  # fmt: skip
    asked = [[(i * 37 + k) % (VOCAB - 3) + 3 for i in range(20 + 23 * k)] for k in range(8)]
    try:
        server.start()
        with ThreadPoolExecutor(4) as pool:
            answers: list[Any] = list(
                pool.map(
                    lambda ids: capture(
                        server.url, ids, uuid.uuid4().hex, return_logprob=True, top_logprobs_num=2
                    )[1],
                    asked,
                )
            )
        time.sleep(1.0)
    finally:
        server.stop()
    lm_head = load_file(str(checkpoint / "model.safetensors"))["lm_head.weight"].float()
    clear = 0
    for ids, answer in zip(asked, answers, strict=True):
        (note,) = answer["meta_info"]["datagen"]
        assert note["self_test"].startswith("passed: cosine with the decoder layers' input 2: ")
        assert note["boundaries"] == list(kimi.boundaries)
        spooled = read_spool(Path(note["path"]))
        assert spooled.input_ids == tuple(ids)
        rows = rows_of_spool(spooled)
        assert rows.shape == (len(ids), len(kimi.boundaries) + 1, HIDDEN)
        (top,) = answer["meta_info"]["output_top_logprobs"]
        if top[0][0] - top[1][0] > 0.125:
            clear += 1
            assert int((lm_head @ rows[-1, -1]).argmax()) == answer["output_ids"][0]
    assert clear >= 4
    assert max(a["meta_info"]["datagen"][0]["chunks"] for a in answers) > 1
