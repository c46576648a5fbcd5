"""Grid files: what they mean as flags, and what they may not say."""

from __future__ import annotations

from pathlib import Path

import pytest

from datagen.acceptance.grid import Grid, ServerSpec, Setting, load_grid
from datagen.errors import ConfigError


def grid(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "grid.yaml"
    path.write_text(text)
    return path


def test_numbers_are_chains() -> None:
    found = load_grid("1, 3")
    assert [(s.name, s.steps, s.topk) for s in found.settings] == [("K1", 1, 1), ("K3", 3, 1)]
    assert found.settings[1].flags() == [
        "--speculative-num-steps", "3", "--speculative-eagle-topk", "1",
        "--speculative-num-draft-tokens", "4",
    ]  # fmt: skip


def test_a_file_names_servers_to_start_and_servers_that_run(tmp_path: Path) -> None:
    found = load_grid(str(grid(tmp_path, """
together: false
baseline: {arguments: [--mem-fraction-static 0.8]}
settings:
  - {name: tree, steps: 5, topk: 4, draft_tokens: 8, environment: {NCCL_P2P_LEVEL: PHB}}
  - {name: there, url: "http://10.0.0.7:30000"}
""")))  # fmt: skip
    assert not found.together
    assert found.settings[0].flags()[-1] == "8"
    assert found.settings[1].url == "http://10.0.0.7:30000"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("settings: []", "settings"),
        ("settings: [{name: a}]", "'a' needs steps"),
        ("settings: [{name: a, steps: 2, draft_tokens: 4}]", "has 3 draft tokens"),
        ("settings: [{name: a, steps: 2, topk: 4}]", "a tree needs draft_tokens"),
        ("settings: [{name: a, steps: 1}, {name: a, steps: 2}]", "named twice: a"),
        ("settings: [{name: a, url: x, arguments: [--y]}]", "takes no arguments"),
        ("settings: [{name: a, steps: 1, stepz: 2}]", "stepz"),
        ("settings: [{name: baseline, steps: 1}]", "name the setting otherwise"),
        ("settings: [{name: .., steps: 1}]", "name"),
    ],
)
def test_a_file_that_makes_no_sense_is_refused(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load_grid(str(grid(tmp_path, text)))


def test_what_is_no_file_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"give a \.yaml file, or draft steps as 1,2,3"):
        load_grid("K3")


def test_the_documented_template_is_a_valid_grid() -> None:
    found = load_grid(str(Path(__file__).resolve().parents[2] / "docs" / "grid-template.yaml"))
    assert [s.name for s in found.settings] == [
        "k2", "k3", "k3-graphs", "k3-p2p", "tree", "other-host",
    ]  # fmt: skip


def test_secrets_in_an_environment_reach_the_server_and_no_file() -> None:
    environment = {"HF_TOKEN": "s3cret", "NCCL_P2P_LEVEL": "PHB"}
    found = Grid(
        baseline=ServerSpec(environment=environment),
        settings=(Setting(name="a", steps=1, environment=environment),),
    )
    assert found.settings[0].environment == environment
    for written in (found.model_dump_json(), found.settings[0].model_dump_json()):
        assert "s3cret" not in written
        assert "HF_TOKEN" in written
        assert "PHB" in written
