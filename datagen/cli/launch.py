"""`datagen launch`: prints or starts a profile's server, and proves that its environment arrived."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from datagen.cli.app import app, err, out
from datagen.target.direct import open_directly

if TYPE_CHECKING:
    from datagen.target.launch import Recipe

STOP_S = 30.0


@app.command(context_settings={"ignore_unknown_options": True})
def launch(
    target: Annotated[str, typer.Argument(help="A profile by name, or its .yaml.")],
    extra: Annotated[
        list[str] | None, typer.Argument(help="Further flags of the server, after --.")
    ] = None,
    role: Annotated[str, typer.Option(help="generate, capture or evaluate.")] = "capture",
    print_only: Annotated[
        bool, typer.Option("--print", help="Show the command, start nothing.")
    ] = False,
    python: Annotated[str, typer.Option(help="Python of SGLang's environment.")] = "",
    host: Annotated[str, typer.Option(help="Address to bind.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to bind.")] = 30000,
    model_path: Annotated[str, typer.Option(help="Local checkpoint; else by its name.")] = "",
    spool_dir: Annotated[str, typer.Option(help="Where captures are published.")] = "",
    draft: Annotated[str, typer.Option(help="The drafter's directory, to evaluate.")] = "",
    start_s: Annotated[float, typer.Option(help="Patience until it answers.")] = 1800.0,
) -> None:
    """Start a target's server for a role; ends with it. Checks that its settings reached every process."""
    from datagen.capture.spool import default_spool
    from datagen.target.launch import launch_recipe
    from datagen.target.profile import load_profile

    recipe = launch_recipe(
        load_profile(target), role, python=python or sys.executable, host=host, port=port,
        spool_dir=Path(spool_dir) if spool_dir else default_spool(port),
        model_path=model_path, draft=draft, extra=tuple(extra or ()),
    )  # fmt: skip
    if print_only:
        out.print(recipe.shell_line(), highlight=False, soft_wrap=True, markup=False)
        return
    raise typer.Exit(_serve(recipe, f"http://{host}:{port}/health", start_s))


def _serve(recipe: Recipe, health: str, start_s: float) -> int:
    """Run the server in the foreground, pass signals on, and return its exit code."""
    from datagen.errors import ConfigError, ServiceFailed
    from datagen.target.launch import require_environment

    if _answers(health):
        raise ServiceFailed(
            "another server answers there already", where=health, fix="choose another --port"
        )
    server = subprocess.Popen(recipe.command, env=os.environ | recipe.environment)

    def pass_on(number: int, _: FrameType | None) -> None:
        server.send_signal(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, pass_on)
    deadline = time.monotonic() + start_s
    try:
        while not _answers(health):
            if server.poll() is not None:
                return server.returncode
            if time.monotonic() > deadline:
                raise ServiceFailed(f"no answer in {start_s:.0f} s", where=health)
            time.sleep(0.5)
        pids = require_environment(server.pid, recipe)
    except (ConfigError, ServiceFailed):
        _end(server)
        raise
    settings = ", ".join(recipe.environment) or "no settings"
    err.print(f"ready; {settings} reached process {', '.join(map(str, pids))}", highlight=False)
    return server.wait()


def _answers(health: str) -> bool:
    try:
        with open_directly(health, 30):
            return True
    except (urllib.error.URLError, OSError):
        return False


def _end(server: subprocess.Popen[bytes]) -> None:
    server.terminate()
    try:
        server.wait(STOP_S)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()
