"""Starts the servers of a live measurement and of a grid, measures, and sets each beside break-even."""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from datagen.acceptance.breakeven import MOST_STEPS, break_even, within_chain
from datagen.acceptance.grid import Grid, ServerSpec, Setting
from datagen.acceptance.live import BASELINE, SPECULATIVE, LiveReport, Speed, Visit, live_report
from datagen.acceptance.metrics import Interval
from datagen.acceptance.ports import free_port
from datagen.acceptance.servers import launched
from datagen.acceptance.sitting import Sitting
from datagen.acceptance.stopping import Stop, never, run_until
from datagen.acceptance.verdict import Verdict, judged
from datagen.errors import DatagenError, Interrupted, MeasurementError
from datagen.evaluate.config import EMBEDDED, EvaluateConfig
from datagen.evaluate.subject import Notify
from datagen.store.atomic import make_directory
from datagen.target.launch import launch_recipe
from datagen.target.profile import Profile

Replayed = Callable[[int], Interval]
LOCAL = "127.0.0.1"


@contextlib.contextmanager
def servers(
    config: EvaluateConfig, profile: Profile, stop: Stop = never
) -> Iterator[tuple[str, str]]:
    """URLs without and with the drafter: as given, or the embedded target started twice."""
    if config.live != EMBEDDED:
        yield str(config.baseline_url), str(config.live)
        return
    if not profile.embedded:
        raise MeasurementError(
            f"{profile.name} is not the embedded target", where=config.manifest,
            fix="give --live and --baseline-url, or a --grid of servers to start",
        )  # fmt: skip
    chain = Grid(settings=(Setting(name="live", steps=config.steps),))
    with tempfile.TemporaryDirectory() as folder:
        start = _Starter(chain, config, profile, Path(folder), stop)
        with start.baseline() as plain, start.drafting(start.grid.settings[0]) as drafting:
            yield plain, drafting


def break_evens(
    speeds: Sequence[Speed], steps: int, accept_len: float, targets: Sequence[float]
) -> list[dict[str, Any]]:
    """The arithmetic at every concurrency of a sitting, whose cycle times and baselines differ."""
    return [
        break_even(
            baseline=s.baseline_tokens_per_s, cycle_ms=s.cycle_ms, steps=steps, targets=targets,
            measured=[(within_chain(accept_len, steps), steps)], batch=s.concurrency,
        ).as_dict()
        for s in speeds
    ]  # fmt: skip


def measured_grid(
    config: EvaluateConfig, profile: Profile, sitting: Sitting, replayed: Replayed, notify: Notify,
    stop: Stop = never,
) -> dict[str, Any]:  # fmt: skip
    """Every setting beside the baseline, and which is best at each concurrency.

    A setting that cannot be measured is kept with its reason. Raises MeasurementError when none can,
    Interrupted once `stop` says so; no server is left.
    """
    assert config.grid is not None
    with tempfile.TemporaryDirectory() as folder:
        start = _Starter(config.grid, config, profile, Path(folder), stop)
        reports = dict(_together(start, sitting) if config.grid.together
                       else _in_turn(start, sitting, notify))  # fmt: skip
    rows: list[dict[str, Any]] = []
    for setting in config.grid.settings:
        found = reports[setting.name]
        if isinstance(found, DatagenError):
            notify(f"{setting.name}: not measured: {found}")
            rows.append({"name": setting.name, "error": str(found)})
            continue
        rows.append(_row(setting, found, replayed, config.targets))
        notify(f"{setting.name}: accept_len {found.accept_len}, " + ", ".join(
            f"{s.speedup:.2f}x at {s.concurrency}" for s in found.speeds))  # fmt: skip
    best = _best({n: r for n, r in reports.items() if isinstance(r, LiveReport)})
    if not best:
        raise MeasurementError(
            f"no setting of the grid could be measured; the first: {rows[0]['error']}",
            fix="start one by hand with `datagen launch --role evaluate`",
        )
    return {
        "together": config.grid.together, "settings": rows, "best": best,
        "verdict": _verdict(reports, best[0]),
    }  # fmt: skip


class _Starter:
    """Starts the servers of a grid, or names those that run.

    Their logs stay in evaluation/<name>.logs; `folder` is for spools, and goes.
    """

    def __init__(
        self, grid: Grid, config: EvaluateConfig, profile: Profile, folder: Path, stop: Stop
    ) -> None:
        self.stop = stop
        self.grid, self._config, self._profile, self._spools = grid, config, profile, folder
        self._logs = config.manifest.parent / "evaluation" / f"{config.name}.logs"
        self._common: list[str] = []
        if (
            profile.embedded
        ):  # in float32 the engine pads every decode to this, slowing the baseline
            most = str(max(config.concurrencies))
            self._common = ["--dtype", config.live_dtype, "--max-running-requests", most]

    def baseline(self) -> contextlib.AbstractContextManager[str]:
        """The server without the drafter."""
        return self._server(BASELINE, self.grid.baseline, "generate", [])

    def drafting(self, setting: Setting) -> contextlib.AbstractContextManager[str]:
        """The server of a setting."""
        if not self._profile.embedded or setting.url is not None:
            flags = setting.flags() if setting.url is None else []
        elif setting.topk > 1:
            raise MeasurementError(
                f"setting '{setting.name}': the embedded target drafts chains, topk {setting.topk} "
                "is a tree", fix="measure trees on SGLang",
            )  # fmt: skip
        else:
            flags = ["--draft-steps", str(setting.steps)]
        return self._server(setting.name, setting, "evaluate", flags)

    @contextlib.contextmanager
    def _server(self, name: str, spec: ServerSpec, role: str, flags: list[str]) -> Iterator[str]:
        if spec.url is not None:
            yield spec.url
            return
        port = free_port()
        make_directory(self._logs)
        recipe = launch_recipe(
            self._profile, role, python=self.grid.python or sys.executable, host=LOCAL, port=port,
            spool_dir=self._spools / name, model_path=self.grid.model_path,
            draft=str(self._config.drafter.resolve()) if role == "evaluate" else "",
            extra=(*self._common, *flags, *spec.arguments),
        )  # fmt: skip
        with launched(
            recipe.command, f"http://{LOCAL}:{port}", log=self._logs / f"{name}.log",
            start_s=self.grid.start_s, environment=recipe.environment | spec.environment,
            stop=self.stop,
        ) as url:  # fmt: skip
            yield url


def _together(start: _Starter, sitting: Sitting) -> Iterator[tuple[str, LiveReport | DatagenError]]:
    """The baseline stays up; each setting takes turns with it."""
    with start.baseline() as plain:
        for setting in start.grid.settings:
            try:
                with start.drafting(setting) as drafting:
                    yield setting.name, run_until(start.stop, sitting.both(plain, drafting))
            except Interrupted:
                raise
            except DatagenError as e:
                yield setting.name, e


def _in_turn(
    start: _Starter, sitting: Sitting, notify: Notify
) -> Iterator[tuple[str, LiveReport | DatagenError]]:
    """One server at a time: the baseline before and after every setting."""

    def visit(name: str, server: contextlib.AbstractContextManager[str]) -> Visit:
        with server as url:
            return run_until(start.stop, sitting.one(name, url))

    before = visit(BASELINE, start.baseline())
    for setting in start.grid.settings:
        try:
            drafting = visit(SPECULATIVE, start.drafting(setting))
            after = visit(BASELINE, start.baseline())
            report = live_report([before, drafting, after])
        except Interrupted:
            raise
        except DatagenError as e:
            yield setting.name, e
            continue
        notify(f"{setting.name}: the baseline drifted by {report.baseline_drift or 1:.3f}x")
        before = after
        yield setting.name, report


def _row(
    setting: Setting, report: LiveReport, replayed: Replayed, targets: Sequence[float]
) -> dict[str, Any]:
    served = report.servers[SPECULATIVE]
    steps = int(served.get("speculative_num_steps") or setting.steps or 1)
    topk = int(served.get("speculative_eagle_topk") or setting.topk)
    value = report.accept_len.value
    return {
        "name": setting.name, "steps": steps, "topk": topk,
        "draft_tokens": served.get("speculative_num_draft_tokens"),
        "arguments": list(setting.arguments), "environment": setting.model_dump()["environment"],
        **report.as_dict(),
        # a tree's states of the branches that were not taken do not exist: it has no replay
        "replay_accept_len": asdict(replayed(steps)) if topk == 1 and steps <= MOST_STEPS else None,
        "break_even_by_batch": break_evens(report.speeds, steps, value, targets) if topk == 1 else [
            {"batch": s.concurrency, "baseline": s.baseline_tokens_per_s, "cycle_ms": s.cycle_ms,
             "needed": s.baseline_tokens_per_s * s.cycle_ms / 1000} for s in report.speeds],
    }  # fmt: skip


def _best(reports: dict[str, LiveReport]) -> list[dict[str, Any]]:
    """Per concurrency the setting with the highest speedup."""
    found: dict[int, tuple[float, str]] = {}
    for name, report in reports.items():
        for s in report.speeds:
            found[s.concurrency] = max(found.get(s.concurrency, (0.0, "")), (s.speedup, name))
    return [
        {"concurrency": c, "name": name, "speedup": speedup}
        for c, (speedup, name) in sorted(found.items())
    ]


def _verdict(reports: dict[str, LiveReport | DatagenError], best: dict[str, Any]) -> Verdict:
    """Of the best setting at the lowest concurrency."""
    report = reports[best["name"]]
    assert isinstance(report, LiveReport)
    steps = int(report.servers[SPECULATIVE].get("speculative_num_steps") or 1)
    said = judged(report.accept_len, steps=steps, measured=report.speeds[0])
    return Verdict(said.answer, f"{said.sentence} Setting '{best['name']}'.", said.next_step)
