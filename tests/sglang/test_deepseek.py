"""Kimi-K2.5's class on the real engine: DeepSeek-V3's forward, 61 layers, boundaries [2, 30, 58].

In float32: of random weights bfloat16 alone, in Hugging Face's own forward, leaves a cosine of 0.86 at
layer 58, which would hide a shift by a layer (0.98 to its neighbour).
"""

from __future__ import annotations

import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from datagen.capture.spool import SpoolFile, read_spool
from datagen.target.profile import load_profile
from tests.sglang.asking import capture, rows_of_spool
from tests.sglang.conftest import CAPTURE_FLAGS, ON, RealEngine
from tests.sglang.deepseek import HIDDEN, LAYERS, install_absorbed_mla, write_tiny_deepseek
from tests.sglang.server import SGLangServer
from tests.tiny import VOCAB

LEAST_COSINE = 0.9999


def test_the_class_of_kimi_captures_its_boundaries(real_engine: RealEngine, tmp_path: Path) -> None:
    kimi = load_profile("kimi-k2.5")
    assert kimi.num_layers == LAYERS
    checkpoint = write_tiny_deepseek(tmp_path / "tiny-deepseek")
    exact_engine = ON != "gpu"  # MLA's kernels of a GPU compute in bfloat16 alone
    plugins = f"datagen_capture,{install_absorbed_mla(real_engine.site)}"
    server = SGLangServer(
        real_engine.installed, real_engine.site, checkpoint, tmp_path, *CAPTURE_FLAGS,
        *(("--dtype", "float32") if exact_engine else ()), SGLANG_PLUGINS=plugins,
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
    rows, clear = [], 0
    for ids, answer in zip(asked, answers, strict=True):
        (note,) = answer["meta_info"]["datagen"]
        assert note["self_test"].startswith("passed: cosine with the decoder layers' input 2: ")
        assert note["boundaries"] == list(kimi.boundaries)
        spooled = read_spool(Path(note["path"]))
        assert spooled.input_ids == tuple(ids)
        rows.append(values_of(spooled))
        assert rows[-1].shape == (len(ids), len(kimi.boundaries) + 1, HIDDEN)
        (top,) = answer["meta_info"]["output_top_logprobs"]
        if top[0][0] - top[1][0] > 0.125:
            clear += 1
            assert int((lm_head @ rows[-1][-1, -1]).argmax()) == answer["output_ids"][0]
    assert clear >= 4
    assert max(a["meta_info"]["datagen"][0]["chunks"] for a in answers) > 1
    if not exact_engine:
        return
    columns = (*kimi.boundaries, LAYERS)
    near = {b + d for b in columns for d in (-1, 0, 1) if b + d <= LAYERS}
    exact = streams(checkpoint, asked, sorted(near))
    captured = torch.cat(rows)
    for column, boundary in enumerate(columns):
        similar = {
            layer: float(torch.cosine_similarity(captured[:, column], exact[layer], dim=-1).mean())
            for layer in (boundary - 1, boundary, boundary + 1)
            if layer in exact
        }
        print(f"boundary {boundary}: {similar}")
        assert similar.pop(boundary) >= LEAST_COSINE
        assert max(similar.values()) < 0.999, "the next layer is told apart"


@torch.no_grad()
def streams(checkpoint: Path, asked: list[list[int]], layers: list[int]) -> dict[int, torch.Tensor]:
    """[tokens of all, hidden] by Hugging Face; the last one after the final norm."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    found = [model(torch.tensor([ids]), output_hidden_states=True).hidden_states for ids in asked]
    return {layer: torch.cat([states[layer][0] for states in found]) for layer in layers}


def values_of(spooled: SpoolFile) -> torch.Tensor:
    """float32 [tokens, K+1, hidden] of a spool file."""
    if spooled.dtype == "BF16":
        return rows_of_spool(spooled)
    values = torch.from_numpy(np.frombuffer(spooled.rows, dtype=np.float32).copy())
    return values.view(spooled.n_tokens, -1, spooled.hidden)
