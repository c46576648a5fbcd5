"""A pytest plugin: prints every skip with its reason; in CI, a skip that is not allowed fails the run.

`tests/allowed_skips.txt` has one line per allowed skip, `<node id pattern> | <reason pattern>`, with
shell wildcards.
"""

from __future__ import annotations

import os
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

ALLOWED = "tests/allowed_skips.txt"
Skip = tuple[str, str]
_skips: list[Skip] = []


def read_allowed(path: Path) -> list[Skip]:
    """(node id pattern, reason pattern) of each line; `#` begins a comment line."""
    if not path.exists():
        return []
    lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    pairs = [line.partition("|") for line in lines if line and not line.startswith("#")]
    return [(node.strip(), reason.strip()) for node, _, reason in pairs]


def unlisted(skips: list[Skip], allowed: list[Skip]) -> list[Skip]:
    """The skips that no line allows."""
    return [
        (node, reason)
        for node, reason in skips
        if not any(fnmatchcase(node, n) and fnmatchcase(reason, r) for n, r in allowed)
    ]


def _record(report: pytest.TestReport | pytest.CollectReport) -> None:
    if report.skipped and not hasattr(report, "wasxfail"):
        text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        _skips.append((report.nodeid, text.removeprefix("Skipped: ")))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _record(report)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    _record(report)


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    forbidden = unlisted(_skips, read_allowed(session.config.rootpath / ALLOWED))
    if os.environ.get("CI") and forbidden and session.exitstatus in (0, 5):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    if not _skips:
        return
    forbidden = unlisted(_skips, read_allowed(config.rootpath / ALLOWED))
    terminalreporter.section("skipped tests")
    for skip in _skips:
        mark = "NOT ALLOWED" if skip in forbidden else "allowed"
        terminalreporter.write_line(f"{mark}: {skip[0]}: {skip[1]}")
    if forbidden:
        verdict = "fails" if os.environ.get("CI") else "would fail in CI"
        terminalreporter.write_line(
            f"{len(forbidden)} skips are not in {ALLOWED}: the run {verdict}", red=True
        )
