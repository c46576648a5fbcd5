"""What is exported is what the other side reads, and says the same as the run."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import datagen.cli  # noqa: F401 - registers the commands
from datagen.cli.app import app
from datagen.errors import ExportRefused
from datagen.export.norm import before_norm, final_norm_weight
from datagen.export.samples import Source
from datagen.store.states import ShardReader
from tests.store.rows import SPEC, complete_run, prompt_id, response, states_like

HIDDEN = SPEC.hidden_size
NO_SPECULATORS = "speculators 0.9.0 is not installed"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("export") / "run"
    complete_run(root, partitions=3, prompts=4)
    return root


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    weight = torch.rand(HIDDEN, generator=torch.Generator().manual_seed(3)) * 3 + 0.1
    weight[3] = -0.02
    save_file({"model.norm.weight": weight.bfloat16()}, folder / "model.safetensors")
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return folder


def exported(run: Path, layout: str, out: Path, *more: str) -> Path:
    done = CliRunner().invoke(
        app, ["export", str(run), "--format", layout, "--output", str(out), *more]
    )
    assert done.exit_code == 0, done.output or done.exception
    return out


def stored(run: Path, split: str) -> dict[str, tuple[list[int], list[int], torch.Tensor]]:
    """sample id -> ids, mask, bf16 [T, K+1, H], in the order of the files."""
    found = {}
    for entry in Source.open(run).manifest.splits[split].states:
        shard = ShardReader(run / entry.path)
        for row in range(len(shard)):
            c, bits = shard.columns(row), shard.states(row)
            tensor = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)
            found[c.sample_id] = (c.input_ids.tolist(), c.loss_mask.tolist(), tensor)
    return found


def normed(x_TH: torch.Tensor, checkpoint: Path) -> torch.Tensor:
    """Llama's RMSNorm, in float32."""
    weight = load_file(checkpoint / "model.safetensors")["model.norm.weight"].float()
    x = x_TH.float()
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight


def test_the_norm_of_what_is_exported_is_what_was_stored(checkpoint: Path) -> None:
    hidden = torch.randn(50, HIDDEN, generator=torch.Generator().manual_seed(1)) * 7
    final = normed(hidden, checkpoint).bfloat16()
    bits = before_norm(
        final.view(torch.int16).numpy().view(np.uint16), final_norm_weight(checkpoint, HIDDEN)
    )
    again = normed(torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16), checkpoint)
    error = (again - final.float()).abs() / final.float().abs().clamp_min(1e-6)
    assert error.max() < 2**-7, "two roundings to 8 bits"


def test_specforge_reads_every_sample_with_the_final_state_as_it_is(
    run: Path, tmp_path: Path
) -> None:
    out = exported(run, "specforge", tmp_path / "out")
    expected = list(stored(run, "train").values())
    files = sorted(out.rglob("data_*.ckpt"), key=lambda p: int(p.stem.partition("_")[2]))
    assert [f.relative_to(out).as_posix() for f in files] == [
        f"rows_0-2000/data_{i}.ckpt" for i in range(len(expected))
    ]
    for file, (ids, mask, states) in zip(files, expected, strict=True):
        data = torch.load(file, weights_only=True)
        assert (data["input_ids"].tolist(), data["loss_mask"].tolist()) == (ids, mask)
        assert data["input_ids"].dtype == data["loss_mask"].dtype == torch.int64
        assert torch.equal(data["hidden_state"], states[None, :, -1])
        assert torch.equal(data["aux_hidden_state"], states[None, :, :-1].flatten(2))
        assert file.stat().st_size < 2 * states.nbytes + 6000, "no view drags its storage along"


def test_speculators_layout_holds_every_sample(run: Path, checkpoint: Path, tmp_path: Path) -> None:
    out = exported(run, "speculators", tmp_path / "out", "--checkpoint", str(checkpoint))
    expected = list(stored(run, "train").values())
    data = datasets.load_from_disk(str(out))
    assert list(data.with_format(None)["seq_len"]) == [len(ids) for ids, _, _ in expected]
    factor = final_norm_weight(checkpoint, HIDDEN)
    frequencies: dict[int, int] = {}
    for number, (ids, mask, states) in enumerate(expected):
        assert data[number]["input_ids"].tolist() == ids
        assert data[number]["loss_mask"].tolist() == mask
        held = load_file(out / "hidden_states" / f"hs_{number}.safetensors")
        assert held["token_ids"].tolist() == ids
        assert torch.equal(held["hidden_states"][:, :-1], states[:, :-1])
        final = states[:, -1].float() / torch.from_numpy(factor)
        assert torch.equal(held["hidden_states"][:, -1], final.bfloat16())
        for token, supervised in zip(ids, mask, strict=True):
            frequencies[token] = frequencies.get(token, 0) + supervised
    counted = torch.load(out / "token_freq.pt", weights_only=True)
    assert counted == {t: n for t, n in frequencies.items() if n}
    assert not (out / "rows.arrow").exists()


@pytest.mark.filterwarnings("default")
def test_speculators_own_code_reads_it(run: Path, checkpoint: Path, tmp_path: Path) -> None:
    data = pytest.importorskip(
        "speculators.train.data", reason=NO_SPECULATORS, exc_type=ImportError
    )
    out = exported(run, "speculators", tmp_path / "out", "--checkpoint", str(checkpoint))
    expected = list(stored(run, "train").values())
    read = data.ArrowDataset(max_len=4096, datapath=str(out), on_missing="raise")
    assert len(read) == len(expected)
    for number, (ids, mask, states) in enumerate(expected):
        raw = read._get_raw_data(number)
        assert raw["input_ids"].tolist() == ids
        assert raw["loss_mask"].tolist() == mask
        assert torch.equal(raw["hidden_states"], states[:, :-1].flatten(1))
        item: dict[str, Any] = read[number]
        assert item["hidden_states"].shape[-1] == (SPEC.n_layers - 1) * HIDDEN
        assert item["verifier_last_hidden_states"].shape[-1] == HIDDEN


def test_datasets_loads_the_hub_layout_with_its_card(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    out = exported(run, "huggingface", tmp_path / "out", "--split", "all")
    loaded = datasets.load_dataset(str(out), cache_dir=str(tmp_path / "cache"))
    assert set(loaded) == {"train", "heldout"}
    expected = stored(run, "train")
    assert list(loaded["train"]["sample_id"]) == list(expected)
    row = loaded["train"][0]
    ids, mask, _ = expected[row["sample_id"]]
    assert (row["input_ids"], row["loss_mask"]) == (ids, mask)
    assert row["response"] == response(0).text
    assert json.loads(row["messages"])[0]["role"] == "user"
    assert "states" not in row
    card = (out / "README.md").read_text()
    front = yaml.safe_load(card.split("---\n")[1])
    assert front["license"] == "cc0-1.0"
    assert "| made-up | CC0-1.0 | 14 |" in card
    assert Source.open(run).manifest.fingerprint in card


def test_states_are_in_it_on_request(run: Path, tmp_path: Path) -> None:
    out = exported(run, "huggingface", tmp_path / "out", "--states", "--split", "heldout")
    table = datasets.load_dataset(str(out), cache_dir=str(tmp_path / "cache"), split="heldout")
    for row, (_, _, states) in zip(table, stored(run, "heldout").values(), strict=True):
        assert row["states"] == states.view(torch.int16).numpy().tobytes()
    assert "row-major [tokens, 4, 16]" in (out / "README.md").read_text()


def refusal(run: Path, out: Path, *arguments: str) -> str:
    done = CliRunner().invoke(app, ["export", str(run), "--output", str(out), *arguments])
    assert done.exit_code == 1
    assert not list(out.parent.glob("*.unfinished"))
    return str(done.exception)


EXPORT_UNTIL_KILLED = """
import os, signal, sys
import datagen.cli
from datagen.cli.app import app
left = int(sys.argv[1])
def count(event, arguments):
    global left
    if event == "open" and ".unfinished" in str(arguments[0]) and arguments[2] & os.O_WRONLY or (
        event in ("os.mkdir", "os.rename") and ".unfinished" in str(arguments[0])
    ):
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(count)
app(sys.argv[2:])
"""


@pytest.mark.parametrize("after", [3])
def test_an_export_that_was_killed_is_not_there_and_can_be_made(
    run: Path, tmp_path: Path, after: int
) -> None:
    out, whole = tmp_path / "out", exported(run, "specforge", tmp_path / "whole")
    command = ["export", str(run), "--format", "specforge", "--output", str(out)]
    killed = subprocess.run(
        [sys.executable, "-c", EXPORT_UNTIL_KILLED, str(after), *command],
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert not out.exists()
    assert list(tmp_path.glob("*.unfinished"))
    exported(run, "specforge", out)
    assert not list(tmp_path.glob("*.unfinished"))
    names = sorted(p.relative_to(whole) for p in whole.rglob("*"))
    assert names == sorted(p.relative_to(out) for p in out.rglob("*"))


def test_what_would_be_false_is_refused(run: Path, checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert "unknown format" in refusal(run, out, "--format", "csv")
    assert "choose one of" in refusal(run, out, "--format", "specforge", "--split", "test")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    assert "there already" in refusal(run, tmp_path / "full", "--format", "specforge")
    empty = tmp_path / "empty"
    empty.mkdir()
    speculators = ("--format", "speculators", "--checkpoint")
    assert "--checkpoint" in refusal(run, out, *speculators, str(empty))
    weight = torch.ones(HIDDEN)
    weight[2] = 0
    save_file({"model.norm.weight": weight}, empty / "model.safetensors")
    (empty / "config.json").write_text('{"model_type": "llama"}')
    assert "switches off 1 channels" in refusal(run, out, *speculators, str(empty))
    assert not out.exists()


def test_a_damaged_run_is_not_exported(run: Path, tmp_path: Path) -> None:
    import shutil

    root = Path(shutil.copytree(run, tmp_path / "run"))
    shard = min(root.rglob("states-*.arrow"))
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(Exception, match="verify"):
        Source.open(root)
    assert states_like(1).shape == (1, SPEC.width)
    with pytest.raises(ExportRefused):
        Source.open(run).splits(prompt_id(0))
