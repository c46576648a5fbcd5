"""How a profile's server is started for a role, and proof that its environment arrived.

Settings in the environment (NCCL's, the plugin's) are read by SGLang's scheduler processes. A launcher
that loses them on the way loses them without an error, so they are read back from
/proc/<pid>/environ of every scheduler, on this host.
"""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from datagen.errors import ConfigError
from datagen.target.profile import Profile

Role = Literal["generate", "capture", "evaluate"]
SCHEDULER = "sglang::scheduler"  # the title every scheduler process gives itself
PROC = Path("/proc")
EXEC_S = 10.0  # a busy machine may leave a process that starts standing for seconds


@dataclass(frozen=True, slots=True)
class Recipe:
    """A command, and what its environment holds beyond the caller's."""

    command: tuple[str, ...]
    environment: dict[str, str]
    schedulers: int
    """Processes that must see the environment; 0: the server is one process."""

    def shell_line(self) -> str:
        """For a person to read and paste."""
        settings = [f"{k}={shlex.quote(v)}" for k, v in self.environment.items()]
        return " ".join(["env", *settings, shlex.join(self.command)])


def launch_recipe(
    profile: Profile,
    role: str,
    *,
    python: str,
    host: str,
    port: int,
    spool_dir: Path,
    model_path: str = "",
    draft: str = "",
    extra: tuple[str, ...] = (),
) -> Recipe:
    """The server of `profile` in `role`. `python`: of the environment in which SGLang is installed.

    Raises ConfigError for a role that the profile does not describe, or a missing drafter.
    """
    if role not in get_args(Role):
        raise ConfigError(f"unknown role '{role}'", fix=f"use --role {', '.join(get_args(Role))}")
    ours = (
        {
            "DATAGEN_CAPTURE_DIR": str(spool_dir),
            "DATAGEN_CAPTURE_BOUNDARIES": ",".join(map(str, profile.boundaries)),
            "SGLANG_PLUGINS": "datagen_capture",
        }
        if role == "capture"
        else {}
    )
    if profile.embedded:
        return _embedded(
            profile, role, python, host, port, spool_dir, ours, model_path, draft, extra
        )
    described = getattr(profile.launch, role)
    if described is None:
        raise ConfigError(
            f"the profile says nothing of a server to {role}",
            where=profile.name,
            fix=f"add launch.{role} to it (docs/target-template.yaml shows how)",
        )
    lines = [*profile.launch.arguments, *described.arguments]
    if any("{draft}" in line for line in lines) and not draft:
        raise ConfigError(
            f"a server to {role} needs a drafter",
            where=profile.name,
            fix="give its directory with --draft" + _published(profile),
        )
    arguments = [word.replace("{draft}", draft) for line in lines for word in shlex.split(line)]
    command = [
        python, "-m", "sglang.launch_server", "--model-path", model_path or profile.model,
        "--host", host, "--port", str(port), *arguments, *extra,
    ]  # fmt: skip
    environment = {
        **profile.launch.environment,
        **described.environment,
        **ours,
        # a process title written over the environment would hide it from /proc/<pid>/environ
        "SPT_NOENV": "1",
    }
    return Recipe(tuple(command), environment, max(profile.launch.gpus, 1))


def _embedded(
    profile: Profile,
    role: str,
    python: str,
    host: str,
    port: int,
    spool_dir: Path,
    ours: dict[str, str],
    model_path: str,
    draft: str,
    extra: tuple[str, ...],
) -> Recipe:
    if role == "evaluate" and not draft:
        raise ConfigError(
            "a server to evaluate needs a drafter",
            where=profile.name,
            fix="give its directory with --draft",
        )
    which = ["--target", model_path or profile.name]
    if model_path:
        which += ["--boundaries", ",".join(map(str, profile.boundaries))]
    drafting = ["--drafter", draft] if role == "evaluate" else []
    command = [
        python, "-m", "datagen.cli", "serve", *which, "--host", host, "--port", str(port),
        "--spool-dir", str(spool_dir), *drafting, *extra,
    ]  # fmt: skip
    return Recipe(tuple(command), {k: v for k, v in ours.items() if k != "SGLANG_PLUGINS"}, 0)


def _published(profile: Profile) -> str:
    return f"; published: {', '.join(profile.init_drafters)}" if profile.init_drafters else ""


def descendants(root: int) -> list[int]:
    """Process ids below `root`, itself first; those that end meanwhile are left out."""
    children: dict[int, list[int]] = {}
    for entry in PROC.iterdir():
        if entry.name.isdigit():
            try:
                parent = int(_stat(int(entry.name))[1])
            except OSError:
                continue
            children.setdefault(parent, []).append(int(entry.name))
    found, waiting = [], [root]
    while waiting:
        pid = waiting.pop()
        found.append(pid)
        waiting += children.get(pid, [])
    return found


def scheduler_pids(root: int) -> list[int]:
    """The scheduler processes of the SGLang server whose first process is `root`."""

    def title(pid: int) -> bytes:
        try:
            return (PROC / str(pid) / "cmdline").read_bytes()
        except OSError:
            return b""

    return [p for p in descendants(root) if title(p).startswith(SCHEDULER.encode())]


def process_environment(pid: int) -> dict[str, str]:
    """What process `pid` was started with, by name. Raises OSError.

    A process that is becoming another program reads as one without an environment, for as long as the
    kernel loads that program: what was empty then is read again, for `EXEC_S` at most.
    """
    deadline = time.monotonic() + EXEC_S
    while True:
        loading = _is_loading(pid)
        raw = (PROC / str(pid) / "environ").read_bytes()
        if raw or not loading or time.monotonic() > deadline:
            break
        time.sleep(0.005)
    pairs = (item.partition("=") for item in os.fsdecode(raw).split("\0") if item)
    return {name: value for name, _, value in pairs}


def _is_loading(pid: int) -> bool:
    """Whether the kernel has yet to say where the environment of `pid` ends."""
    return _stat(pid)[48] == b"0"  # env_end, the 51st field of proc(5)


def _stat(pid: int) -> list[bytes]:
    """The fields of /proc/<pid>/stat from the third on; the name before them may be any bytes."""
    return (PROC / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()


def missing_settings(pid: int, wanted: Mapping[str, str]) -> dict[str, str | None]:
    """The wanted settings that process `pid` was not started with, and what it has instead.

    Raises ConfigError when its environment cannot be read.
    """
    try:
        has = process_environment(pid)
    except OSError as e:
        raise ConfigError(
            f"the environment of process {pid} cannot be read: {e.strerror}",
            fix="run this as the user who runs the server, on its host",
        ) from e
    return {k: has.get(k) for k, v in wanted.items() if has.get(k) != v}


def require_environment(root: int, recipe: Recipe) -> list[int]:
    """Prove that every computing process of a running server has its settings; returns their ids.

    Raises ConfigError naming the process and the settings that did not arrive.
    """
    pids = scheduler_pids(root) if recipe.schedulers else [root]
    if len(pids) < recipe.schedulers:
        raise ConfigError(
            f"{len(pids)} scheduler processes run on this host, {recipe.schedulers} expected",
            where=f"process {root}",
            fix="correct launch.gpus in the profile; with several hosts run this on each",
        )
    for pid in pids:
        missing = missing_settings(pid, recipe.environment)
        if missing:
            shown = ", ".join(
                f"{k}={recipe.environment[k]} (there: {v or 'unset'})" for k, v in missing.items()
            )
            raise ConfigError(
                f"settings did not reach the server's process {pid}: {shown}",
                fix="start it from this command, without a wrapper that clears the environment",
            )
    return pids
