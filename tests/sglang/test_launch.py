"""What `datagen launch` gives to a real SGLang, and finds in its processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from datagen.errors import ConfigError
from datagen.target.launch import Recipe, launch_recipe, require_environment
from datagen.target.profile import load_profile
from tests.sglang.conftest import RealEngine, Target
from tests.sglang.test_plugin_start import load

ROOT = Path(__file__).resolve().parents[2]
PARSE = """
import argparse, sys
from sglang.srt.server_args import ServerArgs
parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)
found, unknown = parser.parse_known_args({arguments!r})
print("unknown:", unknown)
"""


def test_the_schedulers_environment_is_read_back_and_what_is_missing_is_named(
    sglang_target: Target,
) -> None:
    wanted = {"DATAGEN_CAPTURE_BOUNDARIES": "2,15,27", "SGLANG_USE_CPU_ENGINE": "1"}
    (scheduler,) = require_environment(sglang_target.pid, Recipe((), wanted, 1))
    assert scheduler != sglang_target.pid
    with pytest.raises(ConfigError, match=rf"process {scheduler}: NCCL_X=1 \(there: unset\)"):
        require_environment(sglang_target.pid, Recipe((), wanted | {"NCCL_X": "1"}, 1))


@pytest.mark.parametrize("role", ["generate", "capture", "evaluate"])
@pytest.mark.parametrize("target", ["kimi-k2.5", str(ROOT / "docs" / "target-template.yaml")])
def test_every_flag_of_a_profile_is_one_of_sglangs(
    real_engine: RealEngine, target: str, role: str
) -> None:
    made = launch_recipe(
        load_profile(target), role, python="python", host="127.0.0.1", port=1,
        spool_dir=Path("/spool"), draft="/draft",
    )  # fmt: skip
    arguments = list(made.command[3:])
    status, output = load(real_engine, PARSE.format(arguments=arguments))
    assert status == 0, output
    assert "unknown: []" in output
