"""The run card: its plots are drawn, its page needs nothing but itself, its figures are those measured."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from datagen.acceptance.breakeven import break_even
from datagen.errors import CorruptFile
from datagen.prompts.estimate import Speed
from datagen.report.card import run_card
from datagen.report.plots import Rule, Series, bar_plot, interval_plot, line_plot
from datagen.report.price import price
from datagen.report.render import as_html, as_markdown, write_report
from datagen.store.manifest import Manifest
from tests.drafter.run import tiny_target, write_run

SVG = "{http://www.w3.org/2000/svg}"
PROBE = """<script>
const found = [...document.querySelectorAll('svg.plot')].map(s => {
  const box = s.getBoundingClientRect();
  const marks = [...s.querySelectorAll('polyline, circle, rect')].filter(m => {
    const b = m.getBoundingClientRect();
    return b.width + b.height > 0 && b.left >= box.left - 1 && b.right <= box.right + 1;
  });
  return [box.width, box.height, marks.length, s.querySelectorAll('text').length];
});
document.body.dataset.plots = JSON.stringify(found);
</script>"""


def interval(value: float, n: int = 30) -> dict[str, Any]:
    return {"value": value, "low": value - 0.1, "high": value + 0.1, "n_prompts": n}


def evaluation(samples: int, accept_len: float, *, live: bool = False) -> dict[str, Any]:
    """An evaluation file as `datagen evaluate` writes it."""
    slices = {
        "source": {"chat": interval(2.0), "code": interval(2.4)},
        "tools": {"no": interval(2.1)},
    }
    content: dict[str, Any] = {
        "format": "datagen.evaluation.1", "created": f"2026-01-01T00:00:{samples // 1000:02d}",
        "drafter": {"path": "drafter/x", "sha256": "ab" * 32, "trained_samples": samples},
        "split": {"name": "heldout", "samples": 40, "prompts": 30, "prompts_sha256": "c" * 64,
                  "disjoint_from_training": "proven"},
        "replay": {"accept_len": interval(accept_len), "steps": 3, "verify_steps": 900,
                   "tokens": 1900, "conditional_acceptance": [0.7, 0.6, None],
                   "predicted_accept_len": 2.2, "looping_share": 0.02, "mean_distinct_4": 0.97,
                   "slices": slices, "seconds": 2.0, "dtype": "float32"},
        "break_even": break_even(baseline=82, cycle_ms=30, steps=3, targets=[150],
                                 measured=[(accept_len, 3)]).as_dict(),
        "verdict": {"answer": "does not pay", "sentence": f"No: {accept_len} <b>&", "next_step": "More."},
    }  # fmt: skip
    if live:
        speed = {"concurrency": 1, "baseline_tokens_per_s": 80.0, "speculative_tokens_per_s": 60.0,
                 "baseline_throughput": 80.0, "speculative_throughput": 60.0, "cycle_ms": 31.0,
                 "speedup": 0.75}  # fmt: skip
        content["live"] = {
            "servers": {"baseline": {"version": "1"}, "speculative": {"version": "1"}},
            "accept_len": interval(accept_len), "accept_len_raw": accept_len + 0.01,
            "speeds": [speed, {**speed, "concurrency": 8}], "same_outputs": 49,
            "different_outputs": ["a-0"],
        }  # fmt: skip
        content["live"] |= {
            "environments": {"baseline": {"NCCL_P2P_LEVEL": "SYS"}, "speculative": None},
            "slices": slices, "baseline_drift": 0.97,
        }  # fmt: skip
        content["break_even_by_batch"] = [
            break_even(baseline=b, cycle_ms=c, steps=3, batch=n).as_dict()
            for n, b, c in ((1, 82, 30), (8, 45, 52))
        ]
        content["grid"] = {
            "together": False, "best": [{"concurrency": 1, "name": "k2", "speedup": 0.75}],
            "settings": [
                {"name": "k2", "steps": 2, "topk": 1, "draft_tokens": 3,
                 "accept_len": interval(1.9), "replay_accept_len": interval(1.9),
                 "speeds": content["live"]["speeds"]},
                {"name": "tree", "steps": 3, "topk": 4, "draft_tokens": 8,
                 "accept_len": interval(2.3), "replay_accept_len": None, "speeds": [speed]},
                {"name": "dead", "error": "the server ended with 1: out of memory"},
            ],
        }  # fmt: skip
        content["parity"] = {"samples": 40, "replay_steps": 900, "live_steps": 901,
                             "differ": {"a-0": {"replay": 3, "live": 4}}}  # fmt: skip
    return content


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny run with evaluations of drafters trained on four sizes."""
    folder = tmp_path_factory.mktemp("report")
    manifest = write_run(folder / "run", tiny_target(folder), train=6, heldout=2)
    where = manifest.parent / "evaluation"
    where.mkdir()
    for n, value in ((10_000, 1.80), (20_000, 1.98), (37_000, 2.10), (83_000, 2.22)):
        text = json.dumps(evaluation(n, value, live=n == 83_000))
        (where / f"n{n}.json").write_text(text)
    return manifest.parent


def test_a_training_run_is_shown_with_its_curves_and_coverage(root: Path, tmp_path: Path) -> None:
    shutil.copytree(root, tmp_path / "run")
    made = tmp_path / "run" / "drafter" / "tuned"
    (made / "final").mkdir(parents=True)
    held = {"kind": "heldout", "predicted_accept_len": 1.25, "rows": 90, "best_constant": 0.04}
    records = [
        {**held, "step": 0, "predicted_accept_len": 1.0, "conditional_acceptance": [0.0, 0.0]},
        {"kind": "train", "step": 10, "loss": 4.5}, {"kind": "train", "step": 20, "loss": 3.25},
        {**held, "step": 20, "conditional_acceptance": [0.2, 0.25]},
    ]  # fmt: skip
    (made / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    unfinished = as_markdown(run_card(tmp_path / "run"))
    assert "Not finished" in unfinished
    settings = {"loss": "kl", "depths": 2, "decay": 0.8, "learning_rate": 1e-4, "batch_tokens": 64,
                "accumulate": 1, "ranks": 2}  # fmt: skip
    provenance = {
        "settings": settings, "samples": {"train": 6, "heldout": 2}, "init": {"kind": "fresh"},
        "step": 20, "vocab_sha256": "ab" * 32,
        "vocab_coverage": {"all": 0.98, "language:ja": 0.61, "source:chat": 0.99},
    }  # fmt: skip
    (made / "final" / "provenance.json").write_text(json.dumps(provenance))
    assert "| optimizer | adamw |" in as_markdown(run_card(tmp_path / "run")), "once the only one"
    settings["optimizer"] = "muon"
    (made / "final" / "provenance.json").write_text(json.dumps(provenance))
    text = as_markdown(run_card(tmp_path / "run"))
    for words in ("Drafter tuned: training", "| predicted_accept_len | 1.000 | 1.250 |",
                  "| 20 | 3.250 |", "| language:ja | 61.0% |",
                  "| optimizer | muon |", "| 20 | 0.200 | 0.250 |"):  # fmt: skip
        assert words in text, words
    assert "Not finished" not in text
    assert text.index("language:ja") < text.index("source:chat")
    (made / "metrics.jsonl").write_text("no record\n")
    with pytest.raises(CorruptFile, match="no training log"):
        run_card(tmp_path / "run")


def test_the_page_is_whole_by_itself(root: Path) -> None:
    page = as_html(run_card(root))
    assert "<script" not in page
    assert not re.findall(r'(?:src|href)="(?!data:)', page)
    assert "url(" not in page
    assert "@import" not in page
    assert "No: 2.22 &lt;b&gt;&amp;" in page, "text is escaped"


def test_every_plot_is_well_formed_and_has_marks_and_a_name(root: Path) -> None:
    plots = re.findall(r"<svg class=\"plot\".*?</svg>", as_html(run_card(root)), re.S)
    assert len(plots) >= 12
    for plot in plots:
        tree = ET.fromstring(plot)
        marks = [e for tag in ("polyline", "circle", "rect") for e in tree.iter(SVG + tag)]
        assert marks
        assert tree.find(SVG + "title") is not None
        assert "nan" not in plot.lower().replace("covenant", "")
        assert "inf" not in re.sub(r"<text.*?</text>|<title>.*?</title>", "", plot)


def test_markdown_has_the_figures_of_the_plots(root: Path) -> None:
    text = as_markdown(run_card(root))
    for words in ("2.220 [2.120, 2.320]", "| code |", "| 83,000 |", "75x".replace("75x", "0.75x"),
                  "unreachable", "Samples for break-even (2.46)", "TB of states and", "at this run's pace",
                  "accept_len_raw) 2.230", "901; 1 of 40 samples differ",
                  "| NCCL_P2P_LEVEL | SYS | unreadable |",
                  "| 8 | 45.0 | 52.0 | 2.34 |", "| dead | not measured: the server ended with 1",
                  "| tree | 3 / 4 / 8 | 1 | 2.300 [2.200, 2.400] | a tree has none |",
                  "last pass ran at 0.970x"):  # fmt: skip
        assert words in text, words
    assert "<svg" not in text


def test_the_newest_evaluation_gives_the_verdict(root: Path) -> None:
    assert run_card(root).verdict.startswith("No: 2.22")


def test_a_run_without_an_evaluation_says_what_to_do(tmp_path: Path) -> None:
    manifest = write_run(tmp_path / "run", tiny_target(tmp_path), train=2, heldout=1)
    html, markdown = write_report(manifest.parent)
    assert "No drafter has been evaluated yet" in html.read_text()
    assert "make finetune" in markdown.read_text()


def test_two_sizes_are_not_identifiable(root: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(root, run)
    for n in (10_000, 20_000):
        (run / "evaluation" / f"n{n}.json").unlink()
    assert "not identifiable: 2 training sizes" in as_markdown(run_card(run))


def test_a_broken_evaluation_is_named(root: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(root, run)
    (run / "evaluation" / "bad.json").write_text("{}")
    with pytest.raises(CorruptFile, match=r"bad\.json"):
        run_card(run)


def test_plots_of_one_point_of_equal_values_and_of_nothing() -> None:
    for plot in (
        line_plot("one", [Series("s", ((1.0, 2.0),), marked=True)], x="x", y="y"),
        line_plot("log", [Series("s", ((5.0, 2.0), (5.0, 2.0)))], x="x", y="y", log_x=True),
        interval_plot("i", [("a", 2.0, None, None)], x="x", rule=Rule("r", 2.0)),
        bar_plot("none", [], y="y"),
    ):
        ET.fromstring(plot)
        assert "nan" not in plot


def chromium() -> str:
    found = shutil.which("chromium") or shutil.which("google-chrome") or shutil.which("chrome")
    if found is None:
        pytest.skip("no headless Chromium on this machine")
    return found


def test_a_browser_draws_every_plot_without_a_console_error(root: Path, tmp_path: Path) -> None:
    page = as_html(run_card(root))
    file = tmp_path / "report.html"
    file.write_text(page.replace("</body>", PROBE + "</body>"))
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
             f"--user-data-dir={tmp_path / 'profile'}", "--enable-logging=stderr",
             "--window-size=900,4000"]  # fmt: skip

    def browser(*more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [chromium(), *flags, *more, file.as_uri()],
            capture_output=True, text=True, timeout=120, check=True,
        )  # fmt: skip

    shot = tmp_path / "report.png"
    seen = browser("--dump-dom")
    assert "CONSOLE" not in seen.stderr, seen.stderr
    plots = json.loads(re.findall(r'data-plots="([^"]*)"', seen.stdout)[0].replace("&quot;", '"'))
    assert len(plots) == page.count('<svg class="plot"') >= 14
    for width, height, marks, texts in plots:
        assert width > 300
        assert height > 60
        assert marks >= 1
        assert texts >= 3
    browser(f"--screenshot={shot}")
    assert shot.read_bytes()[:4] == b"\x89PNG"
    assert shot.stat().st_size > 20_000, "not a blank page"


def test_more_data_is_priced_by_the_speed_of_servers(root: Path) -> None:
    """8 samples: hours are (generated / 100 + captured / 1000) seconds of each, on two servers."""
    manifest = Manifest.load(root / "manifest.json")
    splits = manifest.splits.values()
    generated, captured = (sum(getattr(s, f"tokens_{n}") for s in splits)
                           for n in ("generated", "captured"))  # fmt: skip
    found = price(80_000, root, manifest, Speed(100.0, 1000.0, 8, 2))
    hours = (generated / 100 + captured / 1000) * 10_000 / 3600 / 2
    assert found.hours == pytest.approx(hours)
    assert found.gpu_hours == pytest.approx(hours * 16)
    assert found.stored_bytes == pytest.approx(manifest.stored_bytes * 10_000)
    text = as_markdown(run_card(root, Speed(100.0, 1000.0, 8, 2)))
    assert "at 100 generated and 1,000 captured tokens/s on 2 servers" in text
