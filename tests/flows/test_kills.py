"""SIGKILL of any process of ours at any moment, then the same command: the rows of an undisturbed run."""

from __future__ import annotations

import os
import random
import re
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from datagen.store.run_status import run_status
from tests.collect.harness import Bench, responses, rows_done, state_ids
from tests.flows.conftest import SLOW, Prefect, eventually, manifest_of, settings
from tests.tiny import serving

pytestmark = pytest.mark.prefect
VICTIMS = ("flow", "serve", "server")
LONG_FORM = [
    pytest.param(victim, seed, marks=pytest.mark.slow) for victim in VICTIMS for seed in (1, 2, 3)
]


@pytest.fixture(scope="module")
def undisturbed(prefect: Prefect, bench: Bench) -> Path:
    prefect.up()
    run = bench.folder / "never-killed"
    done = prefect.collect(**settings(bench, run, **SLOW))
    assert done["state_type"] == "COMPLETED", done["state"]["message"]
    return run


@pytest.fixture
def killable(prefect: Prefect) -> Iterator[Prefect]:
    prefect.up()
    yield prefect
    prefect.up()


def pid_of(victim: str, prefect: Prefect, run: Path) -> int:
    if victim == "flow":
        named = re.match(r"pid (\d+) ", (run / ".lock").read_text())
        assert named
        return int(named[1])
    return prefect.pid(prefect.flows if victim == "serve" else prefect.server)


@pytest.mark.parametrize(("victim", "seed"), [("flow", 0), *LONG_FORM])
def test_after_a_kill_the_same_command_gives_the_undisturbed_rows(
    killable: Prefect, bench: Bench, undisturbed: Path, tmp_path: Path, victim: str, seed: int
) -> None:
    prefect, run = killable, bench.folder / f"{victim}-killed-{seed}"
    given = settings(bench, run, **SLOW)
    planned = run_status(undisturbed).planned
    rows = random.Random(f"{victim}{seed}").randint(1, planned * 2 // 3)
    with ExitStack() as stack:
        first = given
        if victim == "flow":  # nobody else ends the run: it cannot end before the kill
            fault = f"stands_still:{rows}"
            still = serving(str(bench.checkpoint), tmp_path, fault=fault)
            first = {**given, "endpoints": stack.enter_context(still).url}
        prefect.start(**first)
        done = eventually(lambda: n if (n := rows_done(run)) >= rows else 0)
        os.kill(pid_of(victim, prefect, run), signal.SIGKILL)
    print(f"killed the {victim} process (seed {seed}) at row {done} of {planned}, drawn {rows}")
    assert 0 < done < planned, "between the first and the last row"
    if victim == "flow":
        assert manifest_of(run) is None

    prefect.up()
    again = prefect.collect(**given)
    assert again["state_type"] == "COMPLETED", again["state"]["message"]
    assert dict(responses(run)) == dict(responses(undisturbed))
    assert sorted(state_ids(run)) == sorted(state_ids(undisturbed)), "each row once, ids identical"
    checked = bench.verify(run.name)
    assert checked.returncode == 0, checked.stdout + checked.stderr
