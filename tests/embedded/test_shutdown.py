"""How the server ends, and begins again."""

from __future__ import annotations

import json
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from datagen.capture.spool import read_spool
from tests.embedded.test_api import CONTEXT, ENDLESS, IDS, generate, wait_for_load
from tests.tiny import serving, write_tiny_checkpoint

CAPTURE = {"max_new_tokens": 1, "custom_params": {"datagen": True}}


def test_sigterm_answers_what_is_in_flight_and_ends_cleanly(tmp_path: Path) -> None:
    checkpoint = write_tiny_checkpoint(tmp_path / "tiny-llama", context=CONTEXT)
    with serving(str(checkpoint), tmp_path) as process, ThreadPoolExecutor() as pool:
        asked = pool.submit(generate, process.url, sampling_params=ENDLESS)
        wait_for_load(process.url, (1, 0))
        assert process.kill(signal.SIGTERM) == 0
        assert asked.result(60)[1]["meta_info"]["finish_reason"]["type"] == "abort"
    assert "Traceback" not in (tmp_path / "target.log").read_text()


def test_a_killed_server_starts_again_on_its_port_with_the_same_answers(tmp_path: Path) -> None:
    checkpoint = write_tiny_checkpoint(tmp_path / "tiny-llama")
    with serving(str(checkpoint), tmp_path) as process:
        before = generate(process.url)[1]["output_ids"]
        process.kill(signal.SIGKILL)
        process.start()
        assert generate(process.url)[1]["output_ids"] == before


def test_a_capture_that_was_answered_is_written_before_the_server_ends(tmp_path: Path) -> None:
    checkpoint = write_tiny_checkpoint(tmp_path / "tiny-llama")
    with serving(str(checkpoint), tmp_path) as process:
        _, answer = generate(
            process.url, rid="last", return_hidden_states=True, sampling_params=CAPTURE
        )
        process.kill(signal.SIGTERM)
    (note,) = answer["meta_info"]["datagen"]
    assert read_spool(Path(note["path"])).input_ids == tuple(IDS)


@pytest.mark.parametrize("contents", [{"model_type": "gpt2"}, {"model_type": "llama"}])
def test_a_checkpoint_that_cannot_be_run_is_one_clear_line(
    tmp_path: Path, contents: dict[str, str]
) -> None:
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "config.json").write_text(json.dumps(contents))
    with pytest.raises(RuntimeError, match="odd"), serving(str(tmp_path / "odd"), tmp_path):
        pass
    assert "Traceback" not in (tmp_path / "target.log").read_text()
